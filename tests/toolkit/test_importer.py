import hashlib
import os
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from tests.toolkit.cases import cases

from edgekit_runtime.errors import ModelError
from edgekit_toolkit.importers.onnx import load_onnx, older_set_notes
from edgekit_toolkit.onnx_graph.index import opset as opset_of

SHARED = Path(__file__).parents[3] / "shared" / "models" / "models"
ONNX_LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def value(name, shape=("N", 4), dtype=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, dtype, shape)


def weights(name="w", array=None):
    return numpy_helper.from_array(np.eye(4, dtype=np.float32) if array is None else array, name)


def linear(*, nodes=None, inits=None, inputs=None, outputs=None, opset=17, ir=8, domains=()):
    """A MatMul by the identity, with any part replaced."""
    graph = helper.make_graph(
        nodes or [helper.make_node("MatMul", ["x", "w"], ["y"], name="multiply")],
        "linear",
        [value("x")] if inputs is None else inputs,
        [value("y")] if outputs is None else outputs,
        [weights()] if inits is None else inits,
    )
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir)


def saved(tmp_path, model, name="model.onnx"):
    path = tmp_path / name
    path.write_bytes(model.SerializeToString())
    return path


def refused(path, message, **limits):
    with pytest.raises(ModelError, match=message) as caught:
        load_onnx(path, **limits)
    assert str(caught.value).startswith(f"{path}: ")


def test_model_is_read_with_its_specs_size_and_digest(tmp_path):
    path = saved(tmp_path, linear())
    source = load_onnx(path)
    content = path.read_bytes()
    assert source.sha256 == hashlib.sha256(content).hexdigest()
    assert source.size_bytes == len(content)
    assert [(spec.name, spec.dtype, spec.shape) for spec in source.inputs] == [("x", "float32", ("N", 4))]
    assert [(spec.name, spec.dtype, spec.shape) for spec in source.outputs] == [("y", "float32", ("N", 4))]


def test_input_file_is_not_touched(tmp_path):
    path = saved(tmp_path, linear())
    before = (path.read_bytes(), path.stat().st_mtime_ns, sorted(tmp_path.iterdir()))
    load_onnx(path)
    assert (path.read_bytes(), path.stat().st_mtime_ns, sorted(tmp_path.iterdir())) == before


def test_inputs_that_are_weights_are_no_inputs(tmp_path):
    source = load_onnx(saved(tmp_path, linear(inputs=[value("x"), value("w", (4, 4))], ir=3)))
    assert [spec.name for spec in source.inputs] == ["x"]


@pytest.mark.parametrize("free", [None, "?", -1])
def test_free_dimension_without_a_name_is_called_after_its_place(tmp_path, free):
    source = load_onnx(saved(tmp_path, linear(inputs=[value("x", (free, 4))])))
    assert source.inputs[0].shape == ("x_0", 4)


def test_output_without_a_shape_gets_the_inferred_one(tmp_path):
    source = load_onnx(saved(tmp_path, linear(outputs=[value("y", None)])))
    assert source.outputs[0].shape == ("N", 4)


def test_branches_of_control_flow_are_read(tmp_path):
    branch = [
        helper.make_graph([helper.make_node(op, ["x"], [f"{op}_out"])], op, [], [value(f"{op}_out")])
        for op in ("Relu", "Neg")
    ]
    node = helper.make_node("If", ["flag"], ["y"], then_branch=branch[0], else_branch=branch[1])
    inputs = [value("x"), value("flag", (), TensorProto.BOOL)]
    assert len(load_onnx(saved(tmp_path, linear(nodes=[node], inits=[], inputs=inputs))).inputs) == 2


def test_functions_of_the_model_are_written_out(tmp_path):
    function = helper.make_function(
        "own",
        "Double",
        ["a"],
        ["b"],
        [helper.make_node("Add", ["a", "a"], ["b"])],
        [helper.make_opsetid("", 17)],
    )
    model = linear(nodes=[helper.make_node("Double", ["x"], ["y"], domain="own")], inits=[], domains=["own"])
    model.functions.append(function)
    source = load_onnx(saved(tmp_path, model))
    assert [node.op_type for node in source.model.proto.graph.node] == ["Add"]
    assert not source.model.proto.functions


