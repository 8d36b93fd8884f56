"""Outputs whose number of rows depends on the data, compared as sets."""

import numpy as np
import pytest

from edgekit_runtime.package.row_sets import align_rows, row_axes, row_similarity
from edgekit_runtime.tensors import Array

BOXES = np.array([[0, 0, 9, 9], [20, 5, 30, 8], [4, 40, 6, 44], [7, 7, 60, 60]], np.float32)
LABELS = np.array([3, 1, 1, 0])


def alike(outputs: dict[str, Array], reference: dict[str, Array]) -> dict[str, float]:
    return row_similarity(outputs, reference, dict.fromkeys(reference, 0))


def test_rows_in_another_order_are_the_same_set() -> None:
    order = np.array([2, 0, 3, 1])
    outputs, reference = {"b": BOXES[order], "c": LABELS[order]}, {"b": BOXES, "c": LABELS}
    assert alike(outputs, reference) == {"b": 1, "c": 1}
    aligned = align_rows(outputs, reference, {"b": 0, "c": 0})
    np.testing.assert_array_equal(aligned.outputs["b"], BOXES)
    np.testing.assert_array_equal(aligned.outputs["c"], LABELS)


def test_labels_of_other_boxes_are_wrong_though_their_set_is_the_same() -> None:
    scores = alike({"b": BOXES, "c": np.array([1, 3, 1, 0])}, {"b": BOXES, "c": LABELS})
    assert scores == {"b": 1, "c": 0.5}


@pytest.mark.parametrize("places", [[0, 1, 2], [0, 1, 2, 3, 3], []])
def test_another_number_of_rows_is_a_lower_score(places: list[int]) -> None:
    most = max(4, len(places))
    assert alike({"b": BOXES[places]}, {"b": BOXES}) == {"b": min(4, len(places)) / most}
    assert alike({"b": BOXES}, {"b": BOXES[places]}) == {"b": min(4, len(places)) / most}


def test_no_rows_on_either_side_have_no_score() -> None:
    assert np.isnan(alike({"b": BOXES[:0]}, {"b": BOXES[:0]})["b"])


def test_row_that_is_not_a_number_is_wrong_alone() -> None:
    broken = BOXES.copy()
    broken[1] = np.nan
    assert alike({"b": broken}, {"b": BOXES}) == {"b": 0.75}


def test_missing_row_is_named_and_the_others_keep_their_places() -> None:
    aligned = align_rows({"b": BOXES[[3, 0, 1]] + 0.1}, {"b": BOXES}, {"b": 0})
    assert aligned.missing["b"].tolist() == [False, False, True, False]
    assert aligned.extra == {"b": 0}
    np.testing.assert_allclose(aligned.outputs["b"][[0, 1, 3]], BOXES[[0, 1, 3]] + 0.1)


@pytest.mark.parametrize("shape", [(3000, 4), (700,), (1500, 2, 2)])
def test_large_sets_with_noise_and_a_lost_row_are_paired(shape: tuple[int, ...]) -> None:
    draw = np.random.default_rng(5)
    rows = draw.uniform(0, 100, shape)
    order = draw.permutation(len(rows))[1:]
    score = alike({"y": rows[order] + draw.normal(0, 1e-6, rows[order].shape)}, {"y": rows})["y"]
    blocks = -(-len(rows) // 1024)
    assert 1 - (blocks + 0.1) / len(rows) < score < 1


def test_positions_of_a_mask_are_paired_exactly() -> None:
    mask = np.random.default_rng(6).random((200, 200)) < 0.5
    places = np.stack(np.nonzero(mask))
    got = places[:, ::-1][:, 5:]
    assert row_similarity({"p": got}, {"p": places}, {"p": 1})["p"] == 1 - 5 / places.shape[1]


def test_axis_of_rows_is_that_in_which_runs_of_the_same_sizes_differ() -> None:
    feed = {"x": np.zeros((1, 3))}
    runs = [
        {"k": np.zeros((1, count, 4)), "fixed": np.zeros((1, 2)), "both": np.zeros((count, count))}
        for count in (2, 5)
    ]
    assert row_axes([feed, feed], runs) == {"k": 1}
    assert row_axes([feed, {"x": np.zeros((1, 4))}], runs) == {}
