"""Runs the rollouts: reads the answers of devices, decides, and writes the models that devices should run.

Everything is written to the audit log before it takes effect. A decision about many devices is logged once.
It is carried out in batches of one transaction each, so that the first devices can begin early. A manager
that was killed continues from the log with the devices whose rows do not show the decision yet.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import delete, event, null, select
from sqlalchemy.orm import Session

from edgekit_fleet.rollouts.decide import decide, describe_return, is_returning
from edgekit_fleet.rollouts.gate_table import Fault
from edgekit_fleet.rollouts.observations import FigureCache, observe_figures
from edgekit_fleet.rollouts.preview import preview
from edgekit_fleet.rollouts.progress import (
    AnswerEntry,
    ClockSetBack,
    Entry,
    JoinEntry,
    Outcome,
    Progress,
    StartEntry,
    WithdrawalEntry,
    apply,
    begin,
    entry_from_plain,
    entry_to_plain,
)
from edgekit_fleet.rollouts.selector import parse_selector
from edgekit_fleet.rollouts.verdict import VERDICT_ACTION, VERDICTS
from edgekit_fleet.rollouts.views import read_before, read_devices, read_packages
from edgekit_fleet.rollouts.waves import draw_delay, join_cohort
from edgekit_fleet.store import audit
from edgekit_fleet.store.database import insert_many, try_exclude_writers, update_many, upsert_many
from edgekit_fleet.store.due import mark_due
from edgekit_fleet.store.future import CLOCK_STEP_S
from edgekit_fleet.store.shards import Shards
from edgekit_fleet.store.tables import (
    AuditRow,
    DeviceRow,
    ExecutionRow,
    MemberRow,
    ReleasePackageRow,
    RolloutRow,
    WantedModelRow,
    read_record,
)
from edgekit_runtime.agent.documents import ENDED, DeltaOffer, DesiredModel
from edgekit_runtime.dataclass_json import from_plain, to_plain
from edgekit_runtime.errors import FleetError

OPEN_STATES: Final = ("running", "paused", "returning")
"""The states of rollouts that still decide. In `returning`, devices are returning to their old version."""
LOG_ACTION: Final = "rollout.log"
_JOIN_S: Final = 10.0
_DEVICES_PER_S: Final = 2000
_DEVICES_PER_TURN: Final = 900  # a commit waits for the disk. A statement may have 999 parameters
_FAULT_CODES: Final[dict[str, Fault]] = {"not-finite": "not-finite", "crash-loop": "crash-loop"}


def log_entries(
    session: Session,
    rollout: str,
    actor: str,
    entries: Iterable[Entry],
    now: float,
    *,
    on_written: Callable[[int], None] | None = None,
) -> None:
    """Write entries to the audit log as one row. The caller must have locked the `RolloutRow`."""
    plain = [entry_to_plain(entry) for entry in entries]
    if plain:
        written = audit.AuditEntry(action=LOG_ACTION, subject=rollout, detail={"entries": plain})
        audit.append(session, actor, [written], now, on_written)


def read_entries(session: Session, rollout: str, after: int = 0) -> list[tuple[int, float, Entry]]:
    """Return the entries of a rollout, oldest first.

    Each tuple holds the number of the audit row, the time in seconds since 1970, and the entry. A row may
    hold several entries. Only rows after the number `after` are read.
    """
    rows = session.execute(
        select(AuditRow.number, AuditRow.at, AuditRow.detail)
        .where(AuditRow.subject == rollout, AuditRow.action == LOG_ACTION, AuditRow.number > after)
        .order_by(AuditRow.number)
    )
    return [
        (number, at, entry_from_plain(plain)) for number, at, detail in rows for plain in detail["entries"]
    ]


@dataclass(slots=True, kw_only=True)
class _RolloutMemory:
    """The state of an open rollout in memory, which can be rebuilt from the store."""

    progress: Progress
    last_entry: int
    epoch: int = 0
    observed_at: float = 0.0
    joined_at: float = 0.0
    decided_at: float = 0.0
    has_news: bool = True
    packages: dict[tuple[str, str], ReleasePackageRow] = field(default_factory=dict)
    backlog: dict[str, None] = field(default_factory=dict)
    """The devices of logged decisions whose documents are not written yet, in the order of the decisions."""
    figures: FigureCache = field(default_factory=FigureCache)

    def note_entry(self, number: int) -> None:
        """Record that `progress` includes all entries up to this one."""
        self.last_entry = number


class RolloutRunner:
    """Runs the open rollouts. The manager's loop calls `turn`."""

    def __init__(self, shards: Shards | None = None, *, devices_per_turn: int = _DEVICES_PER_TURN) -> None:
        """Prepare to run the rollouts of these shards, by default all.

        `devices_per_turn` is the maximum number of devices to which a turn applies a decision, in each
        rollout.
        """
        self._memories: dict[str, _RolloutMemory] = {}
        self._shards, self._devices_per_turn = shards or Shards.of_all(), devices_per_turn

    def turn(self, session: Session, now: float) -> bool:
        """Decide on each open rollout, carry out its next batch, and return whether more batches wait.

        `now` is in seconds since 1970.
        """
        rows = self._lock_rollouts(session)
        for name in self._memories.keys() - {row.name for row in rows}:
            del self._memories[name]
        if rows:  # entries of a transaction that was rolled back did not happen
            event.listen(session, "after_rollback", lambda _session: self._memories.clear())
        for row in rows:
            self._run(session, row, now)
        return any(memory.backlog for memory in self._memories.values())

    def _lock_rollouts(self, session: Session) -> list[RolloutRow]:
        """Return the open rollouts, with their logs locked until the transaction ends."""
        open_ones = select(RolloutRow).where(RolloutRow.state.in_(OPEN_STATES)).order_by(RolloutRow.name)
        shards = self._shards
        shards.look_around(session)
        for name, memory in list(self._memories.items()):
            if not shards.holds(name) or memory.epoch != shards.epoch_of(name):
                del self._memories[name]  # another manager has it, or had it meanwhile
        if not shards.is_complete:
            names = session.scalars(open_ones.with_only_columns(RolloutRow.name)).all()
            open_ones = open_ones.where(RolloutRow.name.in_([name for name in names if shards.holds(name)]))
        return list(session.scalars(open_ones.with_for_update()))

    def _run(self, session: Session, row: RolloutRow, now: float) -> None:
        memory = self._follow_log(session, row)
        ahead_s = memory.progress.newest_at - now
        if ahead_s > CLOCK_STEP_S:
            self._log(session, row, memory, [ClockSetBack(ahead_s=ahead_s)], now)
            memory.decided_at = memory.joined_at = now
        self._decide(session, row, memory, now)
        if memory.backlog:
            devices = list(itertools.islice(memory.backlog, self._devices_per_turn))
            self._log(session, row, memory, _carry_out(session, row, memory, devices, now), now)
        progress = memory.progress
        state: str = progress.state
        if progress.stop is not None:
            _update(row, "because", describe_return(progress.stop, progress.members.values()))
        if state in ("succeeded", "aborted") and (memory.backlog or is_returning(progress, now)):
            state = "returning"  # it is open until everything is carried out
        if state != row.state:
            row.state = state
        if state in ("succeeded", "aborted") and row.ended_at is None:
            row.ended_at = now

    def _decide(self, session: Session, row: RolloutRow, memory: _RolloutMemory, now: float) -> None:
        """Log the answers of devices and the decisions that follow from them.

        Devices of an earlier decision may still wait for their documents. An abort or a pause then withdraws
        the release from these devices. All other decisions are delayed until these devices have their
        documents.
        """
        memory.observed_at = min(memory.observed_at, now)  # the clock may have been set back
        if memory.progress.settings.is_dynamic and now - memory.joined_at >= _JOIN_S:
            memory.joined_at = now
            self._log(session, row, memory, _join(session, row, memory), now)
        ended = list(_observe_executions(session, row.name, memory))
        self._log(session, row, memory, ended, now)
        # Figures of a device count once it has succeeded; they may have come with the success or before.
        fresh = [answer.device for answer in ended if answer.outcome == "succeeded"]
        read_until = min(now, self._shards.horizon)
        read = observe_figures(
            session,
            row.name,
            memory.progress,
            memory.packages,
            memory.figures,
            since=memory.observed_at,
            fresh=fresh,
            now=read_until,
        )
        self._log(session, row, memory, list(read), now)
        self._log(session, row, memory, list(_observe_fallbacks(session, row.name, memory)), now)
        memory.observed_at = read_until
        # Without news only the time can change a decision: no need to judge a large rollout twice a second.
        pause_s = len(memory.progress.members) / _DEVICES_PER_S
        if not memory.has_news and now - memory.decided_at < pause_s:
            return
        memory.has_news, memory.decided_at = False, now
        is_under_way = bool(memory.backlog)
        while (decision := decide(memory.progress, now)) is not None:
            if is_under_way and (memory.progress.state == "paused" or decision.action in ("pause", "abort")):
                self._log(session, row, memory, [WithdrawalEntry(devices=tuple(memory.backlog))], now)
                memory.backlog.clear()
                is_under_way = False
                continue
            if is_under_way and decision.action in ("start", "retry", "succeed"):
                memory.has_news = True
                break
            if decision.action == "wait" or (decision.action == "ask" and decision == memory.progress.last):
                _update(row, "because", decision.sentence)
                break
            self._log(session, row, memory, [decision], now)
            if verdict := VERDICTS.get(decision.action):
                detail = {"verdict": verdict, "reasons": [decision.sentence], "figures": decision.figures}
                entry = audit.AuditEntry(action=VERDICT_ACTION, subject=row.name, detail=detail)
                audit.append(session, "manager", [entry], now)
            if decision.wave != row.wave or row.wave_started_at is None:
                row.wave, row.wave_started_at = decision.wave, now
            row.because = decision.sentence
            # In the order of the tables, so that a batch writes few pages of the database.
            memory.backlog.update(dict.fromkeys(sorted(decision.devices)))

    def _follow_log(self, session: Session, row: RolloutRow) -> _RolloutMemory:
        """Return the state of a rollout, updated with entries that others have written to the log."""
        memory = self._memories.get(row.name)
        for number, at, entry in read_entries(session, row.name, 0 if memory is None else memory.last_entry):
            if memory is None:
                if not isinstance(entry, StartEntry):
                    raise TypeError(f"the log of rollout '{row.name}' does not begin with its start")
                epoch = self._shards.epoch_of(row.name)
                memory = _RolloutMemory(progress=begin(entry, at), last_entry=number, epoch=epoch)
            else:
                apply(memory.progress, entry, at)
                memory.last_entry, memory.has_news = number, True
        if memory is None:
            raise LookupError(f"rollout '{row.name}' has no log")
        if not memory.packages:
            rows = session.scalars(select(ReleasePackageRow).where(ReleasePackageRow.release == row.release))
            memory.packages = {(package.target, package.model): package for package in rows}
            if memory.progress.started:
                memory.backlog = dict.fromkeys(_list_undone(session, row.name, memory.progress))
        self._memories[row.name] = memory
        return memory

    def _log(
        self, session: Session, row: RolloutRow, memory: _RolloutMemory, entries: Sequence[Entry], now: float
    ) -> None:
        if not entries:
            return
        log_entries(session, row.name, "manager", entries, now, on_written=memory.note_entry)
        memory.has_news = True
        changed = []
        for entry in entries:
            apply(memory.progress, entry, now)
            if isinstance(entry, AnswerEntry) and entry.outcome is not None:
                member = memory.progress.members[entry.device]
                changes = {"state": member.state, "because": member.code, "answered_at": now}
                changed.append(_member(row.name, entry.device, **changes))
        update_many(session, MemberRow, changed, keys=("rollout", "device"))


