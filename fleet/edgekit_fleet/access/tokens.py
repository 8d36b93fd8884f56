"""Tokens for programs, `ekt_...`, with scopes and an expiry time. The store keeps only their digests."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from edgekit_fleet.access.digests import digest, make_secret
from edgekit_fleet.access.principal import SCOPES, Principal, Scope
from edgekit_fleet.store import audit
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.tables import CodeRow, TokenRow, WebhookRow, read_record
from edgekit_runtime.errors import FleetError, NotFoundError

PREFIX: Final = "ekt_"  # lets scanners of repositories find a committed token
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NOTE_S: Final = 60.0  # precision of `used_at`


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token without its secret.

    Attributes:
        name: The name of the token. Its actor in the audit log is `token:NAME`.
        scopes: The permissions of the token.
        created_at: The time of creation, in seconds since 1970.
        expires_at: The time of expiry, in seconds since 1970, or None if the token does not expire.
        created_by: The actor who created the token.
        used_at: The time of the last use, to the minute, in seconds since 1970, or None.
    """

    name: str
    scopes: tuple[Scope, ...]
    created_at: float
    created_by: str
    expires_at: float | None
    used_at: float | None


def add_token(
    session: Session, name: str, scopes: Sequence[str], *, actor: str, life_s: float | None = None
) -> str:
    """Add a token, and return its secret, which the store does not keep.

    `scopes` is not empty. `life_s` is the lifetime in seconds, or None for a token that does not expire.

    Raises:
        FleetError: The name is malformed or taken, or a scope is unknown.
    """
    if not _NAME.fullmatch(name):
        raise FleetError(f"token name {name[:80]!r}, expected 1 to 64 letters, digits, '.', '_' and '-'")
    unknown = [scope for scope in scopes if scope not in SCOPES]
    if unknown or not scopes:
        raise FleetError(f"scopes {list(scopes)!r:.80}, expected at least one of {', '.join(SCOPES)}")
    if session.get(TokenRow, name) is not None:
        raise FleetError(f"token '{name}' exists; choose another name, or revoke it first")
    now = time.time()
    secret = make_secret(PREFIX)
    session.add(
        TokenRow(
            name=name,
            secret_sha256=digest(secret),
            scopes=sorted(set(scopes)),
            created_at=now,
            created_by=actor,
            expires_at=None if life_s is None else now + life_s,
        )
    )
    audit.record(session, actor, "token.add", name, scopes=sorted(set(scopes)))
    return secret


def list_tokens(session: Session) -> list[Token]:
    """Return all tokens, sorted by name."""
    return [
        read_record(Token, row, scopes=tuple(row.scopes))  # which were checked when written
        for row in session.scalars(select(TokenRow).order_by(TokenRow.name))
    ]


def revoke_token(session: Session, name: str, *, actor: str) -> None:
    """Revoke a token and everything that was created with it (see `end_grants_of`).

    Raises:
        FleetError: There is no token of that name.
    """
    row = session.get(TokenRow, name)
    if row is None:
        raise NotFoundError(f"no token '{name}'; `edgekit fleet token list` shows them")
    session.delete(row)
    session.flush()
    audit.record(session, actor, "token.revoke", name)
    end_grants_of(session, f"token:{name}", actor=actor)


def end_grants_of(session: Session, maker: str, *, actor: str) -> None:
    """Revoke the tokens, webhooks and unused enrolment codes that `maker` created.

    `maker` is the name of a user, or `token:NAME`.
    """
    for webhook in session.scalars(select(WebhookRow).where(WebhookRow.created_by == maker)).all():
        session.delete(webhook)
        audit.record(session, actor, "webhook.remove", webhook.name)
    now = time.time()
    is_open = (CodeRow.created_by == maker) & CodeRow.used_at.is_(None) & (CodeRow.expires_at > now)
    for device in session.scalars(select(CodeRow.device).where(is_open)).all():
        audit.record(session, actor, "device.uninvite", device)
    session.execute(update(CodeRow).where(is_open).values(expires_at=now))
    for name in session.scalars(select(TokenRow.name).where(TokenRow.created_by == maker)).all():
        if session.get(TokenRow, name) is not None:  # a token may have made another one of the same name
            revoke_token(session, name, actor=actor)


def end_expired(session: Session, after: float, until: float) -> None:
    """Revoke everything that was created with the tokens that expired in an interval.

    The interval is from `after` (exclusive) to `until` (inclusive), in seconds since 1970.
    """
    expired = select(TokenRow.name).where(TokenRow.expires_at > after, TokenRow.expires_at <= until)
    for name in session.scalars(expired).all():
        end_grants_of(session, f"token:{name}", actor="manager")


def principal_of_token(store: Store, secret: str, now: float) -> Principal | None:
    """Return the principal of a token, or None if the token is unknown or has expired.

    The time of use is stored. `now` is in seconds since 1970.
    """
    with store.snapshot() as session:
        row = session.scalars(select(TokenRow).where(TokenRow.secret_sha256 == digest(secret))).first()
        if row is None or (row.expires_at is not None and row.expires_at <= now):
            return None
    if row.used_at is None or now - row.used_at >= _NOTE_S:
        with store.transaction() as session:
            session.execute(update(TokenRow).where(TokenRow.name == row.name).values(used_at=now))
    return Principal(f"token:{row.name}", frozenset(row.scopes))  # type: ignore[arg-type]  # checked
