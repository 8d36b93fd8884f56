"""8-bit products in onnxruntime against whole numbers, whatever the processor adds them with."""

import os
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tests.toolkit.cases import cases

from edgekit_runtime.sessions import ort_products
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.sessions.ort_products import saturates
from edgekit_toolkit.measurement.arithmetic import instruction_set

pytestmark = pytest.mark.int8_products

Array = NDArray[Any]
FLOAT = TensorProto.FLOAT
TYPES = {"uint8": TensorProto.UINT8, "int8": TensorProto.INT8}
PAIRS = [("uint8", "int8"), ("int8", "int8"), ("uint8", "uint8")]
node = helper.make_node


def large(dtype: str, *shape: int) -> Array:
    """Codes near the largest one, so that each sum of two products is beyond 16 bits."""
    high = np.iinfo(dtype).max
    return np.random.default_rng(0).integers(high - 30, high + 1, shape).astype(dtype)


def run(
    nodes: Sequence[Any],
    given: tuple[int, Array],
    made: tuple[int, Sequence[int]],
    stored: Mapping[str, Any],
    options: OrtOptions | None = None,
) -> Array:
    """The output `y` of a model with the input `x`."""
    (kind, x), (output_kind, shape) = given, made
    graph = helper.make_graph(
        list(nodes),
        "products",
        [helper.make_tensor_value_info("x", kind, x.shape)],
        [helper.make_tensor_value_info("y", output_kind, shape)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return OrtSession(model.SerializeToString(), options or OrtOptions(threads=1)).run({"x": x})["y"]


def codes(sums: Array, scale: np.float32, dtype: str) -> Array:
    """Quantized whole sums."""
    limits = np.iinfo(dtype)
    quantized: Array = np.clip(np.rint(sums / np.float64(scale)), limits.min, limits.max)
    return quantized.astype(dtype)


def convolved(x: Array, weight: Array) -> Array:
    """A convolution without padding, [1, C, H, W] by [O, C, kH, kW], in 64-bit whole numbers."""
    rows, columns = weight.shape[2:]
    height, width = x.shape[2] - rows + 1, x.shape[3] - columns + 1
    total = np.zeros((1, len(weight), height, width), np.int64)
    for row in range(rows):
        for column in range(columns):
            part = x[:, :, row : row + height, column : column + width].astype(np.int64)
            total += np.einsum("nchw,oc->nohw", part, weight[:, :, row, column].astype(np.int64))
    return total


def scales(count: int, dtype: str, *, per_channel: bool) -> dict[str, Any]:
    """Weights of scale 1 and zero point 0, for each channel or the whole tensor."""
    if per_channel:
        return {"ws": np.ones(count, np.float32), "wz": np.zeros(count, dtype)}
    return {"ws": np.float32(1), "wz": np.zeros((), dtype)}


def quantized_input(dtype: str) -> dict[str, Any]:
    return {"xs": np.float32(1), "xz": np.zeros((), dtype)}


QUANTIZE_INPUT = [
    node("QuantizeLinear", ["x", "xs", "xz"], ["xq"]),
    node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"]),
]


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_integer_matrix_product_is_exact(left: str, right: str) -> None:
    x, weight = large(left, 9, 64), large(right, 64, 17)
    product = node("MatMulInteger", ["x", "w"], ["y"])
    got = run([product], (TYPES[left], x), (TensorProto.INT32, [9, 17]), {"w": weight})
    np.testing.assert_array_equal(got, x.astype(np.int64) @ weight)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("right", ["int8", "uint8"])
def test_dynamically_quantized_product_is_exact(right: str, *, per_channel: bool) -> None:
    x, weight = large("uint8", 9, 64).astype(np.float32), large(right, 64, 17)
    x[0, :2] = 0, 255  # the range of scale 1
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["xq", "xs", "xz"]),
        node("MatMulInteger", ["xq", "w", "xz", "wz"], ["sum"]),
        node("Cast", ["sum"], ["float"], to=FLOAT),
        node("Mul", ["xs", "ws"], ["scale"]),
        node("Mul", ["float", "scale"], ["y"]),
    ]
    stored = {"w": weight, **scales(17, right, per_channel=per_channel)}
    got = run(nodes, (FLOAT, x), (FLOAT, [9, 17]), stored)
    np.testing.assert_array_equal(got, x.astype(np.int64) @ weight)


