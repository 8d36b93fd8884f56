from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from tests.toolkit.package_run import model_of, tensor

from edgekit_runtime.errors import DataError, ModelError
from edgekit_runtime.sessions.ort_products import saturates
from edgekit_toolkit.costs.ort_arena import Arena
from edgekit_toolkit.costs.peak_memory import MemoryEstimate, estimate_peak_memory
from edgekit_toolkit.evaluation.judge import find_memory
from edgekit_toolkit.measurement.peak_memory import PeakMemory, measure_peak_memory
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.specs import tensor_specs
from edgekit_toolkit.samples.generated import generate_feeds
from edgekit_toolkit.targets.loader import load_target

KIB, MIB = 1024, 1024 * 1024
# As scripts/emulated-python has it.
EMULATED = "emulated by qemu" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
MODELS = Path(__file__).resolve().parents[3] / "shared/models/models"
ERROR = 0.10  # of the whole process, and from 5 MiB on also of the model's part; docs/explanation/memory.md


def build(nodes, weights, x_shape, y_shape, x_type=TensorProto.FLOAT):
    drawn = (
        np.random.default_rng(0).normal(size=1021).astype(np.float32)
    )  # again and again: values do not matter
    arrays = {
        name: value if isinstance(value, np.ndarray) else np.resize(drawn, value)
        for name, value in weights.items()
    }
    made = [
        helper.make_node(op, list(inputs), list(outputs), **attributes)
        for op, inputs, outputs, attributes in nodes
    ]
    return model_of(made, [tensor("x", x_shape, x_type)], [tensor("y", y_shape)], arrays)


def matmul():
    return build([("MatMul", ("x", "w"), "y", {})], {"w": (2048, 2048)}, [1, 2048], [1, 2048])


def convolutions():
    sizes = [(256, 3), (256, 256), (512, 256), (512, 512)]
    names = ["x", "a", "b", "c", "y"]
    nodes = [
        ("Conv", (names[i], f"w{i}"), names[i + 1], {"pads": [1] * 4, "strides": [2, 2]})
        for i in range(len(sizes))
    ]
    weights = {f"w{i}": (*size, 3, 3) for i, size in enumerate(sizes)}
    return build(nodes, weights, [1, 3, 128, 128], [1, 512, 8, 8])


def grouped_convolution():
    nodes = [("Conv", ("x", "w"), "y", {"pads": [1] * 4, "group": 3})]
    return build(nodes, {"w": (15, 5, 3, 3)}, [1, 15, 256, 256], [1, 15, 256, 256])


def transposed_convolution():
    nodes = [("ConvTranspose", ("x", "w"), "y", {"strides": [2, 2]})]
    return build(nodes, {"w": (24, 24, 2, 2)}, [1, 24, 256, 256], [1, 24, 512, 512])


def int8_convolution():
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.integers(-127, 127, (512, 512, 3, 3)).astype(np.int8),
        "ws": np.float32(0.01),
        "wz": np.int8(0),
        "s": np.float32(0.1),
        "z": np.uint8(128),
    }
    nodes = [
        ("QuantizeLinear", ("x", "s", "z"), ("xq",), {}),
        ("DequantizeLinear", ("xq", "s", "z"), ("xd",), {}),
        ("DequantizeLinear", ("w", "ws", "wz"), ("wd",), {}),
        ("Conv", ("xd", "wd"), ("c",), {"pads": [1] * 4}),
        ("QuantizeLinear", ("c", "s", "z"), ("yq",), {}),
        ("DequantizeLinear", ("yq", "s", "z"), ("y",), {}),
    ]
    arrays = {name: np.asarray(value) for name, value in weights.items()}
    return build(nodes, arrays, [1, 512, 32, 32], [1, 512, 32, 32])


def branches():
    # Many large tensors that live at once.
    nodes = [(op, ("x",), (op,), {}) for op in ("Exp", "Sin", "Cos", "Abs", "Neg")]
    nodes.append(("Sum", ("Exp", "Sin", "Cos", "Abs", "Neg"), "y", {}))
    return build(nodes, {}, [1, 1024, 1024], [1, 1024, 1024])


