"""Shifts and scalings that cost nothing, and codes that are not spent on what nobody reads."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.toolkit.cases import cases
from tests.toolkit.quantized_models import (
    PADDED,
    constant,
    nodes_of,
    optimised_operators,
    quantized,
    ranges_of,
)
from tests.toolkit.small_models import (
    Array,
    model_of,
    node,
    operators,
    random_feeds,
    random_weight,
    run,
    snr_db,
)

from edgekit_toolkit.quantize.onnx.reread import reread_hard_sigmoid
from edgekit_toolkit.quantize.scheme import ASYMMETRIC, activation_params

pytestmark = pytest.mark.int8_products


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


# A shift or scaling after a kernel: the same codes, read with other parameters.


def shifted(
    operator: str, value: float, rng: np.random.Generator, shape: tuple[int, ...] = (), **options: object
) -> onnx.ModelProto:
    """Conv -> c in about -4..4, shifted or scaled to s, read by a second convolution."""
    weights = {
        "w": random_weight(rng, 4, 3, 1, 1),
        "k": np.full(shape, value, np.float32),
        "v": random_weight(rng, 4, 4, 1, 1),
    }
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node(operator, ["c", "k"], ["s"]),
        node("Conv", ["s", "v"], ["y"], **PADDED),
    ]
    return model_of(nodes, weights, {"x": (1, 3, 8, 8)}, **options)


@cases(
    ("operator", "value"),
    [("Add", -1.5), ("Add", 1.5), ("Sub", 0.7), ("Mul", 2.5), ("Div", 4.0), ("Mul", 1e-3)],
)
@cases("shape", [(), (1, 1, 1, 1)])
def test_shift_or_scaling_by_a_scalar_is_a_second_reading_of_the_codes(
    shape: tuple[int, ...], operator: str, value: float, rng: np.random.Generator, tmp_path: Path
) -> None:
    model = shifted(operator, value, rng, shape)
    feeds = random_feeds(model, rng)
    written = quantized(model, ASYMMETRIC, feeds, kernels=["c", "y"])
    assert operator not in operators(written)
    assert [item.input[0] for item in nodes_of(written, "QuantizeLinear")] == ["x", "c", "y_raw"]
    assert set(optimised_operators(written, tmp_path)) == {
        "QuantizeLinear",
        "QLinearConv",
        "DequantizeLinear",
    }
    # As good as without it: the codes of c are the only rounding on the way.
    plain = model_of(
        [node("Conv", ["c", "v"], ["y"], **PADDED)],
        {"v": constant(model, "v")},
        {"c": (1, 4, 8, 8)},
    )
    middle = {"c": run_inner(model, feeds, "s")}
    reference = snr_db(run(plain, middle)["y"], run(quantized(plain, ASYMMETRIC, middle), middle)["y"])
    assert snr_db(run(model, feeds)["y"], run(written, feeds)["y"]) > min(reference, 42) - 6


def run_inner(model: onnx.ModelProto, feeds: Mapping[str, Array], name: str) -> Array:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return run(copy, feeds)[name]


@pytest.mark.parametrize("value", [-1.37, 0.93])
def test_second_reading_equals_the_shifted_first_one(value: float, rng: np.random.Generator) -> None:
    model = shifted("Add", value, rng)
    feeds = random_feeds(model, rng)
    written = quantized(model, ASYMMETRIC, feeds, kernels=["c", "y"])
    made = {item.output[0]: item for item in nodes_of(written, "DequantizeLinear")}
    read = made[nodes_of(written, "Conv")[1].input[0]]
    first = next(item for item in nodes_of(written, "QuantizeLinear") if item.input[0] == "c")
    assert read.input[0] == first.output[0]
    scale, zero = constant(written, first.input[1]), int(constant(written, first.input[2]))
    again, moved_zero = constant(written, read.input[1]), int(constant(written, read.input[2]))
    codes = np.arange(256)
    # The scale is chosen so that the shift is a whole number of steps: exact but for rounding to float32.
    np.testing.assert_allclose((codes - moved_zero) * again, (codes - zero) * scale + value, atol=1e-4)


@pytest.mark.parametrize(
    ("operator", "value", "why"),
    [
        ("Add", 0.01, "under eight steps"),
        ("Add", 100.0, "zero point would leave 0..255"),
        ("Mul", -2.0, "order of the codes turns"),
        ("Mul", 0.0, "no codes are left"),
    ],
)
def test_shift_or_scaling_that_the_codes_cannot_express_is_computed(
    operator: str, value: float, why: str, rng: np.random.Generator
) -> None:
    model = shifted(operator, value, rng)
    feeds = random_feeds(model, rng)
    written = quantized(model, ASYMMETRIC, feeds, kernels=["c", "y"])
    assert operator in operators(written), why
    want = run(model, feeds)["y"]
    np.testing.assert_allclose(run(written, feeds)["y"], want, atol=0.05 * np.abs(want).max() + 1e-6)


def test_shift_that_is_an_output_or_whose_source_is_one_is_computed(rng: np.random.Generator) -> None:
    for outputs in (("y", "s"), ("y", "c")):
        model = shifted("Add", -1.0, np.random.default_rng(1), outputs=outputs)
        feeds = random_feeds(model, rng)
        written = quantized(model, ASYMMETRIC, feeds, kernels=["c", "y"])
        assert "Add" in operators(written)
        assert snr_db(run(model, feeds)["y"], run(written, feeds)["y"]) > 25


def test_shift_that_makes_an_image_of_a_matrix_is_computed(rng: np.random.Generator) -> None:
    nodes = [node("MatMul", ["x", "w"], ["c"]), node("Add", ["c", "k"], ["s"]), node("Relu", ["s"], ["y"])]
    weights = {"w": random_weight(rng, 8, 6), "k": np.full((1, 1, 1), -1, np.float32)}
    model = model_of(nodes, weights, {"x": (4, 8)})
    feeds = random_feeds(model, rng)
    assert run(quantized(model, ASYMMETRIC, feeds, kernels=["c"]), feeds)["y"].shape == (1, 4, 6)


def test_shift_after_an_operator_that_moves_codes_leaves_their_parameters_alone(
    rng: np.random.Generator,
) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("MaxPool", ["c"], ["m"], kernel_shape=[2, 2]),
        node("Add", ["m", "k"], ["s"]),
        node("Conv", ["s", "v"], ["y"]),
    ]
    weights = {
        "w": random_weight(rng, 4, 3, 1, 1),
        "v": random_weight(rng, 4, 4, 1, 1),
        "k": np.float32(-1.03),
    }
    model = model_of(nodes, weights, {"x": (1, 3, 8, 8)})
    written = quantized(model, ASYMMETRIC, random_feeds(model, rng))
    scales = {item.input[0]: constant(written, item.input[1]) for item in nodes_of(written, "QuantizeLinear")}
    assert scales["m"] == scales["c"]


def test_shift_that_a_branch_reads_still_exists(rng: np.random.Generator) -> None:
    def branch(operator: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{operator}_out", TensorProto.FLOAT, None)
        return helper.make_graph([node(operator, ["s"], [out.name])], operator, [], [out])

    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Add", ["c", "k"], ["s"]),
        node("ReduceMax", ["x"], ["top"], keepdims=0),
        node("Greater", ["top", "k"], ["positive"]),
        node("If", ["positive"], ["y"], then_branch=branch("Relu"), else_branch=branch("Neg")),
    ]
    weights = {"w": random_weight(rng, 4, 3, 1, 1), "k": np.float32(-1)}
    model = model_of(nodes, weights, {"x": (1, 3, 8, 8)})
    feeds = random_feeds(model, rng)
    written = quantized(model, ASYMMETRIC, feeds, kernels=["c"])
    assert snr_db(run(model, feeds)["y"], run(written, feeds)["y"]) > 25


# Hard-swish.


def hardswish_model(rng: np.random.Generator, weight: float = 8, **attributes: float) -> onnx.ModelProto:
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("HardSigmoid", ["c"], ["g"], **{"alpha": 1 / 6, "beta": 0.5, **attributes}),
        node("Mul", ["c", "g"], ["y"]),
    ]
    return model_of(nodes, {"w": weight * random_weight(rng, 4, 3, 1, 1)}, {"x": (1, 3, 16, 16)})


@pytest.mark.parametrize("weight", [2, 8, 40])
def test_codes_before_a_hard_sigmoid_alone_are_spent_between_its_ends(
    weight: float, rng: np.random.Generator
) -> None:
    model = hardswish_model(rng, weight)
    model.graph.node[2].input[0] = "k"
    model.graph.initializer.append(numpy_helper.from_array(np.float32([[[[2.5]]]]), "k"))
    feeds = random_feeds(model, rng)
    written = quantized(model, ASYMMETRIC, feeds, kernels=["c"])
    assert "HardSigmoid" not in operators(written)
    codes = next(item for item in nodes_of(written, "QuantizeLinear") if item.input[0] == "c")
    assert constant(written, codes.input[1]) <= 1.02 * 6 / 255
    assert snr_db(run(model, feeds)["y"], run(written, feeds)["y"]) > 30


def test_codes_before_a_hard_swish_are_not_spent_where_it_is_zero(rng: np.random.Generator) -> None:
    model = hardswish_model(rng)
    feeds = random_feeds(model, rng)
    low, high = ranges_of(model, [feeds])["c"]
    assert low < -6
    written = quantized(model, ASYMMETRIC, feeds, kernels=["c"])
    codes = next(item for item in nodes_of(written, "QuantizeLinear") if item.input[0] == "c")
    # Enlarged at most so far that 3 is a whole number of steps.
    scale = float(constant(written, codes.input[1]))
    assert (high + 3) / 255 <= scale < (high + 3) / 255 * 1.1
    assert snr_db(run(model, feeds)["y"], run(written, feeds)["y"]) > 35


@pytest.mark.parametrize("weight", [2, 8, 20])
def test_hard_swish_reads_the_codes_of_its_convolution_twice(
    weight: float, rng: np.random.Generator, tmp_path: Path
) -> None:
    model = hardswish_model(rng, weight)
    feeds = random_feeds(model, rng)
    written = quantized(model, ASYMMETRIC, feeds)
    assert "HardSigmoid" not in operators(written)
    wanted = {"QuantizeLinear", "QLinearConv", "Clip", "QLinearMul", "DequantizeLinear"}
    assert set(optimised_operators(written, tmp_path)) == wanted
    assert snr_db(run(model, feeds)["y"], run(written, feeds)["y"]) > 37


@cases(("alpha", "beta"), [(1 / 6, 0.5), (0.2, 0.5), (0.1, 0.25)])
@cases("ends", [(-10.0, 10.0), (-3.0, 9.0), (-20.0, 0.4), (-2.4, 8.0)])
def test_hard_sigmoid_of_codes_equals_that_of_their_values(
    ends: tuple[float, float], alpha: float, beta: float
) -> None:
    found = reread_hard_sigmoid(activation_params(*ends, ASYMMETRIC), alpha, beta)
    assert found is not None
    codes = np.arange(256)
    kept = np.clip(codes, found.low, found.high) if (found.low, found.high) != (None, None) else codes
    got = (kept - int(found.output.zero_point)) * np.float64(found.output.scale)
    values = (codes - int(found.source.zero_point)) * np.float64(found.source.scale)
    np.testing.assert_allclose(got, np.clip(alpha * values + beta, 0, 1), atol=1e-5)
    # The codes still hold what they held, a little coarser.
    assert values[0] <= ends[0] * 0.99
    assert values[-1] >= ends[1] * 0.99
    assert found.source.scale <= activation_params(*ends, ASYMMETRIC).scale * 1.4


@pytest.mark.parametrize(
    ("ends", "alpha", "beta", "why"),
    [
        ((-0.5, 0.5), 0.2, 0.5, "the codes would become far coarser"),
        ((-100.0, 100.0), 0.2, 0.5, "under eight steps of slope"),
        ((-10.0, 10.0), 0.2, 0.377, "the upper end lies between two codes"),
    ],
)
def test_hard_sigmoid_that_the_codes_cannot_express_is_computed(
    ends: tuple[float, float], alpha: float, beta: float, why: str
) -> None:
    assert reread_hard_sigmoid(activation_params(*ends, ASYMMETRIC), alpha, beta) is None, why


def test_hard_sigmoid_of_a_small_range_is_computed(rng: np.random.Generator) -> None:
    model = hardswish_model(rng, 0.1)
    feeds = random_feeds(model, rng)
    written = quantized(model, ASYMMETRIC, feeds)
    assert "HardSigmoid" in operators(written)
    assert snr_db(run(model, feeds)["y"], run(written, feeds)["y"]) > 35


def test_hard_sigmoid_behind_moved_codes_leaves_their_parameters_alone(rng: np.random.Generator) -> None:
    model = hardswish_model(rng)
    model.graph.node.insert(1, node("MaxPool", ["c"], ["m"], kernel_shape=[2, 2]))
    model.graph.output.append(helper.make_tensor_value_info("m", TensorProto.FLOAT, (1, 4, 15, 15)))
    feeds = random_feeds(model, rng)
    written = quantized(model, ASYMMETRIC, feeds, kernels=["c"])
    assert snr_db(run(model, feeds)["m"], run(written, feeds)["m"]) > 35


def test_means_of_a_hard_sigmoid_of_codes_are_not_rounded_to_them(rng: np.random.Generator) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("HardSigmoid", ["c"], ["g"]),
        node("Mul", ["c", "g"], ["z"]),  # a second reader, for which c keeps its range
        node("Resize", ["g", "", "scales"], ["y"], mode="linear"),
    ]
    weights = {"w": 12 * random_weight(rng, 4, 3, 1, 1), "scales": np.array([1, 1, 2, 2], np.float32)}
    model = model_of(nodes, weights, {"x": (1, 3, 16, 16)}, ("y", "z"))
    feeds = random_feeds(model, rng)
    written = quantized(model, ASYMMETRIC, feeds, kernels=["c", "z"])
    assert "HardSigmoid" not in operators(written)
    got = run(written, feeds)["y"]
    assert len(np.unique(got)) > 256  # more than there are codes
    assert snr_db(run(model, feeds)["y"], got) > 25


def test_second_hard_sigmoid_of_the_same_codes_is_right_too(rng: np.random.Generator) -> None:
    model = hardswish_model(rng)
    model.graph.node.append(node("HardSigmoid", ["c"], ["h"], alpha=0.3, beta=0.4))
    model.graph.output.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, (1, 4, 16, 16)))
    feeds = random_feeds(model, rng)
    written = quantized(model, ASYMMETRIC, feeds)
    for name in ("y", "h"):
        assert snr_db(run(model, feeds)[name], run(written, feeds)[name]) > 30


def test_gate_that_falls_spends_codes_on_the_whole_range(rng: np.random.Generator) -> None:
    model = hardswish_model(rng, alpha=-1 / 6)
    feeds = random_feeds(model, rng)
    low, high = ranges_of(model, [feeds])["c"]
    written = quantized(model, ASYMMETRIC, feeds, kernels=["c"])
    codes = next(item for item in nodes_of(written, "QuantizeLinear") if item.input[0] == "c")
    assert constant(written, codes.input[1]) == pytest.approx((high - low) / 255, rel=1e-5)
    assert snr_db(run(model, feeds)["y"], run(written, feeds)["y"]) > 35


def test_third_reader_of_the_tensor_before_a_hard_swish_sees_its_whole_range(
    rng: np.random.Generator,
) -> None:
    model = hardswish_model(rng)
    model.graph.node.append(node("Neg", ["c"], ["n"]))
    model.graph.output.append(helper.make_tensor_value_info("n", TensorProto.FLOAT, (1, 4, 16, 16)))
    feeds = random_feeds(model, rng)
    written = quantized(model, ASYMMETRIC, feeds, kernels=["c"])
    assert snr_db(run(model, feeds)["n"], run(written, feeds)["n"]) > 35
