import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.toolkit.cases import cases

from edgekit_runtime.errors import DataError
from edgekit_toolkit.evaluation.metrics import METRICS, Metric, SetMetric, find_metric

SCORES = np.array([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.4, 0.3, 0.3]], np.float32)

MAPS = np.random.default_rng(1).standard_normal((2, 4, 16, 16)).astype(np.float32)
# Two objects among 40 anchors: centre, size and two classes, in pixels.
YOLO = np.zeros((1, 6, 40), np.float32)
YOLO[0, :, 0] = [100, 80, 40, 30, 0.9, 0.1]
YOLO[0, :, 1] = [300, 200, 50, 60, 0.2, 0.8]


def scored(
    name: str,
    output: NDArray[Any],
    reference: NDArray[Any] | None = None,
    labels: Sequence[int] | None = None,
) -> list[float]:
    """Scores of one output `y`."""
    outputs = {"y": output}
    source = {"y": output if reference is None else reference}
    metric = find_metric(name, source, labels is not None)
    assert isinstance(metric, Metric)
    known = None if labels is None else np.asarray(labels, np.int64)
    return metric.score(outputs, source, known).tolist()


def test_top1_counts_samples_whose_label_scores_best() -> None:
    assert scored("top1", SCORES, labels=[1, 0, 0, 2]) == [1, 1, 0, 0]


def test_top5_counts_samples_whose_label_is_among_the_five_best() -> None:
    ladder = np.tile(np.arange(8, dtype=np.float32), (4, 1))
    assert scored("top5", ladder, labels=[7, 3, 2, 0]) == [1, 1, 0, 0]


def test_top5_of_three_classes_counts_every_sample() -> None:
    assert scored("top5", SCORES, labels=[2, 2, 0, 1]) == [1, 1, 1, 1]


def test_tie_goes_to_the_first_class() -> None:
    even = np.zeros((2, 3), np.float32)
    assert scored("top1", even, labels=[0, 1]) == [1, 0]


@pytest.mark.parametrize("label", [3, -1])
def test_label_outside_the_classes_is_an_error(label: int) -> None:
    with pytest.raises(DataError, match=f"label {label} is outside the model's 3 classes"):
        scored("top1", SCORES, labels=[0, 1, label, 0])


def test_labels_that_do_not_match_the_samples_are_an_error() -> None:
    with pytest.raises(DataError, match=r"labels have shape \[3\], expected \[4\]"):
        scored("top1", SCORES, labels=[0, 1, 2])


def test_agreement_counts_samples_with_the_class_of_the_source_model() -> None:
    changed = SCORES.copy()
    changed[1] = [0.3, 0.5, 0.2]
    assert scored("agreement", changed, SCORES) == [1, 0, 1, 1]


@pytest.mark.parametrize("name", ["top1", "top5", "agreement"])
def test_scores_that_are_not_a_number_count_as_wrong(name: str) -> None:
    output = SCORES.copy()
    output[0] = np.nan
    assert scored(name, output, SCORES, labels=[0, 0, 2, 0]) == [0, 1, 1, 1]


def test_similarity_is_one_less_the_relative_error_of_each_sample() -> None:
    reference = np.array([[3.0, 4.0], [0.0, 2.0]], np.float32)
    output = np.array([[3.0, 3.0], [0.0, 2.0]], np.float32)
    # The first is off by 1 where its length is 5, the second not at all.
    assert scored("similarity", output, reference) == pytest.approx([0.8, 1])


def test_similarity_is_the_mean_over_float_outputs() -> None:
    reference = {
        "a": np.array([[3.0, 4.0]], np.float32),
        "ids": np.array([[7]], np.int64),
        "none": np.zeros((1, 0), np.float32),
        "b": np.array([[2.0]], np.float32),
    }
    outputs = {**reference, "a": np.array([[3.0, 3.0]], np.float32), "b": np.array([[1.0]], np.float32)}
    metric = find_metric("similarity", reference, labelled=False)
    assert isinstance(metric, Metric)
    assert metric.score(outputs, reference, None).tolist() == pytest.approx([(0.8 + 0.5) / 2])


