"""Shards divide the devices and rollouts among several managers with a common store.

Each manager sends a heartbeat to the store once a second. If a manager sends no heartbeat for `LEASE_S`
seconds, another manager removes its row and takes over its shards. This increases the epoch of each shard,
and devices refuse documents with a lower epoch. Each transaction of a manager first locks the manager's own
row, so a removed manager cannot write and has to join again. With SQLite there is one manager with all
shards.
"""

import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import delete, func, select, text, update
from sqlalchemy.orm import Session

from edgekit_fleet.store import audit
from edgekit_fleet.store.tables import SHARDS, ManagerRow, ShardRow, shard_of
from edgekit_runtime.errors import UnavailableError

LEASE_S: Final = 3.0
BEAT_S: Final = 1.0
MOST_MANAGERS: Final = 8
_MOST_IDLE_MS: Final = 10_000  # longest time that a manager frozen in mid-transaction holds its row


@dataclass(frozen=True, slots=True)
class Balance:
    """The shards that a manager takes over and gives up.

    The caller passes it to `Shards.apply` after the transaction has committed.

    Attributes:
        claimed: The new epoch of each shard that the manager takes over.
        released: The shards that the manager gives up.
    """

    claimed: dict[int, int]
    released: frozenset[int]


class Shards:
    """The shards of one manager.

    Attributes:
        number: The number of the manager, from 0, which is part of its client name at the broker.
        epochs: The epoch of each shard that the manager holds.
        horizon: The time, in seconds since 1970, up to which the store contains the messages that other
            managers have received. It is infinite if this manager holds all shards or is the only manager.
    """

    def __init__(self) -> None:
        self.number = 0
        self.epochs: dict[int, int] = {}
        self._holder = ""
        self.horizon = float("inf")
        self._patient_until = self._beat_at = float("-inf")

    @classmethod
    def of_all(cls, epoch: int = 0) -> "Shards":
        """Return an object that holds all shards with one epoch, for a process that is not a manager."""
        shards = cls()
        shards.epochs = dict.fromkeys(range(SHARDS), epoch)
        return shards

    @property
    def is_complete(self) -> bool:
        return len(self.epochs) == SHARDS

    def holds(self, name: str) -> bool:
        """Return whether this manager is responsible for a device or a rollout."""
        return self.is_complete or shard_of(name) in self.epochs

    def epoch_of(self, name: str) -> int:
        """Return the epoch of the shard of a device or a rollout. This manager must hold the shard."""
        return self.epochs[shard_of(name)]

    def join(self, session: Session, now: float) -> None:
        """Register as a manager with the lowest free number and no shards, and record it in the audit log.

        `now` is in seconds since 1970.

        Raises:
            UnavailableError: The store allows no additional manager.
        """
        clock = _read_clock(session, now)
        _remove_silent(session, clock)
        check_free(session, now)
        used = set(session.scalars(select(ManagerRow.number)))
        free = [number for number in range(MOST_MANAGERS) if number not in used]
        if not free:
            raise UnavailableError(f"the fleet has {MOST_MANAGERS} managers already", LEASE_S)
        self.number, self.epochs = free[0], {}
        self._holder = f"{socket.gethostname()[:80]}:{os.getpid()}:{os.urandom(4).hex()}"
        session.add(ManagerRow(number=self.number, holder=self._holder, heartbeat_at=clock, turned_at=now))
        session.flush()
        audit.record(session, "manager", "manager.start", self._holder, number=self.number)

    def check(self, session: Session) -> ManagerRow:
        """Return the row of this manager, and lock it against removal until the transaction ends.

        Raises:
            UnavailableError: Another manager has taken over.
        """
        if session.get_bind().dialect.name == "postgresql":
            session.execute(text(f"SET LOCAL idle_in_transaction_session_timeout = {_MOST_IDLE_MS}"))
        row = session.scalars(
            select(ManagerRow)
            .where(ManagerRow.number == self.number, ManagerRow.holder == self._holder)
            .with_for_update()
        ).first()
        if row is None:
            raise UnavailableError("another manager has taken charge of the shards of this one")
        return row

    def beat(self, session: Session, row: ManagerRow, now: float) -> None:
        """Send a heartbeat if the last one is `BEAT_S` old. Long transactions call this at their end.

        `row` is a result of `check`, and `now` is in seconds since 1970.
        """
        if time.monotonic() - self._beat_at >= BEAT_S:
            row.heartbeat_at, self._beat_at = _read_clock(session, now), time.monotonic()

    def look_around(self, session: Session) -> None:
        """Update `horizon` from the store."""
        others = select(func.min(ManagerRow.turned_at)).where(ManagerRow.number != self.number)
        other = None if self.is_complete else session.scalar(others)
        self.horizon = float("inf") if other is None else other

    def balance(self, session: Session, now: float, *, may_leave: bool = True) -> Balance:
        """Send a heartbeat, remove managers that have stopped, and take over or give up shards in the store.

        If the last heartbeat of this manager is too old, for example after a database failure, it waits for
        `LEASE_S` seconds before it removes other managers. The shards of this manager are read from the
        store, because a commit may have succeeded although its answer was lost.

        Args:
            session: The session of a transaction.
            now: The time in seconds since 1970.
            may_leave: Whether to give up shards beyond a fair share.

        Raises:
            UnavailableError: Another manager has taken over.
        """
        clock, row = _read_clock(session, now), self.check(session)
        if clock - row.heartbeat_at >= LEASE_S:
            self._patient_until = clock + LEASE_S
        row.heartbeat_at, row.turned_at, self._beat_at = clock, now, time.monotonic()
        session.flush()
        if clock >= self._patient_until:
            _remove_silent(session, clock)
        holders = session.scalars(select(ManagerRow.holder)).all()
        share = -(-SHARDS // len(holders))
        own = select(ShardRow.number, ShardRow.epoch).where(ShardRow.holder == self._holder)
        own_epochs = {row.number: row.epoch for row in session.execute(own)}
        surplus = frozenset(sorted(own_epochs)[share:] if may_leave else ())
        if surplus:
            session.execute(update(ShardRow).where(ShardRow.number.in_(surplus)).values(holder=""))
        missing = share - len(own_epochs)
        free = (
            select(ShardRow)
            .where(ShardRow.holder.not_in(holders))
            .order_by(ShardRow.number)
            .limit(max(missing, 0))
            .with_for_update(skip_locked=True)
        )
        claimed = {}
        for shard in session.scalars(free).all() if missing > 0 else ():
            # Above all epochs of a lost store, in case this one was restored from a backup.
            shard.holder, shard.epoch = self._holder, max(shard.epoch + 1, int(clock))
            claimed[shard.number] = shard.epoch
        if claimed or surplus:
            changed = {"taken": describe_ranges(claimed), "left": describe_ranges(surplus)}
            audit.record(session, "manager", "manager.shards", self._holder, **changed)
        unknown = {number: epoch for number, epoch in own_epochs.items() if self.epochs.get(number) != epoch}
        return Balance({**unknown, **claimed}, surplus | (self.epochs.keys() - own_epochs.keys()))

    def apply(self, balance: Balance) -> None:
        """Update `epochs` with a balance whose transaction has committed."""
        remaining = {number: epoch for number, epoch in self.epochs.items() if number not in balance.released}
        self.epochs = remaining | balance.claimed

    def leave(self, session: Session) -> None:
        """Remove this manager from the store, so that others can take over its shards at once."""
        session.execute(delete(ManagerRow).where(ManagerRow.holder == self._holder))
        self.epochs = {}


def check_free(session: Session, now: float) -> None:
    """Check that a manager may start. `now` is in seconds since 1970.

    Raises:
        UnavailableError: The store allows only one manager, and another manager is active.
    """
    if session.get_bind().dialect.name != "sqlite":
        return
    for row in session.scalars(select(ManagerRow)):
        age_s = now - row.heartbeat_at
        if 0 <= age_s < LEASE_S:
            raise UnavailableError(
                f"another manager ({row.holder}) is in charge of this fleet, and was active {age_s:.0f} s"
                f" ago; stop it, or wait {LEASE_S:.0f} s after its end; several managers need PostgreSQL",
                LEASE_S - age_s,
            )


def count_living(session: Session, now: float) -> int:
    """Return the number of managers that have sent a heartbeat within the last `LEASE_S`.

    `now` is in seconds since 1970. With PostgreSQL the clock of the database is used instead.
    """
    clock = _read_clock(session, now)
    is_living = ManagerRow.heartbeat_at.between(clock - LEASE_S, clock + LEASE_S)
    return session.scalar(select(func.count()).select_from(ManagerRow).where(is_living)) or 0


def _remove_silent(session: Session, clock: float) -> None:
    """Remove managers whose last heartbeat is too old, unless they are in a transaction."""
    silent = select(ManagerRow).where(
        (ManagerRow.heartbeat_at <= clock - LEASE_S) | (ManagerRow.heartbeat_at > clock + LEASE_S)
    )
    for row in session.scalars(silent.with_for_update(skip_locked=True)).all():
        audit.record(session, "manager", "manager.lost", row.holder, silent_s=clock - row.heartbeat_at)
        session.delete(row)
    session.flush()


def _read_clock(session: Session, now: float) -> float:
    """Return the time of the database, which all managers share, in seconds since 1970."""
    if session.get_bind().dialect.name == "sqlite":
        return now
    clock = session.scalar(select(func.extract("epoch", func.clock_timestamp())))
    return float(clock or 0.0)


def describe_ranges(numbers: Iterable[int]) -> str:
    """Return numbers as a text with ranges, such as `0-31, 40`."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, bounds)) for bounds in ranges)
