"""Estimates the memory of an inference from the size of its inputs, limits it, and frees it afterwards.

The estimate is proportional to the size of the inputs. It is accurate for additional rows, and for larger
images in convolutional models. It is too low for attention, whose memory grows with the square of the
sequence length.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import EdgekitError, RequestError
from edgekit_runtime.package.figures import RUN_MEMORY_FIGURE
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.protocol.infer_request import InferTensor
from edgekit_runtime.records import dataclass
from edgekit_runtime.sessions.session import Session
from edgekit_runtime.system.machine import machine_bytes
from edgekit_runtime.tensors import DTYPES, TensorSpec

# Activations over inputs and outputs if the package does not say. It is 2.6 to 41.5 for ten models.
_ASSUMED_RATIO: Final = 64.0
_DEFAULT_SHARE: Final = 4  # of the machine's memory: a quarter
_DEFAULT_BYTES: Final = 1 << 30
_KEPT_BYTES: Final = 64 << 20  # an engine may keep this for the next run. Mapping it takes 5 to 10 ms


@dataclass(frozen=True, slots=True)
class RunMemory:
    """The estimated memory of one run of a model.

    Attributes:
        bytes_per_input_byte: The memory of inputs, activations and outputs, divided by the size of the
            inputs.
        usual: A dict from input names to the dtype and shape of the golden inputs.
    """

    bytes_per_input_byte: float
    usual: Mapping[str, tuple[str, tuple[int, ...]]]

    @property
    def usual_bytes(self) -> int:
        """The size of the golden inputs."""
        return _count_bytes(self.usual.values())

    def most_input_bytes(self, allowed_bytes: int) -> int:
        """Return the maximum size of the inputs of a run whose memory is limited to `allowed_bytes`.

        The result is at least the size of the golden inputs.
        """
        return max(int(allowed_bytes / max(self.bytes_per_input_byte, 1.0)), self.usual_bytes)

    def should_trim(self, size_bytes: int, max_batch: int) -> bool:
        """Return whether a run was so large that `trim` should be called after it.

        Args:
            size_bytes: The size of all inputs of the run.
            max_batch: The maximum number of rows in a batch.
        """
        is_unusual = size_bytes > 2 * max_batch * self.usual_bytes
        return is_unusual and size_bytes * self.bytes_per_input_byte > _KEPT_BYTES

    def trim(self, session: Session) -> None:
        """Free the memory that a session keeps after a large run.

        The session runs once with zeros in the shapes of `usual`.
        """
        give_back: Callable[[Mapping[str, object]], None] | None = getattr(session, "trim", None)
        if give_back is not None:
            try:
                give_back(
                    {name: np.zeros(shape, DTYPES[dtype]) for name, (dtype, shape) in self.usual.items()}
                )
            except EdgekitError:
                return  # a model that takes no zeros keeps its memory


def estimate_run_memory(manifest: Manifest, variant: str) -> RunMemory:
    """Return the memory that the manifest states, or by default 64 times the golden inputs and outputs."""
    chosen = next(candidate for candidate in manifest.all_variants if candidate.name == variant)
    usual = {tensor.name: (tensor.dtype, tensor.shape) for tensor in chosen.golden.inputs}
    stated = _stated_ratio(chosen.figures)
    if stated is None:
        sent = _count_bytes(usual.values())
        returned = _count_bytes((tensor.dtype, tensor.shape) for tensor in chosen.golden.outputs)
        stated = _ASSUMED_RATIO * (sent + returned) / max(sent, 1)
    return RunMemory(stated, usual)


def allowed_run_bytes(stated: int | None, max_model_bytes: int | None) -> int:
    """Return the memory limit of one inference.

    Args:
        stated: The option `max_run_bytes`. If it is None, the result is the minimum of 1 GiB, a quarter of
            the machine's memory and `max_model_bytes`.
        max_model_bytes: The memory limit of all models, or None.
    """
    if stated is not None:
        return stated
    return min(_DEFAULT_BYTES, machine_bytes() // _DEFAULT_SHARE, max_model_bytes or _DEFAULT_BYTES)


class InputLimit:
    """Refuses inputs for which a model would need too much memory."""

    __slots__ = ("_allowed_bytes", "_has_rows", "_max_bytes", "_memory")

    def __init__(self, memory: RunMemory, inputs: Sequence[TensorSpec], allowed_bytes: int) -> None:
        """Allow `allowed_bytes` per run. Inputs of the size of the golden inputs are always allowed."""
        self._memory, self._allowed_bytes = memory, allowed_bytes
        self._max_bytes = memory.most_input_bytes(allowed_bytes)
        self._has_rows = all(spec.shape and isinstance(spec.shape[0], str) for spec in inputs)

    def check(self, inputs: Sequence[InferTensor]) -> None:
        """Check the size of a request's inputs.

        Raises:
            RequestError: The inputs are too large (status 413).
        """
        size_bytes = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in inputs)
        if size_bytes <= self._max_bytes:
            return
        rows = inputs[0].shape[0] if self._has_rows else 0
        sent, most = f"{size_bytes} bytes", f"{self._max_bytes} bytes"
        if rows:
            sent = f"{sent} in {rows} rows"
            most = f"{max(1, self._max_bytes * rows // size_bytes)} rows of this size"
        needed = int(size_bytes * self._memory.bytes_per_input_byte)
        raise RequestError(
            413,
            f"the inputs have {sent}, for which the model would take about {needed} bytes of memory"
            f" (estimated), the limit here is {self._allowed_bytes}; send at most {most} in one request, or"
            " set max_run_bytes",
        )


def _count_bytes(tensors: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    return sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in tensors)


def _stated_ratio(figures: Mapping[str, JsonValue]) -> float | None:
    estimate = figures.get("memory_estimate")
    stated = estimate.get(RUN_MEMORY_FIGURE) if isinstance(estimate, Mapping) else None
    is_number = isinstance(stated, (int, float)) and not isinstance(stated, bool)
    return float(stated) if is_number and 1 <= stated < math.inf else None  # type: ignore[operator, arg-type]
