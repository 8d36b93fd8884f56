"""What the TFLite writer refuses, and with which words."""

import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import onnx
import pytest
from tests.toolkit.cases import cases

pytest.importorskip("ai_edge_litert")
from onnx import TensorProto, helper, numpy_helper
from tests.toolkit.small_models import model_of, node, random_feeds, random_weight
from tests.toolkit.tflite_models import checked

from edgekit_runtime.errors import DataError
from edgekit_toolkit.tflite import check
from edgekit_toolkit.tflite.builder import Builder
from edgekit_toolkit.tflite.check import convert_checked
from edgekit_toolkit.tflite.convert import convert
from edgekit_toolkit.tflite.refusal import ConversionError, RefusedError

X = {"x": [2, 6, 7, 5]}
POINTWISE = {"w": random_weight(np.random.default_rng(0), 6, 6, 1, 1)}


def refusal(model: onnx.ModelProto, dims: dict[str, int] | None = None) -> ConversionError:
    """The error with which a model is refused, which is left as it was."""
    before = model.SerializeToString()
    with pytest.raises(ConversionError) as caught:
        convert(model, dims or {})
    assert model.SerializeToString() == before
    return caught.value


def test_every_node_without_a_mapping_is_named_with_its_operator() -> None:
    nodes = [
        node("Det", ["x"], ["d"], name="first/bad"),
        node("Relu", ["d"], ["r"], name="good"),
        node("Det", ["r"], ["y"]),
    ]
    error = refusal(model_of(nodes, {}, {"x": [2, 2, 3, 3]}))
    assert [(item.operator, item.node) for item in error.refusals] == [
        ("Det", "node 'first/bad'"),
        ("Det", "the node that makes 'y'"),
    ]
    assert "operator 'Det' at node 'first/bad'" in str(error)
    assert "good" not in str(error)


def test_every_attribute_that_is_not_covered_is_named_with_its_node() -> None:
    nodes = [
        node("LRN", ["x"], ["p"], size=2, name="even"),
        node("Resize", ["p", "", "", "n"], ["r"], keep_aspect_ratio_policy="not_larger", name="resize"),
        node("LRN", ["r"], ["y"], size=4, name="lrn"),
    ]
    error = refusal(model_of(nodes, {"n": np.array([2, 6, 14, 10])}, X, opset=19, ir=9))
    assert [item.node for item in error.refusals] == ["node 'even'", "node 'resize'", "node 'lrn'"]
    assert re.search(r"even size 2.*keep_aspect_ratio_policy.*even size 4", str(error), re.DOTALL)


@cases(
    ("made", "words"),
    [
        (node("Mod", ["x", "k"], ["y"], fmod=1), "fmod=1"),
        (node("Pad", ["x", "p"], ["y"], mode="wrap"), "wrap"),
        (
            node("Resize", ["x", "", "", "n"], ["y"], axes=[2, 3], keep_aspect_ratio_policy="not_larger"),
            "keep_aspect_ratio_policy",
        ),
        (node("LeakyRelu", ["x"], ["y"], domain="com.acme"), "com.acme.LeakyRelu"),
        (
            node(
                "MaxPool", ["x"], ["y"], kernel_shape=[1, 1], strides=[1, 3], pads=[0, 0, 0, 0], ceil_mode=1
            ),
            "ceil_mode=0",
        ),
        (
            node(
                "AveragePool",
                ["x"],
                ["y"],
                kernel_shape=[1, 1],
                strides=[1, 3],
                auto_pad="SAME_LOWER",
                ceil_mode=1,
            ),
            "for auto_pad",
        ),
    ],
)
def test_a_node_beyond_the_mapping_is_refused(made: onnx.NodeProto, words: str) -> None:
    weights = {
        "k": np.array(2, np.float32),
        "p": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        "n": np.array([3, 2]),
    }
    used = {name: value for name, value in weights.items() if name in made.input}
    graph = helper.make_graph(
        [made],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, X["x"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in used.items()],
    )
    imports = [helper.make_opsetid("", 19), helper.make_opsetid("com.acme", 1)]
    error = refusal(helper.make_model(graph, opset_imports=imports, ir_version=9))
    assert words in str(error)
    assert len(error.refusals) == 1


def test_branches_whose_results_differ_in_shape_are_refused_by_name() -> None:
    branches = {
        f"{name}_branch": helper.make_graph(
            [node(operator, ["x"], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)],
        )
        for name, operator, shape in (("then", "Relu", X["x"]), ("else", "Transpose", [5, 7, 6, 2]))
    }
    nodes = [
        node("ReduceMax", ["x"], ["m"], keepdims=0),
        node("Cast", ["m"], ["c"], to=TensorProto.BOOL),
        node("If", ["c"], ["y"], **branches, name="choice"),
    ]
    error = refusal(model_of(nodes, {}, X))
    assert "operator 'If' at node 'choice'" in str(error)
    assert "--fix NAME=VALUE" in str(error)


