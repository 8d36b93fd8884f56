"""Reads `selection.csv`, which lists samples from the field with their selection probabilities.

    file_name,probability
    3f...jpg,0.25

The sample in this example was selected with a probability of 0.25, so it represents four requests. Files that
are not in the list are not from the field. Each of them has the weight of one request.
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
    """Return the selection probability of each file as float64 [names], or None without a list.

    The probability of a file that is not in the list is NaN.

    Args:
        root: The folder that contains the list, `selection.csv`.
        names: The paths or names of the files. They are matched by file name.

    Raises:
        DataError: The list is malformed.
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
    """Return the number of requests that each sample represents, float64 [samples].

    It is 1 / probability, or 1 if the probability is NaN.
    """
    return 1 / np.nan_to_num(probabilities, nan=1.0)


def count_effective(weights: Weights) -> float:
    """Return the effective sample size.

    This is the number of equally weighted samples that would give the same precision.

    Source: L. Kish, Survey Sampling (1965).
    """
    return float(weights.sum() ** 2 / (weights**2).sum())
