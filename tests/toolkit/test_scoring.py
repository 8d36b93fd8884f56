"""Scoring: what chooses and what is held back; outputs that are NaN or infinite, whatever their score."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import helper
from tests.toolkit.package_run import model_of, package, saved, stored, tensor

from edgekit_runtime.errors import DataError, ModelError
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.found import Candidate, Found
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.samples import Part
from edgekit_toolkit.scoring import Contestant, Scores, score_candidates

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

    contestants = [Contestant(runner(change), True) for change in candidates]
    part = Part("user", len(SAMPLES), None, False, stream)
    return score_candidates(
        runner(np.asarray),
        contestants,
        part,
        metric,
        inputs=INPUTS,
        outputs=OUTPUTS,
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


def test_output_that_is_infinite_in_the_source_too_spoils_nothing() -> None:
    assert scores_of(np.asarray, np.negative).spoiled == {}


def test_spoiled_float_model_is_an_error_that_says_so() -> None:
    found = Found([Candidate("float32", Form(forms.FLOAT32), b"", 200.0)])
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

    contestants = [Contestant(runner(lambda x: x * [[0.1, 1]]), False), Contestant(runner(np.asarray), False)]
    return score_candidates(
        runner(np.asarray), contestants, Part(kind, count, None, True, stream), metric,
        inputs=INPUTS, outputs=OUTPUTS, progress=lambda *_: None,
    )  # fmt: skip


@pytest.mark.parametrize(("count", "held_back"), [(39, None), (40, 20), (101, 50)])
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
        # 200 resamples against Tango's interval: 100 samples, about 8 points to each side.
        assert (ours.low, ours.high) == (
            pytest.approx(exact.low, abs=2.5),
            pytest.approx(exact.high, abs=2.5),
        )
    # Not one answer differs, which says as little for F1 as for accuracy.
    assert found.choosing.drops[1].interval() == known.choosing.drops[1].interval()


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


def test_resamples_on_which_a_metric_has_no_score_are_left_out(tmp_path: Path) -> None:
    """20 samples of which 4 are of one class: a resample has none of these in 1 % of cases, or 2 of 200."""
    path = tmp_path / "own.py"
    path.write_text(AUC.format(is_undefined="not len(high) or not len(low)"))
    scores = halves(20, f"{path}:auc")
    interval = scores.choosing.drops[0].interval()
    assert scores.choosing.baseline == 1.0
    assert np.isfinite([interval.low, interval.high]).all()


def test_metric_without_a_score_on_most_resamples_is_an_error_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(AUC.format(is_undefined="len(low) != 4"))
    with pytest.raises(DataError, match=r"on \d+ of 200 resamples of them it has none.*only one class.*:6"):
        halves(20, f"{path}:auc")


def test_metric_that_changes_the_outputs_of_the_whole_set_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("def f1(outputs, *_):\n    outputs[0]['y'][:] = 0\n    return 1\nf1.whole_set = True\n")
    with pytest.raises(DataError, match=r"read-only.* at .*own.py:2"):
        halves(50, f"{path}:f1")
