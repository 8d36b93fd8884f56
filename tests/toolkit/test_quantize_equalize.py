"""Equalization: the same function, with channels whose ranges are alike."""

from collections.abc import Sequence
from itertools import permutations

import numpy as np
import onnx
import pytest
from onnx import NodeProto
from tests.toolkit.cases import cases
from tests.toolkit.small_models import (
    Array,
    assert_valid,
    model_of,
    node,
    operators,
    random_feeds,
    random_weight,
    run,
    snr_db,
)

from edgekit_toolkit.quantize.onnx.equalize import apply_factors, apply_to_ranges, find_factors
from edgekit_toolkit.quantize.onnx.qdq import write_qdq
from edgekit_toolkit.quantize.plan import Plan, kernel_names
from edgekit_toolkit.quantize.ranges import Range, collect
from edgekit_toolkit.quantize.scheme import ASYMMETRIC


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(17)


SKEW = np.logspace(-2, 2, 8, dtype=np.float32)


def skewed(
    rng: np.random.Generator,
    between: Sequence[NodeProto],
    tail: Sequence[NodeProto] | None = None,
    outputs: Sequence[str] = ("y",),
    **more: Array,
) -> onnx.ModelProto:
    """Conv -> c, whose 8 channels differ ten-thousandfold, `between` -> m, Conv -> y that evens them out."""
    weights = {
        "w": random_weight(rng, 8, 3, 1, 1) * SKEW.reshape(8, 1, 1, 1),
        "b": random_weight(rng, 8) * SKEW,
        "v": random_weight(rng, 6, 8, 1, 1) / SKEW.reshape(1, 8, 1, 1),
        "scales": np.array([1, 1, 2, 2], np.float32),
        "shape": np.array([1, 8, -1], np.int64),
    }
    end = [node("Conv", ["m", "v"], ["y"])] if tail is None else tail
    nodes = [node("Conv", ["x", "w", "b"], ["c"]), *between, *end]
    return model_of(nodes, {**weights, **more}, {"x": (1, 3, 8, 8)}, outputs)


def ranges_of(model: onnx.ModelProto, feeds: dict[str, Array]) -> dict[str, Range]:
    names = sorted({name for item in model.graph.node for name in item.output} - {"indices"} | {"x"})
    return collect(model, names, lambda: iter([feeds]), threads=1)


def found_factors(model: onnx.ModelProto, feeds: dict[str, Array]) -> dict[str, Array]:
    return find_factors(model, ranges_of(model, feeds))


def assert_equal(before: onnx.ModelProto, after: onnx.ModelProto, feeds: dict[str, Array]) -> None:
    assert_valid(after)
    want, got = run(before, feeds), run(after, feeds)
    for name in want:
        # Weights are rounded to float32 once more: 2^-24 each.
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-5 * np.abs(want[name]).max())


HOMOGENEOUS = {
    "nothing": [],
    "Relu": [node("Relu", ["c"], ["m"])],
    "LeakyRelu": [node("LeakyRelu", ["c"], ["m"])],
    "MaxPool": [node("MaxPool", ["c"], ["m"], kernel_shape=[2, 2])],
    "AveragePool": [node("AveragePool", ["c"], ["m"], kernel_shape=[3, 3], pads=[1] * 4)],
    "GlobalAveragePool": [node("GlobalAveragePool", ["c"], ["m"])],
    "Resize": [node("Resize", ["c", "", "scales"], ["m"], mode="linear")],
    "gate": [
        node("GlobalAveragePool", ["x"], ["p"]),
        node("Conv", ["p", "g"], ["q"]),
        node("Sigmoid", ["q"], ["s"]),
        node("Mul", ["c", "s"], ["m"]),
    ],
    "its own mean": [node("GlobalAveragePool", ["c"], ["p"]), node("Mul", ["p", "c"], ["m"])],
}


@cases("name", HOMOGENEOUS)
def test_channels_are_evened_out_through_what_keeps_proportions(name: str, rng: np.random.Generator) -> None:
    between = [*HOMOGENEOUS[name]] or [node("Relu", ["c"], ["m"])]
    tail = [node("Conv", ["c", "v"], ["y"])] if name == "nothing" else None
    g = random_weight(rng, 8, 3, 1, 1)
    model = skewed(rng, [] if name == "nothing" else between, tail, g=g)
    given = model.SerializeToString()
    feeds = random_feeds(model, rng)
    factors = found_factors(model, feeds)
    assert set(factors) == {"c"}
    after = apply_factors(model, factors)
    assert model.SerializeToString() == given
    assert operators(after) == operators(model)
    assert_equal(model, after, feeds)
    spans = [item["c"].high - item["c"].low for item in (ranges_of(model, feeds), ranges_of(after, feeds))]
    assert spans[1].max() / spans[1].min() < 0.05 * spans[0].max() / spans[0].min()


