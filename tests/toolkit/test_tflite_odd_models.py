"""Models that are odd, but sound, as TFLite: names, scalars, unread tensors, outputs that are inputs."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

pytest.importorskip("ai_edge_litert")
from onnx import TensorProto, helper, numpy_helper
from tests.toolkit.small_models import Array, model_of, node, random_feeds, random_weight, run
from tests.toolkit.tflite_models import checked, converted, operators

from edgekit_runtime.sessions.litert.session import LiteRtSession
from edgekit_toolkit.tflite.convert import convert

X = {"x": [2, 6, 7, 5]}
POINTWISE = {"w": random_weight(np.random.default_rng(0), 6, 6, 1, 1)}


def test_free_dimensions_take_the_sizes_that_are_given() -> None:
    rng = np.random.default_rng(0)
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Shape", ["c"], ["s"]),
        node("Gather", ["s", "zero"], ["n"]),
        node("Concat", ["n", "rest"], ["t"], axis=0),
        node("Reshape", ["c", "t"], ["y"]),
    ]
    weights = POINTWISE | {"zero": np.array([0]), "rest": np.array([-1, 5])}
    model = model_of(nodes, weights, {"x": ["N", 6, "H", 5]})
    x = rng.normal(size=(3, 6, 4, 5)).astype(np.float32)
    checked(model, {"N": 3, "H": 4}, [{"x": x}])


def test_the_interface_keeps_names_order_dtypes_and_shapes() -> None:
    names = ["z/first:0", "ä ö", "a"]
    nodes = [
        node("Conv", [names[0], "w"], ["out/9"]),
        node("Add", [names[1], names[2]], ["Ω"]),
        node("Cast", ["Ω"], ["0"], to=TensorProto.INT32),
    ]
    graph = helper.make_graph(
        nodes,
        "names",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, X["x"]) for name in names],
        [
            helper.make_tensor_value_info("out/9", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("0", TensorProto.INT32, None),
            helper.make_tensor_value_info("Ω", TensorProto.FLOAT, None),
        ],
        [numpy_helper.from_array(POINTWISE["w"], "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    content = convert(model, {})
    from ai_edge_litert import schema_py_generated as schema

    found = schema.ModelT.InitFromPackedBuf(content, 0).subgraphs[0]
    inputs = [found.tensors[place] for place in found.inputs]
    assert [(tensor.name.decode(), list(tensor.shape)) for tensor in inputs] == [
        (name, X["x"]) for name in names
    ]
    assert [found.tensors[place].name.decode() for place in found.outputs] == ["out/9", "0", "Ω"]
    assert {spec.name: spec.dtype for spec in LiteRtSession(content).outputs} == {
        "out/9": "float32",
        "0": "int32",
        "Ω": "float32",
    }
    checked(model, feeds=[{name: np.full(X["x"], 2.6, np.float32) for name in names}])


def test_an_input_that_is_given_back_is_an_output_of_its_own() -> None:
    nodes = [
        node("Identity", ["x"], ["same"]),
        node("Identity", ["x"], ["again"]),
        node("Relu", ["x"], ["y"]),
    ]
    model = model_of(nodes, {}, X, ("same", "y", "again"))
    checked(model)


def test_an_input_that_is_named_as_an_output_is_copied() -> None:
    model = model_of([node("Relu", ["x"], ["y"])], {}, X)
    model.graph.output.append(model.graph.input[0])
    rng = np.random.default_rng(0)
    feed = random_feeds(model, rng)
    session = LiteRtSession(convert(model, {}))
    got = session.run(feed)
    np.testing.assert_array_equal(got["x"], feed["x"])
    np.testing.assert_array_equal(got["y"], run(model, feed)["y"])


def test_outputs_that_are_constant_are_given() -> None:
    nodes = [node("Relu", ["x"], ["y"]), node("Identity", ["k"], ["c"])]
    checked(model_of(nodes, {"k": np.arange(6, dtype=np.float32).reshape(2, 3)}, X, ("y", "c")))


def test_scalars_go_in_and_out() -> None:
    nodes = [
        node("ReduceSum", ["x"], ["s"], keepdims=0),
        node("Mul", ["s", "k"], ["y"]),
        node("Identity", ["k"], ["z"]),
    ]
    checked(model_of(nodes, {}, {"x": [2, 3], "k": []}, ("y", "z")))


def test_an_empty_part_of_a_concatenation_adds_nothing() -> None:
    weights = {name: np.array([value]) for name, value in (("a", 3), ("b", 3), ("i", 1))}
    nodes = [node("Concat", ["x", "k", "x"], ["y"], axis=1)]
    converted(nodes, weights | {"k": np.zeros((2, 0, 7, 5), np.float32)}, X)


def test_equal_weights_are_stored_once() -> None:
    w = random_weight(np.random.default_rng(0), 60, 60, 3, 3)
    nodes = [node("Conv", ["x", "w"], ["c"], pads=[1] * 4), node("Conv", ["c", "v"], ["y"], pads=[1] * 4)]
    model = model_of(nodes, {"w": w, "v": w.copy()}, {"x": [1, 60, 7, 5]})
    assert len(convert(model, {})) < 1.2 * w.nbytes


def test_every_process_writes_the_same_bytes(tmp_path: Path) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Split", ["c"], ["p", "q"], axis=1),
        node("Add", ["p", "q"], ["y"]),
    ]
    model = model_of(nodes, POINTWISE, X)
    onnx.save(model, tmp_path / "net.onnx")
    code = (
        "import hashlib, onnx, sys\n"
        "from edgekit_toolkit.tflite.convert import convert\n"
        "print(hashlib.sha256(convert(onnx.load(sys.argv[1]), {})).hexdigest())\n"
    )
    digests = {hashlib.sha256(convert(model, {})).hexdigest()}
    for seed in ("1", "2"):  # sets have another order in each
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code, str(tmp_path / "net.onnx")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        digests.add(done.stdout.strip())
    assert len(digests) == 1


def test_weights_lie_where_kernels_may_read_them_in_place() -> None:
    from ai_edge_litert import schema_py_generated as schema

    nodes = [node("Conv", ["x", "w"], ["c"]), node("Add", ["c", "b"], ["y"])]
    content = convert(model_of(nodes, POINTWISE | {"b": np.ones((7, 5), np.float32)}, X), {})
    model = schema.Model.GetRootAs(content, 0)
    for place in range(model.BuffersLength()):
        data = model.Buffers(place).DataAsNumpy()
        if isinstance(data, np.ndarray):
            offset = data.__array_interface__["data"][0] - np.frombuffer(content, np.uint8).ctypes.data
            assert offset % 16 == 0


def test_nodes_that_nothing_reads_are_left_out() -> None:
    nodes = [node("Relu", ["x"], ["y"]), node("Tanh", ["x"], ["unread"])]
    assert converted(nodes, {}, X) == {"RELU": 1}


def test_weights_that_a_caller_may_replace_are_weights() -> None:
    model = model_of([node("Conv", ["x", "w"], ["y"])], POINTWISE, X)
    value = helper.make_tensor_value_info("w", TensorProto.FLOAT, list(POINTWISE["w"].shape))
    model.graph.input.append(value)  # as files before IR version 4 list them
    content = convert(model, {})
    assert operators(content)["CONV_2D"] == 1
    assert [spec.name for spec in LiteRtSession(content).inputs] == ["x"]


def test_old_operator_sets_are_converted_first() -> None:
    weights: dict[str, Array] = {"w": POINTWISE["w"]}
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Clip", ["c"], ["k"], min=0.0, max=6.0),
        node("Softmax", ["k"], ["y"]),
    ]
    found = converted(nodes, weights, X, opset=8)
    assert found["RELU6"] == 0


def test_a_place_that_is_computed_picks_the_same() -> None:
    nodes = [
        node("ArgMax", ["k"], ["i"], keepdims=0),
        node("Conv", ["x", "w"], ["c"]),
        node("Gather", ["c", "i"], ["y"], axis=1),
    ]
    converted(nodes, POINTWISE, {**X, "k": [5]})


def test_an_input_that_nothing_reads_stays_an_input() -> None:
    checked(model_of([node("Relu", ["x"], ["y"])], {}, {**X, "unread": [2, 3]}))


def test_a_node_whose_first_output_is_not_wanted_converts() -> None:
    rng = np.random.default_rng(0)
    weights = {"w": random_weight(rng, 1, 12, 4), "r": random_weight(rng, 1, 12, 3)}
    layer = node("LSTM", ["x", "w", "r"], ["", "h", "c"], hidden_size=3)
    checked(model_of([layer], weights, {"x": [5, 2, 4]}, ("h", "c")))


def test_extra_outputs_that_nothing_reads_are_left_out() -> None:
    nodes = [
        node("MaxPool", ["x"], ["p", "places"], kernel_shape=[2, 2]),
        node("LayerNormalization", ["p", "k"], ["y", "mean", "deviation"]),
    ]
    converted(nodes, {"k": np.ones(4, np.float32)}, X)


def test_a_cast_to_the_type_of_another_tensor_computes_the_same() -> None:
    nodes = [node("CastLike", ["x", "k"], ["i"]), node("CastLike", ["i", "x"], ["y"])]
    converted(nodes, {"k": np.ones(2, np.int32)}, X)


def test_weight_that_is_also_an_output_is_given_back() -> None:
    nodes = [node("Conv", ["x", "w"], ["y"])]
    model = model_of(nodes, POINTWISE, X, ("y",))
    model.graph.output.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [6, 6, 1, 1]))
    assert checked(model)["CONV_2D"] == 1


@pytest.mark.parametrize("keep", [-1, 2])
def test_keepdims_other_than_1_drops_the_axis(keep: int) -> None:
    assert converted([node("ReduceMax", ["x"], ["y"], axes=[1], keepdims=keep)], {}, X)["REDUCE_MAX"] == 1
