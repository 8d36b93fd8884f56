"""The examples run as their README says, in this environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.toolkit.package_run import isolated_home, package, tiny

ROOT = Path(__file__).resolve().parents[1]
SHORT = ("--search-seconds", "0", "--backend", "ort")
TINY = ROOT / "models" / "tiny"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The user's environment, with keys of its own."""
    folders = ("device_runtime", "host", "toolkit", "offload", "fleet", "hil")
    return {
        **os.environ,
        "EDGEKIT_HOME": str(tmp_path_factory.mktemp("home")),
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in folders),
    }


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((), id="whole", marks=pytest.mark.long),
        pytest.param(SHORT, id="short"),
    ],
)
def packaged(
    request: pytest.FixtureRequest, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("packages")
    done = run(environment, str(ROOT / "examples" / "package_under_budget.sh"), str(out), *request.param)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


def test_package_under_budget_repeats_the_same_bytes(packaged: tuple[Path, str]) -> None:
    out, printed = packaged
    assert printed.rstrip().endswith("same bytes")
    assert (out / "second" / "digits_cnn-1.0.0-rpi5.edgepkg").stat().st_size <= 100_000


def test_run_package_prints_the_classes_of_the_labels(
    environment: dict[str, str], packaged: tuple[Path, str]
) -> None:
    package = packaged[0] / "first" / "digits_cnn-1.0.0-rpi5.edgepkg"
    script = str(ROOT / "examples" / "run_package.py")
    done = run(environment, sys.executable, script, str(package), str(TINY / "digits_cnn.eval.npz"))
    assert done.returncode == 0, done.stderr
    import numpy as np

    with np.load(TINY / "digits_cnn.eval.npz", allow_pickle=False) as samples:
        labels = samples["y"][:8]
    classes = [int(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines()]
    assert sum(a == b for a, b in zip(classes, labels, strict=True)) >= 7


def test_refused_ends_with_the_documented_code(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(environment, str(ROOT / "examples" / "refused.sh"), str(tmp_path), *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exit code 5" in done.stdout
    assert not list(tmp_path.rglob("*.edgepkg"))


def test_metric_of_ones_own_judges(tmp_path: Path) -> None:
    source, data = tiny("italy_power_mlp")
    metric = f"{ROOT / 'examples' / 'my_metric.py'}:confident"
    with isolated_home(tmp_path / "home"):
        done = package(source, tmp_path, *data, "--metric", metric, "--budget", "drop=20%", target="rpi4")
    assert done.code == 0, done.stderr
    assert list(tmp_path.glob("*.edgepkg"))
