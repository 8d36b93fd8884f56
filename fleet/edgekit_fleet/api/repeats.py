"""Requests that come twice: with an `Idempotency-Key` the second one gets the answer to the first.

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
        actor: who sends the request; other actors may use the same key.
        sha256: SHA-256 of method, path and body.
    """

    actor: str
    key: str
    sha256: str


def check_key(key: str) -> str:
    """Return the value of an `Idempotency-Key`, if it has the right form.

    Raises:
        RequestError: 400, it is malformed.
    """
    if not 0 < len(key) <= MAX_KEY_CHARS or not key.isascii() or not key.isprintable():
        raise RequestError(400, f"Idempotency-Key: expected 1 to {MAX_KEY_CHARS} printable ASCII")
    return key


def begin_request(store: Store, request: KeyedRequest, now: float) -> tuple[int, bytes] | None:
    """Mark a new request as begun, and return None.

    For a repeated request, return status and body of its answer.

    Raises:
        RequestError: 422 the key was used for another request; 409 it is being carried out, or its answer is
            not kept.
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
    """Keep the answer to a request; after a status of 500 or more, forget the request, so it can be repeated.

    `answer`: body of the answer; empty if it holds a secret.
    """
    with store.transaction() as session:
        row = session.get(IdempotencyRow, (request.actor, request.key))
        if row is None:
            return
        if status >= 500:
            session.delete(row)
        else:
            row.status, row.answer = status, answer
