import hashlib

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.toolkit.cases import cases

from edgekit_runtime.errors import DataError, ModelError
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.onnx_graph.specs import batch_dims
from edgekit_toolkit.samples.generated import bind_dims, generate_feeds, scaled

IMAGE = TensorSpec("image", "float32", ("N", 3, 32, 32))


def test_same_seed_gives_the_bytes_of_every_machine_and_version():
    feeds = generate_feeds([IMAGE, TensorSpec("ids", "int64", (1, 5))], 2, seed=7)
    digest = hashlib.sha256(b"".join(array.tobytes() for feed in feeds for array in feed.values()))
    # Recipes repeat packages byte for byte, so this value may only change together with their version.
    assert digest.hexdigest() == "a285e42829892a57a85b53202fcce66f51b975e8c8d0ff49166818c216b2be8b"


def test_other_seed_or_position_gives_other_values():
    first, second = generate_feeds([IMAGE], 2, seed=7)
    other = generate_feeds([IMAGE], 1, seed=8)[0]
    assert not np.array_equal(first["image"], second["image"])
    assert not np.array_equal(first["image"], other["image"])


def test_float_image_fits_its_spec_and_default_range():
    feed = generate_feeds([IMAGE], 1, seed=0)[0]["image"]
    IMAGE.check(feed)
    assert feed.shape == (1, 3, 32, 32)
    assert -1 <= feed.min() < -0.3
    assert 0.3 < feed.max() <= 1


def test_image_neighbours_are_closer_than_distant_pixels():
    plane = generate_feeds([IMAGE], 1, seed=0)[0]["image"][0, 0]
    near = np.abs(np.diff(plane, axis=1)).mean()
    far = np.abs(plane[:, 16:] - plane[:, :16]).mean()
    assert near < far / 1.5  # equal in expectation for white noise


def test_8_bit_image_spans_its_dtype():
    spec = TensorSpec("image", "uint8", (1, 64, 64, 3))
    feed = generate_feeds([spec], 1, seed=0)[0]["image"]
    spec.check(feed)
    assert feed.min() < 50
    assert feed.max() > 205


@cases("dtype", ["int64", "int32", "uint8", "bool"])
def test_integers_and_booleans_are_both_0_and_1(dtype):
    spec = TensorSpec("mask", dtype, (1, 64))
    feed = generate_feeds([spec], 1, seed=0)[0]["mask"]
    spec.check(feed)
    assert sorted(set(feed.ravel().tolist())) == [0, 1]


def test_range_of_an_integer_input_includes_both_ends():
    spec = TensorSpec("ids", "int64", (1, 500))
    feed = generate_feeds([spec], 1, seed=0, ranges={"ids": (3, 6)})[0]["ids"]
    assert sorted(set(feed.ravel().tolist())) == [3, 4, 5, 6]


def test_range_of_a_float_input_is_kept():
    feed = generate_feeds([IMAGE], 1, seed=0, ranges={"image": (0, 255)})[0]["image"]
    assert 0 <= feed.min() < 100
    assert 150 < feed.max() <= 255


def test_scaled_half_precision_stays_finite_without_a_warning():
    array = np.array([-60000, 0, 1, 60000], np.float16)
    (times,) = scaled({"x": array}, 16).values()
    assert (times.dtype, times.tolist()) == (np.float16, [-65504, 0, 16, 65504])


def test_scalar_input_gets_a_scalar():
    spec = TensorSpec("sr", "int64", ())
    feed = generate_feeds([spec], 1, seed=0, ranges={"sr": (16000, 16000)})[0]
    spec.check(feed["sr"])
    assert feed["sr"] == 16000


def test_named_dimensions_take_the_sizes_given():
    spec = TensorSpec("x", "float32", ("N", 3, "H", "W"))
    feed = generate_feeds([spec], 1, seed=0, dims={"N": 2, "H": 16, "W": 8})[0]["x"]
    assert feed.shape == (2, 3, 16, 8)


