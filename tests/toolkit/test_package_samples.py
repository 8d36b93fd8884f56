"""Which samples calibrate and which judge: never the same ones, and never silently few."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from tests.toolkit.package_run import mlp, model_of, package, read_only, samples, saved, stored, tensor

from edgekit_runtime.errors import DataError
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.samples.split import Part, choose_samples, feeds_only

INPUTS = (TensorSpec("x", "float32", ("N", 8)),)


pytestmark = pytest.mark.usefixtures("home")


def rows(part: Part) -> list[bytes]:
    """Each sample's content."""
    return [row.tobytes() for feeds in feeds_only(part) for row in feeds["x"]]


def data(folder: Path, name: str, x: Any, **more: Any) -> Path:
    return stored(folder / f"{name}.npz", {"x": x, **more})


def test_both_given_are_used_as_they_are(tmp_path: Path) -> None:
    calibration, evaluation = samples(5, 1)["x"], samples(7, 2)["x"]
    chosen = choose_samples(INPUTS, data(tmp_path, "c", calibration), data(tmp_path, "e", evaluation), {})
    assert rows(chosen.calibration) == [row.tobytes() for row in calibration]
    assert rows(chosen.evaluation) == [row.tobytes() for row in evaluation]
    assert (chosen.calibration.kind, chosen.evaluation.kind) == ("user", "user")
    assert chosen.warnings == ()


def test_shared_samples_do_not_judge(tmp_path: Path) -> None:
    calibration, fresh = samples(5, 1)["x"], samples(7, 2)["x"]
    mixed = np.concatenate([calibration[:3], fresh, calibration[4:]])
    chosen = choose_samples(INPUTS, data(tmp_path, "c", calibration), data(tmp_path, "e", mixed), {})
    assert rows(chosen.evaluation) == [row.tobytes() for row in fresh]
    assert chosen.warnings == (
        "4 evaluation samples are calibration samples too, and were left out of judging",
    )


def test_a_shared_sample_is_found_whatever_its_label(tmp_path: Path) -> None:
    x = samples(6, 1)["x"]
    calibration = data(tmp_path, "c", x[:4], y=np.zeros(4, np.int64))
    chosen = choose_samples(INPUTS, calibration, data(tmp_path, "e", x[2:], y=np.ones(4, np.int64)), {})
    assert rows(chosen.evaluation) == [row.tobytes() for row in x[4:]]


def test_copies_among_the_samples_that_judge_count_once_and_are_told(tmp_path: Path) -> None:
    """Whatever their labels; the first of each stays."""
    x = samples(6, 1)["x"]
    mixed = np.concatenate([x[3:], x[:1], x[3:5], x[4:5]])
    evaluation = data(tmp_path, "e", mixed, y=np.arange(7))
    chosen = choose_samples(INPUTS, data(tmp_path, "c", x[:3]), evaluation, {})
    assert rows(chosen.evaluation) == [row.tobytes() for row in x[3:]]
    assert chosen.warnings == (
        "1 evaluation samples are calibration samples too, and were left out of judging",
        "3 evaluation samples are copies of others, and were left out of judging",
        "2 evaluation samples have copies with another label; of those that judge, the first counts",
    )


def test_copies_in_a_set_that_also_calibrates_judge_once(tmp_path: Path) -> None:
    x = samples(10, 1)["x"]
    chosen = choose_samples(INPUTS, None, data(tmp_path, "e", np.concatenate([x, x])), {})
    judging = rows(chosen.evaluation)
    assert len(judging) == len(set(judging)) == 10 - len(set(rows(chosen.calibration)))


def test_too_few_distinct_samples_for_a_fixed_batch_are_refused(tmp_path: Path) -> None:
    inputs = (TensorSpec("x", "float32", (4, *INPUTS[0].shape[1:])),)
    x = samples(9, 1)["x"]
    evaluation = data(tmp_path, "e", np.concatenate([x[6:]] * 4))
    with pytest.raises(DataError, match=r"9 evaluation samples are copies of others .* of 12 too few"):
        choose_samples(inputs, data(tmp_path, "c", x[:4]), evaluation, {})


def test_nothing_but_shared_samples_is_refused(tmp_path: Path) -> None:
    path, copy = (data(tmp_path, name, samples(5, 1)["x"]) for name in ("c", "e"))
    with pytest.raises(DataError, match=r"5 evaluation samples are calibration samples too .* of 5 too few"):
        choose_samples(INPUTS, path, copy, {})


def test_one_file_for_both_options_is_one_set_that_is_split(tmp_path: Path) -> None:
    path = data(tmp_path, "c", samples(20, 1)["x"])
    chosen = choose_samples(INPUTS, path, path, {})
    assert set(rows(chosen.calibration)).isdisjoint(rows(chosen.evaluation))
    assert len(rows(chosen.calibration)) + len(rows(chosen.evaluation)) == 20


