"""Head and tail give what the whole model gives; what cannot be cut is refused."""

import random
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tests.offload.onnx_models import model_of
from tests.toolkit.cases import cases

from edgekit_offload.partition import source_model
from edgekit_offload.partition.coding import Coding
from edgekit_offload.partition.source_model import SourceModel
from edgekit_offload.partition.split import Part, SplitModels, split_model, whole_upload
from edgekit_runtime.errors import CutError
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession

TINY = Path(__file__).parents[2] / "models" / "tiny"
MODELS = sorted(path.stem for path in TINY.glob("*.onnx"))
Feeds = dict[str, NDArray[np.float32]]


def run_part(part: Part, weights: bytes, feeds: Feeds, *, optimise: bool = True) -> Feeds:
    options = OrtOptions(threads=1, optimise=optimise, weights="model.onnx")
    session = OrtSession(part.content, options, weights)
    return session.run({spec.name: feeds[spec.name] for spec in part.inputs})


def run_split(split: SplitModels, whole: bytes, feeds: Feeds, *, optimise: bool = True) -> Feeds:
    """All outputs of the model, from the head or the tail."""
    head = feeds if split.head is None else run_part(split.head, whole, feeds, optimise=optimise)
    sent = {spec.name for spec in split.sent}
    assert [spec.name for spec in split.tail.inputs] == [spec.name for spec in split.sent]
    return {**head, **run_part(split.tail, whole, {name: head[name] for name in sent}, optimise=optimise)}


def random_model(seed: int) -> tuple[bytes, list[tuple[str, list[str], list[str]]]]:
    """A graph of up to 14 nodes with several inputs and outputs, shared weights and constant nodes."""
    rng = random.Random(seed)
    inputs = [f"in{i}" for i in range(rng.randint(1, 3))]
    known, nodes = list(inputs), []
    weights = {
        "w0": np.random.default_rng(seed).normal(size=(24, 24)).astype(np.float32),
        "w1": np.float32(0.5),
        "b": np.arange(24, dtype=np.float32),
    }
    for index in range(rng.randint(2, 14)):
        kind = rng.choice(["Add", "Mul", "MatMul", "Relu", "Tanh", "Split", "Constant", "Identity"])
        read = rng.choice(known)
        made = [f"t{index}"]
        if kind == "Constant":
            nodes.append(
                ("Neg", [rng.choice(["b", *[n for n in known if n.startswith("k")]])], [f"k{index}"])
            )
            nodes.append(("Add", [read, f"k{index}"], made))
        elif kind == "MatMul":
            nodes.append((kind, [read, "w0"], made))
        elif kind in ("Add", "Mul"):
            nodes.append((kind, [read, rng.choice([*known, "w1", "b"])], made))
        elif kind == "Split":
            nodes.append(("TopK", [read, "k24"], [f"t{index}", f"i{index}"]))
        else:
            nodes.append((kind, [read], made))
        known += made
    made_all = [name for name in known if name.startswith("t")]
    outputs = sorted({made_all[-1], *rng.sample(made_all, min(len(made_all), rng.randint(1, 3)))})
    content = model_of(
        nodes,
        dict.fromkeys(inputs, ("N", 24)),
        outputs,
        weights={**weights, "k24": np.array([24], np.int64)},
    )
    return content, nodes


def random_closed_set(seed: int, nodes: list[tuple[str, list[str], list[str]]]) -> list[int]:
    """Nodes of a random device side: all that a node needs is in it."""
    rng = random.Random(seed + 1)
    share = rng.random()
    made: set[str] = set()
    chosen = []
    behind = {name for _, _, names in nodes for name in names}
    for index, (_, read, names) in enumerate(nodes):
        if rng.random() < share and all(name in made or name not in behind for name in read):
            chosen.append(index)
            made.update(names)
    return chosen


@pytest.mark.parametrize("block", range(10))
def test_every_closed_set_of_a_random_graph_gives_the_whole_models_outputs(block: int) -> None:
    cut = 0
    for seed in range(block * 30, block * 30 + 30):
        content, nodes = random_model(seed)
        device = random_closed_set(seed, nodes)
        whole = SourceModel(content)
        rng = np.random.default_rng(seed)
        feeds = {name: rng.normal(size=(2, 24)).astype(np.float32) for name in whole.inputs}
        try:
            split = split_model(whole, device)
        except CutError as error:
            assert "nothing" in str(error)  # all on the device, or a side that needs no input
            continue
        cut += 1
        expected = OrtSession(content, OrtOptions(threads=1, optimise=False)).run(feeds)
        got = run_split(split, content, feeds, optimise=False)
        for name, value in expected.items():
            np.testing.assert_array_equal(got[name], value, err_msg=f"seed {seed}, output {name}")
    assert cut >= 15


