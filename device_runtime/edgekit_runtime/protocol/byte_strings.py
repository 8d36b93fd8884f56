"""BYTES tensors: arrays of byte strings. In binary data, the length of each string precedes it.

Source: Triton's binary tensor data extension.
"""

import struct
from typing import Final

import numpy as np

from edgekit_runtime.errors import RequestError
from edgekit_runtime.tensors import Array

_LENGTH: Final = struct.Struct("<I")


def serialize_strings(array: Array) -> Array:
    """Serialize an array of byte strings (dtype object) to uint8 [bytes].

    The length of each string precedes it as a little-endian uint32.
    """
    parts = (part for string in array.reshape(-1).tolist() for part in (_LENGTH.pack(len(string)), string))
    return np.frombuffer(b"".join(parts), np.uint8)


def take_string(data: Array, where: str) -> Array:
    """Return the byte string in `data` without copying it.

    `data` begins with the length of the string as a uint32.

    Raises:
        RequestError: `data` does not hold exactly one string.
    """
    if len(data) < _LENGTH.size or _LENGTH.unpack(data[: _LENGTH.size].tobytes())[0] != len(data) - 4:
        raise RequestError(
            400, f"{where}: expected one byte string behind its length (4 bytes, little-endian)"
        )
    return data[_LENGTH.size :]


def size_on_wire(array: Array) -> int:
    """Return the size of a tensor's binary data in bytes, including the length before each string."""
    if array.dtype.kind != "O":
        return array.nbytes
    return sum(_LENGTH.size + len(string) for string in array.reshape(-1).tolist())
