"""Samples from the field in the packager: their weights, their labels, one folder for both purposes."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.toolkit.cases import cases

from edgekit_runtime.errors import DataError
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.evaluation.drops import estimate_mean, mean_drops
from edgekit_toolkit.evaluation.metrics import METRICS, SetMetric
from edgekit_toolkit.evaluation.scoring import scores_of_table
from edgekit_toolkit.samples.media.decoding import Decoding
from edgekit_toolkit.samples.selection import count_effective, find_probabilities
from edgekit_toolkit.samples.split import choose_samples

SPEC = TensorSpec("x", "float32", ("N", 3, 8, 8))
DECODING = Decoding({"resize": [8, 8], "colour": "RGB", "scale": 1, "layout": "NCHW"}, ("cat", "dog"))


def make_folder(path: Path, count: int, labelled: int, probabilities: str = "0.5") -> Path:
    path.mkdir()
    labels, selection = ["file_name,label,suggestion"], ["file_name,probability,triggers"]
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(path / f"{number:032x}.png")
        label = ("cat", "dog")[number % 2] if number < labelled else ""
        labels.append(f"{number:032x}.png,{label},cat")
        selection.append(f"{number:032x}.png,{probabilities},uncertain")
    (path / "labels.csv").write_text("\n".join(labels) + "\n")
    (path / "selection.csv").write_text("\n".join(selection) + "\n")
    return path


def test_unlabelled_samples_of_one_folder_calibrate_and_labelled_ones_judge(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "field", 60, 40)
    samples = choose_samples([SPEC], folder, folder, {}, decoding=DECODING)
    assert (samples.calibration.count, samples.evaluation.count) == (20, 40)
    assert samples.evaluation.field_count == 40 and samples.evaluation.labelled
    assert samples.evaluation.weights is not None
    assert samples.evaluation.weights.tolist() == [2.0] * 40
    assert "evaluation: 20 files are left out: labels.csv has no label for them" in samples.warnings
    assert not any("neither JPEG" in note for note in samples.warnings)


def test_wholly_labelled_folder_is_split_in_two(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "field", 40, 40)
    samples = choose_samples([SPEC], folder, folder, {}, decoding=DECODING)
    assert (samples.calibration.count, samples.evaluation.count) == (20, 20)
    assert samples.evaluation.field_count == 20


def test_folder_without_any_label_judges_by_the_source_model(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "field", 40, 0)
    samples = choose_samples([SPEC], None, folder, {}, decoding=DECODING)
    assert not samples.evaluation.labelled
    assert samples.evaluation.field_count == samples.evaluation.count == 20


def test_sample_that_no_list_names_stands_for_itself(tmp_path: Path) -> None:
    (tmp_path / "selection.csv").write_text("file_name,probability\na.png,0.25\n")
    probabilities = find_probabilities(tmp_path, ["other/a.png", "b.png"])
    assert probabilities is not None and probabilities[0] == 0.25 and np.isnan(probabilities[1])
    assert find_probabilities(tmp_path / "none", ["a.png"]) is None


@cases("text", ["0", "1.5", "-1", "nan", "much", ""])
def test_probability_that_is_none_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "selection.csv").write_text(f"file_name,probability\na.png,{text}\n")
    with pytest.raises(DataError, match=r"selection\.csv"):
        find_probabilities(tmp_path, ["a.png"])


def test_arrays_have_the_probability_of_their_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", x=np.random.default_rng(ord(name)).random((2, 4), np.float32))
    (tmp_path / "selection.csv").write_text("file_name,probability\na.npz,0.25\n")
    samples = choose_samples([TensorSpec("x", "float32", ("N", 4))], None, tmp_path, {})
    assert samples.evaluation.weights is not None
    assert set(samples.evaluation.weights) <= {4.0, 1.0}
    assert samples.calibration.field_count + samples.evaluation.field_count == 2


def test_equal_weights_judge_as_none_do() -> None:
    stream = np.random.default_rng(1)
    source = (stream.random(300) < 0.9).astype(float)
    candidate = source * (stream.random(300) < 0.95)
    (plain,) = mean_drops(source, candidate[np.newaxis])
    (weighted,) = mean_drops(source, candidate[np.newaxis], weights=np.full(300, 7.0))
    assert weighted.points == plain.points
    assert weighted.interval().high == pytest.approx(plain.interval().high, abs=1e-6)
    assert weighted.samples_for(9.0) == plain.samples_for(9.0)
    assert weighted.effective == pytest.approx(300)


def test_heavy_sample_that_is_lost_weighs_and_widens() -> None:
    scores, weights = np.ones(100), np.ones(100)
    weights[0] = 50
    lost = scores.copy()
    lost[0] = 0
    (drop,) = mean_drops(scores, lost[np.newaxis], weights=weights)
    (equal,) = mean_drops(scores, lost[np.newaxis])
    assert (drop.points, equal.points) == (pytest.approx(100 * 50 / 149, abs=1e-3), 1.0)
    (unseen,) = mean_drops(scores, scores[np.newaxis], weights=weights)
    (none,) = mean_drops(scores, scores[np.newaxis])
    assert unseen.interval().high > 2 * none.interval().high  # another like the heavy one may be lost


def test_estimate_covers_the_truth_where_the_mean_of_samples_does_not() -> None:
    covered = naive = 0
    for seed in range(100):
        stream = np.random.default_rng(seed)
        is_uncertain = stream.random(20_000) < 0.1
        correct = (stream.random(20_000) < np.where(is_uncertain, 0.5, 0.95)).astype(float)
        probabilities = np.where(is_uncertain, 0.2, 0.01)
        drawn = stream.random(20_000) < probabilities
        _, interval = estimate_mean(correct[drawn], 1 / probabilities[drawn])
        covered += interval.low <= correct.mean() <= interval.high
        naive += interval.low <= correct[drawn].mean() <= interval.high
    assert covered >= 90
    assert naive <= 5


def test_weights_reach_both_parts_and_their_means() -> None:
    table = np.zeros((2, 40))
    table[0, :20] = 1.0
    weights = np.where(table[0] == 1, 3.0, 1.0)
    scores = scores_of_table(METRICS["top1"], table, weights=weights, hold_back=True)
    assert scores.confirmation is not None
    for part in (scores.choosing, scores.confirmation):
        assert part.baseline > 0.6 and part.drops[0].points == pytest.approx(100 * part.baseline, abs=0.01)
    assert scores_of_table(METRICS["top1"], table, hold_back=False).choosing.baseline == 0.5


def test_metric_over_the_whole_set_sees_copies_by_weight_or_says_that_it_cannot() -> None:
    weighed = {
        metric.name for metric in METRICS.values() if isinstance(metric, SetMetric) and metric.weighs_copies
    }
    assert weighed == {"auc", "auc_steps", "map50", "map50_95", "miou", "characters"}
    assert count_effective(np.array([1.0, 1.0])) == 2.0
