"""`edgekit package` with limits that only compressed forms keep."""

import json
import re
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tests.toolkit.package_run import (
    Outcome,
    edgekit,
    package,
    read_only,
    saved,
    stored,
    tiny,
)
from tests.toolkit.small_models import model_of, node, random_weight

from edgekit_host.transport.package_encoder import coded_size
from edgekit_runtime.errors import RecipeError
from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.selftest import run_selftest
from edgekit_toolkit.compress.compression import Compression
from edgekit_toolkit.packaging.recipe import read_recipe

pytestmark = pytest.mark.usefixtures("home")

MAX_BYTES = 12_000
MAX_MLP_BYTES = 2_400
needs_litert = pytest.mark.skipif(
    not (find_spec("ai_edge_litert") and find_spec("ai_edge_quantizer")),
    reason="LiteRT is not installed: edgekit[litert-host]",
)


def compressed(
    out: Path, budget: str, *options: object, name: str = "italy_power_mlp", search_s: float = 10
) -> Outcome:
    model, data = tiny(name, calibration_samples=32, evaluation_samples=120)
    return package(model, out, *data, "--search-seconds", search_s, "-b", budget, *options)


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
    outcome = compressed(folder, f"transport={MAX_BYTES}B,drop=2%", "--json", name="digits_cnn", search_s=1)
    assert outcome.code == 0, outcome.stdout
    return folder, outcome.json


def check_transport(folder: Path, report: dict[str, Any], max_bytes: int) -> None:
    """Check that the package travels within the limit, and that a device accepts it."""
    candidate = chosen_of(report)
    assert "weights of" in candidate["label"]
    content = only_package(folder).read_bytes()
    assert candidate["figures"]["transport"]["value"] == coded_size(content) <= max_bytes < len(content)
    with read_only(folder) as opened:
        run_selftest(open_session(opened), opened)


def test_limit_on_transport_is_kept_by_weights_of_few_values(made: tuple[Path, dict[str, Any]]) -> None:
    check_transport(*made, MAX_BYTES)


@needs_litert
def test_limit_on_transport_is_kept_for_litert(tmp_path: Path) -> None:
    options = ("--backend", "litert", "--json")
    outcome = compressed(tmp_path, f"transport={MAX_MLP_BYTES}B,drop=5%", *options, search_s=3)
    assert outcome.code == 0, outcome.stdout
    check_transport(tmp_path, outcome.json, MAX_MLP_BYTES)


def test_recipe_of_a_compressed_package_repeats_its_bytes(
    made: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    (recipe,) = made[0].glob("*.recipe.json")
    model, _ = tiny("digits_cnn")
    again = edgekit("package", model, "--recipe", recipe, "-o", tmp_path)
    assert again.code == 0, again.stderr
    first, second = (only_package(folder).read_bytes() for folder in (made[0], tmp_path))
    assert first == second


@pytest.fixture
def retrained(tmp_path: Path) -> Path:
    """`digits_cnn` with other weights."""
    model = onnx.load(tiny("digits_cnn")[0])
    draw = np.random.default_rng(0)
    for tensor in model.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        if values.dtype == np.float32 and values.size > 100:
            moved = values + 0.05 * values.std() * draw.standard_normal(values.shape).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(moved, tensor.name))
    return saved(model, tmp_path / "retrained.onnx")


def update(model: Path, recipe: Path, out: Path) -> Outcome:
    data = tiny("digits_cnn")[1]
    return package(model, out, *data, "-b", "drop=5%", "--version", "1.1.0", "--like", recipe)


def test_update_of_a_compressed_package_has_the_weights_of_the_new_model(
    made: tuple[Path, dict[str, Any]], retrained: Path, tmp_path: Path
) -> None:
    (recipe,) = made[0].glob("*.recipe.json")
    outcome = update(retrained, recipe, tmp_path / "out")
    assert outcome.code == 0, outcome.stderr
    (after,) = (tmp_path / "out").glob("*.recipe.json")
    assert read_recipe(recipe).form.compression is not None
    assert read_recipe(after).form.compression is None


