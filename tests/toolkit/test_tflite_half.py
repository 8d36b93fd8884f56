"""Weights of LiteRT models that float16 does not hold."""

import numpy as np
import pytest
from tests.toolkit.small_tflite import Array, Lite

from edgekit_runtime.sessions.litert.session import LiteRtOptions, LiteRtSession
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.litert.quantizer import LiteRtQuantizer
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.quantize.scheme import LITERT
from edgekit_toolkit.tflite.flatbuffer import parse
from edgekit_toolkit.tflite.summary import summarise

# Two layers whose weights are rounded to 11 bits, over 32 products.
HALF_ERROR = 2e-3


def dense(first: float, second: float) -> bytes:
    """Input x [1, 32], two dense layers with weights of these sizes, output y [1, 8]."""
    rng = np.random.default_rng(3)
    lite = Lite()
    for name, width in (("x", 32), ("a", 16), ("y", 8)):
        lite.tensor(name, (1, width))
    for name, shape, size in (("v", (16, 32), first), ("w", (8, 16), second)):
        lite.constant(name, (rng.normal(size=shape) * size).astype(np.float32))
        lite.constant(f"{name}_b", np.zeros(shape[0], np.float32))
    lite.operator("FULLY_CONNECTED", ["x", "v", "v_b"], ["a"], "FullyConnectedOptions")
    lite.operator("FULLY_CONNECTED", ["a", "w", "w_b"], ["y"], "FullyConnectedOptions")
    lite.ends(["x"], ["y"])
    return lite.content()


def run(content: bytes, feeds: dict[str, Array]) -> Array:
    return LiteRtSession(content, LiteRtOptions(threads=1)).run(feeds)["y"]


def check_alike(made: bytes, content: bytes) -> None:
    feeds = {"x": np.random.default_rng(4).normal(size=(1, 32)).astype(np.float32)}
    expected = run(content, feeds)
    np.testing.assert_allclose(run(made, feeds), expected, atol=HALF_ERROR * float(np.ptp(expected)))


def precisions(content: bytes) -> list[str]:
    return [layer.precision for layer in summarise(parse(content)).layers.values()]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (1.0, 1.0, ["fp16 weights", "fp16 weights"]),
        (1e-7, 1.0, ["fp32", "fp16 weights"]),
        (1.0, 1e6, ["fp16 weights", "fp32"]),
    ],
)
def test_weights_that_float16_does_not_hold_stay_float32(
    first: float, second: float, expected: list[str]
) -> None:
    content = dense(first, second)
    made = LiteRtQuantizer(content, threads=1).build(Form(forms.FLOAT16_WEIGHTS))
    assert made is not None
    assert precisions(made.content) == expected
    check_alike(made.content, content)


def test_model_that_float16_does_not_hold_has_no_such_form() -> None:
    quantizer = LiteRtQuantizer(dense(1e-7, 1e6), threads=1)
    assert quantizer.build(Form(forms.FLOAT16_WEIGHTS)) is None


@pytest.mark.parametrize(
    ("kernels", "expected"), [({"a"}, ["int8", "fp32"]), ({"y"}, ["fp16 weights", "int8"])]
)
def test_static_form_stores_as_float16_what_that_holds_of_the_layers_in_float(
    kernels: set[str], expected: list[str]
) -> None:
    content = dense(1.0, 1e6)
    plan = Plan(LITERT, frozenset(kernels), {"x": (-4.0, 4.0), "a": (-20.0, 20.0), "y": (-1e8, 1e8)})
    made = LiteRtQuantizer(content, threads=1).build(Form(forms.STATIC_INT8, plan))
    assert made is not None
    assert precisions(made.content) == expected
    assert np.isfinite(run(made.content, {"x": np.ones((1, 32), np.float32)})).all()
