"""Compares the figures of devices with and without a release, over the same periods.

A device's figures with the new version are compared with those of its last hours with the old version. The
change on devices of its class that still run the old version, in the same periods, is subtracted. All figures
are differences between reports in the store.
"""

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import and_, bindparam, or_, select
from sqlalchemy.orm import Session

from edgekit_fleet.rollouts.gate_table import MIN_REQUESTS, Fault
from edgekit_fleet.rollouts.gates import Period, find_period, find_stage, measure
from edgekit_fleet.rollouts.progress import AnswerEntry, Progress, Reading
from edgekit_fleet.store.tables import FigureRow, MemberRow, ReleasePackageRow
from edgekit_runtime.agent.documents import ModelFigures
from edgekit_runtime.dataclass_json import from_plain, keep_known
from edgekit_runtime.statistics.confidence_sequences import share_is_above

_CRASHES: Final = 3
_HOUR_S: Final = 3600.0
_MOST_CONTROLS: Final = 12
_MOST_REPORTS: Final = 200
_DAY_S: Final = 86_400.0
"""The age in seconds from which figures are too old to show when a device switched."""
_HOURS_BEFORE: Final = 4
"""How many hourly figures of the previous version are read at most. More are not needed."""
_APART_S: Final = 60.0
_LEAST_BEFORE: Final = 20
"""The number of checked answers from which the previous version's share of NaN answers counts as known."""
_MOST_NOT_FINITE: Final = 0.01
"""The share of NaN answers that is allowed while the previous version's share is unknown."""
_ALPHA: Final = 0.01
_ROWS_BEFORE: Final = 48
# Built once, and without row objects: it runs for each device, and building it takes longer than running it.
_BEFORE: Final = (
    select(*(FigureRow.__table__.c[name] for name in ("version", "reported_at", "figures")))
    .where(
        FigureRow.__table__.c.device == bindparam("device"),
        FigureRow.__table__.c.model == bindparam("model"),
        FigureRow.__table__.c.version != bindparam("version"),
    )
    .order_by(FigureRow.__table__.c.reported_at.desc())
    .limit(_HOURS_BEFORE)
)


@dataclass(frozen=True, slots=True)
class _Report:
    """Figures of a device, and when they came."""

    at: float
    figures: ModelFigures


