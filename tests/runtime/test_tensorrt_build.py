"""Building engines for real with TensorRT-RTX, which parses and builds without a GPU; nothing is executed."""

import importlib.util
import threading
import time
from typing import Any

import numpy as np
import pytest

from edgekit_runtime.errors import BackendError
from edgekit_runtime.sessions.tensorrt import TensorRtOptions
from edgekit_runtime.sessions.tensorrt.build import BuiltEngines, build_engines
from edgekit_runtime.sessions.tensorrt.cache import StoppedError
from edgekit_runtime.sessions.tensorrt.network import (
    RefusedError,
    is_quantized,
    make_log,
    parse,
    remove_quantization,
)

pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper

LIBRARY = "tensorrt_rtx_bindings"
needs_builder = pytest.mark.skipif(
    importlib.util.find_spec(LIBRARY) is None,
    reason="TensorRT-RTX is not installed: pip install --no-deps -r requirements/tensorrt.txt",
)
RNG = np.random.default_rng(0)
CODES = RNG.integers(-127, 128, (8, 8, 3, 3)).astype(np.int8)
SCALES = RNG.uniform(0.01, 0.02, 8).astype(np.float32)


def quantized_model(
    *,
    zero_point: Any = 0,
    output_pair: bool = False,
    shape: tuple[Any, ...] = (1, 8, 6, 6),
    weights: Any = CODES,
) -> bytes:
    """x -> Q/DQ -> Conv with int8 weights a channel -> y, or -> Q/DQ -> y."""
    zero = np.array(zero_point, weights.dtype)
    last = "c" if output_pair else "y"
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], "quantize"),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["a"], "dequantize"),
        helper.make_node("DequantizeLinear", ["w_q", "w_scale", "w_zero"], ["w"], "weights", axis=0),
        helper.make_node("Conv", ["a", "w"], [last], "conv", pads=[1, 1, 1, 1]),
    ]
    if output_pair:
        nodes += [
            helper.make_node("QuantizeLinear", ["c", "scale", "zero"], ["p"], "quantize_y"),
            helper.make_node("DequantizeLinear", ["p", "scale", "zero"], ["y"], "dequantize_y"),
        ]
    constants = {
        "scale": np.array(0.05, np.float32),
        "zero": zero,
        "w_q": weights,
        "w_scale": SCALES,
        "w_zero": np.zeros(8, weights.dtype),
    }
    return make(nodes, constants, shape)


def make(nodes: list[Any], constants: dict[str, Any], shape: tuple[Any, ...]) -> bytes:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    data: bytes = model.SerializeToString()
    return data


def build(model: bytes, timings: tuple[bytes, ...] = (), **options: Any) -> BuiltEngines:
    return build_engines(
        model,
        TensorRtOptions(**options),
        timings=timings,
        stop=threading.Event(),
        library=LIBRARY,
        compute_capability="SM86",
    )


@needs_builder
def test_a_quantized_model_is_built_as_it_is_and_without_its_quantization() -> None:
    engines = build(quantized_model())
    assert engines.refused == {}
    # TensorRT-RTX has no flag for half precision; TensorRT 10 builds fp16 instead of fp32.
    assert engines.plans.keys() == {"int8", "fp32"}
    assert len(set(engines.plans.values())) == 2


@needs_builder
def test_a_float_model_is_built_as_it_is() -> None:
    weights = (CODES * SCALES.reshape(8, 1, 1, 1)).astype(np.float32)
    model = make([helper.make_node("Conv", ["x", "w"], ["y"])], {"w": weights}, (1, 8, 6, 6))
    assert build(model).plans.keys() == {"fp32"}


@needs_builder
def test_each_precision_is_refused_for_itself() -> None:
    engines = build(quantized_model(), precisions=["fp16", "int8"])
    assert engines.plans.keys() == {"int8"}
    assert "half needs a model in half" in engines.refused["fp16"]


@needs_builder
def test_timings_are_returned_and_taken() -> None:
    first = build(quantized_model(), precisions=["int8"])
    assert first.timing
    second = build(quantized_model(), (first.timing, b"of another version"), precisions=["int8"])
    assert second.plans["int8"] == first.plans["int8"]


