"""A metric of one's own: `edgekit package ... --metric examples/my_metric.py:confident`."""

import numpy as np


def confident(outputs, reference, labels):  # noqa: ARG001 - labels are there for metrics that need them
    """Score a sample 1 where the class is the float model's and its margin is at least half as wide."""
    (scores,), (expected,) = outputs.values(), reference.values()
    same = scores.argmax(axis=1) == expected.argmax(axis=1)
    margins = [np.diff(np.sort(rows, axis=1)[:, -2:], axis=1)[:, 0] for rows in (scores, expected)]
    return np.where(same & (margins[0] >= margins[1] / 2), 1.0, 0.0)
