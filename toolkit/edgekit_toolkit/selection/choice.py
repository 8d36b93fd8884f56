"""Chooses a candidate by its measured figures, or explains why no candidate meets all limits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Context, Decimal

from edgekit_toolkit.selection.budget import UNITS, Budget

# Costs: larger is worse. Candidates are compared in all of them.
COSTS = ("size", "latency", "memory", "energy", "drop")
# Two latencies closer than this count as equal.
SAME_LATENCY = 0.03
# For processor times measured on this machine: a second run of the same forms moves their ratio by less, and
# other work on the machine does not move this limit, as it would move the spread of the runs (ADR 0032).
SAME_HOST_TIME = 0.15
# If transport is limited, accuracy counts more than a difference in time up to this share, because few bits
# cost much accuracy.
SAME_TIME_FOR_TRANSPORT = 0.4
# Largest time of a form for a GPU on this machine's processor, as a multiple of float32.
MOST_FOR_GPU = 1 + SAME_HOST_TIME


@dataclass(frozen=True, slots=True)
class CandidateFigures:
    """The figures of one candidate.

    Attributes:
        id: The id of the candidate, unique in a run.
        label: The name in reports.
        figures: A dict from each of `COSTS` to its value in the unit of `budget.UNITS`. It also contains
            `transport` if there is a limit on transport. Unknown costs are infinite, so that they exceed
            every limit.
        latency_uncertainty: The factor by which the ratio of this latency to that of another candidate may be
            wrong. It is 1 if the latency was measured on the target.
        host_ratio: The processor time on this machine relative to the source model, infinite if it was not
            measured.
        drop_error: The standard error of the drop in points.
        snr_db: The signal-to-noise ratio of the outputs in dB, with the float model as reference.
    """

    id: str
    label: str
    figures: Mapping[str, float]
    latency_uncertainty: float = 1.0
    host_ratio: float = math.inf
    drop_error: float = 0.0
    snr_db: float = -math.inf

    def __post_init__(self) -> None:
        for cost in COSTS:
            if math.isnan(self.figures.get(cost, math.nan)):
                raise ValueError(f"candidate {self.id!r}: no figure for {cost}: {dict(self.figures)}")
        if not self.latency_uncertainty >= 1 or not self.host_ratio > 0:
            raise ValueError(f"candidate {self.id!r}: expected an uncertainty of at least 1, got {self}")

    @property
    def alike(self) -> float:
        """The largest ratio of two latencies on the target at which candidates count as equally fast."""
        return max(1 + SAME_LATENCY, self.latency_uncertainty)


@dataclass(frozen=True, slots=True)
class Choice:
    """The result of a choice.

    Attributes:
        chosen: The id of the chosen candidate, or None if no candidate meets all limits.
        binding: The limits that prevent a choice, empty if a candidate is chosen. For each of these limits,
            some candidate exceeds only this limit. If there are no such limits, `binding` contains the
            limits that `closest` exceeds.
        closest: The id of the candidate that exceeds the limits least, or None if one is chosen.
        reason: The reason for the result, for the user.
        needed: A text with limits that `closest` would meet, or None if a candidate is chosen.
    """

    chosen: str | None
    binding: tuple[str, ...]
    closest: str | None
    reason: str
    needed: str | None


def pareto_front(candidates: Sequence[CandidateFigures]) -> frozenset[str]:
    """Return the ids of the candidates on the Pareto front.

    For these, no other candidate is at least as good in all costs and better in one. The latency on this
    machine is a cost too. It decides between candidates that are equally fast on the target.
    """
    return frozenset(
        candidate.id
        for candidate in candidates
        if not any(_dominates(other, candidate) for other in candidates)
    )


def rank_further(candidates: Sequence[CandidateFigures], budget: Budget) -> list[CandidateFigures]:
    """Return further candidates to package besides the chosen one, sorted by drop, latency and size.

    A candidate is left out if it exceeds a limit, or if another is at least as good in latency, size and drop
    and better in one of them. Latencies within their uncertainty count as equal. The drop comes first because
    the chosen candidate is already the fastest.

    `candidates` contains the candidates of all engines, including the chosen ones.
    """
    within = [candidate for candidate in candidates if not budget.violations(candidate.figures)]
    front = [candidate for candidate in within if not any(_replaces(other, candidate) for other in within)]
    return sorted(
        front,
        key=lambda candidate: (
            *(candidate.figures[cost] for cost in ("drop", "latency", "size")),
            candidate.id,
        ),
    )


def _replaces(candidate: CandidateFigures, other: CandidateFigures) -> bool:
    pairs = [(candidate.figures[cost], other.figures[cost]) for cost in ("size", "drop")]
    fast, slow = candidate.figures["latency"], other.figures["latency"]
    as_good = all(a <= b for a, b in pairs) and fast <= slow * candidate.alike
    return as_good and (any(a < b for a, b in pairs) or fast * candidate.alike < slow)


def _dominates(candidate: CandidateFigures, other: CandidateFigures) -> bool:
    pairs = [(value, other.figures[cost]) for cost, value in candidate.figures.items()]
    pairs.append((candidate.host_ratio, other.host_ratio))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def choose(candidates: Sequence[CandidateFigures], budget: Budget, *, on_gpu: bool = False) -> Choice:
    """Return the fastest candidate that meets all limits, or the smallest of those that are equally fast.

    Latencies measured on the target are compared if they exist. Otherwise, modelled latencies are compared if
    they differ by more than the uncertainty. If they do not, latencies measured on this machine are compared.
    Among candidates of equal size, the most accurate is chosen. With a limit on transport, accuracy is more
    important than size.

    Args:
        candidates: At least one candidate.
        budget: The limits.
        on_gpu: Whether the target's engine runs on a GPU. If it does, times on this machine are only used to
            exclude candidates that are slower than float32.
    """
    within = [candidate for candidate in candidates if not budget.violations(candidate.figures)]
    if len(within) == 1:
        return Choice(within[0].id, (), None, f"{within[0].label}: the only one that keeps every limit", None)
    if within:
        fastest, reason_of_fastest = _find_fastest(within, on_gpu=on_gpu)
        accurate = _most_accurate(fastest) if "transport" in budget.limits else fastest
        best = min(accurate, key=lambda candidate: (*_rank(candidate), candidate.id))
        reason = f"{best.label}: within every limit; {reason_of_fastest}"
        if {"transport", "drop"} <= budget.limits.keys() and len(accurate) > 1:
            reason += (
                f"; the drops of {len(accurate)} differ by chance at most, and its output has the least noise"
            )
        return Choice(best.id, (), None, reason, None)
    closest = min(candidates, key=lambda candidate: (budget.excess(candidate.figures), candidate.id))
    binding = _binding(candidates, budget)
    gaps = "; ".join(_gap(name, candidates, budget) for name in binding)
    reason = f"no candidate keeps all limits at once; binding: {', '.join(binding)} ({gaps})"
    needed = f"{_needed(closest, budget)} for {closest.label} ({closest.id}), or a smaller model"
    return Choice(None, binding, closest.id, reason, needed)


def _most_accurate(candidates: Sequence[CandidateFigures]) -> list[CandidateFigures]:
    """Return the candidates whose drops the samples do not tell from the least."""
    best = min(candidates, key=lambda candidate: candidate.figures["drop"])
    least = best.figures["drop"] + best.drop_error
    return [
        candidate for candidate in candidates if candidate.figures["drop"] - candidate.drop_error <= least
    ]


def _rank(candidate: CandidateFigures) -> tuple[float, ...]:
    """Return the sort key of equally fast candidates: size, then drop.

    Where transport is limited, accuracy counts first: a limit is there to be used, and forms of fewer bits
    always travel in fewer bytes. The noise of the outputs tells more of it than a few right answers.
    """
    size, drop = candidate.figures["size"], candidate.figures["drop"]
    if "transport" in candidate.figures:
        return (-candidate.snr_db, drop, candidate.figures["transport"])
    return (size, drop)


def _superlative(candidates: Sequence[CandidateFigures]) -> str:
    """Return the word for the best of equally fast candidates; see `_rank`."""
    return (
        "most accurate" if any("transport" in candidate.figures for candidate in candidates) else "smallest"
    )


def _find_fastest(
    candidates: Sequence[CandidateFigures], *, on_gpu: bool
) -> tuple[Sequence[CandidateFigures], str]:
    """Return the candidates not shown to be slower than another, and a reason to choose the smallest."""
    modelled = [candidate for candidate in candidates if math.isfinite(candidate.figures["latency"])]
    unmodelled = [candidate for candidate in candidates if math.isinf(candidate.figures["latency"])]
    least = min((candidate.figures["latency"] for candidate in modelled), default=math.inf)
    within_uncertainty = [
        candidate for candidate in modelled if candidate.figures["latency"] <= least * candidate.alike
    ]
    measured_on_host = [
        candidate for candidate in (*within_uncertainty, *unmodelled) if math.isfinite(candidate.host_ratio)
    ]
    if modelled and all(
        candidate.latency_uncertainty == 1 for candidate in modelled
    ):  # this machine is the target
        times = [
            candidate.host_ratio if math.isfinite(candidate.host_ratio) else candidate.figures["latency"]
            for candidate in modelled
        ]
        return _fastest(modelled, times)
    if len(within_uncertainty) == 1 and not unmodelled:
        margin = f"by more than its uncertainty of {within_uncertainty[0].alike:.2g} x"
        return within_uncertainty, f"the fastest as predicted for the target, {margin}"
    if not measured_on_host:
        proviso = " as far as the target's model can tell" if within_uncertainty else ""
        chosen_by = _superlative(candidates)
        return within_uncertainty or unmodelled, f"the {chosen_by} of the fastest{proviso}"
    fastest, reason = (
        _fit_for_gpu(measured_on_host)
        if on_gpu
        else _fastest(measured_on_host, [candidate.host_ratio for candidate in measured_on_host])
    )
    if not within_uncertainty:
        return fastest, f"{reason}, since latency on the target cannot be modelled"
    ratio = within_uncertainty[0].alike
    rivals = f"{len(within_uncertainty)} alike within {ratio:.2g} x as predicted for the target"
    if unmodelled:
        rivals += f" and {len(unmodelled)} that cannot be modelled"
    return fastest, f"{reason}, of {rivals}"


def _fastest(
    candidates: Sequence[CandidateFigures], times: Sequence[float]
) -> tuple[Sequence[CandidateFigures], str]:
    """Return the candidates about as fast here as the fastest, and a reason to choose the smallest."""
    is_transport_limited = any("transport" in candidate.figures for candidate in candidates)
    same = SAME_TIME_FOR_TRANSPORT if is_transport_limited else SAME_HOST_TIME
    limit = (1 + same) * min(times)
    fastest = [candidate for candidate, time in zip(candidates, times, strict=True) if time <= limit]
    if len(fastest) == 1:
        return fastest, "the fastest measured on this machine"
    share = f"{100 * same:g} %"
    chosen_by = _superlative(fastest)
    return (
        fastest,
        f"the {chosen_by} of {len(fastest)} within {share} of the fastest, measured on this machine",
    )


def _fit_for_gpu(candidates: Sequence[CandidateFigures]) -> tuple[Sequence[CandidateFigures], str]:
    """Drop candidates slower than float32 on this machine; the order of the others means nothing."""
    allowed_on_gpu = [candidate for candidate in candidates if candidate.host_ratio <= MOST_FOR_GPU]
    chosen_by = _superlative(candidates)
    limit = f"{MOST_FOR_GPU} x float32 on this machine, whose processor cannot tell which is faster on a GPU"
    if allowed_on_gpu:
        return allowed_on_gpu, f"the {chosen_by} that is not over {limit}"
    return candidates, f"the {chosen_by}, all being over {limit}"


def _needed(closest: CandidateFigures, budget: Budget) -> str:
    """Return the limits with which the candidate would be chosen, as `parse_budget` reads them."""
    over = budget.violations(closest.figures)
    known_limits = [name for name in over if math.isfinite(closest.figures[name])]
    parts = []
    if known_limits:
        limits = (
            f"{name}={_show(name, closest.figures[name], rounding=ROUND_CEILING)}" for name in known_limits
        )
        parts.append(f"allow {','.join(limits)}")
    unknown = [name for name in over if name not in known_limits]
    if unknown:
        parts.append(f"set no limit on {' or '.join(unknown)}, which cannot be told here,")
    return " and ".join(parts)


def _binding(candidates: Sequence[CandidateFigures], budget: Budget) -> tuple[str, ...]:
    """Return limits that alone exclude a candidate, or else the limits that the closest candidate exceeds."""
    alone = tuple(
        name
        for name in budget.limits
        if any(budget.violations(candidate.figures) == (name,) for candidate in candidates)
    )
    if alone:
        return alone
    closest = min(candidates, key=lambda candidate: (budget.excess(candidate.figures), candidate.id))
    return budget.violations(closest.figures)


def _gap(name: str, candidates: Sequence[CandidateFigures], budget: Budget) -> str:
    """Return a text with the limit and the best value, if possible of a candidate within the other limits."""
    others = [candidate for candidate in candidates if set(budget.violations(candidate.figures)) <= {name}]
    least = min(others or candidates, key=lambda candidate: (candidate.figures[name], candidate.id))
    where = "with the other limits kept" if others else "of any candidate"
    text = f"{name} at most {_show(name, budget.limits[name])}, the least {where} is"
    text = f"{text} {_show(name, least.figures[name])}"
    smallest = min(candidates, key=lambda candidate: (candidate.figures[name], candidate.id))
    if others and smallest.figures[name] < least.figures[name]:
        broken = (item for item in budget.violations(smallest.figures) if item != name)
        cost = ", ".join(f"{item}={_show(item, smallest.figures[item])}" for item in broken)
        text = f"{text}, and {_show(name, smallest.figures[name])} at {cost}"
    return text


def _show(name: str, value: float, *, rounding: str = ROUND_HALF_EVEN) -> str:
    """Return three digits and a unit."""
    if math.isinf(value):
        return "not known"
    unit, exact = UNITS[name][0], Decimal(value)
    if unit == "bytes":
        unit, exact = ("MB", exact / 10**6) if value >= 1e5 else ("kB", exact / 10**3)
    digits = Context(prec=3, rounding=rounding).create_decimal(exact).normalize()
    return f"{digits:f}{'%' if unit == 'points' else unit}"


@dataclass(frozen=True, slots=True)
class FloatRatio:
    """The latency of a candidate relative to the float model.

    Attributes:
        modelled: The ratio on the target, predicted by the latency model. It is None if a latency cannot be
            predicted, or if latencies on this machine are valid for the target.
        uncertainty: The factor by which `modelled` may be wrong.
        here: The ratio to the engine's float candidate, from alternating measurements on this machine.
        here_to_source: The ratio to the source model, measured in the same way.
    """

    modelled: float | None
    uncertainty: float
    here: float
    here_to_source: float


def find_slowdown(ratio: FloatRatio, target: str) -> list[str]:
    """Return a warning if the chosen candidate is slower on this machine than a float model.

    The list is empty otherwise.
    """
    against = {"float32": ratio.here, "the source model": ratio.here_to_source}
    slower = [f"{value:.2f} x {name}" for name, value in against.items() if value > 1 + SAME_LATENCY]
    if not slower:
        return []
    warning = f"slower on this machine: it takes {' and '.join(slower)} (measured here)"
    if ratio.modelled is None:
        return [f"{warning}; no form that keeps every limit is clearly faster"]
    note = (
        f"{warning}, {ratio.modelled:.2f} x float32 as predicted for {target}, which may be off by"
        f" {ratio.uncertainty:.2g} x; measure on {target} before you rely on it"
    )
    return [note]
