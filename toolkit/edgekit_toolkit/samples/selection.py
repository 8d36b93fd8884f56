"""Probabilities of selection of samples from the field: the list `selection.csv` in their folder.

    file_name,probability
    3f...jpg,0.25

A request like this became a sample with the chance 0.25, so the sample stands for four requests. Files that
the list does not name are not from the field, and stand for themselves.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError

SELECTION: Final = "selection.csv"
_MIN_PROBABILITY: Final = 1e-9

Weights: TypeAlias = NDArray[np.float64]


def find_probabilities(root: Path, names: Sequence[str]) -> Weights | None:
    """Return each file's probability of selection, float64 [names]; None without a list.

    A file that is not listed has NaN.

    Args:
        root: folder of the list, `selection.csv`.
        names: paths or names of the files; only the file name counts, since it is unique.

    Raises:
        DataError: the list is malformed.
    """
    path = root / SELECTION
    if not path.is_file():
        return None
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines()))
        listed = {Path(row["file_name"]).name: float(row["probability"]) for row in rows}
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as cause:
        raise DataError(f"{path}: cannot be read as a list of file_name and probability: {cause}") from cause
    wrong = [name for name, value in listed.items() if not _MIN_PROBABILITY <= value <= 1]
    if wrong:
        raise DataError(
            f"{path}: the probability of {wrong[0]} is {listed[wrong[0]]}, expected above 0 and at most 1"
        )
    return np.array([listed.get(Path(name).name, np.nan) for name in names])


def weigh(probabilities: Weights) -> Weights:
    """Return how many requests each sample stands for, float64 [samples]: 1 / probability, 1 for NaN."""
    return 1 / np.nan_to_num(probabilities, nan=1.0)


def count_effective(weights: Weights) -> float:
    """Return the effective sample size: how many samples of equal weight would be as informative.

    Source: L. Kish, Survey Sampling (1965).
    """
    return float(weights.sum() ** 2 / (weights**2).sum())