def test_free_dimension_without_size_asks_for_it():
    with pytest.raises(DataError, match="--dim T=VALUE"):
        generate_feeds([TensorSpec("x", "float32", ("N", "T"))], 1, seed=0)


@pytest.mark.parametrize(("dtype", "limits"), [("uint8", (0, 256)), ("bool", (0, 2)), ("float32", (1, 0))])
def test_range_beyond_the_dtype_is_refused(dtype, limits):
    with pytest.raises(DataError, match="not a range of its values"):
        generate_feeds([TensorSpec("x", dtype, (1, 4))], 1, seed=0, ranges={"x": limits})


def reshaping(shape, target):
    """A model that runs only with inputs of as many elements as `target` has."""
    graph = helper.make_graph(
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        "reshaping",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(target))],
        [numpy_helper.from_array(np.array(target, np.int64), "shape")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_free_batch_is_bound_to_1():
    assert bind_dims(reshaping(("N", 4), (1, 4))) == {"N": 1}


def test_model_without_free_dimensions_needs_none():
    assert bind_dims(reshaping((2, 4), (8,))) == {}


def test_free_sizes_are_found_by_running_the_model():
    assert bind_dims(reshaping(("N", 3, "H", "W"), (1, 3 * 48 * 48))) == {"N": 1, "H": 48, "W": 48}


def test_free_sizes_that_differ_are_found_too():
    found = bind_dims(reshaping(("N", "H", "W"), (1, 32 * 224)))
    assert found["H"] * found["W"] == 32 * 224
    assert found["H"] != found["W"]


def test_sizes_given_are_kept_and_the_rest_is_found():
    found = bind_dims(reshaping(("N", 1, "H", "W"), (2, 20 * 64)), {"N": 2, "H": 20})
    assert found == {"N": 2, "H": 20, "W": 64}


def test_sizes_with_which_nothing_runs_ask_for_the_dimension():
    with pytest.raises(ModelError, match=r"give --dim H=VALUE --dim W=VALUE. Last: .*Reshape"):
        bind_dims(reshaping(("N", "H", "W"), (1, 7919)))


def test_given_sizes_that_do_not_run_are_refused_with_the_reason():
    with pytest.raises(ModelError, match=r"give other sizes.*Reshape"):
        bind_dims(reshaping(("N", "T"), (1, 10)), {"N": 1, "T": 11})


def test_broken_node_of_a_model_without_free_sizes_is_named_without_talk_of_sizes():
    with pytest.raises(ModelError, match=r"have fixed sizes: mend the node.*Reshape") as caught:
        bind_dims(reshaping((1, 10), (1, 11)))
    assert "give" not in str(caught.value)


def test_output_that_the_engine_leaves_out_is_refused_by_name():
    inputs = ["x", "one", "one", "one", "one"]
    training = helper.make_node("BatchNormalization", inputs, ["y", "mean", "variance"], training_mode=2)
    with pytest.raises(ModelError, match="onnxruntime makes no output 'mean'; export the model without it"):
        bind_dims(
            helper.make_model(
                helper.make_graph(
                    [training],
                    "training",
                    [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 1, 3])],
                    [
                        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
                        for name, shape in (("y", [2, 1, 3]), ("mean", [1]), ("variance", [1]))
                    ],
                    [numpy_helper.from_array(np.ones(1, np.float32), "one")],
                ),
                opset_imports=[helper.make_opsetid("", 15)],
                ir_version=8,
            )
        )


@pytest.mark.parametrize(("name", "size"), [("H", 8), ("N", 0)])
def test_unknown_dimension_or_size_below_1_is_refused(name, size):
    with pytest.raises(ModelError, match=f"--dim {name}={size}: .*free dimensions are N, T"):
        bind_dims(reshaping(("N", "T"), (1, 10)), {name: size})


def test_leading_and_named_dimensions_count_as_batch():
    specs = [
        TensorSpec("x", "float32", ("rows", "T")),
        TensorSpec("state", "float32", (2, "batch_size", 128)),
        TensorSpec("sr", "int64", ()),
    ]
    assert batch_dims(specs) == ("rows", "batch_size")
