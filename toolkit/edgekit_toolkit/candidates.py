"""Make the candidates: every form that can pay for a model, the mixed-precision ones by measured sensitivity.

It judges only by output noise on calibration samples; scores on held-out samples come later.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from edgekit_toolkit.feeds import Feeds
from edgekit_toolkit.found import Candidate, Found
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.quantize.quantizer import Quantizer
from edgekit_toolkit.quantize.sensitivity import Fidelity, decibel, measure_blocks, release

M = TypeVar("M")

_MAX_RELEASED = 6
_ELEMENTWISE_LOSS_DB = 3.0
# A scale a tensor saves a few percent of the size; with more noise than this it is never the choice.
_PER_TENSOR_LOSS_DB = 1.0
# Of the time of the search, what measuring single blocks may take; the rest is for releasing them.
_BLOCKS_SHARE = 0.6
_FIDELITY_SAMPLES = 16
_FIDELITY_BYTES = 64 << 20
# Fidelity is measured a hundred times: a pass over its samples should not take longer than this.
_FIDELITY_PASS_S = 0.3


def find_candidates(
    quantizer: Quantizer[M],
    calibration: Callable[[], Iterator[Feeds]],
    *,
    per_channel: bool,
    kinds: frozenset[str],
    time_limit_s: float,
    progress: Callable[[str, int | None, int | None], None],
    clock: Callable[[], float] = time.monotonic,
) -> Found[M]:
    """Return the candidates for a model.

    Args:
        quantizer: of the optimised float model, for the target's engine.
        calibration: makes a fresh stream of calibration samples.
        per_channel: whether that engine takes a weight scale a channel.
        kinds: forms that the target's engine runs.
        time_limit_s: for measuring single layers and mixing precisions; what comes before is always done.
        progress: called with what is done now, how much of it is done and how much there is.
        clock: seconds since any moment.
    """
    name, given = quantizer.as_given()
    found = Found([Candidate(name, Form(forms.FLOAT32), given, decibel(0.0))])
    if (reason := quantizer.bar()) is not None:
        found.dropped.append(f"all other forms: {reason}")
        return found
    samples = _fidelity_samples(quantizer, calibration)
    axes = quantizer.softmax_axes()
    fidelity = Fidelity(quantizer.model, samples, open_model=quantizer.open, softmax_axes=axes)
    found.noise_samples = len(samples) * quantizer.batch()
    for kind, label in quantizer.labels.items():
        if kind in kinds:
            progress(f"building: {label}", None, None)
            found.add(label, quantizer, Form(kind), fidelity)
    if forms.STATIC_INT8 not in kinds:
        return found
    if (reason := quantizer.static_bar()) is not None:
        found.dropped.append(f"static int8: {reason}")
        return found
    best = _static(quantizer, calibration, fidelity, found, allowed=per_channel, progress=progress)
    if best is not None:
        start = clock()
        blocks_end, end = start + _BLOCKS_SHARE * time_limit_s, start + time_limit_s
        expired = (lambda: clock() > blocks_end, lambda: clock() > end)
        _mixed(quantizer, best, fidelity, found, progress, expired)
    return found


def _fidelity_samples(quantizer: Quantizer[M], calibration: Callable[[], Iterator[Feeds]]) -> list[Feeds]:
    run = quantizer.open(quantizer.model)
    samples: list[Feeds] = []
    held, spent_s = 0, 0.0
    for feeds in islice(calibration(), _FIDELITY_SAMPLES):
        begin = time.perf_counter()
        run(feeds)
        spent_s += time.perf_counter() - begin
        samples.append(feeds)
        held += sum(array.nbytes for array in feeds.values())
        if len(samples) >= 2 and (held > _FIDELITY_BYTES or spent_s > _FIDELITY_PASS_S):
            break
    return samples


def _static(
    quantizer: Quantizer[M],
    calibration: Callable[[], Iterator[Feeds]],
    fidelity: Fidelity[M],
    found: Found[M],
    *,
    allowed: bool,
    progress: Callable[[str, int | None, int | None], None],
) -> Candidate[M] | None:
    """Add the plain static forms; returns the one to mix precisions in."""
    everything = quantizer.kernels(elementwise=True)
    products = quantizer.kernels(elementwise=False)
    if not products:
        return None
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        progress("calibrating", done, None)

    ranges = quantizer.ranges(everything, calibration, count)
    factors, scaled = quantizer.equalize(ranges)
    whole = {name: item.whole() for name, item in ranges.items()}
    balanced = {name: item.whole() for name, item in scaled.items()}
    made = []
    for names, where in ((everything, "all layers"), (products, "matrix products only")):
        if names is products and set(products) == set(everything):
            continue
        variants = [
            ("per-channel", True, False),
            ("per-channel equalized", True, True),
            ("per-tensor", False, False),
        ]
        rivals = []
        for label, per_channel, equal in variants:
            if (equal and not factors) or (per_channel and not allowed):
                continue
            progress(f"building: int8 {label}, {where}", None, None)
            plan = Plan(quantizer.scheme, frozenset(names), balanced if equal else whole, per_channel)
            form = Form(forms.STATIC_INT8, plan, factors if equal else {})
            candidate = found.add(f"int8 {label}, {where}", quantizer, form, fidelity)
            if candidate is not None:
                rivals.append(candidate)
        made.extend(_best(rivals, found))
    bases = [one for one in made if _is_per_channel(one) == allowed]
    if not bases:
        return None
    # All layers come first and run fastest; products only are the base where the rest costs too much.
    closest = max(bases, key=_snr)
    return bases[0] if bases[0].snr_db >= closest.snr_db - _ELEMENTWISE_LOSS_DB else closest


def _is_per_channel(candidate: Candidate[M]) -> bool:
    return candidate.form.plan is not None and candidate.form.plan.per_channel


def _snr(candidate: Candidate[M]) -> float:
    return candidate.snr_db


def _best(rivals: Sequence[Candidate[M]], found: Found[M]) -> list[Candidate[M]]:
    """Keep the better per-channel variant, and the per-tensor one where it is nearly as good."""
    per_channel = sorted((one for one in rivals if _is_per_channel(one)), key=_snr)
    kept = per_channel[-1:]
    for one in rivals:
        if one in kept:
            continue
        if one in per_channel or (kept and one.snr_db < kept[0].snr_db - _PER_TENSOR_LOSS_DB):
            found.put_aside(one, kept[0])
        else:
            kept.append(one)
    return kept


def _mixed(
    quantizer: Quantizer[M],
    best: Candidate[M],
    fidelity: Fidelity[M],
    found: Found[M],
    progress: Callable[[str, int | None, int | None], None],
    expired: Sequence[Callable[[], bool]],
) -> None:
    """Add mixed-precision forms: the best static one with its noisiest blocks in float."""
    plan = best.form.plan
    if plan is None:
        raise ValueError(f"{best.label} is not a static int8 form")
    write = quantizer.writer(best.form.factors)
    parts = quantizer.blocks(plan)
    for noise in measure_blocks(write, plan, parts, fidelity, expired[0]):
        found.noises.append(noise)
        progress("measuring layers", len(found.noises), len(parts))
    if len(found.noises) < len(parts):
        found.dropped.append(
            f"sensitivity of {len(parts) - len(found.noises)} of {len(parts)} layers: no time left"
        )
    base = best.label.removeprefix("int8 ")
    steps = release(write, plan, found.noises, fidelity, max_blocks=_MAX_RELEASED, expired=expired[1])
    for count, step in enumerate(steps, start=1):
        if not step.plan.kernels:
            return  # all in float: that candidate is there already
        progress("mixed precision", count, _MAX_RELEASED)
        label = f"int8 {base}, {count} layer{'s' if count > 1 else ''} in float"
        found.add(label, quantizer, replace(best.form, plan=step.plan), fidelity)
