"""Channels without effect go, and outputs stay."""

import numpy as np
import onnx
import pytest
from tests.toolkit.small_models import Array, assert_valid, model_of, node, random_feeds, random_weight, run

from edgekit_toolkit.onnx_graph.channels import slice_channels
from edgekit_toolkit.passes.dead_channels import SlicedModel, remove_dead_channels

TINY_ROW = 1e-30
SHAPES: dict[str, list[int | str]] = {"x": ["n", 3, 8, 8]}


def weights(rng: np.random.Generator, **changes: Array) -> dict[str, Array]:
    return {
        "w": random_weight(rng, 12, 3, 3, 3),
        "b": random_weight(rng, 12),
        "dw": random_weight(rng, 12, 1, 3, 3),
        "db": random_weight(rng, 12),
        "v": random_weight(rng, 6, 12, 1, 1),
        "vb": random_weight(rng, 6),
        **changes,
    }


def separable(values: dict[str, Array]) -> onnx.ModelProto:
    """Conv -> Relu -> depthwise Conv -> Relu -> Conv, all with zeros at the border."""
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["d"]),
        node("Conv", ["d", "dw", "db"], ["e"], group=12, pads=[1, 1, 1, 1]),
        node("Relu", ["e"], ["f"]),
        node("Conv", ["f", "v", "vb"], ["y"]),
    ]
    return model_of(nodes, values, SHAPES)


def assert_outputs_stay(model: onnx.ModelProto, removed: SlicedModel) -> None:
    assert_valid(removed.model)
    feeds = random_feeds(model, np.random.default_rng(1))
    expected = run(model, feeds)
    for name, value in run(removed.model, feeds).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("row", [0.0, TINY_ROW])
def test_rows_without_weights_below_zero_before_a_relu_go(row: float) -> None:
    values = weights(np.random.default_rng(0))
    values["w"][[1, 4]] = row
    values["b"][[1, 4]] = -0.1
    values["db"][[1, 4]] = 0.3, -0.3  # a constant 0.3 behind the filter, and 0
    model = separable(values)
    removed = remove_dead_channels(model)
    assert removed is not None
    assert removed.channels == {"c": (0, 2, 3, 5, 6, 7, 8, 9, 10, 11)}
    assert_outputs_stay(model, removed)


def test_constant_before_a_border_of_zeros_stays() -> None:
    values = weights(np.random.default_rng(0))
    values["w"][1], values["b"][1] = 0, 0.5
    values["dw"][1], values["db"][1] = 1, 0.1
    assert remove_dead_channels(separable(values)) is None


def test_channel_that_a_relu_closes_for_all_inputs_goes() -> None:
    values = weights(np.random.default_rng(0))
    values["dw"][3], values["db"][3] = -np.abs(values["dw"][3]), -0.1  # behind a Relu: never above 0
    model = separable(values)
    removed = remove_dead_channels(model)
    assert removed is not None
    assert 3 not in removed.channels["c"]
    assert_outputs_stay(model, removed)


def test_channels_that_no_layer_reads_go_with_those_before_them() -> None:
    rng = np.random.default_rng(0)
    values = weights(rng)
    values |= {"u": random_weight(rng, 12, 12, 1, 1), "ub": random_weight(rng, 12)}
    values["v"][:, 5] = 0
    values["u"][np.arange(12) != 5, 2] = 0  # only channel 5 reads channel 2
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"]),
        node("Conv", ["c", "u", "ub"], ["d"]),
        node("Conv", ["d", "v", "vb"], ["y"]),
    ]
    del values["dw"], values["db"]
    model = model_of(nodes, values, SHAPES)
    removed = remove_dead_channels(model)
    assert removed is not None
    assert [len(stays) for _, stays in sorted(removed.channels.items())] == [11, 11]
    assert_outputs_stay(model, removed)


def test_dead_channels_fill_up_a_multiple() -> None:
    values = weights(np.random.default_rng(0))
    values["w"][6:], values["b"][6:], values["db"][6:] = 0, -1, -1
    model = separable(values)
    removed = remove_dead_channels(model, multiple=4)
    assert removed is not None
    assert removed.channels == {"c": tuple(range(8))}
    assert_outputs_stay(model, removed)


def test_removal_is_repeated_from_the_channels_alone() -> None:
    values = weights(np.random.default_rng(0))
    values["w"][2], values["b"][2], values["db"][2] = 0, -1, 0
    model = separable(values)
    removed = remove_dead_channels(model)
    assert removed is not None
    assert slice_channels(model, removed.channels) == removed.model


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_weights_that_are_not_finite_are_no_proof(value: float) -> None:
    values = weights(np.random.default_rng(0))
    values["w"][2], values["b"][2] = value, -1
    with np.errstate(invalid="ignore"):
        assert remove_dead_channels(separable(values)) is None


def test_small_values_that_a_later_layer_amplifies_stay() -> None:
    rng = np.random.default_rng(0)
    values = {
        "w": random_weight(rng, 12, 3, 1, 1),
        "low": np.float32(0),
        "high": np.float32(6),
        "small": random_weight(rng, 12, 12, 1, 1) * np.float32(1e-10),
        "v": random_weight(rng, 12, 12, 1, 1),
        "vb": np.zeros(12, np.float32),
        "large": random_weight(rng, 6, 12, 1, 1) * np.float32(1e9),
    }
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Clip", ["c", "low", "high"], ["d"]),
        node("Conv", ["d", "small"], ["e"]),
        node("Relu", ["e"], ["f"]),
        node("Conv", ["f", "v", "vb"], ["g"]),
        node("Relu", ["g"], ["h"]),
        node("Conv", ["h", "large"], ["y"]),
    ]
    assert remove_dead_channels(model_of(nodes, values, SHAPES)) is None


def test_trained_network_without_dead_channels_stays() -> None:
    assert remove_dead_channels(separable(weights(np.random.default_rng(0)))) is None
