"""Inference requests as bytes. The part before the binary data is encoded once for all equal requests."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from edgekit_runtime.client.responses import Layout
from edgekit_runtime.errors import DataError
from edgekit_runtime.protocol.infer_request import (
    InferRequest,
    InferTensor,
    RequestedOutput,
    SequenceStep,
    SharedPlace,
    encode_request,
)
from edgekit_runtime.protocol.rest import HEADER_LENGTH, model_path
from edgekit_runtime.records import dataclass
from edgekit_runtime.tensors import Array

MAX_TIMEOUT_S: Final = 1e6  # poll() counts milliseconds in 31 bits


@dataclass(slots=True, eq=False)
class RequestTemplate:
    """A request without its binary data.

    Attributes:
        start: head and JSON of the request.
        size_bytes: size of the whole request, with the binary data.
        regions: shared memory regions in the request, which must be registered with the service.
        layout: layout of the last response to this request, or None.
    """

    start: bytes
    size_bytes: int
    regions: tuple[str, ...] = ()
    layout: Layout | None = None


class InferOptions(NamedTuple):
    """The model of an inference request, its priority, its time limit and its position in a sequence.

    Attributes:
        version: version of the model, or None for the version that the service prefers.
        priority: priority of the request. 1 is the highest, and 0 is the model's default.
        timeout_s: time within which the request must begin, or None.
        sequence: see `SequenceStep`, or None for a request outside a sequence.
    """

    name: str
    version: str | None
    priority: int
    timeout_s: float | None
    sequence: SequenceStep | None = None


def make_request_head(method: str, path: str, fields: str, body_bytes: int = 0) -> bytes:
    """Return the head of a request, with the empty line at its end.

    `fields` contains complete header lines with line ends.
    """
    return f"{method} {path} HTTP/1.1\r\n{fields}Content-Length: {body_bytes}\r\n\r\n".encode("latin-1")


def make_template(
    options: InferOptions,
    inputs: Mapping[str, Array],
    shared_places: Sequence[SharedPlace | None],
    outputs: tuple[RequestedOutput, ...],
    fields: str,
    *,
    prefix: str = "",
) -> RequestTemplate:
    """Return a request without its binary data.

    Args:
        options: the model to run and the options of the request.
        inputs: a dict from input name to array.
        shared_places: location of each input in shared memory, or None for an input in the request.
        outputs: outputs to write to shared memory. If empty, all outputs are sent as binary data.
        fields: header lines of every request.
        prefix: prefix of the path.

    Raises:
        DataError: an array has a dtype that the protocol does not support, or `timeout_s` is out of range.
    """
    if options.timeout_s is not None:
        check_timeout(options.timeout_s)
    request = InferRequest(
        tuple(
            InferTensor(name, array.dtype, array.shape, shared=shared)
            for (name, array), shared in zip(inputs.items(), shared_places, strict=True)
        ),
        outputs,
        priority=options.priority,
        timeout_us=None if options.timeout_s is None else max(1, int(options.timeout_s * 1e6)),
        sequence=options.sequence,
    )
    text = encode_request(request)
    path = f"{prefix}{model_path(options.name, options.version)}/infer"
    fields += f"Content-Type: application/octet-stream\r\n{HEADER_LENGTH}: {len(text)}\r\n"
    start = make_request_head("POST", path, fields, len(text) + request.binary_bytes) + text
    named = (*shared_places, *(output.shared for output in outputs))
    regions = tuple({shared.region: None for shared in named if shared is not None})
    return RequestTemplate(start, len(start) + request.binary_bytes, regions)


def token_line(token: str | None) -> str:
    """Return the header line `Authorization: Bearer TOKEN` with its line end, empty without a token.

    Raises:
        DataError: the token contains a character that no header may have.
    """
    if not token:
        return ""
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise DataError(
            f"the token of {len(token)} characters holds a space, a line end or another character that no"
            " header may have; read it from its file with .read_text().strip()"
        )
    return f"Authorization: Bearer {token}\r\n"


def check_timeout(timeout_s: float) -> None:
    """Check that `timeout_s` is a possible time limit.

    Raises:
        DataError: `timeout_s` is negative, not finite, or longer than sockets can wait.
    """
    if not 0 <= timeout_s <= MAX_TIMEOUT_S:  # NaN is neither
        raise DataError(f"timeout_s is {timeout_s}, expected seconds from 0 to {MAX_TIMEOUT_S:g}, 11 days")


def check_arrays(inputs: object, outputs: object) -> None:
    """Check that both arguments are mappings from names to numpy arrays. `outputs` may be None.

    Raises:
        DataError: an argument is something else.
    """
    for role, arrays in (("input", inputs), ("output", {} if outputs is None else outputs)):
        if not isinstance(arrays, Mapping):
            raise DataError(
                f"{role}s: got a {type(arrays).__name__}, expected a dictionary of names and arrays"
                + ("; leave outputs out to get all" if role == "output" else "")
            )
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray):
                raise DataError(
                    f"{role} '{name}': got a {type(array).__name__}, expected a numpy array; make one with"
                    + (" np.asarray(values, np.float32)" if role == "input" else " shared(shape)")
                )
