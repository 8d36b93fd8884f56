import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgekit_runtime.errors import DataError, ModelError
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_toolkit.importers.onnx import load_onnx
from edgekit_toolkit.onnx_graph.specs import tensor_specs
from edgekit_toolkit.onnx_graph.traversal import nodes
from edgekit_toolkit.passes import fix_batch, fold_constants, resolve_conditions
from edgekit_toolkit.passes.file_form import convert_opset, separate_weights
from edgekit_toolkit.passes.foreign import CastsAddedError, ort_basic, simplify
from edgekit_toolkit.passes.leftovers import drop_unused, share_weights
from edgekit_toolkit.passes.optimiser import optimise
from edgekit_toolkit.passes.parity import compare
from edgekit_toolkit.samples.generated import bind_dims, generate_feeds

SHARED = Path(__file__).parents[3] / "shared" / "models" / "models"
ONNX_LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
RNG = np.random.default_rng(0)


def value(name, shape, dtype=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, dtype, shape)


def stored(name, array):
    return numpy_helper.from_array(np.asarray(array), name)


def model_of(nodes_, weights, inputs, outputs, opset=17, ir=8):
    graph = helper.make_graph(nodes_, "g", inputs, outputs, weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
    onnx.checker.check_model(made)
    return made


def conv_net(batch="N", opset=17):
    """Conv, BatchNormalization, Relu, a Reshape whose shape is computed from constants, and MatMul."""
    rng = np.random.default_rng(2)  # its own: a test alone sees the same weights as among others
    weights = [
        stored("w", rng.normal(size=(4, 3, 3, 3)).astype(np.float32)),
        *(stored(name, rng.random(4).astype(np.float32) + 0.5) for name in ("scale", "bias", "mean", "var")),
        stored("one", np.array([1], np.int64)),
        stored("dense", rng.normal(size=(144, 10)).astype(np.float32)),
    ]
    graph = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("BatchNormalization", ["c", "scale", "bias", "mean", "var"], ["n"]),
        helper.make_node("Relu", ["n"], ["r"]),
        helper.make_node("Constant", [], ["side"], value=stored("", np.array([144], np.int64))),
        helper.make_node("Neg", ["one"], ["minus"]),
        helper.make_node("Concat", ["minus", "side"], ["shape"], axis=0),
        helper.make_node("Reshape", ["r", "shape"], ["flat"]),
        helper.make_node("MatMul", ["flat", "dense"], ["y"]),
    ]
    return model_of(graph, weights, [value("x", (batch, 3, 8, 8))], [value("y", (batch, 10))], opset)


def operators(model):
    return [node.op_type for node in model.graph.node]


def run(model, feed):
    return OrtSession(model.SerializeToString(), OrtOptions(threads=1, optimise=False)).run(feed)


def feeds_of(model, n=2):
    inputs, _ = tensor_specs(model)
    return generate_feeds(inputs, n, seed=1, dims=bind_dims(model))


def assert_equal_outputs(before, after):
    for feed in feeds_of(before):
        verdict = compare(run(before, feed), run(after, feed))
        assert verdict.ok, verdict.reason


def step(result, name):
    return next(step for step in result.steps if step.name == name)


# The passes.


def test_weights_leave_the_inputs_and_the_file_version_rises():
    old = model_of(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [stored("w", np.eye(4, dtype=np.float32))],
        [value("x", (1, 4)), value("w", (4, 4))],
        [value("y", (1, 4))],
        opset=8,
        ir=3,
    )
    new = separate_weights(old)
    assert [item.name for item in new.graph.input] == ["x"]
    assert new.ir_version == 8
    assert len(old.graph.input) == 2  # a pass works on a copy


def test_constant_nodes_and_what_follows_from_them_become_initializers():
    before = conv_net()
    after = fold_constants.run(before)
    assert operators(after) == ["Conv", "BatchNormalization", "Relu", "Reshape", "MatMul"]
    shape = next(item for item in after.graph.initializer if item.name == "shape")
    assert numpy_helper.to_array(shape).tolist() == [-1, 144]
    assert "one" not in [item.name for item in after.graph.initializer]
    assert_equal_outputs(before, after)