def execution_name(rollout: str, device: str, model: str, attempt: int) -> str:
    """Return the name of an attempt as `ROLLOUT.ATTEMPT.DIGEST`.

    The name of the rollout is cut to 64 characters. The digest covers all arguments.
    """
    digest = hashlib.sha256(f"{rollout}\0{device}\0{model}\0{attempt}".encode()).hexdigest()
    return f"{rollout[:64]}.{attempt}.{digest[:24]}"


def _update(row: RolloutRow, name: str, value: object) -> None:
    if getattr(row, name) != value:
        setattr(row, name, value)


# What devices answered


def _observe_executions(session: Session, rollout: str, memory: _RolloutMemory) -> Iterable[AnswerEntry]:
    changed = session.scalars(
        select(ExecutionRow.device)
        .where(
            ExecutionRow.rollout == rollout,
            ExecutionRow.state.in_(sorted(ENDED)),
            ExecutionRow.changed_at >= memory.observed_at,
        )
        .distinct()
    ).all()
    names = {}
    for device in changed:
        member = memory.progress.members.get(device)
        if member is not None and member.state in ("started", "returning"):
            attempt = member.attempts + member.returns
            models = [model for target, model in memory.packages if target == member.device_class]
            names[device] = [execution_name(rollout, device, model, attempt) for model in models]
    execution_names = [name for names_of_device in names.values() for name in names_of_device]
    execution_rows: dict[str, ExecutionRow] = {}
    for begin_at in range(0, len(execution_names), 500):
        some = execution_names[begin_at : begin_at + 500]
        executions = session.scalars(select(ExecutionRow).where(ExecutionRow.execution.in_(some)))
        execution_rows.update((row.execution, row) for row in executions)
    for device, of_device in names.items():
        rows = [execution_rows[name] for name in of_device if name in execution_rows]
        if not rows or any(row.state not in ENDED for row in rows):  # or this attempt is not carried out yet
            continue
        outcome, code = _sum_up(rows)
        is_return = memory.progress.members[device].returns > 0
        fault: Fault = "" if is_return else _FAULT_CODES.get(code, "")
        yield AnswerEntry(device=device, outcome=outcome, code=code, fault=fault)


