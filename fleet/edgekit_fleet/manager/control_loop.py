"""The manager's loop: what devices state goes into the store, what they shall run goes out.

    messages --inbox--> store --decide--> wanted models --publisher--> desired documents

Everything runs on one thread. The store is the truth: the command line writes there, and the loop sees it at
its next turn.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgekit_fleet.broker.mosquitto import Mosquitto, own_address
from edgekit_fleet.identity.authority import Authority
from edgekit_fleet.identity.enrolment import list_revoked_serials
from edgekit_fleet.manager.broker_link import BrokerLink, make_context
from edgekit_fleet.manager.inbox import DeviceIndex, Inbox
from edgekit_fleet.manager.publisher import Outgoing, Publisher
from edgekit_fleet.releases.repository import TufRepository
from edgekit_fleet.store import lease
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetSettings
from edgekit_fleet.store.tables import AuditRow
from edgekit_runtime.errors import OutputError, PackageError, TransportError

_BATCH_S: Final = 0.1  # a transaction costs as much as ten messages
_MESSAGES_A_TURN: Final = 1000
_MESSAGES_BESIDE_A_WAVE: Final = 100
_DECIDE_S: Final = 0.5
_UPKEEP_S: Final = 2.0
_EXPIRY_S: Final = 60.0
_REFRESH_S: Final = 600.0
_UNANSWERED_S: Final = 15.0  # also how soon a device is served whose hello came while we were away
_ADMINISTERED: Final = ("device.enrol", "device.revoke")
_log = logging.getLogger(__name__)

Decide = Callable[[Session, float], bool]
"""Reads answers in the store and writes wanted models of some devices; returns whether more devices follow.

Called twice a second, and at once after an order or an ended execution.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerParts:
    """What the loop works on.

    Attributes:
        store, settings, authority: of the fleet.
        broker: our own, to be restarted when it ends; None for one that others run.
        decide: the rollouts.
        brokers: host and port of the broker, or of each node of a cluster.
    """

    store: Store
    settings: FleetSettings
    authority: Authority
    broker: Mosquitto | None
    decide: Decide
    brokers: tuple[tuple[str, int], ...]