def test_similarity_of_integers_is_the_share_of_equal_values_of_each_sample() -> None:
    want = np.array([[1, 2], [3, 4], [5, 6]])
    got = np.array([[1, 2], [3, 0], [0, 0]])
    assert scored("similarity", got, want) == [1, 0.5, 0]
    assert scored("similarity", got[:, 0], want[:, 0]) == [1, 1, 0]
    assert scored("similarity", got[:2], want) == [0, 0, 0]


def test_similarity_of_a_small_output_is_relative_to_its_length() -> None:
    reference = np.array([[3e-4, 4e-4]], np.float32)
    assert scored("similarity", reference * np.float32(0.9), reference) == pytest.approx([0.9], abs=1e-6)


def test_similarity_to_an_output_of_zeros_is_one_for_zeros_and_zero_for_others() -> None:
    zeros = np.zeros((2, 3), np.float32)
    assert scored("similarity", np.array([[0, 0, 0], [0, 1e-6, 0]], np.float32), zeros) == [1, 0]


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_outputs_without_a_value_are_not_judged(dtype: type) -> None:
    assert np.isnan(scored("similarity", np.zeros((1, 0), dtype))).all()


def test_similarity_of_whole_numbers_is_their_share_of_equal_values() -> None:
    reference = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    output = np.array([[1, 2, 3, 9], [5, 6, 7, 8]])
    assert scored("similarity", output, reference) == [0.75, 1]
    assert scored("similarity", output[:, :3], reference) == [0, 0]
    assert scored("similarity", np.array(4), np.array(4)) == [1]


def test_similarity_of_outputs_that_share_no_first_axis_is_one_mean() -> None:
    """Detections of one picture beside its features: 0.75 of two rows, and 0.5 of one."""
    reference = {"a": np.array([[1.0], [2.0]], np.float32), "b": np.array([[2.0]], np.float32)}
    outputs = {"a": np.array([[0.5], [2.0]], np.float32), "b": np.array([[1.0]], np.float32)}
    metric = find_metric("similarity", reference, labelled=False)
    assert isinstance(metric, Metric)
    assert metric.score(outputs, reference, None).tolist() == [0.625]


def test_similarity_sees_all_axes_of_a_sample() -> None:
    reference = np.zeros((2, 2, 2), np.float32)
    reference[:, 1, 1] = [3, 5]
    reference[:, 0, 0] = [4, 12]
    output = reference.copy()
    output[0, 0, 0] = 3  # off by 1 of 5
    assert scored("similarity", output, reference) == pytest.approx([0.8, 1])


def test_output_of_two_columns_has_class_scores() -> None:
    assert find_metric("auto", {"y": SCORES[:, :2]}, labelled=False).name == "agreement"


@pytest.mark.parametrize("name", ["top1", "top5"])
def test_score_by_labels_is_refused_where_there_are_none(name: str) -> None:
    metric = find_metric(name, {"y": SCORES}, labelled=True)
    assert isinstance(metric, Metric)
    with pytest.raises(DataError, match=f"metric '{name}' needs labels"):
        metric.score({"y": SCORES}, {"y": SCORES}, None)


def test_label_outside_the_classes_is_an_error_that_says_the_range() -> None:
    with pytest.raises(DataError, match=r"the model's 3 classes, expected 0\.\.2:"):
        scored("top1", SCORES, labels=[0, 1, 3, 0])


def test_similarity_of_an_error_larger_than_the_output_is_zero() -> None:
    one = np.ones((1, 2), np.float32)
    assert scored("similarity", 9 * one, one) == [0]


def test_similarity_without_a_batch_axis_takes_all_as_one_sample() -> None:
    assert scored("similarity", np.float32(3).reshape(()), np.float32(4).reshape(())) == [0.75]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_similarity_of_a_sample_that_is_not_finite_is_zero(value: float) -> None:
    reference = np.ones((2, 3), np.float32)
    output = reference.copy()
    output[1, 2] = value
    assert scored("similarity", output, reference) == [1, 0]


def test_similarity_of_infinities_of_the_source_is_that_of_the_other_values() -> None:
    masked = np.array([[1.0, -math.inf], [1.0, -math.inf]], np.float32)
    other = np.array([[0.5, -math.inf], [1.0, 3.0]], np.float32)
    assert scored("similarity", masked, masked) == [1, 1]
    assert scored("similarity", other, masked) == [0.5, 0]


