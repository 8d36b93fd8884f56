"""Responses of the service: heads, errors, and the arrays of an inference.

Successive responses of a service often differ only in the values of the outputs. The client therefore stores
the positions of the values in the last response.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np

from edgekit_runtime.errors import DataError, RequestError, TransportError
from edgekit_runtime.protocol.infer_request import InferTensor
from edgekit_runtime.protocol.infer_response import decode_response
from edgekit_runtime.protocol.rest import HEADER_LENGTH, decode_error
from edgekit_runtime.records import dataclass
from edgekit_runtime.tensors import Array

_MAX_KEPT: Final = 64
_MAX_KEPT_BYTES: Final = 4096
_NO_SERVER: Final = (502, 503, 504)
_TIMES: Final = b"\r\nServer-Timing:"  # a head with times does not occur again


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """The head of a response.

    Attributes:
        json_bytes: length of the JSON in bytes, or None if the whole body is JSON.
        closes: whether the service closes the connection after the response.
        retry_after_s: seconds after which to try again, or None.
        data: the head as received.
    """

    status: int
    body_bytes: int
    json_bytes: int | None
    closes: bool
    retry_after_s: int | None
    data: bytes


Response: TypeAlias = tuple[ResponseHead, memoryview]
"""Head and body."""


def parse_head(data: bytes, max_body_bytes: int) -> ResponseHead:
    """Parse the head of a response.

    Raises:
        ValueError: the response is not HTTP, or the length of its body is unknown or over `max_body_bytes`.
    """
    lines = data.decode("latin-1").split("\r\n")
    words = lines[0].split(" ", 2)
    if len(words) < 2 or words[0] not in ("HTTP/1.1", "HTTP/1.0") or not words[1].isdecimal():
        raise ValueError(f"answered with {lines[0][:80]!r}, expected HTTP")
    fields = {}
    for line in lines[1:-2]:
        name, _, value = line.partition(":")
        fields[name.strip().lower()] = value.strip()
    length = fields.get("content-length")
    if length is None and words[1] not in ("100", "204", "304"):
        raise ValueError("answered without Content-Length, which this client needs")
    body_bytes = int(length or 0)
    if not 0 <= body_bytes <= max_body_bytes:
        raise ValueError(f"answered with {body_bytes} bytes, the limit is {max_body_bytes}")
    json_bytes = fields.get(HEADER_LENGTH.lower())
    retry = fields.get("retry-after", "")
    return ResponseHead(
        status=int(words[1]),
        body_bytes=body_bytes,
        json_bytes=None if json_bytes is None else int(json_bytes),
        closes=fields.get("connection", "").lower() == "close" or words[0] == "HTTP/1.0",
        retry_after_s=int(retry) if retry.isdecimal() else None,
        data=data,
    )


class Layout:
    """Positions of the outputs in responses that have the same head and JSON.

    Attributes:
        start: head and JSON of the response.
        size_bytes: size of the whole response.
    """

    __slots__ = ("_outputs", "size_bytes", "start")

    def __init__(
        self, start: bytes, size_bytes: int, outputs: Sequence[InferTensor], memory: bytearray
    ) -> None:
        """Prepare to read from `memory`, into which such responses are received whole.

        Raises:
            TransportError: the outputs go beyond the response.
        """
        self.start = start
        self.size_bytes = size_bytes
        self._outputs = [
            (
                output.name,
                output.shape,
                None if output.shared else _read(output, memoryview(memory)[:size_bytes], len(start)),
            )
            for output in outputs
        ]

    def read(self, targets: Mapping[str, Array] | None) -> dict[str, Array]:
        """Return a dict from output name to array, read from the memory given to the constructor.

        Args:
            targets: a dict from output name to the array that the service wrote to, or None.
        """
        arrays = {}
        for name, shape, view in self._outputs:
            if view is not None:
                arrays[name] = view.copy()
            elif targets is not None:
                arrays[name] = _reshape(targets[name], shape)  # of the dtype that the first response had
        return arrays


def read_response(
    head: ResponseHead, body: memoryview, targets: Mapping[str, Array] | None, memory: bytearray
) -> tuple[dict[str, Array], Layout | None]:
    """Return a dict from output name to array, and the layout of the response.

    The layout is None if no later response can use it.

    Args:
        head: head of the response.
        body: body of the response.
        targets: a dict from output name to the array in shared memory that the service wrote to, or None.
        memory: buffer for the next response. A response that does not fit into it has no layout.

    Raises:
        TransportError: the response does not follow the protocol, or is shorter than it states.
        DataError: an array in shared memory has another dtype than its output.
    """
    json_bytes = len(body) if head.json_bytes is None else head.json_bytes
    text = bytes(body[:json_bytes])
    outputs = _decode_cached(text) if len(text) <= _MAX_KEPT_BYTES else decode_response(text)
    arrays = {}
    for output in outputs:
        if output.shared is not None:
            arrays[output.name] = _find_target(output, targets or {})
            continue
        array = _read(output, body, json_bytes)
        arrays[output.name] = array if array.flags.aligned and array.flags.writeable else array.copy()
    size_bytes = len(head.data) + len(body)
    if size_bytes > len(memory) or head.closes or _TIMES in head.data:
        return arrays, None
    return arrays, Layout(head.data + text, size_bytes, outputs, memory)


@functools.lru_cache(_MAX_KEPT)
def _decode_cached(text: bytes) -> list[InferTensor]:
    """Return the outputs that repeated JSON of the service describes; values in the JSON are read-only."""
    outputs = decode_response(text)
    for output in outputs:
        if isinstance(output.values, np.ndarray):
            output.values.flags.writeable = False  # so that each response gets a copy
    return outputs


def _read(output: InferTensor, body: memoryview, json_bytes: int) -> Array:
    """Return the values of an output in `body`; binary data are not copied."""
    if isinstance(output.values, np.ndarray):
        return output.values
    start = json_bytes + output.start_bytes
    if start + output.binary_bytes > len(body):
        raise TransportError(f"output '{output.name}': the answer is shorter than it states")
    try:
        array: Array = np.ndarray(output.shape, output.dtype, body, start)
    except ValueError as cause:  # sizes that no array has
        raise TransportError(f"the answer is not one of the protocol: {cause}") from cause
    return array


def _find_target(output: InferTensor, targets: Mapping[str, Array]) -> Array:
    if output.name not in targets:
        raise TransportError(f"output '{output.name}' went to shared memory, which was not asked for")
    target = targets[output.name]
    if target.dtype != output.dtype:
        raise DataError(
            f"output '{output.name}' is {output.dtype}, its array from shared() is {target.dtype};"
            f" make it with shared(shape, np.{output.dtype})"
        )
    return _reshape(target, output.shape)


def _reshape(target: Array, shape: tuple[int, ...]) -> Array:
    return target if target.shape == shape else target.reshape(-1)[: math.prod(shape)].reshape(shape)


def make_error(head: ResponseHead, body: memoryview) -> RequestError:
    message = decode_error(bytes(body)) or f"the service answered with status {head.status} and no reason"
    if head.status in _NO_SERVER and not decode_error(bytes(body)):
        message += ", as a proxy does where no server is left"
    return RequestError(head.status, message, retry_after_s=head.retry_after_s)
