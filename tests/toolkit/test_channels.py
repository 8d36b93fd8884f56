"""Which channels can go together, and that slicing them is exact."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper
from tests.toolkit.cases import cases
from tests.toolkit.small_models import Array, assert_valid, model_of, node, random_feeds, random_weight, run

from edgekit_toolkit.onnx_graph.channels import compose_channels, find_groups, slice_channels
from edgekit_toolkit.passes.optimiser import optimise

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
RNG = np.random.default_rng(0)
# Producer of 12 channels `c` from an image x, and a consumer of 5 outputs.
FIRST = node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1])
SHAPES: dict[str, list[int | str]] = {"x": ["n", 3, 8, 8]}
WEIGHTS = {
    "w": random_weight(RNG, 12, 3, 3, 3),
    "b": random_weight(RNG, 12),
    "v": random_weight(RNG, 5, 12, 1, 1),
}
STAYS = (0, 2, 3, 7, 11)


def network(
    nodes: Sequence[NodeProto], weights: Mapping[str, Array] | None = None, outputs: Sequence[str] = ("y",)
) -> onnx.ModelProto:
    return model_of([FIRST, *nodes], {**WEIGHTS, **(weights or {})}, SHAPES, outputs)


def without_readers(
    model: onnx.ModelProto, weights: Mapping[str, tuple[int, Sequence[int]]]
) -> onnx.ModelProto:
    """The model in whose consumers the columns of removed channels are 0: name -> axis, columns that stay."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for tensor in changed.graph.initializer:
        if tensor.name in weights:
            axis, stays = weights[tensor.name]
            value = onnx.numpy_helper.to_array(tensor).copy()
            gone = np.setdiff1d(np.arange(value.shape[axis]), stays)
            np.moveaxis(value, axis, 0)[gone] = 0
            tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
    return changed


def assert_slices_exactly(
    model: onnx.ModelProto, consumers: Mapping[str, tuple[int, Sequence[int]]], name: str = "c"
) -> onnx.ModelProto:
    """Removing channels gives what consumers without weights for them give."""
    sliced = slice_channels(model, {name: STAYS})
    assert_valid(sliced)
    feeds = random_feeds(model, np.random.default_rng(1))
    expected = run(without_readers(model, consumers), feeds)
    for output, value in run(sliced, feeds).items():
        np.testing.assert_allclose(value, expected[output], rtol=1e-4, atol=1e-5)
    return sliced


def names(model: onnx.ModelProto) -> list[str]:
    return [group.name for group in find_groups(model)]


@cases(
    ("nodes", "weights"),
    [
        ([node("Relu", ["c"], ["d"])], {}),
        ([node("Clip", ["c", "low", "high"], ["d"])], {"low": np.float32(0), "high": np.float32(6)}),
        ([node("PRelu", ["c", "slope"], ["d"])], {"slope": random_weight(RNG, 12, 1, 1)}),
        ([node("Mul", ["c", "scale"], ["d"])], {"scale": random_weight(RNG, 1, 12, 1, 1)}),
        ([node("Add", ["shift", "c"], ["d"])], {"shift": random_weight(RNG, 12, 8, 8)}),
        ([node("Sigmoid", ["c"], ["s"]), node("Mul", ["c", "s"], ["d"])], {}),
        (
            [node("BatchNormalization", ["c", "g", "h", "m", "u"], ["d"])],
            {"g": np.ones(12, np.float32), "h": RNG.random(12).astype("f4"),
             "m": RNG.random(12).astype("f4"), "u": 1 + RNG.random(12).astype("f4")},
        ),
        ([node("MaxPool", ["c"], ["d"], kernel_shape=[2, 2], strides=[2, 2])], {}),
        ([node("AveragePool", ["c"], ["d"], kernel_shape=[3, 3], pads=[1, 1, 1, 1])], {}),
        ([node("Pad", ["c", "pads"], ["d"])], {"pads": np.array([0, 0, 1, 1, 0, 0, 1, 1])}),
        ([node("Resize", ["c", "", "scales"], ["d"])], {"scales": np.array([1, 1, 2, 2], np.float32)}),
        ([node("ReduceMean", ["c"], ["d"], axes=[2, 3], keepdims=1)], {}),
        (
            [node("Transpose", ["c"], ["t"], perm=[0, 2, 3, 1]),
             node("Transpose", ["t"], ["d"], perm=[0, 3, 1, 2])],
            {},
        ),
    ],
)  # fmt: skip
def test_channels_behind_an_operator_go_exactly(nodes: list[NodeProto], weights: dict[str, Array]) -> None:
    model = network([*nodes, node("Conv", ["d", "v"], ["y"])], weights)
    assert_slices_exactly(model, {"v": (1, STAYS)})


