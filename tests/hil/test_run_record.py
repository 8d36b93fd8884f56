"""What the evidence of a run holds of each test, however the test ends."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.hil.evidence_parts import FACTS

from edgekit_hil.benches.bench_file import find_bench
from edgekit_hil.benches.opening import Bench
from edgekit_hil.tests.conftest import Recorder
from edgekit_host.evidence import Curve, read_evidence

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest
from edgekit_hil.benches.bench_file import find_bench
from edgekit_hil.benches.opening import Bench
from tests.hil.evidence_parts import FACTS

@pytest.fixture(scope="session")
def bench():
    return Bench(
        file=find_bench("local"), facts=FACTS, target=None, home="/",
        power=None, meter=None, meter_text="", lock=None,
    )

@pytest.fixture
def broken(bench):
    raise RuntimeError("cannot be set up")

@pytest.fixture
def untidy(bench):
    yield
    raise RuntimeError("cannot be tidied up")

def test_good(bench):
    pass

def test_before(broken):
    pass

def test_after(untidy):
    pass

def test_of_no_bench():
    pass
"""


def test_test_that_fails_before_or_after_its_body_has_failed(tmp_path: Path) -> None:
    (tmp_path / "test_parts.py").write_text(TESTS)
    plugins = ["--disable-plugin-autoload", "-p", "no:cacheprovider", "-p", "edgekit_hil.tests.plugin"]
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", f"--rootdir={tmp_path}", *plugins]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}

    done = subprocess.run(
        [*command, "--evidence", str(tmp_path), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.json")
    outcomes = {
        each.test.partition("::")[2]: (each.outcome, each.reason) for each in read_evidence(path).tests
    }
    assert outcomes == {
        "test_good": ("passed", ""),
        "test_before": ("failed", "RuntimeError: cannot be set up"),
        "test_after": ("failed", "RuntimeError: cannot be tidied up"),
    }


def test_long_curve_keeps_its_peaks_in_a_thousand_points() -> None:
    record, points = Mock(), [(float(at), 1.0) for at in range(12_345)]
    points[7_001] = (7_001.0, 9.0)
    bench = Bench(
        file=find_bench("local"),
        facts=FACTS,
        target=None,
        home="/",
        power=None,
        meter=None,
        meter_text="",
        lock=None,
    )
    Recorder(record, bench, "test").curve("answers", ("s", "ms"), points)
    curve: Curve = record.add_curve.call_args.args[1]
    assert 500 < len(curve.x) == len(curve.y) <= 1000
    assert list(curve.x) == sorted(curve.x)
    assert (7_001.0, 9.0) in zip(curve.x, curve.y, strict=True)
