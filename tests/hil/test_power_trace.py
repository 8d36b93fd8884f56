"""A whole run with a meter: the power over an update is in the evidence and in the report."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.hil.ssh_board import run_ssh_board
from tests.runtime.power_tree import Tree
from yaml import safe_dump, safe_load

from edgekit_host.evidence import read_evidence

pytestmark = pytest.mark.long


def test_power_over_an_update_is_recorded_and_plotted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    Tree(tmp_path / "sys").rail(1, "VDD_IN", 5000, 2000)
    # A short path: the service listens on a socket below it.
    with tempfile.TemporaryDirectory() as folder, run_ssh_board(Path(folder)) as board:
        path = board.write_bench(tmp_path / "bench.yaml")
        document = safe_load(path.read_text())
        sensors = {"python": str(board.python), "sysfs": str(tmp_path / "sys")}
        document["targets"]["main"]["drivers"]["SensorsDriver"] = sensors
        path.write_text(safe_dump({**document, "imports": ["edgekit_hil.drivers.sensors"]}))
        command = [sys.executable, "-m", "edgekit_cli", "hil", "run", "-k", "swap"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [*command, "--bench", str(path), "--evidence", str(tmp_path / "seen")],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (tmp_path / "seen").glob("*.json")
    (curve,) = read_evidence(file).curves
    assert (curve.name, curve.x_label, curve.y_label) == ("power over an update and a rollback", "s", "W")
    assert set(curve.y) == {10.0}
    assert "<figcaption>power over an update and a rollback" in file.with_suffix(".html").read_text()
