"""Models over which an engine ends its process: a form is left out with the reason, and the run goes on."""

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.toolkit.fake_onnxruntime import write_aborting_onnxruntime
from tests.toolkit.package_run import edgekit, package

import edgekit_cli
import edgekit_toolkit
from edgekit_runtime.errors import BackendError
from edgekit_toolkit.measurement.peak_memory import trivial_model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.openings.model_opening import Openings
from edgekit_toolkit.quantize.sensitivity import Fidelity

ABORTING = trivial_model("ort").replace(b"trivial", b"hostile")


@pytest.fixture
def openings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Openings]:
    """A child whose onnxruntime aborts on `ABORTING`."""
    write_aborting_onnxruntime(tmp_path / "site", b"hostile")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    made = Openings()
    yield made
    made.close()


def test_model_over_which_the_engine_aborts_is_an_error_each_time_and_the_next_model_opens(
    openings: Openings,
) -> None:
    for _ in range(2):
        with pytest.raises(BackendError, match=r"by SIGABRT: vector::operator\[\]"):
            openings.check("ort", ABORTING, {})
    openings.check("ort", trivial_model("ort"), {})


def test_model_that_the_engine_only_refuses_passes_for_whoever_opens_it_to_get_the_error(
    openings: Openings,
) -> None:
    openings.check("ort", b"no model", {})
    openings.check("ort", trivial_model("ort"), {"unknown option": 1})


def branching(path: Path) -> Path:
    """A convolution whose output, reshaped, is read by the branches of an `If`."""
    rng = np.random.default_rng(0)

    def branch(name: str, factor: float) -> onnx.GraphProto:
        made = helper.make_tensor_value_info(f"o{name}", TensorProto.FLOAT, None)
        stored = numpy_helper.from_array(np.float32(factor), f"k{name}")  # type: ignore[arg-type]
        return helper.make_graph(
            [helper.make_node("Mul", ["r", f"k{name}"], [f"o{name}"])], name, [], [made], [stored]
        )

    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["a"]),
        helper.make_node("Reshape", ["a", "s"], ["r"]),
        helper.make_node("ReduceMean", ["x"], ["m"], keepdims=0),
        helper.make_node("Greater", ["m", "z"], ["q"]),
        helper.make_node("If", ["q"], ["y"], then_branch=branch("t", 1.0), else_branch=branch("e", 2.0)),
    ]
    stored = {
        "w": rng.normal(size=(8, 3, 3, 3)).astype(np.float32),
        "s": np.array([1, 512]),
        "z": np.float32(0),
    }
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "branching",
        [value("x", TensorProto.FLOAT, [1, 3, 8, 8])],
        [value("y", TensorProto.FLOAT, [1, 512])],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def masked(path: Path) -> Path:
    """Attention with the smallest float as its mask."""
    rng = np.random.default_rng(0)
    mask = np.triu(np.full((16, 16), np.finfo(np.float32).min, np.float32), 1)
    weights = {name: (rng.normal(size=(32, 32)) / 6).astype(np.float32) for name in ("wq", "wk")}
    nodes = [
        helper.make_node("MatMul", ["x", "wq"], ["q"]),
        helper.make_node("MatMul", ["x", "wk"], ["k"]),
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["s"]),
        helper.make_node("Add", ["s", "mask"], ["t"]),
        helper.make_node("Softmax", ["t"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "x"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "masked",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 16, 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 16, 32])],
        [numpy_helper.from_array(array, name) for name, array in {**weights, "mask": mask}.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.usefixtures("new_home")
@pytest.mark.parametrize(("make", "backend"), [(branching, "ort"), (masked, "litert")])
def test_form_over_which_the_engine_aborts_is_left_out_with_the_reason_and_another_is_packaged(
    make: object, backend: str, tmp_path: Path
) -> None:
    assert callable(make)
    model = make(tmp_path / "model.onnx")
    outcome = package(model, tmp_path / "out", "--backend", backend, "--json", target="rpi5")
    assert outcome.code == 0
    report = outcome.json
    left_out = [text for text in report["warnings"] if "SIGABRT" in text]
    offered = [*(one["label"] for one in report["candidates"]), *report["set_aside"]]
    # A release that has mended this offers the form.
    assert left_out or [text for text in offered if text.startswith("int8 per-")], report["warnings"]


def attention(**attributes: int) -> tuple[onnx.NodeProto, int]:
    return helper.make_node("Attention", ["x", "x", "x"], ["y"], **attributes), 23


@pytest.mark.usefixtures("new_home")
@pytest.mark.parametrize(
    ("node", "version"),
    [
        attention(q_num_heads=4, kv_num_heads=0),  # ends onnxruntime when it loads the model
        attention(q_num_heads=0, kv_num_heads=4),  # and this one when it runs it
        # ends onnx's inference of shapes
        (helper.make_node("LayerNormalization", ["x", "g"], ["y", "m", "i"], axis=2**31), 17),
    ],
)
@pytest.mark.parametrize("command", ["package -t rpi5", "offload plan --device local --server local"])
def test_model_over_whose_attribute_native_code_ends_its_process_is_refused_in_a_sentence(
    node: onnx.NodeProto, version: int, command: str, tmp_path: Path
) -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "impossible",
        [value("x", TensorProto.FLOAT, [1, 4, 8])],
        [value("y", TensorProto.FLOAT, [1, 4, 8])],
        [numpy_helper.from_array(np.ones(8, np.float32), "g")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=10)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    outcome = edgekit(*command.split(), path)
    assert outcome.code
    assert "by SIG" in outcome.stderr


@pytest.mark.usefixtures("new_home")
def test_package_over_which_the_engine_aborts_here_fails_verify_and_run_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["hostile"], ["y"])],
        "made elsewhere",
        [helper.make_tensor_value_info("hostile", TensorProto.FLOAT, [1, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])],
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    assert package(path, tmp_path / "out", "--backend", "ort", "--search-seconds", "0").code == 0
    (made,) = (tmp_path / "out").glob("*.edgepkg")
    write_aborting_onnxruntime(tmp_path / "site", b"hostile")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for command in ("verify", "run"):
        outcome = edgekit(command, made)
        assert (outcome.code, "by SIGABRT" in outcome.stderr) == (9, True)


