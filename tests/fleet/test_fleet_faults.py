"""A part of the faults of `benchmarks.fleet_faults`, the same one each time, by its own command."""

import ctypes.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("onnx")
ROOT = Path(__file__).parents[2]


# The journal's part is in tests/agent/test_agent_faults.py.
PARTS = ("steps", "manager", "torn")


def test_fault_leaves_no_device_without_a_model_and_no_manager_that_cannot_go_on(tmp_path, is_long):
    most = 20 if is_long else 4
    if sys.platform != "linux" or ctypes.util.find_library("sqlite3") is None:
        pytest.skip("SQLite's functions are replaced in its shared library, on Linux")
    out = tmp_path / "out.json"
    words = ["-m", "benchmarks.fleet_faults", "--most", str(most), "--json", str(out), "--part", *PARTS]
    folders = (ROOT / name for name in ("device_runtime", "host", "toolkit", "fleet", "."))
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=variables, check=False, capture_output=True, text=True
    )
    assert out.exists(), done.stderr[-2000:]
    found = json.loads(out.read_text())
    assert found["wrong"] == []
    for part in PARTS:  # many a fault in a step comes too late: 491 of 1,082 took place in the whole sweep
        assert sum(row[-1] for row in found["faults"] if row[0] == part) >= most // 2