@cases("per_channel", [False, True])
@cases(("left", "right"), PAIRS)
@cases("size", [1, 3])
@cases("form", ["QLinearConv", "QDQ"])
def test_quantized_convolution_is_exact(
    form: str, size: int, left: str, right: str, *, per_channel: bool
) -> None:
    x, weight = large(left, 1, 16, 8, 8), large(right, 16, 16, size, size)
    sums = convolved(x, weight)
    scale = np.float32(sums.max() / (np.iinfo(left).max - 5))
    stored = {
        "w": weight, **quantized_input(left), **scales(16, right, per_channel=per_channel),
        "ys": scale, "yz": np.zeros((), left),
    }  # fmt: skip
    if form == "QDQ":
        nodes = [
            *QUANTIZE_INPUT,
            node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=0),
            node("Conv", ["xd", "wd"], ["c"]),
            node("QuantizeLinear", ["c", "ys", "yz"], ["y"]),
        ]
        given = (FLOAT, x.astype(np.float32))
    else:
        nodes = [node("QLinearConv", ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"], ["y"])]
        given = (TYPES[left], x)
    got = run(nodes, given, (TYPES[left], sums.shape), stored)
    np.testing.assert_array_equal(got, codes(sums, scale, left))


@cases("per_channel", [False, True])
@cases(("left", "right"), PAIRS)
@cases("operator", ["MatMul", "Gemm"])
@cases("output", ["codes", "float"])
def test_quantized_matrix_product_is_exact(
    output: str, operator: str, left: str, right: str, *, per_channel: bool
) -> None:
    x, weight = large(left, 9, 64), large(right, 64, 17)
    sums = x.astype(np.int64) @ weight
    scale = np.float32(sums.max() / (np.iinfo(left).max - 5))
    stored = {"w": weight, **quantized_input(left), **scales(17, right, per_channel=per_channel)}
    nodes = [*QUANTIZE_INPUT, node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=1)]
    if output == "float":
        nodes.append(node(operator, ["xd", "wd"], ["y"]))
        got = run(nodes, (FLOAT, x.astype(np.float32)), (FLOAT, sums.shape), stored)
        np.testing.assert_array_equal(got, sums)
        return
    nodes += [node(operator, ["xd", "wd"], ["c"]), node("QuantizeLinear", ["c", "ys", "yz"], ["y"])]
    stored |= {"ys": scale, "yz": np.zeros((), left)}
    got = run(nodes, (FLOAT, x.astype(np.float32)), (TYPES[left], sums.shape), stored)
    np.testing.assert_array_equal(got, codes(sums, scale, left))


def test_products_of_7_bit_weights_are_exact_without_the_slow_kernels() -> None:
    x, weight = large("uint8", 9, 64), np.full((64, 17), 63, np.int8)
    sums = x.astype(np.int64) @ weight
    scale = np.float32(sums.max() / 255)
    nodes = [
        *QUANTIZE_INPUT,
        node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=1),
        node("MatMul", ["xd", "wd"], ["s"]),
        node("QuantizeLinear", ["s", "ys", "yz"], ["y"]),
    ]
    stored = {"w": weight, **scales(17, "int8", per_channel=True), **quantized_input("uint8")}
    stored |= {"ys": scale, "yz": np.zeros((), "uint8")}
    with mock.patch.object(ort_products, "EXACT_SETTING", "session.none"):  # were it set, kernels were others
        options = OrtOptions(threads=1, narrow_weights=True)
        got = run(nodes, (FLOAT, x.astype(np.float32)), (TYPES["uint8"], sums.shape), stored, options)
    np.testing.assert_array_equal(got, codes(sums, scale, "uint8"))


def test_the_engine_saturates_on_the_instruction_sets_that_lack_vnni() -> None:
    # scripts/test-without-vnni hides it from engines, not from the system.
    is_hidden = "hidden_vnni" in os.environ.get("LD_PRELOAD", "")
    assert saturates() == (is_hidden or instruction_set() in {"avx512bw", "avx2"})


def test_second_try_without_exact_kernels_leaves_the_standard_error_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The engine warned of an entry that changes, in the midst of a progress bar."""
    settings, tries = onnxruntime.SessionOptions(), 0

    def create(settings: onnxruntime.SessionOptions) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise RuntimeError("no kernel")

    with mock.patch.object(ort_products, "saturates", lambda: True):
        ort_products.open_exact(settings, create)  # type: ignore[arg-type,return-value]
    assert tries == 2
    assert capfd.readouterr().err == ""
