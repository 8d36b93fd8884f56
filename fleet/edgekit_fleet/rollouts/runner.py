"""The manager's turn on rollouts: reads what devices answered, decides, and writes what they shall run.

All that counts stands in the audit log before it counts, in the transaction of what it changes. So a manager
that is killed anywhere goes on from the log as if nothing had happened.
"""

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sqlalchemy import and_, bindparam, or_, select, update
from sqlalchemy.orm import Session

from edgekit_fleet.rollouts.cohort import join_cohort
from edgekit_fleet.rollouts.decide import decide
from edgekit_fleet.rollouts.gates import Fault, measure
from edgekit_fleet.rollouts.preview import preview
from edgekit_fleet.rollouts.progress import (
    Answered,
    Decision,
    Entry,
    Joined,
    Member,
    Outcome,
    Progress,
    Started,
    apply,
    begin,
    entry_from_plain,
    entry_to_plain,
)
from edgekit_fleet.rollouts.selector import parse_selector
from edgekit_fleet.rollouts.views import read_before, read_devices, read_packages
from edgekit_fleet.store import audit
from edgekit_fleet.store.tables import (
    AuditRow,
    DesiredRow,
    DeviceRow,
    ExecutionRow,
    FigureRow,
    MemberRow,
    ReleasePackageRow,
    RolloutRow,
    WantedModelRow,
)
from edgekit_runtime.agent.documents import ENDED, DeltaOffer, DesiredModel, ModelFigures
from edgekit_runtime.dataclass_json import from_plain, to_plain

OPEN_STATES: Final = ("running", "paused", "returning")
"""States of rollouts that still decide; `returning` was ordered to roll back after its end."""
_ACTION: Final = "rollout.log"
_CRASHES: Final = 3
_JOIN_S: Final = 10.0
_HOUR_S: Final = 3600.0
_DEVICES_PER_S: Final = 2000
_MOST_CONTROLS: Final = 20
_FAULT_CODES: Final[dict[str, Fault]] = {"not-finite": "not-finite", "crash-loop": "crash-loop"}


def log_entries(session: Session, rollout: str, actor: str, entries: Iterable[Entry], now: float) -> None:
    """Write entries to the audit log, in the transaction of `session`."""
    plain = [entry_to_plain(entry) for entry in entries]
    if plain:
        written = audit.AuditEntry(action=_ACTION, subject=rollout, detail={"entries": plain})
        audit.append(session, actor, [written], now)


def read_entries(session: Session, rollout: str, after: int = 0) -> list[tuple[int, float, Entry]]:
    """Return (number of the audit row, time, entry) of a rollout, in their order."""
    rows = session.execute(
        select(AuditRow.number, AuditRow.at, AuditRow.detail)
        .where(AuditRow.subject == rollout, AuditRow.action == _ACTION, AuditRow.number > after)
        .order_by(AuditRow.number)
    )
    return [
        (number, at, entry_from_plain(plain)) for number, at, detail in rows for plain in detail["entries"]
    ]


@dataclass(slots=True)
class _Known:
    """What the runner remembers of an open rollout; it can all be read again."""

    progress: Progress
    seen: int
    observed_at: float = 0.0
    joined_at: float = 0.0
    has_pending: bool = True
    decided_at: float = 0.0
    has_news: bool = True
    packages: dict[tuple[str, str], ReleasePackageRow] = field(default_factory=dict)


