import logging
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.backend_parts import install_backend

from edgekit_runtime.errors import BackendError, DataError, SignatureError
from edgekit_runtime.package.archive import read_package, write_package
from edgekit_runtime.package.manifest import BackendChoice
from edgekit_runtime.sessions import EngineMissingError, open_session
from edgekit_runtime.sessions.options import read_options
from edgekit_runtime.tensors import TensorSpec
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.signing_keys import find_keys_folder, load_signer

pytest.importorskip("onnxruntime")
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession

X = np.array([[1, 0, 0, 0], [0, 1, 0, 1]], np.float32)
Y = np.array([[1, 2], [10, 12]], np.float32)


@pytest.fixture
def session(maker: Any) -> OrtSession:
    return OrtSession(maker.artifacts["model.onnx"], OrtOptions(threads=1))


def test_a_session_computes_the_model(session: OrtSession) -> None:
    outputs = session.run({"x": X})
    assert list(outputs) == ["y"]
    np.testing.assert_array_equal(outputs["y"], Y)  # sums of small whole numbers are exact in float32


def test_a_session_states_its_inputs_and_outputs(session: OrtSession) -> None:
    assert (session.inputs, session.outputs) == (
        (TensorSpec("x", "float32", ("N", 4)),),
        (TensorSpec("y", "float32", ("N", 2)),),
    )


@pytest.mark.parametrize(
    "options",
    [
        OrtOptions(),
        OrtOptions(threads=2, spinning=True),
        OrtOptions(threads=1, optimise=False),
        OrtOptions(arena=False),
        OrtOptions(fold_weights=True),
        OrtOptions(disabled_optimizers=("MatMulAddFusion",)),
        OrtOptions(disabled_optimizers=["a rewrite of another version"]),
    ],
)
def test_options_do_not_change_the_result(options: OrtOptions, maker: Any) -> None:
    np.testing.assert_array_equal(OrtSession(maker.artifacts["model.onnx"], options).run({"x": X})["y"], Y)


@pytest.mark.parametrize("kind", ["bytes", "memoryview", "path"])
def test_a_model_is_loaded_from_memory_and_from_a_file(kind: str, maker: Any, tmp_path: Path) -> None:
    content = maker.artifacts["model.onnx"]
    (tmp_path / "model.onnx").write_bytes(content)
    model = {"bytes": content, "memoryview": memoryview(content), "path": tmp_path / "model.onnx"}[kind]
    np.testing.assert_array_equal(OrtSession(model).run({"x": X})["y"], Y)


def test_options_reach_the_engine(maker: Any) -> None:
    import onnxruntime

    session = OrtSession(
        maker.artifacts["model.onnx"], OrtOptions(threads=2, spinning=False, arena=False, optimise=False)
    )
    assert session._session is not None
    settings = session._session.get_session_options()
    assert settings.intra_op_num_threads == 2
    assert not settings.enable_cpu_mem_arena
    assert settings.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert settings.get_session_config_entry("session.intra_op.allow_spinning") == "0"


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({}, "got inputs .*expected .*'x'"),
        ({"z": X}, "'z'"),
        ({"x": X, "z": X}, "'z'"),
        ({"x": X.astype(np.float64)}, "<f8"),
        ({"x": X[0]}, r"shape \[4\]"),
        ({"x": X.T}, r"shape \[4, 2\]"),
        ({"x": X.tolist()}, "list"),
        ({"x": None}, "NoneType"),
    ],
)
def test_inputs_that_do_not_fit_never_reach_the_engine(
    inputs: dict[str, Any], reason: str, session: OrtSession
) -> None:
    with pytest.raises(DataError, match=reason):
        session.run(inputs)