# What is not an ONNX model.

OTHER_FILES = {
    "empty": (b"", "is empty"),
    "random": (np.random.default_rng(0).bytes(5000), "not an ONNX model"),
    "text": (b"epoch,loss\n1,0.5\n", "text that begins with 'epoch"),
    "tflite": (b"\x1c\0\0\0TFL3" + bytes(100), "a LiteRT .* model, not an ONNX model"),
    "torch": (b"PK\x03\x04" + bytes(100), r"torch\.onnx\.export"),
    "pickle": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + bytes(50), "pickle.*torch"),
    "keras": (b"\x89HDF\r\n\x1a\n" + bytes(100), "Keras"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
    "zeros": (bytes(1000), "not an ONNX model"),
}


@cases(("content", "message"), OTHER_FILES.values(), ids=OTHER_FILES.keys())
def test_file_of_another_kind_is_named_with_the_next_step(tmp_path, content, message):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    refused(path, message)


def test_tensorflow_folder_is_named_with_the_next_step(tmp_path):
    (tmp_path / "saved_model.pb").write_bytes(b"\x08\x01\x12\x03abc")
    refused(tmp_path, r"SavedModel; .*--python ENV")
    refused(tmp_path / "saved_model.pb", r"SavedModel; .*--python ENV")


def test_missing_file_is_refused(tmp_path):
    refused(tmp_path / "none.onnx", "no such file")


def test_fifo_is_refused_without_waiting_for_a_writer(tmp_path):
    os.mkfifo(tmp_path / "model.onnx")
    refused(tmp_path / "model.onnx", "not a regular file")


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_truncated_model_is_refused_as_truncated(tmp_path, share):
    path = saved(tmp_path, linear(inits=[weights(array=np.ones((4, 400), np.float32))]))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    refused(path, r"truncated: a part of \d+ bytes")