def assert_estimate_holds(model, dims=None, threads=1):
    if EMULATED:
        pytest.skip("the emulator's own memory would be measured with the model's")
    feeds = generate_feeds(tensor_specs(model)[0], 1, 0, dims)[0]
    measured = measure_peak_memory(model.SerializeToString(), feeds, threads=threads)
    estimate = estimate_peak_memory(model, engine_bytes=measured.engine_bytes, dims=dims, threads=threads)
    assert estimate.total_bytes == pytest.approx(measured.total_bytes, rel=ERROR)
    if measured.model_bytes > 10 * MIB:
        assert estimate.model_bytes == pytest.approx(measured.model_bytes, rel=ERROR)


@pytest.mark.parametrize(
    "make",
    [matmul, convolutions, grouped_convolution, transposed_convolution, int8_convolution, branches],
)
def test_estimate_of_a_built_model_is_within_ten_percent_of_the_measurement(make):
    if make is int8_convolution and saturates():
        pytest.skip("without VNNI the engine keeps other copies of 8-bit weights than on the target")
    assert_estimate_holds(make())


@pytest.mark.parametrize(
    "name",
    [
        "dscnn_kws_fp32",
        "efficientnet_lite0_fp32",
        "mnist8_fp32",
        "mobilenet_v1_025_224_fp32",
        "mobilenetv1_025_vww_fp32",
        "resnet8_cifar10_fp32",
    ],
)
def test_estimate_of_a_real_model_is_within_ten_percent_of_the_measurement(name):
    path = MODELS / f"{name}.onnx"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    assert_estimate_holds(onnx.load(path))


def test_estimate_with_two_threads_and_a_batch_is_within_ten_percent_of_the_measurement():
    model = convolutions()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "N"
    assert_estimate_holds(model, {"N": 4}, threads=2)


def test_total_is_the_higher_peak_plus_nothing():
    loading = estimate_peak_memory(matmul(), engine_bytes=50 * MIB)
    assert loading.total_bytes == loading.load_peak_bytes > loading.run_peak_bytes
    running = estimate_peak_memory(branches(), engine_bytes=50 * MIB)
    assert running.total_bytes == running.run_peak_bytes > running.load_peak_bytes
    assert running.total_bytes == 50 * MIB + running.model_bytes


def test_engine_bytes_shift_the_total_and_nothing_else():
    small, large = (estimate_peak_memory(matmul(), engine_bytes=size * MIB) for size in (10, 90))
    assert large.total_bytes - small.total_bytes == 80 * MIB
    assert large.model_bytes == small.model_bytes


def test_weights_are_packed_one_at_a_time():
    size = 1024 * 1024 * 4
    nodes = [("MatMul", ("x", "w0"), "a", {}), ("MatMul", ("a", "w1"), "y", {})]
    model = build(nodes, {"w0": (1024, 1024), "w1": (1024, 1024)}, [1, 1024], [1, 1024])
    estimate = estimate_peak_memory(model, engine_bytes=0)
    assert estimate.weights_bytes == 2 * size
    assert estimate.loading_bytes == pytest.approx(3 * size, rel=0.001)  # names are stored beside the values


def test_plain_layout_loads_without_reordered_copies():
    blocked, plain = (
        estimate_peak_memory(convolutions(), engine_bytes=0, blocked_layout=flag) for flag in (True, False)
    )
    assert plain.loading_bytes < 0.7 * blocked.loading_bytes


def test_chain_of_in_place_operators_needs_one_buffer():
    names = ["x", *"abcdef", "y"]
    nodes = [
        ("Sigmoid" if index % 2 else "Relu", names[index], names[index + 1], {})
        for index in range(len(names) - 1)
    ]
    model = build(nodes, {}, [1, 1024, 1024], [1, 1024, 1024])
    # The buffer of the chain, and the output.
    assert estimate_peak_memory(model, engine_bytes=0).activations_bytes == 2 * 4 * MIB


def test_tensor_without_a_known_shape_counts_nothing():
    nodes = [("NonZero", "x", "i", {}), ("Cast", "i", "y", {"to": TensorProto.FLOAT})]
    model = build(nodes, {}, [8, 8], [2, "found"])
    estimate = estimate_peak_memory(model, engine_bytes=0)
    assert estimate.activations_bytes == 0


