import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.toolkit.command_run import invoker
from tests.toolkit.package_run import edgekit, isolated_home

from edgekit_cli.profile import command
from edgekit_runtime.errors import CutError, OutputError, TargetError
from edgekit_toolkit.evaluation.judge import model_on_target
from edgekit_toolkit.measurement.calibration_networks import calibration_names, make_calibration_models
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.targets.loader import find_user_targets, load_target

invoke = invoker(command)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A home with the profile of this machine, and what was printed as it was made."""
    folder = tmp_path_factory.mktemp("profiled")
    with isolated_home(folder):
        return folder, invoke("--on", "local", "--target", "rpi5", "--seconds", "1", "--json").stdout


def test_a_profiled_machine_becomes_a_target_that_predicts(profile: tuple[Path, str], home: Path) -> None:
    shutil.copytree(profile[0], home)
    document = json.loads(profile[1])
    assert document["target"] == "rpi5-profiled"
    target = load_target("rpi5-profiled", [find_user_targets()])
    assert target.device_times is not None
    assert target.costs == load_target("rpi5").costs
    # Not how long it takes: other tests run beside this one.
    assert {name: each.value for name, each in target.device_times.seconds.items()} == {
        name: each["there_s"] for name, each in document["networks"].items()
    }
    assert target.device_times.uncertainty is not None
    assert target.device_times.uncertainty.value == document["uncertainty"]
    assert document["networks"].keys() == calibration_names()
    network = make_calibration_models("ort")["dense-small"]
    feeds: Feeds = {"input": np.zeros((1, 48), np.float32)}
    (found,) = model_on_target([network], target, {}, feeds)
    assert (found.latency_label, "edgekit profile of" in found.source) == ("calibrated", True)


def test_a_machine_or_target_that_does_not_exist_is_refused_before_anything_is_measured(home: Path) -> None:
    with pytest.raises(CutError, match="nonsense"):
        invoke("--on", "nonsense", "--target", "rpi5")
    with pytest.raises(TargetError, match="no target 'rpi9'"):
        invoke("--on", "local", "--target", "rpi9")
    assert not home.exists()


def test_a_target_of_another_engine_is_refused_before_anything_is_measured(home: Path) -> None:
    with pytest.raises(TargetError, match="an engine on the processor, got TensorRT"):
        invoke("--on", "local", "--target", "jetson")
    assert not home.exists()


def test_an_existing_target_is_replaced_only_by_force(tmp_path: Path) -> None:
    path = tmp_path / "board.toml"
    path.write_text("mine")
    with pytest.raises(OutputError, match="--force"):
        invoke("--on", "local", "--target", "rpi5", "--output", path)
    assert path.read_text() == "mine"


def test_a_name_that_is_no_name_of_a_target_is_refused_before_anything_is_measured(home: Path) -> None:
    with pytest.raises(TargetError, match="lower-case words"):
        invoke("--on", "local", "--target", "rpi5", "--name", "../My Board")
    assert not home.exists()


def test_targets_say_whether_a_profile_is_used(profile: tuple[Path, str], home: Path) -> None:
    shutil.copytree(profile[0], home)
    with pytest.raises(TargetError, match="rpi5-profiled is a profile; name the target that it was made of"):
        invoke("--on", "local", "--target", "rpi5-profiled")
    path = find_user_targets() / "rpi5-profiled.toml"
    used = edgekit("targets", "rpi5-profiled").stdout
    path.write_text(path.read_text().replace("networks = ", 'networks = "other" # '))
    unused = edgekit("targets", "rpi5-profiled").stdout

    assert "Latency is predicted by the profile" in " ".join(used.split())
    assert "is of other networks than those of this release" in " ".join(unused.split())