@settings(max_examples=150)
@given(st.data())
def test_damaged_model_is_loaded_or_refused_but_never_crashes(tmp_path_factory, data):
    content = bytearray(linear().SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "model.onnx"
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    try:
        source = load_onnx(path)
    except ModelError as err:
        assert str(err).startswith(str(path))
    else:
        assert source.inputs


def test_file_over_the_size_limit_is_refused(tmp_path):
    path = saved(tmp_path, linear())
    size = path.stat().st_size
    assert load_onnx(path, max_bytes=size).size_bytes == size
    refused(path, f"at most {size - 1} are allowed", max_bytes=size - 1)


# Models that cannot run.


def test_unknown_operator_is_named_with_node_and_domain(tmp_path):
    model = linear(nodes=[helper.make_node("Frobnicate", ["x", "w"], ["y"], name="seven")])
    refused(saved(tmp_path, model), "operator 'Frobnicate' at node 'seven' is not in ai.onnx opset 17")


def test_operator_of_a_custom_domain_is_named_with_its_node(tmp_path):
    model = linear(
        nodes=[helper.make_node("Gelu", ["x"], ["y"], name="act", domain="com.microsoft")],
        domains=["com.microsoft"],
    )
    refused(saved(tmp_path, model), r"'Gelu' of the custom domain 'com\.microsoft' at node 'act'")


def test_unknown_operator_inside_a_branch_is_found(tmp_path):
    branches = [
        helper.make_graph([helper.make_node(op, ["x"], [f"{op}_out"])], op, [], [value(f"{op}_out")])
        for op in ("Relu", "Frobnicate")
    ]
    node = helper.make_node("If", ["flag"], ["y"], then_branch=branches[0], else_branch=branches[1])
    inputs = [value("x"), value("flag", (), TensorProto.BOOL)]
    refused(
        saved(tmp_path, linear(nodes=[node], inits=[], inputs=inputs)), "'Frobnicate' at the node that makes"
    )


def test_operator_without_a_kernel_for_its_types_is_named(tmp_path):
    model = linear(
        nodes=[helper.make_node("Det", ["x"], ["y"], name="det")],
        inits=[],
        inputs=[value("x", (4, 4), TensorProto.DOUBLE)],
        outputs=[value("y", (), TensorProto.DOUBLE)],
    )
    refused(saved(tmp_path, model), r"operator 'Det' \(version 11\) at node 'det' \(ai.onnx\) does not run")


@pytest.mark.parametrize(("opset", "age"), [(6, "old"), (99, "new")])
def test_operator_set_out_of_range_is_refused(tmp_path, opset, age):
    refused(saved(tmp_path, linear(opset=opset)), f"opset {opset} is too {age}.*opset_version=17")


def test_missing_operator_set_is_refused(tmp_path):
    model = linear()
    del model.opset_import[:]
    refused(saved(tmp_path, model), "no standard operator set")


def test_newer_file_version_is_refused(tmp_path):
    refused(saved(tmp_path, linear(ir=60)), "higher than the checker's|IR version 60")


@cases(
    ("parts", "message"),
    [
        ({"inputs": [], "nodes": [helper.make_node("Identity", ["w"], ["y"])]}, "no inputs"),
        ({"outputs": []}, "no outputs"),
        ({"outputs": [value("y", ("N", 4))] * 2}, "output 'y' is listed twice"),
        ({"inits": [weights(), weights()]}, "not unique"),
        ({"inits": []}, "'w'"),
        ({"inits": [weights(array=np.ones((5, 4), np.float32))]}, "Incompatible dimensions"),
        ({"nodes": [helper.make_node("Relu", ["x"], ["y"])] * 2}, "single static assignment"),
        ({"inputs": [value("x", None)]}, "no known number of dimensions"),
        ({"inputs": [value("x", ("N", 4), TensorProto.STRING)]}, "input 'x' holds strings"),
        ({"inputs": [value("x", ("N", 4), TensorProto.BFLOAT16)]}, "input 'x' holds bfloat16"),
    ],
)
def test_model_that_could_not_run_is_refused(tmp_path, parts, message):
    refused(saved(tmp_path, linear(**parts)), message)


def test_sequence_input_is_refused(tmp_path):
    sequence = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, ("N",))
    refused(saved(tmp_path, linear(inputs=[value("x"), sequence])), "input 's' holds a sequence")


# Weights that are not numbers.


def test_nan_weights_are_counted_and_named(tmp_path):
    array = np.eye(4, dtype=np.float32)
    array[0, :2] = np.nan
    array[1, 0] = np.inf
    refused(
        saved(tmp_path, linear(inits=[weights(array=array)])),
        "weight 'w' .* 2 NaN and 1 infinite values of 16",
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_nan_in_other_float_types_is_found(tmp_path, dtype):
    refused(
        saved(tmp_path, linear(inits=[weights(), weights("v", np.array([np.nan, 1], dtype))])), "weight 'v'"
    )


def test_nan_in_a_constant_node_is_found(tmp_path):
    constant = helper.make_node(
        "Constant", [], ["w"], value=weights(array=np.full((4, 4), np.nan, np.float32))
    )
    model = linear(nodes=[constant, helper.make_node("MatMul", ["x", "w"], ["y"])], inits=[])
    refused(saved(tmp_path, model), "weight 'w' .* 16 NaN")


def test_infinite_bounds_and_masks_are_allowed(tmp_path):
    mask = np.triu(np.full((4, 4), -np.inf, np.float32), k=1)
    nodes = [
        helper.make_node("Add", ["x", "mask"], ["masked"]),
        helper.make_node("Max", ["masked", "low"], ["y"]),
    ]
    inits = [weights("mask", mask), weights("low", np.array(-np.inf, np.float32))]
    assert load_onnx(saved(tmp_path, linear(nodes=nodes, inits=inits)))


def test_mask_with_a_bias_for_each_distance_is_allowed_and_an_infinite_weight_is_not(tmp_path):
    distances = np.subtract.outer(np.arange(4), np.arange(4)).astype(np.float32)
    mask = np.where(distances < 0, np.float32(-np.inf), -distances / 8)
    nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
    assert load_onnx(saved(tmp_path, linear(nodes=nodes, inits=[weights(array=mask)])))
    refused(saved(tmp_path, linear(inits=[weights(array=mask)])), "0 NaN and 6 infinite values")


# External data.


def with_external(tmp_path, location="model.data", array=None, write=True, **entries):
    array = np.eye(4, dtype=np.float32) if array is None else array
    model = linear()
    tensor = model.graph.initializer[0]
    raw, tensor.raw_data = tensor.raw_data, b""
    tensor.data_location = TensorProto.EXTERNAL
    for key, entry in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(entry))
    if write:
        (tmp_path / location).write_bytes(raw)
    return saved(tmp_path, model)