def test_similarity_of_an_output_of_another_shape_is_zero() -> None:
    assert scored("similarity", np.ones((3, 4), np.float32), np.ones((2, 4), np.float32)) == [0, 0]


@cases(
    ("output", "labelled", "name"),
    [
        (SCORES, True, "top1"),
        (SCORES, False, "agreement"),
        (SCORES.argmax(axis=1), False, "similarity"),
        (SCORES[:, :1], True, "similarity"),
        (SCORES.reshape(4, 3, 1, 1), True, "similarity"),
        (SCORES.astype(np.int64), False, "similarity"),
        (MAPS, True, "pixel_agreement"),
        (MAPS.transpose(0, 2, 3, 1), False, "pixel_agreement"),
        (np.full((2, 1, 16, 16), 0.5, np.float32), False, "mask_overlap"),
        (np.full((2, 1, 16, 16), 5.5, np.float32), False, "similarity"),
        (np.zeros((2, 3, 16, 16), np.float32), False, "similarity"),
        (np.zeros((2, 256, 14, 14), np.float32), False, "similarity"),
        (YOLO, False, "detections"),
        (YOLO.transpose(0, 2, 1), False, "detections"),
        (np.full((1, 97, 29), 1 / 29, np.float32), False, "sequence"),
    ],
    ids=[
        "labels",
        "no labels",
        "class numbers",
        "one column",
        "image",
        "integers",
        "segmentation",
        "segmentation, channels last",
        "mask",
        "depth",
        "colours",
        "features",
        "detector",
        "detector, anchors first",
        "letters over time",
    ],
)
def test_auto_goes_by_the_shape_of_the_output_and_the_labels(
    output: NDArray[Any], labelled: bool, name: str
) -> None:
    assert find_metric("auto", {"y": output}, labelled).name == name


@pytest.mark.parametrize("name", ["top1", "top5"])
def test_metric_that_needs_labels_is_refused_without_them(name: str) -> None:
    with pytest.raises(DataError, match=f"'{name}' needs labels: add an int64 array `y`"):
        find_metric(name, {"y": SCORES}, labelled=False)


@pytest.mark.parametrize("name", ["top1", "top5", "agreement"])
def test_metric_of_classes_is_refused_for_other_outputs(name: str) -> None:
    with pytest.raises(DataError, match=r"needs class scores \[samples, classes\]; the outputs are"):
        find_metric(name, {"y": SCORES.reshape(4, 3, 1)}, labelled=True)


def test_unknown_metric_is_refused_with_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"expected auto, top1, .* or FILE.py:FUNCTION"):
        find_metric("accuracy", {"y": SCORES}, labelled=True)


def test_auto_reads_boxes_and_scores_in_outputs_of_their_own() -> None:
    corners = np.tile(np.array([0.1, 0.1, 0.4, 0.5], np.float32), (1, 40, 1))
    shares = np.full((1, 40, 2), 0.5, np.float32)
    assert find_metric("auto", {"boxes": corners, "scores": shares}, labelled=False).name == "detections"
    assert find_metric("auto", {"offsets": -corners, "scores": shares}, labelled=False).name == "similarity"


# Dense outputs.


def test_pixel_agreement_is_the_share_of_pixels_with_the_class_of_the_source() -> None:
    changed = MAPS.copy()
    changed[0, :, :8] = -changed[0, :, :8]  # half of the first sample
    assert scored("pixel_agreement", changed, MAPS) == [0.5, 1]
    last = changed.transpose(0, 2, 3, 1), MAPS.transpose(0, 2, 3, 1)
    assert scored("pixel_agreement", *last) == [0.5, 1]


@cases(
    ("shape", "name"),
    [
        ((2, 2, 8, 8), "pixel_agreement"),
        ((2, 7, 8, 8), "pixel_agreement"),
        ((2, 8, 8, 8), "similarity"),  # as many channels as rows: no picture
        ((2, 2, 7, 8), "similarity"),
        ((2, 2, 8, 7), "similarity"),
        ((2, 9, 16, 2), "pixel_agreement"),
        ((2, 16, 8, 2), "pixel_agreement"),
        ((2, 16, 7, 2), "similarity"),
        ((2, 16, 8, 8), "similarity"),
        ((2, 1, 8, 9), "mask_overlap"),
        ((2, 9, 8, 1), "mask_overlap"),
        ((2, 2, 8, 8, 8), "similarity"),
    ],
)
def test_maps_are_those_of_eight_rows_and_columns_with_fewer_channels(
    shape: tuple[int, ...], name: str
) -> None:
    assert find_metric("auto", {"y": np.full(shape, 0.5, np.float32)}, labelled=False).name == name