def _sum_up(rows: Iterable[ExecutionRow]) -> tuple[Outcome, str]:
    """Return the combined outcome and code of the executions of all models on a device."""
    worst: tuple[Outcome, str] = ("succeeded", "")
    for row in rows:
        if row.state in ("failed", "timed_out"):
            return "failed", row.code or ("timeout" if row.state == "timed_out" else "")
        if row.state in ("refused", "superseded"):
            worst = ("refused" if row.state == "refused" else "superseded"), row.code
    return worst


def _observe_fallbacks(session: Session, rollout: str, memory: _RolloutMemory) -> Iterable[AnswerEntry]:
    """Yield an answer for each device that confirmed the release and later rolled back by itself."""
    rows = session.execute(
        select(DeviceRow.name, DeviceRow.reported)
        .join(MemberRow, (MemberRow.device == DeviceRow.name) & (MemberRow.rollout == rollout))
        .where(
            MemberRow.state == "succeeded",
            DeviceRow.status == "diverged",
            DeviceRow.last_seen_at >= memory.observed_at,
        )
    )
    for device, reported in rows:
        member = memory.progress.members.get(device)
        if member is None or member.state != "succeeded" or (member.sample and member.sample.fault):
            continue
        for model in (reported or {}).get("models", ()):
            package = memory.packages.get((member.device_class, model["model"]))
            if package is None or model["manifest_sha256"] == package.manifest_sha256:
                continue
            # A version that somebody pins or installs by hand is no evidence about the release.
            if model.get("because", "").startswith(f"{package.version} was rejected here"):
                yield AnswerEntry(device=device, fault="fallback")
                break