def test_external_data_are_merged_in_and_part_of_size_and_digest(tmp_path):
    path = with_external(tmp_path, offset=0, length=64)
    source = load_onnx(path)
    stored = source.model.proto.graph.initializer[0]
    assert np.array_equal(numpy_helper.to_array(stored), np.eye(4))
    assert stored.data_location == TensorProto.DEFAULT
    assert source.size_bytes == path.stat().st_size + 64
    (tmp_path / "model.data").write_bytes(np.ones((4, 4), np.float32).tobytes())
    assert load_onnx(path).sha256 != source.sha256


def test_external_data_in_a_folder_below_are_read(tmp_path):
    (tmp_path / "parts").mkdir()
    path = with_external(tmp_path, "parts/w.bin")
    assert load_onnx(path).size_bytes > 64


def test_missing_external_data_are_named(tmp_path):
    path = with_external(tmp_path, "gone.bin", write=False)
    refused(path, "tensor 'w' is stored in 'gone.bin', and there is no such file")


@cases(
    "location",
    ["../secret.bin", "a/../../secret.bin", "/etc/hostname", "C:\\secret.bin", "..\\secret.bin", "C:x"],
)
def test_external_data_outside_the_folder_are_refused_unread(tmp_path, location):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(64))
    refused(with_external(folder, location, write=False), "outside the model's folder .* refused unread")


def test_external_data_through_a_link_that_leaves_the_folder_are_refused(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(64))
    (folder / "w.bin").symlink_to(tmp_path / "secret.bin")
    refused(with_external(folder, "w.bin", write=False), "refused unread.*link leads to")


def test_external_data_through_a_linked_folder_that_leaves_are_refused(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "w.bin").write_bytes(bytes(64))
    (folder / "below").symlink_to(outside)
    refused(with_external(folder, "below/w.bin", write=False), "refused unread")


def test_link_to_external_data_inside_the_folder_is_followed(tmp_path):
    path = with_external(tmp_path)
    (tmp_path / "model.data").rename(tmp_path / "real.bin")
    (tmp_path / "model.data").symlink_to("real.bin")
    assert load_onnx(path).size_bytes > 64


def cached(tmp_path):
    """Return a model and its data as Hugging Face's cache holds them: links into one folder of blobs."""
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "1f3a" / "onnx"
    snapshot.mkdir(parents=True)
    with_external(tmp_path / "blobs").rename(tmp_path / "blobs" / "6c1e")
    (tmp_path / "blobs" / "model.data").rename(tmp_path / "blobs" / "98b0")
    (snapshot / "model.onnx").symlink_to("../../../blobs/6c1e")
    (snapshot / "model.data").symlink_to("../../../blobs/98b0")
    return snapshot / "model.onnx"


def test_model_in_a_cache_of_links_is_read_with_its_external_data(tmp_path):
    assert load_onnx(cached(tmp_path)).size_bytes > 64


def test_model_in_a_cache_of_links_whose_data_lead_elsewhere_is_refused_unread(tmp_path):
    path = cached(tmp_path)
    (tmp_path / "secret.bin").write_bytes(bytes(64))
    (path.parent / "model.data").unlink()
    (path.parent / "model.data").symlink_to(tmp_path / "secret.bin")
    refused(path, "refused unread.*link leads to")


