"""Reads and checks outputs, and converts them to scores."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from edgekit_runtime.errors import DataError
from edgekit_runtime.tasks.task import Outputs
from edgekit_runtime.tensors import Array, Floats

ScoreKind: TypeAlias = Literal["probabilities", "softmax", "sigmoid"]
MAX_ENTRIES = 1 << 16
"""The maximum number of values or points in an answer."""


def read_output(
    outputs: Outputs, name: str, expected: str, ranks: Sequence[int], *, is_finite: bool = False
) -> Array:
    """Return an output of one sample without the batch axis. Floats are converted to float32.

    Leading axes of size 1 are removed while there are more axes than expected.

    Args:
        outputs: The outputs of one sample.
        name: The name of the output. Empty for the first output.
        expected: A description of the expected shape, for the message.
        ranks: The allowed numbers of axes without the batch axis.
        is_finite: Whether infinity is also an error.

    Raises:
        DataError: The output is missing, empty or not numeric, has another rank, or contains NaN.
    """
    name = name or next(iter(outputs), "")
    if name not in outputs:
        raise DataError(f"there is no output '{name}', the model has {', '.join(outputs) or 'none'}")
    value = outputs[name]
    sample = value[0] if value.ndim and len(value) == 1 else value
    while sample.ndim > max(ranks) and len(sample) == 1:
        sample = sample[0]
    if sample.ndim not in ranks or not sample.size or sample.dtype.kind not in "fiub":
        raise DataError(
            f"output '{name}' is {value.dtype} {list(value.shape)}, expected {expected}: does the package"
            " state the right task?"
        )
    if sample.dtype.kind != "f":
        return sample
    with np.errstate(over="ignore"):
        sample = sample.astype(np.float32, copy=False)
    least, most = sample.min(), sample.max()  # both are NaN if a value is
    if np.isnan(least) or (is_finite and not np.isfinite([least, most]).all()):
        raise DataError(f"output '{name}' holds NaN{' or infinity' * is_finite}, expected {expected}")
    return sample


def to_scores(values: Array, kind: ScoreKind) -> Floats:
    """Convert values of any shape to float32 probabilities. A softmax is over the last axis."""
    values = values.astype(np.float32, copy=False)
    if kind == "sigmoid":
        return np.asarray(1 / (1 + np.exp(-np.clip(values, -60, 60))), np.float32)
    if kind == "probabilities":
        return values
    finite = np.clip(values, -1e30, 1e30)
    shares = np.exp(finite - finite.max(axis=-1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=-1, keepdims=True), np.float32)
