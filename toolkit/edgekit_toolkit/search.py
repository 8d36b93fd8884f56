"""Choose among measured candidates: Pareto front, choice under all limits, or a reasoned refusal. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Context, Decimal

from edgekit_toolkit.budget import UNITS, Budget

# What counts as worse when it grows; a candidate is compared in all of them.
COSTS = ("size", "latency", "memory", "energy", "drop")
# Two latencies closer than this are the same measurement.
SAME_LATENCY = 0.03


@dataclass(frozen=True, slots=True)
class Measured:
    """One candidate with its figures.

    Attributes:
        id: short name.
        label: what it is, for people.
        figures: cost name -> value in the unit of `budget.UNITS`; every name of `COSTS`. One that is not
            known is infinite, so that no limit on it is kept.
    """

    id: str
    label: str
    figures: Mapping[str, float]

    def __post_init__(self) -> None:
        for cost in COSTS:
            if math.isnan(self.figures.get(cost, math.nan)):
                raise ValueError(f"candidate {self.id!r}: no figure for {cost}: {dict(self.figures)}")


@dataclass(frozen=True, slots=True)
class Choice:
    """The outcome of the search.

    Attributes:
        chosen: id, or None where no candidate keeps all limits.
        binding: limits that stand in the way: every candidate that keeps the others exceeds one of these.
        closest: id of the candidate that exceeds its limits least, where none is chosen.
        reason: one sentence for people.
        needed: what would have to change, where none is chosen.
    """

    chosen: str | None
    binding: tuple[str, ...]
    closest: str | None
    reason: str
    needed: str | None


def pareto_front(candidates: Sequence[Measured]) -> frozenset[str]:
    """Ids of the candidates that no other one matches or beats in every cost while beating it in one."""
    return frozenset(one.id for one in candidates if not any(_dominates(other, one) for other in candidates))


def rank_further(candidates: Sequence[Measured], budget: Budget) -> list[Measured]:
    """Return what is worth carrying beside the choice, the most accurate first, of those alike the fastest.

    These are the candidates that keep all limits and that no other such one matches or beats in latency, size
    and drop while beating it in one; latencies closer than `SAME_LATENCY` count as equal. The choice is the
    fastest, so the others pay by accuracy or size, and accuracy is what a device with power to spare wants.

    Args:
        candidates: of all engines, the chosen ones included.
        budget: limits.
    """
    keeping = [one for one in candidates if not budget.violations(one.figures)]
    front = [one for one in keeping if not any(_replaces(other, one) for other in keeping)]
    return sorted(
        front, key=lambda one: (*(one.figures[cost] for cost in ("drop", "latency", "size")), one.id)
    )


def _replaces(one: Measured, other: Measured) -> bool:
    pairs = [(one.figures[cost], other.figures[cost]) for cost in ("size", "drop")]
    fast, slow = one.figures["latency"], other.figures["latency"]
    as_good = all(a <= b for a, b in pairs) and fast <= slow * (1 + SAME_LATENCY)
    return as_good and (any(a < b for a, b in pairs) or fast * (1 + SAME_LATENCY) < slow)


def _dominates(one: Measured, other: Measured) -> bool:
    pairs = [(one.figures[cost], other.figures[cost]) for cost in COSTS]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def choose(candidates: Sequence[Measured], budget: Budget) -> Choice:
    """Return the candidate that keeps all limits and is the fastest; among equally fast ones the smallest.

    Args:
        candidates: at least one.
        budget: limits.
    """
    keeping = [one for one in candidates if not budget.violations(one.figures)]
    if keeping:
        fastest = min(one.figures["latency"] for one in keeping)
        near = [one for one in keeping if one.figures["latency"] <= fastest * (1 + SAME_LATENCY)]
        best = min(near, key=lambda one: (one.figures["size"], one.figures["drop"], one.id))
        reason = f"{best.label}: keeps every limit; the smallest of the fastest"
        return Choice(best.id, (), None, reason, None)
    closest = min(candidates, key=lambda one: (budget.excess(one.figures), one.id))
    binding = _binding(candidates, budget)
    said = "; ".join(_gap(name, candidates, budget) for name in binding)
    reason = f"no candidate keeps all limits at once; binding: {', '.join(binding)} ({said})"
    needed = f"{_needed(closest, budget)} for {closest.label} ({closest.id}), or a smaller model"
    return Choice(None, binding, closest.id, reason, needed)


def _needed(closest: Measured, budget: Budget) -> str:
    """The limits with which the candidate would be chosen, as `parse_budget` reads them."""
    over = budget.violations(closest.figures)
    known = [name for name in over if math.isfinite(closest.figures[name])]
    parts = []
    if known:
        shown = (f"{name}={_show(name, closest.figures[name], rounding=ROUND_CEILING)}" for name in known)
        parts.append(f"allow {','.join(shown)}")
    unknown = [name for name in over if name not in known]
    if unknown:
        parts.append(f"set no limit on {' or '.join(unknown)}, which cannot be told here,")
    return " and ".join(parts)


def _binding(candidates: Sequence[Measured], budget: Budget) -> tuple[str, ...]:
    """Limits without which some candidate would do; where lifting one is not enough, those of the closest."""
    alone = tuple(
        name for name in budget.limits if any(budget.violations(one.figures) == (name,) for one in candidates)
    )
    if alone:
        return alone
    closest = min(candidates, key=lambda one: (budget.excess(one.figures), one.id))
    return budget.violations(closest.figures)


def _gap(name: str, candidates: Sequence[Measured], budget: Budget) -> str:
    """The limit, and the best that any candidate reaches in it and with the other limits kept."""
    others = [one for one in candidates if set(budget.violations(one.figures)) <= {name}]
    least = min(one.figures[name] for one in others or candidates)
    where = "with the other limits kept" if others else "of any candidate"
    return f"{name} at most {_show(name, budget.limits[name])}, the least {where} is {_show(name, least)}"


def _show(name: str, value: float, *, rounding: str = ROUND_HALF_EVEN) -> str:
    """Three digits and a unit."""
    if math.isinf(value):
        return "not known"
    unit, exact = UNITS[name][0], Decimal(value)
    if unit == "bytes":
        unit, exact = ("MB", exact / 10**6) if value >= 1e5 else ("kB", exact / 10**3)
    digits = Context(prec=3, rounding=rounding).create_decimal(exact).normalize()
    return f"{digits:f}{'%' if unit == 'points' else unit}"