@cases(
    "between",
    [
        [node("Sigmoid", ["c"], ["m"])],
        [node("Clip", ["c", "low", "high"], ["m"])],
        [node("Add", ["c", "k"], ["m"])],
        [node("Mul", ["c", "c"], ["m"])],
        [node("Relu", ["c"], ["m"]), node("Tanh", ["c"], ["other"])],
        [node("Transpose", ["c"], ["m"], perm=[0, 1, 3, 2])],
    ],
    ids=["Sigmoid", "Clip", "Add", "square", "other reader", "Transpose"],
)
def test_what_does_not_keep_proportions_stops_it(
    between: Sequence[NodeProto], rng: np.random.Generator
) -> None:
    k = random_weight(rng, 8, 1, 1)
    model = skewed(rng, between, k=k, low=np.float32(0), high=np.float32(6))
    assert found_factors(model, random_feeds(model, rng)) == {}


def test_tensor_that_is_an_output_is_left_alone(rng: np.random.Generator) -> None:
    model = skewed(rng, HOMOGENEOUS["Relu"], outputs=("y", "m"))
    assert found_factors(model, random_feeds(model, rng)) == {}


@pytest.mark.parametrize("shared", ["w", "v"])
def test_weight_of_another_layer_too_is_left_alone(shared: str, rng: np.random.Generator) -> None:
    reader = {"w": "x", "v": "e"}[shared]
    tail = [
        node("Conv", ["m", "v"], ["d"]),
        node("Conv", ["x", "u"], ["e"]),
        node("Conv", [reader, shared], ["f"]),
        node("GlobalAveragePool", ["d"], ["y"]),
    ]
    u = random_weight(rng, 8, 3, 1, 1)
    model = skewed(rng, HOMOGENEOUS["Relu"], tail, ("y", "f"), u=u)
    assert "c" not in found_factors(model, random_feeds(model, rng))


def test_one_channel_that_is_spread_over_many_is_left_alone(rng: np.random.Generator) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Conv", ["x", "u"], ["d"]),
        node("Sigmoid", ["d"], ["s"]),
        node("Mul", ["c", "s"], ["m"]),
        node("Conv", ["m", "v"], ["y"]),
    ]
    weights = {"w": random_weight(rng, 1, 3, 1, 1), "u": random_weight(rng, 4, 3, 1, 1)}
    weights["v"] = random_weight(rng, 4, 4, 1, 1)
    model = model_of(nodes, weights, {"x": (1, 3, 8, 8)})
    assert "c" not in found_factors(model, random_feeds(model, rng))


