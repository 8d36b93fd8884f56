"""What is written for the integer kernels of an engine, held against a simulation in numpy."""

import importlib.util
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, numpy_helper
from tests.toolkit.cases import cases
from tests.toolkit.quantized_models import (
    PADDED,
    by_scheme,
    constant,
    nodes_of,
    optimised_operators,
    product_model,
    quantized,
    ranges_of,
)
from tests.toolkit.small_models import (
    Array,
    model_of,
    node,
    random_feeds,
    random_weight,
    run,
    snr_db,
)

from edgekit_toolkit.engines.tensorrt_check import check_tensorrt
from edgekit_toolkit.quantize.scheme import ASYMMETRIC, ASYMMETRIC_7BIT, SYMMETRIC, Scheme

pytestmark = pytest.mark.int8_products

needs_tensorrt = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None, reason="TensorRT is not installed"
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


# The simulation.


def simulated(value: Array, low: float, high: float, scheme: Scheme) -> Array:
    """Round to 8 bits over a range, in float64."""
    low, high = min(low, 0.0), max(high, 0.0)
    if scheme is SYMMETRIC:
        scale = max(-low, high) / 127
        return np.clip(np.rint(value / scale), -128, 127) * scale
    scale = (high - low) / 255
    zero = np.rint(-low / scale)
    return (np.clip(np.rint(value / scale) + zero, 0, 255) - zero) * scale


def simulated_weight(weight: Array, axis: int | None) -> Array:
    others = None if axis is None else tuple(a for a in range(weight.ndim) if a != axis)
    scale = np.abs(weight).max(axis=others, keepdims=True).astype(np.float64) / 127
    return np.rint(weight / scale) * scale


def convolution(x: Array, w: Array, b: Array, group: int) -> Array:
    """Unpadded convolution with stride 1, in float64."""
    per_group, size = w.shape[1], w.shape[2]
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(2, 3))
    parts = []
    for number in range(group):
        ins = windows[:, number * per_group : (number + 1) * per_group]
        outs = w[number * len(w) // group : (number + 1) * len(w) // group]
        parts.append(np.einsum("ncijhw,ochw->noij", ins, outs))
    return np.concatenate(parts, axis=1) + b[None, :, None, None]


@by_scheme
@pytest.mark.parametrize("per_channel", [True, False], ids=["channel", "tensor"])
@pytest.mark.parametrize("kind", ["Conv", "depthwise", "Gemm", "Gemm transposed", "MatMul"])
def test_single_product_equals_the_simulation_of_quantization(
    kind: str, per_channel: bool, scheme: Scheme, rng: np.random.Generator
) -> None:
    model, w, b = product_model(kind, rng)
    feeds = random_feeds(model, rng)
    written = quantized(model, scheme, feeds, per_channel=per_channel)
    ranges = ranges_of(model, [feeds])
    x = simulated(feeds["x"].astype(np.float64), *ranges["x"], scheme)
    axis = 0 if w.ndim == 4 else 1
    weight = simulated_weight(w, axis if per_channel else None)
    want = convolution(x, weight, b, 4 if kind == "depthwise" else 1) if w.ndim == 4 else x @ weight + b
    scale = max(ranges["y"][1] - min(ranges["y"][0], 0), 1e-9) / 255
    slack = 1e-5
    if scheme is ASYMMETRIC:
        want = simulated(want, *ranges["y"], scheme)
        # A value at the border between two codes may go to either of them; the bias is rounded too.
        slack += scale
    got = run(written, feeds)["y"]
    assert np.abs(got - want).max() <= slack
    if scheme is ASYMMETRIC:
        assert np.mean(np.abs(got - want) > 0.5 * scale) < 0.02


@cases("per_channel", [True, False], ids=["channel", "tensor"])
@cases(
    ("kind", "kernel"),
    [
        ("Conv", "QLinearConv"),
        ("depthwise", "QLinearConv"),
        ("Gemm", "QGemm"),
        ("Gemm transposed", "QGemm"),
        ("MatMul", "QLinearMatMul"),
    ],
)
def test_single_product_of_the_asymmetric_form_is_one_integer_kernel(
    kind: str, kernel: str, per_channel: bool, rng: np.random.Generator, tmp_path: Path
) -> None:
    model, _, _ = product_model(kind, rng)
    for bias in (True, False):
        if not bias:
            del model.graph.node[0].input[2:]
        written = quantized(model, ASYMMETRIC, random_feeds(model, rng), per_channel=per_channel)
        assert optimised_operators(written, tmp_path) == ["QuantizeLinear", kernel, "DequantizeLinear"]


# What each engine needs.


def small_network(rng: np.random.Generator) -> onnx.ModelProto:
    """Convolutions with and without padding, depthwise, residual sum, pooling, classifier."""
    weights = {
        "w1": random_weight(rng, 8, 3, 3, 3),
        "b1": random_weight(rng, 8),
        "w2": random_weight(rng, 8, 1, 3, 3),
        "b2": random_weight(rng, 8),
        "w3": random_weight(rng, 8, 8, 1, 1),
        "shape": np.array([0, 8], np.int64),
        "w4": random_weight(rng, 8, 5),
        "b4": random_weight(rng, 5),
    }
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], **PADDED),
        node("Relu", ["c1"], ["r1"]),
        node("Conv", ["r1", "w2", "b2"], ["c2"], group=8, **PADDED),
        node("Clip", ["c2", "zero", "six"], ["r2"]),
        node("Conv", ["r2", "w3"], ["c3"]),
        node("Add", ["c3", "r1"], ["a"]),
        node("GlobalAveragePool", ["a"], ["p"]),
        node("Reshape", ["p", "shape"], ["f"]),
        node("Gemm", ["f", "w4", "b4"], ["y"]),
    ]
    weights |= {"zero": np.float32(0), "six": np.float32(6)}
    return model_of(nodes, weights, {"x": ("N", 3, 12, 12)})


