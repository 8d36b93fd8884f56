"""Rows and patches of layers: their product is what onnxruntime computes."""

import numpy as np
import onnx
import pytest
from tests.toolkit.cases import cases
from tests.toolkit.small_models import Array, model_of, node, random_weight, run

from edgekit_toolkit.onnx_graph.layers import find_layers

SEED = 5
CONVOLUTIONS = {
    "plain": ((8, 3, 3, 3), {"pads": [1, 1, 1, 1]}),
    "uneven pads": ((8, 3, 3, 3), {"pads": [0, 1, 2, 0]}),
    "strides": ((8, 3, 3, 3), {"strides": [2, 1], "pads": [1, 1, 1, 1]}),
    "dilations": ((8, 3, 3, 2), {"dilations": [2, 3]}),
    "groups": ((6, 1, 3, 3), {"group": 3}),
    "depthwise": ((3, 1, 5, 5), {"group": 3, "pads": [2, 2, 2, 2]}),
    "same upper": ((8, 3, 4, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "same lower": ((8, 3, 4, 3), {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    "valid": ((8, 3, 3, 3), {"auto_pad": "VALID", "strides": [3, 2]}),
    "pointwise": ((8, 3, 1, 1), {}),
}


def check_rows_times_patches(model: onnx.ModelProto, values: Array) -> None:
    (layer,) = find_layers(model)
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    patches = layer.patches(values, 1 << 30, np.random.default_rng(0))
    rows = layer.to_rows(constants[layer.weight])
    products = np.einsum("pgk,grk->pgr", patches, rows).reshape(len(patches), layer.channels)
    products += constants[layer.bias] if layer.bias else 0
    wanted = run(model, {"x": values})["y"]
    if model.graph.node[0].op_type == "Conv":
        wanted = np.moveaxis(wanted, 1, -1)
    np.testing.assert_allclose(products, wanted.reshape(len(patches), -1), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(layer.from_rows(rows).astype(np.float32), constants[layer.weight])


@cases("kind", CONVOLUTIONS)
def test_rows_times_patches_are_the_convolution(kind: str) -> None:
    rng = np.random.default_rng(SEED)
    shape, attributes = CONVOLUTIONS[kind]
    model = model_of(
        [node("Conv", ["x", "w", "b"], ["y"], **attributes)],
        {"w": random_weight(rng, *shape), "b": random_weight(rng, shape[0])},
        {"x": [2, 3, 11, 12]},
    )
    check_rows_times_patches(model, rng.normal(size=(2, 3, 11, 12)).astype(np.float32))


def test_rows_times_patches_are_the_convolution_of_sequences() -> None:
    rng = np.random.default_rng(SEED)
    model = model_of(
        [node("Conv", ["x", "w"], ["y"], dilations=[2])],
        {"w": random_weight(rng, 8, 3, 3)},
        {"x": [2, 3, 20]},
    )
    check_rows_times_patches(model, rng.normal(size=(2, 3, 20)).astype(np.float32))


@pytest.mark.parametrize("turned", [0, 1])
def test_rows_times_patches_are_the_dense_layer(turned: int) -> None:
    rng = np.random.default_rng(SEED)
    shape = (5, 7) if turned else (7, 5)
    nodes = [node("Gemm", ["x", "w", "b"], ["y"], transB=turned)]
    weights = {"w": random_weight(rng, *shape), "b": random_weight(rng, 5)}
    model = model_of(nodes, weights, {"x": [4, 7]})
    check_rows_times_patches(model, rng.normal(size=(4, 7)).astype(np.float32))


def test_rows_times_patches_are_the_matrix_product() -> None:
    rng = np.random.default_rng(SEED)
    model = model_of([node("MatMul", ["x", "w"], ["y"])], {"w": random_weight(rng, 7, 5)}, {"x": [2, 3, 7]})
    check_rows_times_patches(model, rng.normal(size=(2, 3, 7)).astype(np.float32))


def test_few_positions_are_drawn_the_same_each_time() -> None:
    rng = np.random.default_rng(SEED)
    model = model_of(
        [node("Conv", ["x", "w"], ["y"])], {"w": random_weight(rng, 4, 3, 3, 3)}, {"x": [1, 3, 30, 30]}
    )
    (layer,) = find_layers(model)
    values = rng.normal(size=(1, 3, 30, 30)).astype(np.float32)
    first, second = (layer.patches(values, 50, np.random.default_rng(0)) for _ in range(2))
    assert first.shape == (50, 1, 27)
    np.testing.assert_array_equal(first, second)


def test_products_without_plain_constant_weights_are_no_layers() -> None:
    rng = np.random.default_rng(SEED)
    model = model_of(
        [
            node("MatMul", ["x", "x"], ["square"]),
            node("MatMul", ["square", "stack"], ["more"]),
            node("Gemm", ["flat", "w", "b"], ["scaled"], alpha=2.0),
            node("Add", ["more", "scaled"], ["y"]),
        ],
        {
            "stack": rng.normal(size=(2, 3, 3)).astype(np.float32),
            "w": random_weight(rng, 3, 3),
            "b": random_weight(rng, 3),
        },
        {"x": [3, 3], "flat": [3, 3]},
    )
    assert find_layers(model) == []


def test_bias_that_all_channels_share_makes_no_layer() -> None:
    rng = np.random.default_rng(SEED)
    model = model_of(
        [node("Gemm", ["x", "w", "b"], ["y"])],
        {"w": random_weight(rng, 3, 4), "b": random_weight(rng, 1)},
        {"x": [2, 3]},
    )
    assert find_layers(model) == []


def test_weight_read_as_it_is_and_transposed_makes_no_layers() -> None:
    rng = np.random.default_rng(SEED)
    model = model_of(
        [
            node("Gemm", ["x", "w"], ["a"]),
            node("Gemm", ["a", "w"], ["b"], transB=1),
            node("Gemm", ["b", "v"], ["y"]),
        ],
        {"w": random_weight(rng, 3, 3), "v": random_weight(rng, 3, 3)},
        {"x": [2, 3]},
    )
    assert [layer.weight for layer in find_layers(model)] == ["v"]
