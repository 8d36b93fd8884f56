"""Mixes of int8 and float16 weights: which layers are released, and the forms that follow."""

import math

import numpy as np
import onnx
import pytest
from tests.toolkit.small_models import model_of, node, random_feeds, random_weight, run, snr_db

from edgekit_runtime.errors import RecipeError
from edgekit_toolkit.pipeline.candidates import find_candidates
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import Form, build
from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
from edgekit_toolkit.quantize.scheme import ASYMMETRIC
from edgekit_toolkit.quantize.sensitivity import LayerCost, mixes


def costs(*noises: float, saved_bytes: int = 100) -> list[LayerCost]:
    return [LayerCost(f"l{place}", noise, saved_bytes) for place, noise in enumerate(noises)]


def test_noisiest_layers_are_released_until_the_share_is_left() -> None:
    found = mixes(costs(50, 30, 15, 4, 1))
    assert found == [
        frozenset({"l1", "l2", "l3", "l4"}),  # 50 left of 100
        frozenset({"l2", "l3", "l4"}),  # 20
        frozenset({"l3", "l4"}),  # 5
        frozenset({"l4"}),  # 1
    ]


def test_layer_with_few_bytes_is_released_before_a_large_one_of_the_same_noise() -> None:
    given = [LayerCost("large", 10, 10_000), LayerCost("small", 10, 10)]
    assert mixes(given) == [frozenset({"large"})]


def test_layer_whose_noise_is_infinite_is_released() -> None:
    assert all("l1" not in kept for kept in mixes(costs(1, math.inf, 1)))
    assert mixes(costs(1, math.inf, 1))


def test_layers_without_noise_make_no_mix() -> None:
    assert mixes(costs(0, 0, 0)) == []


def network(rng: np.random.Generator) -> onnx.ModelProto:
    """Four products; the weights of the second have outliers that a scale a channel does not suit."""
    weights = {f"w{place}": random_weight(rng, 64, 64) for place in range(4)}
    weights["w1"] = weights["w1"].copy()
    weights["w1"][0, :] *= 3000.0
    nodes = [node("Mul", ["x", "mask"], ["m"])]
    weights["mask"] = np.append(np.zeros(1), np.ones(63)).astype(np.float32)
    nodes += [node("MatMul", ["m", "w1"], ["y1"])]
    nodes += [node("MatMul", ["y1", "w2"], ["y2"]), node("MatMul", ["y2", "w3"], ["y3"])]
    nodes += [node("MatMul", ["y3", "w0"], ["y"])]
    return model_of(nodes, weights, {"x": (2, 64)})


def test_search_offers_sizes_between_int8_and_float16_weights() -> None:
    rng = np.random.default_rng(5)
    model = network(rng)
    found = find_candidates(
        OnnxQuantizer(model, ASYMMETRIC, threads=1), lambda: iter([random_feeds(model, rng)] * 3),
        per_channel=True, kinds=frozenset({forms.FLOAT32, forms.FLOAT16_WEIGHTS, forms.INT8_WEIGHTS}),
        limit_s=60, dims={}, progress=lambda *_: None,
    )  # fmt: skip
    by_label = {one.label: one for one in found.candidates}
    plain, half = by_label["int8 weights, float arithmetic"], by_label["float16 weights"]
    mix = by_label["int8 weights, 1 of 4 layers in float16"]
    assert mix.form.layers == {"y2", "y3", "y"}
    assert plain.snr_db + 10 < mix.snr_db < half.snr_db
    assert len(plain.model.content) < len(mix.model.content) < len(half.model.content)


def test_mixed_form_survives_json_and_builds_the_same_model() -> None:
    model = network(np.random.default_rng(6))
    form = Form(forms.INT8_WEIGHTS, layers=frozenset({"y2", "y"}))
    again = Form.from_json(form.to_json())
    assert again == form
    made, twin = build(model, form), build(model, again)
    assert made is not None
    assert made == twin
    # Weights are matrices; zero points have one axis.
    types = [tensor.data_type for tensor in made.graph.initializer if len(tensor.dims) == 2]
    assert types.count(onnx.TensorProto.INT8) == 2
    assert types.count(onnx.TensorProto.FLOAT16) == 2  # the other two; the mask is small
    feeds = random_feeds(model, np.random.default_rng(7))
    assert snr_db(run(model, feeds)["y"], run(made, feeds)["y"]) > 35


def test_mixed_form_of_another_model_is_refused() -> None:
    model = network(np.random.default_rng(8))
    with pytest.raises(RecipeError, match="'elsewhere'"):
        build(model, Form(forms.INT8_WEIGHTS, layers=frozenset({"y2", "elsewhere"})))


@pytest.mark.parametrize("layers", ["y", [1], {"y": 1}, None])
def test_malformed_layers_are_refused(layers: object) -> None:
    with pytest.raises(RecipeError, match="layers"):
        Form.from_json({"kind": forms.INT8_WEIGHTS, "layers": layers})
