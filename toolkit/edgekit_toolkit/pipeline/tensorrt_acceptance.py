"""Chooses a candidate that the target's engine accepts: TensorRT's parser and builder have the last word.

`selection` decides which candidate keeps the limits; `tensorrt.check` asks TensorRT.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from edgekit_toolkit.models.model import Model
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.selection.budget import Budget
from edgekit_toolkit.selection.choice import Choice, Measured, choose
from edgekit_toolkit.selection.confirmation import Accepted
from edgekit_toolkit.tensorrt.check import TensorRtCheck, check_tensorrt

_NEEDED: Final = "--backend ort, where the target runs it, or a model that TensorRT accepts"


def choose_accepted(
    backend: str,
    budget: Budget,
    measured: Sequence[Measured],
    models: Mapping[str, Model],
    feeds: Feeds,
) -> Accepted:
    """Choose; for TensorRT, choose again without the candidates that its parser or builder refuses.

    Args:
        backend: the backend that the package is for.
        budget: limits.
        measured: candidates, at least one.
        models: candidate id -> model.
        feeds: one sample, for the sizes of free dimensions.
    """
    if backend != "tensorrt":
        return Accepted(choose(measured, budget), None, [])
    left = list(measured)
    refused: list[str] = []
    while True:
        choice = choose(left, budget, on_gpu=True)
        if choice.chosen is None:
            return Accepted(_with_refusals(choice, refused), None, refused)
        check = check_accepted(models[choice.chosen], feeds)
        if check.version is None:  # not installed, crashed or out of time: no answer is not a refusal
            note = f"not checked with TensorRT's parser and builder: {check.errors[0]}"
            return Accepted(choice, None, [*refused, note])
        if check.accepted:
            return Accepted(choice, check, refused)
        refused.append(f"TensorRT refuses {choice.chosen}: {check.errors[0]}")
        left = [one for one in left if one.id != choice.chosen]
        if not left:
            reason = "TensorRT refuses every candidate that keeps the limits"
            choice = Choice(None, (), choice.chosen, reason, _NEEDED)
            return Accepted(_with_refusals(choice, refused), None, refused)


def check_accepted(model: Model, feeds: Feeds) -> TensorRtCheck:
    """Return what TensorRT's parser and builder say about a model.

    Args:
        model: model of a candidate.
        feeds: one sample, for the sizes of free dimensions.
    """
    # The check needs the shapes of inputs that have free sizes beside the batch.
    shapes = {
        spec.name: (feeds[spec.name].shape,) * 3
        for spec in model.specs()[0]
        if any(isinstance(size, str) for size in spec.shape[1:])
    }
    return check_tensorrt(model.content, shapes=shapes)


def _with_refusals(choice: Choice, refused: Sequence[str]) -> Choice:
    """Return the refusal with TensorRT's earlier refusals, since the limits alone would not explain it."""
    return replace(choice, reason="; ".join([choice.reason, *refused])) if refused else choice
