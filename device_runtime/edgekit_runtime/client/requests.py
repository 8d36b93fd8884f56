"""Inference requests as bytes: everything before the binary data, made once for all that are alike."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from edgekit_runtime.client.replies import Layout
from edgekit_runtime.client.shared import SharedMemory
from edgekit_runtime.errors import DataError
from edgekit_runtime.protocol.datatypes import DATATYPE_OF_DTYPE
from edgekit_runtime.tensors import Array

MAX_TIMEOUT_S: Final = 1e6  # poll() counts milliseconds in 31 bits

Place: TypeAlias = tuple[SharedMemory, int]  # and the offset in it
# Name of an output, its place, and size and dtype of the array there.
Target: TypeAlias = tuple[str, SharedMemory, int, int, "np.dtype[Any]"]


@dataclass(slots=True, eq=False)
class Prepared:
    """A request but for its binary data.

    Attributes:
        start: its head and JSON.
        size_bytes: of the whole request.
        memories: that it names, which the service must know.
        layout: of its last answer, or None.
    """

    start: bytes
    size_bytes: int
    memories: tuple[SharedMemory, ...] = ()
    layout: Layout | None = None


class Question(NamedTuple):
    """What is asked, but for the tensors.

    Attributes:
        name, version: of the model; version None for the one that the service prefers.
        priority: 1 is the highest, 0 the model's default.
        timeout_s: in which the call must begin, or None.
    """

    name: str
    version: str | None
    priority: int
    timeout_s: float | None


def prepare(
    question: Question,
    inputs: Mapping[str, Array],
    places: Sequence[Place | None],
    targets: Sequence[Target] | None,
    fields: str,
) -> Prepared:
    """Return the request.

    Args:
        question: what is asked.
        inputs: input name -> array.
        places: of each input in shared memory, None for one that is sent.
        targets: the outputs that go to shared memory; None for all outputs as binary data.
        fields: header lines that every request has.

    Raises:
        DataError: an array has a dtype that the protocol does not have, or `timeout_s` is out of range.
    """
    if question.timeout_s is not None:
        check_timeout(question.timeout_s)
    parameters: dict[str, Any] = {"binary_data_output": True}
    if question.priority:
        parameters["priority"] = question.priority
    if question.timeout_s is not None:
        parameters["timeout"] = max(1, int(question.timeout_s * 1e6))
    pairs = list(zip(inputs.items(), places, strict=True))
    document: dict[str, Any] = {
        "inputs": [_describe(name, array, place) for (name, array), place in pairs],
        "parameters": parameters,
    }
    if targets is not None:
        document["outputs"] = [
            {"name": name, "parameters": _memory_parameters(memory, offset, size_bytes)}
            for name, memory, offset, size_bytes, _ in targets
        ]
    text = json.dumps(document, separators=(",", ":")).encode()
    binary_bytes = sum(array.nbytes for (_, array), place in pairs if place is None)
    head = (
        f"POST {model_path(question.name, question.version)}/infer HTTP/1.1\r\n{fields}"
        f"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: {len(text)}\r\n"
        f"Content-Length: {len(text) + binary_bytes}\r\n\r\n"
    )
    start = head.encode("latin-1") + text
    memories = [place[0] for place in places if place is not None] + [
        memory for _, memory, *_ in targets or ()
    ]
    return Prepared(start, len(start) + binary_bytes, tuple(dict.fromkeys(memories)))


def model_path(name: str, version: str | None) -> str:
    """Return the address of a model."""
    path = f"/v2/models/{quoted(name)}"
    return path if version is None else f"{path}/versions/{quoted(version)}"


def quoted(text: str) -> str:
    """Return `text` as one part of an address, which it cannot leave: no slash, no space, no line end."""
    from urllib.parse import quote

    return quote(text, safe="", errors="surrogatepass")


def token_line(token: str | None) -> str:
    """Return the header line that carries `token`, empty for none.

    Raises:
        DataError: it cannot stand in a header: that would end there, or say something else.
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
    """Return when there is such a time.

    Raises:
        DataError: it is negative, not finite, or longer than sockets can wait.
    """
    if not 0 <= timeout_s <= MAX_TIMEOUT_S:  # NaN is neither
        raise DataError(f"timeout_s is {timeout_s}, expected seconds from 0 to {MAX_TIMEOUT_S:g}, 11 days")


def check_arrays(inputs: object, outputs: object) -> None:
    """Return when both are mappings of names to arrays.

    Raises:
        DataError: they are not.
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


def _describe(name: str, array: Array, place: Place | None) -> dict[str, Any]:
    datatype = DATATYPE_OF_DTYPE.get(array.dtype.name)
    if datatype is None or not array.dtype.isnative:
        raise DataError(
            f"input '{name}': dtype {array.dtype.str} cannot be sent; convert it with .astype(...)"
        )
    parameters = (
        {"binary_data_size": array.nbytes} if place is None else _memory_parameters(*place, array.nbytes)
    )
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "parameters": parameters}


def _memory_parameters(memory: SharedMemory, offset_bytes: int, size_bytes: int) -> dict[str, Any]:
    return {
        "shared_memory_region": memory.name,
        "shared_memory_offset": offset_bytes,
        "shared_memory_byte_size": size_bytes,
    }
