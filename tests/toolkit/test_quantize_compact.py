from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tests.toolkit.small_models import assert_valid, model_of, node, random_feeds, random_weight, run

from edgekit_toolkit.quantize.onnx.compact import (
    derive_bias_scales,
    shorten_names,
    split_parameters,
    store_parameters,
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def named_model(rng: np.random.Generator, inputs: str = "images", outputs: str = "scores") -> onnx.ModelProto:
    weights = {"backbone/stem/weight": random_weight(rng, 4, 3, 3, 3), "a": random_weight(rng, 4, 1, 1)}
    nodes = [
        node("Conv", [inputs, "backbone/stem/weight"], ["backbone/stem/out"], name="backbone/stem"),
        node("Add", ["backbone/stem/out", "a"], ["backbone/stem/shifted"], name="add"),
        node("Clip", ["backbone/stem/shifted", "", "top"], [outputs], name="clip"),
    ]
    weights["top"] = np.asarray(6, np.float32)
    return model_of(nodes, weights, {inputs: ("N", 3, 6, 6)}, [outputs])


def test_names_become_short_and_the_outputs_stay_equal(rng: np.random.Generator) -> None:
    before = named_model(rng)
    kept = before.SerializeToString()
    after = shorten_names(before)
    assert before.SerializeToString() == kept
    assert_valid(after)
    assert [value.name for value in (*after.graph.input, *after.graph.output)] == ["images", "scores"]
    inner = {name for item in after.graph.node for name in (*item.input, *item.output)} - {"images", "scores"}
    assert all(len(name) <= 1 for name in inner)
    assert after.graph.node[2].input[1] == ""
    feeds = random_feeds(before, rng)
    np.testing.assert_array_equal(run(after, feeds)["scores"], run(before, feeds)["scores"])


def test_inputs_and_outputs_that_are_short_already_are_not_used_twice(rng: np.random.Generator) -> None:
    before = named_model(rng, "a_", "b")
    before.graph.input[0].name = before.graph.node[0].input[0] = "c"
    after = shorten_names(before)
    assert_valid(after)
    feeds = random_feeds(before, rng)
    np.testing.assert_array_equal(run(after, feeds)["b"], run(before, feeds)["b"])


def test_constant_that_nothing_reads_takes_no_name_of_another(rng: np.random.Generator) -> None:
    before = named_model(rng)
    before.graph.initializer.append(numpy_helper.from_array(np.zeros(2, np.float32), "b"))
    after = shorten_names(before)
    names = [tensor.name for tensor in after.graph.initializer]
    assert len(set(names)) == len(names)
    assert_valid(after)


def test_what_only_people_read_is_dropped(rng: np.random.Generator) -> None:
    before = named_model(rng)
    before.doc_string = before.graph.doc_string = before.graph.node[0].doc_string = "a secret"
    before.graph.initializer[0].doc_string = "a secret"
    for item in (before, before.graph, before.graph.node[0], before.graph.initializer[0]):
        entry = item.metadata_props.add()
        entry.key, entry.value = "stack_trace", "a secret"
    after = shorten_names(before)
    content = after.SerializeToString()
    assert b"secret" not in content
    assert b"backbone" not in content
    assert not after.graph.value_info


def test_operator_sets_that_no_node_needs_are_dropped(rng: np.random.Generator) -> None:
    before = named_model(rng)
    before.opset_import.extend(
        [helper.make_opsetid("ai.onnx.ml", 3), helper.make_opsetid("com.microsoft", 1)]
    )
    before.graph.node.append(
        node("FusedConv", ["images", "backbone/stem/weight"], ["f"], domain="com.microsoft")
    )
    after = shorten_names(before)
    assert {item.domain: item.version for item in after.opset_import} == {"": 17, "com.microsoft": 1}


def test_model_with_control_flow_keeps_its_names(rng: np.random.Generator) -> None:
    def branch(operator: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{operator}_out", TensorProto.FLOAT, None)
        return helper.make_graph([node(operator, ["activation"], [out.name])], operator, [], [out])

    nodes = [
        node("Tanh", ["x"], ["activation"]),
        node("ReduceMax", ["x"], ["top"], keepdims=0),
        node("Greater", ["top", "zero"], ["positive"]),
        node("If", ["positive"], ["y"], then_branch=branch("Relu"), else_branch=branch("Neg")),
    ]
    before = model_of(nodes, {"zero": np.float32(0)}, {"x": (4,)})
    after = shorten_names(before)
    assert [list(item.output) for item in after.graph.node] == [
        list(item.output) for item in before.graph.node
    ]
    for sign in (1, -1):
        feeds = {"x": sign * np.arange(1, 5, dtype=np.float32)}
        np.testing.assert_array_equal(run(after, feeds)["y"], run(before, feeds)["y"])


def coded_model(rng: np.random.Generator, channels: int = 4) -> onnx.ModelProto:
    """Return x -> Q, DQ -> two Conv in codes, the second with a bias of its own scale -> y."""
    weights: dict[str, np.ndarray] = {
        "scale": np.float32(0.05),
        "zero": np.uint8(128),
        "other_scale": np.float32(0.05),
        "other_zero": np.uint8(128),
    }
    nodes = [
        node("QuantizeLinear", ["x", "scale", "zero"], ["xq"]),
        node("DequantizeLinear", ["xq", "scale", "zero"], ["h0"]),
    ]
    for number in (0, 1):
        scales = (rng.random(channels) / 100).astype(np.float32)
        bias_scales = scales * np.float32(0.05) * np.float32(1 + number)
        weights |= {
            f"w{number}": rng.integers(-127, 128, (channels, channels, 1, 1)).astype(np.int8),
            f"b{number}": rng.integers(-999, 999, channels).astype(np.int32),
            f"ws{number}": scales,
            f"bs{number}": bias_scales,
            f"z{number}": np.zeros(channels, np.int8),
        }
        output = f"h{number + 1}" if number == 0 else "y"
        nodes += [
            node("DequantizeLinear", [f"w{number}", f"ws{number}", f"z{number}"], [f"wf{number}"], axis=0),
            node("DequantizeLinear", [f"b{number}", f"bs{number}"], [f"bf{number}"], axis=0),
            node(
                "Conv",
                ["h0", f"wf{number}", f"bf{number}"],
                [output],
                group=1,
                strides=[1, 1],
                pads=[0, 0, 0, 0],
                dilations=[1, 1],
                kernel_shape=[1, 1],
            ),
        ]
    nodes[-1].input[0] = "h1"
    nodes.insert(-1, node("QuantizeLinear", ["h1", "other_scale", "other_zero"], ["hq"]))
    nodes.insert(-1, node("DequantizeLinear", ["hq", "other_scale", "other_zero"], ["hf"]))
    nodes[-1].input[0] = "hf"
    return model_of(nodes, weights, {"x": (1, channels, 5, 5)})


def test_equal_parameters_of_activations_are_stored_once_and_convolutions_state_nothing_twice(
    rng: np.random.Generator,
) -> None:
    before = coded_model(rng)
    after = shorten_names(before)
    assert_valid(after)
    zeros = [tensor for tensor in after.graph.initializer if tensor.data_type == TensorProto.UINT8]
    assert [numpy_helper.to_array(tensor) for tensor in zeros] == [128]
    of_weights = [tensor for tensor in after.graph.initializer if tensor.data_type == TensorProto.INT8]
    assert len([tensor for tensor in of_weights if len(tensor.dims) == 1]) == 2
    assert not any(conv.attribute for conv in after.graph.node if conv.op_type == "Conv")
    feeds = random_feeds(before, rng)
    np.testing.assert_array_equal(run(after, feeds)["y"], run(before, feeds)["y"])


def test_scales_of_biases_are_products_where_they_are_equal_to_them(rng: np.random.Generator) -> None:
    before = coded_model(rng)
    after = derive_bias_scales(before)
    assert_valid(after)
    products = [item for item in after.graph.node if item.op_type == "Mul"]
    assert [(list(item.input), list(item.output)) for item in products] == [(["scale", "ws0"], ["bs0"])]
    feeds = random_feeds(before, rng)
    np.testing.assert_array_equal(run(after, feeds)["y"], run(before, feeds)["y"])
    assert_stores_the_same(store_parameters(after), before)


def assert_stores_the_same(restored: onnx.ModelProto, before: onnx.ModelProto) -> None:
    stored = {tensor.name: tensor for tensor in before.graph.initializer}
    assert {tensor.name for tensor in restored.graph.initializer} == stored.keys()
    for tensor in restored.graph.initializer:
        np.testing.assert_array_equal(
            numpy_helper.to_array(tensor), numpy_helper.to_array(stored[tensor.name])
        )


def test_scale_of_a_bias_that_two_convolutions_read_is_one_product(rng: np.random.Generator) -> None:
    before = coded_model(rng)
    before.graph.node.append(node("Conv", ["h0", "wf0", "bf0"], ["second"], kernel_shape=[1, 1]))
    before.graph.output.append(helper.make_tensor_value_info("second", TensorProto.FLOAT, (1, 4, 5, 5)))
    after = derive_bias_scales(before)
    assert_valid(after)
    assert [item.op_type for item in after.graph.node].count("Mul") == 1
    feeds = random_feeds(before, rng)
    np.testing.assert_array_equal(run(after, feeds)["second"], run(before, feeds)["second"])


@pytest.mark.parametrize("is_exact", [False, True], ids=["as the processor", "exact products"])
def test_zero_points_and_short_biases_become_parts_of_two_tensors(
    rng: np.random.Generator, is_exact: bool
) -> None:
    before = coded_model(rng, channels=64)
    after = split_parameters(before)
    assert_valid(after)
    assert after.ByteSize() < before.ByteSize()
    parts = [list(item.output) for item in after.graph.node if item.op_type == "Split"]
    assert parts == [["z0", "z1"], ["b0", "b1"]]
    feeds = random_feeds(before, rng)
    settings = {"session.x64quantprecision": "1"} if is_exact else {}
    scores = [integer_run(model, feeds, settings) for model in (before, after)]
    np.testing.assert_array_equal(*scores)
    assert_stores_the_same(store_parameters(after), before)


def integer_run(
    model: onnx.ModelProto, feeds: Mapping[str, NDArray[Any]], settings: Mapping[str, str]
) -> NDArray[Any]:
    options = onnxruntime.SessionOptions()
    for name, value in settings.items():
        options.add_session_config_entry(name, value)
    return np.asarray(onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds)[0])


def test_biases_beyond_16_bits_stay_as_they_are(rng: np.random.Generator) -> None:
    before = coded_model(rng, channels=64)
    wide = next(tensor for tensor in before.graph.initializer if tensor.name == "b0")
    wide.CopyFrom(numpy_helper.from_array(np.full(64, 1 << 15, np.int32), "b0"))
    after = split_parameters(before)
    assert [list(item.output) for item in after.graph.node if item.op_type == "Split"] == [
        ["z0", "z1"],
        ["b1"],
    ]
    assert_stores_the_same(store_parameters(after), before)


def test_a_small_model_keeps_parameters_whose_nodes_would_be_larger(rng: np.random.Generator) -> None:
    before = coded_model(rng)
    assert split_parameters(before) == before
