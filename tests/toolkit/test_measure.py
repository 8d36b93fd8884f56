import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from tests.toolkit.package_run import model_of, tensor

from edgekit_runtime.errors import BackendError
from edgekit_toolkit.measure import (
    MemoryLimits,
    measure_engine_bytes,
    measure_peak_memory,
)

MIB = 1024 * 1024
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
def test_model_is_read_from_a_path(tmp_path, monkeypatch):
    onnx.save(matmul_model(64), tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    peak = measure_peak_memory(Path("model.onnx"), {"x": np.ones((1, 64), np.float32)})
    assert abs(peak.model_bytes) < 3 * MIB  # two bare processes differ by about 1 MiB


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
    with pytest.raises(BackendError, match=r"failed: .*invalid dimensions"):
        measure_peak_memory(matmul_model(8).SerializeToString(), {"x": np.ones((1, 7), np.float32)})


@linux_only
def test_time_limit_is_reported():
    feeds = {"x": np.ones((1, 8), np.float32)}
    measure_engine_bytes()  # has its own time limit
    with pytest.raises(BackendError, match=r"longer than 0\.001 s"):
        measure_peak_memory(
            matmul_model(8).SerializeToString(), feeds, limits=MemoryLimits(time_limit_s=0.001)
        )


@linux_only
def test_killed_process_is_reported_as_out_of_memory(tmp_path, monkeypatch):
    measure_engine_bytes()
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -9 $$\n", encoding="utf-8")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    with pytest.raises(BackendError, match=r"SIGKILL.*out of memory"):
        measure_peak_memory(matmul_model(8).SerializeToString(), {"x": np.ones((1, 8), np.float32)})