@pytest.mark.parametrize("multiplier", [1, 2])
def test_depthwise_filters_go_with_their_channels(multiplier: int) -> None:
    weights = {
        "dw": random_weight(RNG, 12 * multiplier, 1, 3, 3),
        "db": random_weight(RNG, 12 * multiplier),
        "v": random_weight(RNG, 5, 12 * multiplier, 1, 1),
    }
    model = network(
        [node("Conv", ["c", "dw", "db"], ["d"], group=12), node("Conv", ["d", "v"], ["y"])], weights
    )
    columns = [multiplier * channel + place for channel in STAYS for place in range(multiplier)]
    sliced = assert_slices_exactly(model, {"v": (1, columns)})
    assert [helper.get_attribute_value(item) for item in sliced.graph.node[1].attribute] == [5]


@pytest.mark.parametrize("shape", [[-1, 768], [0, -1], [0, 768]])
def test_reshape_gives_each_channel_several_columns(shape: list[int]) -> None:
    nodes = [node("Reshape", ["c", "shape"], ["f"]), node("Gemm", ["f", "u"], ["y"], transB=1)]
    model = network(nodes, {"shape": np.array(shape), "u": random_weight(RNG, 4, 768)})
    columns = [64 * channel + place for channel in STAYS for place in range(64)]
    assert_slices_exactly(model, {"u": (1, columns)})


def test_flatten_gives_each_channel_several_rows_of_a_matrix() -> None:
    nodes = [node("Flatten", ["c"], ["f"]), node("MatMul", ["f", "u"], ["y"])]
    model = network(nodes, {"u": random_weight(RNG, 768, 4)})
    columns = [64 * channel + place for channel in STAYS for place in range(64)]
    assert_slices_exactly(model, {"u": (0, columns)})


def test_all_readers_of_channels_are_sliced() -> None:
    nodes = [node("Relu", ["c"], ["d"]), node("Conv", ["c", "v"], ["y"]), node("Conv", ["d", "u"], ["z"])]
    model = network(nodes, {"u": random_weight(RNG, 2, 12, 3, 3)}, ("y", "z"))
    assert_slices_exactly(model, {"v": (1, STAYS), "u": (1, STAYS)})


def test_channels_joined_by_a_residual_go_together() -> None:
    nodes = [
        node("Relu", ["c"], ["d"]),
        node("Conv", ["d", "u", "ub"], ["e"], pads=[1, 1, 1, 1]),
        node("Add", ["d", "e"], ["s"]),
        node("Conv", ["s", "v"], ["y"]),
    ]
    model = network(nodes, {"u": random_weight(RNG, 12, 12, 3, 3), "ub": random_weight(RNG, 12)})
    assert names(model) == ["c"]
    sliced = assert_slices_exactly(model, {"u": (1, STAYS), "v": (1, STAYS)})
    assert [tuple(tensor.dims) for tensor in sliced.graph.initializer if tensor.name == "u"] == [(5, 5, 3, 3)]


def test_channels_beside_others_in_a_concat_go() -> None:
    nodes = [
        node("Conv", ["x", "u"], ["e"], pads=[1, 1, 1, 1]),
        node("Concat", ["e", "c"], ["j"], axis=1),
        node("Conv", ["j", "v"], ["y"]),
    ]
    model = network(nodes, {"u": random_weight(RNG, 4, 3, 3, 3), "v": random_weight(RNG, 5, 16, 1, 1)})
    assert_slices_exactly(model, {"v": (1, [0, 1, 2, 3, *(4 + channel for channel in STAYS)])})


def test_channels_of_both_branches_of_a_concat_go_together() -> None:
    nodes = [
        node("Conv", ["x", "w2"], ["d"], pads=[1, 1, 1, 1]),
        node("Concat", ["c", "d"], ["j"], axis=1),
        node("Conv", ["j", "f"], ["e"], group=20),
        node("Conv", ["e", "u"], ["y"]),
    ]
    weights = {
        "w2": random_weight(RNG, 8, 3, 3, 3),
        "f": random_weight(RNG, 20, 1, 3, 3),
        "u": random_weight(RNG, 5, 20, 1, 1),
    }
    model = network(nodes, weights)
    sliced = slice_channels(model, {"c": STAYS, "d": (1, 6)})
    assert_valid(sliced)
    feeds = random_feeds(model, np.random.default_rng(1))
    expected = run(without_readers(model, {"u": (1, [*STAYS, 13, 18])}), feeds)
    np.testing.assert_allclose(run(sliced, feeds)["y"], expected["y"], rtol=1e-4, atol=1e-5)


def test_columns_of_a_matrix_product_on_sequences_go() -> None:
    nodes = [
        node("MatMul", ["x", "u"], ["c"]),
        node("Add", ["c", "bias"], ["d"]),
        node("Gelu", ["d"], ["e"]),
        node("MatMul", ["e", "v"], ["y"]),
    ]
    weights = {
        "u": random_weight(RNG, 6, 12),
        "bias": random_weight(RNG, 12),
        "v": random_weight(RNG, 12, 3),
    }
    model = model_of(nodes, weights, {"x": ["n", 4, 6]}, opset=20, ir=9)
    assert_slices_exactly(model, {"v": (0, STAYS)})