@cases(
    ("entries", "message"),
    [
        ({"offset": 8}, r"bytes 8\.\.72 of model\.data are named, which has 64"),
        ({"offset": -8}, "are named"),
        ({"length": 1 << 40}, "are named, which has 64"),
        ({"length": 60}, "60 external bytes are named, expected 64"),
        ({"offset": "zero"}, "not a number"),
        ({"location": ""}, "names no file"),
    ],
)
def test_external_range_that_does_not_fit_is_refused(tmp_path, entries, message):
    path = with_external(tmp_path)
    model = onnx.load(path, load_external_data=False)
    for key, entry in entries.items():
        kept = [item for item in model.graph.initializer[0].external_data if item.key != key]
        del model.graph.initializer[0].external_data[:]
        model.graph.initializer[0].external_data.extend(kept)
        model.graph.initializer[0].external_data.add(key=key, value=str(entry))
    refused(saved(tmp_path, model), message)


def test_many_tensors_in_the_same_external_bytes_count_each_time(tmp_path):
    path = with_external(tmp_path)
    model = onnx.load(path, load_external_data=False)
    for index in range(100):
        model.graph.initializer.add().CopyFrom(model.graph.initializer[0])
        model.graph.initializer[-1].name = f"copy{index}"
    path = saved(tmp_path, model)
    limit = path.stat().st_size + 100 * 64
    refused(path, "external weights add up to 6464 bytes", max_bytes=limit)


def test_external_data_named_inside_a_branch_are_refused_too(tmp_path):
    inner = weights()
    inner.raw_data = b""
    inner.data_location = TensorProto.EXTERNAL
    inner.external_data.add(key="location", value="../secret.bin")
    branches = [
        helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["z"])], "b", [], [value("z")], [inner])
        for _ in range(2)
    ]
    node = helper.make_node("If", ["flag"], ["y"], then_branch=branches[0], else_branch=branches[1])
    inputs = [value("x"), value("flag", (), TensorProto.BOOL)]
    refused(saved(tmp_path, linear(nodes=[node], inits=[], inputs=inputs)), "refused unread")


# Real models.


@pytest.mark.parametrize("name", ["light_squeezenet", "light_shufflenet", "light_bvlc_alexnet"])
def test_real_topology_of_the_onnx_suite_is_read(name):
    source = load_onnx(ONNX_LIGHT / f"{name}.onnx")
    assert len(source.inputs) == 1
    assert source.inputs[0].shape == (1, 3, 224, 224)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real models in ../shared/models")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mnist8_fp32", (1, 1, 28, 28)),
        ("resnet8_cifar10_fp32", ("unk__126", 32, 32, 3)),
        ("dscnn_kws_fp32", ("N", 49, 10, 1)),
        ("efficientnet_lite0_fp32", ("N", 3, 224, 224)),
    ],
)
def test_real_model_is_read(name, shape):
    source = load_onnx(SHARED / f"{name}.onnx")
    assert source.inputs[0].shape == shape


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real models in ../shared/models")
def test_real_tflite_model_is_named_with_the_next_step():
    refused(SHARED / "resnet8_cifar10_fp32.tflite", "a LiteRT .* model, not an ONNX model")


def test_data_file_in_the_place_of_a_model_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr("x.npy", b"")
    refused(tmp_path / "d.npz", "ZIP archive")


def test_name_that_is_not_text_is_refused(tmp_path):
    path = saved(tmp_path, linear())
    path.write_bytes(path.read_bytes().replace(b"multiply", b"multipl\xff"))
    refused(path, r"NodeProto\.name is not UTF-8 text")


def test_input_without_a_name_is_refused(tmp_path):
    refused(saved(tmp_path, linear(inputs=[value("x"), value("")])), "input: .* name is ''")


