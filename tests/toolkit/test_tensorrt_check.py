import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tests.toolkit.cases import cases

from edgekit_toolkit.engines.tensorrt_check import INSTALL_COMMAND, TensorRtCheck, check_tensorrt

SHARED_MODELS = Path(__file__).resolve().parents[3] / "shared" / "models" / "models"
Constants = dict[str, NDArray[Any] | onnx.TensorProto]

needs_tensorrt = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None,
    reason=f"TensorRT is not installed; install it with: {INSTALL_COMMAND}",
)


def check_model(model: onnx.ModelProto | bytes, **options: Any) -> TensorRtCheck:
    content = model if isinstance(model, bytes) else model.SerializeToString()
    return check_tensorrt(content, **options)


def make_model(
    nodes: list[onnx.NodeProto],
    constants: Constants,
    *,
    shape: tuple[int | str, ...] = (1, 8, 6, 6),
    opset: int = 17,
) -> onnx.ModelProto:
    """A model from `x: float32 [shape]` to `y`, with a name for each node: its first output."""
    for node in nodes:
        node.name = f"n_{node.output[0]}"
    tensors = [
        numpy_helper.from_array(value, name) if isinstance(value, np.ndarray) else value
        for name, value in constants.items()
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "graph", [x], [y], tensors)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def quantized_conv(
    *,
    activation_zero_point: NDArray[Any] | None,
    weight_dtype: str = "int8",
    quantized_bias: bool = False,
    shape: tuple[int | str, ...] = (1, 8, 6, 6),
) -> onnx.ModelProto:
    """A convolution in the form of Q/DQ pairs; float bias and weights per output channel."""
    rng = np.random.default_rng(0)
    zero_point = ["zp"] if activation_zero_point is not None else []
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", *zero_point], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", *zero_point], ["a"]),
        helper.make_node("DequantizeLinear", ["w_q", "w_scale", "w_zp"], ["w"], axis=0),
        helper.make_node("Conv", ["a", "w", "b"], ["y"], pads=[1, 1, 1, 1]),
    ]
    constants: Constants = {
        "scale": np.array(0.05, np.float32),
        "w_q": rng.integers(0, 127, (8, 8, 3, 3)).astype(weight_dtype),
        "w_scale": np.full(8, 0.02, np.float32),
        "w_zp": np.zeros(8, weight_dtype),
        "b": np.ones(8, np.float32),
    }
    if activation_zero_point is not None:
        constants["zp"] = activation_zero_point
    if quantized_bias:
        del constants["b"]
        nodes.insert(0, helper.make_node("DequantizeLinear", ["b_q", "w_scale"], ["b"], axis=0))
        constants["b_q"] = np.ones(8, np.int32)
    return make_model(nodes, constants, shape=shape)


INT8_ZERO = np.array(0, np.int8)


def float_conv(shape: tuple[int | str, ...]) -> onnx.ModelProto:
    weights = np.ones((8, 8, 3, 3), np.float32)
    return make_model([helper.make_node("Conv", ["x", "w"], ["y"])], {"w": weights}, shape=shape)


def fp16_weights() -> onnx.ModelProto:
    nodes = [helper.make_node("Cast", ["h"], ["w"], to=1), helper.make_node("Conv", ["x", "w"], ["y"])]
    return make_model(nodes, {"h": np.ones((8, 8, 3, 3), np.float16)})


def weight_only_gemm() -> onnx.ModelProto:
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["w"], axis=0),
        helper.make_node("Gemm", ["x", "w"], ["y"], transB=1),
    ]
    return make_model(nodes, {"q": np.ones((4, 8), np.int8), "s": np.ones(4, np.float32)}, shape=("N", 8))


def int4_blocks() -> onnx.ModelProto:
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["w"], axis=0, block_size=16),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    packed = helper.make_tensor("q", TensorProto.INT4, (32, 8), [1] * 256)
    return make_model(nodes, {"q": packed, "s": np.ones((2, 8), np.float32)}, shape=(4, 32), opset=21)


def dynamic_quantization() -> onnx.ModelProto:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    return make_model(nodes, {})


def matmul_n_bits() -> onnx.ModelProto:
    node = helper.make_node(
        "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", K=32, N=8, bits=4, block_size=32
    )
    constants: Constants = {"w": np.ones((8, 1, 16), np.uint8), "s": np.ones(8, np.float32)}
    return make_model([node], constants, shape=(4, 32))