def test_symmetric_form_has_only_int8_with_zero_point_zero_and_float_biases(rng: np.random.Generator) -> None:
    model = small_network(rng)
    written = quantized(model, SYMMETRIC, random_feeds(model, rng))
    pairs = nodes_of(written, "QuantizeLinear")
    assert pairs
    for item in pairs:
        zero = constant(written, item.input[2])
        assert (zero.dtype, zero.tolist()) == (np.int8, 0)
    for item in nodes_of(written, "DequantizeLinear"):
        assert len(item.input) == 2 or not constant(written, item.input[2]).any()
    stored = {tensor.name: tensor.data_type for tensor in written.graph.initializer}
    assert TensorProto.UINT8 not in stored.values()
    assert TensorProto.INT32 not in stored.values()
    biases = [
        item.input[2]
        for item in written.graph.node
        if item.op_type in {"Conv", "Gemm"} and len(item.input) > 2
    ]
    assert [stored[name] for name in biases] == [TensorProto.FLOAT] * 3


def test_symmetric_form_has_a_pair_for_each_reader(rng: np.random.Generator) -> None:
    model = small_network(rng)
    written = quantized(model, SYMMETRIC, random_feeds(model, rng))
    readers = Counter(name for item in written.graph.node for name in item.input)
    activations = [item.output[0] for item in written.graph.node if item.op_type == "QuantizeLinear"]
    assert [readers[name] for name in activations] == [1] * len(activations)
    dequantized = {item.output[0] for item in nodes_of(written, "DequantizeLinear")}
    assert all(readers[name] == 1 for name in dequantized)
    # r1 is read by a convolution and a sum: two pairs.
    assert [item.input[0] for item in nodes_of(written, "QuantizeLinear")].count("r1") == 2


