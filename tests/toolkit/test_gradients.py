"""Exact backward passes: adjoints of inputs and weights against central differences in float64."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from tests.toolkit.cases import cases
from tests.toolkit.small_models import Array, node, run

from edgekit_runtime.errors import ModelError
from edgekit_toolkit.models.ort_session import measure_shapes
from edgekit_toolkit.onnx_graph.adjoint import Adjoint, copy_for_adjoint

RNG = np.random.default_rng(17)
IMAGE = (2, 6, 7, 8)
# Nodes from x to y, shapes of the tensors that have gradients, and constants.
Case = tuple[Sequence[onnx.NodeProto], Mapping[str, tuple[int, ...]], Mapping[str, Array]]


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


def conv(*shape: int, image: tuple[int, ...] = IMAGE, **attributes: Any) -> Case:
    shapes = {"x": image, "w": shape, "b": shape[:1]}
    return [node("Conv", ["x", "w", "b"], ["y"], **attributes)], shapes, {}


def gemm(turn_a: int, turn_b: int, bias: tuple[int, ...] = (4,)) -> Case:
    shapes = {"x": (5, 3) if turn_a else (3, 5), "w": (4, 5) if turn_b else (5, 4), "b": bias}
    attributes = {"transA": turn_a, "transB": turn_b, "alpha": 0.5, "beta": 2.0}
    return [node("Gemm", ["x", "w", "b"], ["y"], **attributes)], shapes, {}


def single(op: str, *shapes: tuple[int, ...], constants: Sequence[Array] = (), **attributes: Any) -> Case:
    names = ["x", "w"][: len(shapes)]
    fixed = {f"k{number}": value for number, value in enumerate(constants)}
    return [node(op, [*names, *fixed], ["y"], **attributes)], dict(zip(names, shapes, strict=True)), fixed


CASES: dict[str, Case] = {
    "conv": conv(4, 6, 3, 3, pads=[1, 1, 1, 1]),
    "conv of single places": conv(4, 6, 1, 1),
    "conv of single places, strides": conv(4, 6, 1, 1, strides=[2, 3]),
    "conv of single places, groups": conv(4, 3, 1, 1, group=2),
    "conv, strides and uneven padding": conv(4, 6, 3, 3, strides=[2, 3], pads=[1, 0, 2, 1]),
    "conv, strides that leave values over": conv(4, 6, 2, 2, strides=[3, 3]),
    "conv, dilations": conv(4, 6, 2, 3, dilations=[3, 2], pads=[1, 2, 1, 2]),
    "conv, depthwise": conv(6, 1, 3, 3, group=6, pads=[1, 1, 1, 1], strides=[2, 2]),
    "conv, depthwise with two outputs a channel": conv(12, 1, 3, 3, group=6, dilations=[2, 1]),
    "conv, groups": conv(4, 3, 2, 3, group=2, strides=[2, 2]),
    "conv, auto_pad": conv(4, 6, 3, 2, strides=[2, 2], auto_pad="SAME_UPPER"),
    "conv, padding beyond the kernel": conv(4, 6, 1, 1, pads=[1, 1, 1, 1]),
    "conv over time": conv(4, 3, 5, image=(2, 3, 9), pads=[2, 2], strides=[2]),
    "gemm": gemm(0, 0),
    "gemm, first turned": gemm(1, 0),
    "gemm, second turned": gemm(0, 1, (3, 1)),
    "gemm, both turned": gemm(1, 1, (1,)),
    "matmul": single("MatMul", (2, 3, 5), (5, 4)),
    "sum, broadcast": single("Add", (2, 1, 5), (2, 4, 1)),
    "difference, broadcast": single("Sub", (2, 3, 5), (5,)),
    "product, broadcast": single("Mul", (2, 3, 5), (3, 1)),
    "quotient": ([node("Exp", ["w"], ["e"]), node("Div", ["x", "e"], ["y"])], {"x": (2, 3), "w": (3,)}, {}),
    "relu": single("Relu", IMAGE),
    "leaky relu": single("LeakyRelu", IMAGE, alpha=0.2),
    "prelu": single("PRelu", IMAGE, constants=[RNG.uniform(0.1, 0.5, (6, 1, 1)).astype("f4")]),
    "clip": single("Clip", IMAGE, constants=[np.float32(-0.5), np.float32(1)]),
    "clip from below": ([node("Clip", ["x", "low"], ["y"])], {"x": IMAGE}, {"low": np.float32(0)}),
    "hard sigmoid": single("HardSigmoid", IMAGE, alpha=0.3),
    "hard swish": ([node("Sum", ["x"] * 5, ["z"]), node("HardSwish", ["z"], ["y"])], {"x": IMAGE}, {}),
    "sigmoid": single("Sigmoid", IMAGE),
    "tanh": single("Tanh", IMAGE),
    "erf": single("Erf", IMAGE),
    "root": ([node("Exp", ["x"], ["e"]), node("Sqrt", ["e"], ["y"])], {"x": IMAGE}, {}),
    "max pool": single("MaxPool", IMAGE, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    "average pool": single("AveragePool", IMAGE, kernel_shape=[3, 2], strides=[2, 2]),
    "average pool, padded": single("AveragePool", IMAGE, kernel_shape=[3, 3], pads=[1] * 4),
    "average pool, padding counts": single(
        "AveragePool", IMAGE, kernel_shape=[3, 2], strides=[2, 2], count_include_pad=1, pads=[1] * 4
    ),
    "global mean": single("GlobalAveragePool", IMAGE),
    "mean": single("ReduceMean", IMAGE, axes=[1, -1], keepdims=0),
    "concat": single("Concat", (2, 3, 5), (2, 1, 5), axis=1),
    "reshape": single("Reshape", IMAGE, constants=[ints(2, -1)]),
    "transpose": single("Transpose", IMAGE, perm=[0, 2, 3, 1]),
    "slice": single("Slice", IMAGE, constants=[ints(1, 6), ints(9, 0), ints(1, 3), ints(2, -2)]),
    "softmax": single("Softmax", (3, 5), axis=-1),
    "weight read twice": (
        [node("MatMul", ["x", "w"], ["h"]), node("Sigmoid", ["h"], ["s"]), node("MatMul", ["s", "w"], ["y"])],
        {"x": (3, 4), "w": (4, 4)},
        {},
    ),
    "residual block that ends in softmax": (
        [
            node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
            node("Sigmoid", ["c"], ["s"]),
            node("Add", ["x", "s"], ["t"]),
            node("GlobalAveragePool", ["t"], ["p"]),
            node("Flatten", ["p"], ["f"]),
            node("Gemm", ["f", "v"], ["z"]),
            node("Softmax", ["z"], ["y"], axis=-1),
        ],
        {"x": (2, 3, 5, 5), "w": (3, 3, 3, 3), "b": (3,), "v": (3, 4)},
        {},
    ),
}


class Erf(OpRun):
    """That of onnx rounds to float32."""

    op_domain = ""

    def _run(self, x: Array) -> tuple[Array]:
        return (np.vectorize(math.erf, otypes=["d"])(x),)


def model_with_inputs(
    nodes: Sequence[onnx.NodeProto], shapes: Mapping[str, tuple[int, ...]], constants: Mapping[str, Array]
) -> onnx.ModelProto:
    stored = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(list(nodes), "small", inputs, [output], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def gradients(model: onnx.ModelProto, feeds: Mapping[str, Array], seed: Array) -> dict[str, Array]:
    """Return the gradient of the sum of y times a seed by each input."""
    program = copy_for_adjoint(model)
    program.graph.input.append(helper.make_tensor_value_info("seed", TensorProto.FLOAT, seed.shape))
    floats = {*feeds, *(name for item in model.graph.node for name in item.output)}
    adjoint = Adjoint(
        program.graph, measure_shapes(model, dict(feeds), threads=1), frozenset(floats), exact=True
    )
    adjoint.pass_back({"y": "seed"})
    del program.graph.output[:]
    program.graph.output.extend(onnx.ValueInfoProto(name=adjoint.tensors[name]) for name in feeds)
    values = run(program, {**feeds, "seed": seed})
    return dict(zip(feeds, values.values(), strict=True))


@cases("name", CASES)
def test_exact_gradient_is_that_of_a_difference_in_float64(name: str) -> None:
    nodes, shapes, constants = CASES[name]
    model = model_with_inputs(nodes, shapes, constants)
    rng = np.random.default_rng(list(name.encode()))
    feeds = {key: rng.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}
    seed = rng.normal(size=run(model, feeds)["y"].shape).astype(np.float32)
    reference = ReferenceEvaluator(model, new_ops=[Erf])
    for key, gradient in gradients(model, feeds, seed).items():
        direction = rng.normal(size=shapes[key])
        sums = []
        for step in (1e-6, -1e-6):
            moved = {other: value.astype(np.float64) for other, value in feeds.items()}
            moved[key] = moved[key] + step * direction
            sums.append(float((reference.run(None, moved)[0] * seed).sum()))
        scale = float(np.linalg.norm(gradient) * np.linalg.norm(direction) / np.sqrt(direction.size))
        assert gradient.shape == shapes[key]
        expected = (sums[0] - sums[1]) / 2e-6
        assert float((gradient * direction).sum()) == pytest.approx(expected, abs=1e-4 * scale)


@pytest.mark.parametrize("op", ["Softplus", "Mish", "CumSum"])
def test_operator_without_exact_gradient_is_refused(op: str) -> None:
    inputs = ["x", "axis"] if op == "CumSum" else ["x"]
    model = model_with_inputs([node(op, inputs, ["y"])], {"x": (3, 4)}, {"axis": np.array(0, np.int64)})
    model.opset_import[0].version = 18
    with pytest.raises(ModelError, match=op):
        gradients(model, {"x": np.ones((3, 4), np.float32)}, np.ones((3, 4), np.float32))