@pytest.mark.parametrize(
    ("attribute", "given", "expected"),
    [
        ("value_float", 2.0, np.float32(2)),
        ("value_floats", [2.0, 3.0, 4.0, 5.0], np.array([2, 3, 4, 5], np.float32)),
    ],
)
def test_constant_given_as_plain_numbers_is_stored(attribute, given, expected):
    graph = [
        helper.make_node("Constant", [], ["k"], **{attribute: given}),
        helper.make_node("Mul", ["x", "k"], ["y"]),
    ]
    after = fold_constants.run(model_of(graph, [], [value("x", (1, 4))], [value("y", (1, 4))]))
    assert operators(after) == ["Mul"]
    assert np.array_equal(numpy_helper.to_array(after.graph.initializer[0]), expected)


def test_large_table_that_is_computed_stays_computed():
    graph = [
        helper.make_node("ConstantOfShape", ["size"], ["table"], value=stored("", np.array([3], np.float32))),
        helper.make_node("MatMul", ["x", "table"], ["y"]),
    ]
    weights = [stored("size", np.array([400, 400], np.int64))]
    before = model_of(graph, weights, [value("x", (1, 400))], [value("y", (1, 400))])
    assert operators(fold_constants.run(before)) == ["ConstantOfShape", "MatMul"]


def test_large_weight_is_transposed_when_that_needs_no_more_room():
    weight = RNG.normal(size=(200, 300)).astype(np.float32)
    graph = [
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["y"]),
    ]
    before = model_of(graph, [stored("w", weight)], [value("x", (1, 300))], [value("y", (1, 200))])
    after = fold_constants.run(before)
    assert operators(after) == ["MatMul"]
    assert np.array_equal(numpy_helper.to_array(after.graph.initializer[0]), weight.T)


def test_int8_weights_and_random_numbers_stay():
    graph = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["w"]),
        helper.make_node("RandomNormalLike", ["w"], ["noise"]),
        helper.make_node("Mul", ["w", "noise"], ["v"]),
        helper.make_node("MatMul", ["x", "v"], ["y"]),
    ]
    weights = [stored("q", np.ones((4, 4), np.int8)), stored("s", np.float32(0.1))]
    before = model_of(graph, weights, [value("x", (1, 4))], [value("y", (1, 4))])
    assert operators(fold_constants.run(before)) == operators(before)


def test_constant_that_is_an_output_is_still_given():
    graph = [
        helper.make_node("Constant", [], ["k"], value_float=2.0),
        helper.make_node("Neg", ["k"], ["y"]),
        helper.make_node("Mul", ["x", "y"], ["z"]),
    ]
    before = model_of(graph, [], [value("x", (1, 4))], [value("y", ()), value("z", (1, 4))])
    assert_equal_outputs(before, fold_constants.run(before))


def test_older_operator_set_is_raised_to_17_and_a_later_one_kept():
    before = conv_net(opset=12)
    after = convert_opset(before)
    assert after.opset_import[0].version == 17
    assert_equal_outputs(before, after)
    assert convert_opset(conv_net(opset=19)).opset_import[0].version == 19


def test_fixed_batch_reaches_inputs_outputs_and_what_is_between():
    after = fix_batch.run(conv_net(), 4)
    inputs, outputs = tensor_specs(after)
    assert inputs[0].shape == (4, 3, 8, 8)
    assert outputs[0].shape == (4, 10)
    shapes = {
        item.name: [d.dim_value for d in item.type.tensor_type.shape.dim] for item in after.graph.value_info
    }
    assert shapes["r"] == [4, 4, 6, 6]


def test_free_batch_and_output_dimension_keep_their_names():
    before = conv_net()
    before.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    inputs, outputs = tensor_specs(fix_batch.run(before, None))
    assert inputs[0].shape == ("N", 3, 8, 8)
    assert outputs[0].shape == ("rows", 10)


def test_size_of_a_free_output_dimension_is_found_once_the_batch_is_fixed():
    before = conv_net()
    before.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    _, outputs = tensor_specs(fix_batch.run(fold_constants.run(before), 2))
    assert outputs[0].shape == (2, 10)


