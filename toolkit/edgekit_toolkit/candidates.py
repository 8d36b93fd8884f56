"""Make the candidates: every form that can pay for a model, the mixed-precision ones by measured sensitivity.

It judges only by output noise on calibration samples; scores on held-out samples come later.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import onnx

from edgekit_toolkit.feeds import Feeds
from edgekit_toolkit.found import Candidate, Found
from edgekit_toolkit.graph import opset
from edgekit_toolkit.nesting import computes_in_integers, float_types, nodes
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.engine import run_session, session_for
from edgekit_toolkit.quantize.equalize import apply_factors, apply_to_ranges, find_factors
from edgekit_toolkit.quantize.forms import Form, build
from edgekit_toolkit.quantize.plan import Plan, kernel_names, touched_tensors
from edgekit_toolkit.quantize.ranges import collect
from edgekit_toolkit.quantize.scheme import Scheme
from edgekit_toolkit.quantize.sensitivity import (
    Fidelity,
    blocks,
    decibel,
    measure_blocks,
    release,
)
from edgekit_toolkit.shards import Batching
from edgekit_toolkit.specs import tensor_specs

_MIN_QDQ_OPSET = 13
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
    model: onnx.ModelProto,
    calibration: Callable[[], Iterator[Feeds]],
    *,
    scheme: Scheme,
    per_channel: bool,
    kinds: frozenset[str],
    threads: int,
    time_limit_s: float,
    progress: Callable[[str, int | None, int | None], None],
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """Return the candidates for `model`.

    Args:
        model: the optimised float model, shapes inferred.
        calibration: makes a fresh stream of calibration samples.
        scheme: the quantized form that the target's engine runs.
        per_channel: whether that engine takes a weight scale a channel.
        kinds: forms that the target's engine runs.
        threads: threads of the engine here.
        time_limit_s: for measuring single layers and mixing precisions; what comes before is always done.
        progress: called with what is done now, how much of it is done and how much there is.
        clock: seconds since any moment.
    """
    found = Found([_as_given(model)])
    if (reason := _bar_to_other_forms(model)) is not None:
        found.dropped.append(f"all other forms: {reason}")
        return found
    samples = _fidelity_samples(model, calibration, threads)
    fidelity = Fidelity(model, samples, threads=threads)
    found.noise_samples = len(samples) * (Batching.of(tensor_specs(model)[0]).size or 1)
    labels = {
        forms.FLOAT16_WEIGHTS: "float16 weights",
        forms.INT8_WEIGHTS: "int8 weights, float arithmetic",
        forms.INT4_WEIGHTS: "int4 weights in blocks of 32, float arithmetic",
        forms.DYNAMIC_INT8: "dynamic int8 matrix products",
    }
    for kind, label in labels.items():
        if kind in kinds:
            progress(f"building: {label}", None, None)
            found.add(label, model, Form(kind), fidelity)
    if forms.STATIC_INT8 not in kinds:
        return found
    if opset(model) < _MIN_QDQ_OPSET:
        found.dropped.append(
            f"static int8: the model stays at opset {opset(model)}, {_MIN_QDQ_OPSET} is needed"
        )
        return found
    best = _static(
        model,
        calibration,
        fidelity,
        found,
        scheme=scheme,
        allowed=per_channel,
        threads=threads,
        progress=progress,
    )
    if best is not None:
        start = clock()
        blocks_end, end = start + _BLOCKS_SHARE * time_limit_s, start + time_limit_s
        _mixed(model, best, fidelity, found, progress, (lambda: clock() > blocks_end, lambda: clock() > end))
    return found


def _as_given(model: onnx.ModelProto) -> Candidate:
    """The model itself, called after the floats that it computes in."""
    form, types = Form(forms.FLOAT32), float_types(model)
    label = " and ".join(types) if types and not _is_quantized(model) else "as it is"
    return Candidate(label, form, build(model, form) or model, decibel(0.0))


def _bar_to_other_forms(model: onnx.ModelProto) -> str | None:
    """Why no other form is made of this model; None where some may be."""
    if _is_quantized(model):  # codes of codes would only lose
        return "the model is already quantized"
    types = float_types(model)
    if types and "float32" not in types:
        return (
            f"the model computes in {' and '.join(types)}, and they are made of float32 models; give that"
            " one to have them"
        )
    return None


def _is_quantized(model: onnx.ModelProto) -> bool:
    return computes_in_integers(model) or any(node.op_type == "DequantizeLinear" for node in nodes(model))


def _fidelity_samples(
    model: onnx.ModelProto, calibration: Callable[[], Iterator[Feeds]], threads: int
) -> list[Feeds]:
    session = session_for(model, threads=threads)
    samples: list[Feeds] = []
    held, spent_s = 0, 0.0
    for feeds in islice(calibration(), _FIDELITY_SAMPLES):
        begin = time.perf_counter()
        run_session(session, feeds)
        spent_s += time.perf_counter() - begin
        samples.append(feeds)
        held += sum(array.nbytes for array in feeds.values())
        if len(samples) >= 2 and (held > _FIDELITY_BYTES or spent_s > _FIDELITY_PASS_S):
            break
    return samples


def _static(
    model: onnx.ModelProto,
    calibration: Callable[[], Iterator[Feeds]],
    fidelity: Fidelity,
    found: Found,
    *,
    scheme: Scheme,
    allowed: bool,
    threads: int,
    progress: Callable[[str, int | None, int | None], None],
) -> Candidate | None:
    """Add the plain static forms; returns the one to mix precisions in."""
    everything = kernel_names(model, scheme, elementwise=True)
    products = kernel_names(model, scheme, elementwise=False)
    if not products:
        return None
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        progress("calibrating", done, None)

    ranges = collect(model, touched_tensors(model, everything), calibration, threads=threads, progress=count)
    factors = find_factors(model, ranges)
    whole = {name: item.whole() for name, item in ranges.items()}
    balanced = {name: item.whole() for name, item in apply_to_ranges(model, ranges, factors).items()}
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
            plan = Plan(scheme, frozenset(names), balanced if equal else whole, per_channel)
            form = Form(forms.STATIC_INT8, plan, factors if equal else {})
            candidate = found.add(f"int8 {label}, {where}", model, form, fidelity)
            if candidate is not None:
                rivals.append(candidate)
        made.extend(_best(rivals, found))
    bases = [one for one in made if _is_per_channel(one) == allowed]
    if not bases:
        return None
    # All layers come first and run fastest; products only are the base where the rest costs too much.
    closest = max(bases, key=_snr)
    return bases[0] if bases[0].snr_db >= closest.snr_db - _ELEMENTWISE_LOSS_DB else closest


def _is_per_channel(candidate: Candidate) -> bool:
    return candidate.form.plan is not None and candidate.form.plan.per_channel


def _snr(candidate: Candidate) -> float:
    return candidate.snr_db


def _best(rivals: Sequence[Candidate], found: Found) -> list[Candidate]:
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
    model: onnx.ModelProto,
    best: Candidate,
    fidelity: Fidelity,
    found: Found,
    progress: Callable[[str, int | None, int | None], None],
    expired: Sequence[Callable[[], bool]],
) -> None:
    """Add mixed-precision forms: the best static one with its noisiest blocks in float."""
    plan = best.form.plan
    if plan is None:
        raise ValueError(f"{best.label} is not a static int8 form")
    floats = onnx.shape_inference.infer_shapes(apply_factors(model, best.form.factors))
    order = [node.output[0] for node in floats.graph.node if node.output and node.output[0] in plan.kernels]
    parts = blocks(floats, order)
    for noise in measure_blocks(floats, plan, parts, fidelity, expired[0]):
        found.noises.append(noise)
        progress("measuring layers", len(found.noises), len(parts))
    if len(found.noises) < len(parts):
        found.dropped.append(
            f"sensitivity of {len(parts) - len(found.noises)} of {len(parts)} layers: no time left"
        )
    base = best.label.removeprefix("int8 ")
    steps = release(floats, plan, found.noises, fidelity, max_blocks=_MAX_RELEASED, expired=expired[1])
    for count, step in enumerate(steps, start=1):
        if not step.plan.kernels:
            return  # all in float: that candidate is there already
        progress("mixed precision", count, _MAX_RELEASED)
        label = f"int8 {base}, {count} layer{'s' if count > 1 else ''} in float"
        found.add(label, model, replace(best.form, plan=step.plan), fidelity)
