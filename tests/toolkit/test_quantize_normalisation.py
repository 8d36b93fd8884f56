"""Normalisations that are written out by hand: their variances would become 0 as 8-bit codes."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto
from tests.toolkit.cases import cases
from tests.toolkit.small_models import Array, model_of, node, random_weight, snr_db

from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
from edgekit_toolkit.quantize.plan import Plan, kernel_names
from edgekit_toolkit.quantize.quantizer import Quantizer
from edgekit_toolkit.quantize.scheme import ASYMMETRIC, LITERT, SYMMETRIC

pytestmark = pytest.mark.int8_products

TOKENS, WIDTH = 12, 16
# The first product and the division's result hold 8 bits; a collapsed variance leaves less than 0 dB.
LEAST_DB = 20.0

# From the centred activation d and its variance v to the normalised n.
ENDINGS: dict[str, Sequence[NodeProto]] = {
    "division": [node("Sqrt", ["v"], ["s"]), node("Div", ["d", "s"], ["n"])],
    "reciprocal": [
        node("Sqrt", ["v"], ["s"]),
        node("Reciprocal", ["s"], ["r"]),
        node("Mul", ["d", "r"], ["n"]),
    ],
    "divided one": [
        node("Sqrt", ["v"], ["s"]),
        node("Div", ["one", "s"], ["r"]),
        node("Mul", ["d", "r"], ["n"]),
    ],
    "power": [node("Pow", ["v", "half"], ["s"]), node("Div", ["d", "s"], ["n"])],
}


def layer_norm(ending: Sequence[NodeProto]) -> onnx.ModelProto:
    """x [1, tokens, width], a product, a layer norm in single operators, another product."""
    rng = np.random.default_rng(2)
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("ReduceMean", ["h"], ["m"], axes=[-1]),
        node("Sub", ["h", "m"], ["d"]),
        node("Mul", ["d", "d"], ["q"]),
        node("ReduceMean", ["q"], ["e"], axes=[-1]),
        node("Add", ["e", "least"], ["v"]),
        *ending,
        node("Mul", ["n", "gain"], ["g"]),
        node("Add", ["g", "shift"], ["b"]),
        node("MatMul", ["b", "u"], ["y"]),
    ]
    weights = {
        "w": random_weight(rng, WIDTH, WIDTH),
        "u": random_weight(rng, WIDTH, WIDTH),
        "least": np.float32(1e-5),
        "one": np.float32(1),
        "half": np.float32(0.5),
        "gain": rng.uniform(0.5, 1.5, WIDTH).astype(np.float32),
        "shift": rng.normal(size=WIDTH).astype(np.float32),
    }
    used = {name for one in nodes for name in one.input}
    weights = {name: value for name, value in weights.items() if name in used}
    return model_of(nodes, weights, {"x": [1, TOKENS, WIDTH]})


def tokens(count: int, seed: int) -> list[dict[str, Array]]:
    """Tokens whose sizes differ twentyfold, so that their variances differ 400 times."""
    rng = np.random.default_rng(seed)
    sizes = np.geomspace(0.05, 1, TOKENS)[:, None]
    return [{"x": (rng.normal(size=(1, TOKENS, WIDTH)) * sizes).astype(np.float32)} for _ in range(count)]


def static_snr_db(quantizer: Quantizer) -> float:
    kernels = quantizer.kernels(elementwise=True)
    ranges = quantizer.ranges(kernels, lambda: iter(tokens(8, seed=3)), lambda: None)
    plan = Plan(quantizer.scheme, frozenset(kernels), {name: one.whole() for name, one in ranges.items()})
    made = quantizer.build(Form(forms.STATIC_INT8, plan))
    assert made is not None
    source, run = quantizer.model.open(threads=1), made.open(threads=1)
    feeds = tokens(8, seed=4)
    want, got = (np.concatenate([call(one)[0] for one in feeds]) for call in (source, run))
    assert np.isfinite(got).all()
    return snr_db(want, got)


@cases("scheme", [ASYMMETRIC, SYMMETRIC])
@cases("ending", ENDINGS)
def test_normalisation_by_hand_survives_int8_in_onnxruntime(ending: str, scheme: Any) -> None:
    quantizer = OnnxQuantizer(layer_norm(ENDINGS[ending]), scheme, threads=1)
    assert static_snr_db(quantizer) > LEAST_DB


@pytest.mark.skipif(
    not (find_spec("ai_edge_litert") and find_spec("ai_edge_quantizer")),
    reason="LiteRT is not installed: edgekit[litert-host]",
)
@pytest.mark.parametrize("ending", ENDINGS)
def test_normalisation_by_hand_survives_int8_in_litert(ending: str) -> None:
    from edgekit_toolkit.quantize.litert.quantizer import LiteRtQuantizer
    from edgekit_toolkit.tflite.check import convert_checked

    content = convert_checked(layer_norm(ENDINGS[ending]), {}, tokens(2, seed=1))
    assert static_snr_db(LiteRtQuantizer(content, threads=1, scheme=LITERT)) > LEAST_DB


def test_only_what_leads_to_the_root_stays_in_float() -> None:
    model = layer_norm(ENDINGS["division"])
    assert kernel_names(model, ASYMMETRIC, elementwise=True) == ("h", "g", "b", "y")


@pytest.mark.parametrize("outputs", [("y",), ("y", "a")])
def test_sum_that_others_read_too_stays_a_kernel(outputs: tuple[str, ...]) -> None:
    """One that only the logarithm reads does not; a product does in any case."""
    nodes = [
        node("MatMul", ["x", "w"], ["p"]),
        node("Add", ["p", "p"], ["a"]),
        node("Log", ["a"], ["y"]),
    ]
    model = model_of(nodes, {"w": np.ones((4, 4), np.float32)}, {"x": [2, 4]}, outputs)
    kept = kernel_names(model, ASYMMETRIC, elementwise=True)
    assert kept == (("p", "a") if "a" in outputs else ("p",))