def test_update_of_a_pruned_package_is_refused(
    made: tuple[Path, dict[str, Any]], retrained: Path, tmp_path: Path
) -> None:
    (path,) = made[0].glob("*.recipe.json")
    recipe = read_recipe(path)
    pruned = replace(recipe.form, compression=Compression(channels={"c": (0,)}))
    replace(recipe, form=pruned).write(tmp_path / path.name)
    shutil.copy(only_package(made[0]), tmp_path)
    outcome = update(retrained, tmp_path / path.name, tmp_path / "out")
    assert outcome.code == RecipeError.exit_code
    assert "allow to prune" in outcome.stderr


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
    model, data = tiny("mnist5k_dscnn", calibration_samples=16, evaluation_samples=40)

    def run(folder: Path, budget: str, search_s: int) -> Outcome:
        options = ("--search-seconds", search_s, "-b", budget, "--json")
        return package(model, folder, *data, *options, target="rpi5")

    plain = run(tmp_path / "plain", "drop=100%", 0).json
    limit = 0.95 * min(candidate["figures"]["energy"]["value"] for candidate in plain["candidates"])
    outcome = run(tmp_path / "pruned", f"energy={limit:.9f}mJ,drop=10%", 10)
    assert outcome.code == 0, outcome.stdout
    candidate = chosen_of(outcome.json)
    assert "pruned" in candidate["label"]
    assert [step["step"].partition(" ")[0] for step in outcome.json["compression"]] == [
        "float32",
        "channels",
        "weights",
    ]
    assert candidate["figures"]["energy"]["value"] <= limit
    with read_only(tmp_path / "pruned") as opened:
        run_selftest(open_session(opened), opened)


