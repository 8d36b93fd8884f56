"""The report document of real runs: it fits the schema, and its figures are those of files and model."""

import json
import math
import re
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tests.toolkit.cases import cases
from tests.toolkit.control_flow_models import loop_by_data
from tests.toolkit.package_run import (
    edgekit,
    mlp,
    package,
    read_only,
    samples,
    saved,
    stored,
    tiny,
)

from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.sessions.ort_products import saturates
from edgekit_toolkit.packaging.signing_keys import load_signer
from edgekit_toolkit.pipeline.request import Request
from edgekit_toolkit.pipeline.search import search
from edgekit_toolkit.selection.budget import parse_budget
from edgekit_toolkit.targets.loader import load_target

Report = dict[str, Any]


pytestmark = pytest.mark.usefixtures("home")


def report_of(folder: Path) -> Report:
    (path,) = folder.glob("*.report.json")
    report: Report = json.loads(path.read_text(encoding="utf-8"))
    return report


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a model with ten layers, with limits on everything and measured layers."""
    out = tmp_path_factory.mktemp("out")
    source, data = tiny("mnist5k_dscnn")
    limits = "size=40kB,drop=2%,latency=1s,memory=1GB,energy=1J"
    options = (*data, "--budget", limits, "--search-seconds", 20)
    assert package(source, out / "run", *options, target="rpi4").code == 0
    return out / "run"


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return report_of(folder)


def test_candidates_are_numbered_and_one_is_chosen(report: Report) -> None:
    candidates = report["candidates"]
    assert [one["id"] for one in candidates] == [f"C{place}" for place in range(len(candidates))]
    assert len({one["label"] for one in candidates}) == len(candidates)
    (chosen,) = (one for one in candidates if one["chosen"])
    assert chosen["id"] == report["outcome"]["chosen"]
    assert chosen["meets"]
    assert chosen["pareto"]


def test_a_candidate_meets_the_limits_that_its_figures_keep(report: Report) -> None:
    limits = {line["limit"]: line["max"] for line in report["budget"]}
    assert set(limits) == {"size", "drop", "latency", "memory", "energy"}
    for candidate in report["candidates"]:
        over = {name for name, most in limits.items() if candidate["figures"][name]["value"] > most}
        assert set(candidate["violations"]) == over
        assert candidate["meets"] == (not over)
    assert any(candidate["violations"] for candidate in report["candidates"])


def test_budget_lines_show_the_chosen_candidate(report: Report) -> None:
    (chosen,) = (one for one in report["candidates"] if one["chosen"])
    for line in report["budget"]:
        figure = chosen["figures"][line["limit"]]
        assert (line["value"], line["label"]) == (figure["value"], figure["label"])
        assert line["state"] == ("not resolved" if line["limit"] == "drop" else "ok")
        assert line["value"] <= line["max"]


def test_each_figure_says_how_and_where_it_was_found(report: Report) -> None:
    for candidate in report["candidates"]:
        found = {name: (figure["label"], figure["on"]) for name, figure in candidate["figures"].items()}
        assert found == {
            "size": ("measured", "host"),
            "latency": ("modelled", "rpi4"),
            "host_latency": ("measured", "host"),
            "memory": ("estimated", "rpi4"),
            "energy": ("modelled", "rpi4"),
            "score": ("measured", "host"),
            "drop": ("measured", "host"),
        }


def test_on_the_target_itself_latency_is_measured(tmp_path: Path) -> None:
    """Without VNNI the host computes 8-bit products in another way, so it does not stand for `x86-64`."""
    expected = ("modelled", "x86-64") if saturates() else ("measured", "host")
    assert package(saved(mlp(), tmp_path / "net.onnx"), tmp_path / "out", target="x86-64").code == 0
    for candidate in report_of(tmp_path / "out")["candidates"]:
        figures = candidate["figures"]
        assert (figures["latency"]["label"], figures["latency"]["on"]) == expected
        assert (figures["latency"]["value"] == figures["host_latency"]["value"]) == (not saturates())


def test_the_drop_is_the_difference_of_the_scores_in_points(report: Report) -> None:
    """Of the chosen one those on the samples that chose nothing; a gain is negative."""
    for candidate in report["candidates"]:
        held_back = candidate["drop"]["held_back"]
        baseline = report["accuracy" if held_back else "data"]
        baseline = baseline["baseline"] if held_back else baseline["evaluation"]["baseline"]
        score = report["accuracy"]["score"] if held_back else candidate["figures"]["score"]["value"]
        drop = candidate["figures"]["drop"]["value"]
        assert drop == pytest.approx(100 * (baseline - score), abs=1e-4)
        assert candidate["drop"]["interval"][0] <= drop <= candidate["drop"]["interval"][1]
    assert [one["drop"]["held_back"] for one in report["candidates"] if one["chosen"]] == [True]


def test_forms_that_a_relative_beats_are_named_with_their_loss(report: Report) -> None:
    labels = {one["label"] for one in report["candidates"]}
    assert report["set_aside"]
    for text in report["set_aside"]:
        match = re.fullmatch(r"(int8 .*) \((\d+\.\d) dB more noise than (.*)\)", text)
        assert match is not None, text
        assert match[1] not in labels
        assert match[3] in labels
    assert "set aside" not in " ".join(report["warnings"])


def test_the_samples_on_which_noise_was_measured_are_counted(report: Report) -> None:
    assert report["data"]["calibration"]["noise_samples"] == 16


@pytest.mark.parametrize("target", ["x86-64", "jetson"])
def test_a_float16_model_is_packaged_as_what_it_is(target: str, tmp_path: Path) -> None:
    source = mlp()
    for constant in source.graph.initializer:
        half = numpy_helper.to_array(constant).astype(np.float16)
        constant.CopyFrom(numpy_helper.from_array(half, constant.name))
    for value in (*source.graph.input, *source.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    assert package(saved(source, tmp_path / "net.onnx"), tmp_path / "out", target=target).code == 0
    report = report_of(tmp_path / "out")
    (only,) = report["candidates"]
    assert (only["label"], only["precision"]) == ("float16", {"fp16": 2})
    assert {layer["precision"] for layer in report["layers"]} == {"fp16"}
    assert any("the model computes in float16" in text for text in report["warnings"])
    assert report["data"]["calibration"]["noise_samples"] == 0
    (path,) = (tmp_path / "out").glob("*.edgepkg")
    assert edgekit("verify", path).code == 0


def test_scores_of_all_candidates_equal_an_independent_computation(tmp_path: Path) -> None:
    """Labelled by the source model, so that every change of an answer costs."""
    source = saved(mlp(), tmp_path / "net.onnx")
    x = samples(400, 2)["x"]
    y = OrtSession(source, OrtOptions(threads=1)).run({"x": x})["y"].argmax(axis=1)
    asked = Request(
        model=source,
        target=load_target("rpi4"),
        budget=parse_budget(""),
        name="net",
        version="1",
        calibration=stored(tmp_path / "c.npz", samples(32, 1)),
        evaluation=stored(tmp_path / "e.npz", {"x": x, "y": y}),
        threads=1,
        search_s=0,
    )
    run = search(asked, load_signer(), lambda *_: None)
    choosing, confirmation = run.scores.choosing, run.scores.confirmation
    assert confirmation is not None
    assert (choosing.samples, confirmation.samples) == (200, 200)
    assert choosing.baseline == confirmation.baseline == 1
    scores = [(a + b) / 2 for a, b in zip(choosing.scores, confirmation.scores, strict=True)]
    assert min(scores) < 0.99
    for candidate, score in zip(run.candidates, scores, strict=True):
        is_stored = candidate.form.kind in {"int8-weights", "int4-weights"}
        options = OrtOptions(threads=1, fold_weights=is_stored)
        session = OrtSession(candidate.model.content, options)
        # One by one: dynamic int8 takes one scale for a whole batch.
        answers = [session.run({"x": part})["y"].argmax(axis=1) for part in np.split(x, 400)]
        assert score == pytest.approx((np.concatenate(answers) == y).mean(), abs=1e-9), candidate.label


def test_data_name_the_samples_that_were_used(report: Report) -> None:
    data = report["data"]
    assert (data["calibration"]["kind"], data["calibration"]["samples"]) == ("user", 64)
    assert (data["evaluation"]["kind"], data["evaluation"]["samples"]) == ("user", 200)
    assert data["evaluation"]["metric"] == "top1"
    assert data["calibration"]["sha256"] != data["evaluation"]["sha256"]


def test_source_describes_the_model_file(report: Report) -> None:
    source, _ = tiny("mnist5k_dscnn")
    model = onnx.load(source)
    described = report["source"]
    assert (described["file"], described["bytes"]) == (source.name, source.stat().st_size)
    assert described["nodes"] == len(model.graph.node)
    assert described["opset"] == model.opset_import[0].version
    assert described["parameters"] == sum(math.prod(weight.dims) for weight in model.graph.initializer)
    assert described["inputs"] == [{"name": "image", "dtype": "float32", "shape": ["N", 1, 28, 28]}]


def test_layers_account_for_the_weights_and_work_of_the_model(report: Report) -> None:
    source, _ = tiny("mnist5k_dscnn")
    model = onnx.load(source)
    weights = sum(4 * math.prod(weight.dims) for weight in model.graph.initializer if len(weight.dims) > 1)
    layers = report["layers"]
    assert [layer["op"] for layer in layers].count("Conv") == 9
    # Biases come on top of the matrices.
    assert weights <= sum(layer["bytes_before"] for layer in layers) <= 1.05 * weights
    assert all(layer["macs"] > 0 for layer in layers)
    assert all(0 < layer["bytes_after"] <= layer["bytes_before"] for layer in layers)


def test_layers_have_the_precisions_of_the_chosen_candidate(report: Report) -> None:
    (chosen,) = (one for one in report["candidates"] if one["chosen"])
    counted: dict[str, int] = {}
    for layer in report["layers"]:
        counted[layer["precision"]] = counted.get(layer["precision"], 0) + 1
    assert counted == chosen["precision"]


def test_shares_of_the_noise_add_up(report: Report) -> None:
    shares = [layer["noise_share"] for layer in report["layers"] if layer["noise_share"] is not None]
    assert len(shares) >= 2
    assert all(share >= 0 for share in shares)
    assert sum(shares) == pytest.approx(1, abs=1e-6)


def test_steps_follow_on_one_another(report: Report) -> None:
    steps = report["steps"]
    for before, after in pairwise(steps):
        assert before["bytes_after"] == after["bytes_before"]
        assert before["nodes_after"] == after["nodes_before"]
    for step in steps:
        assert step["applied"] or step["reason"]
        assert step["applied"] or step["bytes_before"] == step["bytes_after"]


def test_provenance_says_what_time_and_tools_it_took(report: Report, folder: Path) -> None:
    provenance = report["provenance"]
    assert set(provenance["tools"]) >= {"edgekit", "onnx", "onnxruntime", "numpy"}
    assert set(provenance["seconds"]) >= {"import", "optimise", "search", "judge", "measure", "choose"}
    with read_only(folder) as opened:
        assert opened.manifest.provenance["recipe_sha256"] == provenance["recipe_sha256"]
        assert opened.key_id == report["package"]["key_id"]


def test_the_command_can_be_typed_again(report: Report) -> None:
    assert report["command"].startswith("edgekit package ")
    assert "--budget size=40kB,drop=2%,latency=1s,memory=1GB,energy=1J" in report["command"]


RUNS: dict[str, tuple[onnx.ModelProto, int | None, tuple[object, ...], int]] = {
    "no data": (mlp(), None, (), 0),
    "one sample": (mlp(), 1, (), 0),
    "held out": (mlp(), 9, (), 0),
    "refused": (mlp(), 9, ("--budget", "size=1kB,latency=0ms"), 5),
    "unknown figures": (loop_by_data(), None, (), 0),
    "unknown figures refused": (loop_by_data(), None, ("--budget", "energy=1mJ,latency=1ms"), 5),
}


@cases("what", RUNS)
def test_the_document_fits_the_schema(what: str, tmp_path: Path) -> None:
    model, count, options, code = RUNS[what]
    data = () if count is None else ("--calibration", stored(tmp_path / "c.npz", samples(count, 1)))
    source = saved(model, tmp_path / "net.onnx")
    assert package(source, tmp_path / "out", *data, *options, target="rpi5").code == code
    schema = json.loads(
        resources.files("edgekit_toolkit.report").joinpath("report.schema.json").read_text(encoding="utf-8")
    )
    jsonschema.Draft202012Validator(schema).validate(report_of(tmp_path / "out"))


def test_a_refusal_names_no_package_and_shows_the_closest(tmp_path: Path) -> None:
    source = saved(mlp(), tmp_path / "net.onnx")
    assert package(source, tmp_path / "out", "--budget", "size=1kB").code == 5
    report = report_of(tmp_path / "out")
    assert (report["package"], report["recipe"], report["evidence"]) == (None, None, None)
    outcome = report["outcome"]
    assert (outcome["kind"], outcome["chosen"], outcome["binding"]) == ("refused", None, ["size"])
    (closest,) = (one for one in report["candidates"] if one["id"] == outcome["closest"])
    (size,) = (line for line in report["budget"] if line["limit"] == "size")
    assert (size["value"], size["state"]) == (closest["figures"]["size"]["value"], "over")


def test_figures_that_are_not_known_are_missing_and_not_zero(tmp_path: Path) -> None:
    source = saved(loop_by_data(), tmp_path / "net.onnx")
    assert package(source, tmp_path / "out", target="rpi5").code == 0
    for candidate in report_of(tmp_path / "out")["candidates"]:
        assert candidate["figures"]["latency"]["value"] is None
        assert candidate["figures"]["energy"]["value"] is None
        assert candidate["figures"]["host_latency"]["value"] > 0
