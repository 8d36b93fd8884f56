"""Runs the optimisation passes, and compares the outputs of the model after each pass.

A pass is skipped and reported if it fails, changes the outputs or makes the model larger.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx

from edgekit_runtime.errors import BackendError, DataError, ModelError
from edgekit_runtime.package.row_sets import row_axes
from edgekit_runtime.sessions.ort import OrtOptions
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.onnx_graph.index import STANDARD_DOMAINS
from edgekit_toolkit.onnx_graph.specs import batch_dims, tensor_specs
from edgekit_toolkit.onnx_graph.traversal import nodes, stored_tensors
from edgekit_toolkit.openings.sessions import open_ort
from edgekit_toolkit.passes.chain import Pass, chain
from edgekit_toolkit.passes.parity import Parity, Tolerance, compare, worst
from edgekit_toolkit.samples.generated import Feeds, scaled

# Growth that a pass may cause for its savings elsewhere. More means a table that is now stored, not computed.
MAX_GROWTH: Final = 0.05
MAX_GROWTH_BYTES: Final = 64 << 10

# Exact rewrites round differently. On PP-OCRv4's detector all passes together move the outputs by 2.9e-5 of
# their range. onnxruntime's own optimisations move them by 1.5e-5 there and by 8.5e-5 on a MobileNet. A wrong
# rewrite moves them by far more.
EQUAL: Final = Tolerance(range_fraction=5e-5)

# For inputs of the other sign and beyond the samples' range, where rounding may grow.
ALIKE: Final = Tolerance(range_fraction=1e-3)

# Factors for inputs beyond the samples. Those after the first are used only while an output has no values.
_FACTORS: Final = (-2, 16, -16)

NOTHING_TO_CHANGE: Final = "nothing to change"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """The result of one pass.

    Attributes:
        applied: Whether a form of the pass was applied.
        reason: Why the first form of the pass was not applied, or an empty string.
        max_error: The largest absolute difference of an output from the source model, or None if the outputs
            were not compared.
        bytes_before, bytes_after: The size of the model. They are equal if the pass was not applied.
        nodes_before, nodes_after: The number of nodes, including nodes inside control flow.
        form: The index of the last form that was tried, starting from 0. See `chain`.
    """

    name: str
    applied: bool
    reason: str
    max_error: float | None
    bytes_before: int
    bytes_after: int
    nodes_before: int
    nodes_after: int
    form: int = 0


@dataclass(frozen=True, slots=True)
class OptimisedModel:
    """An optimised model, the results of all passes in order, and warnings for the user."""

    model: onnx.ModelProto
    steps: tuple[PassResult, ...]
    warnings: tuple[str, ...] = ()


def optimise(source: onnx.ModelProto, *, batch: int | None, feeds: Sequence[Feeds]) -> OptimisedModel:
    """Return a smaller and faster version of `source` with equal outputs.

    The names and dtypes of the inputs and outputs do not change. Outputs on `feeds` are equal if
    `parity.compare` accepts them with the tolerance `EQUAL`. If the batch is free, the outputs for twice the
    batch size of the first feed are also compared. If all outputs are float, the outputs for the first feed
    multiplied by -2 are also compared, with the tolerance `ALIKE`.

    Args:
        source: An imported model.
        batch: The batch size to fix, or None to keep the batch.
        feeds: One or more inputs for the comparison. If `batch` is set, they must have that batch size.

    Raises:
        DataError: There are no feeds, or they do not fit the model or the batch.
        ModelError: The model has a different fixed batch size.
        BackendError: The source model does not run on the feeds.
    """
    inputs, _ = tensor_specs(source)
    _check_batch(inputs, batch, feeds)
    judge = _Judge(source, feeds, doubled=batch is None)
    model, steps = source, []
    for name, forms in chain(batch):
        model, step = _step(name, forms, model, judge)
        steps.append(step)
    unseen = ", ".join(f"'{name}'" for name in judge.unseen)
    warning = (
        f"output {unseen} has no values on any sample, so nothing shows what optimising the graph changes,"
        " and it stays as it is; give --calibration samples for which it has some"
    )
    return OptimisedModel(model, tuple(steps), (warning,) if unseen else ())


class _Judge:
    """The source model's outputs, to which candidates are compared."""

    def __init__(self, source: onnx.ModelProto, feeds: Sequence[Feeds], *, doubled: bool) -> None:
        self.interface = _interface(source)
        session = open_ort(source.SerializeToString(), OrtOptions(optimise=False))
        self._cases = [(feed, session.run(feed), EQUAL) for feed in feeds]
        inputs, outputs = tensor_specs(source)
        if doubled and batch_dims(inputs):
            twice = _doubled(inputs, feeds[0])
            # A batch that is free only by name is no fault: the model runs with the feeds' batch.
            with contextlib.suppress(BackendError):
                self._cases.append((twice, session.run(twice), EQUAL))
        # For such inputs rounding alone flips an integer output (a class, a place in a list).
        is_float = all(spec.dtype.startswith("float") for spec in outputs)
        for factor in _FACTORS:
            if is_float or self.unseen:
                with contextlib.suppress(BackendError):
                    beyond = scaled(feeds[0], factor)
                    self._cases.append((beyond, session.run(beyond), ALIKE))
            if not self.unseen:
                break
        self._axes = row_axes(
            [feed for feed, _, _ in self._cases], [outputs for _, outputs, _ in self._cases]
        )

    @property
    def unseen(self) -> list[str]:
        """Outputs that have no finite value in any case, such as a list that stays empty."""
        names = self.interface[1]
        values = {name: [outputs[name] for _, outputs, _ in self._cases] for name, _ in names}
        return [
            name
            for name, arrays in values.items()
            if not any(
                np.isfinite(array).any() if array.dtype.kind == "f" else array.size for array in arrays
            )
        ]

    def compare(self, candidate: onnx.ModelProto) -> Parity:
        """Return how the candidate's outputs differ, in the worst case.

        Raises:
            EdgekitError: the candidate does not load or run.
        """
        session = open_ort(candidate.SerializeToString(), OrtOptions(optimise=False))
        return worst(
            [
                compare(expected, session.run(feed), tolerance, self._axes)
                for feed, expected, tolerance in self._cases
            ]
        )


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One form of a pass: its result if it is kept, otherwise the reason."""

    model: onnx.ModelProto | None
    reason: str
    max_error: float | None


def _step(
    name: str, forms: Sequence[Pass], model: onnx.ModelProto, judge: _Judge
) -> tuple[onnx.ModelProto, PassResult]:
    """Return the result of the first form that is kept, or `model`; and the result of the pass."""
    attempts: list[_Attempt] = []
    for form in forms:
        attempts.append(_attempt(form, model, judge))
        if attempts[-1].model is not None or attempts[-1].reason == NOTHING_TO_CHANGE:
            break
    result = attempts[-1].model or model
    step = PassResult(
        name=name,
        applied=attempts[-1].model is not None,
        reason=attempts[0].reason,
        max_error=attempts[-1].max_error,
        bytes_before=model.ByteSize(),
        bytes_after=result.ByteSize(),
        nodes_before=sum(1 for _ in nodes(model)),
        nodes_after=sum(1 for _ in nodes(result)),
        form=len(attempts) - 1,
    )
    return result, step


def _attempt(form: Pass, model: onnx.ModelProto, judge: _Judge) -> _Attempt:
    try:
        candidate = form(model)
        if candidate.SerializeToString() == model.SerializeToString():
            return _Attempt(None, NOTHING_TO_CHANGE, None)
        refusal = _refusal(candidate, model, judge)
        parity = None if refusal else judge.compare(candidate)
    except Exception as err:  # foreign passes raise anything; the chain goes on without them
        first_line = (str(err).strip() or type(err).__name__).splitlines()[0]
        return _Attempt(None, f"failed: {first_line}", None)
    if parity is None:
        return _Attempt(None, refusal, None)
    return _Attempt(candidate if parity.ok else None, parity.reason, parity.max_abs_error)


def _refusal(candidate: onnx.ModelProto, model: onnx.ModelProto, judge: _Judge) -> str:
    """Return why the candidate is not even run; empty if it may be run."""
    if _interface(candidate) != judge.interface:
        return f"inputs and outputs became {_interface(candidate)}, expected {judge.interface}"
    if judge.unseen:
        return (
            f"output '{judge.unseen[0]}' has no values on any input, so nothing shows what the step changes"
        )
    foreign = {node.domain for node in nodes(candidate)} - STANDARD_DOMAINS
    if foreign:
        return f"operators of {', '.join(sorted(foreign))} came in"
    grown = _stored_bytes(candidate) - _stored_bytes(model)
    if grown > max(MAX_GROWTH_BYTES, MAX_GROWTH * _stored_bytes(model)):
        return f"the model would grow by {grown} bytes: constants that are computed would be stored"
    return ""


def _stored_bytes(model: onnx.ModelProto) -> int:
    return sum(tensor.ByteSize() for _, tensor in stored_tensors(model))


def _interface(model: onnx.ModelProto) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the names and dtypes of the inputs and of the outputs, in order."""
    inputs, outputs = tensor_specs(model)
    return [(spec.name, spec.dtype) for spec in inputs], [(spec.name, spec.dtype) for spec in outputs]