@needs_builder
def test_a_free_batch_has_a_range_by_default_and_by_option() -> None:
    assert build(quantized_model(shape=("N", 8, 6, 6))).refused == {}
    options = {"x": [[1, 8, 6, 6], [2, 8, 6, 6], [4, 8, 6, 6]]}
    assert build(quantized_model(shape=("N", 8, 6, 6)), shapes=options).refused == {}


@needs_builder
@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (quantized_model(zero_point=3), {}, "Non-zero zero point is not supported"),
        (quantized_model(weights=CODES.astype(np.uint8)), {}, "UINT8"),
        (quantized_model(shape=(1, 8, "H", 6)), {}, "'x' has free dimensions"),
        (quantized_model(), {"shapes": {"z": [[1], [1], [1]]}}, "dims names z"),
        (b"no model", {}, "parse"),
        (make([helper.make_node("Banana", ["x"], ["y"], "n")], {}, (1, 2)), {}, "Banana 'n'"),
    ],
    ids=["zero point", "uint8", "free height", "unknown input", "garbage", "unknown operator"],
)
def test_a_refusal_is_an_answer_with_the_reason(model: bytes, options: dict[str, Any], reason: str) -> None:
    engines = build(model, **options)
    assert engines.plans == {}
    assert reason in " ".join(engines.refused.values())


def test_a_builder_that_dies_is_a_backend_error() -> None:
    with pytest.raises(BackendError, match=r"exit code 1: ModuleNotFoundError: .*'no_tensorrt'"):
        build_engines(b"", TensorRtOptions(), timings=(), stop=threading.Event(), library="no_tensorrt")


def test_a_builder_that_nobody_waits_for_is_ended() -> None:
    stop = threading.Event()
    stop.set()
    started = time.monotonic()
    with pytest.raises(StoppedError):
        build_engines(b"", TensorRtOptions(), timings=(), stop=stop, library="antigravity")
    assert time.monotonic() - started < 60  # and not the hour that a build may take


@pytest.fixture
def parsed() -> Any:
    """Parses a model and returns the library, the network, and what must outlive it."""
    trt = pytest.importorskip(LIBRARY)

    def parse_it(model: bytes) -> tuple[Any, Any, Any]:
        log = make_log(trt)
        builder = trt.Builder(log)
        network = builder.create_network(0)
        parse(trt, log, network, model)
        return trt, network, (log, builder)

    return parse_it


def convolution(trt: Any, network: Any) -> Any:
    layers = map(network.get_layer, range(network.num_layers))
    return next(layer for layer in layers if layer.type == trt.LayerType.CONVOLUTION)


def test_without_quantization_a_convolution_reads_the_input_and_the_values(parsed: Any) -> None:
    trt, network, keep = parsed(quantized_model())
    assert is_quantized(trt, network)
    values = remove_quantization(trt, network)
    assert convolution(trt, network).get_input(0).name == "x"
    np.testing.assert_array_equal(values[0], CODES.astype(np.float32) * SCALES.reshape(8, 1, 1, 1))
    weights = convolution(trt, network).get_input(1)
    assert tuple(weights.shape) == CODES.shape
    assert weights.dtype == trt.float32
    del keep


def test_without_quantization_an_output_keeps_its_name(parsed: Any) -> None:
    trt, network, keep = parsed(quantized_model(output_pair=True))
    values = remove_quantization(trt, network)
    assert [network.get_output(index).name for index in range(network.num_outputs)] == ["y"]
    assert len(values) == 1
    del keep


@needs_builder
def test_an_output_that_was_quantized_is_built_without_it() -> None:
    assert build(quantized_model(output_pair=True), precisions=["fp32"]).refused == {}


def test_codes_that_numpy_does_not_have_are_refused(parsed: Any) -> None:
    blocks = helper.make_tensor("w_q", TensorProto.INT4, [32, 8], [1] * 256)
    nodes = [
        helper.make_node("DequantizeLinear", ["w_q", "w_scale"], ["w"], "weights", axis=0, block_size=16),
        helper.make_node("MatMul", ["x", "w"], ["y"], "matmul"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 32))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    scales = numpy_helper.from_array(np.full((2, 8), 0.1, np.float32), "w_scale")
    graph = helper.make_graph(nodes, "g", [x], [y], [blocks, scales])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    trt, network, keep = parsed(model.SerializeToString())
    with pytest.raises(RefusedError):
        remove_quantization(trt, network)
    del keep