def test_free_dimensions_without_names_get_different_ones():
    shape = ("?", 3, "?", "?")
    before = model_of([helper.make_node("Relu", ["x"], ["y"])], [], [value("x", shape)], [value("y", shape)])
    after = fix_batch.run(before, None)
    written = [size.dim_param for size in after.graph.input[0].type.tensor_type.shape.dim]
    assert written == ["x_0", "", "x_2", "x_3"]


def test_named_batch_of_a_state_is_fixed_on_its_own_axis():
    before = model_of(
        [helper.make_node("Add", ["x", "state"], ["y"])],
        [],
        [value("x", ("batch", 4)), value("state", (2, "batch", 4))],
        [value("y", (2, "batch", 4))],
    )
    inputs, outputs = tensor_specs(fix_batch.run(before, 3))
    assert [spec.shape for spec in (*inputs, *outputs)] == [(3, 4), (2, 3, 4), (2, 3, 4)]


def test_padding_and_operations_without_effect_are_simplified_away():
    graph = [
        helper.make_node("Identity", ["x"], ["i"]),
        helper.make_node("Pad", ["i", "pads"], ["p"]),
        helper.make_node("Conv", ["p", "w"], ["c"]),
        helper.make_node("Transpose", ["c"], ["t"], perm=[0, 2, 3, 1]),
        helper.make_node("Transpose", ["t"], ["y"], perm=[0, 3, 1, 2]),
    ]
    weights = [
        stored("pads", np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64)),
        stored("w", RNG.normal(size=(4, 3, 3, 3)).astype(np.float32)),
    ]
    before = model_of(graph, weights, [value("x", (1, 3, 8, 8))], [value("y", (1, 4, 8, 8))])
    after = simplify(before)
    assert operators(after)[:1] == ["Conv"]
    assert "Pad" not in operators(after)
    assert "Identity" not in operators(after)[:-1]
    assert_equal_outputs(before, after)


def test_batch_normalization_folds_into_the_convolution():
    before = fold_constants.run(conv_net())
    after = ort_basic(before)
    assert "BatchNormalization" not in operators(after)
    assert {node.domain for node in nodes(after)} == {""}
    assert [item.domain for item in after.opset_import] == [""]
    assert_equal_outputs(before, after)


def test_conversions_for_the_cpu_are_not_written_into_a_half_precision_model():
    graph = [helper.make_node("LpPool", ["x"], ["y"], kernel_shape=[2, 2])]
    shape = (1, 2, 8, 8)
    half = model_of(
        graph, [], [value("x", shape, TensorProto.FLOAT16)], [value("y", (1, 2, 7, 7), TensorProto.FLOAT16)]
    )
    with pytest.raises(CastsAddedError):
        ort_basic(half)


def test_equal_weights_are_stored_once_and_equal_biases_apart():
    weight = RNG.normal(size=(4, 4)).astype(np.float32)
    graph = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
        helper.make_node("Gemm", ["h", "w2", "b2"], ["y"]),
    ]
    weights = [
        stored("w1", weight),
        stored("b1", np.ones(4, np.float32)),
        stored("w2", weight),
        stored("b2", np.ones(4, np.float32)),
    ]
    before = model_of(graph, weights, [value("x", (1, 4))], [value("y", (1, 4))])
    after = share_weights(before)
    assert [item.name for item in after.graph.initializer] == ["w1", "b1", "b2"]
    assert_equal_outputs(before, after)


def test_equal_bytes_of_another_shape_or_dtype_are_not_shared():
    graph = [
        helper.make_node("Reshape", ["x", "a"], ["h"]),
        helper.make_node("Add", ["h", "p"], ["i"]),
        helper.make_node("Add", ["i", "q"], ["y"]),
    ]
    weights = [
        stored("a", np.array([0, 0], np.int64)),
        stored("p", np.zeros((1, 4), np.float32)),
        stored("q", np.zeros((4, 1), np.float32)),
    ]
    before = model_of(graph, weights, [value("x", (1, 4))], [value("y", (4, 4))])
    assert len(share_weights(before).graph.initializer) == 3


