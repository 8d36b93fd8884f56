"""`edgekit package` end to end: what it writes for real models, targets and data, and what it says."""

import hashlib
import json
import re
from contextlib import closing
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from onnx import helper
from tests.toolkit.package_run import (
    TINY,
    Outcome,
    edgekit,
    listing,
    mlp,
    model_of,
    package,
    read_only,
    samples,
    saved,
    stored,
    tensor,
    tiny,
)

from edgekit_runtime.drift.monitor import Drift
from edgekit_runtime.errors import BackendError
from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.sessions.selftest import run_selftest
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.measurement.peak_memory import PeakMemory
from edgekit_toolkit.packaging.evidence import evidence_path, read_evidence

ENDINGS = ["edgepkg", "evidence.json", "recipe.json", "report.html", "report.json"]


pytestmark = pytest.mark.usefixtures("home")


@dataclass(frozen=True)
class Case:
    """One packaging of `digits_cnn`."""

    target: str
    outcome: Outcome
    out: Path
    source: Path

    @property
    def path(self) -> Path:
        (path,) = self.out.glob("*.edgepkg")
        return path

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(next(self.out.glob("*.report.json")).read_text(encoding="utf-8"))
        return report


@pytest.fixture(scope="module", params=["x86-64", "jetson"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    source, data = tiny("digits_cnn", calibration_samples=300, evaluation_samples=360)
    copy = tmp_path_factory.mktemp("model") / source.name
    copy.write_bytes(source.read_bytes())
    copy.chmod(0o444)
    out = tmp_path_factory.mktemp("out") / "new" / "folder"
    outcome = package(copy, out, *data, "--search-seconds", 0.3, target=request.param)
    return Case(request.param, outcome, out, copy)


def test_a_model_with_data_is_packaged(case: Case) -> None:
    assert (case.outcome.code, case.outcome.stderr) == (0, "")
    target = {"jetson": "jetson-orin-nano"}.get(case.target, case.target)
    assert sorted(listing(case.out)) == [f"digits_cnn-1.0.0-{target}.{ending}" for ending in ENDINGS]


def test_the_package_verifies_and_passes_its_self_test(case: Case) -> None:
    with read_only(case.out) as opened:
        session = open_session(opened)
        assert [check.message for check in run_selftest(session, opened).checks if not check.passed] == []
        session.close()
    assert edgekit("verify", case.path).code == 0


def test_the_package_says_how_inputs_and_outputs_look(case: Case) -> None:
    with np.load(TINY / "digits_cnn.calib.npz") as arrays:
        images = arrays["image"]
    with read_only(case.out) as opened, closing(open_session(opened)) as session:
        drift = Drift(opened.manifest.inputs, opened.manifest.outputs, opened.manifest.figures)
        for image in images:
            feeds = {"image": image[None]}
            drift.add(drift.pick_inputs(feeds), session.run(feeds))
    document: Any = drift.to_json()
    # The reference was made from 150 of these 300: chance alone makes a distance of up to about 0.1.
    assert document["inputs"]["image"]["psi"] < 0.02
    assert document["inputs"]["image"]["outside"] == 0
    assert document["outputs"]["logits"]["classes_psi"] < 0.15


def test_the_source_model_stays_as_it_was(case: Case) -> None:
    with read_only(case.out) as opened:
        stated = opened.manifest.provenance["source_sha256"]
    digest = hashlib.sha256(case.source.read_bytes()).hexdigest()
    assert digest == stated == hashlib.sha256((TINY / "digits_cnn.onnx").read_bytes()).hexdigest()


def test_manifest_and_recipe_name_each_other(case: Case) -> None:
    recipe = json.loads(next(case.out.glob("*.recipe.json")).read_text(encoding="utf-8"))
    with read_only(case.out) as opened:
        assert opened.manifest.provenance["recipe_sha256"] == recipe["sha256"]
        assert opened.manifest.figures == recipe["figures"]
        model = hashlib.sha256(opened.read("model.onnx")).hexdigest()
    assert model == recipe["model_sha256"]


def test_the_evidence_is_signed_and_about_this_package(case: Case) -> None:
    trust = TrustStore.from_folder(find_keys_folder())
    predicate = read_evidence(evidence_path(case.path), case.path, trust).predicate
    latency = predicate["latency_here"]
    assert 0 < latency["quartiles_ms"][0] <= latency["median_ms"] <= latency["quartiles_ms"][1]


@pytest.mark.usefixtures("measured_memory")
def test_the_evidence_has_the_measured_memory(tmp_path: Path) -> None:
    assert package(saved(mlp(), tmp_path / "net.onnx"), tmp_path / "out").code == 0
    (path,) = (tmp_path / "out").glob("*.edgepkg")
    trust = TrustStore.from_folder(find_keys_folder())
    memory = read_evidence(evidence_path(path), path, trust).predicate["memory_here"]
    # A tiny model adds less than two bare processes differ by, about 1 MiB.
    assert memory["peak_bytes"] > 0.9 * memory["engine_bytes"] > 1 << 20


def test_the_report_fits_its_schema_and_the_files(case: Case) -> None:
    schema = json.loads(
        resources.files("edgekit_toolkit.report").joinpath("report.schema.json").read_text(encoding="utf-8")
    )
    jsonschema.Draft202012Validator(schema).validate(case.report)
    written = case.report["package"]
    content = case.path.read_bytes()
    assert (written["file"], written["bytes"]) == (case.path.name, len(content))
    assert written["sha256"] == hashlib.sha256(content).hexdigest()
    (chosen,) = (one for one in case.report["candidates"] if one["chosen"])
    assert chosen["figures"]["size"]["value"] == len(content)
    page = next(case.out.glob("*.report.html")).read_text(encoding="utf-8")
    assert written["file"] in page
    assert "<script" not in page


def accuracy(run: Any, arrays: Any) -> float:
    got = run({"image": arrays["image"]})["logits"].argmax(axis=1)
    return float((got == arrays["y"]).mean())


def test_scores_equal_an_independent_computation(case: Case) -> None:
    with np.load(TINY / "digits_cnn.eval.npz") as arrays:
        evaluation = dict(arrays)
    with read_only(case.out) as opened:
        score: Any = opened.manifest.figures["score"]
        session = open_session(opened, threads=1)
        packaged = accuracy(session.run, evaluation)
        session.close()
    source = accuracy(OrtSession(case.source, OrtOptions(threads=1)).run, evaluation)
    assert (score["metric"], score["samples"], score["held_back"]) == ("top1", 180, True)
    (chosen,) = (one for one in case.report["candidates"] if one["chosen"])
    choosing = chosen["figures"]["score"]["value"], case.report["data"]["evaluation"]["baseline"]
    # Half of the samples choose, half confirm. Batches of another size may round a near tie differently.
    assert (choosing[0] + score["value"]) / 2 == pytest.approx(packaged, abs=1.01 / 360)
    assert (choosing[1] + score["source_value"]) / 2 == pytest.approx(source, abs=1.01 / 360)
    assert score["drop_points"] == pytest.approx(100 * (score["source_value"] - score["value"]), abs=1e-3)
    low, high = score["drop_interval_points"]
    assert low <= score["drop_points"] <= high


def test_terminal_names_outcome_limits_and_files_in_80_columns(case: Case) -> None:
    lines = case.outcome.stdout.splitlines()
    long = [line for line in lines if len(line) > 80 and str(case.out) not in line]
    assert long == []
    text = "".join(case.outcome.stdout.split())  # long paths are folded
    for word in (
        "PACKAGED",
        "Size",
        "Drop",
        *(path.name for path in case.out.iterdir() if "report" not in path.name),
    ):
        assert word in text


def test_json_prints_the_report_and_nothing_else(tmp_path: Path) -> None:
    outcome = package(saved(mlp(), tmp_path / "net.onnx"), tmp_path / "out", "--json")
    assert outcome.code == 0
    report = json.loads((tmp_path / "out" / "net-1.0.0-x86-64.report.json").read_text(encoding="utf-8"))
    assert outcome.json == report


def test_without_data_everything_warns(tmp_path: Path) -> None:
    model = saved(mlp(), tmp_path / "net.onnx")
    outcome = package(model, tmp_path / "out")
    assert outcome.code == 0
    page = next((tmp_path / "out").glob("*.html")).read_text(encoding="utf-8")
    report = json.loads(next((tmp_path / "out").glob("*.report.json")).read_text(encoding="utf-8"))
    (warning,) = (text for text in report["warnings"] if "NO DATA" in text)
    assert "--calibration and --eval" in warning
    assert warning in page
    assert " ".join(warning.split()) in " ".join(outcome.stdout.split())
    with read_only(tmp_path / "out") as opened:
        score: Any = opened.manifest.figures["score"]
    assert (score["samples_kind"], score["samples_sha256"]) == ("generated", None)


def test_without_data_there_is_no_drop_and_nothing_calls_it_ok(tmp_path: Path) -> None:
    model = saved(mlp(), tmp_path / "net.onnx")
    outcome = package(model, tmp_path / "out", "--json")
    report = outcome.json
    assert outcome.code == 0
    (line,) = (line for line in report["budget"] if line["limit"] == "drop")
    assert (line["value"], line["state"]) == (None, "not checked")
    assert (report["accuracy"]["state"], report["accuracy"]["drop_points"]) == ("not checked", None)
    for candidate in report["candidates"]:
        assert candidate["drop"] is candidate["figures"]["drop"]["value"] is None
        assert candidate["figures"]["score"]["value"] is None
    with read_only(tmp_path / "out") as opened:
        score: Any = opened.manifest.figures["score"]
        assert not [name for name in score if "drop" in name]
        assert "drop" not in opened.manifest.budget
    page = next((tmp_path / "out").glob("*.html")).read_text(encoding="utf-8")
    text = " ".join(package(model, tmp_path / "out").stdout.split())
    for shown in (page, text):
        assert "not checked: no data" in shown
    assert "NOT CHECKED the drop in accuracy, no data" in text


def test_without_data_what_computes_something_else_is_set_aside(tmp_path: Path) -> None:
    """Three of sixteen generated inputs get another class in four bits."""
    draw = np.random.default_rng(0)
    weights = {"w": (draw.standard_normal((64, 8)) + 3).astype(np.float32)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    net = model_of(nodes, [tensor("x", ["N", 64])], [tensor("y", ["N", 8])], weights)
    report = package(saved(net, tmp_path / "net.onnx"), tmp_path / "out", "--json").json
    aside = [text for text in report["set_aside"] if "on generated inputs" in text]
    assert aside
    assert all("points less agreement with the float model on generated inputs)" in text for text in aside)
    labels = {one["label"] for one in report["candidates"]}
    assert "float32" in labels
    assert not [text for text in aside if text.rpartition(" (")[0] in labels]


def test_headline_states_metric_drop_interval_and_what_resolves_the_limit(case: Case) -> None:
    text = " ".join(case.outcome.stdout.split())
    assert re.search(
        r"NOT RESOLVED top-1 accuracy \d+\.\d\d %, source \d+\.\d\d %: drop -?\d\.\d\d points"
        r" \(95 % interval -?\d\.\d\d to \d\.\d\d, 180 samples that chose nothing\)\."
        r" A limit of 1\.00 points needs at least [\d,]+ evaluation samples",
        text,
    )
    accuracy = case.report["accuracy"]
    assert accuracy["samples_needed"] >= 736
    assert (accuracy["drop"]["samples"], accuracy["drop"]["held_back"]) == (180, True)


def test_strict_refuses_what_the_samples_do_not_show(tmp_path: Path) -> None:
    model = saved(mlp(), tmp_path / "net.onnx")
    x = samples(2000, 2)["x"]
    y = OrtSession(model, OrtOptions()).run({"x": x})["y"].argmax(axis=1)
    data = (
        stored(tmp_path / "few.npz", {"x": x[:100], "y": y[:100]}),
        stored(tmp_path / "e.npz", {"x": x, "y": y}),
    )
    common = ("--calibration", stored(tmp_path / "c.npz", samples(32, 1)), "--strict", "--json")
    few = package(model, tmp_path / "few", "--eval", data[0], *common)
    assert (few.code, few.error["binding"]) == (5, ["drop"])
    enough = package(model, tmp_path / "enough", "--eval", data[1], *common)
    assert enough.code == 0
    assert enough.json["accuracy"]["state"] == "ok"
    assert enough.json["accuracy"]["drop"]["interval"][1] <= 1


def test_no_result_tells_where_files_lie(tmp_path: Path) -> None:
    secret = tmp_path / "home of somebody"
    secret.mkdir()
    model = saved(mlp(), secret / "net.onnx")
    metric = secret / "mine.py"
    metric.write_text("def all_right(outputs, reference, labels):\n    return [1.0] * len(outputs['y'])\n")
    (secret / "labels.txt").write_text("a\nb\nc\nd\n")
    options = (
        *("--calibration", stored(secret / "c.npz", samples(8, 1))),
        *("--eval", stored(secret / "e.npz", samples(8, 2))),
        *("--metric", f"{metric}:all_right", "--labels", secret / "labels.txt", "--dim", "N=2"),
    )
    assert package(model, secret / "out", *options).code == 0
    written = listing(secret / "out")
    assert [name for name, content in written.items() if b"home of" in content] == []
    report = json.loads(written["net-1.0.0-x86-64.report.json"])
    assert report["command"] == (
        "edgekit package net.onnx --target x86-64 --backend ort --calibration c.npz --eval e.npz"
        " --metric mine.py:all_right --out out --dim N=2 --labels labels.txt --threads 1 --search-seconds 0.0"
    )


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("evaluation.host_memory.measure_model_memory", "peak memory was not measured here: no room"),
        ("evaluation.judge.measure_engine_bytes", "peak memory is not known: no room"),
    ],
)
def test_memory_that_cannot_be_measured_is_reported(
    place: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BackendError("no room\nand more")

    monkeypatch.setattr(f"edgekit_toolkit.{place}", fail)
    outcome = package(saved(mlp(), tmp_path / "net.onnx"), tmp_path / "out")
    assert outcome.code == 0
    assert f"WARNING {text}" in " ".join(outcome.stdout.split())
    report = json.loads((tmp_path / "out" / "net-1.0.0-x86-64.report.json").read_text(encoding="utf-8"))
    assert text in report["warnings"]


def test_memory_measured_over_the_limit_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = PeakMemory(800_000_000, 100_000_000)
    monkeypatch.setattr("edgekit_toolkit.evaluation.host_memory.measure_model_memory", lambda *_: measured)
    outcome = package(
        saved(mlp(), tmp_path / "net.onnx"), tmp_path / "out", "--budget", "memory=500MB", "--json"
    )
    assert outcome.code == 0
    said = [text for text in outcome.json["warnings"] if "measured on this machine is 800.0 MB" in text]
    assert ["OVER THE LIMIT of 500.0 MB" in text for text in said] == [True]


def test_name_and_version_name_the_files(tmp_path: Path) -> None:
    model = saved(mlp(), tmp_path / "net.onnx")
    assert package(model, tmp_path / "out", "--name", "motor", "--version", "2.1+b3").code == 0
    assert sorted(listing(tmp_path / "out")) == [f"motor-2.1+b3-x86-64.{ending}" for ending in ENDINGS]


def test_labels_and_preprocessing_travel_with_the_model(tmp_path: Path) -> None:
    labels, preprocessing = tmp_path / "labels.txt", tmp_path / "pre.json"
    labels.write_text("näh\nfern\nlinks\nrechts\n", encoding="utf-8")
    preprocessing.write_text('{"scale": 0.5, "mean": [1, 2]}', encoding="utf-8")
    options = ("--labels", labels, "--preprocessing", preprocessing)
    assert package(saved(mlp(), tmp_path / "net.onnx"), tmp_path / "out", *options).code == 0
    with read_only(tmp_path / "out") as opened:
        manifest = opened.manifest
        assert manifest.labels is not None
        assert manifest.preprocessing is not None
        assert bytes(opened.read(manifest.labels)).decode() == labels.read_text(encoding="utf-8")
        assert json.loads(bytes(opened.read(manifest.preprocessing))) == {"scale": 0.5, "mean": [1, 2]}


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (4, []),
        (2, ["there are 2 labels, but no output has an axis of 2 classes: 'y' ['N', 4]"]),
        (3, ["there are 3 labels, and the model has 4 classes: the first one is taken for the background"]),
        (8, ["there are 8 labels, but no output has an axis of 8 classes: 'y' ['N', 4]"]),
    ],
)
def test_labels_that_fit_no_output_are_a_warning(count: int, expected: list[str], tmp_path: Path) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(b"class %d" % number for number in range(count)))
    model = saved(mlp(), tmp_path / "net.onnx")
    warnings = package(model, tmp_path / "out", "--labels", labels, "--json").json["warnings"]
    assert [text.partition(". If")[0] for text in warnings if "labels" in text] == expected
    with read_only(tmp_path / "out") as opened:
        assert bytes(opened.read("labels.txt")).startswith(b"class 0\nclass 1")