def doubled(*, is_quantized: bool) -> OnnxModel:
    """Values above 0 of the input, added to themselves; as many rows as the data have."""
    codes = [
        helper.make_node("QuantizeLinear", ["rows", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["a"]),
        helper.make_node("Add", ["a", "a"], ["s"]),
        helper.make_node("QuantizeLinear", ["s", "scale", "zero"], ["t"]),
        helper.make_node("DequantizeLinear", ["t", "scale", "zero"], ["y"]),
    ]
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Cast", ["r"], ["above"], to=TensorProto.BOOL),
        helper.make_node("Compress", ["x", "above"], ["rows"]),
        *(codes if is_quantized else [helper.make_node("Add", ["rows", "rows"], ["y"])]),
    ]
    graph = helper.make_graph(
        nodes,
        "doubled",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["K"])],
        [numpy_helper.from_array(np.float32(0.02), "scale"), numpy_helper.from_array(np.uint8(128), "zero")],  # type: ignore[arg-type]
    )
    return OnnxModel(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))


def test_form_over_which_the_engine_ends_the_process_on_one_sample_is_an_error() -> None:
    rng = np.random.default_rng(0)
    samples = [{"x": rng.normal(size=8).astype(np.float32)} for _ in range(4)]
    samples[2] = {
        "x": np.full(8, -1, np.float32)
    }  # no row: onnxruntime with several threads ends the process
    fidelity = Fidelity(doubled(is_quantized=False), samples, threads=2, softmax_axes=[None])
    with pytest.raises(BackendError, match="ended the process that opened the model, by SIG"):
        fidelity.noise(doubled(is_quantized=True))


SESSIONS = {"InferenceSession", "LiteRtSession", "OrtSession", "create_session", "open_model"}
GUARDS = {"check_opening", "open_litert", "open_ort"}


def find_unguarded(path: Path) -> list[str]:
    """Return the functions of a module that open a session, and let no child open the model first."""
    source = path.read_text()
    if not any(name in source for name in SESSIONS):
        return []
    calls = {
        function.name: {
            getattr(call.func, "id", getattr(call.func, "attr", ""))
            for call in ast.walk(function)
            if isinstance(call, ast.Call)
        }
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef)
    }
    return [
        f"{path.name}: {name}" for name, called in calls.items() if called & SESSIONS and not called & GUARDS
    ]


def test_every_session_of_the_toolkit_is_opened_in_a_child_first() -> None:
    folders = [Path(part.__file__).parent for part in (edgekit_cli, edgekit_toolkit)]
    modules = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    outside_children = [path for path in modules if not path.name.endswith("child.py")]
    unguarded = [line for path in outside_children for line in find_unguarded(path)]
    # A network of ours, and a graph that the engine has just opened and written.
    assert unguarded == ["demo_packages.py: _run", "ort_graph.py: _infer"]