def test_nodes_and_weights_without_effect_are_dropped_and_inputs_stay():
    graph = [
        helper.make_node("Relu", ["x"], ["y"]),
        helper.make_node("MatMul", ["x", "w"], ["dead"]),
        helper.make_node("Neg", ["dead"], ["deader"]),
    ]
    before = model_of(
        graph,
        [stored("w", np.eye(4, dtype=np.float32))],
        [value("x", (1, 4)), value("unused", (1, 4))],
        [value("y", (1, 4))],
    )
    after = drop_unused(before)
    assert operators(after) == ["Relu"]
    assert not after.graph.initializer
    assert [item.name for item in after.graph.input] == ["x", "unused"]


def test_weight_read_only_inside_a_branch_is_kept():
    branches = [
        helper.make_graph([helper.make_node(op, ["x", "w"], [f"{op}_y"])], op, [], [value(f"{op}_y", (1, 4))])
        for op in ("Add", "Mul")
    ]
    before = model_of(
        [helper.make_node("If", ["flag"], ["y"], then_branch=branches[0], else_branch=branches[1])],
        [stored("w", np.full((1, 4), 3, np.float32))],
        [value("x", (1, 4)), value("flag", (), TensorProto.BOOL)],
        [value("y", (1, 4))],
    )
    for rewrite in (fold_constants.run, share_weights, drop_unused):
        assert_equal_outputs(before, rewrite(before))


# The chain.


def test_chain_goes_through_control_flow():
    branches = [
        helper.make_graph(
            [helper.make_node("Identity", ["x"], ["i"]), helper.make_node(op, ["i", "w"], [f"{op}_y"])],
            op,
            [],
            [value(f"{op}_y", (1, 4))],
        )
        for op in ("Add", "Mul")
    ]
    source = model_of(
        [helper.make_node("If", ["flag"], ["y"], then_branch=branches[0], else_branch=branches[1])],
        [stored("w", np.full((1, 4), 3, np.float32))],
        [value("x", (1, 4)), value("flag", (), TensorProto.BOOL)],
        [value("y", (1, 4))],
    )
    feeds = [
        {"x": np.arange(4, dtype=np.float32).reshape(1, 4), "flag": np.array(flag)} for flag in (True, False)
    ]
    result = optimise(source, batch=None, feeds=feeds)
    assert result.steps[-1].nodes_after < result.steps[0].nodes_before
    for feed in feeds:
        assert np.array_equal(run(source, feed)["y"], run(result.model, feed)["y"])


@pytest.mark.parametrize("batch", [None, 1])
def test_optimised_model_is_smaller_and_gives_the_same(batch):
    source = conv_net(opset=12)
    result = optimise(source, batch=batch, feeds=feeds_of(source))
    assert operators(result.model) == ["Conv", "Relu", "Reshape", "MatMul"]
    assert result.model.ByteSize() < source.ByteSize()
    assert_equal_outputs(source, result.model)
    assert [spec.name for specs in tensor_specs(result.model) for spec in specs] == ["x", "y"]


def test_steps_account_for_every_byte_and_node():
    source = conv_net()
    result = optimise(source, batch=None, feeds=feeds_of(source))
    assert result.steps[0].bytes_before == source.ByteSize()
    assert result.steps[-1].bytes_after == result.model.ByteSize()
    assert result.steps[-1].nodes_after == len(result.model.graph.node)
    for before, after in zip(result.steps, result.steps[1:], strict=False):
        assert (before.bytes_after, before.nodes_after) == (after.bytes_before, after.nodes_before)
    folded = step(result, "fold_constants")
    assert folded.applied
    assert folded.max_error is not None
    assert folded.max_error < 1e-6


def test_pass_that_has_nothing_to_do_says_so():
    source = conv_net()
    hardswish = step(optimise(source, batch=None, feeds=feeds_of(source)), "fuse_hardswish")
    assert not hardswish.applied
    assert hardswish.reason == "nothing to change"


def wrong_bias(model):
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    dense = next(item for item in changed.graph.initializer if list(item.dims) == [144, 10])
    array = numpy_helper.to_array(dense).copy()
    array[:, 3] += 0.01
    dense.CopyFrom(numpy_helper.from_array(array, dense.name))
    return changed


def renamed_output(model):
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    changed.graph.node[-1].output[0] = changed.graph.output[0].name = "renamed"
    return changed