def test_inputs_may_be_any_mapping_and_need_not_be_contiguous(session: OrtSession) -> None:
    class Inputs(Mapping[str, Any]):
        def __getitem__(self, name: str) -> Any:
            return {"x": np.asfortranarray(X)}[name]

        def __iter__(self) -> Any:
            return iter(["x"])

        def __len__(self) -> int:
            return 1

    np.testing.assert_array_equal(session.run(Inputs())["y"], Y)


def test_a_closed_session_refuses_to_run(session: OrtSession) -> None:
    session.close()
    session.close()
    with pytest.raises(BackendError, match="closed"):
        session.run({"x": X})


def test_several_threads_share_a_session(session: OrtSession) -> None:
    results: dict[int, Any] = {}

    def work(factor: int) -> None:
        results[factor] = [session.run({"x": X * np.float32(factor)})["y"] for _ in range(20)]

    threads = [threading.Thread(target=work, args=(factor,)) for factor in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for factor, outputs in results.items():
        np.testing.assert_array_equal(outputs, np.stack([Y * factor] * 20))


@pytest.mark.parametrize("model", [b"", b"garbage", bytes(1000), Path("/nowhere/model.onnx")])
def test_a_model_that_is_none_is_a_backend_error(model: bytes | Path) -> None:
    with pytest.raises(BackendError, match="refused the model"):
        OrtSession(model)


def test_a_failure_within_the_engine_is_a_backend_error() -> None:
    onnx = pytest.importorskip("onnx")
    helper, int64 = onnx.helper, onnx.TensorProto.INT64
    graph = helper.make_graph(
        [helper.make_node("Gather", ["w", "i"], ["y"])],
        "gather",
        [helper.make_tensor_value_info("i", int64, ["N"])],
        [helper.make_tensor_value_info("y", int64, ["N"])],
        [onnx.numpy_helper.from_array(np.arange(3), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = OrtSession(model.SerializeToString(), OrtOptions(threads=1))
    with pytest.raises(BackendError, match="running the model failed"):
        session.run({"i": np.array([99])})


def test_a_model_with_sequences_is_a_backend_error() -> None:
    onnx = pytest.importorskip("onnx")
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("SequenceConstruct", ["x"], ["y"])],
        "sequence",
        [helper.make_tensor_value_info("x", float32, [None])],
        [helper.make_tensor_sequence_value_info("y", float32, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    with pytest.raises(BackendError, match=r"'y' is a seq\(tensor\(float\)\)"):
        OrtSession(model.SerializeToString())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"threads": 0}, "threads is 0"),
        ({"threads": "two"}, "threads is 'two'"),
        ({"threads": True}, "threads is True"),
        ({"spinning": 1}, "spinning is 1"),
        ({"arena": 1}, "arena is 1"),
        ({"optimise": None}, "optimise is None"),
        ({"turbo": True}, r"unknown setting 'turbo'"),
    ],
)
def test_wrong_options_are_a_backend_error(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(BackendError, match=reason):
        read_options(OrtOptions, "ort", options)


def test_the_given_threads_override_those_of_the_manifest() -> None:
    assert read_options(OrtOptions, "ort", {"threads": 4, "spinning": True}, 1) == OrtOptions(
        threads=1, spinning=True
    )


def test_open_session_verifies_a_package_and_opens_it(maker: Any, package_path: Path) -> None:
    session = open_session(package_path, trust=maker.trust)
    np.testing.assert_array_equal(session.run({"x": X})["y"], Y)


def test_open_session_takes_an_opened_package_and_leaves_it_open(maker: Any, package_path: Path) -> None:
    with read_package(package_path, maker.trust) as package:
        session = open_session(package, threads=1)
        assert bytes(package.read("labels.txt")) == maker.artifacts["labels.txt"]
    np.testing.assert_array_equal(session.run({"x": X})["y"], Y)


def test_open_session_refuses_an_untrusted_package(package_path: Path) -> None:
    with pytest.raises(SignatureError):
        open_session(package_path, trust=TrustStore([]))


def test_open_session_trusts_the_keys_of_this_user_by_default(
    maker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    write_package(tmp_path / "x.edgepkg", maker.manifest(), maker.artifacts, load_signer())
    assert find_keys_folder().is_dir()
    np.testing.assert_array_equal(open_session(tmp_path / "x.edgepkg").run({"x": X})["y"], Y)


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": (TensorSpec("x", "float32", ("N", 4)), TensorSpec("z", "float32", (1,)))},
        {"outputs": "int32"},
    ],
)
def test_a_model_that_is_not_the_manifests_is_a_backend_error(
    change: Any, maker: Any, tmp_path: Path
) -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.load_from_string(maker.artifacts["model.onnx"])
    if "inputs" in change:
        model.graph.node[0].input[0] = model.graph.input[0].name = "other"
    else:
        model.graph.node[0].output[0] = model.graph.output[0].name = "other"
    artifacts = {**maker.artifacts, "model.onnx": model.SerializeToString()}
    write_package(tmp_path / "x.edgepkg", maker.manifest(artifacts), artifacts, maker.signer)
    with pytest.raises(BackendError, match=r"'model\.onnx' has (in|out)puts .*'other'.*manifest says"):
        open_session(tmp_path / "x.edgepkg", trust=maker.trust)


@pytest.fixture
def without_ort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "edgekit_runtime.sessions.ort")


