"""The manager's loop, which stores the reports of devices and publishes the desired versions.

    messages --inbox--> store --decide--> wanted models --publisher--> desired documents

Everything runs in one thread. All state is in the store. The command line writes its orders there, and the
loop reads them in its next turn.

In this example of one turn, device `d1` has just installed the release of a rollout:

    inbox.take       takes the verified report of d1, whose execution has `succeeded`
    one transaction  `inbox.write` stores the report, `decide` counts it as an answer and starts the next
                     devices, and `publisher.make_due` signs their documents
    commit           if the manager is killed before this, it gets the report from the broker again
    publish          sends the documents (a lost document is sent again after the device's next hello)

Other tasks have their own intervals. The loop sends a heartbeat and balances the shards every few seconds. It
handles revocations and flooding devices every 2 s. It signs the repository every 10 minutes
(`RepositoryUpkeep`), and deletes old figures every hour.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgekit_fleet.access.tokens import end_expired
from edgekit_fleet.broker.mosquitto import Mosquitto, write_revoked
from edgekit_fleet.identity.authority import Authority
from edgekit_fleet.identity.enrolment import list_revoked_serials
from edgekit_fleet.manager.broker_link import BrokerLink, make_context
from edgekit_fleet.manager.expiry import alarm_expiries
from edgekit_fleet.manager.inbox import DeviceIndex, Inbox
from edgekit_fleet.manager.publisher import Outgoing, Publisher
from edgekit_fleet.manager.upkeep import FigureUpkeep, RepositoryUpkeep
from edgekit_fleet.releases.manager_key import ManagerKey, check_newest
from edgekit_fleet.releases.repository import TufRepository
from edgekit_fleet.samples.vault import SampleVault
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetSettings
from edgekit_fleet.store.future import CLOCK_STEP_S, forget_future
from edgekit_fleet.store.shards import BEAT_S, Shards
from edgekit_fleet.store.tables import AuditRow
from edgekit_runtime.errors import (
    OutputError,
    PackageError,
    TransportError,
    UnavailableError,
)

_BATCH_S: Final = 0.2  # a transaction costs as much as thirty messages
_READ_S: Final = 0.002  # for messages that came meanwhile
_MESSAGES_A_TURN: Final = 1000
_MESSAGES_BESIDE_A_WAVE: Final = 20  # each costs as much as three documents. The rest waits
_DECIDE_S: Final = 0.5
_UPKEEP_S: Final = 2.0
_EXPIRY_S: Final = 60.0
_LACKING_AT_ONCE: Final = 200
FLOOD: Final = 1000  # dropped messages of a device in one upkeep, at which the broker drops all of them
SILENT_S: Final = 600.0
_UNANSWERED_S: Final = 15.0  # also the delay of a device whose hello came while we were away
_ADMINISTERED: Final = ("device.enrol", "device.revoke")
_log = logging.getLogger(__name__)

Decide = Callable[[Session, float], bool]
"""Reads the answers of devices in the store, and writes the wanted models of some devices.

Returns whether more devices follow. The loop calls it twice a second, and immediately after an order or the
end of an execution.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerParts:
    """The parts that `ControlLoop` uses.

    Attributes:
        key: The key that signs desired documents.
        broker: The broker that this manager runs and restarts, or None if it runs elsewhere.
        brokers: The host and port of the broker, or of each node of a cluster.
        broker_folder: The folder from which `broker` reads the list of revoked certificates.
        vault: The stored samples, from which the loop deletes old ones, or None if another manager has them.
    """

    store: Store
    settings: FleetSettings
    authority: Authority
    key: ManagerKey
    broker: Mosquitto | None
    decide: Decide
    shards: Shards
    brokers: tuple[tuple[str, int], ...]
    broker_folder: Path
    vault: SampleVault | None = None


