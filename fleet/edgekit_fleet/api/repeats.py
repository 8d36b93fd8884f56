"""Stores answers, so that a repeated request with the same `Idempotency-Key` gets the same answer.

Source: draft-ietf-httpapi-idempotency-key-header-07.
"""

from dataclasses import dataclass
from typing import Final

from sqlalchemy import delete

from edgekit_fleet.store.database import Store
from edgekit_fleet.store.tables import IdempotencyRow
from edgekit_runtime.errors import RequestError

MAX_KEY_CHARS: Final = 128
_KEPT_S: Final = 86_400.0
_ABANDONED_S: Final = 600.0  # the process that worked on it has ended


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """A request with the header `Idempotency-Key`.

    Attributes:
        actor: The sender of the request. The keys of different actors are independent.
        sha256: The SHA-256 of the method, path and body.
    """

    actor: str
    key: str
    sha256: str


def check_key(key: str) -> str:
    """Check the form of an `Idempotency-Key`, and return it.

    Raises:
        RequestError: 400, the key is malformed.
    """
    if not 0 < len(key) <= MAX_KEY_CHARS or not key.isascii() or not key.isprintable():
        raise RequestError(400, f"Idempotency-Key: expected 1 to {MAX_KEY_CHARS} printable ASCII")
    return key


def begin_request(store: Store, request: KeyedRequest, now: float) -> tuple[int, bytes] | None:
    """Record that a new request has begun, and return None.

    For a repeated request, return the status and body of its answer.

    Raises:
        RequestError: 409, the request is in progress or its answer is not stored. 422, the key was used for
            another request.
    """
    with store.transaction() as session:
        session.execute(delete(IdempotencyRow).where(IdempotencyRow.created_at < now - _KEPT_S))
        row = session.get(IdempotencyRow, (request.actor, request.key))
        if row is not None and row.request_sha256 != request.sha256:
            raise RequestError(422, "this Idempotency-Key was used for another request; use a new one")
        if row is not None and row.status is not None:
            if not row.answer:
                raise RequestError(
                    409,
                    "the request was carried out; its answer held a secret and is not kept",
                )
            return row.status, row.answer
        if row is not None and now - row.created_at < _ABANDONED_S:
            raise RequestError(
                409, "a request with this Idempotency-Key is being carried out", retry_after_s=1
            )
        if row is not None:
            session.delete(row)
            session.flush()
        session.add(
            IdempotencyRow(
                actor=request.actor, key=request.key, request_sha256=request.sha256, created_at=now
            )
        )
    return None


def end_request(store: Store, request: KeyedRequest, status: int, answer: bytes) -> None:
    """Store the answer to a request. It is sent again if the request is repeated with the same key.

    An answer with a status of 500 or more is not stored, so the request can be tried again. `answer` is the
    body, or empty if the answer contains a secret.
    """
    with store.transaction() as session:
        row = session.get(IdempotencyRow, (request.actor, request.key))
        if row is None:
            return
        if status >= 500:
            session.delete(row)
        else:
            row.status, row.answer = status, answer