@needs_tensorrt
def test_symmetric_form_is_accepted_by_tensorrt(rng: np.random.Generator) -> None:
    model = small_network(rng)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    written = quantized(onnx.shape_inference.infer_shapes(model), SYMMETRIC, random_feeds(model, rng))
    check = check_tensorrt(written.SerializeToString())
    assert check.errors == ()
    assert check.built


def test_asymmetric_form_runs_on_integer_kernels_alone(rng: np.random.Generator, tmp_path: Path) -> None:
    model = small_network(rng)
    feeds = random_feeds(model, rng)
    written = quantized(model, ASYMMETRIC, feeds)
    run_as = optimised_operators(written, tmp_path)
    integer = ["QLinearConv"] * 3 + ["QLinearAdd", "QLinearGlobalAveragePool", "Reshape", "QGemm"]
    assert Counter(run_as) == Counter(["QuantizeLinear", *integer, "DequantizeLinear"])
    assert snr_db(run(model, feeds)["y"], run(written, feeds, optimise=True)["y"]) > 30


def test_biases_of_the_asymmetric_form_are_int32_with_the_scale_of_the_product(
    rng: np.random.Generator,
) -> None:
    model, _, b = product_model("Conv", rng)
    written = quantized(model, ASYMMETRIC, random_feeds(model, rng))
    made = {item.output[0]: item for item in nodes_of(written, "DequantizeLinear")}
    (conv,) = nodes_of(written, "Conv")
    x, w, bias = (made[name] for name in conv.input)
    codes = constant(written, bias.input[0])
    assert codes.dtype == np.int32
    product = constant(written, x.input[1]).astype(np.float64) * constant(written, w.input[1])
    np.testing.assert_allclose(constant(written, bias.input[1]), product, rtol=1e-6)
    assert np.abs(codes * product - b).max() <= product.max()


@by_scheme
def test_convolution_without_bias_stays_without(scheme: Scheme, rng: np.random.Generator) -> None:
    model = model_of(
        [node("Conv", ["x", "w"], ["y"])], {"w": random_weight(rng, 4, 3, 3, 3)}, {"x": (1, 3, 8, 8)}
    )
    feeds = random_feeds(model, rng)
    written = quantized(model, scheme, feeds)
    assert len(nodes_of(written, "Conv")[0].input) == 2
    assert snr_db(run(model, feeds)["y"], run(written, feeds)["y"]) > 30


def test_dead_channel_with_a_large_bias_keeps_its_value(rng: np.random.Generator, tmp_path: Path) -> None:
    weight = random_weight(rng, 4, 3, 3, 3)
    weight[1] *= 1e-12
    weight[2] = 0
    bias = np.array([0.1, 50, -70, 0], np.float32)
    nodes = [node("Conv", ["x", "w", "b"], ["y"])]
    model = model_of(nodes, {"w": weight, "b": bias}, {"x": (1, 3, 8, 8)})
    feeds = random_feeds(model, rng)
    want = run(model, feeds)["y"]
    step = 120 / 255
    for per_channel in (True, False):
        written = quantized(model, ASYMMETRIC, feeds, per_channel=per_channel)
        assert "QLinearConv" in optimised_operators(written, tmp_path)
        got = run(written, feeds, optimise=True)["y"]
        assert np.abs(got - want)[:, 1:].max() <= 2 * step


@by_scheme
@pytest.mark.parametrize("size", [0, 1e-10, 1e-6])
@pytest.mark.parametrize("kernels", [["a", "c", "y"], ["a", "y"]], ids=["all", "middle in float"])
def test_bias_beside_which_the_input_is_nothing_survives_optimisation(
    kernels: Sequence[str], size: float, scheme: Scheme, rng: np.random.Generator
) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"]),
        node("Conv", ["a", "v", "b"], ["c"]),
        node("Conv", ["c", "u"], ["y"]),
    ]
    weights = {
        "w": np.float32(size) * random_weight(rng, 4, 3, 1, 1),
        "v": random_weight(rng, 4, 4, 1, 1),
        "b": np.array([3, -2, 1, 0.5], np.float32),
        "u": random_weight(rng, 4, 4, 1, 1),
    }
    model = model_of(nodes, weights, {"x": (1, 3, 8, 8)})
    feeds = random_feeds(model, rng)
    written = quantized(model, scheme, feeds, kernels=kernels)
    want = run(model, feeds)["y"]
    assert snr_db(want, run(written, feeds)["y"]) > 35
    assert snr_db(want, run(written, feeds, optimise=True)["y"]) > 35