class RolloutRunner:
    """Carries rollouts out; `turn` is what the manager's loop calls."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def turn(self, session: Session, now: float) -> None:
        """Decide on every open rollout.

        Args:
            session: a transaction.
            now: seconds since 1970.
        """
        try:
            rows = session.scalars(select(RolloutRow).where(RolloutRow.state.in_(OPEN_STATES))).all()
            for name in self._known.keys() - {row.name for row in rows}:
                del self._known[name]
            for row in rows:
                self._run(session, row, now)
        except BaseException:
            self._known.clear()  # the transaction is undone: what it logged did not happen
            raise

    def _run(self, session: Session, row: RolloutRow, now: float) -> None:
        known = self._follow_log(session, row)
        if known.progress.settings.is_dynamic and now - known.joined_at >= _JOIN_S:
            known.joined_at = now
            self._log(session, row, known, _join(session, row, known), now)
        ended = list(_observe_executions(session, row.name, known))
        self._log(session, row, known, ended, now)
        known.has_pending = any(one.state == "pending" for one in known.progress.members.values())
        # Figures of a device count from its success on, and may have come with it or before it.
        fresh = [answer.device for answer in ended if answer.outcome == "succeeded"]
        self._log(session, row, known, list(_observe_figures(session, row.name, known, fresh)), now)
        known.observed_at = now
        # Without news only the time can change a decision: a large rollout is not weighed twice a second.
        pause_s = len(known.progress.members) / _DEVICES_PER_S
        if not known.has_news and now - known.decided_at < pause_s:
            return
        known.has_news, known.decided_at = False, now
        while (decision := decide(known.progress, now)) is not None:
            if decision.action == "wait" or (decision.action == "ask" and decision == known.progress.last):
                _update(row, "because", decision.sentence)
                break
            self._log(session, row, known, [decision], now)
            _carry_out(session, row, known, decision, now)
        state = known.progress.state
        if state != row.state:
            row.state = state
        if state in ("succeeded", "aborted") and row.ended_at is None:
            row.ended_at = now

    def _follow_log(self, session: Session, row: RolloutRow) -> _Known:
        """Return what is known, with what others wrote to the log meanwhile."""
        known = self._known.get(row.name)
        for number, at, entry in read_entries(session, row.name, 0 if known is None else known.seen):
            if known is None:
                if not isinstance(entry, Started):
                    raise TypeError(f"the log of rollout '{row.name}' does not begin with its start")
                known = _Known(begin(entry, at), number)
            else:
                apply(known.progress, entry, at)
                known.seen, known.has_news = number, True
        if known is None:
            raise LookupError(f"rollout '{row.name}' has no log")
        if not known.packages:
            rows = session.scalars(select(ReleasePackageRow).where(ReleasePackageRow.release == row.release))
            known.packages = {(each.target, each.model): each for each in rows}
        self._known[row.name] = known
        return known

    def _log(self, session: Session, row: RolloutRow, known: _Known, entries: list[Any], now: float) -> None:
        if not entries:
            return
        log_entries(session, row.name, "manager", entries, now)
        known.seen = session.scalars(select(AuditRow.number).order_by(AuditRow.number.desc()).limit(1)).one()
        known.has_news = True
        changed = []
        for entry in entries:
            apply(known.progress, entry, now)
            if isinstance(entry, Answered) and entry.outcome is not None:
                changed.append({"b_device": entry.device, "b_state": entry.outcome, "b_because": entry.code})
        if changed:
            table = MemberRow.__table__
            session.connection().execute(
                update(table)  # type: ignore[arg-type]
                .where(table.c.rollout == row.name, table.c.device == bindparam("b_device"))
                .values(state=bindparam("b_state"), because=bindparam("b_because"), answered_at=now),
                changed,
            )


def execution_name(rollout: str, device: str, model: str, attempt: int) -> str:
    """Return the name of an attempt; it fits the column whatever the others' lengths."""
    digest = hashlib.sha256(f"{rollout}\0{device}\0{model}\0{attempt}".encode()).hexdigest()
    return f"{rollout[:64]}.{attempt}.{digest[:24]}"


def _update(row: RolloutRow, name: str, value: object) -> None:
    if getattr(row, name) != value:
        setattr(row, name, value)


# What devices answered


def _observe_executions(session: Session, rollout: str, known: _Known) -> Iterable[Answered]:
    changed = session.scalars(
        select(ExecutionRow.device)
        .where(
            ExecutionRow.rollout == rollout,
            ExecutionRow.state.in_(sorted(ENDED)),
            ExecutionRow.changed_at >= known.observed_at,
        )
        .distinct()
    ).all()
    names = {}
    for device in changed:
        member = known.progress.members.get(device)
        if member is not None and member.state == "started":
            models = [model for target, model in known.packages if target == member.device_class]
            names[device] = [execution_name(rollout, device, model, member.attempts) for model in models]
    wanted = [name for each in names.values() for name in each]
    found: dict[str, ExecutionRow] = {}
    for begin_at in range(0, len(wanted), 500):
        some = wanted[begin_at : begin_at + 500]
        executions = session.scalars(select(ExecutionRow).where(ExecutionRow.execution.in_(some)))
        found.update((row.execution, row) for row in executions)
    for device, of_device in names.items():
        rows = [found[name] for name in of_device if name in found]
        if any(row.state not in ENDED for row in rows):
            continue
        outcome, code = _sum_up(rows)
        yield Answered(device=device, outcome=outcome, code=code, fault=_FAULT_CODES.get(code, ""))