def fixed_to_1(model):
    """A rewrite that is right for the batch of the feeds only."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    shape = next(item for item in changed.graph.initializer if item.name == "shape")
    shape.CopyFrom(numpy_helper.from_array(np.array([1, 144], np.int64), "shape"))
    return changed


def foreign_operator(model):
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    next(node for node in changed.graph.node if node.op_type == "Relu").CopyFrom(
        helper.make_node("FusedConv", ["n"], ["r"], domain="com.microsoft")
    )
    return changed


def broken_graph(model):
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    changed.graph.node[0].input[0] = "nowhere"
    return changed


def crashing(model):
    raise RuntimeError("assertion failed\nat line 3")


def bloated(model):
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    changed.graph.initializer.append(stored("table", np.ones(100_000, np.float32)))
    return changed


@pytest.mark.parametrize(
    ("faulty", "reason"),
    [
        (wrong_bias, "output 'y' differs by"),
        (renamed_output, "inputs and outputs became"),
        (fixed_to_1, "failed: "),
        (foreign_operator, "operators of com.microsoft came in"),
        (broken_graph, "failed: "),
        (crashing, "failed: assertion failed"),
        (bloated, "the model would grow by 4000"),
    ],
)
def test_faulty_pass_is_dropped_with_its_reason_and_the_rest_goes_on(monkeypatch, faulty, reason):
    monkeypatch.setattr(resolve_conditions, "run", faulty)
    source = conv_net()
    result = optimise(source, batch=None, feeds=feeds_of(source))
    dropped = step(result, "resolve_conditions")
    assert not dropped.applied
    assert dropped.reason.startswith(reason)
    assert "\n" not in dropped.reason
    assert dropped.bytes_after == dropped.bytes_before
    assert step(result, "ort_basic").applied
    assert_equal_outputs(source, result.model)


def test_lesser_form_of_a_pass_is_tried_and_the_reason_kept():
    source = conv_net()
    table = [
        helper.make_node("ConstantOfShape", ["size"], ["table"], value=stored("", np.array([3], np.float32))),
        helper.make_node("MatMul", ["y", "table"], ["z"]),
    ]
    source.graph.node.extend(table)
    source.graph.initializer.append(stored("size", np.array([10, 20_000], np.int64)))
    source.graph.output[0].CopyFrom(value("z", ("N", 20_000)))
    basic = step(optimise(source, batch=None, feeds=feeds_of(source)), "ort_basic")
    assert basic.reason.startswith("the model would grow by 799")  # about 10 * 20,000 float32
    assert basic.applied
    assert basic.nodes_after < basic.nodes_before


def test_relu_still_comes_before_depth_to_space_where_a_wider_convolution_would_be_too_large():
    weights = [
        stored("w", RNG.normal(size=(256 * 4, 2, 1, 1)).astype(np.float32)),
        stored("v", RNG.normal(size=(16, 256, 1, 1)).astype(np.float32)),
    ]
    graph = [
        helper.make_node("Conv", ["x", "w"], ["d"]),
        helper.make_node("DepthToSpace", ["d"], ["s"], blocksize=2, mode="CRD"),
        helper.make_node("Relu", ["s"], ["r"]),
        helper.make_node("Conv", ["r", "v"], ["y"]),
    ]
    source = model_of(graph, weights, [value("x", (1, 2, 3, 4))], [value("y", (1, 32, 6, 8))])
    result = optimise(source, batch=None, feeds=feeds_of(source))
    deferred = step(result, "defer_depth_to_space")
    assert deferred.applied
    assert "would grow by" in deferred.reason
    assert operators(result.model) == ["Conv", "Relu", "DepthToSpace", "Conv"]


def test_batch_of_a_model_that_fixes_another_is_refused():
    source = conv_net(batch=1)
    with pytest.raises(ModelError, match="no free batch that could be fixed to 4"):
        optimise(source, batch=4, feeds=feeds_of(source))
    assert optimise(source, batch=1, feeds=feeds_of(source)).model


def test_feeds_of_another_batch_are_refused():
    source = conv_net()
    with pytest.raises(DataError, match="have 1 samples, expected the batch 2"):
        optimise(source, batch=2, feeds=feeds_of(source))


def test_no_feeds_are_refused():
    with pytest.raises(DataError, match="no feeds"):
        optimise(conv_net(), batch=None, feeds=[])


def test_result_is_the_same_bytes_in_another_process(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(conv_net().SerializeToString())
    code = (
        "import sys, hashlib, pathlib\n"
        "from edgekit_toolkit.importers.onnx import load_onnx\n"
        "from edgekit_toolkit.samples.generated import bind_dims, generate_feeds\n"
        "from edgekit_toolkit.passes.optimiser import optimise\n"
        "source = load_onnx(pathlib.Path(sys.argv[1]))\n"
        "feeds = generate_feeds(source.inputs, 2, 1, bind_dims(source.model.proto))\n"
        "result = optimise(source.model.proto, batch=None, feeds=feeds)\n"
        "print(hashlib.sha256(result.model.SerializeToString()).hexdigest())\n"
    )
    environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "4711"}
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    source = load_onnx(path)
    feeds = generate_feeds(source.inputs, 2, 1, bind_dims(source.model.proto))
    here = optimise(source.model.proto, batch=None, feeds=feeds).model.SerializeToString()
    assert done.stdout.strip() == hashlib.sha256(here).hexdigest()


# Real models.


def test_real_topology_with_computed_weights_does_not_grow():
    source = load_onnx(ONNX_LIGHT / "light_squeezenet.onnx")
    result = optimise(source.model.proto, batch=1, feeds=feeds_of(source.model.proto, n=1))
    assert result.model.ByteSize() < source.size_bytes
    assert "Dropout" not in operators(result.model)
    assert_equal_outputs(source.model.proto, result.model)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real models in ../shared/models")
@pytest.mark.parametrize(
    ("name", "most_nodes"),
    [
        ("mnist8_fp32", 8),
        ("dscnn_kws_fp32", 22),
        ("resnet8_cifar10_fp32", 24),
        ("mobilenetv1_025_vww_fp32", 59),
        ("mobilenet_v1_025_224_fp32", 59),
    ],
)
@pytest.mark.parametrize("batch", [None, 1])
def test_real_model_is_optimised_with_every_pass_kept(name, most_nodes, batch):
    source = load_onnx(SHARED / f"{name}.onnx")
    result = optimise(source.model.proto, batch=batch, feeds=feeds_of(source.model.proto))
    assert [item for item in result.steps if not item.applied and item.reason != "nothing to change"] == []
    assert len(result.model.graph.node) <= most_nodes
    assert result.model.opset_import[0].version >= 17
    assert_equal_outputs(source.model.proto, result.model)


def test_step_whose_effect_no_output_shows_is_left_out():
    """The converter takes Hardmax before opset 13 for the present one, which has other rows."""
    none = [stored(name, np.array([number])) for name, number in (("first", 0), ("none", 0), ("axis", 0))]
    graph = [
        helper.make_node("Hardmax", ["x"], ["h"], axis=1),
        helper.make_node("Slice", ["h", "first", "none", "axis"], ["y"]),
    ]
    source = model_of(graph, none, [value("x", [2, 3, 4])], [value("y", [0, 3, 4])], opset=11)
    feeds = [{"x": RNG.normal(size=(2, 3, 4)).astype(np.float32)}]
    steps = {step.name: step for step in optimise(source, batch=None, feeds=feeds).steps}
    assert not steps["convert_opset"].applied
    assert "output 'y' has no values on any input" in steps["convert_opset"].reason


def test_output_with_values_only_beyond_the_samples_is_compared_there():
    nodes_ = [
        helper.make_node("Greater", ["x", "limit"], ["large"]),
        helper.make_node("Compress", ["x", "large"], ["y"]),
        helper.make_node("Identity", ["y"], ["z"]),
    ]
    limit = [stored("limit", np.float32(10))]
    source = model_of(nodes_, limit, [value("x", [8])], [value("z", ["n"])])
    feeds = [{"x": np.ones(8, np.float32)}]
    steps = {step.name: step for step in optimise(source, batch=None, feeds=feeds).steps}
    assert steps["simplify"].applied
