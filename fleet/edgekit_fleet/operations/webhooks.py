"""Webhooks: URLs that receive entries of the audit log as signed messages.

Source: Standard Webhooks 1.0.0 (headers `webhook-id`, `webhook-timestamp`, `webhook-signature`).
"""

import base64
import contextlib
import hashlib
import hmac
import http.client
import json
import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final
from urllib.parse import urlsplit

from sqlalchemy import func, select

from edgekit_fleet.operations.names import check_name
from edgekit_fleet.store import audit
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.tables import AuditRow, WebhookRow, read_record
from edgekit_runtime.errors import EdgekitError, FleetError, NotFoundError

_PREFIX: Final = "whsec_"
_SECRET_BYTES: Final = 32
_TURN_S: Final = 0.5
_MESSAGES_A_TURN: Final = 20
_FIRST_PAUSE_S: Final = 5.0
_LONGEST_PAUSE_S: Final = 3600.0
_MAX_URL_CHARS: Final = 2000
_LOCAL: Final = ("127.0.0.1", "::1", "localhost")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A webhook. See `WebhookRow`.

    Attributes:
        name, url, actions, created_at, created_by, failures, because: See `WebhookRow`.
        waiting: The number of unprocessed audit log entries, including those that `actions` exclude.
    """

    name: str
    url: str
    actions: tuple[str, ...]
    created_at: float
    created_by: str
    failures: int
    because: str
    waiting: int


def add_webhook(store: Store, name: str, url: str, actions: Sequence[str], *, actor: str) -> str:
    """Add a webhook for future entries of the audit log, and return its secret `whsec_...`.

    `url` is an `https` URL, or an `http` URL on this machine. `actions` are prefixes of the actions to send,
    such as `rollout.`. If empty, all are sent.

    Raises:
        FleetError: The name is malformed or taken, or the URL is not allowed.
    """
    check_name("webhook", name)
    _check_url(url)
    secret = _PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()
    with store.transaction() as session:
        if session.get(WebhookRow, name) is not None:
            raise FleetError(f"webhook '{name}' exists; choose another name, or remove it first")
        audit.record(session, actor, "webhook.add", name, url=url, actions=list(actions))
        session.add(
            WebhookRow(
                name=name,
                url=url,
                actions=list(actions),
                secret=secret,
                created_at=time.time(),
                created_by=actor,
                position=session.scalar(select(func.max(AuditRow.number))) or 0,
            )
        )
    return secret


def list_webhooks(store: Store) -> list[Webhook]:
    """Return all webhooks, sorted by name."""
    with store.snapshot() as session:
        newest = session.scalar(select(func.max(AuditRow.number))) or 0
        return [
            read_record(Webhook, row, actions=tuple(row.actions), waiting=newest - row.position)
            for row in session.scalars(select(WebhookRow).order_by(WebhookRow.name))
        ]


def remove_webhook(store: Store, name: str, *, actor: str) -> None:
    """Remove a webhook. Entries that are still waiting are not sent to it.

    Raises:
        NotFoundError: There is no webhook of that name.
    """
    with store.transaction() as session:
        row = session.get(WebhookRow, name)
        if row is None:
            raise NotFoundError(f"no webhook '{name}'; `edgekit fleet webhook list` shows them")
        session.delete(row)
        audit.record(session, actor, "webhook.remove", name)


def sign(secret: str, identifier: str, timestamp: int, body: bytes) -> str:
    """Return the value of the header `webhook-signature` for a message.

    `identifier` and `timestamp` are the values of the headers `webhook-id` and `webhook-timestamp`. The
    timestamp is in seconds since 1970.
    """
    key = base64.b64decode(secret.removeprefix(_PREFIX))
    mac = hmac.digest(key, f"{identifier}.{timestamp}.".encode() + body, hashlib.sha256)
    return f"v1,{base64.b64encode(mac).decode()}"


class WebhookSender:
    """Sends messages from a thread, in order for each webhook. Failed messages are sent again.

    Several processes may send. Before a process sends to a webhook, it postpones the webhook's due time, so
    that no other process sends too.
    """

    def __init__(
        self, store: Store, clock: Callable[[], float] = time.time, *, answer_limit_s: float = 10.0
    ) -> None:
        """Prepare the sender. It sends nothing before `start`.

        Args:
            store: The store of the fleet.
            clock: Returns the time in seconds since 1970.
            answer_limit_s: The time limit for the whole response to a message.
        """
        self._answer_limit_s = answer_limit_s
        self._store = store
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)

    def start(self) -> None:
        """Start the thread, which sends messages until `close`."""
        self._thread.start()

    def close(self) -> None:
        """Stop sending, and wait for the current message. Unsent messages are sent after the next start."""
        self._stop.set()
        self._thread.join(self._answer_limit_s + 1)

    def turn(self) -> int:
        """Send the messages that are due. Return the number of messages that were delivered.

        Raises:
            OutputError: The store cannot be written.
        """
        now = self._clock()
        with self._store.snapshot() as session:
            newest = session.scalar(select(func.max(AuditRow.number))) or 0
            statement = select(WebhookRow.name).where(WebhookRow.due_at <= now, WebhookRow.position < newest)
            names = session.scalars(statement).all()
        return sum(self._serve(name) for name in names if not self._stop.is_set())

    def _run(self) -> None:
        while not self._stop.wait(_TURN_S):
            try:
                self.turn()
            except EdgekitError as error:  # noqa: PERF203  # a store that is gone comes back
                _log.error("webhooks: %s; trying again", error)

    def _serve(self, name: str) -> int:
        """Send the next messages of a webhook. Return the number of messages that were delivered."""
        claimed = self._claim(name)
        if claimed is None:
            return 0
        webhook, entries, end = claimed
        because, sent = "", 0
        for entry in entries:
            because = _post(webhook, entry, int(self._clock()), self._answer_limit_s)
            if because or self._stop.is_set():
                end = entry.number - bool(because)
                break
            sent += 1
        with self._store.transaction() as session:
            row = session.get(WebhookRow, name)
            if row is None:
                return sent
            row.position = max(row.position, end)
            row.because = because
            row.failures = row.failures + 1 if because else 0
            pause_s = min(_FIRST_PAUSE_S * 2 ** min(row.failures - 1, 20), _LONGEST_PAUSE_S)
            row.due_at = self._clock() + (pause_s if because else 0.0)
        if because:
            _log.warning("webhook '%s' to %s failed: %s", name, webhook.url, because)
        return sent

    def _claim(self, name: str) -> tuple[WebhookRow, list[AuditRow], int] | None:
        """Reserve a webhook. Return it with its next entries and the position after them."""
        now = self._clock()
        with self._store.transaction() as session:
            row = session.scalars(
                select(WebhookRow).where(WebhookRow.name == name, WebhookRow.due_at <= now).with_for_update()
            ).first()
            if row is None:
                return None
            row.due_at = now + _MESSAGES_A_TURN * self._answer_limit_s
            newest = session.scalar(select(func.max(AuditRow.number))) or 0
            statement = select(AuditRow).where(AuditRow.number > row.position).order_by(AuditRow.number)
            entries, end = [], newest
            for entry in session.scalars(statement.execution_options(yield_per=200)):
                if not row.actions or entry.action.startswith(tuple(row.actions)):
                    entries.append(entry)
                    if len(entries) == _MESSAGES_A_TURN:
                        end = entry.number
                        break
            return row, entries, end


def _post(webhook: WebhookRow, entry: AuditRow, timestamp: int, limit_s: float) -> str:
    """Send one message. Return the reason of a failure, or an empty string."""
    at = datetime.fromtimestamp(entry.at, timezone.utc).isoformat(timespec="milliseconds")
    body = json.dumps(
        {
            "type": entry.action,
            "timestamp": at.replace("+00:00", "Z"),
            "data": {
                "number": entry.number,
                "actor": entry.actor,
                "subject": entry.subject,
                "detail": entry.detail,
            },
        }
    ).encode()
    identifier = f"evt_{entry.number}"
    headers = {
        "content-type": "application/json",
        "user-agent": "edgekit",
        "webhook-id": identifier,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign(webhook.secret, identifier, timestamp, body),
    }
    url = urlsplit(webhook.url)
    host, port = url.hostname or "", url.port
    connection = (
        http.client.HTTPSConnection(host, port, timeout=limit_s, context=ssl.create_default_context())
        if url.scheme == "https"
        else http.client.HTTPConnection(host, port, timeout=limit_s)
    )
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    # The time-out is for one piece; a slow answer of many pieces would delay all other webhooks.
    end = threading.Timer(limit_s, _cut, (connection,))
    end.start()
    try:
        connection.request("POST", path, body, headers)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException, ValueError) as cause:
        return f"{type(cause).__name__}: {cause}"[:500]
    finally:
        end.cancel()
        connection.close()
    return "" if 200 <= status < 300 else f"the address answered {status}, expected 200 to 299"


def _cut(connection: http.client.HTTPConnection) -> None:
    with contextlib.suppress(OSError, AttributeError):  # there is no socket yet, or it is closed
        connection.sock.shutdown(socket.SHUT_RDWR)


def _check_url(url: str) -> None:
    try:
        parsed = urlsplit(url)
        is_local = parsed.hostname in _LOCAL
        _ = parsed.port
    except ValueError as cause:
        raise FleetError(f"webhook URL {url[:80]!r}: {cause}") from cause
    is_printable = url.isascii() and url.isprintable() and " " not in url
    fits = parsed.scheme == "https" or (parsed.scheme == "http" and is_local)
    if not (fits and parsed.hostname and is_printable and len(url) <= _MAX_URL_CHARS) or parsed.username:
        raise FleetError(
            f"webhook URL {url[:80]!r}: expected https://HOST/PATH and no password, or http on this machine"
        )
