"""The README's table of devices: made from committed evidence, and nothing beyond it."""

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from edgekit_host.evidence import Evidence, NetworkTimes, list_committed, read_folders
from edgekit_toolkit.targets.loader import list_targets
from tests.hil.evidence_parts import EVIDENCE

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("doc_tables", ROOT / "scripts" / "doc_tables.py")
assert SPEC is not None and SPEC.loader is not None
doc_tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(doc_tables)


def row(target: str, *evidence: Evidence) -> str:
    table = doc_tables.list_devices(list_targets([]), evidence)
    (line,) = [line for line in table.splitlines() if line.startswith(f"| `{target}`")]
    return line


def test_tables_of_the_docs_are_what_their_records_say() -> None:
    command = [sys.executable, ROOT / "scripts" / "doc_tables.py", "--check"]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


def test_committed_evidence_names_its_target_and_its_file() -> None:
    known = {target.name for target in list_targets([])}

    for evidence in read_folders([list_committed()]):
        assert evidence.target in known
        assert (list_committed() / evidence.file_name).is_file()
        assert evidence.commit


def test_target_without_evidence_has_no_run() -> None:
    assert row("rpi4").count("no run yet") == 2


def test_real_run_stands_in_its_own_column() -> None:
    line = row("rpi5", EVIDENCE)

    link = "[desk](hil/evidence/rpi5-desk-2026-11-23T100000.json)"
    assert f"{link}: Pi 5, 1 passed, 1 skipped, 2026-11-23 |" in line
    assert line.endswith("| no run yet |")


def test_only_a_real_device_measures_costs() -> None:
    times = NetworkTimes("2026-11-23", "onnxruntime 1.24.4", "0a", {"dense": 0.01})
    measured = dataclasses.replace(EVIDENCE, network_times=times)

    assert "costs measured" in row("rpi5", measured)
    assert "costs measured" not in row("rpi5", dataclasses.replace(measured, kind="emulated"))


@pytest.mark.parametrize("kind", ["emulated", "simulated"])
def test_run_that_is_not_real_never_stands_in_the_column_of_real_ones(kind: str) -> None:
    line = row("rpi5", dataclasses.replace(EVIDENCE, kind=kind))  # type: ignore[arg-type]

    assert "| **no run yet** | [desk]" in line
    assert f": {kind}, Pi 5, 1 passed" in line


def test_device_that_is_another_than_the_target_is_seen() -> None:
    device = dataclasses.replace(EVIDENCE.device, model="linux,dummy-virt | x\n")

    assert "): linux,dummy-virt / x, 1 passed" in row("rpi5", dataclasses.replace(EVIDENCE, device=device))


def test_tests_that_the_command_line_left_out_are_counted() -> None:
    assert "1 skipped, 24 left out, " in row("rpi5", dataclasses.replace(EVIDENCE, left_out=24))


def test_failures_and_uncommitted_changes_are_shown() -> None:
    failed = dataclasses.replace(EVIDENCE.tests[0], outcome="failed")
    line = row("rpi5", dataclasses.replace(EVIDENCE, is_dirty=True, tests=(*EVIDENCE.tests, failed)))

    assert "**1 failed**" in line
    assert "2026-11-23, uncommitted changes" in line


def test_newest_run_of_each_bench_counts() -> None:
    newer = dataclasses.replace(EVIDENCE, date="2026-12-01T10:00:00+00:00")
    other = dataclasses.replace(EVIDENCE, bench="shelf")

    line = row("rpi5", EVIDENCE, newer, other)

    assert "2026-12-01" in line
    assert line.count(" passed") == 2
