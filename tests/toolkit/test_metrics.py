import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError
from edgekit_toolkit.metrics import Metric, find_metric

SCORES = np.array([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.4, 0.3, 0.3]], np.float32)


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
    assert scored("similarity", output, reference) == pytest.approx([(0.8 + 1) / 2])


def test_similarity_is_the_mean_over_float_outputs() -> None:
    reference = {
        "a": np.array([[3.0, 4.0]], np.float32),
        "ids": np.array([[7]], np.int64),
        "none": np.zeros((1, 0), np.float32),
        "b": np.array([[2.0]], np.float32),
    }
    outputs = {**reference, "a": np.array([[3.0, 3.0]], np.float32), "b": np.array([[1.0]], np.float32)}
    score = find_metric("similarity", reference, labelled=False).score
    assert score(outputs, reference, None).tolist() == pytest.approx([(0.8 + 0.5) / 2])


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
    assert scored("similarity", output, reference) == [0.5]


def test_similarity_of_infinities_in_the_source_is_a_number() -> None:
    masked = np.array([[1.0, -math.inf]], np.float32)
    assert scored("similarity", masked, masked) == [0]


def test_similarity_of_an_output_of_another_shape_is_zero() -> None:
    assert scored("similarity", np.ones((3, 4), np.float32), np.ones((2, 4), np.float32)) == [0]


@pytest.mark.parametrize(
    ("output", "labelled", "name"),
    [
        (SCORES, True, "top1"),
        (SCORES, False, "agreement"),
        (SCORES.argmax(axis=1), False, "similarity"),
        (SCORES[:, :1], True, "similarity"),
        (SCORES.reshape(4, 3, 1, 1), True, "similarity"),
        (SCORES.astype(np.int64), False, "similarity"),
    ],
    ids=["labels", "no labels", "class numbers", "one column", "image", "integers"],
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


# The user's own.


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], Metric]:
    """Makes a metric of the body of `score(outputs, reference, labels)`."""

    def make(body: str) -> Metric:
        path = tmp_path / "own.py"
        path.write_text(f"def score(outputs, reference, labels):\n    {body}\n")
        return find_metric(f"{path}:score", {"y": SCORES}, labelled=False)

    return make


def scores_of(metric: Metric) -> list[float]:
    return metric.score({"y": SCORES}, {"y": SCORES * 0}, np.array([1, 0, 0, 2])).tolist()


def test_own_metric_sees_outputs_reference_and_labels(own: Callable[[str], Metric]) -> None:
    metric = own("return (outputs['y'].argmax(1) == labels) & (reference['y'] == 0).all(1)")
    assert scores_of(metric) == [1, 1, 0, 0]
    assert not metric.needs_labels


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


@pytest.mark.parametrize(
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
