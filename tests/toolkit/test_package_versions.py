"""The version of a package that is made again: another content never takes the version of what is there."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.toolkit.package_run import Outcome, edgekit, mlp, package, samples, saved, stored

pytestmark = pytest.mark.usefixtures("new_home")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(mlp(), tmp_path / "net.onnx")


def versions(folder: Path) -> list[str]:
    return sorted(path.name.split("-")[1] for path in folder.glob("*.edgepkg"))


def make(model: Path, *options: object) -> Outcome:
    return package(model, model.parent / "out", "--json", *options)


def test_other_content_gets_the_next_patch_and_the_report_says_so(model: Path) -> None:
    assert make(model).json["version"] == "1.0.0"
    first = (model.parent / "out" / "net-1.0.0-x86-64.edgepkg").read_bytes()
    data = stored(model.parent / "d.npz", samples(20, 1, y=np.zeros(20, np.int64)))
    report = make(model, "--eval", data).json
    assert report["version"] == "1.0.1"
    assert any(
        note == "net-1.0.0-x86-64.edgepkg was there with other content, so this is 1.0.1; --version decides"
        for note in report["warnings"]
    )
    assert versions(model.parent / "out") == ["1.0.0", "1.0.1"]
    assert (model.parent / "out" / "net-1.0.0-x86-64.edgepkg").read_bytes() == first
    # Whole: the package under its new version verifies and its recipe repeats it.
    made = model.parent / "out" / "net-1.0.1-x86-64.edgepkg"
    assert edgekit("verify", made).code == 0
    recipe = model.parent / "out" / "net-1.0.1-x86-64.recipe.json"
    assert edgekit("package", model, "--recipe", recipe, "-o", model.parent / "again").code == 0
    assert (model.parent / "again" / made.name).read_bytes() == made.read_bytes()


def test_same_content_keeps_its_version(model: Path) -> None:
    first, second = make(model), make(model)
    # A measured time may decide between two candidates: then the content is another one.
    same = first.json["outcome"]["chosen"] == second.json["outcome"]["chosen"]
    assert second.json["version"] == ("1.0.0" if same else "1.0.1")


def test_repeated_recipe_is_kept_as_the_same_version(model: Path) -> None:
    """Its bytes are there already: the content is compared, not the time of the file."""
    assert make(model).code == 0
    out = model.parent / "out"
    before = (out / "net-1.0.0-x86-64.edgepkg").read_bytes()
    assert edgekit("package", model, "--recipe", out / "net-1.0.0-x86-64.recipe.json", "-o", out).code == 0
    assert versions(out) == ["1.0.0"]
    assert (out / "net-1.0.0-x86-64.edgepkg").read_bytes() == before


def test_stated_version_is_used_as_it_is(model: Path) -> None:
    assert make(model, "--version", "1.0.0").json["version"] == "1.0.0"
    data = stored(model.parent / "d.npz", samples(20, 1, y=np.zeros(20, np.int64)))
    report = make(model, "--version", "1.0.0", "--eval", data).json
    assert report["version"] == "1.0.0"
    assert versions(model.parent / "out") == ["1.0.0"]


def test_refusal_leaves_the_report_of_the_package_that_is_there(model: Path) -> None:
    assert make(model).code == 0
    report = model.parent / "out" / "net-1.0.0-x86-64.report.json"
    before = report.read_bytes()
    refused = make(model, "--budget", "size=1kB")
    assert refused.code == 5
    assert report.read_bytes() == before
    report = model.parent / "out" / "net-1.0.1-x86-64.report.json"
    assert json.loads(report.read_bytes())["version"] == "1.0.1"


def test_file_that_is_no_package_is_not_replaced(model: Path) -> None:
    (model.parent / "out").mkdir()
    (model.parent / "out" / "net-1.0.0-x86-64.edgepkg").write_text("mine")
    assert make(model).json["version"] == "1.0.1"
    assert (model.parent / "out" / "net-1.0.0-x86-64.edgepkg").read_text() == "mine"


def test_version_does_not_fall_behind_a_later_one_when_an_earlier_one_was_removed(model: Path) -> None:
    out = model.parent / "out"
    out.mkdir()
    for other in ("net-1.0.9-x86-64", "net-1.0.11-rpi5", "net-1.1.3-x86-64", "net-1.0.x-x86-64"):
        (out / f"{other}.edgepkg").write_text("mine")
    assert make(model).json["version"] == "1.0.10"


def test_files_are_shown_with_their_folder(model: Path) -> None:
    outcome = package(model, model.parent / "out")
    shown = "".join(outcome.stdout.split())
    for ending in ("edgepkg", "recipe.json", "evidence.json", "report.html"):
        assert str(model.parent / "out" / f"net-1.0.0-x86-64.{ending}") in shown


def test_power_mode_decides_the_modelled_latency(tmp_path: Path) -> None:
    model = saved(mlp(wide=1024), tmp_path / "net.onnx")
    slow, fast = (
        package(model, tmp_path / mode, "--power-mode", mode, "--json", target="jetson").json
        for mode in ("7W", "MAXN_SUPER")
    )
    latency = [report["candidates"][0]["figures"]["latency"]["value"] for report in (slow, fast)]
    assert latency[0] > latency[1]
    assert (slow["target"]["power_mode"], fast["target"]["power_mode"]) == ("7W", "MAXN_SUPER")
    outcome = package(model, tmp_path / "named", "--power-mode", "15W", target="jetson")
    assert "(jetson-orin-nano, tensorrt, 15W)" in " ".join(outcome.stdout.split())


def test_unknown_power_mode_names_those_of_the_target(model: Path) -> None:
    outcome = package(model, model.parent / "out", "--power-mode", "9W", target="jetson")
    assert outcome.code == 6
    assert (
        "jetson-orin-nano: power mode: expected one of MAXN_SUPER, 25W, 15W, 7W, got '9W'" in outcome.stderr
    )


def test_target_lists_its_power_modes() -> None:
    shown = " ".join(edgekit("targets", "jetson").stdout.split())
    assert "MAXN_SUPER, 25W (default), 15W, 7W (--power-mode)" in shown
