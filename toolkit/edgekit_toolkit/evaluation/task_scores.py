"""Scores with respect to true masks and texts: mean intersection over union, and character accuracy.

Each sample is reduced to a few counts. The score of any set of samples is computed from the sums of these
counts. Outputs that cannot be decoded, such as NaN, count as empty.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError
from edgekit_runtime.preprocessing.placement import Placement
from edgekit_runtime.tasks.kinds.segmentation import VOID, SegmentationOptions, find_mask
from edgekit_runtime.tasks.kinds.text import TextOptions, read_text
from edgekit_toolkit.samples.truth import TrueMask, TrueText

Outputs = Mapping[str, NDArray[Any]]
Counts = NDArray[np.int64]
_MAX_SIDE: Final = 1 << 14


def count_pixels(options: SegmentationOptions) -> Callable[[Outputs, TrueMask], Counts]:
    """Return a function that counts the pixels of each class in a sample, int64 [3, 255].

    The three rows are the correctly predicted, the predicted and the true pixels of each class. Pixels with
    the true class 255 are ignored.
    """
    options = replace(options, max_side=_MAX_SIDE)

    def reduce(outputs: Outputs, truth: TrueMask) -> Counts:
        height, width = truth.shape
        pixels = truth.classes
        counted = pixels != VOID
        true = pixels[counted]
        try:
            classes = find_mask(outputs, options, Placement.of(width, height))[counted]
        except DataError:
            classes = np.full(true.shape, VOID, np.uint8)
        parts = (true[true == classes], classes[classes != VOID], true)
        return np.stack([np.bincount(part, minlength=VOID) for part in parts]).astype(np.int64)

    return reduce


def mean_overlap(counts: Sequence[Counts], _reference: Sequence[Counts], _labels: Any) -> float:
    """Return the mean intersection over union of all classes in the results of `count_pixels`.

    Raises:
        DataError: No pixel has a true class.
    """
    common, predicted, true = np.sum(counts, axis=0)
    union = predicted + true - common
    if not true.any():
        raise DataError("no pixel of the masks has a class: 255 counts nowhere")
    return float((common[union > 0] / union[union > 0]).mean())


def count_edits(options: TextOptions) -> Callable[[Outputs, TrueText], Counts]:
    """Return a function that counts the edits (Levenshtein) and true characters of a sample, int64 [2]."""

    def reduce(outputs: Outputs, truth: TrueText) -> Counts:
        try:
            text, _ = read_text(outputs, options, truth.characters)
        except DataError:
            text = ""
        return np.array([edit_distance(text, truth.text), len(truth.text)], np.int64)

    return reduce


def share_of_characters(counts: Sequence[Counts], _reference: Sequence[Counts], _labels: Any) -> float:
    """Return 1 minus the character error rate over all results of `count_edits`, at least 0.

    Raises:
        DataError: All texts are empty.
    """
    edits, characters = np.sum(counts, axis=0).tolist()
    if not characters:
        raise DataError("all texts of the samples are empty")
    return float(max(0.0, 1 - edits / characters))


def edit_distance(text: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the minimum number of insertions, removals and replacements between two texts (Levenshtein)."""
    symbols = np.asarray(list(other))
    offsets = np.arange(len(symbols) + 1)
    row = offsets
    for symbol in text:
        change = np.minimum(row[1:] + 1, row[:-1] + (symbols != symbol))
        # Insertions run along the row: the least of each earlier cost and its distance.
        row = np.minimum.accumulate(np.append(row[0] + 1, change) - offsets) + offsets
    return int(row[-1])