def branching(branch_weight):
    """y = the sum of x squeezed (which needs N = 1) or of x @ branch_weight."""
    y = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
    squeeze = helper.make_graph([helper.make_node("Squeeze", ["x", "axes"], ["out"])], "then", [], [y])
    product = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["out"])],
        "else",
        [],
        [y],
        [numpy_helper.from_array(branch_weight, "w")],
    )
    nodes = [
        helper.make_node("If", ["c"], ["b"], then_branch=squeeze, else_branch=product),
        helper.make_node("ReduceSum", ["b"], ["y"], keepdims=0),
    ]
    size = branch_weight.shape[0]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", size]),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]
    axes = numpy_helper.from_array(np.array([0]), "axes")
    total = helper.make_tensor_value_info("y", TensorProto.FLOAT, [])
    graph = helper.make_graph(nodes, "g", inputs, [total], [axes])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_control_flow_is_measured_in_the_place_of_an_estimate():
    model = branching(np.ones((64, 64), np.float32))
    feeds = {"x": np.ones((1, 64), np.float32), "c": np.array(True)}
    assert isinstance(find_memory(OnnxModel(model), load_target("x86-64"), {"N": 1}, feeds), PeakMemory)
    assert isinstance(find_memory(OnnxModel(matmul()), load_target("x86-64"), {}, {}), MemoryEstimate)


def test_weights_inside_control_flow_are_counted():
    estimate = estimate_peak_memory(branching(np.ones((512, 512), np.float32)), engine_bytes=0)
    assert estimate.weights_bytes == pytest.approx(MIB, rel=0.001)


def test_size_that_contradicts_a_branch_still_gives_an_estimate():
    model = branching(np.ones((512, 512), np.float32))
    estimate = estimate_peak_memory(model, engine_bytes=0, dims={"N": 3})
    assert estimate.feeds_bytes == 3 * 512 * 4 + 1
    assert estimate.weights_bytes == pytest.approx(MIB, rel=0.001)


def test_model_is_left_as_it_is():
    model = matmul()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    before = model.SerializeToString()
    estimate_peak_memory(model, engine_bytes=0, dims={"N": 3})
    assert model.SerializeToString() == before


def test_free_dimension_without_a_size_is_refused():
    model = branches()
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "W"
    with pytest.raises(DataError, match="'W' is free"):
        estimate_peak_memory(model, engine_bytes=0)


def test_model_that_the_engine_refuses_is_a_model_error():
    model = build([("NoSuchOperator", "x", "y", {})], {}, [1], [1])
    with pytest.raises(ModelError, match="NoSuchOperator"):
        estimate_peak_memory(model, engine_bytes=0)


def test_arena_reuses_the_smallest_free_block_that_fits():
    arena = Arena()
    large, _, small, _ = (arena.allocate(size) for size in (64 * KIB, KIB, 16 * KIB, KIB))
    arena.release(large)
    arena.release(small)
    assert arena.allocate(12 * KIB).offset == small.offset


def test_arena_joins_free_neighbours():
    arena = Arena()
    blocks = [arena.allocate(256 * KIB) for _ in range(4)]
    for block in (blocks[1], blocks[3], blocks[2], blocks[0]):
        arena.release(block)
    assert arena.allocate(MIB).region == 0
    assert arena.resident_bytes == MIB


def test_arena_grows_by_doubling_and_counts_only_touched_bytes():
    arena = Arena()
    assert arena.allocate(MIB).region == 0
    assert arena.allocate(3 * KIB).region == 1
    assert arena.resident_bytes == MIB + 3 * KIB
    assert arena.allocate(MIB).region == 1  # the second region has 2 MiB


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3 * MIB)), max_size=60))
def test_arena_blocks_never_overlap(steps):
    arena = Arena()
    live, sizes = [], []
    for release, size in steps:
        if release and live:
            sizes.pop(size % len(live))
            arena.release(live.pop(size % len(live)))
        else:
            live.append(arena.allocate(size))
            sizes.append(size)
            assert live[-1].size >= size
        spans = sorted((block.region, block.offset, block.offset + block.size) for block in live)
        for (region, _, end), (other_region, start, _) in pairwise(spans):
            assert region != other_region or end <= start
    assert arena.resident_bytes >= sum(sizes)