@pytest.mark.parametrize(
    ("low", "high", "name"),
    [
        (0.0, 1.0, "mask_overlap"),
        (-0.01, 1.0, "similarity"),
        (0.0, 1.01, "similarity"),
    ],
)
def test_map_of_one_channel_is_a_mask_where_its_values_are_shares(low: float, high: float, name: str) -> None:
    maps = np.linspace(low, high, 64, dtype=np.float32).reshape(1, 1, 8, 8)
    assert find_metric("auto", {"y": maps}, labelled=False).name == name


def test_two_outputs_are_no_mask() -> None:
    maps = np.full((1, 1, 8, 8), 0.5, np.float32)
    assert find_metric("auto", {"y": maps, "z": maps}, labelled=False).name == "similarity"


@pytest.mark.parametrize(
    ("name", "channels", "said"),
    [
        ("pixel_agreement", 1, "needs maps .* of 2 classes or more"),
        ("mask_overlap", 2, "needs masks"),
    ],
)
def test_metric_of_maps_is_refused_for_other_channels(name: str, channels: int, said: str) -> None:
    maps = np.full((1, channels, 8, 8), 0.5, np.float32)
    with pytest.raises(DataError, match=rf"{said}.*\[1, {channels}, 8, 8\]"):
        find_metric(name, {"y": maps}, labelled=False)


def test_pixel_agreement_takes_two_classes() -> None:
    maps = np.full((1, 2, 8, 8), 0.5, np.float32)
    assert scored("pixel_agreement", maps) == [1]


def test_maps_of_another_shape_than_the_source_score_zero() -> None:
    assert scored("pixel_agreement", MAPS[:, :3], MAPS) == [0, 0]
    masks = np.full((2, 1, 16, 16), 0.9, np.float32)
    assert scored("mask_overlap", masks[..., :15], masks) == [0, 0]


def test_pixels_that_are_not_a_number_do_not_agree() -> None:
    changed = MAPS.copy()
    changed[0, 1, :4] = np.nan  # a quarter of the first sample
    assert scored("pixel_agreement", changed, MAPS) == [0.75, 1]


def test_mask_with_a_value_that_is_not_a_number_overlaps_nothing() -> None:
    reference = np.full((2, 1, 8, 8), 0.9, np.float32)
    output = reference.copy()
    output[0, 0, 0, 0] = np.nan
    assert scored("mask_overlap", output, reference) == [0, 1]


def test_pixel_of_a_half_is_outside_the_mask() -> None:
    reference = np.full((1, 1, 8, 8), 0.9, np.float32)
    output = reference.copy()
    output[0, 0, 0] = 0.5
    assert scored("mask_overlap", output, reference) == [7 / 8]


def test_mask_of_one_pixel_overlaps_itself() -> None:
    mask = np.zeros((1, 1, 8, 8), np.float32)
    mask[0, 0, 3, 3] = 1
    assert scored("mask_overlap", mask) == [1]


def test_noise_of_40_db_hardly_changes_what_pixels_are() -> None:
    """The noise that costs a point of similarity."""
    draw = np.random.default_rng(2)
    maps = draw.standard_normal((4, 8, 32, 32)).astype(np.float32)
    noisy = maps + 0.01 * draw.standard_normal(maps.shape).astype(np.float32)
    assert 0.985 < np.mean(scored("similarity", noisy, maps)) < 0.995
    assert np.mean(scored("pixel_agreement", noisy, maps)) > 0.99


def test_mask_overlap_is_intersection_over_union_above_a_half() -> None:
    reference = np.zeros((3, 1, 8, 8), np.float32)
    reference[0, 0, :4] = 0.9
    output = reference.copy()
    output[0, 0, 2:4] = 0.4  # half of it is lost
    output[2, 0, 0] = 0.6  # of nothing
    assert scored("mask_overlap", output, reference) == [0.5, 1, 0]