class ControlLoop:
    """A manager, responsible for the devices in its shards.

    Attributes:
        inbox: The received messages.
        index: The devices of its shards.
        shards: See `Shards`.
    """

    def __init__(self, parts: ManagerParts, repository: TufRepository | None) -> None:
        """Join the managers, and read the devices of the free shards.

        Args:
            parts: The parts that the loop uses.
            repository: The repository whose metadata it renews, or None if another manager has it.

        Raises:
            UnavailableError: The store allows no other manager.
            ConfigError: The manager's key was rotated, and the folder has an old one.
            OutputError: The store cannot be written.
        """
        self._parts = parts
        self._store, self.shards = parts.store, parts.shards
        self._repository = RepositoryUpkeep(repository, parts.authority, parts.store, parts.vault)
        self._has_run = False
        self._silent_until: dict[str, float] = {}  # devices whose messages the broker drops
        self._join()

    def _join(self) -> None:
        shards, parts = self.shards, self._parts
        self.index = DeviceIndex(shards)
        self.inbox = Inbox(self.index, shards)
        self._publisher = Publisher(self.index, shards, parts.key.read, parts.settings.desired_life_s)
        now = self._turned_at = time.time()
        with self._store.transaction() as session:
            forget_future(session, now)
            check_newest(session, parts.key)
            shards.join(session, now)
            balance = shards.balance(session, now)
            self.index.load_shards(session, balance.claimed.keys())
            self._audit_seen = _last_number(session)
            write_revoked(parts.authority, list_revoked_serials(session), parts.broker_folder)
        shards.apply(balance)
        if parts.broker is not None:
            parts.broker.reload()
        self._link = BrokerLink(self.inbox.put, parts.authority.name_manager(shards.number))
        self._decided_at = self._kept_at = self._expired_at = self._beat_at = float("-inf")
        self._figures = FigureUpkeep(self.index)
        self._repository.rejoin()
        self._tokens_ended_at = 0.0
        self._decided_number = self._audit_seen
        self._hellos: list[str] = []
        self._unsure: float | None = None  # time of a turn that may have been committed, or not
        self._received = 0  # messages since the turn before, with those that were skipped
        self._has_more = False  # devices of a wave that wait for their documents
        self._is_balancing = False  # it may have been committed, or not
        self._has_joined = True

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set. If other managers have removed this manager as dead, it joins again.

        Raises:
            UnavailableError: Another manager has taken over, and the store allows only one.
            ConfigError: See `__init__`.
            TransportError: The broker cannot be reached at the start. This error is only raised if the
                manager runs the broker. Otherwise, the manager waits for the broker.
        """
        try:
            while not stop.is_set():
                await self._run_once(stop)
        finally:
            await self._repository.close()

    async def _run_once(self, stop: asyncio.Event) -> None:
        try:
            if not self._has_joined:
                self._join()
            await self._run(stop)
        except UnavailableError as error:
            if not self._has_joined:
                raise
            self._has_joined = False
            _log.error("%s; joining again", error)
        except (OutputError, TransportError) as error:
            if not self._has_run and self._parts.broker is not None:
                raise
            _log.error("%s; trying again", error)
            await sleep_until(stop, 1.0)

    async def _run(self, stop: asyncio.Event) -> None:
        parts = self._parts
        await self._link.connect(parts.brokers, make_context(parts.authority, self.shards.number))
        self._has_run = True
        try:
            while not stop.is_set():
                try:
                    await self.turn()
                except OutputError as error:  # a full disk or a lost database: nothing is forgotten
                    _log.error("%s; trying again", error)
                    await sleep_until(stop, 1.0)
                # Also if all were skipped: while the manager waits, the broker's queue for it overflows.
                if not self._has_more and self._received < _MESSAGES_A_TURN:
                    with self._link.unread():
                        await sleep_until(stop, _BATCH_S)
                await sleep_until(stop, _READ_S)
        finally:
            await self._link.close()
            with contextlib.suppress(OutputError), self._store.concurrent_transaction() as session:
                self.shards.leave(session)

    async def turn(self) -> None:
        """Do one turn: a batch of messages, decisions, documents, and other tasks that are due.

        Raises:
            UnavailableError: Another manager has taken over, or the clock was set back.
            OutputError: The store cannot be written.
        """
        self._received = self.inbox.count_pending() + self.inbox.skipped
        self._check_clock()
        if self._unsure is not None:
            self._settle()
        if self._is_balancing:
            self._balance(time.time())
        now, clock = time.time(), time.monotonic()  # not the time of the balance: it marks only this turn
        limit = _MESSAGES_BESIDE_A_WAVE if self._has_more else _MESSAGES_A_TURN
        unknown = self.inbox.list_unknown(limit)
        if unknown:
            with self._store.concurrent_transaction() as session:
                self.shards.check(session)
                self.index.load(session, unknown)
        self._hellos += [hello.device for hello in self.inbox.take(now, limit)]
        self._unsure = now  # the connection may be lost while the database commits
        with self._store.concurrent_transaction() as session:
            row = self.shards.check(session)
            if not self.inbox.is_empty:
                row.turned_at = now
            has_ended = self.inbox.write(session, now)
            outgoing = self._publisher.answer(session, self._hellos)
            newest = _last_number(session)
            if newest < self._decided_number:
                raise UnavailableError("the store went back to an older state")
            has_news = self._has_more or has_ended or newest != self._decided_number
            if has_news or clock - self._decided_at >= _DECIDE_S:
                self._decided_at, self._decided_number = clock, newest
                self._has_more = self._parts.decide(session, now)
            due = self._publisher.make_due(session, now) if self._link.is_connected else []
            self.shards.beat(session, row, now)
        self._unsure = None
        self._has_more = self._has_more or bool(due)
        self.inbox.forget()
        self._hellos.clear()
        await self._publish([*outgoing, *due], now)
        if clock - self._beat_at >= BEAT_S:
            self._beat_at = clock
            self._balance(now)
        if clock - self._kept_at >= _UPKEEP_S:
            self._kept_at = clock
            await self._keep_up(now)

    def _check_clock(self) -> None:
        """Check that the clock was not set back since the last call.

        Raises:
            UnavailableError: The clock was set back, so all state with its times must be read again.
        """
        now, before = time.time(), self._turned_at
        if now < before - CLOCK_STEP_S:
            raise UnavailableError(f"the clock was set back by {before - now:.0f} s")
        self._turned_at = now

    def _settle(self) -> None:
        """Check whether an unconfirmed commit succeeded. If so, forget the writes of its turn."""
        with self._store.concurrent_transaction() as session:
            was_committed = self.shards.check(session).turned_at == self._unsure
        if was_committed:
            self.inbox.forget()
        self._unsure = None

    def _balance(self, now: float) -> None:
        """Report that this manager is alive, and take or leave shards."""
        self._is_balancing = True
        with self._store.concurrent_transaction() as session:
            may_leave = not self._has_more and self.inbox.count_pending() < _MESSAGES_A_TURN
            balance = self.shards.balance(session, now, may_leave=may_leave)
            self.index.load_shards(session, balance.claimed.keys())
        self.shards.apply(balance)
        self.index.drop_shards(balance.released)
        if balance.claimed:
            self.inbox.take_over()
        self._is_balancing = False

    async def _publish(self, outgoing: Sequence[Outgoing], now: float) -> None:
        """Publish stored documents. A lost document is sent again after the device's next hello."""
        self._publisher.note_published(outgoing, now)
        for message in outgoing:
            self._link.publish(message.device, "desired", message.envelope, retain=True)
        await self._link.drain()

    async def _keep_up(self, now: float) -> None:
        """Follow administrative changes, restart the broker, and repeat unanswered messages."""
        if self._parts.broker is not None:
            try:
                self._parts.broker.restart_if_ended()
            except TransportError as error:
                _log.error("%s", error)
            self._silence_floods(self._parts.broker, time.monotonic())
        expiries = self._repository.begin(now)
        self._follow_key()
        with self._store.concurrent_transaction() as session:
            self.shards.check(session)
            alarm_expiries(session, expiries, now)
            end_expired(session, self._tokens_ended_at, now)
            revoked, last_number = self._follow_administration(session)
            if now - self._expired_at >= _EXPIRY_S:
                self._expired_at = now
                self._publisher.mark_expiring(session, now)
            self._figures.forget_next(session, now)
            unanswered = [
                entry.name
                for entry in self.index.devices.values()
                if not entry.is_revoked
                and entry.desired_held != entry.desired_sent
                and (entry.is_online or entry.desired_held > entry.desired_sent)
                and now - entry.sent_at >= _UNANSWERED_S
            ]
            answers = self._publisher.answer(session, unanswered)
            lacking = [entry for entry in self.index.devices.values() if entry.lacks_report(now)]
            # A node of a cluster may repeat what thousands of devices said long ago.
            lacking = lacking[:_LACKING_AT_ONCE]
            self._publisher.renew(session, [entry.name for entry in lacking])  # each new one is answered
        self._tokens_ended_at = now
        for entry in lacking:
            entry.asked_at, entry.is_late = now, False
        await self._publish(answers, now)
        if revoked and self._parts.broker is not None:
            self._parts.broker.reload()
        for name in revoked:
            if self.shards.holds(name):
                await self._disconnect(name)
        self._audit_seen = last_number  # last, so that all of it is done again after a full disk

    def _silence_floods(self, broker: Mosquitto, clock: float) -> None:
        """Let the broker drop messages of flooding devices for ten minutes."""
        flooding = [name for name, count in self.inbox.take_floods().items() if count >= FLOOD]
        silent = {name: until for name, until in self._silent_until.items() if clock < until}
        silent |= dict.fromkeys(flooding, clock + SILENT_S)
        if silent.keys() != self._silent_until.keys():
            broker.silence(silent)
            _log.warning("the broker drops what these devices send: %s", ", ".join(silent) or "none")
        self._silent_until = silent

    def _follow_key(self) -> None:
        """Sign all documents again if somebody has exchanged the manager's key."""
        try:
            if self._publisher.follow_key():
                self._expired_at = float("-inf")
        except PackageError as error:  # documents by the old key are refused; devices keep their models
            _log.error("the manager's key cannot be read: %s", error)

    def _follow_administration(self, session: Session) -> tuple[list[str], int]:
        """Read devices that were enrolled or revoked since the last time.

        Returns:
            The revoked ones, and the number of the last entry.
        """
        statement = select(AuditRow.number, AuditRow.action, AuditRow.subject).where(
            AuditRow.number > self._audit_seen
        )
        changed: dict[str, str] = {}
        last_number = self._audit_seen
        for row in session.execute(statement.order_by(AuditRow.number)):
            last_number = row.number
            if row.action in _ADMINISTERED:
                changed[row.subject] = row.action
        if changed:
            self.index.load(session, changed)
        revoked = [name for name, action in changed.items() if action == "device.revoke"]
        if revoked:
            parts = self._parts
            write_revoked(parts.authority, list_revoked_serials(session), parts.broker_folder)
        return revoked, last_number

    async def _disconnect(self, device: str) -> None:
        """Close the connection of a revoked device by connecting with its client identifier."""
        link = BrokerLink(lambda _topic, _payload: None, device)
        try:
            context = make_context(self._parts.authority)
            self._parts.authority.load_short_lived(context, device)
            await link.connect(self._parts.brokers, context)
        except (TransportError, OSError) as error:
            _log.warning("the connection of '%s' stays until it ends: %s", device, error)
        finally:
            await link.close()


def _last_number(session: Session) -> int:
    return session.scalars(select(AuditRow.number).order_by(AuditRow.number.desc()).limit(1)).first() or 0


async def sleep_until(stop: asyncio.Event, limit_s: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), limit_s)
    except asyncio.TimeoutError:
        return
