"""Scores of the benchmarks, each also a custom metric of `edgekit package --metric FILE.py:FUNCTION`.

Needs numpy only. All take outputs of a model, outputs of the float source and labels, and return one score
0..1 for each sample.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Outputs = Mapping[str, NDArray[Any]]
TEXT_THRESHOLD = 0.3  # PP-OCR's own threshold of its probability map


def top1(outputs: Outputs, reference: Outputs, labels: NDArray[np.int64] | None) -> NDArray[np.float64]:  # noqa: ARG001
    """Whether the highest of the first output's scores [samples, classes] is the label's."""
    if labels is None:
        raise ValueError("top1 needs labels")
    return np.asarray(_first(outputs).argmax(axis=1) == labels, np.float64)


def agreement(outputs: Outputs, reference: Outputs, labels: NDArray[np.int64] | None) -> NDArray[np.float64]:  # noqa: ARG001
    """Whether the highest of the first output's scores [samples, classes] is the float source's."""
    return np.asarray(_first(outputs).argmax(axis=1) == _first(reference).argmax(axis=1), np.float64)


def mask_iou(outputs: Outputs, reference: Outputs, labels: NDArray[np.int64] | None) -> NDArray[np.float64]:  # noqa: ARG001
    """Intersection over union of the text masks (probability above 0.3) of the model and of the float source.

    The first output is a probability map [samples, 1, H, W]. Two empty masks are equal: 1.
    """
    got, want = (_first(maps) > TEXT_THRESHOLD for maps in (outputs, reference))
    axes = tuple(range(1, got.ndim))
    union = (got | want).sum(axis=axes)
    return np.asarray(np.where(union, (got & want).sum(axis=axes) / np.maximum(union, 1), 1.0), np.float64)


def _first(outputs: Outputs) -> NDArray[Any]:
    return next(iter(outputs.values()))