class ControlLoop:
    """The manager while it has the lease.

    Attributes:
        inbox: what has come in.
        index: the devices.
        epoch: of the lease.
    """

    def __init__(self, parts: ManagerParts, repository: TufRepository) -> None:
        """Take the lease, and read the devices.

        Args:
            parts: what the loop works on.
            repository: whose metadata it signs again before it expires.

        Raises:
            UnavailableError: another manager is in charge.
            OutputError: the store cannot be written.
        """
        self._parts = parts
        self._store = parts.store
        self._repository = repository
        self.index = DeviceIndex()
        self.inbox = Inbox(self.index)
        holder = f"{socket.gethostname()}:{os.getpid()}:{os.urandom(4).hex()}"
        with self._store.transaction() as session:
            self.epoch = lease.take(session, holder, time.time())
            self.index.load(session)
            self._audit_seen = _last_number(session)
            parts.authority.write_crl(list_revoked_serials(session))
        key = parts.authority.manager_key
        self._publisher = Publisher(self.index, key, self.epoch, parts.settings.desired_life_s)
        self._link = BrokerLink(self.inbox.put)
        self._decided_at = self._kept_at = self._expired_at = self._refreshed_at = float("-inf")
        self._decided_number = 0
        self._has_more = False  # devices of a wave that wait for their documents

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set.

        Raises:
            UnavailableError: another manager has taken over.
            TransportError: the broker cannot be reached at the start.
        """
        parts = self._parts
        await self._link.connect(parts.brokers, make_context(parts.authority))
        try:
            while not stop.is_set():
                try:
                    await self.turn()
                except OutputError as error:  # a full disk or a lost database: nothing is forgotten
                    _log.error("%s; trying again", error)
                    await asyncio.sleep(1.0)
                is_behind = self._has_more or self.inbox.count_pending() >= _MESSAGES_A_TURN
                await _sleep_until(stop, 0.0 if is_behind else _BATCH_S)
        finally:
            await self._link.close()
            with self._store.transaction() as session:
                lease.release(session, self.epoch)

    async def turn(self) -> None:
        """Do what is due now: one batch of messages, decisions, documents, upkeep.

        Raises:
            UnavailableError: another manager has taken over.
            OutputError: the store cannot be written.
        """
        now, clock = time.time(), time.monotonic()
        limit = _MESSAGES_BESIDE_A_WAVE if self._has_more else _MESSAGES_A_TURN
        unknown = self.inbox.list_unknown(limit)
        if unknown:
            with self._store.transaction() as session:
                self.index.load(session, unknown)
        hellos = self.inbox.take(now, limit)
        with self._store.transaction() as session:
            lease.check(session, self.epoch)
            has_ended = self.inbox.write(session, now)
            outgoing = self._publisher.answer(session, [hello.device for hello in hellos])
            newest = _last_number(session)
            has_news = self._has_more or has_ended or newest != self._decided_number
            if has_news or clock - self._decided_at >= _DECIDE_S:
                self._decided_at, self._decided_number = clock, newest
                self._has_more = self._parts.decide(session, now)
            due = self._publisher.make_due(session, now) if self._link.is_connected else []
        self._has_more = self._has_more or bool(due)
        self.inbox.forget()
        await self._publish([*outgoing, *due], now)
        if clock - self._kept_at >= _UPKEEP_S:
            self._kept_at = clock
            await self._keep_up(now)

    async def _publish(self, outgoing: Sequence[Outgoing], now: float) -> None:
        """Publish documents that the store has; one that is lost here follows at the device's next hello."""
        self._publisher.note_published(outgoing, now)
        for each in outgoing:
            self._link.publish(each.device, "desired", each.envelope, retain=True)
        await self._link.drain()

    async def _keep_up(self, now: float) -> None:
        """Renew the lease, follow administration, restart the broker, and repeat what was not answered."""
        if self._parts.broker is not None:
            try:
                self._parts.broker.restart_if_ended()
            except TransportError as error:
                _log.error("%s", error)
        if now - self._refreshed_at >= _REFRESH_S:
            self._refreshed_at = now
            try:
                await asyncio.to_thread(self._repository.refresh, now)
            except PackageError as error:  # also a missing key; devices report `stale` if nobody mends it
                _log.error("the repository cannot be signed again: %s", error)
        with self._store.transaction() as session:
            lease.renew(session, self.epoch, now)
            revoked = self._follow_administration(session)
            if now - self._expired_at >= _EXPIRY_S:
                self._expired_at = now
                self._publisher.mark_expiring(session, now)
            unanswered = [
                known.name
                for known in self.index.devices.values()
                if not known.is_revoked
                and known.desired_held != known.desired_sent
                and (known.is_online or known.desired_held > known.desired_sent)
                and now - known.sent_at >= _UNANSWERED_S
            ]
            answers = self._publisher.answer(session, unanswered)
            lacking = [known for known in self.index.devices.values() if known.lacks_report(now)]
            self._publisher.renew(session, [known.name for known in lacking])  # each new one is answered
        for known in lacking:
            known.asked_at = now
        await self._publish(answers, now)
        if revoked and self._parts.broker is not None:
            self._parts.broker.reload()
        for name in revoked:
            await self._disconnect(name)

    def _follow_administration(self, session: Session) -> list[str]:
        """Read devices that were enrolled or revoked since the last time; returns the revoked ones."""
        statement = select(AuditRow.number, AuditRow.action, AuditRow.subject).where(
            AuditRow.number > self._audit_seen
        )
        changed: dict[str, str] = {}
        for row in session.execute(statement.order_by(AuditRow.number)):
            self._audit_seen = row.number
            if row.action in _ADMINISTERED:
                changed[row.subject] = row.action
        if changed:
            self.index.load(session, changed)
        revoked = [name for name, action in changed.items() if action == "device.revoke"]
        if revoked:
            self._parts.authority.write_crl(list_revoked_serials(session))
        return revoked

    async def _disconnect(self, device: str) -> None:
        """End the connection of a revoked device: its client identifier is taken over for a moment."""
        link = BrokerLink(lambda _topic, _payload: None, device)
        try:
            folder = self._parts.authority.folder
            pair = self._parts.authority.make_short_lived(device, folder)
            context = make_context(self._parts.authority)
            context.load_cert_chain(*pair)
            await link.connect(self._parts.brokers, context)
            for path in pair:
                path.unlink(missing_ok=True)
        except (TransportError, OSError) as error:
            _log.warning("the connection of '%s' stays until it ends: %s", device, error)
        finally:
            await link.close()


def local_parts(
    store: Store, settings: FleetSettings, authority: Authority, broker: Mosquitto, decide: Decide
) -> ManagerParts:
    """Return the parts of a manager beside its own broker."""
    return ManagerParts(
        store=store,
        settings=settings,
        authority=authority,
        broker=broker,
        decide=decide,
        brokers=((own_address(settings), settings.broker_port),),
    )


def _last_number(session: Session) -> int:
    return session.scalars(select(AuditRow.number).order_by(AuditRow.number.desc()).limit(1)).first() or 0


async def _sleep_until(stop: asyncio.Event, limit_s: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), limit_s)
    except asyncio.TimeoutError:
        return