@dataclass(slots=True)
class Controls:
    """The reports of control devices, which still run the old version.

    These are the last 12 devices of each class in rollout order. The store has only the last report of each
    hour. This object keeps one report a minute from the start of the rollout, so that a period can begin at
    any minute. After a restart of the manager, only the hourly reports remain.
    """

    _devices: dict[str, list[str]] = field(default_factory=dict)
    _reports: dict[tuple[str, str, str], list[_Report]] = field(default_factory=dict)
    _read_at: dict[str, float] = field(default_factory=dict)

    def follow(self, session: Session, progress: Progress, now: float) -> None:
        """Choose control devices, and read their reports up to `now`, in seconds since 1970."""
        self._choose(progress)
        of_time: dict[float, list[str]] = {}
        for device in itertools.chain.from_iterable(self._devices.values()):
            of_time.setdefault(self._read_at.get(device, now - 2 * _DAY_S), []).append(device)
            self._read_at[device] = now
        for read_at, devices in of_time.items():
            columns = FigureRow.device, FigureRow.model, FigureRow.version, FigureRow.reported_at
            rows = session.execute(
                select(*columns, FigureRow.figures)
                .where(
                    FigureRow.device.in_(devices),
                    FigureRow.hour >= int(read_at // _HOUR_S),
                    FigureRow.reported_at >= read_at,
                )
                .order_by(FigureRow.reported_at)
            )
            for device, model, version, at, plain in rows:
                self._add((device, model, version), _Report(at, _read_figures(plain, device)))

    def find_pairs(
        self, source: tuple[str, str, str], then: tuple[float, float], now: tuple[float, float]
    ) -> list[tuple[Period, Period]]:
        """Return the (earlier, later) figures of each control device that has figures in both periods.

        Args:
            source: The class, the model and the old version.
            then: The start and end of the earlier period, in seconds since 1970.
            now: The start and end of the later period.
        """
        device_class, model, version = source
        pairs = []
        for device in self._devices.get(device_class, ()):
            reports = self._reports.get((device, model, version), ())
            was, became = _find_control(reports, then), _find_control(reports, now)
            if was is not None and became is not None:
                pairs.append((was, became))
        return pairs

    def _choose(self, progress: Progress) -> None:
        self._devices.clear()
        for device, member in reversed(progress.members.items()):
            if member.state == "pending":
                chosen = self._devices.setdefault(member.device_class, [])
                if len(chosen) < _MOST_CONTROLS:
                    chosen.append(device)
        controls = set(itertools.chain.from_iterable(self._devices.values()))
        self._reports = {key: reports for key, reports in self._reports.items() if key[0] in controls}
        self._read_at = {device: at for device, at in self._read_at.items() if device in controls}

    def _add(self, key: tuple[str, str, str], report: _Report) -> None:
        reports = self._reports.setdefault(key, [])
        if reports and report.at <= reports[-1].at:
            return
        if len(reports) > 1 and report.at - reports[-2].at < _APART_S:
            reports.pop()
        reports.append(report)
        if len(reports) > _MOST_REPORTS:
            del reports[1 : len(reports) // 2 : 2]  # older reports may be further apart


@dataclass(slots=True)
class FigureCache:
    """Figures that do not have to be read again.

    Attributes:
        controls: The devices that still run the old version.
        not_finite: The result of `count_before` for each (device, model).
    """

    controls: Controls = field(default_factory=Controls)
    not_finite: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)


def _find_control(reports: Sequence[_Report], period: tuple[float, float]) -> Period | None:
    """Return the figures of a period, as closely as the reports allow.

    The period begins earlier if it would otherwise have no calls.

    Args:
        reports: The reports of one version on one device, in order of time.
        period: The start and end of the period.
    """
    begin, end = (bisect.bisect_right(reports, at, key=lambda report: report.at) - 1 for at in period)
    if end < 0 or period[1] - reports[end].at > _HOUR_S:
        return None
    for first in range(min(begin, end), -1, -1):
        figures = find_period(reports[first].figures, reports[end].figures)
        if figures.requests > 0:
            return figures
    # The version was opened about when the period began, or the time is unknown.
    is_opened = reports[0].at - period[0] < 2 * _HOUR_S
    return find_period(None, reports[end].figures) if is_opened else None


def observe_figures(
    session: Session,
    rollout: str,
    progress: Progress,
    packages: Mapping[tuple[str, str], ReleasePackageRow],
    cache: FigureCache,
    *,
    since: float,
    fresh: Sequence[str],
    now: float,
) -> Iterable[AnswerEntry]:
    """Yield an entry for each device with the release that has a fault or new evidence in its figures.

    Args:
        session: The session of a transaction.
        rollout: The name of the rollout.
        progress: The progress of the rollout.
        packages: The packages of the release by (class, model).
        cache: Figures that were read before. It is updated.
        since: The time, in seconds since 1970, up to which figures were already observed.
        fresh: The devices that have succeeded since `since`. Their earlier figures are read too.
        now: The time, in seconds since 1970, up to which all figures are in the store.
    """
    of_device = _read_new(session, rollout, progress, packages, since=since, fresh=fresh)
    if of_device or fresh:
        cache.controls.follow(session, progress, now)
    for device, figures in of_device.items():
        member = progress.members[device]
        fault: Fault = ""
        readings = []
        for row in figures:
            after = _read_figures(row.figures, device)
            if not (member.sample and member.sample.fault):
                fault = _find_fault(session, cache, row, after) or fault
            stage = find_stage(after.requests, progress.settings.limits)
            if stage < 0 or (member.sample and (row.model, stage) in member.sample.measures):
                continue
            digest = packages[member.device_class, row.model].manifest_sha256
            if _ran_before(session, rollout, row, digest):
                continue
            if measures := _compare(session, progress, cache, row, after):
                readings.append(Reading(model=row.model, stage=stage, measures=measures))
        if fault or readings:
            yield AnswerEntry(device=device, fault=fault, readings=tuple(readings))


def _read_new(
    session: Session,
    rollout: str,
    progress: Progress,
    packages: Mapping[tuple[str, str], ReleasePackageRow],
    *,
    since: float,
    fresh: Sequence[str],
) -> dict[str, list[FigureRow]]:
    """Return the figures of the new versions on each device (see `observe_figures`)."""
    versions = {package.version for package in packages.values()}
    rows = session.scalars(
        select(FigureRow)
        .join(MemberRow, (MemberRow.device == FigureRow.device) & (MemberRow.rollout == rollout))
        .where(
            FigureRow.version.in_(versions),
            or_(
                # The condition on the hour makes the database use the index.
                and_(FigureRow.hour >= int(since // _HOUR_S), FigureRow.reported_at >= since),
                FigureRow.device.in_(fresh),
            ),
        )
    )
    of_device: dict[str, list[FigureRow]] = {}
    for row in rows:
        member = progress.members.get(row.device)
        if member is None or member.state != "succeeded" or row.reported_at < member.started_at:
            continue
        package = packages.get((member.device_class, row.model))
        if package is not None and package.version == row.version:
            of_device.setdefault(row.device, []).append(row)
    return of_device


def _ran_before(session: Session, rollout: str, row: FigureRow, digest: str) -> bool:
    """Return whether a device ran this very package when the rollout began, so nothing changes there."""
    ran: Mapping[str, Any] | None = session.scalar(
        select(MemberRow.before).where(MemberRow.rollout == rollout, MemberRow.device == row.device)
    )
    return ((ran or {}).get(row.model) or {}).get("manifest_sha256") == digest


def _compare(
    session: Session, progress: Progress, cache: FigureCache, row: FigureRow, after: ModelFigures
) -> dict[str, float]:
    """Return the evidence of a device with the new version (see `gates.measure`)."""
    period = find_period(None, after)
    member = progress.members[row.device]
    before = _read_before(session, row)
    if not before or member.answered_at - before[0].at > _DAY_S:
        return measure(None, period, ())
    min_requests = progress.settings.limits.get(MIN_REQUESTS.name, MIN_REQUESTS.default)
    begin, end = _choose_period(before, min_requests)
    # A version without an earlier report was opened in the hour of its first one.
    begin_at = begin.at if begin else before[-1].at - _HOUR_S
    pairs = cache.controls.find_pairs(
        (member.device_class, row.model, end.figures.version),
        (begin_at, end.at),
        (member.answered_at, row.reported_at),
    )
    was = find_period(begin.figures if begin else None, end.figures)
    return measure(was, period, pairs)


def _read_before(session: Session, row: FigureRow) -> list[_Report]:
    """Return the last reports of the version before on the device of `row`, one an hour, the newest first.

    The row of an hour is replaced by each report, also by those that come while the new version is fetched.
    """
    parameters = {"device": row.device, "model": row.model, "version": row.version}
    rows = session.connection().execute(_BEFORE, parameters).all()
    return [
        _Report(record.reported_at, _read_figures(record.figures, row.device))
        for record in rows
        if record.version == rows[0].version
    ]


def _choose_period(before: Sequence[_Report], min_requests: float) -> tuple[_Report | None, _Report]:
    """Return the start and end of the newest period with enough calls. The start is None for the opening.

    `before` are the reports of the previous version, newest first.
    """
    end = before[0]
    begins = [report for report in before[1:] if end.at - report.at <= _DAY_S]
    for begin in begins:
        if find_period(begin.figures, end.figures).requests >= min_requests:
            return begin, end
    is_opened_before = len(before) == _HOURS_BEFORE or len(begins) < len(before) - 1
    return ((begins or before[:2])[-1] if is_opened_before else None), end


def _find_fault(session: Session, cache: FigureCache, row: FigureRow, after: ModelFigures) -> Fault:
    if after.not_finite > 0 and _is_more_not_finite(session, cache, row, after):
        return "not-finite"
    return "crash-loop" if after.restarts >= _CRASHES else ""


def _is_more_not_finite(session: Session, cache: FigureCache, row: FigureRow, after: ModelFigures) -> bool:
    """Return whether a larger share of checked answers has NaN or infinity than with the version before."""
    key = row.device, row.model
    if key not in cache.not_finite:
        cache.not_finite[key] = count_before(session, row)
    bad_before, before = cache.not_finite[key]
    bad, answers = after.not_finite, max(after.looked_at, after.not_finite)
    if before < _LEAST_BEFORE:
        return bad > _MOST_NOT_FINITE * answers
    # If both were alike, a bad answer would be of the new version with a chance equal to its share of the
    # answers.
    return share_is_above(bad, bad + bad_before, answers / (answers + before), _ALPHA) is True


def count_before(session: Session, row: FigureRow) -> tuple[int, int]:
    """Return how many answers of the previous version had NaN or infinity, and how many were checked.

    The model and the device are those of `row`. If the service was restarted, only the process that checked
    the most answers is used. The result is (0, 0) if there was no other version.
    """
    rows = session.scalars(
        select(FigureRow)
        .where(FigureRow.device == row.device, FigureRow.model == row.model, FigureRow.version != row.version)
        .order_by(FigureRow.reported_at.desc())
        .limit(_ROWS_BEFORE)
    ).all()
    last = [row for row in rows if row.version == rows[0].version]
    figures = [_read_figures(row.figures, row.device) for row in last]
    return max(((report.looked_at, report.not_finite) for report in figures), default=(0, 0))[::-1]


def _read_figures(plain: Mapping[str, Any], device: str) -> ModelFigures:
    """Return stored figures, without unknown ones from a newer manager."""
    return from_plain(ModelFigures, keep_known(ModelFigures, plain), device)