@pytest.mark.usefixtures("without_ort")
def test_a_missing_engine_names_what_to_install(maker: Any, package_path: Path) -> None:
    with pytest.raises(BackendError, match=r"-m pip install .*\[device\]'"):
        open_session(package_path, trust=maker.trust)


CHOICE = BackendChoice("absent", "model.onnx", {}, BackendChoice("ort", "model.onnx", {"threads": 1}))


def test_a_missing_engine_gives_way_to_the_fallback(
    maker: Any, package_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    maker.write(package_path, backend=CHOICE)
    with caplog.at_level(logging.WARNING):
        session = open_session(package_path, trust=maker.trust)
    np.testing.assert_array_equal(session.run({"x": X})["y"], Y)
    assert "using the fallback 'ort'" in caplog.text


@pytest.mark.usefixtures("without_ort")
def test_two_missing_engines_are_both_named(maker: Any, package_path: Path) -> None:
    maker.write(package_path, backend=CHOICE)
    with pytest.raises(EngineMissingError, match=r"no backend 'absent'.*its fallback.*\[device\]"):
        open_session(package_path, trust=maker.trust)


def test_an_engine_that_refuses_the_model_is_not_replaced_by_the_fallback(
    maker: Any, package_path: Path
) -> None:
    fallback = BackendChoice("ort", "model.onnx", {})
    maker.write(package_path, backend=BackendChoice("ort", "model.onnx", {"turbo": 1}, fallback))
    with pytest.raises(BackendError, match="turbo"):
        open_session(package_path, trust=maker.trust)


def test_a_third_party_backend_is_found_by_its_entry_point(
    maker: Any, package_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    source = (
        "def open_third(package, choice, threads):\n"
        "    return (bytes(package.read(choice.artifact)), choice.options, threads)\n"
    )
    install_backend(tmp_path / "site", monkeypatch, source)
    maker.write(package_path, backend=BackendChoice("third", "model.onnx", {"a": 1}))
    opened: Any = open_session(package_path, trust=maker.trust, threads=3)
    assert opened == (maker.artifacts["model.onnx"], {"a": 1}, 3)


def test_a_third_party_backend_without_its_engine_gives_way_to_the_fallback(
    maker: Any, package_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    install_backend(tmp_path / "site", monkeypatch, "import an_engine_that_is_not_installed\n")
    fallback = BackendChoice("ort", "model.onnx", {})
    maker.write(package_path, backend=BackendChoice("third", "model.onnx", {}, fallback))
    session = open_session(package_path, trust=maker.trust)
    np.testing.assert_array_equal(session.run({"x": X})["y"], Y)
