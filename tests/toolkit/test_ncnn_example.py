"""The example of an engine by plug-in, `examples/ncnn`, with a model that is written by hand."""

import contextlib
import importlib.util
import struct
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.toolkit.package_run import package

from edgekit_runtime.errors import BackendError
from edgekit_runtime.sessions import EngineMissingError, open_session
from edgekit_runtime.system.engines import ENTRY_POINT_GROUP, find_engine

EXAMPLE = Path(__file__).parents[2] / "examples" / "ncnn"
RNG = np.random.default_rng(5)
WEIGHTS, BIAS = RNG.normal(size=(3, 4)).astype(np.float32), RNG.normal(size=3).astype(np.float32)
PARAM = """7767517
3 3
Input input 0 1 x 0=4
InnerProduct fc 1 1 x h 0=3 1=1 2=12
ReLU relu 1 1 h y
"""
needs_ncnn = pytest.mark.skipif(
    importlib.util.find_spec("ncnn") is None, reason="ncnn is not installed (pip install ncnn)"
)
pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the example on the path as pip does, with the entry points of its pyproject.toml."""
    information = tmp_path / "site" / "edgekit_ncnn-1.0.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: edgekit-ncnn\nVersion: 1.0.0\n")
    text = (EXAMPLE / "pyproject.toml").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("ncnn = "))
    (information / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{line.replace(chr(34), '')}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(EXAMPLE))
    importlib.invalidate_caches()


@pytest.fixture
def pack_ncnn() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pack_ncnn", EXAMPLE / "pack_ncnn.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def float_package(folder: Path) -> Path:
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"], transB=1),
        helper.make_node("Relu", ["h"], ["y"]),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "net", [value("x", TensorProto.FLOAT, [1, 4])], [value("y", TensorProto.FLOAT, [1, 3])],
        [numpy_helper.from_array(WEIGHTS, "w"), numpy_helper.from_array(BIAS, "b")],
    )  # fmt: skip
    model = folder / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), model)
    budget = ("--metric", "similarity", "--budget", "size=1MB,drop=0.01%", "--search-seconds", "0")
    done = package(model, folder / "out", "--backend", "ort", *budget, target="rpi5")
    assert done.code == 0, done.stderr
    return next((folder / "out").glob("*.edgepkg"))


def converted(folder: Path, weights: np.ndarray) -> tuple[Path, Path]:
    param, content = folder / "net.param", folder / "net.bin"
    param.write_text(PARAM)
    content.write_bytes(struct.pack("<I", 0) + weights.tobytes() + BIAS.tobytes())  # 0: float32 weights
    return param, content


def test_record_is_found_by_its_entry_point_without_the_engine() -> None:
    engine = find_engine("ncnn")
    assert engine.title == "ncnn"
    assert engine.tunable == {"threads"}
    assert "pip install ncnn" in engine.installation.missing_text


def test_package_without_ncnn_says_what_to_install(
    tmp_path: Path, pack_ncnn: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ncnn", None)
    out = tmp_path / "ncnn.edgepkg"
    with pytest.raises(EngineMissingError, match="pip install ncnn"):
        pack_ncnn.pack(float_package(tmp_path), *converted(tmp_path, WEIGHTS), out)
    assert not out.exists()


@needs_ncnn
def test_converted_model_computes_what_the_source_does(tmp_path: Path, pack_ncnn: ModuleType) -> None:
    out = tmp_path / "ncnn.edgepkg"
    pack_ncnn.pack(float_package(tmp_path), *converted(tmp_path, WEIGHTS), out)
    sample = RNG.normal(size=(1, 4)).astype(np.float32)
    with contextlib.closing(open_session(out)) as session:
        answer = session.run({"x": sample})["y"]
    np.testing.assert_allclose(answer, np.maximum(sample @ WEIGHTS.T + BIAS, 0), rtol=1e-4, atol=1e-5)


@needs_ncnn
def test_wrongly_converted_model_leaves_no_package(tmp_path: Path, pack_ncnn: ModuleType) -> None:
    out = tmp_path / "ncnn.edgepkg"
    with pytest.raises(BackendError, match="ncnn computes other outputs"):
        pack_ncnn.pack(float_package(tmp_path), *converted(tmp_path, WEIGHTS * 1.2), out)
    assert not out.exists()