def test_a_constant_with_other_readers_is_copied() -> None:
    nodes = [
        node("Add", ["c", "shift"], ["d"]),
        node("Conv", ["d", "v"], ["e"]),
        node("Conv", ["x", "u"], ["f"], pads=[1, 1, 1, 1]),
        node("Mul", ["f", "shift"], ["g"]),
        node("Add", ["g", "one"], ["z"]),
        node("Identity", ["e"], ["y"]),
    ]
    weights = {
        "shift": random_weight(RNG, 12, 1, 1),
        "u": random_weight(RNG, 12, 3, 3, 3),
        "one": np.ones((1, 1, 1), np.float32),
    }
    assert_slices_exactly(network(nodes, weights, ("y", "z")), {"v": (1, STAYS)})


@cases(
    ("nodes", "outputs"),
    [
        ([node("Conv", ["c", "v"], ["y"])], ("y", "c")),
        ([node("Softmax", ["c"], ["d"], axis=1), node("Conv", ["d", "v"], ["y"])], ("y",)),
        ([node("ReduceMax", ["c"], ["d"], axes=[1]), node("Conv", ["c", "v"], ["e"]),
          node("Add", ["d", "e"], ["y"])], ("y",)),
        ([node("Conv", ["c", "grouped"], ["d"], group=4), node("Conv", ["d", "v"], ["y"])], ("y",)),
        ([node("Shape", ["c"], ["s"]), node("Conv", ["c", "v"], ["e"]),
          node("Expand", ["one", "s"], ["y"])], ("e",)),
    ],
    ids=["output", "softmax", "reduced", "groups", "shape"],
)  # fmt: skip
def test_channels_with_other_uses_stay(nodes: list[NodeProto], outputs: Sequence[str]) -> None:
    weights = {"grouped": random_weight(RNG, 12, 3, 1, 1), "one": np.ones((1, 1, 1, 1), np.float32)}
    model = network(nodes, weights, outputs)
    assert "c" not in names(model)
    with pytest.raises(ValueError, match="cannot be removed"):
        slice_channels(model, {"c": STAYS})


def test_channels_of_a_weight_that_is_an_output_stay() -> None:
    model = network([node("Conv", ["c", "v"], ["y"])], {})
    model.graph.output.append(helper.make_tensor_value_info("v", TensorProto.FLOAT, None))
    assert "c" not in names(model)


def test_channels_that_control_flow_reads_stay() -> None:
    def branch(op: str) -> onnx.GraphProto:
        outputs = [helper.make_tensor_value_info("r", TensorProto.FLOAT, None)]
        return helper.make_graph([node(op, ["c"], ["r"])], op, [], outputs)

    nodes = [
        node("ReduceMax", ["x"], ["m"], keepdims=0),
        node("Cast", ["m"], ["flag"], to=TensorProto.BOOL),
        node("If", ["flag"], ["z"], then_branch=branch("Relu"), else_branch=branch("Neg")),
        node("Conv", ["c", "v"], ["y"]),
    ]
    assert names(network(nodes, outputs=("y", "z"))) == []


def test_layers_that_share_a_weight_stay() -> None:
    nodes = [
        node("Conv", ["c", "u"], ["d"], pads=[1, 1, 1, 1]),
        node("Relu", ["d"], ["e"]),
        node("Conv", ["e", "u"], ["f"], pads=[1, 1, 1, 1]),
        node("Conv", ["f", "v"], ["y"]),
    ]
    assert names(network(nodes, {"u": random_weight(RNG, 12, 12, 3, 3)})) == []


@cases("indices", [(), (1, 1), (2, 1), (-1, 3), (3, 12)])
def test_indices_that_are_no_channels_are_refused(indices: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="channels"):
        slice_channels(network([node("Conv", ["c", "v"], ["y"])]), {"c": indices})


def test_slicing_twice_is_slicing_by_the_composition() -> None:
    model = network([node("Relu", ["c"], ["d"]), node("Conv", ["d", "v"], ["y"])])
    first, second = {"c": (0, 2, 3, 7, 11)}, {"c": (1, 4)}
    twice = slice_channels(slice_channels(model, first), second)
    assert (
        twice
        == slice_channels(model, compose_channels(first, second))
        == slice_channels(model, {"c": (2, 11)})
    )


@cases("name", ["mnist5k_dscnn", "digits_cnn", "japanese_vowels_tcn", "italy_power_mlp"])
def test_half_of_all_channels_go_from_trained_models(name: str) -> None:
    source = onnx.load(TINY / f"{name}.onnx")
    with np.load(TINY / f"{name}.calib.npz") as samples:
        feeds = {value.name: samples[value.name][:1] for value in source.graph.input}
    model = onnx.shape_inference.infer_shapes(optimise(source, batch=None, feeds=[feeds]).model)
    groups = find_groups(model)
    assert groups
    sliced = slice_channels(model, {group.name: tuple(range(0, group.size, 2)) for group in groups})
    assert_valid(sliced)
    assert sum(map(len, (tensor.raw_data for tensor in sliced.graph.initializer))) < 0.6 * sum(
        map(len, (tensor.raw_data for tensor in model.graph.initializer))
    )
    assert [value.shape for value in run(sliced, feeds).values()] == [
        value.shape for value in run(model, feeds).values()
    ]