def test_detections_are_matched_by_class_and_overlap() -> None:
    output = YOLO.copy()
    assert scored("detections", output, YOLO) == [1]
    output[0, :4, 0] += 2  # a little elsewhere
    assert scored("detections", output, YOLO) == [1]
    output[0, :4, 0] += 200  # somewhere else: one of two, and one too many
    assert scored("detections", output, YOLO) == [0.5]
    output[0, 4:, 0] = 0  # not found at all
    assert scored("detections", output, YOLO) == [pytest.approx(2 / 3)]
    output[0, 4:, 1] = output[0, 4:, 1][::-1]  # and the other one as something else
    assert scored("detections", output, YOLO) == [0]


def test_detections_of_one_object_count_once() -> None:
    output = YOLO.copy()
    output[0, :, 2] = output[0, :, 0]  # the same box again, a little less sure
    output[0, 4:, 2] *= 0.9
    assert scored("detections", output, YOLO) == [1]


def test_no_detections_on_either_side_are_not_judged() -> None:
    nothing = YOLO.copy()
    nothing[0, 4:] = 0
    assert np.isnan(scored("detections", nothing, nothing)).all()
    assert scored("detections", YOLO, nothing) == [0]


def test_detections_that_are_not_a_number_are_none() -> None:
    output = YOLO.copy()
    output[:] = np.nan
    assert scored("detections", output, YOLO) == [0]


# The user's own.


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], Metric]:
    """Makes a metric of the body of `score(outputs, reference, labels)`."""

    def make(body: str) -> Metric:
        path = tmp_path / "own.py"
        path.write_text(f"def score(outputs, reference, labels):\n    {body}\n")
        metric = find_metric(f"{path}:score", {"y": SCORES}, labelled=False)
        assert isinstance(metric, Metric)
        return metric

    return make


def scores_of(metric: Metric | SetMetric) -> list[float]:
    assert isinstance(metric, Metric)
    return metric.score({"y": SCORES}, {"y": SCORES * 0}, np.array([1, 0, 0, 2])).tolist()


def test_own_metric_sees_outputs_reference_and_labels(own: Callable[[str], Metric]) -> None:
    metric = own("return (outputs['y'].argmax(1) == labels) & (reference['y'] == 0).all(1)")
    assert scores_of(metric) == [1, 1, 0, 0]
    assert metric.truth is None


def test_own_metric_that_changes_labels_and_outputs_changes_copies(own: Callable[[str], Metric]) -> None:
    metric = own("labels[:] = 9; outputs['y'][:] = 9; return [1]")
    labels, outputs = np.array([1, 0, 0, 2]), {"y": SCORES.copy()}
    metric.score(outputs, outputs, labels)
    assert labels.tolist() == [1, 0, 0, 2]
    np.testing.assert_array_equal(outputs["y"], SCORES)


def test_what_an_own_metric_prints_goes_to_standard_error(
    own: Callable[[str], Metric], capsys: pytest.CaptureFixture[str]
) -> None:
    scores_of(own("print('seen'); return 1"))
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "seen\n")


def test_own_metric_may_return_one_number(own: Callable[[str], Metric]) -> None:
    assert scores_of(own("return 0.25")) == [0.25]


@pytest.mark.parametrize(
    "body",
    [
        "return outputs['y']",
        "return [float('nan')]",
        "return [0.5, float('inf')]",
        "return [1.5]",
        "return [-0.1]",
        "return []",
    ],
)
def test_own_metric_that_returns_no_scores_is_an_error(body: str, own: Callable[[str], Metric]) -> None:
    with pytest.raises(
        DataError, match=r"own.py:score' returned shape .*; expected scores 0..1, shape \[samples\]"
    ):
        scores_of(own(body))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 1 / 0", "ZeroDivisionError"),
        ("return outputs['z']", "KeyError"),
        ("return 'good'", "ValueError"),
        ("return None", "TypeError|expected scores"),
        ("raise SystemExit(3)", "SystemExit"),
    ],
)
def test_own_metric_that_fails_is_an_error_with_its_reason(
    body: str, said: str, own: Callable[[str], Metric]
) -> None:
    with pytest.raises(DataError, match=f"own.py:score'.*({said})"):
        scores_of(own(body))


