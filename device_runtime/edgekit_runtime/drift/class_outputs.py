"""Decides by shape or manifest whether the first output of a model contains class scores.

The shape alone proves nothing: the output of a regression or an embedding may have the same shape.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.tensors import DTYPES, TensorSpec


def class_output(outputs: Sequence[TensorSpec]) -> TensorSpec | None:
    """Return the first output if it has the shape of class scores, [samples, classes >= 2], else None."""
    first = outputs[0]
    is_scores = len(first.shape) == 2 and DTYPES[first.dtype].kind == "f" and class_count(first) >= 2
    return first if is_scores else None


def class_count(spec: TensorSpec) -> int:
    """Return the size of the last axis, or 0 if the axis is dynamic or there is no axis."""
    count = spec.shape[-1] if spec.shape else 0
    return count if isinstance(count, int) else 0


def find_statement(figures: Mapping[str, JsonValue], output: str) -> str | None:
    """Return the field of the manifest that declares an output as class scores, or None.

    `figures` are the figures of the manifest, and `output` is the name of the first output. The result is a
    name such as `figures.class_output`.
    """
    if figures.get("class_output") == output:
        return "figures.class_output"
    # Not `agreement`: before `class_output` existed, that was chosen by the shape alone without labels.
    score: Any = figures.get("score")
    if isinstance(score, Mapping) and score.get("metric") in ("top1", "top5"):
        return "figures.score.metric"
    reference: Any = figures.get("reference")
    outputs = reference.get("outputs") if isinstance(reference, Mapping) else None
    output_reference = outputs.get(output) if isinstance(outputs, Mapping) else None
    if isinstance(output_reference, Mapping) and "classes" in output_reference:
        return "figures.reference"
    return None
