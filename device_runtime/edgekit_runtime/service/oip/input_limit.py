"""Refuses requests whose inputs are so large that a model would take too much memory for them."""

import math
from collections.abc import Sequence

from edgekit_runtime.errors import RequestError
from edgekit_runtime.service.oip.infer_plan import PlannedInput
from edgekit_runtime.service.scheduling.run_memory import RunMemory
from edgekit_runtime.tensors import TensorSpec


class InputLimit:
    """Refuses inputs for which a model would take too much memory."""

    __slots__ = ("_allowed_bytes", "_has_rows", "_max_bytes", "_memory")

    def __init__(self, memory: RunMemory, inputs: Sequence[TensorSpec], allowed_bytes: int) -> None:
        """Let a run take `allowed_bytes`, and the usual inputs in any case.

        Args:
            memory: of the model.
            inputs: of the model.
            allowed_bytes: of one run.
        """
        self._memory, self._allowed_bytes = memory, allowed_bytes
        self._max_bytes = memory.most_input_bytes(allowed_bytes)
        self._has_rows = all(spec.shape and isinstance(spec.shape[0], str) for spec in inputs)

    def check(self, inputs: Sequence[PlannedInput]) -> None:
        """Return where a request's inputs are not too large.

        Raises:
            RequestError: they are.
        """
        size_bytes = sum(math.prod(one.shape) * one.dtype.itemsize for one in inputs)
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
