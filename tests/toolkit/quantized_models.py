"""Quantizes small models for the tests of the Q/DQ writer, with the checks that hold for each."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import NodeProto, numpy_helper
from tests.toolkit.small_models import (
    Array,
    assert_valid,
    model_of,
    node,
    operators,
    random_weight,
)

from edgekit_toolkit.quantize.onnx.qdq import write_qdq
from edgekit_toolkit.quantize.plan import Plan, kernel_names, touched_tensors
from edgekit_toolkit.quantize.ranges import collect
from edgekit_toolkit.quantize.scheme import ASYMMETRIC, SYMMETRIC, Scheme

SCHEMES = [ASYMMETRIC, SYMMETRIC]
by_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
PADDED = {"pads": [1] * 4}


def ranges_of(model: onnx.ModelProto, feeds: Sequence[Mapping[str, Array]]) -> dict[str, tuple[float, float]]:
    names = touched_tensors(model, [name for item in model.graph.node for name in item.output[:1]])
    found = collect(model, names, lambda: [dict(one) for one in feeds], threads=1)
    return {name: item.whole() for name, item in found.items()}


def quantized(
    model: onnx.ModelProto,
    scheme: Scheme,
    feeds: Mapping[str, Array],
    *,
    kernels: Sequence[str] | None = None,
    per_channel: bool = True,
) -> onnx.ModelProto:
    """The model with all kernels quantized, or only some, after checks of what holds for every such model."""
    given = model.SerializeToString()
    names = kernel_names(model, scheme, elementwise=True) if kernels is None else kernels
    written = write_qdq(model, Plan(scheme, frozenset(names), ranges_of(model, [feeds]), per_channel))
    assert model.SerializeToString() == given
    assert_valid(written)
    for before, after in zip(model.graph.output, written.graph.output, strict=True):
        assert before.name == after.name
        assert before.type.tensor_type.elem_type == after.type.tensor_type.elem_type
    return written


def nodes_of(model: onnx.ModelProto, operator: str) -> list[NodeProto]:
    return [item for item in model.graph.node if item.op_type == operator]


def constant(model: onnx.ModelProto, name: str) -> Array:
    return next(numpy_helper.to_array(item) for item in model.graph.initializer if item.name == name)


def optimised_operators(model: onnx.ModelProto, folder: Path) -> list[str]:
    """Operators that onnxruntime runs instead of the model's, before it settles the layout of images."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    options.log_severity_level = 4
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return operators(onnx.load(folder / "optimised.onnx"))


def product_model(kind: str, rng: np.random.Generator) -> tuple[onnx.ModelProto, Array, Array]:
    """One matrix product with its weight and bias."""
    if kind in {"Conv", "depthwise"}:
        group = 4 if kind == "depthwise" else 1
        w, b = random_weight(rng, 8, 4 // group, 3, 3), random_weight(rng, 8)
        nodes = [node("Conv", ["x", "w", "b"], ["y"], group=group)]
        return model_of(nodes, {"w": w, "b": b}, {"x": (2, 4, 9, 9)}), w, b
    w, b = random_weight(rng, 24, 10), random_weight(rng, 10)
    if kind == "MatMul":
        return model_of([node("MatMul", ["x", "w"], ["y"])], {"w": w}, {"x": (6, 24)}), w, 0 * b
    stored = w.T.copy() if kind == "Gemm transposed" else w
    nodes = [node("Gemm", ["x", "w", "b"], ["y"], transB=int(kind == "Gemm transposed"))]
    return model_of(nodes, {"w": stored, "b": b}, {"x": (6, 24)}), w, b
