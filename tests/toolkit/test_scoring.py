"""Scoring: what chooses and what is held back; outputs that are NaN or infinite, whatever their score."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper
from tests.toolkit.answers import answers
from tests.toolkit.cases import cases
from tests.toolkit.package_run import model_of, package, saved, stored, tensor

from edgekit_runtime.errors import DataError, ModelError
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.evaluation.metrics import METRICS
from edgekit_toolkit.evaluation.scoring import (
    PartScores,
    Scores,
    score_candidates,
    scores_of_table,
)
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.pipeline.candidates import Candidate, CandidateSet
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.samples.split import Part

Array = NDArray[Any]
INPUTS = (TensorSpec("x", "float32", ("N", 2)),)
OUTPUTS = (TensorSpec("y", "float32", ("N", 2)), TensorSpec("z", "float32", ("N", 2)))
SAMPLES = np.array([[1, 2], [3, 4], [5, 6], [7, np.inf]], np.float32)


def scores_of(*candidates: Any, metric: str = "similarity") -> Scores:
    """Of models that map x [batch, 2] to y, with z = x; the source maps it to itself."""

    def stream(batch: int) -> Iterator[tuple[dict[str, Array], None]]:
        for start in range(0, len(SAMPLES), batch):
            yield {"x": SAMPLES[start : start + batch]}, None

    def runner(change: Any) -> Any:
        return lambda feeds: [change(feeds["x"].copy()), feeds["x"]]

    contestants = [runner(change) for change in candidates]
    part = Part(kind="user", count=len(SAMPLES), sha256=None, labelled=False, stream=stream)
    return score_candidates(
        runner(np.asarray),
        contestants,
        part,
        metric,
        inputs=INPUTS,
        outputs=OUTPUTS,
        alone=True,
        progress=lambda *_: None,
    )


def spoil(x: Array) -> Array:
    return np.where(x == 3, np.float32(np.nan), x)


def test_output_that_becomes_nan_spoils_a_candidate() -> None:
    scores = scores_of(np.asarray, spoil)
    assert scores.spoiled == {
        1: "output 'y' is NaN or infinite on 1 of 4 evaluation samples, where the source model's is finite"
    }
    assert scores.without(scores.spoiled).choosing.scores == scores.choosing.scores[:1]


@pytest.mark.parametrize("metric", ["similarity", "agreement"])
def test_candidates_judged_in_two_turns_have_the_scores_of_one(metric: str) -> None:
    first, second = scores_of(np.asarray, metric=metric), scores_of(np.negative, np.square, metric=metric)
    together = scores_of(np.asarray, np.negative, np.square, metric=metric)
    joined = first.joined(second)
    assert joined.choosing.scores == together.choosing.scores
    assert [drop.points for drop in joined.choosing.drops] == [
        drop.points for drop in together.choosing.drops
    ]


def test_output_that_is_infinite_in_the_source_too_spoils_nothing() -> None:
    assert scores_of(np.asarray, np.negative).spoiled == {}


def test_spoiled_float_model_is_an_error_that_says_so() -> None:
    found = CandidateSet([Candidate("float32", Form(forms.FLOAT32), OnnxModel(onnx.ModelProto()), 200.0)])
    with pytest.raises(ModelError, match=r"^float32, before any quantization: output 'y' is NaN"):
        found.leave_out({0: "output 'y' is NaN"})


def test_form_that_divides_by_zero_is_left_out_with_the_reason(tmp_path: Path) -> None:
    """The divisor is a product over three decades: in eight bits the small ones are 0."""
    draw = np.random.default_rng(4)
    weights = {"w": draw.uniform(0.5, 1, (8, 4)).astype(np.float32), "one": np.ones(1, np.float32)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Div", ["one", "p"], ["y"])]
    model = saved(
        model_of(nodes, [tensor("x", ["N", 8])], [tensor("y", ["N", 4])], weights), tmp_path / "net.onnx"
    )
    x = (draw.uniform(0.5, 1, (64, 8)) * np.geomspace(1e-3, 1, 64)[:, None]).astype(np.float32)
    data = stored(tmp_path / "c.npz", {"x": x}), stored(tmp_path / "e.npz", {"x": x * np.float32(0.99)})
    options = ("--calibration", data[0], "--eval", data[1], "--metric", "similarity", "--json")
    report = package(model, tmp_path / "out", *options).json
    left = [text for text in report["warnings"] if "is NaN or infinite on" in text]
    assert any(text.startswith("left out: int8 per-channel") for text in left)
    assert not [one for one in report["candidates"] if "int8 per-channel" in one["label"]]
    assert report["outcome"]["kind"] == "packaged"


# What chooses and what is held back.


def halves(count: int, metric: str, *, kind: str = "user") -> Scores:
    """Of a candidate that is wrong on every fifth sample, and of one that is right on all."""
    x = np.zeros((count, 2), np.float32)
    x[:, 0] = np.arange(count) % 5 == 0
    x[:, 1] = 0.5

    def stream(batch: int) -> Iterator[tuple[dict[str, Array], Array]]:
        for start in range(0, count, batch):
            rows = x[start : start + batch]
            yield {"x": rows}, rows.argmax(axis=1)

    def runner(change: Any) -> Any:
        return lambda feeds: [change(feeds["x"].copy()), feeds["x"]]

    contestants = [runner(lambda x: x * [[0.1, 1]]), runner(np.asarray)]
    return score_candidates(
        runner(np.asarray),
        contestants,
        Part(kind=kind, count=count, sha256=None, labelled=True, stream=stream),
        metric,
        inputs=INPUTS,
        outputs=OUTPUTS,
        alone=False,
        progress=lambda *_: None,
    )


@pytest.mark.parametrize(("count", "held_back"), [(11, None), (12, 6), (101, 50)])
def test_half_of_the_samples_choose_nothing_where_there_are_enough(count: int, held_back: int | None) -> None:
    scores = halves(count, "top1")
    confirmation = scores.confirmation
    assert (None if confirmation is None else confirmation.samples) == held_back
    assert scores.samples == count
    if confirmation is not None:
        losses = scores.choosing.drops[0].points * scores.choosing.samples
        assert losses + confirmation.drops[0].points * confirmation.samples == pytest.approx(
            100 * np.ceil(count / 5), abs=0.1
        )


def test_generated_samples_confirm_nothing() -> None:
    assert halves(100, "top1", kind="generated").confirmation is None


def test_metric_over_the_whole_set_scores_both_halves_with_intervals(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "def accuracy(outputs, reference, labels):\n"
        "    return sum(one['y'].argmax() == label for one, label in zip(outputs, labels)) / len(labels)\n"
        "accuracy.whole_set = True\n"
    )
    found, known = halves(200, f"{path}:accuracy"), halves(200, "top1")
    assert found.confirmation is not None
    assert known.confirmation is not None
    for whole, single in ((found.choosing, known.choosing), (found.confirmation, known.confirmation)):
        assert (whole.baseline, whole.scores) == (single.baseline, pytest.approx(single.scores))
        ours, exact = whole.drops[0].interval(), single.drops[0].interval()
        assert (ours.low, ours.high) == (pytest.approx(exact.low), pytest.approx(exact.high))


AUC = (
    "import numpy as np\n"
    "def auc(outputs, reference, labels):\n"
    "    found = np.array([one['y'][0, 1] - one['y'][0, 0] for one in outputs])\n"
    "    high, low = found[labels == 1], found[labels == 0]\n"
    "    if {is_undefined}:\n"
    "        raise ValueError('only one class')\n"
    "    return (high[:, None] > low).mean()\n"
    "auc.whole_set = True\n"
)


def test_parts_on_which_a_metric_has_no_score_are_left_out(tmp_path: Path) -> None:
    """Of 6 samples 2 are of one class."""
    path = tmp_path / "own.py"
    path.write_text(AUC.format(is_undefined="len(low) < 2"))
    scores = halves(6, f"{path}:auc")
    interval = scores.choosing.drops[0].interval()
    assert scores.choosing.baseline == 1.0
    assert np.isfinite([interval.low, interval.high]).all()


def test_metric_without_a_score_on_most_parts_is_an_error_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(AUC.format(is_undefined="len(high) != 8"))
    with pytest.raises(DataError, match=r"on 8 of 10 parts of them it has none.*only one class.*:6"):
        halves(10, f"{path}:auc")


def test_metric_that_changes_the_outputs_of_the_whole_set_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("def f1(outputs, *_):\n    outputs[0]['y'][:] = 0\n    return 1\nf1.whole_set = True\n")
    with pytest.raises(DataError, match=r"read-only.* at .*own.py:2"):
        halves(50, f"{path}:f1")


ANSWERS = METRICS["top1"]


def part_scores(samples: int, right: int) -> PartScores:
    return PartScores(samples, 1.0, (right / samples,), (answers(samples - right, 0, samples),))


def test_package_states_what_the_samples_held_back_show() -> None:
    chosen, held_back = part_scores(20, 15), part_scores(30, 20)
    scores = Scores(ANSWERS, chosen, held_back)
    assert scores.stated is held_back
    assert scores.samples == 50


def test_package_without_samples_held_back_states_what_chose() -> None:
    chosen = part_scores(20, 15)
    scores = Scores(ANSWERS, chosen, None)
    assert scores.stated is chosen
    assert scores.samples == 20
    assert scores.without([]).confirmation is None


def test_scores_without_a_candidate_keep_those_of_the_others() -> None:
    table = np.array([[1.0, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]])
    scores = scores_of_table(ANSWERS, table, hold_back=False)
    left = scores.without({1}).choosing
    assert left.scores == (0.75, 0.25)
    assert [drop.points for drop in left.drops] == [25, 75]


def test_first_row_of_a_table_is_the_source_model() -> None:
    table = np.array([[1.0, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]])
    found = scores_of_table(ANSWERS, table, hold_back=False)
    assert found.confirmation is None
    assert (found.choosing.samples, found.choosing.baseline) == (4, 0.75)
    assert found.choosing.scores == (0.5, 0.25)
    assert [drop.points for drop in found.choosing.drops] == [25, 50]


def test_both_halves_of_a_table_have_baseline_and_scores_of_their_own() -> None:
    table = np.stack([np.arange(40) % 2 == 0, np.arange(40) % 4 == 0]).astype(float)
    found = scores_of_table(ANSWERS, table, hold_back=True)
    assert found.confirmation is not None
    for half in (found.choosing, found.confirmation):
        assert half.samples == 20
        assert half.drops[0].points == pytest.approx(100 * (half.baseline - half.scores[0]))
    assert found.choosing.baseline + found.confirmation.baseline == pytest.approx(1)
    assert found.choosing.scores[0] + found.confirmation.scores[0] == pytest.approx(0.5)


def own_metric(folder: Path, text: str) -> str:
    """Write a metric over the whole set, named `score`."""
    path = folder / "own.py"
    path.write_text(f"{text}\nscore.whole_set = True\n")
    return f"{path}:score"


def whole_set(
    folder: Path, text: str, *changes: Any, count: int = 10, batch: int = 1
) -> tuple[Scores, list[tuple[int, int]]]:
    """Return the scores by an own metric, and the progress, of models that change x [batch, 1] to y."""
    x = np.arange(count * batch, dtype=np.float32).reshape(count, batch, 1)
    steps: list[tuple[int, int]] = []

    def runner(change: Any) -> Any:
        return lambda feeds: [change(feeds["x"].copy())]

    def stream(_: int) -> Iterator[tuple[dict[str, Array], None]]:
        yield from (({"x": rows}, None) for rows in x)

    scores = score_candidates(
        runner(np.asarray),
        [runner(change) for change in changes],
        Part(kind="user", count=count * batch, sha256=None, labelled=False, stream=stream),
        own_metric(folder, text),
        inputs=(TensorSpec("x", "float32", (batch, 1)),),
        outputs=(TensorSpec("y", "float32", (batch, 1)),),
        alone=True,
        progress=lambda done, of: steps.append((done, of)),
    )
    return scores, steps


SHARE_BELOW = (
    "def score(outputs, reference, labels):\n"
    "    return sum(float(one['y'][0, 0]) < 5 for one in outputs) / len(outputs)"
)


def test_baseline_of_a_metric_over_the_whole_set_is_the_score_of_the_source_model(tmp_path: Path) -> None:
    scores, _ = whole_set(tmp_path, SHARE_BELOW, lambda x: x + 2, lambda x: x + 4)
    assert (scores.choosing.samples, scores.choosing.baseline) == (10, 0.5)
    assert scores.choosing.scores == pytest.approx((0.3, 0.1))
    assert [drop.points for drop in scores.choosing.drops] == [20, 40]


def test_samples_that_a_model_takes_together_count_one_by_one_over_the_whole_set(tmp_path: Path) -> None:
    scores, steps = whole_set(tmp_path, SHARE_BELOW, lambda x: x + 2, count=5, batch=2)
    assert (scores.samples, scores.choosing.baseline, scores.choosing.scores) == (10, 0.5, (0.3,))
    assert steps == [(done, 20) for done in range(2, 21, 2)]


def test_progress_over_the_whole_set_counts_the_samples_of_every_model(tmp_path: Path) -> None:
    _, steps = whole_set(tmp_path, SHARE_BELOW, np.asarray, np.asarray)
    assert steps == [(done, 30) for done in range(1, 31)]


def test_output_that_becomes_nan_spoils_a_candidate_over_the_whole_set(tmp_path: Path) -> None:
    scores, _ = whole_set(tmp_path, SHARE_BELOW, np.asarray, lambda x: np.where(x > 7, np.nan, x))
    assert list(scores.spoiled) == [1]
    assert scores.spoiled[1].startswith("output 'y' is NaN or infinite on 2 of 10 evaluation samples")


@pytest.mark.parametrize(("failed", "is_refused"), [(5, False), (6, True)])
def test_metric_may_have_no_score_on_half_of_the_parts(failed: int, is_refused: bool, tmp_path: Path) -> None:
    """The first call of a model is on all samples, the next 10 on parts of them."""
    text = (
        "calls = 0\n"
        "def score(outputs, reference, labels):\n"
        "    global calls\n"
        "    calls += 1\n"
        f"    if 1 < calls <= {failed + 1}:\n"
        "        raise ValueError('no score')\n"
        "    return 0.5"
    )
    if is_refused:
        with pytest.raises(DataError, match="on all 10 samples, but on 6 of 10 parts"):
            whole_set(tmp_path, text, np.asarray)
    else:
        assert whole_set(tmp_path, text, np.asarray)[0].choosing.baseline == 0.5


def test_metric_over_the_whole_set_needs_a_row_for_each_sample(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the model takes 2 at once and gives \{'y': \[3\]\}"):
        whole_set(tmp_path, SHARE_BELOW, lambda x: np.resize(x, 3), batch=2)


def dense(
    *changes: Any, count: int = 40, size: int = 2, alone: bool = False
) -> tuple[Scores, list[int], list[tuple[int, int]]]:
    """Return scores by similarity, the batches asked for and the progress, of models of x [N, size] to y."""
    x = np.ones((count, size), np.float32)
    x[:, 0] = np.arange(count)
    batches: list[int] = []
    steps: list[tuple[int, int]] = []

    def stream(batch: int) -> Iterator[tuple[dict[str, Array], None]]:
        batches.append(batch)
        for start in range(0, count, batch):
            yield {"x": x[start : start + batch]}, None

    def runner(change: Any) -> Any:
        return lambda feeds: [change(feeds["x"].copy())]

    scores = score_candidates(
        runner(np.asarray),
        [runner(change) for change in changes],
        Part(kind="user", count=count, sha256=None, labelled=False, stream=stream),
        "similarity",
        inputs=(TensorSpec("x", "float32", ("N", size)),),
        outputs=(TensorSpec("y", "float32", ("N", size)),),
        alone=alone,
        progress=lambda done, of: steps.append((done, of)),
    )
    return scores, batches, steps


def test_samples_run_sixteen_at_a_time_and_progress_says_how_many_are_done() -> None:
    scores, batches, steps = dense(np.asarray, count=40)
    assert batches == [1, 16]
    assert steps == [(16, 40), (32, 40), (40, 40)]
    assert scores.samples == 40


@pytest.mark.parametrize(("size", "batch"), [(1 << 16, 16), ((1 << 16) + 1, 1)])
def test_samples_of_over_256_kib_run_one_at_a_time(size: int, batch: int) -> None:
    assert dense(np.asarray, count=3, size=size)[1] == [1, batch]


def test_samples_that_become_nan_in_a_batch_are_counted() -> None:
    scores = dense(lambda x: np.where(x > 36, np.nan, x), count=40)[0]
    assert scores.spoiled[0].startswith("output 'y' is NaN or infinite on 3 of 40 evaluation samples")


def test_output_of_another_shape_that_is_not_finite_spoils_the_whole_batch() -> None:
    scores = dense(lambda x: np.where(x[:1] == 0, np.nan, x[:1]), count=20)[0]
    # The first batch has a 0 in its first row, the second batch starts with sample 16.
    assert scores.spoiled[0].startswith("output 'y' is NaN or infinite on 16 of 20 evaluation samples")


def test_output_with_the_most_spoiled_samples_is_named() -> None:
    def runner(y: Any, z: Any) -> Any:
        return lambda feeds: [y(feeds["x"].copy()), z(feeds["x"].copy())]

    def stream(batch: int) -> Iterator[tuple[dict[str, Array], None]]:
        yield {"x": np.array([[1, 2], [3, 4], [5, 6]], np.float32)}, None

    scores = score_candidates(
        runner(np.asarray, np.asarray),
        [runner(spoil, lambda x: np.where(x > 2, np.inf, x))],
        Part(kind="user", count=3, sha256=None, labelled=False, stream=stream),
        "similarity",
        inputs=INPUTS,
        outputs=OUTPUTS,
        alone=False,
        progress=lambda *_: None,
    )
    assert scores.spoiled[0].startswith("output 'z' is NaN or infinite on 2 of 3 evaluation samples")


def test_samples_run_one_at_a_time_where_a_candidate_takes_them_alone() -> None:
    assert dense(np.asarray, count=3, alone=True)[1] == [1, 1]


def listed(counts: list[int], change: Any) -> tuple[Scores, list[tuple[int, int]]]:
    """Return scores and progress of a model of x [M, 2] and n [3], of which a sample has `counts` rows."""
    steps: list[tuple[int, int]] = []

    def stream(_: int) -> Iterator[tuple[dict[str, Array], None]]:
        for count in counts:
            yield {"x": np.ones((count, 2), np.float32), "n": np.zeros(3, np.float32)}, None

    def runner(change: Any) -> Any:
        return lambda feeds: [change(feeds["x"].copy())]

    scores = score_candidates(
        runner(np.asarray),
        [runner(change)],
        Part(kind="user", count=len(counts), sha256=None, labelled=False, stream=stream),
        "similarity",
        inputs=(TensorSpec("x", "float32", ("M", 2)), TensorSpec("n", "float32", (3,))),
        outputs=(TensorSpec("y", "float32", ("M", 2)),),
        alone=False,
        progress=lambda done, of: steps.append((done, of)),
    )
    return scores, steps


def test_sample_of_several_rows_has_their_mean_score() -> None:
    """The first row is half of what it was: the mean of 0.5 and of 1 for each other row."""
    scores, steps = listed([2, 4, 1], lambda x: x * np.where(np.arange(len(x)) == 0, 0.5, 1)[:, None])
    assert (scores.samples, scores.choosing.baseline) == (3, 1)
    assert scores.choosing.scores[0] == pytest.approx((0.75 + 0.875 + 0.5) / 3)
    assert steps == [(1, 3), (2, 3), (3, 3)]


def test_sample_of_several_rows_is_spoiled_once() -> None:
    scores, _ = listed([2, 4, 1], lambda x: x * np.float32(np.nan if len(x) > 1 else 1))
    assert scores.spoiled[0].startswith("output 'y' is NaN or infinite on 2 of 3 evaluation samples")


# Outputs whose number of rows depends on the data, and samples that show nothing.


def scored_rows(
    source: Any, candidate: Any, *, metric: str = "auto", labels: bool = False, count: int = 20
) -> Scores:
    """Of models that map the number of a sample to their outputs."""

    def stream(_: int) -> Iterator[tuple[dict[str, Array], Array | None]]:
        for number in range(count):
            yield {"x": np.full((1, 1), number, np.float32)}, np.zeros(1, np.int64) if labels else None

    def runner(model: Any) -> Any:
        return lambda feeds: model(int(feeds["x"][0, 0]))

    return score_candidates(
        runner(source),
        [runner(candidate)],
        Part(kind="user", count=count, sha256=None, labelled=labels, stream=stream),
        metric,
        inputs=(TensorSpec("x", "float32", ("N", 1)),),
        outputs=tuple(TensorSpec(f"y{place}", "float32", ("K", 4)) for place in range(len(source(0)))),
        alone=False,
        progress=lambda *_: None,
    )


def boxes_of(number: int) -> Array:
    return np.random.default_rng(number).uniform(1, 100, (number % 5, 4)).astype(np.float32)


def test_rows_that_depend_on_the_data_are_judged_as_sets_and_are_no_class_scores() -> None:
    scores = scored_rows(lambda number: [boxes_of(number)], lambda number: [boxes_of(number)[::-1][:3]])
    assert scores.metric.name == "similarity"
    assert scores.choosing.baseline == 1
    assert scores.confirmation is not None
    # Of 20 samples 4 have no rows; of 4 with four rows the candidate loses one each.
    assert (scores.samples, scores.unjudged) == (16, 4)
    total = sum(part.scores[0] * part.samples for part in (scores.choosing, scores.confirmation))
    assert total == pytest.approx(12 + 4 * 0.75)


def test_rows_that_only_one_model_finds_count() -> None:
    scores = scored_rows(lambda number: [boxes_of(number)], lambda number: [boxes_of(number % 5 or 3)])
    assert (scores.samples, scores.unjudged) == (20, 0)
    assert min(scores.choosing.scores[0], scores.stated.scores[0]) < 1


@pytest.mark.parametrize("metric", ["auto", "similarity"])
def test_model_that_finds_nothing_is_an_error_that_says_so(metric: str) -> None:
    nothing = lambda _: [np.zeros((0, 4), np.float32)]  # noqa: E731 - a model
    message = r"nothing was detected in any of the 20 evaluation samples \(outputs 'y0' \[0, 4\]\).*--eval"
    with pytest.raises(DataError, match=message):
        scored_rows(nothing, nothing, metric=metric)


@cases(
    ("metric", "output"),
    [
        ("similarity", np.array([[1.0, np.nan]], np.float32)),
        ("agreement", np.array([[1.0, np.nan]], np.float32)),
        ("sequence", np.full((1, 4, 2), np.nan, np.float32)),
        ("pixel_agreement", np.full((1, 2, 8, 8), np.nan, np.float32)),
        ("mask_overlap", np.full((1, 1, 8, 8), np.nan, np.float32)),
    ],
)
def test_model_that_differs_from_itself_is_an_error_and_no_figure(metric: str, output: Array) -> None:
    def model(number: int) -> list[Array]:
        return [output if number == 7 else np.nan_to_num(output, nan=0.5)]

    with pytest.raises(DataError, match=rf"by metric '{metric}' the model differs from itself on 1 of 20"):
        scored_rows(model, model, metric=metric)


def test_baseline_by_labels_may_be_below_one() -> None:
    def model(number: int) -> list[Array]:
        return [np.array([[1.0, number % 2 * 2]], np.float32)]

    scores = scored_rows(model, model, metric="top1", labels=True)
    assert 0.2 < scores.choosing.baseline < 0.8