def test_own_metric_that_fails_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("def score(*_):\n    return part(0)\n\ndef part(x):\n    return 1 / x\n")
    metric = find_metric(f"{path}:score", {"y": SCORES}, labelled=False)
    with pytest.raises(DataError, match=r"ZeroDivisionError.* at .*own.py:5$"):
        scores_of(metric)
    path.write_text("x = 1\nraise RuntimeError('not today')\n")
    with pytest.raises(DataError, match=r"not today.* at .*own.py:2 while loading"):
        find_metric(f"{path}:score", {"y": SCORES}, labelled=False)


def test_own_metric_over_the_whole_set_is_called_with_all_samples(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "def share(outputs, reference, labels):\n"
        "    return sum(one['y'].argmax() == label for one, label in zip(outputs, labels)) / len(labels)\n"
        "share.whole_set = True\n"
    )
    metric = find_metric(f"{path}:share", {"y": SCORES}, labelled=True)
    rows = [{"y": row[np.newaxis]} for row in SCORES]
    assert isinstance(metric, SetMetric)
    assert metric.score(rows, rows, np.array([1, 0, 0, 2])) == 0.5


@cases("body", ["return [0.5]", "return 1.5", "return float('nan')", "return None"])
def test_own_metric_over_the_whole_set_that_returns_no_score_is_an_error(body: str, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(f"def f1(*_):\n    {body}\nf1.whole_set = True\n")
    metric = find_metric(f"{path}:f1", {"y": SCORES}, labelled=False)
    assert isinstance(metric, SetMetric)
    with pytest.raises(DataError, match=r"own\.py:f1"):
        metric.score([{"y": SCORES}], [{"y": SCORES}], None)


@cases(
    ("text", "said"),
    [
        ("def other(): pass", "no attribute 'score'"),
        ("def score(:", "SyntaxError"),
        ("raise RuntimeError('not today')", "not today"),
        ("import module_that_is_not_there", "ModuleNotFoundError"),
        ("raise SystemExit", "SystemExit"),
    ],
)
def test_file_that_gives_no_metric_is_an_error_with_its_reason(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(text)
    with pytest.raises(DataError, match=f"{said}.*while loading"):
        find_metric(f"{path}:score", {"y": SCORES}, labelled=False)


@pytest.mark.parametrize("file", ["missing.py", "folder.py", "own.txt"])
def test_metric_in_no_python_file_is_an_error(file: str, tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "own.txt").write_text("def score(*_): return 1")
    with pytest.raises(DataError, match=f"there is no Python file .*{file}"):
        find_metric(f"{tmp_path / file}:score", {"y": SCORES}, labelled=False)


def test_two_files_of_one_name_are_two_metrics(tmp_path: Path) -> None:
    metrics = []
    for number in range(2):
        path = tmp_path / str(number) / "own.py"
        path.parent.mkdir()
        path.write_text(f"VALUE = {number}\ndef score(*_): return VALUE")
        metrics.append(find_metric(f"{path}:score", {"y": SCORES}, labelled=False))
    assert [scores_of(metric) for metric in metrics] == [[0], [1]]


# What tells coordinates and sequences from class scores.


def landmarks(count: int) -> dict[str, NDArray[Any]]:
    """Coordinates of a face and its pose, as of a landmark model: two outputs [N, 213] and [N, 15]."""
    draw = np.random.default_rng(20)
    layout = draw.uniform(0, 192, 213), draw.uniform(-1, 1, 15)
    spread = 6.0, 0.2
    return {
        name: (place + draw.normal(0, width, (count, len(place)))).astype(np.float32)
        for name, place, width in zip(("points", "pose"), layout, spread, strict=True)
    }


def test_coordinates_are_judged_by_r2_and_not_by_their_largest() -> None:
    outputs = landmarks(16)
    metric = find_metric("auto", outputs, labelled=False)
    assert isinstance(metric, Metric)
    assert metric.name == "r2"
    assert find_metric("auto", {"points": outputs["points"]}, labelled=False).name == "r2"
    off = {name: value + 0.5 * value.std(axis=0) for name, value in outputs.items()}
    assert metric.score(off, outputs, None) == pytest.approx(np.full(16, 0.75), abs=1e-3)
    assert metric.score(outputs, outputs, None).tolist() == [1] * 16


def test_r2_is_a_mean_of_bounded_scores_whatever_the_outputs() -> None:
    outputs = landmarks(16)
    metric = find_metric("r2", outputs, labelled=False)
    assert isinstance(metric, Metric)
    broken = {name: value.copy() for name, value in outputs.items()}
    broken["points"][3] = np.nan
    broken["pose"][3] = 1e9
    assert metric.score(broken, outputs, None)[3] == 0
    with pytest.raises(DataError, match="'r2' needs float outputs that vary"):
        find_metric("r2", landmarks(1), labelled=False)


def test_logits_without_labels_are_judged_by_agreement_and_the_doubt_is_told() -> None:
    logits = np.random.default_rng(21).normal(0, 3, (16, 10)).astype(np.float32)
    metric = find_metric("auto", {"y": logits}, labelled=False)
    assert isinstance(metric, Metric)
    assert metric.name == "agreement"
    assert "give --metric r2 (--metric agreement settles it)" in str(metric.note)
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    settled = find_metric("auto", {"y": shares, "aux": logits}, labelled=False)
    assert isinstance(settled, Metric)
    assert (settled.name, settled.note) == ("agreement", None)


@pytest.mark.parametrize("names", [["y"], ["y", "aux"]])
def test_logits_that_look_like_coordinates_are_judged_by_r2_and_the_doubt_is_told(names: list[str]) -> None:
    draw = np.random.default_rng(22)  # classes that are rare or frequent, or a second output
    logits = draw.normal(0, 3, 10) + draw.normal(0, 1, (16, 10))
    metric = find_metric("auto", dict.fromkeys(names, logits.astype(np.float32)), labelled=False)
    assert isinstance(metric, Metric)
    assert metric.name == "r2"
    assert "if it holds class scores, give --metric agreement (--metric r2 settles it)" in str(metric.note)


def test_generated_samples_tell_nothing_of_outputs() -> None:
    assert find_metric("auto", landmarks(16), labelled=False, is_generated=True).name == "agreement"


def spoken(texts: list[list[int]], classes: int = 5) -> NDArray[np.float32]:
    scores = np.full((len(texts), len(texts[0]), classes), 0.02, np.float32)
    for sample, text in enumerate(texts):
        scores[sample, np.arange(len(text)), text] = 1 - 0.02 * (classes - 1)
    return scores


@pytest.mark.parametrize("is_logarithm", [False, True])
@pytest.mark.parametrize("classes_first", [False, True])
def test_class_scores_over_time_are_judged_by_the_decoded_sequence(
    is_logarithm: bool, classes_first: bool
) -> None:
    want = spoken([[0, 1, 1, 0, 2, 0, 3, 0], [0, 0, 4, 0, 0, 0, 0, 0]])
    got = spoken([[0, 0, 1, 0, 2, 2, 0, 0], [0, 4, 4, 0, 0, 2, 0, 0]])  # 1 2 3 -> 1 2, and 4 -> 4 2
    if is_logarithm:
        want, got = np.log(want), np.log(got)
    if classes_first:
        want, got = want.transpose(0, 2, 1), got.transpose(0, 2, 1)
    metric = find_metric("auto", {"y": want}, labelled=False)
    assert isinstance(metric, Metric)
    assert metric.name == "sequence"
    assert metric.score({"y": got}, {"y": want}, None) == pytest.approx([2 / 3, 1 / 2])


def test_raw_scores_over_time_name_the_metric_that_may_be_meant() -> None:
    features = np.random.default_rng(22).normal(0, 2, (4, 30, 32)).astype(np.float32)
    metric = find_metric("auto", {"y": features}, labelled=False)
    assert isinstance(metric, Metric)
    assert metric.name == "similarity"
    assert "give --metric sequence" in str(metric.note)


def test_further_metric_is_one_record_that_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Metric(
        name="first_value",
        title="equal first values",
        score=lambda outputs, reference, _labels: (outputs["y"][:, 0] == reference["y"][:, 0]).astype(float),
        outputs="matrices",
        suits=lambda probes: probes.stacked["y"].ndim == 2,
    )
    monkeypatch.setitem(METRICS, row.name, row)
    changed = SCORES.copy()
    changed[1, 0] = 7
    assert scored("first_value", changed, SCORES) == [1, 0, 1, 1]
    with pytest.raises(DataError, match="needs matrices"):
        scored("first_value", MAPS)