def _sum_up(rows: Iterable[ExecutionRow]) -> tuple[Outcome, str]:
    """Return what the executions of all models of a device come to."""
    worst: tuple[Outcome, str] = ("succeeded", "")
    for row in rows:
        if row.state in ("failed", "timed_out"):
            return "failed", row.code or ("timeout" if row.state == "timed_out" else "")
        if row.state in ("refused", "superseded"):
            worst = ("refused" if row.state == "refused" else "superseded"), row.code
    return worst


def _observe_figures(
    session: Session, rollout: str, known: _Known, fresh: Sequence[str]
) -> Iterable[Answered]:
    progress = known.progress
    versions = {package.version for package in known.packages.values()}
    rows = session.scalars(
        select(FigureRow)
        .join(MemberRow, (MemberRow.device == FigureRow.device) & (MemberRow.rollout == rollout))
        .where(
            FigureRow.version.in_(versions),
            or_(
                # The hour leads to the rows by the index.
                and_(
                    FigureRow.hour >= int(known.observed_at // _HOUR_S),
                    FigureRow.reported_at >= known.observed_at,
                ),
                FigureRow.device.in_(fresh),
            ),
        )
    )
    of_device: dict[str, list[FigureRow]] = {}
    for row in rows:
        member = progress.members.get(row.device)
        if member is not None and member.state == "succeeded" and row.reported_at >= member.started_at:
            of_device.setdefault(row.device, []).append(row)
    for device, figures in of_device.items():
        member = progress.members[device]
        sample = member.sample
        fault: Fault = ""
        measures: dict[str, float] = {}
        for row in figures:
            package = known.packages.get((member.device_class, row.model))
            if package is None or package.version != row.version:
                continue
            after = from_plain(ModelFigures, row.figures, device)
            if after.restarts >= _CRASHES:
                fault = "crash-loop"
            is_suspect = after.not_finite > 0 and not (sample is not None and sample.fault)
            if is_suspect and not _was_not_finite(session, known, member, row):
                fault = "not-finite"
            is_measured = sample is not None and bool(sample.measures)
            if after.requests >= progress.settings.limits.min_requests and not is_measured:
                pair = _find_before(session, known, (device, member.device_class, row.model), row.version)
                for name, value in measure(pair[0], after, pair[1]).items():
                    measures[name] = max(value, measures.get(name, value))
        if sample is not None and sample.fault:
            fault = ""
        if fault or measures:
            yield Answered(device=device, fault=fault, measures=measures)


def _was_not_finite(session: Session, known: _Known, member: Member, row: FigureRow) -> bool:
    """Return whether the version before answered NaN or infinity on this device too."""
    before, _ = _find_before(session, known, (row.device, member.device_class, row.model), row.version)
    return before is not None and before.not_finite > 0


def _find_before(
    session: Session, known: _Known, place: tuple[str, str, str], version: str
) -> tuple[ModelFigures | None, list[tuple[ModelFigures, ModelFigures]]]:
    """Return the figures of the version before `version`, and (then, now) on devices that still run it.

    The row of an hour is replaced by each report, also by those that come while the new version is fetched.
    """
    device, device_class, model = place
    rows = session.scalars(
        select(FigureRow)
        .where(FigureRow.device == device, FigureRow.model == model, FigureRow.version != version)
        .order_by(FigureRow.reported_at.desc())
        .limit(1)
    ).all()
    if not rows:
        return None, []
    before = rows[0]
    pending = (
        name
        for name, member in known.progress.members.items()
        if member.state == "pending" and member.device_class == device_class
    )
    others = list(itertools.islice(pending, _MOST_CONTROLS)) if known.has_pending else []
    pairs = []
    for other in others:
        found = session.scalars(
            select(FigureRow)
            .where(
                FigureRow.device == other,
                FigureRow.model == model,
                FigureRow.version == before.version,
                FigureRow.hour >= before.hour,
            )
            .order_by(FigureRow.hour)
        ).all()
        if len(found) > 1:
            pairs.append((_read_figures(found[0]), _read_figures(found[-1])))
    return _read_figures(before), pairs


def _read_figures(row: FigureRow) -> ModelFigures:
    return from_plain(ModelFigures, row.figures, row.device)


# What devices shall run


def _join(session: Session, row: RolloutRow, known: _Known) -> list[Entry]:
    """Add devices that match the selector only now; returns what is to be logged."""
    members = known.progress.members
    models = frozenset(model for _, model in known.packages)
    found = read_devices(session, parse_selector(row.selector), models)
    new = {view.name: view for view in found if view.name not in members}
    planned, _ = preview(new.values(), read_packages(session, row.release))
    classes = {one.device: one.target for one in planned}
    devices = join_cohort(row.name, (), classes)
    if not devices:
        return []
    before = read_before(session, [new[device] for device in devices], models)
    wave = len(known.progress.settings.waves) - 1
    for device in devices:
        member = session.get(MemberRow, (row.name, device)) or MemberRow(rollout=row.name, device=device)
        member.wave, member.state, member.before = wave, "waiting", before.get(device, {})
        session.add(member)
    session.flush()
    return [Joined(devices=devices, classes=tuple(classes[device] for device in devices))]


def _carry_out(session: Session, row: RolloutRow, known: _Known, decision: Decision, now: float) -> None:
    if decision.wave != row.wave or row.wave_started_at is None:
        row.wave, row.wave_started_at = decision.wave, now
    row.because = decision.sentence
    if not decision.devices:
        return
    for begin_at in range(0, len(decision.devices), 500):
        devices = decision.devices[begin_at : begin_at + 500]
        members = {
            member.device: member
            for member in session.scalars(
                select(MemberRow).where(MemberRow.rollout == row.name, MemberRow.device.in_(devices))
            )
        }
        revoked = set(
            session.scalars(
                select(DeviceRow.name).where(DeviceRow.name.in_(devices), DeviceRow.revoked_at.is_not(None))
            )
        )
        rows = session.scalars(select(WantedModelRow).where(WantedModelRow.device.in_(devices)))
        wanted = {(each.device, each.model): each for each in rows}
        for device in devices:
            if device in members and device not in revoked:
                is_return = decision.action == "abort"
                _write_wanted(session, row, known, members[device], wanted, is_return=is_return, now=now)
        _mark_due(session, devices)


def _write_wanted(
    session: Session,
    row: RolloutRow,
    known: _Known,
    member: MemberRow,
    there: Mapping[tuple[str, str], WantedModelRow],
    *,
    is_return: bool,
    now: float,
) -> None:
    progress = known.progress.members[member.device]
    # A return is an attempt of its own: an execution's name is never carried out twice.
    attempt = progress.attempts + is_return
    for (target, model), package in known.packages.items():
        if target != progress.device_class:
            continue
        before = member.before.get(model)
        document = _document_of_return(row, before) if is_return else _document(row, package, known)
        wanted = there.get((member.device, model))
        if wanted is None:
            wanted = WantedModelRow(device=member.device, model=model)
            session.add(wanted)
        wanted.rollout = row.name
        wanted.is_removed = document is None
        if document is None:
            wanted.document = {}
        else:
            name = execution_name(row.name, member.device, model, attempt)
            jitter_s = 0.0 if is_return else document.not_before_s
            runs = (before or {}).get("manifest_sha256")  # the others would only fill the document
            deltas = tuple(one for one in document.deltas if runs in (None, one.from_sha256))
            document = replace(document, execution=name, not_before_s=jitter_s, deltas=deltas)
            wanted.document = to_plain(document)
            session.add(
                ExecutionRow(
                    execution=name,
                    rollout=row.name,
                    device=member.device,
                    model=model,
                    version=document.version,
                    state="waiting",
                    created_at=now,
                    changed_at=now,
                )
            )
    member.attempts = attempt
    member.state = "returned" if is_return else "offered"
    member.offered_at = now


def _document(row: RolloutRow, package: ReleasePackageRow, known: _Known) -> DesiredModel:
    settings = known.progress.settings
    return DesiredModel(
        model=package.model,
        version=package.version,
        manifest_sha256=package.manifest_sha256,
        path=package.path,
        size_bytes=package.size_bytes,
        sha256=package.sha256,
        execution="",
        release=row.release,
        rollout=row.name,
        trial=settings.trial,
        order=settings.order,
        priority=settings.priority,
        window=settings.window,
        timeout_s=settings.step_timeout_s,
        deltas=tuple(from_plain(DeltaOffer, delta) for delta in package.deltas),
    )


def _document_of_return(row: RolloutRow, before: Mapping[str, Any] | None) -> DesiredModel | None:
    """Return the document that takes a device back, at once; None where it ran nothing before."""
    if not before:
        return None
    old = from_plain(DesiredModel, dict(before), "before")
    return replace(old, rollout=row.name, is_return=True, trial="none", window=None, not_before_s=0.0)


def _mark_due(session: Session, devices: Iterable[str]) -> None:
    names = list(devices)
    there = set(session.scalars(select(DesiredRow.device).where(DesiredRow.device.in_(names))))
    session.execute(update(DesiredRow).where(DesiredRow.device.in_(there)).values(is_due=True))
    session.add_all(DesiredRow(device=name, is_due=True) for name in names if name not in there)
