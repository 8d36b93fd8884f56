"""Detectors: boxes in pixels and scores of 0..1 in one output, decoded behind the last matrix products."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import onnx
import pytest
from tests.toolkit.small_models import Array, model_of, node, random_weight

from edgekit_toolkit.evaluation.detections import find_layout
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.pipeline.candidates import CandidateSet, find_candidates
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.quantize.scheme import ASYMMETRIC
from edgekit_toolkit.quantize.sensitivity import Fidelity
from edgekit_toolkit.samples.generated import Feeds

pytestmark = pytest.mark.int8_products

SIDE, ANCHORS = 8, 64


def detector() -> onnx.ModelProto:
    """A head as YOLOv8 has it: distances times the stride beside sigmoids, [1, 4 + 3, 64]."""
    rng = np.random.default_rng(2)
    places = np.stack(np.meshgrid(np.arange(SIDE), np.arange(SIDE))).reshape(1, 2, ANCHORS) + 0.5
    weights: dict[str, Array] = {
        "stem": random_weight(rng, 16, 3, 3, 3),
        "box": 0.3 * random_weight(rng, 4, 16, 1, 1),
        "class": 4 * random_weight(rng, 3, 16, 1, 1),
        "bias": np.full(3, -4, np.float32),
        "flat_box": np.array([1, 4, ANCHORS]),
        "flat_class": np.array([1, 3, ANCHORS]),
        "halves": np.array([2, 2]),
        "places": places.astype(np.float32),
        "stride": np.float32(80),
    }
    nodes = [
        node("Conv", ["x", "stem"], ["c"], pads=[1] * 4),
        node("Relu", ["c"], ["r"]),
        node("Conv", ["r", "box"], ["b"]),
        node("Reshape", ["b", "flat_box"], ["offsets"]),
        node("Conv", ["r", "class", "bias"], ["k"]),
        node("Reshape", ["k", "flat_class"], ["logits"]),
        node("Split", ["offsets", "halves"], ["shift", "size"], axis=1),
        node("Exp", ["size"], ["extent"]),
        node("Add", ["shift", "places"], ["centre"]),
        node("Concat", ["centre", "extent"], ["cells"], axis=1),
        node("Mul", ["cells", "stride"], ["boxes"]),
        node("Sigmoid", ["logits"], ["scores"]),
        node("Concat", ["boxes", "scores"], ["y"], axis=1),
    ]
    return model_of(nodes, weights, {"x": (1, 3, SIDE, SIDE)})


def samples() -> Iterator[Feeds]:
    rng = np.random.default_rng(7)
    return ({"x": rng.normal(size=(1, 3, SIDE, SIDE)).astype(np.float32)} for _ in range(12))


@cache
def searched(limit_s: float = 60.0) -> CandidateSet:
    quantizer = OnnxQuantizer(detector(), ASYMMETRIC, threads=1)
    return find_candidates(
        quantizer,
        samples,
        per_channel=True,
        kinds=frozenset({forms.STATIC_INT8}),
        limit_s=limit_s,
        dims={},
        progress=lambda *_: None,
    )


def f1(model: OnnxModel) -> float:
    outputs, reference = (
        [{"y": opened(feeds)[0]} for feeds in samples()]
        for opened in (model.open(threads=1), OnnxModel(detector()).open(threads=1))
    )
    layout = find_layout(reference)
    assert layout is not None
    return float(np.mean([layout.score(*pair) for pair in zip(outputs, reference, strict=True)]))


def joined_in_codes() -> OnnxModel:
    """The plan with one scale for boxes and scores."""
    quantizer = OnnxQuantizer(detector(), ASYMMETRIC, threads=1)
    kernels = quantizer.kernels(elementwise=True)
    assert "y" in kernels
    ranges = quantizer.ranges(kernels, samples, lambda: None)
    plan = Plan(ASYMMETRIC, frozenset(kernels), {name: item.whole() for name, item in ranges.items()})
    built = quantizer.build(Form(forms.STATIC_INT8, plan))
    assert built is not None
    return built


def test_no_form_joins_boxes_and_scores_in_one_scale() -> None:
    assert f1(joined_in_codes()) < 0.3
    static = [one for one in searched().candidates if one.form.plan is not None]
    assert static
    for one in static:
        assert one.form.plan is not None
        assert "y" not in one.form.plan.kernels
        assert isinstance(one.model, OnnxModel)
        assert f1(one.model) > 0.6, one.label


def test_decoding_behind_the_last_products_stays_in_float_in_a_form_of_its_own() -> None:
    quantizer = OnnxQuantizer(detector(), ASYMMETRIC, threads=1)
    everything = quantizer.kernels(elementwise=True)
    assert quantizer.tail(everything) == {"centre", "cells", "boxes", "scores", "y"}
    (form,) = (
        one.form
        for one in searched().candidates
        if "decoding in float" in one.label and "layer" not in one.label
    )
    assert form.plan is not None
    assert form.plan.kernels == {"c", "b", "k"}


def test_noise_of_scores_counts_beside_boxes_a_thousand_times_larger() -> None:
    model = detector()
    quantizer = OnnxQuantizer(model, ASYMMETRIC, threads=1)
    parts = quantizer.output_parts(next(samples()))
    assert parts[0] is not None
    assert [len(np.unique(parts[0][:, channel])) for channel in range(7)] == [1] * 7
    assert len(np.unique(parts[0])) > 1
    silent = OnnxModel(onnx.ModelProto.FromString(model.SerializeToString()))
    for tensor in silent.proto.graph.initializer:
        if tensor.name == "bias":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.full(3, -50, np.float32), "bias"))
    few = list(samples())
    apart = Fidelity(quantizer.model, few, threads=1, softmax_axes=[None], parts=parts)
    whole = Fidelity(quantizer.model, few, threads=1, softmax_axes=[None])
    assert whole.noise(silent) < 1e-4
    assert apart.noise(silent) == pytest.approx(0.5, abs=0.2)  # all of one of two groups


def test_search_on_a_slower_machine_makes_the_same_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reading of a clock is later by ten minutes than the one before."""
    labels = [one.label for one in searched().candidates]
    minutes = iter(range(0, 10**6, 600))
    monkeypatch.setattr("time.monotonic", lambda: float(next(minutes)))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(minutes)))
    searched.cache_clear()
    assert [one.label for one in searched().candidates] == labels