@cases(("opset", "expected"), [(17, 10), (22, 10), (23, 11), (25, 13)])
def test_newest_ir_version_becomes_the_lowest_that_the_operator_set_allows(tmp_path, opset, expected):
    model = linear(opset=opset, ir=onnx.IR_VERSION)
    assert load_onnx(saved(tmp_path, model)).model.proto.ir_version == expected


def test_sparse_weights_become_dense_ones_with_the_same_result(tmp_path):
    dense = np.array([[0, 2, 0, 0], [1, 0, 0, 3], [0] * 4, [0, 0, 4, 0]], np.float32)
    places = np.flatnonzero(dense)
    values = numpy_helper.from_array(dense.ravel()[places], "w")
    model = linear(inits=[weights("unread")])
    model.graph.sparse_initializer.append(
        helper.make_sparse_tensor(values, numpy_helper.from_array(places, "places"), dense.shape)
    )
    graph = load_onnx(saved(tmp_path, model)).model.proto.graph
    assert not graph.sparse_initializer
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    np.testing.assert_array_equal(stored["w"], dense)


@pytest.mark.parametrize(
    ("dims", "places", "message"),
    [([4, 4], [99], "sparse weight 'w' is not valid"), ([1 << 20, 1 << 20], [1], "larger than 2000000000")],
)
def test_sparse_weights_beyond_their_shape_or_the_limit_are_refused(tmp_path, dims, places, message):
    values = numpy_helper.from_array(np.ones(1, np.float32), "w")
    model = linear(inits=[weights("unread")])
    indices = numpy_helper.from_array(np.array(places), "places")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, dims))
    refused(saved(tmp_path, model), message)


def test_weight_without_a_shape_that_is_also_an_output_leaves_the_others_their_shapes(tmp_path):
    model = linear(outputs=[value("y"), value("w")])
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    outputs = load_onnx(saved(tmp_path, model)).outputs
    assert [(spec.name, spec.shape) for spec in outputs] == [("y", ("N", 4)), ("w", (4, 4))]


@pytest.mark.parametrize(
    ("starts", "ends", "axis", "shape"), [(1, -1, 1, ("N", "y_1", 4)), (0, 1, 0, ("y_0", "L", 4))]
)
def test_axis_that_a_slice_of_opset_10_cuts_loses_its_name(tmp_path, starts, ends, axis, shape):
    model = linear(
        nodes=[helper.make_node("Slice", ["x", "starts", "ends", "axis"], ["y"])],
        inits=[
            weights(name, np.array([number]))
            for name, number in (("starts", starts), ("ends", ends), ("axis", axis))
        ],
        inputs=[value("x", ("N", "L", 4))],
        opset=10,
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    assert load_onnx(saved(tmp_path, model)).outputs[0].shape == shape


def test_output_whose_rank_is_inferred_wrong_has_free_axes(tmp_path):
    kernel = weights("w", np.ones((3, 4, 3, 3), np.float32))
    cropped = helper.make_node("ConvTranspose", ["x", "w"], ["y"], output_shape=[4, 4])
    model = linear(nodes=[cropped], inits=[kernel], inputs=[value("x", (1, 3, 6, 6))])
    model.graph.output[0].type.tensor_type.ClearField("shape")
    assert load_onnx(saved(tmp_path, model)).outputs[0].shape == ("y_0", "y_1", "y_2", "y_3")


@pytest.mark.parametrize("ir", [10, onnx.IR_VERSION])
def test_operator_set_that_the_engine_does_not_read_is_converted_with_a_sentence(tmp_path, ir):
    stated = onnx.defs.onnx_opset_version()
    source = load_onnx(saved(tmp_path, linear(opset=stated, ir=ir)))
    used = opset_of(source.model.proto)
    if used == stated:
        pytest.skip("onnxruntime reads all operator sets of this onnx")
    (note,) = older_set_notes(source)
    assert f"opset {stated} yet; the model is converted to opset {used}" in note


def test_operator_set_that_the_engine_reads_has_no_sentence(tmp_path):
    assert older_set_notes(load_onnx(saved(tmp_path, linear()))) == []