def _check_batch(inputs: Sequence[TensorSpec], batch: int | None, feeds: Sequence[Feeds]) -> None:
    if not feeds:
        raise DataError("there are no feeds to compare the model's outputs on; give at least one")
    if batch is None:
        return
    free = batch_dims(inputs)
    if not free:
        if batch not in {spec.shape[0] for spec in inputs if spec.shape}:
            raise ModelError(
                f"the model's inputs {[list(spec.shape) for spec in inputs]} have no free batch that could be"
                f" fixed to {batch}; export it with a dynamic batch, or leave the batch as it is"
            )
        return
    for spec in inputs:
        for axis, size in enumerate(spec.shape):
            actual = feeds[0][spec.name].shape[axis]
            if size in free and actual != batch:
                raise DataError(
                    f"feeds of input '{spec.name}' have {actual} samples, expected the batch {batch} that the"
                    " model is fixed to"
                )


def _doubled(inputs: Sequence[TensorSpec], feed: Feeds) -> Feeds:
    """Return the feed with each batch axis twice as long, the second half in the opposite order."""
    batch = batch_dims(inputs)
    result = dict(feed)
    for spec in inputs:
        for axis, size in enumerate(spec.shape):
            if size in batch:
                array = result[spec.name]
                result[spec.name] = np.concatenate([array, np.flip(array, axis)], axis)
    return result
