"""Checks whether a trigger fits a request, with one function for each kind of trigger.

The check runs after the answer on a separate thread, and only for requests that were drawn.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from edgekit_runtime.drift.class_outputs import class_count, class_output, find_statement
from edgekit_runtime.drift.monitor import pick
from edgekit_runtime.drift.reference import ClassReference, ValueReference, parse_references
from edgekit_runtime.drift.sketches import ClassSketch, ValueSketch, are_probabilities
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.protocol.samples import SampleTrigger
from edgekit_runtime.records import dataclass
from edgekit_runtime.tensors import Array

_MARGIN: Final = 0.2
_MIN_AGREEMENT: Final = 0.9
_MIN_OUTSIDE: Final = 0.01  # share of the values of a tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Observation:
    """A request with its outputs and its answer.

    Attributes:
        inputs, outputs: Dicts from names to tensors.
        answer: The answer of the task. Empty if the model has no task.
        find_agreement: A function that returns the similarity to the answer of another version, 0 to 1, or
            None if there is no other version.
    """

    manifest: Manifest
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    answer: Mapping[str, Any]
    find_agreement: Callable[[], float | None]


Judge: TypeAlias = Callable[[Observation, SampleTrigger], bool | None]
"""Returns whether the trigger applies, or None if that cannot be known for this package."""


def _is_uncertain(observation: Observation, trigger: SampleTrigger) -> bool | None:
    scores = list(_list_scores(observation.answer))
    margins = [_find_margin(row) for row in scores] if scores else _find_class_margins(observation)
    if margins is None:
        return None
    return min(margins, default=1.0) <= (_MARGIN if trigger.threshold is None else trigger.threshold)


def _list_scores(answer: object) -> Iterator[list[float]]:
    """Yield the scores of each list of labels in an answer, those of inner answers, too."""
    if isinstance(answer, Mapping):
        for value in answer.values():
            yield from _list_scores(value)
    elif isinstance(answer, list):
        yield [entry["score"] for entry in answer if isinstance(entry, Mapping) and "score" in entry]
        for entry in answer:
            yield from _list_scores(entry)


def _find_margin(scores: Sequence[float]) -> float:
    """Return how far the decision is from another one: a class from the next, or a box from none.

    Scores that add up to more than 1 are no classes that exclude one another.
    """
    if len(scores) > 1 and sum(scores) <= 1.001:
        best, second = sorted(scores, reverse=True)[:2]
        return best - second
    return min((abs(2 * score - 1) for score in scores), default=1.0)


def _find_class_margins(observation: Observation) -> list[float] | None:
    """Return the margin of each row of class scores; None if the first output holds none."""
    manifest = observation.manifest
    spec = class_output(manifest.outputs)
    if observation.answer or spec is None or find_statement(manifest.figures, spec.name) is None:
        return [1.0] if observation.answer else None  # an answer without any label is sure
    margins = []
    for row in observation.outputs[spec.name].astype(np.float64):
        if not are_probabilities(row):
            row = np.exp(row - row.max())  # noqa: PLW2901
            row /= row.sum()  # noqa: PLW2901
        second, best = np.partition(row, -2)[-2:]
        margins.append(float(best - second))
    return margins


def _is_drifted(observation: Observation, _trigger: SampleTrigger) -> bool | None:
    before, after = parse_references(observation.manifest.figures)
    if not before and not after:
        return None
    specs = {spec.name: spec for spec in observation.manifest.outputs}
    pairs: list[tuple[ValueReference | ClassReference, Array | None, int]] = [
        (reference, observation.inputs.get(name), 0) for name, reference in before.items()
    ]
    pairs += [
        (reference, observation.outputs.get(name), class_count(specs[name]))
        for name, reference in after.items()
        if name in specs
    ]
    return any(
        _is_outside(reference, array)
        if isinstance(reference, ValueReference)
        else _is_new_class(reference, array, count)
        for reference, array, count in pairs
        if array is not None and array.size
    )


def _is_outside(reference: ValueReference, array: Array) -> bool:
    sketch = ValueSketch(reference)
    sketch.add(pick(array, 0.5))
    empty = [
        count for count, share in zip(sketch.bins, (0.0, *reference.shares, 0.0), strict=True) if not share
    ]
    return bool(sketch.not_finite) or sum(empty) >= max(1.0, _MIN_OUTSIDE * sum(sketch.bins))


def _is_new_class(reference: ClassReference, array: Array, count: int) -> bool:
    sketch = ClassSketch(count, reference)
    for row in array:
        sketch.add(row)
    counts_and_shares = [*zip(sketch.classes, reference.classes, strict=True)]
    counts_and_shares += zip(sketch.confidence, reference.confidence, strict=True)
    return any(observed and not share for observed, share in counts_and_shares)


def _is_disputed(observation: Observation, _trigger: SampleTrigger) -> bool | None:
    agreement = observation.find_agreement()
    return None if agreement is None else agreement < _MIN_AGREEMENT


JUDGES: Final[Mapping[str, Judge]] = {
    "uncertain": _is_uncertain,
    "disagreement": _is_disputed,
    "drift": _is_drifted,
    "random": lambda _observation, _trigger: True,
}
"""A dict from kinds to judges, without `kept`, which applications use."""
