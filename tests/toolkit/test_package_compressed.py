"""`edgekit package` with limits that only compressed forms keep."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.toolkit.package_run import (
    Outcome,
    edgekit,
    package,
    read_only,
    tiny,
    tiny_scored_on,
)

from edgekit_host.transport.package_encoder import coded_size
from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.selftest import run_selftest

pytestmark = pytest.mark.usefixtures("home")

MAX_BYTES = 12_000
needs_litert = pytest.mark.skipif(
    not (find_spec("ai_edge_litert") and find_spec("ai_edge_quantizer")),
    reason="LiteRT is not installed: edgekit[litert-host]",
)


def compressed(out: Path, budget: str, *options: object) -> Outcome:
    model, data = tiny("digits_cnn")
    return package(model, out, *data, "--search-seconds", "1", "-b", budget, *options)


def only_package(folder: Path) -> Path:
    (path,) = folder.glob("*.edgepkg")
    return path


def chosen_of(report: dict[str, Any]) -> dict[str, Any]:
    (candidate,) = (candidate for candidate in report["candidates"] if candidate["chosen"])
    return dict(candidate)


@pytest.fixture(scope="module")
def made(home: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folder and report of a package for onnxruntime."""
    folder = tmp_path_factory.mktemp("compressed")
    outcome = compressed(folder, f"transport={MAX_BYTES}B,drop=2%", "--json")
    assert outcome.code == 0, outcome.stdout
    return folder, outcome.json


def check_transport(folder: Path, report: dict[str, Any]) -> None:
    """Check that the package travels within the limit, and that a device accepts it."""
    candidate = chosen_of(report)
    assert "weights of" in candidate["label"]
    content = only_package(folder).read_bytes()
    assert candidate["figures"]["transport"]["value"] == coded_size(content) <= MAX_BYTES < len(content)
    with read_only(folder) as opened:
        run_selftest(open_session(opened), opened)


def test_limit_on_transport_is_kept_by_weights_of_few_values(made: tuple[Path, dict[str, Any]]) -> None:
    check_transport(*made)


@needs_litert
def test_limit_on_transport_is_kept_for_litert(tmp_path: Path) -> None:
    outcome = compressed(tmp_path, f"transport={MAX_BYTES}B,drop=2%", "--backend", "litert", "--json")
    assert outcome.code == 0, outcome.stdout
    check_transport(tmp_path, outcome.json)


def test_recipe_of_a_compressed_package_repeats_its_bytes(
    made: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    (recipe,) = made[0].glob("*.recipe.json")
    model, _ = tiny("digits_cnn")
    again = edgekit("package", model, "--recipe", recipe, "-o", tmp_path)
    assert again.code == 0, again.stderr
    first, second = (only_package(folder).read_bytes() for folder in (made[0], tmp_path))
    assert first == second


def test_report_and_inspect_show_what_compression_gave(made: tuple[Path, dict[str, Any]]) -> None:
    folder, report = made
    steps = report["compression"]
    assert [step["step"].partition(" ")[0] for step in steps] == ["float32", "weights", "package"]
    assert steps[0]["bytes"] > steps[1]["bytes"] > steps[2]["bytes"]
    (page,) = folder.glob("*.report.html")
    assert "Compression" in page.read_text()
    assert " bits, " in edgekit("inspect", only_package(folder)).stdout


def test_limits_that_a_plain_form_keeps_bring_no_compressed_form(tmp_path: Path) -> None:
    report = compressed(tmp_path, "transport=10MB,drop=2%", "--json").json
    assert "compress" not in report["provenance"]["seconds"]
    assert report["compression"] == []


def test_energy_that_binds_is_kept_by_pruned_channels(tmp_path: Path) -> None:
    model, data = tiny_scored_on(200, "mnist5k_dscnn", tmp_path)

    def run(folder: Path, budget: str) -> Outcome:
        return package(model, folder, *data, "--search-seconds", "1", "-b", budget, "--json", target="rpi5")

    plain = run(tmp_path / "plain", "drop=100%").json
    limit = 0.95 * min(candidate["figures"]["energy"]["value"] for candidate in plain["candidates"])
    outcome = run(tmp_path / "pruned", f"energy={limit:.9f}mJ,drop=10%")
    assert outcome.code == 0, outcome.stdout
    candidate = chosen_of(outcome.json)
    assert "pruned" in candidate["label"]
    assert candidate["figures"]["energy"]["value"] <= limit
    with read_only(tmp_path / "pruned") as opened:
        run_selftest(open_session(opened), opened)


def test_limit_that_no_form_keeps_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    outcome = compressed(tmp_path, "transport=2kB,drop=2%")
    assert outcome.code == 5
    assert "transport at most 2kB" in outcome.stderr
    (document,) = tmp_path.glob("*.report.json")
    report = json.loads(document.read_text())
    assert any("none travels within the limit" in warning for warning in report["warnings"])