@pytest.mark.parametrize("group", [2, 8], ids=["grouped", "depthwise"])
def test_grouped_readers_take_the_factors_of_their_own_channels(group: int, rng: np.random.Generator) -> None:
    tail = [node("Conv", ["m", "u"], ["y"], group=group)]
    model = skewed(rng, HOMOGENEOUS["Relu"], tail, u=random_weight(rng, 8, 8 // group, 3, 3))
    feeds = random_feeds(model, rng)
    factors = found_factors(model, feeds)
    assert set(factors) == {"c"}
    assert_equal(model, apply_factors(model, factors), feeds)


def test_dead_channel_has_factor_one(rng: np.random.Generator) -> None:
    model = skewed(rng, HOMOGENEOUS["Relu"])
    for tensor in model.graph.initializer:
        if tensor.name in {"w", "b"}:
            value = onnx.numpy_helper.to_array(tensor).copy()
            value[3] = 0
            tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
    factors = found_factors(model, random_feeds(model, rng))
    assert factors["c"][3] == 1
    assert factors["c"][0] != 1


def test_factors_are_bounded(rng: np.random.Generator) -> None:
    span = np.array([1e-30, 1, 1, 1, 1, 1, 1, 1e30])
    model = skewed(rng, HOMOGENEOUS["Relu"])
    factors = find_factors(model, {"c": Range(0 * span, span)})
    assert (factors["c"].min(), factors["c"].max()) == (1 / 256, 256)


def chain_model(rng: np.random.Generator) -> onnx.ModelProto:
    """Layers in a row and two with one reader; their names are not in the order of the graph."""
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["z"]),
        node("Relu", ["z"], ["r1"]),
        node("Conv", ["r1", "w2", "b2"], ["n"], group=8, pads=[1] * 4),
        node("Relu", ["n"], ["r2"]),
        node("Conv", ["r2", "w3"], ["a"]),
        node("Conv", ["x", "w4"], ["k"]),
        node("Mul", ["a", "k"], ["m"]),
        node("Conv", ["m", "w5"], ["y"]),
    ]
    weights = {
        "w1": random_weight(rng, 8, 3, 1, 1) * SKEW.reshape(8, 1, 1, 1),
        "b1": random_weight(rng, 8),
        "w2": random_weight(rng, 8, 1, 3, 3),
        "b2": random_weight(rng, 8),
        "w3": random_weight(rng, 8, 8, 1, 1),
        "w4": random_weight(rng, 8, 3, 1, 1),
        "w5": random_weight(rng, 5, 8, 1, 1) / SKEW.reshape(1, 8, 1, 1),
    }
    return model_of(nodes, weights, {"x": (1, 3, 8, 8)})


def test_layers_in_a_row_and_readers_of_two_layers_are_all_equalized(rng: np.random.Generator) -> None:
    model = chain_model(rng)
    feeds = random_feeds(model, rng)
    factors = found_factors(model, feeds)
    assert set(factors) == {"z", "n", "a", "k"}
    assert_equal(model, apply_factors(model, factors), feeds)


def test_order_of_the_factors_does_not_change_a_byte(rng: np.random.Generator) -> None:
    model = chain_model(rng)
    factors = found_factors(model, random_feeds(model, rng))
    made = {
        apply_factors(model, {name: factors[name] for name in order}).SerializeToString(deterministic=True)
        for order in permutations(factors)
    }
    assert len(made) == 1


def test_ranges_of_the_equalized_model_follow_from_those_before(rng: np.random.Generator) -> None:
    for model in (chain_model(rng), skewed(rng, HOMOGENEOUS["its own mean"])):
        feeds = random_feeds(model, rng)
        ranges = ranges_of(model, feeds)
        factors = find_factors(model, ranges)
        predicted = apply_to_ranges(model, ranges, factors)
        measured = ranges_of(apply_factors(model, factors), feeds)
        assert predicted.keys() == measured.keys()
        for name, item in measured.items():
            scale = np.abs([item.low, item.high]).max()
            np.testing.assert_allclose(predicted[name].low, item.low, rtol=1e-4, atol=1e-5 * scale)
            np.testing.assert_allclose(predicted[name].high, item.high, rtol=1e-4, atol=1e-5 * scale)


def test_equalized_model_quantizes_better(rng: np.random.Generator) -> None:
    model = chain_model(rng)
    feeds = random_feeds(model, rng)
    factors = found_factors(model, feeds)
    noise = []
    for floats in (model, apply_factors(model, factors)):
        ranges = {name: item.whole() for name, item in ranges_of(floats, feeds).items()}
        names = frozenset(kernel_names(floats, ASYMMETRIC, elementwise=False))
        written = write_qdq(floats, Plan(ASYMMETRIC, names, ranges))
        noise.append(snr_db(run(model, feeds)["y"], run(written, feeds)["y"]))
    assert noise[1] > noise[0] + 5


@pytest.mark.parametrize(
    ("name", "size"),
    [("c", 7), ("y", 6), ("m", 8)],
    ids=["another number", "an output", "no convolution"],
)
def test_factors_that_do_not_fit_the_model_are_refused(
    name: str, size: int, rng: np.random.Generator
) -> None:
    model = skewed(rng, HOMOGENEOUS["Relu"])
    with pytest.raises(ValueError, match=f"{name!r} cannot be equalized by {size} factors"):
        apply_factors(model, {name: np.ones(size, np.float32)})


def test_factors_of_a_tensor_that_is_not_there_are_refused(rng: np.random.Generator) -> None:
    with pytest.raises(KeyError, match="stranger"):
        apply_factors(skewed(rng, HOMOGENEOUS["Relu"]), {"stranger": np.ones(8, np.float32)})