def quantized_constant(shape: tuple[int, ...]) -> onnx.ModelProto:
    nodes = [
        helper.make_node("DequantizeLinear", ["k_q", "s"], ["k"]),
        helper.make_node("Add", ["x", "k"], ["y"]),
    ]
    return make_model(nodes, {"k_q": np.full(shape, 127, np.int8), "s": np.array(0.1, np.float32)})


@needs_tensorrt
@pytest.mark.parametrize(
    "make",
    [
        lambda: quantized_conv(activation_zero_point=INT8_ZERO),
        fp16_weights,
        weight_only_gemm,
        int4_blocks,
        lambda: quantized_constant((1,)),
    ],
    ids=["int8 per channel", "fp16 weights", "int8 weights alone", "int4 blocks", "constant of rank 1"],
)
def test_form_that_tensorrt_understands_is_accepted(make: Callable[[], onnx.ModelProto]) -> None:
    check = check_model(make())
    assert check.errors == ()
    assert check.accepted
    assert check.available
    assert check.parsed
    assert check.engine_bytes is not None
    assert check.engine_bytes > 0
    assert check.version is not None
    assert check.seconds is not None


@needs_tensorrt
@cases(
    ("make", "words"),
    [
        (
            lambda: quantized_conv(activation_zero_point=np.array(3, np.int8)),
            "QuantizeLinear 'n_q': INVALID_NODE: Assertion failed: shiftIsAllZeros(zeroPoint)",
        ),
        (
            lambda: quantized_conv(activation_zero_point=INT8_ZERO, weight_dtype="uint8"),
            "DequantizeLinear 'n_w': ",
        ),
        (
            lambda: quantized_conv(activation_zero_point=INT8_ZERO, quantized_bias=True),
            "input has type Int32 but must have type",
        ),
        (dynamic_quantization, "DynamicQuantizeLinear 'n_q': UNSUPPORTED_NODE"),
        (matmul_n_bits, "MatMulNBits 'n_y': "),
        (lambda: b"not a model", "Failed to parse the ONNX model"),
    ],
    ids=["zero point", "uint8 weights", "int32 bias", "dynamic quantization", "contributed operator", "text"],
)
def test_form_that_the_parser_refuses_is_reported_in_its_words(
    make: Callable[[], onnx.ModelProto | bytes], words: str
) -> None:
    check = check_model(make())
    assert check.available
    assert not check.parsed
    assert not check.built
    assert not check.accepted
    assert check.engine_bytes is None
    assert words in " ".join(check.errors)
    assert "CUDA driver" not in " ".join(check.errors)


@needs_tensorrt
def test_quantized_scalar_constant_is_parsed_and_then_refused_by_the_builder() -> None:
    check = check_model(quantized_constant(()))
    assert check.parsed
    assert not check.built
    assert "Quantized constant (k_q) is only allowed before DQ" in " ".join(check.errors)


@needs_tensorrt
@pytest.mark.parametrize("zero_point", [np.array(0, np.uint8), None], ids=["stated", "by default"])
def test_uint8_activations_are_not_accepted_though_an_engine_is_built(
    zero_point: NDArray[Any] | None,
) -> None:
    check = check_model(quantized_conv(activation_zero_point=zero_point))
    assert check.built
    assert not check.accepted
    assert check.errors == ("QuantizeLinear 'n_q': quantizes to uint8, which TensorRT reads as int8",)


@needs_tensorrt
def test_free_batch_needs_no_dims() -> None:
    model = quantized_conv(activation_zero_point=INT8_ZERO, shape=("N", 8, 6, 6))
    assert check_model(model).accepted


@needs_tensorrt
def test_free_height_and_width_need_dims() -> None:
    model = float_conv((1, 8, "H", "W"))
    without = check_model(model)
    assert without.parsed
    assert not without.built
    assert without.errors == ("input 'x' has free dimensions [2, 3]: give its shapes in dims",)
    given = ((1, 8, 4, 4), (1, 8, 6, 6), (1, 8, 9, 9))
    assert check_model(model, shapes={"x": given}).accepted


@needs_tensorrt
def test_dims_that_contradict_the_model_are_refused_by_the_builder() -> None:
    check = check_model(float_conv(("N", 8, 6, 6)), shapes={"x": ((1, 9, 6, 6),) * 3})
    assert check.parsed
    assert not check.built
    assert "Dimension mismatch for tensor x" in " ".join(check.errors)