def test_input_that_is_always_zero_overflows_nothing(rng: np.random.Generator) -> None:
    nodes = [node("Mul", ["x", "zero"], ["z"]), node("Conv", ["z", "w", "b"], ["y"])]
    weights = {
        "w": random_weight(rng, 4, 3, 3, 3),
        "b": np.array([3, -2, 1e-3, 0], np.float32),
        "zero": np.zeros((1, 3, 1, 1), np.float32),
    }
    model = model_of(nodes, weights, {"x": (1, 3, 8, 8)})
    feeds = random_feeds(model, rng)
    got = run(quantized(model, ASYMMETRIC, feeds, kernels=["y"]), feeds, optimise=True)["y"]
    np.testing.assert_allclose(got[0, :, 0, 0], weights["b"], atol=5 / 255)


@by_scheme
def test_product_of_two_activations_is_quantized(
    scheme: Scheme, rng: np.random.Generator, tmp_path: Path
) -> None:
    model = model_of([node("MatMul", ["x", "k"], ["y"])], {}, {"x": (2, 6, 16), "k": (2, 16, 5)})
    feeds = random_feeds(model, rng)
    written = quantized(model, scheme, feeds)
    assert len(nodes_of(written, "QuantizeLinear")) == 2 + (not scheme.symmetric)
    assert snr_db(run(model, feeds)["y"], run(written, feeds)["y"]) > 30
    if scheme is ASYMMETRIC:
        assert "QLinearMatMul" in optimised_operators(written, tmp_path)


@pytest.mark.parametrize(
    "activation",
    [node("Relu", ["c"], ["y"]), node("Clip", ["c", "low", "high"], ["y"])],
    ids=["Relu", "Clip"],
)
def test_kernel_carries_out_the_activation_after_it(
    activation: NodeProto, rng: np.random.Generator, tmp_path: Path
) -> None:
    weights = {"w": random_weight(rng, 4, 3, 3, 3), "low": np.float32(0), "high": np.float32(1)}
    model = model_of([node("Conv", ["x", "w"], ["c"]), activation], weights, {"x": (1, 3, 8, 8)})
    feeds = random_feeds(model, rng)
    written = quantized(model, ASYMMETRIC, feeds)
    assert optimised_operators(written, tmp_path) == ["QuantizeLinear", "QLinearConv", "DequantizeLinear"]
    # The codes are spent on what is left after the activation.
    _, output = nodes_of(written, "QuantizeLinear")
    assert constant(written, output.input[1]) == pytest.approx(run(model, feeds)["y"].max() / 255, rel=1e-5)


def test_activation_that_is_not_the_only_reader_is_not_absorbed(rng: np.random.Generator) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Relu", ["c"], ["r"]),
        node("Softmax", ["c"], ["s"]),
        node("Concat", ["r", "s"], ["y"], axis=1),
    ]
    model = model_of(nodes, {"w": random_weight(rng, 4, 3, 3, 3)}, {"x": (1, 3, 8, 8)})
    feeds = random_feeds(model, rng)
    written = quantized(model, ASYMMETRIC, feeds, kernels=["c"])
    assert [item.input[0] for item in nodes_of(written, "QuantizeLinear")] == ["x", "c"]
    assert snr_db(run(model, feeds)["y"], run(written, feeds)["y"]) > 30