# What devices shall run


def _list_undone(session: Session, rollout: str, progress: Progress) -> Iterable[str]:
    """Yield the devices whose logged decision was not carried out, because the manager was killed."""
    rows = session.execute(
        select(MemberRow.device, MemberRow.attempts)
        .join(DeviceRow, DeviceRow.name == MemberRow.device)
        .where(MemberRow.rollout == rollout, DeviceRow.revoked_at.is_(None))
    )
    for device, attempts in rows:
        member = progress.members.get(device)
        if member is not None and attempts < member.attempts + member.returns:
            yield device


def _join(session: Session, row: RolloutRow, memory: _RolloutMemory) -> list[Entry]:
    """Add devices that have begun to match the selector, and return the entries to log."""
    if not try_exclude_writers(session):  # another rollout may take them in that very moment: later, then
        return []
    members = memory.progress.members
    models = frozenset(model for _, model in memory.packages)
    try:
        selector = parse_selector(row.selector)
    except FleetError:  # an older version accepted it: the cohort stays as it is
        return []
    packages = read_packages(session, row.release)
    matching = read_devices(session, selector, packages)
    new = {view.name: view for view in matching if view.name not in members}
    planned, _ = preview(new.values(), packages)
    classes = {planned_device.device: planned_device.target for planned_device in planned}
    devices = join_cohort(row.name, (), classes)
    if not devices:
        return []
    before = read_before(session, [new[device] for device in devices], models)
    wave = len(memory.progress.settings.waves) - 1
    for device in devices:
        member = session.get(MemberRow, (row.name, device)) or MemberRow(rollout=row.name, device=device)
        member.wave, member.state, member.before = wave, "waiting", before.get(device, {})
        session.add(member)
    session.flush()
    return [JoinEntry(devices=devices, classes=tuple(classes[device] for device in devices))]


