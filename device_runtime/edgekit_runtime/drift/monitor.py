"""Drift statistics of one version: the distributions of inputs and outputs, without labels.

Only some values of each call are counted. Recent calls have more weight than older calls.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.drift.class_outputs import class_count, class_output, find_statement
from edgekit_runtime.drift.reference import ClassReference, parse_references
from edgekit_runtime.drift.sketches import ClassSketch, ValueSketch
from edgekit_runtime.tensors import DTYPES, Array, TensorSpec

VALUES: Final = 512  # values of a tensor that are counted per call
MAX_DOCUMENT_BYTES: Final = 2000
_MAX_TENSORS: Final = 4
_MAX_ROWS: Final = 4  # counted rows of a batch of class scores


class Drift:
    """Statistics of the inputs and outputs of one version.

    Attributes:
        looked_at: sum of the weights of the counted calls. Earlier calls have less weight.
        looks: number of counted calls.
        not_finite: number of counted calls with NaN or infinity in the answer but not in the inputs.
    """

    __slots__ = ("_classes", "_inputs", "_outputs", "_window", "looked_at", "looks", "not_finite")

    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        figures: Mapping[str, JsonValue],
        window: int = 4096,
    ) -> None:
        """Start without calls.

        Args:
            inputs: inputs of the model; the first few numeric inputs are counted.
            outputs: outputs of the model, counted likewise.
            figures: figures of the manifest, with the reference if the package has one.
            window: number of counted calls after which all earlier ones lose half their weight.

        Raises:
            ManifestError: the reference is malformed, or belongs to another model.
        """
        before, after = parse_references(figures)
        self._window = window
        self._inputs = {
            spec.name: ValueSketch(before.get(spec.name))
            for spec in inputs[:_MAX_TENSORS]
            if DTYPES[spec.dtype].kind in "fiu"
        }
        classes = class_output(outputs)
        if after or classes is None or find_statement(figures, classes.name) is None:
            classes = None  # only a reference says which outputs are classes
        self._outputs: dict[str, ValueSketch] = {}
        self._classes: dict[str, ClassSketch] = {}
        for spec in outputs[: max(_MAX_TENSORS - len(self._inputs), 1)]:
            reference = after.get(spec.name)
            if isinstance(reference, ClassReference) or (reference is None and spec is classes):
                self._classes[spec.name] = ClassSketch(class_count(spec), reference)
            elif DTYPES[spec.dtype].kind == "f":
                self._outputs[spec.name] = ValueSketch(reference)
        self.looked_at = 0.0
        self.looks = 0
        self.not_finite = 0

    def pick_inputs(self, inputs: Mapping[str, Array], phase: float = 0.0) -> list[tuple[str, Array]]:
        """Return pairs of name and values of the inputs to count. For the choice of values see `pick`."""
        return [(name, pick(inputs[name], phase)) for name in self._inputs if inputs[name].size]

    def judge(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Count the answer to a call if it contains NaN or infinity although its inputs do not."""
        if not _are_finite(outputs.values()) and _are_finite(inputs.values()):
            self.not_finite += 1

    def add(
        self, picked: Sequence[tuple[str, Array]], outputs: Mapping[str, Array], phase: float = 0.0
    ) -> None:
        """Count a call. `picked` is the result of `pick_inputs`, and its arrays are overwritten."""
        for name, values in picked:
            self._inputs[name].add(values)
        for name, sketch in self._outputs.items():
            if name in outputs and outputs[name].size:
                sketch.add(pick(outputs[name], phase))
        for name, answers in self._classes.items():
            if name in outputs:
                for row in outputs[name][:_MAX_ROWS]:
                    answers.add(row)
        self.looks += 1
        self.looked_at += 1
        if self.looked_at >= 2 * self._window:
            self.looked_at /= 2
            for sketch in (*self._inputs.values(), *self._outputs.values()):
                sketch.halve()
            for answers in self._classes.values():
                answers.halve()

    def to_json(self) -> dict[str, JsonValue]:
        """Return the statistics as JSON, without the tensors that do not fit into `MAX_DOCUMENT_BYTES`.

        The keys are `looked_at`, `looks`, `not_finite`, `inputs` and `outputs`. The last two are dicts from
        name to sketch.
        """
        inputs: dict[str, JsonValue] = {name: sketch.to_json() for name, sketch in self._inputs.items()}
        outputs: dict[str, JsonValue] = {name: sketch.to_json() for name, sketch in self._classes.items()}
        outputs.update((name, sketch.to_json()) for name, sketch in self._outputs.items())
        document: dict[str, JsonValue] = {
            "looked_at": round(self.looked_at),
            "looks": self.looks,
            "not_finite": self.not_finite,
            "inputs": inputs,
            "outputs": outputs,
        }
        while len(json.dumps(document)) > MAX_DOCUMENT_BYTES and (inputs or outputs):  # very long names
            (inputs if len(inputs) >= len(outputs) else outputs).popitem()
        return document


def _are_finite(arrays: Iterable[Array]) -> bool:
    return all(array.dtype.kind != "f" or bool(np.isfinite(array).all()) for array in arrays)


def pick(array: Array, phase: float) -> Array:
    """Return a copy of up to `VALUES` evenly spread values of an array, as float32 [values].

    Args:
        array: array of numbers, not empty.
        phase: offset of the first value as a share of the step between two values, 0..1.
    """
    step = -(-array.size // VALUES)
    with np.errstate(over="ignore"):  # of float64; a sketch counts infinity separately
        return array.reshape(-1)[int(phase * step) :: step].astype(np.float32)