def test_model_without_weights_to_round_is_refused_in_words(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    weights = {"w": random_weight(draw, 64, 64), "b": random_weight(draw, 64)}
    nodes = [node("Gemm", ["x", "w", "b"], ["h"], alpha=2.0), node("Relu", ["h"], ["y"])]
    model = saved(model_of(nodes, weights, {"x": [1, 64]}), tmp_path / "net.onnx")
    limits = ("-b", "transport=900B,drop=50%", "--search-seconds", "10")
    outcome = package(model, tmp_path / "out", *limits, "--backend", "ort")
    assert outcome.code == 5, outcome.stderr
    (document,) = (tmp_path / "out").glob("*.report.json")
    assert "no weights that can be rounded" in document.read_text()


def test_limit_that_no_form_keeps_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    outcome = compressed(tmp_path, "transport=1250B,drop=2%", search_s=2)
    assert outcome.code == 5
    assert "transport at most 1.25kB" in outcome.stderr
    (document,) = tmp_path.glob("*.report.json")
    report = json.loads(document.read_text())
    assert any("none travels within the limit" in warning for warning in report["warnings"])


def test_limit_below_a_package_without_weights_is_refused_before_steps_are_searched(tmp_path: Path) -> None:
    outcome = compressed(tmp_path, "transport=300B,drop=2%", "--json")
    assert outcome.code == 5
    (document,) = tmp_path.glob("*.report.json")
    report = json.loads(document.read_text())
    labels = [candidate["label"] for candidate in report["candidates"] if "weights of" in candidate["label"]]
    assert {label.partition(", ")[2] for label in labels} == {"weights of 3 bits"}
    assert any("without its weights the package takes" in warning for warning in report["warnings"])
    assert "weights of 3 bits" in outcome.error["needed"]


def test_search_of_no_work_makes_no_compressed_form_and_says_so(tmp_path: Path) -> None:
    outcome = compressed(tmp_path, f"transport={MAX_MLP_BYTES}B,drop=2%", "--json", search_s=0.01)
    assert outcome.code == 5
    (document,) = tmp_path.glob("*.report.json")
    report = json.loads(document.read_text())
    assert not any("weights of" in candidate["label"] for candidate in report["candidates"])
    assert any("compressed forms: limit of the search" in warning for warning in report["warnings"])
    assert re.search(r", or --search-seconds \d+$", outcome.error["needed"])


def test_refusal_without_samples_asks_for_some(tmp_path: Path) -> None:
    model, _ = tiny("italy_power_mlp")
    limits = ("-b", "transport=300B", "--search-seconds", "10")
    outcome = package(model, tmp_path, *limits, "--backend", "ort", "--json")
    assert outcome.code == 5
    assert "samples (--calibration)" in outcome.error["needed"]


def test_refusal_asks_for_samples_beside_more_work(tmp_path: Path) -> None:
    model, _ = tiny("italy_power_mlp")
    limits = ("-b", f"transport={MAX_MLP_BYTES}B", "--search-seconds", "0.01")
    outcome = package(model, tmp_path, *limits, "--backend", "ort", "--json")
    assert outcome.code == 5
    assert re.search(r", or --search-seconds \d+, or samples ", outcome.error["needed"])


def test_whole_model_has_the_first_package_where_pruned_ones_are_tried_too(tmp_path: Path) -> None:
    model, data = tiny("mnist5k_dscnn", calibration_samples=16, evaluation_samples=40)
    limits = ("-b", "transport=7kB,size=26kB,drop=90%", "--search-seconds", "2")
    assert package(model, tmp_path, *data, *limits, target="rpi5").code == 5
    (document,) = tmp_path.glob("*.report.json")
    report = json.loads(document.read_text())
    labels = [candidate["label"] for candidate in report["candidates"] if "weights of" in candidate["label"]]
    assert labels
    assert not any("pruned" in label for label in labels)
    assert any("pruned: limit of the search" in warning for warning in report["warnings"])


@pytest.mark.long
def test_size_below_that_of_int8_weights_is_kept_by_pruned_channels(tmp_path: Path) -> None:
    model, data = tiny("mnist5k_dscnn", calibration_samples=24, evaluation_samples=100)
    limits = ("-b", "size=26kB,drop=10%", "--search-seconds", "10")
    outcome = package(model, tmp_path / "out", *data, *limits, "--json", target="rpi5")
    assert outcome.code == 0, outcome.stdout
    assert "pruned" in chosen_of(outcome.json)["label"]
    assert only_package(tmp_path / "out").stat().st_size <= 26_000


def test_metric_of_masks_judges_a_package_within_a_limit_on_transport(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    weights = {
        "w1": random_weight(draw, 32, 1, 3, 3),
        "w2": random_weight(draw, 32, 32, 3, 3),
        "w3": random_weight(draw, 1, 32, 1, 1),
    }
    nodes = [
        node("Conv", ["x", "w1"], ["h1"], pads=[1, 1, 1, 1]),
        node("Relu", ["h1"], ["r1"]),
        node("Conv", ["r1", "w2"], ["h2"], pads=[1, 1, 1, 1]),
        node("Relu", ["h2"], ["r2"]),
        node("Conv", ["r2", "w3"], ["logits"]),
        node("Sigmoid", ["logits"], ["y"]),
    ]
    model = saved(model_of(nodes, weights, {"x": [1, 1, 12, 12]}), tmp_path / "net.onnx")
    images = stored(tmp_path / "x.npz", {"x": draw.normal(size=(40, 1, 12, 12)).astype(np.float32)})
    metric = Path(__file__).parents[2] / "benchmarks" / "metrics.py"
    options = ("--calibration", images, "--metric", f"{metric}:mask_iou", "--search-seconds", "3")
    outcome = package(model, tmp_path / "out", *options, "-b", "transport=8kB,drop=10%", "--json")
    assert outcome.code == 0, outcome.stdout
    candidate = chosen_of(outcome.json)
    assert "weights of" in candidate["label"]
    assert candidate["figures"]["transport"]["value"] <= 8_000
