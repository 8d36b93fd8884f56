"""Drift statistics of one version: inputs against calibration, confidence and classes, all without labels.

Only some calls are looked at, and only some values of each: so many that the time stays within a budget. The
figures are of recent calls: as old ones age, they lose weight.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.drift.class_outputs import class_count, class_output, find_statement
from edgekit_runtime.drift.reference import ClassReference, parse_references
from edgekit_runtime.drift.sketches import ClassSketch, ValueSketch
from edgekit_runtime.errors import EdgekitError, ManifestError
from edgekit_runtime.service.rollout.observer import GOLDEN
from edgekit_runtime.service.scheduling.call import Answer, Call, Lane
from edgekit_runtime.tensors import DTYPES, Array, TensorSpec

VALUES: Final = 512  # of one tensor that are looked at in one call
MAX_DOCUMENT_BYTES: Final = 2000
_MAX_TENSORS: Final = 4
_MAX_ROWS: Final = 4  # of a batch of class scores
_MOST_SKIPPED: Final = 10_000
_FIRST_COST_S: Final = 50e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftLimits:
    """How much is looked at.

    Attributes:
        budget_s: mean time per call.
        window: calls that were looked at after which all so far lose half their weight.
    """

    budget_s: float = 2e-6
    window: int = 4096

    def __post_init__(self) -> None:
        if not self.budget_s > 0 or self.window < 1:
            raise ManifestError(f"drift: expected budget_s > 0 and window >= 1, got {self}")


class Drift:
    """What the inputs and outputs of one version look like.

    Attributes:
        looked_at: calls, with the weight that they have left.
        cost_s: smoothed time of a look.
    """

    __slots__ = ("_classes", "_inputs", "_limits", "_outputs", "_phase", "cost_s", "looked_at")

    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        figures: Mapping[str, JsonValue],
        limits: DriftLimits | None = None,
    ) -> None:
        """Begin with nothing.

        Args:
            inputs: of the model; the first few numeric ones are watched.
            outputs: of the model; as for `inputs`.
            figures: of the manifest, with the reference where the package has one.
            limits: how much is looked at.

        Raises:
            ManifestError: the reference is malformed, or of another model.
        """
        before, after = parse_references(figures)
        self._limits = limits or DriftLimits()
        self._inputs = {
            spec.name: ValueSketch(before.get(spec.name))
            for spec in inputs[:_MAX_TENSORS]
            if DTYPES[spec.dtype].kind in "fiu"
        }
        classes = class_output(outputs)
        if after or classes is None or find_statement(figures, classes.name) is None:
            classes = None  # where there is a reference, it alone says what is classes
        self._outputs: dict[str, ValueSketch] = {}
        self._classes: dict[str, ClassSketch] = {}
        for spec in outputs[: max(_MAX_TENSORS - len(self._inputs), 1)]:
            known = after.get(spec.name)
            if isinstance(known, ClassReference) or (known is None and spec is classes):
                self._classes[spec.name] = ClassSketch(class_count(spec), known)
            elif DTYPES[spec.dtype].kind == "f":
                self._outputs[spec.name] = ValueSketch(known)
        self._phase = 0.0
        self.cost_s = _FIRST_COST_S
        self.looked_at = 0.0

    def take(self, inputs: Mapping[str, Array]) -> list[tuple[str, Array]]:
        """Return a copy of some values of each watched input; in turn it takes in all of them."""
        return [(name, pick(inputs[name], self._phase)) for name in self._inputs if inputs[name].size]

    def add(self, taken: Sequence[tuple[str, Array]], outputs: Mapping[str, Array]) -> None:
        """Count what was taken of the inputs of one call, and some values of its outputs."""
        for name, values in taken:
            self._inputs[name].add(values)
        for name, sketch in self._outputs.items():
            if name in outputs and outputs[name].size:
                sketch.add(pick(outputs[name], self._phase))
        for name, answers in self._classes.items():
            if name in outputs:
                for row in outputs[name][:_MAX_ROWS]:
                    answers.add(row)
        self.looked_at += 1
        if self.looked_at >= 2 * self._limits.window:
            self.looked_at /= 2
            for sketch in (*self._inputs.values(), *self._outputs.values()):
                sketch.halve()
            for answers in self._classes.values():
                answers.halve()

    def spent(self, seconds: float) -> int:
        """Take note of what a look cost; return how many calls to let pass before the next."""
        # A pause of the whole process, which may strike during a look, is not its cost.
        self.cost_s += 0.25 * (min(seconds, 4 * self.cost_s) - self.cost_s)
        self._phase = (self._phase + GOLDEN) % 1.0
        # Not every k-th call: two clients that take turns would be seen unequally often.
        skipped = self.cost_s / self._limits.budget_s * (0.5 + self._phase)
        return min(math.ceil(skipped), _MOST_SKIPPED)

    def merge(self, other: "Drift") -> None:
        """Take in what another lane of the same version saw."""
        for name, own in self._inputs.items():
            own.merge(other._inputs[name])
        for name, output in self._outputs.items():
            output.merge(other._outputs[name])
        for name, answers in self._classes.items():
            answers.merge(other._classes[name])
        self.looked_at += other.looked_at

    def to_json(self) -> dict[str, JsonValue]:
        """Return the document for `/v2` statistics and the fleet, at most `MAX_DOCUMENT_BYTES` of JSON."""
        inputs: dict[str, JsonValue] = {name: sketch.to_json() for name, sketch in self._inputs.items()}
        outputs: dict[str, JsonValue] = {name: sketch.to_json() for name, sketch in self._classes.items()}
        outputs.update((name, sketch.to_json()) for name, sketch in self._outputs.items())
        document: dict[str, JsonValue] = {
            "looked_at": round(self.looked_at),
            "inputs": inputs,
            "outputs": outputs,
        }
        while len(json.dumps(document)) > MAX_DOCUMENT_BYTES and (inputs or outputs):  # very long names
            (inputs if len(inputs) >= len(outputs) else outputs).popitem()
        return document


class DriftLane(Lane):
    """Lets calls pass, and looks at some of them; it stands in front of a cache, which hides equal inputs."""

    __slots__ = ("_clock", "_drift", "_lane", "_left")

    def __init__(self, drift: Drift, lane: Lane, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """Watch `lane`.

        Args:
            drift: of the version behind it.
            lane: that answers.
            clock: in seconds.
        """
        self._drift = drift
        self._lane = lane
        self._clock = clock
        self._left = 1

    def attempt(self, inputs: Mapping[str, Array]) -> "Answer | None":
        """Let the lane behind answer, unless this call is looked at."""
        if self._left <= 1:
            return None
        answer = self._lane.attempt(inputs)
        if answer is not None:
            self._left -= 1
        return answer

    def submit(self, call: Call) -> None:
        """Take `call`, which the lane behind answers; raises nothing."""
        self._left -= 1
        if self._left > 0:
            self._lane.submit(call)
            return
        self._left = 1
        drift, clock = self._drift, self._clock
        begin_s = clock()
        # Wrong inputs must not fail here: the session says what is wrong with them.
        try:
            taken = drift.take(call.inputs)
        except (KeyError, ValueError, TypeError):
            self._lane.submit(call)
            return
        taken_s = clock() - begin_s

        def take(answer: Answer) -> None:
            call.reply(answer)
            if isinstance(answer, EdgekitError):
                return
            again_s = clock()
            drift.add(taken, answer)
            self._left = drift.spent(taken_s + clock() - again_s)

        self._lane.submit(call.answered_by(take))


def pick(array: Array, phase: float) -> Array:
    """Return up to `VALUES` values of an array as float32 [values], a copy, evenly spread.

    Args:
        array: of numbers, not empty.
        phase: 0..1, the first of them, so that other values come next time.
    """
    step = -(-array.size // VALUES)
    return array.reshape(-1)[int(phase * step) :: step].astype(np.float32)