@pytest.mark.parametrize("name", MODELS)
def test_every_cut_of_a_real_model_gives_its_answers(name: str) -> None:
    content = (TINY / f"{name}.onnx").read_bytes()
    whole = SourceModel(content)
    samples = np.load(TINY / f"{name}.eval.npz")[whole.inputs[0]][:4]
    feeds = {whole.inputs[0]: samples}
    expected = OrtSession(content, OrtOptions(threads=1)).run(feeds)["logits"]
    for count in range(len(whole.proto.graph.node)):
        split = split_model(whole, range(count))
        got = run_split(split, content, feeds)["logits"]
        # A fusion over the cut, such as Conv + Add + Relu, may round its last bits in another order.
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
        assert len(split.tail.content) < 25_000  # the weights stay in the model's file


def test_weights_lie_in_the_models_own_file() -> None:
    content = (TINY / "mnist5k_dscnn.onnx").read_bytes()
    tail = onnx.load_from_string(split_model(content, range(3)).tail.content)
    weights = {tensor.name: tensor for tensor in onnx.load_from_string(content).graph.initializer}
    external = [tensor for tensor in tail.graph.initializer if tensor.external_data]
    assert external
    for tensor in external:
        place = {entry.key: entry.value for entry in tensor.external_data}
        start, length = int(place["offset"]), int(place["length"])
        assert place["location"] == "model.onnx"
        assert content[start : start + length] == numpy_helper.to_array(weights[tensor.name]).tobytes()


@pytest.mark.parametrize("optimise", ["ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"])
def test_model_that_onnxruntime_saved_optimised_is_cut(tmp_path: Path, optimise: str) -> None:
    settings = onnxruntime.SessionOptions()
    settings.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    settings.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, optimise)
    settings.log_severity_level = 4
    onnxruntime.InferenceSession(str(TINY / "digits_cnn.onnx"), settings, providers=["CPUExecutionProvider"])
    content = (tmp_path / "optimised.onnx").read_bytes()
    whole = SourceModel(content)
    assert any(node.domain.startswith("com.microsoft") for node in whole.proto.graph.node)
    samples = np.load(TINY / "digits_cnn.eval.npz")["image"][:3]
    expected = OrtSession(content, OrtOptions(threads=1, optimise=False)).run({"image": samples})["logits"]
    for count in range(len(whole.proto.graph.node) - 1):
        split = split_model(whole, range(count))
        got = run_split(split, content, {"image": samples}, optimise=False)["logits"]
        np.testing.assert_array_equal(got, expected)  # the same kernels run, so not a bit differs


def test_quantized_model_is_cut_at_codes() -> None:
    weights = {
        "w": np.random.default_rng(0).integers(-90, 90, (24, 8)).astype(np.int8),
        "s": np.float32(0.02),
        "z": np.int8(0),
    }
    content = model_of(
        [
            ("QuantizeLinear", ["x", "s", "z"], ["q"]),
            ("DequantizeLinear", ["q", "s", "z"], ["xd"]),
            ("DequantizeLinear", ["w", "s", "z"], ["wd"]),
            ("MatMul", ["xd", "wd"], ["y"]),
        ],
        {"x": ("N", 24)},
        ["y"],
        weights=weights,
    )
    split = split_model(content, [0], Coding("int8"))
    assert [(spec.name, spec.dtype, spec.shape) for spec in split.sent] == [("q", "int8", ("N", 24))]
    x = np.random.default_rng(1).normal(size=(3, 24)).astype(np.float32)
    expected = OrtSession(content, OrtOptions(threads=1, optimise=False)).run({"x": x})["y"]
    np.testing.assert_array_equal(run_split(split, content, {"x": x}, optimise=False)["y"], expected)


def test_inputs_that_vanish_and_outputs_of_the_device_go_where_they_belong() -> None:
    content = model_of(
        [("Relu", ["a"], ["early"]), ("Neg", ["early"], ["mid"]), ("Add", ["mid", "b"], ["late"])],
        {"a": ("N", 4), "b": ("N", 4)},
        ["early", "mid", "late"],
    )
    split = split_model(content, [0, 1])
    assert split.head is not None
    assert [spec.name for spec in split.sent] == ["b", "mid"]
    assert {spec.name for spec in split.head.outputs} == {"b", "mid", "early"}  # `mid` is output and sent
    assert [spec.name for spec in split.tail.outputs] == ["late"]
    feeds = {name: np.array([[-1, 2, 3, -4]], np.float32) for name in "ab"}
    expected = OrtSession(content).run(feeds)
    for name, value in run_split(split, content, feeds).items():
        if name in expected:
            np.testing.assert_array_equal(value, expected[name])
    assert set(expected) <= set(run_split(split, content, feeds))


