"""Notifies open pages of changes in the store, by server-sent events.

While any page is open, a watcher reads two values from the store ten times a second: the number of the newest
audit log entry, and the time of the newest document of a device. Events have no content, since each page
fetches its own part again. The `id` of an event is the position up to which the page has been updated. A
browser sends it when it reconnects, so no event is lost while the tab is hidden or the network is down.

| event | meaning |
|---|---|
| `devices` | a device has sent documents, or a user has changed a device |
| `releases`, `rollouts` | the audit log has a new entry about a release or a rollout |
| `audit` | the audit log has a new entry of any kind |
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from edgekit_fleet.store.database import Store
from edgekit_fleet.store.tables import AuditRow, DeviceRow
from edgekit_runtime.errors import OutputError

_POLL_S: Final = 0.1
_EVENT_S: Final = 1.0  # least time between events of a page. The first one after a quiet time goes at once
_QUIET_S: Final = 15.0
_LONGEST_S: Final = 600.0  # then the browser connects again, and its login is checked again
_RETRY_S: Final = 2.0
_KEPT_ENTRIES: Final = 1000
_TOPICS: Final = {"rollout": "rollouts", "release": "releases", "device": "devices", "alarm": "devices"}
_ALL: Final = frozenset((*_TOPICS.values(), "audit"))
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EventPosition:
    """The position in the store up to which a page has been updated.

    Attributes:
        audit: The number of the newest entry of the audit log.
        devices_ms: The time of the newest document of a device, in milliseconds since 1970.
    """

    audit: int
    devices_ms: int

    def __str__(self) -> str:
        return f"{self.audit}-{self.devices_ms}"

    @classmethod
    def parse(cls, text: str) -> "EventPosition":
        """Parse the text form of a position. Any other text gives the position before all events."""
        audit, _, devices_ms = text.partition("-")
        if audit.isdecimal() and devices_ms.isdecimal() and len(text) < 50:
            return cls(int(audit), int(devices_ms))
        return cls(0, 0)


class Watcher:
    """Watches the store for changes while any page listens.

    Attributes:
        max_listeners: The maximum number of listening pages. Each uses a connection of the server.
        max_of_user: The maximum number of listening pages of one user.
    """

    def __init__(self, store: Store, *, max_listeners: int = 200, max_of_user: int = 20) -> None:
        self._store = store
        self.max_listeners, self.max_of_user = max_listeners, max_of_user
        self._current = EventPosition(0, 0)
        self._entries: deque[tuple[int, str]] = deque(maxlen=_KEPT_ENTRIES)
        self._listeners: Counter[str] = Counter()  # by user
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()

    def admits(self, user: str) -> bool:
        """Return True if one more page of this user may listen."""
        is_full = self._listeners.total() >= self.max_listeners
        return not is_full and self._listeners[user] < self.max_of_user

    def read_position(self) -> EventPosition:
        """Return the current position. Call this before the content of a page is read."""
        with self._store.snapshot() as session:
            return _read_position(session)

    async def listen(self, position: EventPosition, user: str) -> AsyncIterator[bytes]:
        """Yield the changes since `position` for ten minutes, in the format `text/event-stream`.

        Yield nothing if too many pages are listening (see `admits`).
        """
        if not self.admits(user):  # others began between the request and here
            return
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _LONGEST_S
        self._listeners[user] += 1
        try:
            if self._task is None:  # made before the first await, so that all listeners share one
                self._task = loop.create_task(self._watch())
            await self._poll()
            yield b": open\n\n"
            while loop.time() < end_s:
                changed, current = self._changed, self._current
                topics = self._find_topics(position)
                if topics:
                    position = current
                    yield "".join(f"id: {position}\nevent: {topic}\ndata:\n\n" for topic in topics).encode()
                    await asyncio.sleep(_EVENT_S)
                    continue
                try:
                    await asyncio.wait_for(changed.wait(), _QUIET_S)
                except asyncio.TimeoutError:
                    yield b": quiet\n\n"  # a closed connection shows only when something is written
        finally:
            self._listeners[user] -= 1
            self._listeners += Counter()  # drops users without a page
            if not self._listeners and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                await self._poll()
            except OutputError as error:
                _log.warning("%s; trying again", error)
                await asyncio.sleep(_RETRY_S)

    async def _poll(self) -> None:
        async with self._one_at_a_time:
            current, entries = await run_in_threadpool(self._read_news, self._current)
            if current != self._current:
                self._current = current
                self._entries.extend(entries)
                self._changed.set()
                self._changed = asyncio.Event()

    def _read_news(self, last: EventPosition) -> tuple[EventPosition, list[tuple[int, str]]]:
        with self._store.snapshot() as session:
            current = _read_position(session)
            if current.audit == last.audit:
                return current, []
            statement = select(AuditRow.number, AuditRow.action).where(
                AuditRow.number > max(last.audit, current.audit - _KEPT_ENTRIES),
                AuditRow.number <= current.audit,
            )
            return current, [(row.number, row.action) for row in session.execute(statement)]

    def _find_topics(self, position: EventPosition) -> list[str]:
        """Return the topics that have changed since, or all topics if the entries in between are gone."""
        topics = {"devices"} if self._current.devices_ms != position.devices_ms else set()
        if self._current.audit != position.audit:
            if not self._entries or min(number for number, _ in self._entries) > position.audit + 1:
                return sorted(_ALL)
            topics.add("audit")
            for number, action in self._entries:
                topic = _TOPICS.get(action.partition(".")[0])
                if number > position.audit and topic is not None:
                    topics.add(topic)
        return sorted(topics)


def _read_position(session: Session) -> EventPosition:
    number = session.scalar(select(AuditRow.number).order_by(AuditRow.number.desc()).limit(1))
    newest = [
        session.scalar(
            select(DeviceRow.last_seen_at)
            .where(DeviceRow.is_online.is_(is_online), DeviceRow.last_seen_at.is_not(None))
            .order_by(DeviceRow.last_seen_at.desc())
            .limit(1)
        )
        for is_online in (False, True)
    ]
    return EventPosition(number or 0, int(max(at or 0.0 for at in newest) * 1000))