@pytest.mark.parametrize("option", ["calibration", "evaluation"])
def test_one_set_is_split_into_disjoint_halves(option: str, tmp_path: Path) -> None:
    x = samples(20, 1)["x"]
    path = data(tmp_path, "d", x)
    chosen = choose_samples(INPUTS, *((path, None) if option == "calibration" else (None, path)), {})
    calibrating, judging = rows(chosen.calibration), rows(chosen.evaluation)
    assert (len(calibrating), len(judging)) == (10, 10)
    assert sorted(calibrating + judging) == sorted(row.tobytes() for row in x)
    assert chosen.evaluation.kind == ("user" if option == "evaluation" else "held-out part of calibration")
    assert "10 of its samples calibrate, 10 others judge" in " ".join(chosen.warnings)


def test_two_samples_are_split_into_one_that_calibrates_and_one_other(tmp_path: Path) -> None:
    chosen = choose_samples(INPUTS, data(tmp_path, "d", samples(2, 1)["x"]), None, {})
    assert "1 of its samples calibrate, 1 other judges" in " ".join(chosen.warnings)


def test_copies_within_one_set_are_not_on_both_sides(tmp_path: Path) -> None:
    x = np.repeat(samples(10, 1)["x"], 3, axis=0)
    chosen = choose_samples(INPUTS, None, data(tmp_path, "e", x), {})
    assert chosen.evaluation.count > 0
    assert not set(rows(chosen.calibration)) & set(rows(chosen.evaluation))


def test_nothing_but_copies_of_one_sample_is_refused(tmp_path: Path) -> None:
    x = np.repeat(samples(1, 1)["x"], 6, axis=0)
    with pytest.raises(DataError, match=r"3 evaluation samples are calibration samples too .* of 3 too few"):
        choose_samples(INPUTS, None, data(tmp_path, "e", x), {})


def test_the_same_data_are_split_alike_each_time(tmp_path: Path) -> None:
    path = data(tmp_path, "e", samples(20, 1)["x"])
    first, second = (choose_samples(INPUTS, None, path, {}) for _ in range(2))
    assert rows(first.calibration) == rows(second.calibration)
    assert first.evaluation.sha256 == second.evaluation.sha256 != first.calibration.sha256


@pytest.mark.parametrize("option", ["calibration", "evaluation"])
def test_a_single_sample_does_both_with_warnings(option: str, tmp_path: Path) -> None:
    path = data(tmp_path, "d", samples(1, 1)["x"])
    chosen = choose_samples(INPUTS, *((path, None) if option == "calibration" else (None, path)), {})
    assert rows(chosen.calibration) == rows(chosen.evaluation) != []
    text = " ".join(chosen.warnings)
    assert "there is 1 sample" in text
    assert "the score says nothing" in text


def test_a_fixed_batch_leaves_out_the_rest_with_a_warning(tmp_path: Path) -> None:
    inputs = (TensorSpec("x", "float32", (4, 8)),)
    chosen = choose_samples(
        inputs, data(tmp_path, "c", samples(9, 1)["x"]), data(tmp_path, "e", samples(6, 2)["x"]), {}
    )
    assert (chosen.calibration.count, chosen.evaluation.count) == (8, 4)
    assert [feeds["x"].shape for feeds in feeds_only(chosen.calibration)] == [(4, 8), (4, 8)]
    assert len([text for text in chosen.warnings if "are left out" in text]) == 2


def test_many_calibration_samples_are_thinned_evenly(tmp_path: Path) -> None:
    x = np.arange(8 * 2000, dtype=np.float32).reshape(2000, 8)
    chosen = choose_samples(INPUTS, data(tmp_path, "c", x), data(tmp_path, "e", samples(4, 2)["x"]), {})
    first = np.array([feeds["x"][0, 0] for feeds in feeds_only(chosen.calibration)]) / 8
    assert chosen.calibration.count == len(first) == 512
    assert (first[0], first[-1]) == (0, 1999)
    assert set(np.diff(first)) <= {3, 4}


def test_a_sample_that_thinning_left_out_still_does_not_judge(tmp_path: Path) -> None:
    x = np.arange(8 * 2000, dtype=np.float32).reshape(2000, 8)
    fresh = samples(4, 2)["x"]
    chosen = choose_samples(
        INPUTS, data(tmp_path, "c", x), data(tmp_path, "e", np.concatenate([x[:100], fresh])), {}
    )
    assert rows(chosen.evaluation) == [row.tobytes() for row in fresh]


def test_without_data_both_are_generated_and_differ() -> None:
    chosen = choose_samples(INPUTS, None, None, {})
    assert (chosen.calibration.kind, chosen.evaluation.kind) == ("generated", "generated")
    assert (chosen.calibration.sha256, chosen.evaluation.sha256) == (None, None)
    assert not set(rows(chosen.calibration)) & set(rows(chosen.evaluation))
    assert any("NO DATA" in text for text in chosen.warnings)


def test_generated_samples_are_counted_one_by_one(tmp_path: Path) -> None:
    chosen = choose_samples((TensorSpec("x", "float32", (4, 8)),), None, None, {})
    assert chosen.calibration.count == len(rows(chosen.calibration)) == 64


