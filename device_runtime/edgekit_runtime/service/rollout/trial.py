"""Starts a trial of a new version beside the version in use."""

import asyncio
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Final, TypeAlias

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import SlotError
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.package.states import RecurrentState, StateInputs
from edgekit_runtime.service.options.model import ModelOptions
from edgekit_runtime.service.rollout.canary_lane import CanaryLane
from edgekit_runtime.service.rollout.comparison import Compare, Outputs, choose_comparison
from edgekit_runtime.service.rollout.gates import Promote, Rollback
from edgekit_runtime.service.rollout.observer import Observer, Report
from edgekit_runtime.service.rollout.paired_runs import PairedRuns
from edgekit_runtime.service.rollout.shadow_lane import ShadowLane
from edgekit_runtime.service.serving.served_version import Served, Trial
from edgekit_runtime.tensors import TensorSpec

_LONG_QUEUE: Final = 16  # calls that wait for the version in use, which go first

Settle: TypeAlias = Callable[[Trial, Promote | Rollback], None]


def begin_trial(current: Served, candidate: Served, options: ModelOptions, settle: Settle) -> Trial:
    """Start and return a trial in which the candidate gets a share of the calls for `current`.

    Args:
        current: The version in use.
        candidate: The version on trial.
        options: The options of the model. `rollout` is the kind of trial.
        settle: Called on the event loop with the verdict.

    Raises:
        SlotError: `find_difference` found a difference between the versions.
    """
    difference = find_difference(current.loaded.manifest, candidate.loaded.manifest)
    if difference is not None:
        raise SlotError(
            f"{candidate.loaded.manifest.name} {candidate.version} has {difference} of version"
            f" {current.version} that is in use: the two cannot be tried side by side; set rollout ="
            " 'swap' for this change"
        )
    remote = None if candidate.loaded.remote is None else candidate.loaded.remote.trial
    trial = Trial(current, candidate, options, remote or _LocalTrialRunner(current, candidate, options))
    trial.runner.begin(functools.partial(settle, trial))
    current.trial = candidate.trial = trial
    return trial


class _LocalTrialRunner:
    """Runs a trial with a lane in front of both versions, in this process."""

    __slots__ = ("_candidate", "_comparison", "_current", "_lane", "_observer", "_options", "_pairs")

    def __init__(self, current: Served, candidate: Served, options: ModelOptions) -> None:
        self._current, self._candidate, self._options = current, candidate, options

    def begin(self, report: Report) -> None:
        current, candidate, options = self._current, self._candidate, self._options
        loop = asyncio.get_running_loop()
        observer = self._observer = Observer(options.gates, report, defer=loop.call_later)
        manifest, states = candidate.loaded.manifest, candidate.codec.states
        outputs = [spec for spec in candidate.codec.outputs if spec.name not in states]
        comparison = choose_comparison(outputs, manifest.figures, name=options.trial.comparison)
        self._pairs = PairedRuns(
            current.loaded.instances[0],
            candidate.loaded.instances[0],
            _without(states, comparison.compare),
            loop.call_soon_threadsafe,
            is_busy=lambda: current.metrics.waiting > _LONG_QUEUE,
            defer=loop.call_later,
            max_run_s=options.scheduling.max_run_s,
            complete=StateInputs(manifest.states, manifest.inputs).complete,
        )
        self._comparison = comparison
        parts = (current.stack, candidate.stack, observer, self._pairs)
        self._lane: CanaryLane | ShadowLane
        if options.rollout == "canary":
            sequences = (current.sequences, candidate.sequences)
            self._lane = CanaryLane(*parts, options=options.canary, sequences=sequences)
        else:
            self._lane = ShadowLane(*parts, options=options.shadow, defer=loop.call_later)
        current.lane = self._lane

    def look(self) -> None:
        self._observer.look()

    def add_energy(self, candidate_j: float, current_j: float) -> None:
        self._observer.add_energy(candidate_j, current_j)

    def take_over(self) -> bool:
        return True

    def end(self) -> None:
        self._current.lane = self._current.stack
        self._pairs.close()

    def to_json(self) -> Mapping[str, JsonValue]:
        return {**self._lane.to_json(), "comparison": self._comparison.to_json()}


def find_difference(current: Manifest, candidate: Manifest) -> str | None:
    """Return the first difference that prevents two versions from sharing calls, or None.

    The version in use prepares the inputs and decodes the outputs of both. Both must therefore have the same
    tensors, states, preprocessing, labels and task. The text states the candidate's value first.
    """
    old_parts, new_parts = _describe_parts(current), _describe_parts(candidate)
    return next(
        (
            f"{part} {new} instead of {old_parts[part]}"
            for part, new in new_parts.items()
            if new != old_parts[part]
        ),
        None,
    )


def _describe_parts(manifest: Manifest) -> dict[str, object]:
    digests = {artifact.path: artifact.sha256[:12] for artifact in manifest.artifacts}
    task = manifest.task
    return {
        **{name: [_describe(item) for item in getattr(manifest, name)] for name in ("inputs", "outputs")},
        "states": [_describe(state) for state in manifest.states],
        "task": None if task is None else f"{task.name} {dict(sorted(task.options.items()))}",
        "preprocessing": manifest.preprocessing and digests[manifest.preprocessing],
        "labels": manifest.labels and digests[manifest.labels],
    }


def _without(states: Collection[str], compare: Compare) -> Compare:
    """Return a comparison of all outputs except states, whose representation may differ between versions."""
    if not states:
        return compare

    def drop(outputs: Outputs) -> Outputs:
        return {name: array for name, array in outputs.items() if name not in states}

    return lambda current, candidate: compare(drop(current), drop(candidate))


def _describe(spec: TensorSpec | RecurrentState) -> str:
    if isinstance(spec, RecurrentState):
        return f"{spec.output} as {spec.input}"
    sizes = ",".join(str(size) if isinstance(size, int) else "?" for size in spec.shape)
    return f"{spec.name}:{spec.dtype}[{sizes}]"