def test_shapes_that_depend_on_the_data_are_refused() -> None:
    nodes = [
        node("Cast", ["x"], ["i"], to=TensorProto.INT64),
        node("Reshape", ["w", "i"], ["r"], name="by data"),
        node("Relu", ["r"], ["y"]),
    ]
    model = model_of(nodes, {"w": np.ones(6, np.float32)}, {"x": [2]})
    assert "by data" in str(refusal(model))


def test_an_element_type_that_no_kernel_casts_is_refused() -> None:
    model = model_of([node("Identity", ["x"], ["y"])], {}, X, dtype=TensorProto.UINT64)
    assert "input 'x' (uint64" in str(refusal(model))


def test_free_dimensions_without_a_size_are_named_with_the_option_to_give() -> None:
    model = model_of([node("Relu", ["x"], ["y"])], {}, {"x": ["N", 6, "", 5]})
    error = refusal(model, {})
    assert "'N' of input 'x'" in str(error)
    assert "--dim N=VALUE --dim x_2=VALUE" in str(error)


@pytest.mark.parametrize("shape", [[0, 6, 7, 5], [2, 6, 0, 5]])
def test_inputs_without_elements_are_refused(shape: list[int]) -> None:
    assert "dimension of size 0" in str(refusal(model_of([node("Relu", ["x"], ["y"])], {}, {"x": shape})))


def test_a_result_without_elements_is_refused_by_node() -> None:
    weights = {name: np.array([value]) for name, value in (("a", 3), ("b", 3), ("i", 1))}
    error = refusal(model_of([node("Slice", ["x", "a", "b", "i"], ["y"], name="none")], weights, X))
    assert error.refusals[0].node == "node 'none'"


def test_weights_beyond_one_file_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgekit_toolkit.tflite import writer

    monkeypatch.setattr(writer, "MAX_DATA_BYTES", 100)
    model = model_of([node("Conv", ["x", "w"], ["y"])], POINTWISE, X)
    assert "at most 100" in str(refusal(model))


def test_a_dropout_whose_mask_is_read_is_refused() -> None:
    nodes = [node("Dropout", ["x"], ["d", "m"]), node("Cast", ["m"], ["f"], to=TensorProto.FLOAT)]
    model = model_of([*nodes, node("Add", ["d", "f"], ["y"])], {}, X)
    assert "mask" in str(refusal(model))


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"clip": 3.0}, "clip"),
        ({"layout": 1}, "layout=1"),
        ({"activations": ["Relu", "Tanh", "Tanh"]}, "activations"),
    ],
)
def test_recurrent_layers_beyond_the_mapping_are_refused(attributes: dict[str, Any], words: str) -> None:
    rng = np.random.default_rng(0)
    weights = {"w": random_weight(rng, 1, 12, 4), "r": random_weight(rng, 1, 12, 3)}
    layer = node("LSTM", ["x", "w", "r"], ["", "y"], hidden_size=3, **attributes)
    model = model_of([layer], weights, {"x": [5, 5, 4]})
    assert words in str(refusal(model))


def test_sequences_too_long_to_write_out_are_refused() -> None:
    rng = np.random.default_rng(0)
    weights = {"w": random_weight(rng, 1, 12, 4), "r": random_weight(rng, 1, 12, 3)}
    layer = node("LSTM", ["x", "w", "r"], ["", "y"], hidden_size=3)
    assert "600 steps" in str(refusal(model_of([layer], weights, {"x": [600, 1, 4]})))


def test_a_conversion_that_computes_something_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of([node("Conv", ["x", "w"], ["y"])], POINTWISE, X)
    wrong = model_of([node("Conv", ["x", "w"], ["y"])], {"w": POINTWISE["w"] + np.float32(0.01)}, X)
    content = convert(wrong, {})
    monkeypatch.setattr(check, "convert", lambda *_: content)
    with pytest.raises(ConversionError, match="output 'y' differs"):
        convert_checked(model, {}, [random_feeds(model, np.random.default_rng(0))])


def test_a_file_that_litert_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of([node("Conv", ["x", "w"], ["y"])], POINTWISE, X)
    monkeypatch.setattr(check, "convert", lambda *_: b"no model at all")
    with pytest.raises(ConversionError, match="LiteRT does not run"):
        convert_checked(model, {}, [random_feeds(model, np.random.default_rng(0))])