@needs_tensorrt
def test_dims_for_an_input_that_does_not_exist_are_refused() -> None:
    check = check_model(float_conv(("N", 8, 6, 6)), shapes={"z": ((1, 8, 6, 6),) * 3})
    assert not check.built
    assert check.errors == ("dims names z, but the inputs are x",)


@needs_tensorrt
@pytest.mark.skipif(not SHARED_MODELS.is_dir(), reason="../shared/models is not there")
@pytest.mark.parametrize("path", sorted(SHARED_MODELS.glob("*.onnx")), ids=lambda path: path.stem)
def test_real_float_model_is_accepted(path: Path) -> None:
    check = check_model(onnx.load(path))
    assert check.errors == ()
    assert check.accepted


def install_fake(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> None:
    """Put a library of the name of TensorRT's before every other one."""
    (folder / "tensorrt_rtx_bindings.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)


def test_missing_library_is_reported_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_fake(monkeypatch, tmp_path, "raise ImportError('libtensorrt_rtx.so.1: not found')")
    check = check_model(float_conv((1, 8, 6, 6)))
    assert not check.available
    assert not check.accepted
    assert len(check.errors) == 1
    assert "libtensorrt_rtx.so.1: not found" in check.errors[0]
    assert INSTALL_COMMAND in check.errors[0]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import os, sys; print('stack smashed', file=sys.stderr, flush=True); os.abort()", "stack smashed"),
        ("import os; os.abort()", "it printed no message"),
    ],
    ids=["with a message", "in silence"],
)
def test_native_crash_is_a_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, words: str
) -> None:
    install_fake(monkeypatch, tmp_path, source)
    check = check_model(float_conv((1, 8, 6, 6)))
    assert check.available
    assert not check.parsed
    assert check.errors == (f"TensorRT ended by SIGABRT: {words}",)


def test_error_inside_the_library_is_a_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_fake(monkeypatch, tmp_path, "class ILogger: pass")
    check = check_model(float_conv((1, 8, 6, 6)))
    assert not check.accepted
    assert len(check.errors) == 1
    assert check.errors[0].startswith("TensorRT ended with exit code 1: AttributeError")


LIBRARY_WITHOUT_A_PLACE = """
from types import SimpleNamespace as Any
class ILogger:
    Severity = Any(ERROR=1, INTERNAL_ERROR=2)
class Builder:
    def __init__(self, log):
        self.log = log
    def create_network(self, flags):
        return Any(num_inputs=0, get_input=None)
    def create_builder_config(self):
        return Any(set_compute_capability=lambda *_: None, create_timing_cache=lambda _data: None)
    def build_serialized_network(self, network, config):
        self.log.log(1, "[graphScope.cpp] Error Code 2: Internal Error (no scope)")
ComputeCapability = Any(SM86=86)
BuilderFlag = Any()
OnnxParser = lambda network, log: Any(parse=lambda model: True)
__version__ = "1"
"""


def conditional() -> onnx.ModelProto:
    def branch(name: str) -> onnx.GraphProto:
        node = helper.make_node("Relu", ["x"], [name], name=f"n_{name}")
        return helper.make_graph(
            [node], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)]
        )

    node = helper.make_node("If", ["choice"], ["y"], then_branch=branch("a"), else_branch=branch("b"))
    return make_model([node], {"choice": np.array(True)})


def test_internal_error_of_the_builder_is_reported_with_the_control_flow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_fake(monkeypatch, tmp_path, LIBRARY_WITHOUT_A_PLACE)
    check = check_model(conditional())
    assert not check.accepted
    assert check.errors[0].startswith("operator 'If' at node 'n_y' is control flow that its builder does not")
    assert check.errors[0].endswith("Internal Error (no scope)")


def test_library_that_hangs_is_stopped_at_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_fake(monkeypatch, tmp_path, "import time; time.sleep(3600)")
    check = check_model(float_conv((1, 8, 6, 6)), time_limit_s=2.0)
    assert not check.accepted
    assert check.version is None
    assert "no answer within 2 s" in check.errors[0]


@pytest.mark.parametrize(
    ("low", "opt", "high"),
    [((1,), (1,), (1, 2)), ((2,), (1,), (3,)), ((1,), (4,), (3,)), ((0,), (1,), (1,))],
    ids=["ranks", "under min", "over max", "size 0"],
)
def test_shape_range_that_holds_no_shape_is_refused(
    low: tuple[int, ...], opt: tuple[int, ...], high: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="1 <= smallest <= usual <= largest"):
        check_tensorrt(b"", shapes={"x": (low, opt, high)})
