"""Metrics of the agreement between the answers of two versions to the same inputs.

Labels are not needed. The metrics show how similar two versions are, not which one is correct.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.drift.class_outputs import find_statement
from edgekit_runtime.errors import ManifestError
from edgekit_runtime.package.figures import ANSWER_OUTPUT_FIGURE
from edgekit_runtime.package.row_sets import compare_numbers, row_axes, row_similarity
from edgekit_runtime.records import dataclass
from edgekit_runtime.tensors import DTYPES, Array, TensorSpec

Outputs: TypeAlias = Mapping[str, Array]
# Takes finite outputs of the current version and of the candidate. Returns the agreement, 0..1.
Compare: TypeAlias = Callable[[Outputs, Outputs], float]


_CLASS_METRICS = ("top1", "top5", "agreement")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The method by which the answers of two versions are compared.

    Attributes:
        name: `agreement` compares the best classes, or the labels and boxes of decoded answers.
            `similarity` compares the values of the outputs.
        reason: Why this method was chosen.
        is_guess: Whether the method was guessed from the shape of the first output.
    """

    name: str
    reason: str
    is_guess: bool
    compare: Compare

    def to_json(self) -> dict[str, JsonValue]:
        """Return `name`, `reason` and `guessed` for the `/v2` statistics."""
        return {"name": self.name, "reason": self.reason, "guessed": self.is_guess}


def all_finite(arrays: Outputs) -> bool:
    """Return whether no float array contains NaN or infinity."""
    for array in arrays.values():  # noqa: SIM110  # a generator costs as much as a small array
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return False
    return True


def choose_comparison(
    outputs: Sequence[TensorSpec], figures: Mapping[str, JsonValue], *, name: str | None = None
) -> Comparison:
    """Return the method to compare answers, chosen by `name`, the manifest, or the shape of the first output.

    Args:
        outputs: The outputs in the manifest.
        figures: The `figures` of the manifest.
        name: `agreement`, `similarity` or None.

    Raises:
        ManifestError: The name is unknown, or it is `agreement` and the first output is not class scores.
    """
    first = outputs[0]
    if figures.get(ANSWER_OUTPUT_FIGURE) == first.name and name != "similarity":
        reason = f"the manifest says so: figures.{ANSWER_OUTPUT_FIGURE}"
        return Comparison("agreement", reason, is_guess=False, compare=_by_answer(first.name))
    stated = f"'{first.name}' {first.dtype} {list(first.shape)}"
    if name is not None:
        _check_name(name, first)
        chosen, reason = name, "the configuration says so"
    elif not _may_be_classes(first):
        chosen, reason = "similarity", f"{stated} has not the shape of class scores"
    elif _states_other_metric(figures):
        chosen, reason = "similarity", "the manifest says so: figures.score.metric"
    elif (field := find_statement(figures, first.name)) is not None:
        chosen, reason = "agreement", f"the manifest says so: {field}"
    else:
        guess = f"{stated} has the shape of class scores"
        return Comparison("agreement", guess, is_guess=True, compare=_by_class(first.name))
    compare = similarity if chosen == "similarity" else _by_class(first.name)
    return Comparison(chosen, reason, is_guess=False, compare=compare)


def _may_be_classes(spec: TensorSpec) -> bool:
    # The number of classes may be free: only answers to the same inputs are compared.
    return len(spec.shape) == 2 and spec.shape[1] not in (0, 1) and DTYPES[spec.dtype].kind == "f"


def _check_name(name: str, first: TensorSpec) -> None:
    if name not in ("agreement", "similarity"):
        raise ManifestError(f"canary: comparison is {name!r}, expected 'agreement' or 'similarity'")
    if name == "agreement" and not _may_be_classes(first):
        raise ManifestError(
            "canary: comparison 'agreement' needs class scores [samples, classes], the first output"
            f" '{first.name}' is {first.dtype} {list(first.shape)}; use 'similarity'"
        )


def _states_other_metric(figures: Mapping[str, JsonValue]) -> bool:
    """Return whether the manifest states a metric that is not for classes.

    A user's metric is FILE.py:FUNCTION.
    """
    score = figures.get("score")
    metric = score.get("metric") if isinstance(score, Mapping) else None
    return isinstance(metric, str) and metric.isidentifier() and metric not in _CLASS_METRICS


def _by_answer(output: str) -> Compare:
    from edgekit_runtime.tasks.agreement import compare_answers  # of a pipeline; most models are none

    def compare(current: Outputs, candidate: Outputs) -> float:
        answers = current[output].tobytes(), candidate[output].tobytes() if output in candidate else b""
        try:
            return compare_answers(*map(json.loads, answers))
        except ValueError:
            return 0.0

    return compare


def _by_class(output: str) -> Compare:
    def compare(current: Outputs, candidate: Outputs) -> float:
        return same_class(current[output], candidate[output]) if output in candidate else 0.0

    return compare


def same_class(current: Array, candidate: Array) -> float:
    """Return the share of samples for which both versions have the same best class.

    Both arrays are class scores of shape [samples, classes]. If their shapes differ, the result is 0.
    """
    if current.shape != candidate.shape:
        return 0.0
    if not current.size:
        return 1.0
    if len(current) == 1:  # half the time of the general way
        return float(current.argmax() == candidate.argmax())
    return float((current.argmax(axis=1) == candidate.argmax(axis=1)).mean())


def similarity(current: Outputs, candidate: Outputs) -> float:
    """Return the similarity of two answers, 0 to 1, as the mean over the outputs.

    For a float output, it is 1 - |candidate - current| / |current|, at least 0. For other dtypes, it is the
    share of equal values. If only the number of rows differs, as in detections, the rows are compared as
    sets. An output that is missing or has another shape counts as 0.
    """
    parts = []
    for name, want in current.items():
        output = candidate.get(name)
        if output is None:
            parts.append(0.0)
        elif output.shape != want.shape:
            pair = {name: output}, {name: want}
            parts.append(row_similarity(*pair, row_axes([{}, {}], pair)).get(name, 0.0))
        elif not want.size:
            parts.append(1.0)
        elif want.dtype.kind != "f":
            parts.append(float((output == want).mean()))
        else:
            parts.append(compare_numbers(want, output))
    return sum(parts) / len(parts)
