"""Queries about rollouts for pages. The database counts the devices, so pages do not read all rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from edgekit_fleet.console.charts import draw_bar
from edgekit_fleet.rollouts.runner import OPEN_STATES
from edgekit_fleet.store.tables import ExecutionRow, MemberRow, ReleasePackageRow, RolloutRow
from edgekit_host.markup import Markup
from edgekit_runtime.errors import FleetError

MEMBER_STATES: Final = (
    "succeeded",
    "failed",
    "refused",
    "superseded",
    "offered",
    "returning",
    "returned",
    "waiting",
)
"""The states of a device in a rollout, in the order in which bars show them."""
_REASONS: Final = 12
_DEVICES: Final = 5


@dataclass(frozen=True, slots=True)
class Wave:
    """A wave of a rollout, or all waves of a rollout together.

    Attributes:
        number: The number of the wave, counted from 1. It is 0 for all waves together.
        ends_at: The number of devices that have the release at the end of the wave.
        states: A dict from device state to the number of devices.
    """

    number: int
    ends_at: int
    states: Mapping[str, int]

    @property
    def devices(self) -> int:
        return sum(self.states.values())

    @property
    def counts(self) -> list[tuple[str, int]]:
        """Each device state and the number of devices in it, in the order of the bar chart."""
        return [(state, self.states[state]) for state in MEMBER_STATES if self.states.get(state)]

    def draw(self) -> Markup:
        words = ", ".join(f"{count:,} {state}" for state, count in self.counts) or "no devices"
        return draw_bar([(f"is-{state}", count) for state, count in self.counts], words)


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason that several devices share.

    Attributes:
        outcome: The outcome, such as `failed`, or empty for devices that are not in the rollout.
        sentence: The reason as one of the devices states it.
        devices: The names of a few of the devices.
    """

    outcome: str
    code: str
    sentence: str
    count: int
    devices: Sequence[str]


def find_rollout_row(session: Session, name: str) -> RolloutRow:
    """Return the row of a rollout.

    Raises:
        FleetError: There is no rollout of that name.
    """
    row = session.get(RolloutRow, name)
    if row is None:
        raise FleetError(f"no rollout '{name}'")
    return row


def list_rollout_rows(
    session: Session, *, limit: int, before: float | None = None, release: str | None = None
) -> list[RolloutRow]:
    """Return at most `limit` rollouts, newest first.

    `before` selects rollouts that were made before this time, in seconds since 1970. `release` selects
    rollouts of one release.
    """
    statement = select(RolloutRow).order_by(RolloutRow.created_at.desc()).limit(limit)
    if before is not None:
        statement = statement.where(RolloutRow.created_at < before)
    if release is not None:
        statement = statement.where(RolloutRow.release == release)
    return list(session.scalars(statement))


def count_members(session: Session, rollouts: Sequence[str]) -> dict[str, Wave]:
    """Count the devices of each rollout by state.

    Returns:
        A dict from rollout to a `Wave` with the number 0 that contains all devices of the rollout.
    """
    rows = session.execute(
        select(MemberRow.rollout, MemberRow.state, func.count())
        .where(MemberRow.rollout.in_(rollouts), MemberRow.wave >= 0)
        .group_by(MemberRow.rollout, MemberRow.state)
    )
    counts: dict[str, dict[str, int]] = {name: {} for name in rollouts}
    for rollout, state, count in rows:
        counts[rollout][state] = count
    return {name: Wave(0, sum(states.values()), states) for name, states in counts.items()}


def list_waves(session: Session, row: RolloutRow) -> list[Wave]:
    rows = session.execute(
        select(MemberRow.wave, MemberRow.state, func.count())
        .where(MemberRow.rollout == row.name, MemberRow.wave >= 0)
        .group_by(MemberRow.wave, MemberRow.state)
    )
    states: dict[int, dict[str, int]] = {}
    for wave, state, count in rows:
        states.setdefault(wave, {})[state] = count
    return [Wave(number + 1, end, states.get(number, {})) for number, end in enumerate(row.settings["waves"])]


def list_failures(session: Session, row: RolloutRow) -> list[Reason]:
    """Return the reasons why devices failed to install a release or to roll back, most frequent first."""
    count = func.count(ExecutionRow.device.distinct())
    columns = ExecutionRow.version, ExecutionRow.state, ExecutionRow.code
    groups = session.execute(
        select(*columns, count, func.min(ExecutionRow.reason))
        .where(
            ExecutionRow.rollout == row.name,
            ExecutionRow.state.in_(("failed", "timed_out", "refused", "superseded")),
        )
        .group_by(*columns)
        .order_by(count.desc())
        .limit(_REASONS)
    ).all()
    released = set(
        session.scalars(select(ReleasePackageRow.version).where(ReleasePackageRow.release == row.release))
    )
    reasons = []
    for version, state, code, devices, reason in groups:
        names = session.scalars(
            select(ExecutionRow.device)
            .where(
                ExecutionRow.rollout == row.name,
                ExecutionRow.state == state,
                ExecutionRow.version == version,
                ExecutionRow.code == code,
            )
            .distinct()
            .limit(_DEVICES)
        ).all()
        outcome = state.replace("_", " ")
        if version not in released:
            outcome = f"way back to {version} {outcome}"
        reasons.append(Reason(outcome, code, reason, devices, names))
    return reasons


def list_refusals(session: Session, row: RolloutRow) -> list[Reason]:
    """Return the reasons why matching devices are not in the rollout, most frequent first."""
    count = func.count()
    groups = session.execute(
        select(MemberRow.because, count, func.min(MemberRow.device))
        .where(MemberRow.rollout == row.name, MemberRow.wave == -1)
        .group_by(MemberRow.because)
        .order_by(count.desc())
        .limit(_REASONS)
    )
    return [Reason("", "", because, number, [device]) for because, number, device in groups]


def list_members(
    session: Session, rollout: str, *, state: str | None, after: str, limit: int
) -> list[MemberRow]:
    """Return a page of the devices of a rollout, sorted by name.

    Args:
        session: A session of the store.
        rollout: The name of the rollout.
        state: The state of the devices to return. None or an empty string selects all devices.
        after: The name of the last device on the previous page, or empty for the first page.
        limit: The maximum number of devices.
    """
    statement = select(MemberRow).where(MemberRow.rollout == rollout, MemberRow.device > after)
    if state:
        statement = statement.where(MemberRow.state == state)
    return list(session.scalars(statement.order_by(MemberRow.device).limit(limit)))


def is_open(row: RolloutRow) -> bool:
    """Return True if a rollout has not ended."""
    return row.state in OPEN_STATES
