"""Compressed forms as a recipe stores them."""

import base64
import json
import zlib
from typing import Any

import numpy as np
import onnx
import pytest
from tests.toolkit.cases import cases
from tests.toolkit.small_models import Array, model_of, node, random_weight

from edgekit_runtime.errors import RecipeError
from edgekit_toolkit.compress.compression import CodedWeight, Compression
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.quantize.scheme import SCHEMES

RANGES = {"x": (-3.0, 3.0), "y": (-6.0, 6.0)}


def small_model() -> onnx.ModelProto:
    rng = np.random.default_rng(1)
    weights = {"w": random_weight(rng, 5, 4, 6, 6), "b": random_weight(rng, 5)}
    return model_of([node("Conv", ["x", "w", "b"], ["y"])], weights, {"x": [1, 4, 8, 8]})


def coded() -> Compression:
    rng = np.random.default_rng(2)
    codes = rng.integers(-4, 4, size=(5, 4, 6, 6)).astype(np.int8)
    scale = np.linspace(0.01, 0.05, 5, dtype=np.float32)
    return Compression({"w": CodedWeight(codes, scale)}, {"b": np.ones(5, np.float32)})


def static_form() -> Form:
    plan = Plan(SCHEMES["asymmetric"], frozenset({"y"}), RANGES)
    return Form(forms.STATIC_INT8, plan, compression=coded())


def stored_codes(model: onnx.ModelProto) -> Array:
    (codes,) = (
        onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer if len(tensor.dims) == 4
    )
    return codes


def changed(**members: Any) -> dict[str, Any]:
    """The form's JSON object with other members in its compression."""
    value: dict[str, Any] = json.loads(json.dumps(static_form().to_json()))
    value["compression"] = {**value["compression"], **members}
    return value


def changed_weight(**members: Any) -> dict[str, Any]:
    weight = static_form().to_json()["compression"]["weights"]["w"]
    return changed(weights={"w": {**weight, **members}})


@pytest.mark.parametrize("kind", [forms.STATIC_INT8, forms.INT8_WEIGHTS])
def test_stored_weights_are_the_codes(kind: str) -> None:
    form = static_form() if kind == forms.STATIC_INT8 else Form(kind, compression=coded())
    built = forms.build(small_model(), form)
    assert built is not None
    np.testing.assert_array_equal(stored_codes(built), coded().weights["w"].codes)


def test_form_is_the_same_after_json() -> None:
    value = json.loads(json.dumps(static_form().to_json()))
    read = Form.from_json(value)
    assert read.to_json() == value
    first, again = (forms.build(small_model(), form) for form in (static_form(), read))
    assert first is not None
    assert first == again


@cases(
    "value",
    [
        changed(weights=None),
        changed(biases={"b": "AAAA"}),
        changed(biases={"b": base64.b64encode(np.full(5, np.nan, "<f4").tobytes()).decode()}),
        changed_weight(shape=[]),
        changed_weight(shape=[0, 4, 6, 6]),
        changed_weight(shape=[1 << 40]),
        changed_weight(shape="wide"),
        changed_weight(codes="not base64"),
        changed_weight(codes=base64.b64encode(b"no zlib").decode()),
        changed_weight(codes=base64.b64encode(zlib.compress(bytes(719))).decode()),
        changed_weight(codes=base64.b64encode(zlib.compress(bytes(1 << 24), level=1)).decode()),
        changed_weight(scale=base64.b64encode(np.zeros(5, "<f4").tobytes()).decode()),
        changed_weight(scale=base64.b64encode(np.ones(7, "<f4").tobytes()).decode()),
    ],
)
def test_damaged_compression_is_refused_by_name(value: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="form is malformed"):
        Form.from_json(value)


@cases(
    "other",
    [
        Compression({"v": coded().weights["w"]}),
        Compression({"w": CodedWeight(np.zeros((5, 4, 3, 3), np.int8), np.ones(5, np.float32))}),
        Compression({}, {"b": np.ones(4, np.float32)}),
        Compression({"b": CodedWeight(np.zeros(5, np.int8), np.ones(5, np.float32))}),
    ],
)
def test_compression_of_another_model_is_refused(other: Compression) -> None:
    with pytest.raises(RecipeError, match="does not fit the model"):
        forms.build(small_model(), Form(forms.INT8_WEIGHTS, compression=other))


@cases(("low", "high", "bits"), [(-4, 3, 3), (-8, 7, 4), (0, 0, 2), (-1, 1, 2), (-127, 127, 8)])
def test_bits_hold_every_code(low: int, high: int, bits: int) -> None:
    assert CodedWeight(np.array([low, high], np.int8), np.ones(2, np.float32)).bits == bits
