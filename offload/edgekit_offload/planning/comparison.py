"""Compares candidates: computes their scores, finds the best ones, and makes the cut table.

For example, `local` takes 50 ms, `raw` 900 ms and `cut1-int8` 55 ms on a slow link. On a fast link, they take
50, 30 and 35 ms. The table then has `local` and `raw`, and the report says by which factor the cut is slower.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgekit_offload.partition.coding import CUT_CODINGS, EXACT_UPLOADS, LOSSY_SAMPLES
from edgekit_offload.partition.opened_model import Feeds
from edgekit_offload.planning.cut_candidates import CutSearchResult
from edgekit_offload.planning.envelope import SIMPLICITY, Grid, find_winners, score_all, win_ranges
from edgekit_offload.planning.explain import explain_candidate, explain_leakage, explain_plan
from edgekit_offload.planning.plan_inputs import PlanInputs
from edgekit_offload.planning.result import (
    NEVER,
    Candidate,
    PlannedMachine,
    PlanningResult,
    Refusal,
    SentTensor,
)
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.latency_model import Conditions, predict_s, reserved_server_s

MAX_SAMPLES: Final = 16  # samples on which the sizes of all tensors are measured
MAX_DEVICES: Final = 100_000  # devices of a server. More are not counted
_LARGE_SPREAD: Final = 0.1  # a profile with a larger spread gets a warning


def min_samples(candidate: Candidate) -> int:
    """Return the number of samples needed to estimate the loss of a coding, or 0 if it is exact."""
    return max(map(_min_samples, candidate.sent), default=0)


def _min_samples(tensor: SentTensor) -> int:
    if tensor.coding in CUT_CODINGS and not tensor.rounding:
        return CUT_CODINGS[tensor.coding].min_samples
    return 0 if tensor.coding in EXACT_UPLOADS and not tensor.rounding else LOSSY_SAMPLES


def exceeds_loss(candidate: Candidate, max_loss: float) -> bool:
    """Return whether more than `max_loss` of the answers may be wrong. An unknown loss counts as 1."""
    if not candidate.has_known_loss or candidate.expected_loss is None:
        return min_samples(candidate) > 0 and max_loss < 1
    return candidate.expected_loss + candidate.loss_error > max_loss


def compare(
    inputs: PlanInputs,
    candidates: Sequence[Candidate],
    refusals: Sequence[Refusal],
    search: CutSearchResult,
    *,
    kernels: int,
) -> PlanningResult:
    """Return the result of planning, with scores and the cut table.

    The table has `local`, the candidates that are the best under some conditions, and fallbacks for inputs
    that those cannot send. There must be at least one candidate. `kernels` is the number of kernels of the
    model, or 0 if it cannot be cut.

    Raises:
        CutError: No candidate keeps the limits under any conditions.
    """
    grid, plans = inputs.grid, [candidate.plan for candidate in candidates]
    scores = score_all(plans, grid.conditions(), inputs.goal.score)
    is_over = np.array([exceeds_loss(candidate, inputs.max_loss) for candidate in candidates])
    offered = np.where(is_over[:, np.newaxis], np.inf, scores)
    winners = find_winners(offered, [SIMPLICITY[candidate.kind] for candidate in candidates])
    if (winners < 0).all():
        raise CutError(
            "no candidate keeps the limits at any setting of the link: raise --latency-limit or --max-loss"
        )
    in_table = {int(number) for number in winners if number >= 0}
    in_table |= {number for number, candidate in enumerate(candidates) if candidate.kind == "local"}
    reserve = _find_reserve(inputs, candidates, winners, in_table, offered)
    in_table |= reserve
    unloaded = [Conditions(link) for link in grid.links()]
    latencies = score_all(plans, unloaded, lambda plan, condition: predict_s(plan, condition) * 1e3)
    scored = [
        replace(
            candidate,
            latency_ms=_rows(latencies[number], grid),
            score=_rows(scores[number][: len(unloaded)], grid),
            wins=win_ranges(winners, number, grid),
            in_table=number in in_table,
            devices_per_server=_capacity(inputs, candidate),
            is_over_loss=bool(is_over[number]),
        )
        for number, candidate in enumerate(candidates)
    ]
    scored = [
        replace(candidate, explanation=f"{text} {candidate.explanation}".rstrip())
        for number, candidate in enumerate(scored)
        for text in [explain_candidate(candidate, kernels, is_reserve=number in reserve)]
    ]
    return _make_result(inputs, scored, refusals, search, kernels=kernels)


def _make_result(
    inputs: PlanInputs,
    candidates: Sequence[Candidate],
    refusals: Sequence[Refusal],
    search: CutSearchResult,
    *,
    kernels: int,
) -> PlanningResult:
    grid, unit = inputs.grid, inputs.goal.row.unit
    return PlanningResult(
        model=inputs.name,
        model_sha256=inputs.device.model_sha256,
        objective=inputs.objective,
        unit=unit,
        device=PlannedMachine(
            name=inputs.device.description,
            label=inputs.device.label,
            memory_bytes=inputs.limits.memory_bytes,
            weights_bytes=inputs.limits.weights_bytes,
        ),
        server=PlannedMachine(
            name=inputs.peer.description, label="modelled" if inputs.is_server_modelled else inputs.peer.label
        ),
        bandwidths_mbit_s=grid.bandwidths_mbit_s,
        rtts_ms=grid.rtts_ms,
        candidates=tuple(candidates),
        table=CutTable(
            plans=tuple(candidate.plan for candidate in candidates if candidate.in_table),
            objective=inputs.objective,
            device=inputs.device.description,
            server=inputs.peer.description,
            latency_limit_s=inputs.goal.kept_latency_s,
            radio_w=None if inputs.power is None else inputs.power.radio_w,
        ),
        refusals=tuple(refusals),
        warnings=tuple(_warn(inputs, candidates)),
        sentences=(
            *explain_plan(candidates, grid.bandwidths_mbit_s, grid.rtts_ms, unit),
            *_explain_search(inputs, search),
        ),
        kernels=kernels,
        samples=len(inputs.feeds),
        tiers=search.tiers,
        max_loss=inputs.max_loss,
    )


def _explain_search(inputs: PlanInputs, search: CutSearchResult) -> tuple[str, ...]:
    limit_db = inputs.most_leakage_db
    if limit_db is None:
        return ()
    leakages = [leakage for leakage in search.over if leakage is not None]
    least = min(leakages, key=lambda leakage: leakage.lower_bound_db, default=None)
    text = explain_leakage(limit_db, search.attacked, len(search.over), least, is_ended=search.is_ended)
    return (text,)


def _find_reserve(
    inputs: PlanInputs,
    candidates: Sequence[Candidate],
    winners: NDArray[np.intp],
    in_table: set[int],
    scores: NDArray[np.float64],
) -> frozenset[int]:
    """Return the candidates for inputs that the winner cannot send: the best that can send all inputs.

    Codes of uploads work for values like those of the samples. A candidate that is already in the table, such
    as the device alone, serves other values if it is as good.
    """
    universal = [
        number for number, candidate in enumerate(candidates) if _carries_all(candidate, inputs.feeds[0])
    ]
    needs_reserve = (winners >= 0) & ~np.isin(winners, universal)
    if not universal or not needs_reserve.any():
        return frozenset()
    ranks = [-1 if number in in_table else SIMPLICITY[candidates[number].kind] for number in universal]
    best = find_winners(scores[universal][:, needs_reserve], ranks)
    return frozenset(universal[index] for index in best if index >= 0) - in_table


def _carries_all(candidate: Candidate, sample: Feeds) -> bool:
    """Return whether a candidate can send inputs with any values; integers need no codes."""
    return all(
        tensor.coding in CUT_CODINGS or (tensor.name in sample and sample[tensor.name].dtype.kind != "f")
        for tensor in candidate.sent
    )


def _rows(values: NDArray[np.float64], grid: Grid) -> tuple[tuple[float, ...], ...]:
    """Return values [RTTs * bandwidths] as rows; infinity becomes `NEVER`, because JSON has no infinity."""
    finite = np.where(np.isfinite(values), values, NEVER)
    return tuple(tuple(float(value) for value in row) for row in finite.reshape(len(grid.rtts_ms), -1))


def _capacity(inputs: PlanInputs, candidate: Candidate) -> int | None:
    """Return how many devices a server carries at the middle of the bandwidths."""
    if not inputs.goal.row.counts_devices or inputs.latency_limit_s is None or candidate.kind == "local":
        return None  # a device that computes all itself does not load the server
    links = inputs.grid.links()
    middle = Conditions(links[len(inputs.grid.bandwidths_mbit_s) // 2])
    reserved_s = reserved_server_s(candidate.plan, middle, inputs.latency_limit_s) * inputs.requests_per_s
    return int(min(MAX_DEVICES, 1 / max(reserved_s, 1e-12)))


def _warn(inputs: PlanInputs, candidates: Sequence[Candidate]) -> list[str]:
    warnings = list(inputs.notes)
    warnings += [
        f"The times of {profile.measured_on} vary by {profile.whole_spread:.0%} between the quartiles:"
        " measure again at rest."
        for profile in (inputs.device, inputs.server)
        if profile.whole_spread > _LARGE_SPREAD and profile.label == "measured"  # a quota makes runs uneven
    ]
    if len(inputs.feeds) < MAX_SAMPLES:
        warnings.append(f"Sizes were measured on {len(inputs.feeds)} samples only.")
    warnings += _warn_of_unknown_change(inputs, candidates)
    warnings += filter(None, [inputs.goal.row.warning])
    if any(candidate.label == "modelled" for candidate in candidates if candidate.kind == "cut"):
        warnings.append("Times of cuts are sums over kernels (modelled): the cuts were not run as they are.")
    return list(dict.fromkeys(warnings))  # one machine may appear twice


def _warn_of_unknown_change(inputs: PlanInputs, candidates: Sequence[Candidate]) -> list[str]:
    """Return a warning for each reason why the effect of codings on the answers is unknown."""
    limit = "they are not offered" if inputs.max_loss < 1 else "no limit applies"
    count = (
        f"there are {len(inputs.feeds)}"
        if inputs.has_samples
        else "golden and made-up inputs are no evidence"
    )
    names: dict[str, list[str]] = {}
    for candidate in sorted(
        candidates, key=lambda candidate: (not candidate.samples_needed, candidate.samples_needed)
    ):
        if min_samples(candidate) and (candidate.samples_needed or candidate.expected_loss is None):
            if candidate.samples_needed:
                reason = f"an estimate needs at least {candidate.samples_needed} samples, {count}"
            else:
                reason = "outputs are not known to hold classes" if inputs.measure else "nothing was run"
            names.setdefault(reason, []).append(candidate.plan.name)
    return [
        f"What {', '.join(plans)} may change in the answers is unknown ({reason}): {limit}."
        for reason, plans in names.items()
    ]