def test_upload_of_the_whole_model_needs_no_head() -> None:
    content = (TINY / "italy_power_mlp.onnx").read_bytes()
    split = whole_upload(content)
    assert split.head is None
    assert [spec.name for spec in split.sent] == ["demand"]


def test_same_cut_gives_the_same_bytes() -> None:
    content = (TINY / "digits_cnn.onnx").read_bytes()
    first, second = (split_model(content, range(5), Coding("int4")) for _ in range(2))
    assert first == second


def test_metadata_and_operator_sets_are_kept() -> None:
    model = onnx.load_from_string(
        model_of([("Neg", ["x"], ["m"]), ("Neg", ["m"], ["y"])], {"x": (1, 4)}, ["y"])
    )
    model.metadata_props.add(key="edgekit.disabled_optimizers", value="GeluFusion")
    part = onnx.load_from_string(split_model(model.SerializeToString(), [0]).tail.content)
    assert part.metadata_props == model.metadata_props
    assert part.opset_import == model.opset_import


def loop_model() -> bytes:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["on"]),
            helper.make_node("Add", ["v", "v"], ["v2"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v", TensorProto.FLOAT, [1, 4]),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v2", TensorProto.FLOAT, [1, 4]),
        ],
    )
    return model_of(
        [("Relu", ["x"], ["r"]), ("Loop", ["n", "", "r"], ["y"])],
        {"x": (1, 4)},
        ["y"],
        weights={"n": np.array(3, np.int64)},
        attributes={1: {"body": body}},
    )


def external_model() -> bytes:
    model = onnx.load_from_string(
        model_of([("Add", ["x", "w"], ["y"])], {"x": (1, 4)}, ["y"], weights={"w": np.ones(4, np.float32)})
    )
    model.graph.initializer[0].ClearField("raw_data")
    model.graph.initializer[0].data_location = TensorProto.EXTERNAL
    model.graph.initializer[0].external_data.add(key="location", value="/etc/hostname")
    return bytes(model.SerializeToString())


TWO = [("Neg", ["x"], ["m"]), ("Neg", ["m"], ["y"])]
BAD = {
    "a loop": (loop_model(), [0], "control flow"),
    "weights elsewhere": (external_model(), [], "another file"),
    "a free axis": (model_of(TWO, {"x": (1, "T")}, ["y"]), [0], "axis 1 of input 'x' is free"),
    "no model": (b"\x00\xffabc", [0], "no ONNX model|no nodes"),
    "nothing": (b"", [0], "no nodes"),
    "two writers": (model_of([*TWO, ("Abs", ["x"], ["m"])], {"x": (1, 4)}, ["y"]), [0], "'m'"),
    "a node before what it reads": (model_of(TWO[::-1], {"x": (1, 4)}, ["y"]), [0], "before it is made"),
    "a set that is not closed": (model_of(TWO, {"x": (1, 4)}, ["y"]), [1], "to the server only"),
    "zero cuts": (model_of(TWO, {"x": (1, 4)}, ["y"]), [0, 1], "nothing to cut"),
    "no such node": (model_of(TWO, {"x": (1, 4)}, ["y"]), [7], "node 7 is not"),
    "a size out of data": (
        model_of([("NonZero", ["x"], ["i"]), ("Cast", ["i"], ["m"]), ("Neg", ["m"], ["y"])], {"x": ("N", 4)},
                 ["y"], attributes={1: {"to": TensorProto.FLOAT}}),
        [0, 1], "depends on more than the batch",
    ),
    "a name that is taken": (
        model_of([("Neg", ["x"], ["m"]), ("Neg", ["m"], ["m.codes"]), ("Abs", ["m.codes"], ["y"])],
                 {"x": (1, 4)}, ["y"]),
        [0], "'m.codes' already",
    ),
}  # fmt: skip


@cases("case", BAD)
def test_model_that_cannot_be_cut_is_refused_with_the_reason(case: str) -> None:
    content, device, message = BAD[case]
    with pytest.raises(CutError, match=message):
        split_model(content, device, Coding("int8"))


def test_model_above_the_limit_of_a_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_model, "MAX_MODEL_BYTES", 10)
    with pytest.raises(CutError, match="can only run whole"):
        split_model(model_of(TWO, {"x": (1, 4)}, ["y"]), [0])
