"""Choose among measured candidates: Pareto front, choice under all limits at once, or a reasoned refusal. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
        figures: cost name -> value in the unit of `budget.UNITS`; every name of `COSTS`.
    """

    id: str
    label: str
    figures: Mapping[str, float]


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
    over = budget.violations(closest.figures)
    needed = "allow " + ",".join(f"{name}={_show(name, closest.figures[name])}" for name in over)
    return Choice(
        None, binding, closest.id, reason, f"{needed} for {closest.label} ({closest.id}), or a smaller model"
    )


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


def _show(name: str, value: float) -> str:
    unit, _ = UNITS[name]
    if unit == "bytes":
        return f"{value / 1e6:.3g}MB" if value >= 1e5 else f"{value / 1e3:.3g}kB"
    return f"{value:.3g}{'%' if unit == 'points' else unit}"