def _carry_out(
    session: Session, row: RolloutRow, memory: _RolloutMemory, devices: Sequence[str], now: float
) -> list[AnswerEntry]:
    """Write the desired models of the next devices in the backlog.

    Returns:
        The answers of devices that need no execution.
    """
    members = memory.progress.members
    returning = [device for device in devices if members[device].state == "returning"]
    # Parsing what each device ran takes a fifth of the time, and most waves do not need it.
    needs_before = bool(returning) or any(package.deltas for package in memory.packages.values())
    before = session.execute(
        select(MemberRow.device, MemberRow.before if needs_before else null())
        .join(DeviceRow, DeviceRow.name == MemberRow.device)
        .where(MemberRow.rollout == row.name, MemberRow.device.in_(devices), DeviceRow.revoked_at.is_(None))
    ).all()
    foreign = _list_foreign(session, row.name, returning) if returning else set()
    spread_s = memory.progress.settings.spread_s
    skipped: dict[str, str] = {}  # device -> why
    unwanted: list[tuple[str, str]] = []
    offers = {key: _document(row, package, memory) for key, package in memory.packages.items()}
    desired_rows: list[dict[str, Any]] = []
    changed = []
    for device, ran in before:
        member = members[device]
        is_return = member.state == "returning"
        # A return is an attempt of its own: an execution's name is never carried out twice.
        attempt = member.attempts + member.returns
        for (target, model), offer in offers.items():
            if target != member.device_class:
                continue
            if (device, model) in foreign:
                skipped[device] = "another-rollout"
                continue
            if is_return and model not in ran:  # it may have had a version: the model is not removed
                skipped[device] = "unknown-before"
                unwanted.append((device, model))
                continue
            document = _fit(row, offer, (ran or {}).get(model), is_return=is_return)
            rollout: str | None = row.name
            if is_return and document:  # it goes back to a version that another rollout wanted
                rollout = ran[model].get("rollout") or None
            if document:
                document["execution"] = execution_name(row.name, device, model, attempt)
            if document and not is_return:
                document["not_before_s"] = draw_delay(row.name, device, spread_s)
            key = {"device": device, "model": model, "rollout": rollout}
            desired_rows.append({**key, "document": document, "is_removed": not document})
        state = "returning" if is_return else "offered"
        changed.append(_member(row.name, device, attempts=attempt, state=state, offered_at=now))
    if changed:
        upsert_many(session, WantedModelRow, desired_rows)
        for device, model in unwanted:
            is_it = (WantedModelRow.device == device) & (WantedModelRow.model == model)
            session.execute(delete(WantedModelRow).where(is_it))
        executions = [_execution(desired, now) for desired in desired_rows if not desired["is_removed"]]
        insert_many(session, ExecutionRow, executions)
        mark_due(session, devices)
        update_many(session, MemberRow, changed, keys=("rollout", "device"))
    for device in devices:
        del memory.backlog[device]
    skipped.update(dict.fromkeys(set(returning) - {device for device, _ in before}, "revoked"))
    return _answer_for(returning, skipped, desired_rows)


