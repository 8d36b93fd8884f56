"""The verdicts on rollouts, and the evidence of judges outside of the fleet."""

import time
from dataclasses import replace

from sqlalchemy import select

from edgekit_fleet.access import failure_limit
from edgekit_fleet.operations.rollouts import find_row
from edgekit_fleet.rollouts.outside_gates import (
    MAX_REASON,
    Evidence,
    OutsideFinding,
    check_evidence,
    judge_evidence,
)
from edgekit_fleet.rollouts.progress import RolloutSettings
from edgekit_fleet.rollouts.runner import log_entries
from edgekit_fleet.rollouts.verdict import VERDICT_ACTION, RolloutVerdict, give_verdict
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.tables import AuditRow
from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import FleetError

_OPEN: tuple[str, ...] = ("running", "paused")


def find_verdict(store: Store, name: str) -> RolloutVerdict:
    """Return the current verdict on a rollout, with the rollout's state and its reason.

    Raises:
        NotFoundError: There is no such rollout.
    """
    logged = (
        select(AuditRow.detail)
        .where(AuditRow.subject == name, AuditRow.action == VERDICT_ACTION)
        .order_by(AuditRow.number.desc())
        .limit(1)
    )
    with store.snapshot() as session:
        row = find_row(session, name)
        detail = session.scalar(logged) or {}
        return RolloutVerdict(
            rollout=name,
            release=row.release,
            verdict=give_verdict(row.state, detail.get("verdict")),
            state=row.state,
            reasons=(row.because,),
        )


def add_evidence(store: Store, name: str, evidence: Evidence, actor: str) -> OutsideFinding:
    """Add evidence for the next decision about a rollout, and return the finding of the gate.

    Raises:
        NotFoundError: There is no such rollout.
        FleetError: The rollout is not open, or has no matching gate.
        RequestError: 429, this actor has sent too much evidence on the rollout within a minute.
    """
    evidence = replace(evidence, who=actor, reason=evidence.reason[:MAX_REASON])
    now = time.time()
    with store.transaction() as session:
        row = find_row(session, name, will_change=True)
        if row.state not in _OPEN:
            expected = " or ".join(_OPEN)
            raise FleetError(f"rollout '{name}' is {row.state}, expected {expected}: evidence comes too late")
        gates = from_plain(RolloutSettings, row.settings, name).evidence
        check_evidence(gates, evidence)
        # Of each judge by itself: a flood of one must not keep the stop of another one out.
        limits = {f"evidence of {name} by {actor}": failure_limit.MAX_FAILURES}
        if not failure_limit.take(session, limits, now):
            raise failure_limit.too_many("pieces of evidence")
        log_entries(session, name, actor, [evidence], now)
    return judge_evidence(gates[evidence.gate], evidence)
