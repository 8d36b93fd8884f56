"""How far the answers of two versions to the same inputs agree, without labels.

It says how alike two versions are, not which of them is right.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np

from edgekit_runtime.canonical import JsonValue
from edgekit_runtime.errors import ManifestError
from edgekit_runtime.sessions.session import Array
from edgekit_runtime.tensors import DTYPES, TensorSpec

Outputs: TypeAlias = Mapping[str, Array]
# (outputs of the current version, outputs of the candidate, both finite) -> agreement, 0..1
Compare: TypeAlias = Callable[[Outputs, Outputs], float]

# The toolkit's metrics, whose meaning is the same here but for labels: there are none on a device.
_BY_METRIC: Final[Mapping[str, str]] = {
    "top1": "agreement",
    "top5": "agreement",
    "agreement": "agreement",
    "similarity": "similarity",
}


def all_finite(arrays: Outputs) -> bool:
    """Whether no float array holds NaN or infinity."""
    for array in arrays.values():  # noqa: SIM110  # a generator costs as much as a small array
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return False
    return True


def choose_comparison(
    outputs: Sequence[TensorSpec], figures: Mapping[str, JsonValue], *, name: str | None = None
) -> Compare:
    """Return how two answers are compared.

    Args:
        outputs: of the model, from its manifest.
        figures: of the manifest; the metric that judged the package decides where it is one of ours.
        name: `agreement` (same best class) or `similarity` (small relative difference), which then decides.

    Raises:
        ManifestError: no such comparison, or `agreement` for outputs that are no class scores.
    """
    scores = figures.get("score")
    metric = scores.get("metric") if isinstance(scores, Mapping) else None
    first = outputs[0]
    is_classes = len(first.shape) == 2 and first.shape[1] != 1 and DTYPES[first.dtype].kind == "f"
    chosen = name or (_BY_METRIC.get(metric) if isinstance(metric, str) else None)
    chosen = chosen or ("agreement" if is_classes else "similarity")
    if chosen == "similarity":
        return similarity
    if chosen != "agreement":
        raise ManifestError(f"canary: comparison is {chosen!r}, expected 'agreement' or 'similarity'")
    if not is_classes:
        raise ManifestError(
            f"canary: comparison 'agreement' needs class scores [samples, classes], the first output"
            f" '{first.name}' is {first.dtype} {list(first.shape)}; use 'similarity'"
        )
    output = first.name

    def compare(current: Outputs, candidate: Outputs) -> float:
        return same_class(current[output], candidate[output]) if output in candidate else 0.0

    return compare


def same_class(current: Array, candidate: Array) -> float:
    """Return the share of samples with the same best class.

    Args:
        current: class scores [samples, classes].
        candidate: class scores; of another shape it agrees on nothing.
    """
    if current.shape != candidate.shape:
        return 0.0
    if not current.size:
        return 1.0
    if len(current) == 1:  # half the time of the general way
        return float(current.argmax() == candidate.argmax())
    return float((current.argmax(axis=1) == candidate.argmax(axis=1)).mean())


def similarity(current: Outputs, candidate: Outputs) -> float:
    """Return 1 - |difference| / |current|, at least 0, the mean over outputs; 1 for equal ones.

    Integers (classes, counts) count by the share of equal values. An output that is missing, or has another
    shape (a number of detections, say), counts 0.
    """
    parts = []
    for name, want in current.items():
        got = candidate.get(name)
        if got is None or got.shape != want.shape:
            parts.append(0.0)
        elif not want.size:
            parts.append(1.0)
        elif want.dtype.kind != "f":
            parts.append(float((got == want).mean()))
        else:
            expected = want.reshape(-1).astype(np.float64)
            error = np.linalg.norm(got.reshape(-1).astype(np.float64) - expected)
            parts.append(max(0.0, 1.0 - float(error / max(np.linalg.norm(expected), 1e-12))))
    return sum(parts) / len(parts)