def _answer_for(
    returning: Sequence[str], skipped: Mapping[str, str], desired_rows: Sequence[Mapping[str, Any]]
) -> list[AnswerEntry]:
    """Return the answers of returning devices without an execution that could end.

    Args:
        returning: The names of the returning devices.
        skipped: The reasons why models of a device do not go back, by device.
        desired_rows: The new rows of `WantedModelRow`.
    """
    answered = []
    is_removed: dict[str, bool] = {}
    for row in desired_rows:
        is_removed[row["device"]] = is_removed.get(row["device"], True) and row["is_removed"]
    for device in returning:
        if device not in is_removed:
            answered.append(AnswerEntry(device=device, outcome="superseded", code=skipped.get(device, "")))
        elif is_removed[device]:
            answered.append(AnswerEntry(device=device, outcome="succeeded", code="removed"))
    return answered


def _list_foreign(session: Session, rollout: str, devices: Sequence[str]) -> set[tuple[str, str]]:
    """Return the (device, model) pairs that another rollout has changed since."""
    by = WantedModelRow.document["rollout"].as_string()  # also if it goes back to another rollout's version
    rows = session.execute(
        select(WantedModelRow.device, WantedModelRow.model).where(
            WantedModelRow.device.in_(devices),
            WantedModelRow.rollout.is_distinct_from(rollout),
            by.is_distinct_from(rollout),
        )
    )
    return {(device, model) for device, model in rows}


def _fit(
    row: RolloutRow, offer: dict[str, Any], ran: Mapping[str, Any] | None, *, is_return: bool
) -> dict[str, Any]:
    """Return the `DesiredModel` for a device as plain values, or an empty dict to remove the model.

    Args:
        row: The row of the rollout.
        offer: The package of the release for the class of the device.
        ran: The version that ran when the device joined the cohort, or empty.
        is_return: Whether the device goes back to that version immediately.
    """
    if is_return:
        if not ran:
            return {}
        offer = {
            **ran,
            "rollout": row.name,
            "is_return": True,
            "trial": "none",
            "window": None,
            "not_before_s": 0.0,
            "allows_plain": not ran.get("key_id"),
        }
    # Only the smallest that fits: others would fill the document. A coded file needs no earlier version.
    bases = ("", *([ran["manifest_sha256"]] if ran else []))
    fitting = [delta for delta in offer["deltas"] if delta["from_sha256"] in bases]
    return {**offer, "deltas": sorted(fitting, key=lambda delta: int(delta["size_bytes"]))[:1]}


def _execution(desired_row: Mapping[str, Any], now: float) -> dict[str, Any]:
    return {
        "execution": desired_row["document"]["execution"],
        "rollout": desired_row["document"]["rollout"],
        "device": desired_row["device"],
        "model": desired_row["model"],
        "version": desired_row["document"]["version"],
        "state": "waiting",
        "reason": "",
        "code": "",
        "done_bytes": 0,
        "sent_bytes": 0,
        "created_at": now,
        "changed_at": now,
    }


def _member(rollout: str, device: str, **changes: object) -> dict[str, Any]:
    return {"rollout": rollout, "device": device, **changes}


def _document(row: RolloutRow, package: ReleasePackageRow, memory: _RolloutMemory) -> dict[str, Any]:
    settings = memory.progress.settings
    of_model = settings.models[package.model]
    document = read_record(
        DesiredModel,
        package,
        execution="",
        rollout=row.name,
        trial=settings.trial,
        order=of_model.order,
        priority=of_model.priority,
        window=settings.window,
        timeout_s=settings.step_timeout_s,
        deltas=tuple(from_plain(DeltaOffer, delta) for delta in package.deltas),
    )
    plain: dict[str, Any] = to_plain(document)
    return plain