def test_a_conversion_without_feeds_is_refused() -> None:
    with pytest.raises(DataError, match="no feeds"):
        convert_checked(model_of([node("Relu", ["x"], ["y"])], {}, X), {}, [])


def test_what_follows_from_a_refused_node_is_not_refused_again() -> None:
    nodes = [
        node("NonZero", ["x"], ["n"], name="places"),
        node("Cast", ["n"], ["f"], to=TensorProto.FLOAT, name="innocent"),
        node("LRN", ["x"], ["r"], size=2, name="even"),
        node("ReduceMax", ["f"], ["m"], keepdims=0),
        node("Add", ["r", "m"], ["y"]),
    ]
    error = refusal(model_of(nodes, {}, X))
    assert [item.node for item in error.refusals] == ["node 'places'", "node 'even'"]


def test_integers_of_8_bits_are_moved_as_they_are() -> None:
    moved = model_of([node("Transpose", ["x"], ["y"])], {}, X, dtype=TensorProto.INT8)
    x = np.arange(420, dtype=np.int64).astype(np.int8).reshape(X["x"])
    assert "CAST" not in checked(moved, feeds=[{"x": x}])


def test_a_kernel_that_computes_with_codes_alone_gets_no_plain_integers() -> None:
    """Some kernels end the process where such integers have no scale."""
    builder = Builder()
    codes = builder.tensor((2,), np.dtype(np.int8))
    with pytest.raises(RefusedError, match="quantized numbers only"):
        builder.operator("EQUAL", [codes, codes], [((2,), np.dtype(np.bool_))])


def test_an_output_without_elements_is_refused_by_name() -> None:
    nodes = [node("Shape", ["x"], ["none"], start=3, end=2), node("Neg", ["x"], ["y"])]
    model = model_of(nodes, {}, X, ("y", "none"), dtype=TensorProto.INT64)
    assert "output 'none'" in str(refusal(model))


def test_statistics_of_a_batch_are_refused() -> None:
    inputs = ["x", *(["k"] * 4)]
    nodes = [node("BatchNormalization", inputs, ["y", "m", "v"], training_mode=1, name="training")]
    model = model_of(nodes, {"k": np.ones(6, np.float32)}, X, ("y", "m"))
    assert "node 'training'" in str(refusal(model))


def test_models_beyond_protobuf_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgekit_toolkit.tflite import prepare

    monkeypatch.setattr(prepare, "MAX_MODEL_BYTES", 100)
    assert "at most 100" in str(refusal(model_of([node("Conv", ["x", "w"], ["y"])], POINTWISE, X)))


def test_a_sequence_as_an_input_is_refused() -> None:
    sequence = helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, None)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(
        [node("ConcatFromSequence", ["x"], ["y"], axis=0)], "list", [sequence], [result]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert "no tensor" in str(refusal(model))


def test_strings_are_refused() -> None:
    text = helper.make_tensor_value_info("x", TensorProto.STRING, [2])
    result = helper.make_tensor_value_info("y", TensorProto.STRING, [2])
    graph = helper.make_graph([node("Identity", ["x"], ["y"])], "text", [text], [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert "input 'x'" in str(refusal(model))


def test_without_litert_the_extra_to_install_is_named() -> None:
    code = (
        "import sys; sys.modules['ai_edge_litert'] = None\n"
        "from edgekit_runtime.errors import BackendError\n"
        "try: import edgekit_toolkit.tflite.convert\n"
        "except BackendError as error: print(error)"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert "'.[litert-host]'" in done.stdout


@pytest.mark.parametrize("size", [4, 5])
def test_transposed_convolution_of_an_unknown_rank_is_refused_by_name(size: int) -> None:
    weights = {"w": np.ones((3, 4, 3, 3), np.float32)}
    cropped = node("ConvTranspose", ["x", "w"], ["y"], name="up", output_shape=[size, size])
    model = model_of([cropped], weights, {"x": [1, 3, 6, 6]})
    with pytest.raises(ConversionError, match=r"'ConvTranspose' at node 'up': the shape of its result"):
        convert(model, {})


def test_resize_to_nothing_is_refused_by_name() -> None:
    weights = {"s": np.array([1, 1, 0.1, 0.1], np.float32)}
    model = model_of([node("Resize", ["x", "", "s"], ["y"], name="shrink")], weights, {"x": [1, 3, 6, 6]})
    with pytest.raises(ConversionError, match="'Resize' at node 'shrink': resizing"):
        convert(model, {})
