"""Forms of pruned models: a recipe repeats them from the model with all channels, for every engine."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from tests.toolkit.cases import cases
from tests.toolkit.small_models import model_of, node, random_weight, run, snr_db

from edgekit_runtime.errors import RecipeError
from edgekit_toolkit.compress.compression import Compression
from edgekit_toolkit.compress.pruning import prune
from edgekit_toolkit.compress.sequential import round_weights
from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.passes.dead_channels import SlicedModel
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.onnx.equalize import apply_factors
from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.quantize.scheme import ASYMMETRIC, LITERT
from edgekit_toolkit.quantize.sensitivity import Fidelity
from edgekit_toolkit.report.compression_steps import describe_compression
from edgekit_toolkit.samples.generated import Feeds

needs_litert = pytest.mark.skipif(find_spec("ai_edge_quantizer") is None, reason="needs ai-edge-quantizer")


def network() -> onnx.ModelProto:
    """Conv -> Relu -> depthwise Conv -> Relu -> Conv -> Relu -> Reshape -> Gemm."""
    rng = np.random.default_rng(0)
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], "c", pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["d"], "d"),
        node("Conv", ["d", "dw", "db"], ["e"], "e", group=24, pads=[1, 1, 1, 1]),
        node("Relu", ["e"], ["f"], "f"),
        node("Conv", ["f", "v", "vb"], ["g"], "g"),
        node("Relu", ["g"], ["h"], "h"),
        node("Reshape", ["h", "shape"], ["i"], "i"),
        node("Gemm", ["i", "u", "ub"], ["y"], "y", transB=1),
    ]
    weights = {
        "w": random_weight(rng, 24, 3, 3, 3),
        "b": random_weight(rng, 24),
        "dw": random_weight(rng, 24, 1, 3, 3),
        "db": random_weight(rng, 24),
        "v": random_weight(rng, 16, 24, 1, 1),
        "vb": random_weight(rng, 16),
        "shape": np.array([1, -1]),
        "u": random_weight(rng, 5, 16 * 36),
        "ub": random_weight(rng, 5),
    }
    return model_of(nodes, weights, {"x": [1, 3, 6, 6]}, opset=17)


@dataclass(frozen=True)
class Pruned:
    """A pruned model with a form of it."""

    source: onnx.ModelProto
    sliced: SlicedModel
    samples: list[Feeds]
    form: Form


@pytest.fixture(scope="module")
def pruned() -> Pruned:
    rng = np.random.default_rng(1)
    samples = [{"x": rng.normal(size=(1, 3, 6, 6)).astype(np.float32)} for _ in range(40)]
    source = network()
    fidelity = Fidelity(OnnxModel(source), samples[:16], threads=1, softmax_axes=[None])
    (sliced,) = prune(
        source,
        samples,
        shares=[0.25],
        multiple=8,
        threads=1,
        measure_noise=lambda model: fidelity.noise(OnnxModel(model)),
    )
    quantizer = OnnxQuantizer(sliced.model, ASYMMETRIC, threads=1)
    kernels = quantizer.kernels(elementwise=True)
    factors, ranges = quantizer.equalize(quantizer.ranges(kernels, lambda: iter(samples), lambda: None))
    assert factors
    coded = round_weights(apply_factors(sliced.model, factors), samples, peak=127, threads=1)
    plan = Plan(ASYMMETRIC, frozenset(kernels), {name: item.whole() for name, item in ranges.items()})
    compression = Compression(coded.weights, coded.biases, sliced.channels)
    return Pruned(source, sliced, samples, Form(forms.STATIC_INT8, plan, factors, compression=compression))


def without_factors(pruned: Pruned, kind: str, plan: Plan | None = None) -> Form:
    coded = round_weights(pruned.sliced.model, pruned.samples, peak=127, threads=1)
    return Form(kind, plan, compression=Compression(coded.weights, coded.biases, pruned.sliced.channels))


def sizes(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}


def reread(form: Form) -> Form:
    return Form.from_json(json.loads(json.dumps(form.to_json())))


def test_static_int8_form_is_made_from_the_model_with_all_channels(pruned: Pruned) -> None:
    built = forms.build(pruned.source, pruned.form)
    assert built is not None
    expected, result = (run(model, pruned.samples[0])["y"] for model in (pruned.sliced.model, built))
    assert snr_db(expected, result) > 25


def test_form_of_a_recipe_gives_the_same_bytes(pruned: Pruned) -> None:
    first, second = (forms.build(pruned.source, form) for form in (pruned.form, reread(pruned.form)))
    assert first is not None
    assert second is not None
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)


@pytest.mark.parametrize(
    "kind", [forms.FLOAT32, forms.FLOAT16_WEIGHTS, forms.INT8_WEIGHTS, forms.DYNAMIC_INT8]
)
def test_other_forms_lose_the_same_channels(pruned: Pruned, kind: str) -> None:
    built = forms.build(pruned.source, reread(without_factors(pruned, kind)))
    assert built is not None
    expected, result = (run(model, pruned.samples[0])["y"] for model in (pruned.sliced.model, built))
    assert snr_db(expected, result) > 20


def test_channels_go_before_factors_and_codes(pruned: Pruned) -> None:
    floats = forms.compressed_floats(pruned.source, pruned.form)
    coded = pruned.form.compression
    assert coded is not None
    for name, weight in coded.weights.items():
        assert sizes(floats)[name] == weight.codes.shape
    assert {len(factor) for factor in pruned.form.factors.values()} <= {
        len(stays) for stays in pruned.sliced.channels.values()
    } | {24, 16}


@needs_litert
@pytest.mark.parametrize("kind", [forms.FLOAT32, forms.FLOAT16_WEIGHTS, forms.STATIC_INT8])
def test_litert_makes_the_forms_of_pruned_models(pruned: Pruned, kind: str) -> None:
    maker = find_support("litert").maker
    assert maker is not None
    plan = None
    if kind == forms.STATIC_INT8:
        floats = maker.convert(pruned.sliced.model)
        from edgekit_toolkit.quantize.litert.quantizer import LiteRtQuantizer

        quantizer = LiteRtQuantizer(floats.content, threads=1)
        kernels = quantizer.kernels(elementwise=True)
        ranges = quantizer.ranges(kernels, lambda: iter(pruned.samples), lambda: None)
        plan = Plan(LITERT, frozenset(kernels), {name: item.whole() for name, item in ranges.items()})
    form = without_factors(pruned, kind, plan)
    first, second = (maker.build(OnnxModel(pruned.source), item, {}) for item in (form, reread(form)))
    assert first is not None
    assert second is not None
    assert first.content == second.content
    (result,) = first.open(threads=1)(pruned.samples[0])
    assert snr_db(run(pruned.sliced.model, pruned.samples[0])["y"], np.asarray(result)) > 20


def test_compression_says_whether_it_was_distilled() -> None:
    for is_distilled in (False, True):
        value = json.loads(json.dumps(Compression(is_distilled=is_distilled).to_json()))
        assert Compression.from_json(value).is_distilled == is_distilled


@pytest.mark.parametrize("is_distilled", [False, True])
def test_report_shows_the_step_of_distillation(pruned: Pruned, is_distilled: bool) -> None:
    compression = Compression(channels=pruned.sliced.channels, is_distilled=is_distilled)
    candidate: Any = SimpleNamespace(
        form=Form(forms.FLOAT32, compression=compression),
        model=OnnxModel(pruned.sliced.model),
        measured=SimpleNamespace(figures={}),
    )
    run_of_source: Any = SimpleNamespace(prepared=SimpleNamespace(floats=OnnxModel(pruned.source)))
    steps = [step["step"] for step in describe_compression(run_of_source, candidate)]
    assert ("distilled, float32" in steps) == is_distilled


def test_compression_of_channels_round_trips() -> None:
    channels = {"b": (0, 2), "a": (1,)}
    value = Compression(channels=channels).to_json()
    assert value["channels"] == {"a": [1], "b": [0, 2]}
    assert Compression.from_json(json.loads(json.dumps(value))).channels == channels
    assert "channels" not in Compression().to_json()


@cases(
    "channels",
    [{"c": []}, {"c": [1, 1]}, {"c": [2, 1]}, {"c": [-1]}, {"c": [True]}, {"c": [1.0]}, {"c": ["1"]},
     {"c": "12"}, {"c": 3}, {"c": None}, ["c"]],
)  # fmt: skip
def test_malformed_channels_are_refused(channels: Any) -> None:
    value = {**Form(forms.FLOAT32, compression=Compression()).to_json()}
    value["compression"] = {**value["compression"], "channels": channels}
    with pytest.raises(RecipeError, match="malformed"):
        Form.from_json(value)


@cases("channels", [{"nothing": (0,)}, {"c": (0, 24)}, {"e": (0,)}, {"y": (0,)}])
def test_channels_of_another_model_are_refused(channels: Mapping[str, tuple[int, ...]]) -> None:
    with pytest.raises(RecipeError, match="does not fit"):
        forms.build(network(), Form(forms.FLOAT32, compression=Compression(channels=channels)))


def test_weights_of_the_model_with_all_channels_do_not_fit(pruned: Pruned) -> None:
    coded: Compression = round_weights(pruned.source, pruned.samples, peak=127, threads=1)
    both = Compression(coded.weights, coded.biases, pruned.sliced.channels)
    with pytest.raises(RecipeError, match="does not fit"):
        forms.build(pruned.source, Form(forms.FLOAT32, compression=both))
