"""Drops of right and wrong answers."""

import numpy as np

from edgekit_toolkit.evaluation.drops import Drop, mean_drops


def answers(losses: int, gains: int, samples: int) -> Drop:
    """Of a source that is right and a candidate that is wrong on `losses` samples, and the reverse."""
    source, candidate = np.ones(samples), np.ones(samples)
    candidate[:losses] = 0
    source[losses : losses + gains] = 0
    return mean_drops(source, candidate[np.newaxis])[0]
