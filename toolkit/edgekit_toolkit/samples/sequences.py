"""Samples of models with states. Each sample is a sequence, and states are zero at its start.

The first axis of a sample is time. Each sample is cut into steps. A step has as many rows as the first axis
of the model's input, or one row if that axis is free:

    x [batch, 576]    a sample x [300, 576] is 300 steps with x [1, 576]

Recordings are already cut into steps when they are decoded. Each candidate is evaluated on whole sequences
with its own states, so that errors can accumulate. Calibration samples are single steps, with the states that
the float model computed before that step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError
from edgekit_runtime.package.states import RecurrentState, StateInputs
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.samples.media.files import are_recordings
from edgekit_toolkit.samples.split import Part, Ranges, feeds_only

GENERATED_STEPS: Final = 8  # of a generated sequence
_MAX_STEPS: Final = 512  # that calibrate
_MAX_BYTES: Final = 64 << 20

Steps: TypeAlias = Literal["all", "last", "largest"]
Run: TypeAlias = Callable[[Feeds], list[NDArray[Any]]]


class SequenceSamples:
    """Cuts the samples of a model with states into steps, and runs models on them.

    Attributes:
        specs: The inputs without the states. Their first axis is time.
        judged: The outputs without the states.
        dims: A dict from the name of each time axis in `specs` to its size in generated samples.
    """

    def __init__(
        self,
        states: Sequence[RecurrentState],
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        dims: Mapping[str, int],
    ) -> None:
        """Keep the steps of a model.

        Args:
            states: its states.
            inputs: all its inputs.
            outputs: all its outputs.
            dims: sizes of its free dimensions; a first one without a size is 1.
        """
        self._states = StateInputs(states, inputs)
        self._outputs = [spec.name for spec in outputs]
        targets = {state.input for state in states}
        sources = {state.output for state in states}
        self.judged = tuple(spec for spec in outputs if spec.name not in sources)
        fresh = [spec for spec in inputs if spec.name not in targets]
        self._rows = {
            spec.name: spec.shape[0] if isinstance(spec.shape[0], int) else dims.get(spec.shape[0], 1)
            for spec in fresh
            if spec.shape
        }
        names = {name: "steps" if rows == 1 else f"{rows}_steps" for name, rows in self._rows.items()}
        self.specs = tuple(
            replace(spec, shape=(names[spec.name], *spec.shape[1:])) if spec.shape else spec for spec in fresh
        )
        self.dims = {name: GENERATED_STEPS * self._rows[spec] for spec, name in names.items()}

    def first_step(self, sample: Feeds) -> Feeds:
        """Return all inputs for the first step of a sequence. The states are zero."""
        return self._states.complete(next(self._cut(sample)))

    def over_sequences(self, run: Run, *, steps: Steps) -> Run:
        """Return a function that runs a model on a whole sequence and returns the outputs in `judged`.

        States are passed from step to step. The function raises DataError if a sample is shorter than one
        step.

        Args:
            run: Runs the model on one step.
            steps: `all` concatenates the outputs of all steps along the first axis, `last` keeps the last
                step, and `largest` keeps the maximum over all steps.
        """

        def run_all(sample: Feeds) -> list[NDArray[Any]]:
            outputs = [step_outputs for _, step_outputs in self._run(run, sample)]
            rows = [
                [np.atleast_1d(step_outputs[spec.name]) for step_outputs in outputs] for spec in self.judged
            ]
            if steps == "largest":
                return [np.max(values, axis=0) for values in rows]
            return [np.concatenate(values[-1:] if steps == "last" else values) for values in rows]

        return run_all

    def over_judged(self, run: Run, part: Part) -> Run:
        """Return the result of `over_sequences` with the value of `steps` that suits the labels of `part`.

        Without class labels, `steps` is `all`. If sequences have a class, it is `last`. If recordings have a
        class, it is `largest`, because the sound may occur at any time.
        """
        if not part.labelled or part.truth is not int:
            return self.over_sequences(run, steps="all")
        return self.over_sequences(run, steps="largest" if are_recordings(part.names) else "last")

    def with_states(self, part: Part, run: Run) -> tuple[Part, Ranges]:
        """Run the float model on all sequences, and collect evenly spaced steps.

        Returns:
            The steps as samples, with states but without labels, and the ranges of the states.
        """
        chosen: list[Feeds] = []
        every, size_bytes, number = 1, 0, 0
        for sample in feeds_only(part):
            for feeds, _ in self._run(run, sample):
                if number % every == 0:
                    chosen.append({name: array.copy() for name, array in feeds.items()})
                    size_bytes += sum(array.nbytes for array in feeds.values())
                number += 1
                if len(chosen) > _MAX_STEPS or (size_bytes > _MAX_BYTES and len(chosen) > 1):
                    chosen, every, size_bytes = chosen[::2], 2 * every, size_bytes // 2
        ranges = {
            name: (
                min(float(feeds[name].min()) for feeds in chosen),
                max(float(feeds[name].max()) for feeds in chosen),
            )
            for name, array in self._states.pick(chosen[0]).items()
            if array.size and array.dtype.kind in "fiu"
        }
        steps = replace(
            part, count=len(chosen), stream=lambda _: ((feeds, None) for feeds in chosen), labelled=False
        )
        return replace(steps, in_front=True, group=1), ranges

    def _run(self, run: Run, sample: Feeds) -> Iterator[tuple[Feeds, dict[str, NDArray[Any]]]]:
        """Yield inputs and outputs of each step."""
        stored: Feeds | None = None
        for step in self._cut(sample):
            feeds = self._states.complete(step, stored)
            outputs = dict(zip(self._outputs, run(feeds), strict=True))
            stored = self._states.take(outputs)
            yield feeds, outputs

    def _cut(self, sample: Feeds) -> Iterator[Feeds]:
        count = min(len(sample[name]) // rows for name, rows in self._rows.items())
        if not count:
            shapes = ", ".join(f"'{name}' {list(sample[name].shape)}" for name in self._rows)
            raise DataError(f"a sample has {shapes}, which is less than the model takes in one step")
        for index in range(count):
            yield {
                name: array[index * self._rows[name] : (index + 1) * self._rows[name]]
                if name in self._rows
                else array
                for name, array in sample.items()
            }
