"""Which nodes become integer kernels, and what happens where they meet float ones."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.toolkit.cases import cases
from tests.toolkit.quantized_models import (
    PADDED,
    SCHEMES,
    by_scheme,
    constant,
    nodes_of,
    product_model,
    quantized,
    ranges_of,
)
from tests.toolkit.small_models import (
    assert_valid,
    model_of,
    node,
    random_feeds,
    random_weight,
    run,
    snr_db,
)

from edgekit_toolkit.quantize.onnx.qdq import write_qdq
from edgekit_toolkit.quantize.plan import Plan, kernel_names
from edgekit_toolkit.quantize.scheme import ASYMMETRIC, SYMMETRIC, Scheme

pytestmark = pytest.mark.int8_products


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


# Which nodes become kernels.


def test_products_that_no_integer_kernel_computes_stay_in_float(rng: np.random.Generator) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["good"]),
        node("Conv", ["x", "made"], ["computed weight"]),
        node("Reshape", ["good", "rows"], ["m"]),
        node("Gemm", ["m", "d", "row"], ["bias of two axes"]),
        node("Gemm", ["m", "d"], ["alpha"], alpha=2.0),
        node("MatMul", ["d", "d"], ["constants"]),
        node("MatMul", ["m", "stack"], ["stack of matrices"]),
        node("Identity", ["w"], ["made"]),
    ]
    nodes.insert(0, nodes.pop())
    weights = {
        "w": random_weight(rng, 4, 3, 1, 1),
        "rows": np.array([-1, 4], np.int64),
        "d": random_weight(rng, 4, 4),
        "row": random_weight(rng, 1, 4),
        "stack": random_weight(rng, 2, 4, 4),
    }
    model = model_of(nodes, weights, {"x": (1, 3, 4, 4)}, [item.output[0] for item in nodes[2:]])
    for scheme in SCHEMES:
        assert kernel_names(model, scheme, elementwise=True) == ("good",)


def test_element_wise_kernels_are_those_of_the_scheme_between_tensors(rng: np.random.Generator) -> None:
    nodes = [
        node("Add", ["x", "k"], ["a"]),
        node("Mul", ["a", "x"], ["m"]),
        node("Shape", ["x"], ["shape"]),
        node("Add", ["shape", "one"], ["s"]),
        node("Sigmoid", ["m"], ["y"]),
    ]
    weights = {"k": random_weight(rng, 3, 1, 1), "one": np.array(1, np.int64)}
    model = model_of(nodes, weights, {"x": (1, 3, 4, 4)}, ["y"])
    assert kernel_names(model, ASYMMETRIC, elementwise=True) == ("a", "m", "y")
    assert kernel_names(model, SYMMETRIC, elementwise=True) == ("a",)
    assert kernel_names(model, ASYMMETRIC, elementwise=False) == ()


def test_operand_that_a_caller_may_replace_is_no_constant(rng: np.random.Generator) -> None:
    model = model_of(
        [node("Add", ["x", "k"], ["y"])], {"k": np.ones(4, np.float32)}, {"x": (2, 4), "k": (4,)}
    )
    assert kernel_names(model, ASYMMETRIC, elementwise=True) == ()


def test_plan_with_a_kernel_or_without_a_range_that_the_model_needs_is_refused(
    rng: np.random.Generator,
) -> None:
    model, _, _ = product_model("Conv", rng)
    with pytest.raises(KeyError, match="stranger"):
        write_qdq(model, Plan(SYMMETRIC, frozenset({"y", "stranger"}), {"x": (-1, 1)}))
    with pytest.raises(KeyError, match="y"):
        write_qdq(model, Plan(ASYMMETRIC, frozenset({"y"}), {"x": (-1, 1)}))


# Where float and integer kernels meet.


@by_scheme
def test_tensor_that_a_float_and_an_integer_kernel_read_is_right_for_both(
    scheme: Scheme, rng: np.random.Generator
) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"]),
        node("Conv", ["a", "v"], ["b"]),
        node("Exp", ["a"], ["e"]),
        node("Conv", ["e", "u"], ["f"]),
        node("Add", ["b", "f"], ["y"]),
    ]
    weights = {name: random_weight(rng, 4, 3 if name == "w" else 4, 1, 1) for name in "wvu"}
    model = model_of(nodes, weights, {"x": (1, 3, 8, 8)})
    feeds = random_feeds(model, rng)
    for kernels in (["a", "b"], ["b"], ["a"], ["f"], ["a", "f"]):
        written = quantized(model, scheme, feeds, kernels=kernels)
        assert snr_db(run(model, feeds)["y"], run(written, feeds)["y"]) > 30
    (exp,) = nodes_of(quantized(model, scheme, feeds, kernels=["b"]), "Exp")
    assert exp.input[0] == "a"  # a float tensor reaches its float reader as it is


@by_scheme
def test_outputs_in_the_middle_keep_their_names_and_readers(scheme: Scheme, rng: np.random.Generator) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Relu", ["c"], ["r"]),
        node("MaxPool", ["r"], ["m"], kernel_shape=[2, 2]),
        node("Conv", ["m", "v"], ["y"]),
    ]
    weights = {"w": random_weight(rng, 4, 3, 3, 3), "v": random_weight(rng, 4, 4, 3, 3)}
    for outputs in (["y", "c"], ["y", "r"], ["m", "y"], ["c", "r", "m", "y"]):
        model = model_of(nodes, weights, {"x": (1, 3, 10, 10)}, outputs)
        feeds = random_feeds(model, rng)
        written = quantized(model, scheme, feeds)
        want, got = run(model, feeds), run(written, feeds)
        for name in outputs:
            assert got[name].dtype == np.float32
            assert snr_db(want[name], got[name]) > 28


def test_float_product_between_kernels_reads_a_scale_a_channel(rng: np.random.Generator) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"]),
        node("Conv", ["a", "v"], ["b"], group=4),
        node("Conv", ["b", "u"], ["y"]),
    ]
    weights = {"w": random_weight(rng, 4, 3, 1, 1), "u": random_weight(rng, 4, 4, 1, 1)}
    # Channels of very different sizes: per tensor, onnxruntime would leave three of them a few codes.
    weights["v"] = random_weight(rng, 4, 1, 3, 3) * np.array([1, 0.02, 0.02, 0.02], np.float32).reshape(
        4, 1, 1, 1
    )
    weights["u"][:, 1:] *= 50
    model = model_of(nodes, weights, {"x": (1, 3, 8, 8)})
    feeds = random_feeds(model, rng)
    written = quantized(model, ASYMMETRIC, feeds, kernels=["a", "y"])
    middle = nodes_of(written, "Conv")[1]
    reader = next(item for item in nodes_of(written, "DequantizeLinear") if item.output[0] == middle.input[0])
    assert constant(written, reader.input[1]).shape == (4,)
    # The engine's optimiser changes no more than a code here and there.
    plain, optimised = (run(written, feeds, optimise=how)["y"] for how in (False, True))
    assert snr_db(plain, optimised) > 30


def test_model_with_a_branch_and_shared_weights_is_quantized_outside_the_branch(
    rng: np.random.Generator,
) -> None:
    def branch(operator: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{operator}_out", TensorProto.FLOAT, None)
        return helper.make_graph([node(operator, ["a"], [out.name])], operator, [], [out])

    nodes = [
        node("Conv", ["x", "w", "b"], ["a"], **PADDED),
        node("Conv", ["a", "w", "b"], ["c"], **PADDED),
        node("ReduceMax", ["x"], ["top"], keepdims=0),
        node("Greater", ["top", "zero"], ["positive"]),
        node("If", ["positive"], ["i"], then_branch=branch("Relu"), else_branch=branch("Neg")),
        node("Add", ["c", "i"], ["y"]),
    ]
    weights = {"w": random_weight(rng, 3, 3, 3, 3), "b": random_weight(rng, 3), "zero": np.float32(0)}
    model = model_of(nodes, weights, {"x": (1, 3, 8, 8)})
    feeds = random_feeds(model, rng)
    samples = [{"x": sign * np.abs(feeds["x"])} for sign in (1, -1)]
    ranges = ranges_of(model, samples)
    for scheme in SCHEMES:
        names = kernel_names(model, scheme, elementwise=True)
        written = write_qdq(model, Plan(scheme, frozenset(names), ranges))
        assert_valid(written)
        assert {"a", "c"} <= set(names)
        for some in samples:
            assert snr_db(run(model, some)["y"], run(written, some)["y"]) > 28


@by_scheme
def test_weight_of_two_kernels_is_stored_once_where_its_codes_are_equal(
    scheme: Scheme, rng: np.random.Generator
) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"]),
        node("Conv", ["k", "w"], ["b"]),
        node("Add", ["a", "b"], ["y"]),
    ]
    shapes = {"x": (1, 3, 8, 8), "k": (1, 3, 8, 8)}
    model = model_of(nodes, {"w": random_weight(rng, 4, 3, 3, 3)}, shapes)
    feeds = random_feeds(model, rng)
    written = quantized(model, scheme, feeds)
    stored = [tensor for tensor in written.graph.initializer if list(tensor.dims) == [4, 3, 3, 3]]
    assert len(stored) == 1
    assert snr_db(run(model, feeds)["y"], run(written, feeds, optimise=True)["y"]) > 30


@by_scheme
def test_names_that_run_together_stay_apart(scheme: Scheme, rng: np.random.Generator) -> None:
    # Tensor a for reader b_c, and tensor a_b for reader c; and names that the pairs would like to have.
    nodes = [
        node("Conv", ["x", "x_scale"], ["a"]),
        node("Conv", ["a", "w"], ["a_b"]),
        node("Conv", ["a", "v"], ["b_c"]),
        node("Conv", ["a_b", "u"], ["c"]),
        node("Relu", ["c"], ["c_raw"]),
        node("Add", ["b_c", "c_raw"], ["a_q"]),
    ]
    weights = {name: random_weight(rng, 4, 4, 1, 1) for name in ("w", "v", "u")}
    weights["w"] *= 100
    weights["u"] /= 100
    weights["x_scale"] = random_weight(rng, 4, 3, 1, 1)
    model = model_of(nodes, weights, {"x": (1, 3, 8, 8)}, ["a_q", "c"])
    feeds = random_feeds(model, rng)
    written = quantized(model, scheme, feeds)
    want, got = run(model, feeds), run(written, feeds)
    for name in ("a_q", "c"):
        assert snr_db(want[name], got[name]) > 30


# Operators that move codes.

MOVES = {
    "MaxPool": (["c"], {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "Transpose": (["c"], {"perm": [0, 2, 3, 1]}),
    "Reshape": (["c", "flat"], {}),
    "Flatten": (["c"], {}),
    "DepthToSpace": (["c"], {"blocksize": 2}),
    "SpaceToDepth": (["c"], {"blocksize": 2}),
    "Slice": (["c", "starts", "ends"], {}),
    "Unsqueeze": (["c", "axes"], {}),
    "Resize": (["c", "", "scales"], {"mode": "nearest"}),
}


def moved(operator: str, rng: np.random.Generator, **more: object) -> onnx.ModelProto:
    inputs, attributes = MOVES[operator]
    weights = {
        "w": random_weight(rng, 4, 3, 3, 3),
        "flat": np.array([1, -1], np.int64),
        "starts": np.array([0, 1], np.int64),
        "ends": np.array([1, 3], np.int64),
        "axes": np.array([1], np.int64),
        "scales": np.array([1, 1, 2, 2], np.float32),
    }
    nodes = [node("Conv", ["x", "w"], ["c"]), node(operator, inputs, ["m"], **{**attributes, **more})]
    nodes.append(node("Softmax", ["m"], ["y"], axis=1))
    return model_of(nodes, weights, {"x": (1, 3, 10, 10)})


@cases("operator", MOVES)
def test_operator_that_moves_codes_keeps_their_parameters(operator: str, rng: np.random.Generator) -> None:
    model = moved(operator, rng)
    feeds = random_feeds(model, rng)
    written = quantized(model, ASYMMETRIC, feeds)
    _, before, after = nodes_of(written, "QuantizeLinear")
    assert (before.input[0], after.input[0]) == ("c", "m")
    for one, other in zip(before.input[1:], after.input[1:], strict=True):
        assert constant(written, one) == constant(written, other)
    # With equal parameters a second rounding changes nothing but what a mean of neighbours rounds.
    direct = quantized(model, ASYMMETRIC, feeds, kernels=["c"])
    np.testing.assert_array_equal(run(written, feeds)["y"], run(direct, feeds)["y"])
    assert snr_db(run(model, feeds)["y"], run(written, feeds)["y"]) > 25


def test_each_part_of_a_split_keeps_the_parameters(rng: np.random.Generator) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Split", ["c", "parts"], ["p", "q"], axis=1),
        node("Conv", ["p", "v"], ["d"]),
        node("Add", ["d", "q"], ["y"]),
    ]
    weights = {
        "w": random_weight(rng, 6, 3, 3, 3),
        "v": random_weight(rng, 4, 2, 1, 1),
        "parts": np.array([2, 4], np.int64),
    }
    model = model_of(nodes, weights, {"x": (1, 3, 8, 8)})
    feeds = random_feeds(model, rng)
    written = quantized(model, ASYMMETRIC, feeds)
    scales = {item.input[0]: constant(written, item.input[1]) for item in nodes_of(written, "QuantizeLinear")}
    assert scales["p"] == scales["q"] == scales["c"]
    assert snr_db(run(model, feeds)["y"], run(written, feeds)["y"]) > 25


def test_cubic_resize_is_computed_in_float(rng: np.random.Generator) -> None:
    model = moved("Resize", rng, mode="cubic")
    written = quantized(model, ASYMMETRIC, random_feeds(model, rng))
    assert [item.input[0] for item in nodes_of(written, "QuantizeLinear")] == ["x", "c"]


def test_symmetric_form_moves_floats(rng: np.random.Generator) -> None:
    model = moved("MaxPool", rng)
    written = quantized(model, SYMMETRIC, random_feeds(model, rng))
    assert [item.input[0] for item in nodes_of(written, "QuantizeLinear")] == ["x"]