def test_the_drop_is_judged_on_held_out_samples_only(tmp_path: Path) -> None:
    """The shared samples carry wrong labels, so that judging them would show."""
    model = saved(mlp(), tmp_path / "net.onnx")
    calibration, fresh = samples(20, 1)["x"], samples(30, 2)["x"]
    x = np.concatenate([calibration[:10], fresh])
    y = OrtSession(model, OrtOptions()).run({"x": x})["y"].argmax(axis=1)
    y[:10] = (y[:10] + 1) % 4
    paths = data(tmp_path, "c", calibration), data(tmp_path, "e", x, y=y)
    options = ("--calibration", paths[0], "--eval", paths[1], "--json")
    outcome = package(model, tmp_path / "out", *options)
    assert outcome.code == 0
    with read_only(tmp_path / "out") as opened:
        score: Any = opened.manifest.figures["score"]
    assert (score["metric"], score["samples"], score["source_value"]) == ("top1", 15, 1.0)  # of 30
    assert any(text.startswith("10 evaluation samples") for text in outcome.json["warnings"])


def test_a_package_from_one_sample_reports_what_its_score_is_worth(tmp_path: Path) -> None:
    model = saved(mlp(), tmp_path / "net.onnx")
    outcome = package(model, tmp_path / "out", "--eval", data(tmp_path, "e", samples(1, 1)["x"]))
    assert outcome.code == 0
    assert "the score says nothing" in " ".join(outcome.stdout.split())
    report = json.loads(next((tmp_path / "out").glob("*.report.json")).read_text(encoding="utf-8"))
    assert report["data"]["evaluation"]["kind"] == "calibration data again"


@pytest.mark.parametrize(
    ("labels", "options", "found"),
    [
        ({"y": np.zeros(40, np.int64)}, (), "y"),
        ({}, ("--metric", "agreement"), "y"),
        ({}, (), None),  # the metric is `agreement` here too, by the shape alone
        ({"y": np.zeros(40, np.int64)}, ("--metric", "similarity"), None),
    ],
)
def test_manifest_says_what_holds_classes_only_where_the_user_does(
    labels: dict[str, Any], options: tuple[str, ...], found: str | None, tmp_path: Path
) -> None:
    given = (
        *("--calibration", data(tmp_path, "c", samples(8, 1)["x"])),
        *("--eval", data(tmp_path, "e", samples(40, 2)["x"], **labels)),
    )
    out = tmp_path / "out"
    assert package(saved(mlp(), tmp_path / "net.onnx"), out, *given, *options).code == 0
    with read_only(out) as opened:
        assert opened.manifest.figures.get("class_output") == found


def recurrent(axis: str) -> onnx.ModelProto:
    """y [1, 3] of a GRU over x [time, 1, 6], whose first axis is called `axis`."""
    draw = np.random.default_rng(1)
    weights = {
        name: draw.normal(0, 0.3, shape).astype(np.float32)
        for name, shape in (("w", (1, 24, 6)), ("r", (1, 24, 8)), ("o", (8, 3)))
    }
    weights["zero"] = np.array([0])
    nodes = [
        helper.make_node("GRU", ["x", "w", "r"], ["all", "last"], hidden_size=8),
        helper.make_node("Squeeze", ["last", "zero"], ["state"]),
        helper.make_node("MatMul", ["state", "o"], ["y"]),
    ]
    return model_of(nodes, [tensor("x", [axis, 1, 6])], [tensor("y", [1, 3])], weights)


@pytest.mark.parametrize("in_front", [True, False])
def test_recurrence_that_sees_single_steps_is_warned_of(tmp_path: Path, in_front: bool) -> None:
    model = saved(recurrent("unk__1"), tmp_path / "net.onnx")
    shape = (16, 10, 1, 6) if in_front else (160, 1, 6)
    x = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    data = stored(tmp_path / "data.npz", {"x": x})
    report = package(model, tmp_path / "out", "--calibration", data, "--json").json
    warned = [text for text in report["warnings"] if "is time for GRU" in text]
    assert len(warned) == (not in_front)
    assert all("[N, unk__1, 1, 6], with an axis for N samples in front" in text for text in warned)
    assert [(size["name"], size["size"]) for size in report["sizes"]] == [("unk__1", 10 if in_front else 1)]


def test_batch_that_the_model_fixes_is_one_sample_where_samples_have_an_axis_in_front(tmp_path: Path) -> None:
    x = np.random.default_rng(4).normal(size=(24, 4, 8)).astype(np.float32)
    model, data = saved(mlp(4), tmp_path / "net.onnx"), stored(tmp_path / "data.npz", {"x": x})
    found = package(model, tmp_path / "out", "--calibration", data, "--json").json["data"]
    assert (found["calibration"]["samples"], found["evaluation"]["samples"]) == (12, 12)
    assert found["calibration"]["noise_samples"] <= 12
