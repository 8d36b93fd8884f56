"""A new version beside the one in use, until its gates decide which of the two stays."""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from edgekit_runtime.canonical import JsonValue
from edgekit_runtime.errors import SlotError
from edgekit_runtime.service.agreement import choose_comparison
from edgekit_runtime.service.canary import Promote, Rollback
from edgekit_runtime.service.canary_lane import CanaryLane
from edgekit_runtime.service.canary_watch import Watch
from edgekit_runtime.service.rollout import Rollout
from edgekit_runtime.service.served import Served
from edgekit_runtime.service.shadow_lane import ShadowLane
from edgekit_runtime.tensors import TensorSpec

Settle: TypeAlias = Callable[["Trial", Promote | Rollback], None]


class Trial:
    """A candidate and the version that it may replace, with what lies before them both.

    Attributes:
        current: the version in use; its calls go through the trial until `end`.
        candidate: the version on trial.
        watch: counts and judges.
        rollout: how it is tried.
    """

    __slots__ = ("_lane", "candidate", "current", "rollout", "watch")

    def __init__(self, current: Served, candidate: Served, rollout: Rollout, settle: Settle) -> None:
        """Begin; calls for `current` reach the candidate from now on.

        Args:
            current: the version in use.
            candidate: the one on trial.
            rollout: how it is tried.
            settle: takes the verdict, once, on the thread of the loop.

        Raises:
            SlotError: the two differ in their inputs or outputs.
        """
        _check_alike(current, candidate)
        loop = asyncio.get_running_loop()
        self.current, self.candidate, self.rollout = current, candidate, rollout
        self.watch = Watch(rollout.gates, lambda verdict: settle(self, verdict), defer=loop.call_later)
        self._lane: CanaryLane | ShadowLane
        if rollout.kind == "canary":
            self._lane = CanaryLane(
                current.stack, candidate.stack, self.watch, share=rollout.share, retry=rollout.retry
            )
        else:
            manifest = candidate.loaded.manifest
            compare = choose_comparison(candidate.codec.outputs, manifest.figures, name=rollout.comparison)
            self._lane = ShadowLane(
                current.stack, candidate.stack, self.watch, compare, rollout.shadow, defer=loop.call_later
            )
        current.lane = self._lane
        current.trial = candidate.trial = self

    def end(self) -> None:
        """Let calls for the version in use pass by the candidate; those under way there are answered."""
        self.current.lane = self.current.stack
        self.current.trial = self.candidate.trial = None

    def describe(self) -> str:
        """Return one line for people."""
        share = self.rollout.share if self.rollout.kind == "canary" else self.rollout.shadow.share
        answers = self.watch.observed.candidate.answers
        return f"{self.rollout.kind} with {share:.0%} of the calls, {answers} answers so far"

    def to_json(self) -> dict[str, JsonValue]:
        """Return what is known, for `/v2` statistics."""
        lane = self._lane
        found = lane.to_json() if isinstance(lane, ShadowLane) else self.watch.to_json()
        return {
            "kind": self.rollout.kind,
            "current_version": self.current.version,
            "candidate_version": self.candidate.version,
            **found,
        }


def _check_alike(current: Served, candidate: Served) -> None:
    name = candidate.loaded.manifest.name
    for what in ("inputs", "outputs"):
        old, new = ([_describe(spec) for spec in getattr(one.codec, what)] for one in (current, candidate))
        if old != new:
            raise SlotError(
                f"{name} {candidate.version} has {what} {new}, version {current.version} that is in use has"
                f" {old}: the two cannot be tried side by side; set rollout = 'swap' for this change"
            )


def _describe(spec: TensorSpec) -> str:
    sizes = ",".join(str(size) if isinstance(size, int) else "?" for size in spec.shape)
    return f"{spec.name}:{spec.dtype}[{sizes}]"