@cases("operator", ["Add", "Mul", "Concat", "AveragePool", "Sigmoid", "LeakyRelu"])
def test_element_wise_kernels_run_on_integers(
    operator: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    inputs, attributes = ["c", "d"], {}
    if operator in {"AveragePool", "Sigmoid", "LeakyRelu"}:
        inputs = ["c"]
    if operator in {"AveragePool", "Concat"}:
        attributes = {"axis": 1} if operator == "Concat" else {"kernel_shape": [2, 2]}
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Conv", ["x", "v"], ["d"]),
        node(operator, inputs, ["e"], **attributes),
        node("Conv", ["e", "u"], ["y"]),
    ]
    channels = 8 if operator == "Concat" else 4
    weights = {"w": random_weight(rng, 4, 3, 3, 3), "v": random_weight(rng, 4, 3, 3, 3)}
    weights["u"] = random_weight(rng, 4, channels, 1, 1)
    if len(inputs) == 1:
        del nodes[1], weights["v"]
    model = model_of(nodes, weights, {"x": (1, 3, 8, 8)})
    feeds = random_feeds(model, rng)
    written = quantized(model, ASYMMETRIC, feeds)
    run_as = optimised_operators(written, tmp_path)
    assert set(run_as) - {"QuantizeLinear", "DequantizeLinear"} == {"QLinearConv", f"QLinear{operator}"}
    assert (run_as.count("QuantizeLinear"), run_as.count("DequantizeLinear")) == (1, 1)
    assert snr_db(run(model, feeds)["y"], run(written, feeds, optimise=True)["y"]) > 25


@by_scheme
def test_constant_operand_of_a_sum_is_stored_as_codes(scheme: Scheme, rng: np.random.Generator) -> None:
    k = rng.normal(size=(1, 4, 6, 6)).astype(np.float32)
    nodes = [node("Conv", ["x", "w"], ["c"]), node("Add", ["c", "k"], ["s"]), node("Softmax", ["s"], ["y"])]
    model = model_of(nodes, {"w": random_weight(rng, 4, 3, 3, 3), "k": k}, {"x": (1, 3, 8, 8)})
    feeds = random_feeds(model, rng)
    written = quantized(model, scheme, feeds)
    assert "k" not in {tensor.name for tensor in written.graph.initializer}
    assert snr_db(run(model, feeds)["y"], run(written, feeds)["y"]) > 20


@needs_tensorrt
@pytest.mark.parametrize("shape", [(), (1,), (1, 4, 1, 1)])
def test_tensorrt_builds_a_sum_with_a_constant(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Add", ["c", "k"], ["s"]),
        node("Conv", ["s", "v"], ["y"]),
    ]
    weights = {
        "w": random_weight(rng, 4, 3, 3, 3),
        "v": random_weight(rng, 4, 4, 3, 3),
        "k": np.full(shape, -3, np.float32),
    }
    model = model_of(nodes, weights, {"x": (1, 3, 8, 8)})
    written = quantized(model, SYMMETRIC, random_feeds(model, rng))
    assert "k" not in {tensor.name for tensor in written.graph.initializer}
    assert check_tensorrt(written.SerializeToString()).errors == ()


def test_seven_bit_form_runs_on_the_same_kernels_with_weights_of_seven_bits(
    rng: np.random.Generator, tmp_path: Path
) -> None:
    model = small_network(rng)
    feeds = random_feeds(model, rng)
    seven, eight = (quantized(model, scheme, feeds) for scheme in (ASYMMETRIC_7BIT, ASYMMETRIC))
    assert optimised_operators(seven, tmp_path) == optimised_operators(eight, tmp_path)
    peaks = [
        int(np.abs(numpy_helper.to_array(tensor).astype(int)).max())
        for tensor in seven.graph.initializer
        if tensor.data_type == TensorProto.INT8 and len(tensor.dims) > 1
    ]
    assert peaks == [63] * 4
    assert snr_db(run(model, feeds)["y"], run(seven, feeds, optimise=True)["y"]) > 25
