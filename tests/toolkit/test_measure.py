import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import onnx
import pytest
from onnx import helper
from tests.toolkit.package_run import environment, model_of, package, read_only, saved, stored, tensor

from edgekit_runtime.errors import BackendError
from edgekit_toolkit.evaluation.host_memory import estimate_service_bytes, measure_service_bytes
from edgekit_toolkit.measurement.peak_memory import (
    measure_engine_bytes,
    measure_peak_memory,
)

MIB = 1024 * 1024
_OPEN = """
import sys
from pathlib import Path
import numpy as np
from edgekit_runtime import open_session
from edgekit_toolkit.measurement.peak_memory_child import peak_bytes
session = open_session(Path(sys.argv[1]), threads=1)
for _ in range(3):
    session.run({"x": np.ones((1, 1024), np.float32)})
print(peak_bytes())
"""
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")


def matmul_model(size):
    product = helper.make_node("MatMul", ["x", "w"], ["y"])
    weight = np.ones((size, size), np.float32)
    return model_of([product], [tensor("x", [1, size])], [tensor("y", [1, size])], {"w": weight})


@linux_only
def test_model_bytes_are_what_the_weights_add():
    # The engine packs the one weight while the plain one is still there: twice 16 MiB.
    peak = measure_peak_memory(matmul_model(2048).SerializeToString(), {"x": np.ones((1, 2048), np.float32)})
    assert peak.total_bytes == peak.engine_bytes + peak.model_bytes
    assert 30 * MIB < peak.model_bytes < 36 * MIB


@linux_only
def test_bare_engine_has_a_plausible_size():
    assert 10 * MIB < measure_engine_bytes() < 500 * MIB


@linux_only
def test_module_in_the_working_folder_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "numpy.py").write_text("raise SystemExit(3)", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    peak = measure_peak_memory(matmul_model(8).SerializeToString(), {"x": np.ones((1, 8), np.float32)})
    assert peak.total_bytes > 10 * MIB


@linux_only
def test_refused_model_is_reported_with_the_reason():
    with pytest.raises(BackendError, match="INVALID_PROTOBUF"):
        measure_peak_memory(b"not a model", {})


@linux_only
def test_input_of_wrong_shape_is_reported():
    with pytest.raises(BackendError, match=r"failed: .*got shape \[1, 7\], expected \[1, 8\]"):
        measure_peak_memory(matmul_model(8).SerializeToString(), {"x": np.ones((1, 7), np.float32)})


@linux_only
def test_time_limit_is_reported():
    feeds = {"x": np.ones((1, 8), np.float32)}
    measure_engine_bytes()  # has its own time limit
    with pytest.raises(BackendError, match=r"longer than 0\.001 s"):
        measure_peak_memory(matmul_model(8).SerializeToString(), feeds, time_limit_s=0.001)


@linux_only
def test_killed_process_is_reported_as_out_of_memory(tmp_path, monkeypatch):
    measure_engine_bytes()
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -9 $$\n", encoding="utf-8")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    with pytest.raises(BackendError, match=r"SIGKILL.*out of memory"):
        measure_peak_memory(matmul_model(8).SerializeToString(), {"x": np.ones((1, 8), np.float32)})


@linux_only
def test_what_is_measured_is_the_memory_of_open_session(tmp_path, monkeypatch):
    """The process that is measured takes what one takes that verifies and opens a package; 2 MB of noise."""
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    model = saved(matmul_model(1024), tmp_path / "net.onnx")
    assert package(model, tmp_path / "out").code == 0
    opened = subprocess.run(
        [sys.executable, "-c", _OPEN, *map(str, (tmp_path / "out").glob("*.edgepkg"))],
        env=environment(),
        check=True,
        capture_output=True,
        text=True,
    )
    with read_only(tmp_path / "out") as held:
        content = bytes(held.read("model.onnx"))
    measured = measure_peak_memory(content, {"x": np.ones((1, 1024), np.float32)})
    assert measured.total_bytes == pytest.approx(int(opened.stdout), abs=2 * MIB)


@linux_only
@pytest.mark.skipif(not find_spec("httptools"), reason="the service needs httptools: edgekit[device]")
def test_service_takes_more_than_a_process_with_the_engine():
    engine, service = measure_engine_bytes(), measure_service_bytes()
    assert engine + MIB < service < engine + 40 * MIB


@linux_only
@pytest.mark.skipif(not find_spec("httptools"), reason="the service needs httptools: edgekit[device]")
def test_service_holds_the_inputs_of_the_next_call_too():
    feeds = {"x": np.zeros(1000, np.float32), "ids": np.zeros(10, np.int64)}
    assert estimate_service_bytes("ort", 5000, feeds) == measure_service_bytes("ort") + 5000 + 4080


@linux_only
@pytest.mark.skipif(not find_spec("httptools"), reason="the service needs httptools: edgekit[device]")
@pytest.mark.parametrize(("limit", "over"), [("memory=1GB", False), ("memory={between}", True)])
def test_memory_limit_says_what_the_service_takes(limit, over, tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    # The model of eight values adds up to 2 MB to either.
    between = (measure_engine_bytes() + measure_service_bytes()) // 2
    model = saved(matmul_model(8), tmp_path / "net.onnx")
    outcome = package(model, tmp_path / "out", "--budget", limit.format(between=f"{between}B"), "--json")
    assert outcome.code == 0, outcome.stdout
    (note,) = [text for text in outcome.json["warnings"] if "edgekit-device serve takes about" in text]
    assert note.endswith("OVER THE LIMIT") == over


@linux_only
def test_service_that_isolates_the_model_has_no_figure_but_a_note(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    nodes = [
        helper.make_node("Div", ["x", "divisor"], ["quotient"]),
        helper.make_node("Cast", ["quotient"], ["y"], to=onnx.TensorProto.FLOAT),
    ]
    inputs = [tensor(name, ["N", 4], onnx.TensorProto.INT64) for name in ("x", "divisor")]
    model = saved(model_of(nodes, inputs, [tensor("y", ["N", 4])]), tmp_path / "net.onnx")
    rows = np.random.default_rng(0).integers(0, 100, (20, 4))
    data = stored(tmp_path / "data.npz", {"x": rows, "divisor": np.full((20, 4), 3)})
    outcome = package(model, tmp_path / "out", "--eval", data, "--budget", "memory=1GB", "--json")
    assert outcome.code == 0, outcome.stdout
    assert any("runs this one beside the service" in text for text in outcome.json["warnings"])
    assert not any("serve takes about" in text for text in outcome.json["warnings"])
