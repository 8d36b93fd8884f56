"""The audit log, with a filter, and the verification of its chain of digests."""

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgekit_fleet.console.shell import Console, Section, with_query
from edgekit_fleet.operations.records import find_audit_break
from edgekit_fleet.store.tables import AuditRow

SECTION: Final = Section("Audit", "/audit", 60)
_PAGE: Final = 60
_DETAIL_CHARS: Final = 240
_KINDS: Final = ("alarm.", "device.", "release.", "rollout.", "sample.", "user.", "token.", "manager.")


@dataclass(frozen=True, slots=True)
class ChainCheck:
    """The result of the last verification of the whole chain.

    Attributes:
        at: The time of the verification, in seconds since 1970.
        broken_at: The number of the first entry that does not match the previous one, or None.
    """

    at: float
    broken_at: int | None


class AuditPages:
    """The pages of the audit log, with the result of the last verification in this process."""

    def __init__(self) -> None:
        self._check: ChainCheck | None = None

    def show(self, console: Console, request: Request) -> Response:
        """Return the page with the newest entries that match the query.

        The query parameters are `subject`, `actor`, `action` (a prefix) and `before`. The entries on the page
        have lower numbers than `before`.
        """
        query = request.query_params
        statement = select(AuditRow).order_by(AuditRow.number.desc()).limit(_PAGE + 1)
        if subject := query.get("subject", "").strip():
            statement = statement.where(AuditRow.subject == subject)
        if action := query.get("action", "").strip():
            statement = statement.where(AuditRow.action >= action, AuditRow.action < f"{action}\U0010ffff")
        if actor := query.get("actor", "").strip():
            statement = statement.where(AuditRow.actor == actor)
        if (before := query.get("before", "")).isdecimal() and len(before) < 19:
            statement = statement.where(AuditRow.number < int(before))
        with console.store.snapshot() as session:
            rows = session.scalars(statement).all()
            newest = session.scalar(select(AuditRow.number).order_by(AuditRow.number.desc()).limit(1))
        next_page = with_query(request, before=str(rows[_PAGE - 1].number)) if len(rows) > _PAGE else ""
        return console.render(
            request,
            "audit.html",
            entries=[(row, _shorten(row.detail)) for row in rows[:_PAGE]],
            next_page=next_page,
            first_page=with_query(request, before="") if before else "",
            subject=subject,
            action=action,
            actor=actor,
            kinds=_KINDS,
            newest=newest or 0,
            check=self._check,
        )

    def verify(self, console: Console, request: Request) -> Response:
        """Verify the whole chain, and redirect to the result. A million entries take half a minute."""
        broken_at = find_audit_break(console.store)
        self._check = ChainCheck(time.time(), broken_at)
        result = "holds" if broken_at is None else f"is broken at entry {broken_at}"
        return console.redirect(request, "/audit", f"The chain of the audit log {result}.")


def _shorten(detail: Mapping[str, Any]) -> str:
    """Return the detail of an entry as one line."""
    if "entries" in detail:  # of a rollout: its page shows them
        kinds = Counter(
            str(entry.get("action") or entry.get("order") or entry["kind"]) for entry in detail["entries"]
        )
        return ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in kinds.items())
    parts = [
        f"{key}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for key, value in detail.items()
        if value not in ("", None, {}, [])
    ]
    text = "; ".join(parts)
    return text if len(text) <= _DETAIL_CHARS else text[: _DETAIL_CHARS - 1] + "…"


def list_routes(console: Console) -> list[Route]:
    audit = AuditPages()
    return [
        console.get("/audit", audit.show),
        console.post("/audit/verify", audit.verify, "read"),
    ]
