"""The service's answers to inference requests: bytes to arrays.

A service repeats its answers but for their values, so what the last one said is kept: where the values lie.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgekit_runtime.client.link import ReplyHead
from edgekit_runtime.errors import DataError, RequestError, TransportError
from edgekit_runtime.protocol.datatypes import DTYPE_OF_DATATYPE
from edgekit_runtime.tensors import DTYPES, Array


class Layout:
    """Where the outputs lie in an answer that begins as one that was read before.

    Attributes:
        start: the answer's head and JSON.
        size_bytes: of the whole answer.
    """

    __slots__ = ("_outputs", "size_bytes", "start")

    def __init__(
        self, start: bytes, size_bytes: int, outputs: "Sequence[_Output]", memory: bytearray
    ) -> None:
        """Prepare to read from `memory`, into which such answers are received whole.

        Raises:
            TransportError: the outputs go beyond the answer.
        """
        self.start = start
        self.size_bytes = size_bytes
        self._outputs = [
            (
                output.name,
                output.shape,
                None if output.is_shared else output.view(memory, len(start), size_bytes),
            )
            for output in outputs
        ]

    def read(self, targets: Mapping[str, Array] | None) -> dict[str, Array]:
        """Return the outputs of the answer that lies in the memory now.

        Args:
            targets: output name -> array in shared memory that the service wrote to.
        """
        found = {}
        for name, shape, view in self._outputs:
            if view is not None:
                found[name] = view.copy()
            elif targets is not None:
                found[name] = _shape(targets[name], shape)  # of the dtype that the first answer had
        return found


class _Output:
    """What the JSON of an answer says of one output.

    Attributes:
        name, shape, dtype: of it.
        is_shared: it lies in shared memory.
    """

    __slots__ = ("_start", "dtype", "is_shared", "name", "shape")

    def __init__(self, entry: Mapping[str, Any], start_bytes: int) -> None:
        """Read its entry; its values begin `start_bytes` behind the JSON."""
        self.name: str = entry["name"]
        self.shape = tuple(int(size) for size in entry["shape"])
        self.dtype = DTYPES[DTYPE_OF_DATATYPE[entry["datatype"]]]
        parameters = entry.get("parameters", {})
        self.is_shared = "shared_memory_region" in parameters
        self._start = start_bytes
        if not self.is_shared and int(parameters["binary_data_size"]) != self.size_bytes:
            raise ValueError(f"output '{self.name}' has {parameters['binary_data_size']} bytes")

    @property
    def size_bytes(self) -> int:
        """How much of the binary data is its."""
        return 0 if self.is_shared else math.prod(self.shape) * self.dtype.itemsize

    def view(self, data: Any, json_bytes: int, end_bytes: int) -> Array:
        """Return its values in `data`, where JSON ends at `json_bytes` and the answer at `end_bytes`.

        Raises:
            TransportError: they go beyond that.
        """
        start = json_bytes + self._start
        if start + self.size_bytes > end_bytes:
            raise TransportError(f"output '{self.name}': the answer is shorter than it states")
        array: Array = np.ndarray(self.shape, self.dtype, data, start)
        return array


def read_reply(
    head: ReplyHead, body: memoryview, targets: Mapping[str, Array] | None, memory: bytearray
) -> tuple[dict[str, Array], Layout | None]:
    """Return the outputs in an answer, and a layout for the next one like it, where that fits into `memory`.

    Raises:
        TransportError: it is no answer of the protocol, or shorter than it states.
        DataError: an array in shared memory has another dtype than its output.
    """
    json_bytes = len(body) if head.json_bytes is None else head.json_bytes
    text = bytes(body[:json_bytes])
    outputs, start_bytes = [], 0
    try:
        for entry in json.loads(text)["outputs"]:
            output = _Output(entry, start_bytes)
            outputs.append(output)
            start_bytes += output.size_bytes
    except (ValueError, KeyError, TypeError) as cause:
        raise TransportError(f"the answer is not one of the protocol: {cause!r}") from cause
    found, targets = {}, targets or {}
    try:
        for output in outputs:
            found[output.name] = _take(output, targets, body, json_bytes)
    except ValueError as cause:  # sizes that no array has, or not that one
        raise TransportError(f"the answer is not one of the protocol: {cause}") from cause
    size_bytes = len(head.data) + len(body)
    if size_bytes > len(memory) or head.closes:
        return found, None
    return found, Layout(head.data + text, size_bytes, outputs, memory)


def _take(output: _Output, targets: Mapping[str, Array], body: memoryview, json_bytes: int) -> Array:
    if output.is_shared:
        if output.name not in targets:
            raise TransportError(f"output '{output.name}' went to shared memory, which was not asked for")
        target = targets[output.name]
        if target.dtype != output.dtype:
            raise DataError(
                f"output '{output.name}' is {output.dtype}, its array from shared() is {target.dtype};"
                f" make it with shared(shape, np.{output.dtype})"
            )
        return _shape(target, output.shape)
    array = output.view(body, json_bytes, len(body))
    return array if array.flags.aligned and array.flags.writeable else array.copy()


def load_json(body: memoryview) -> Any:
    """Return the JSON document in `body`, an empty object where there is none.

    Raises:
        TransportError: it is none.
    """
    try:
        return json.loads(bytes(body)) if len(body) else {}
    except ValueError as cause:
        raise TransportError(f"the answer is not JSON: {cause}") from cause


def make_error(head: ReplyHead, body: memoryview) -> RequestError:
    """Return the error that an answer states."""
    try:
        message = str(json.loads(bytes(body))["error"])
    except (ValueError, KeyError, TypeError):
        message = f"the service answered with status {head.status}"
    return RequestError(head.status, message, retry_after_s=head.retry_after_s)


def _shape(target: Array, shape: tuple[int, ...]) -> Array:
    return target if target.shape == shape else target.reshape(-1)[: math.prod(shape)].reshape(shape)