def test_a_custom_metric_judges(tmp_path: Path) -> None:
    metric = tmp_path / "mine.py"
    metric.write_text(
        "def signs(outputs, reference, labels):\n"
        "    return ((outputs['y'][:, 0] > 0) == (labels > 1)).astype(float)\n"
    )
    x = samples(40, 2)["x"]
    y = np.where(
        OrtSession(saved(mlp(), tmp_path / "m.onnx"), OrtOptions()).run({"x": x})["y"][:, 0] > 0, 3, 0
    )
    y[:10] = 3 - y[:10]
    data = ("--calibration", stored(tmp_path / "c.npz", samples(20, 1)))
    evaluation = ("--eval", stored(tmp_path / "e.npz", {"x": x, "y": y.astype(np.int64)}))
    outcome = package(
        tmp_path / "m.onnx", tmp_path / "out", *data, *evaluation, "--metric", f"{metric}:signs", "--json"
    )
    assert outcome.code == 0
    choosing, held_back = outcome.json["data"]["evaluation"], outcome.json["accuracy"]
    assert (choosing["baseline"] + held_back["baseline"]) / 2 == 0.75  # of 20 samples each
    assert outcome.json["data"]["evaluation"]["metric"].startswith("mine.py:signs (sha256 ")


def test_another_run_of_the_same_version_replaces_the_results_of_the_first(tmp_path: Path) -> None:
    model = saved(mlp(), tmp_path / "net.onnx")
    assert package(model, tmp_path / "out").code == 0
    before = listing(tmp_path / "out")
    assert package(model, tmp_path / "out", "--budget", "size=9MB", "--version", "1.0.0").code == 0
    after = listing(tmp_path / "out")
    assert sorted(before) == sorted(after)
    assert all(before[name] != after[name] for name in before)
