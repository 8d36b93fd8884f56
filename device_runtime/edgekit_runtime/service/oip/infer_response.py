"""The answer to an inference request: outputs to JSON, binary data and shared memory."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from edgekit_runtime.errors import RequestError
from edgekit_runtime.protocol.datatypes import DATATYPE_OF_DTYPE
from edgekit_runtime.service.http.response import BINARY_TYPE, JSON_TYPE, make_head
from edgekit_runtime.service.oip.infer_plan import Plan, PlannedOutput, Shared
from edgekit_runtime.service.oip.json_values import write_values
from edgekit_runtime.service.oip.shared_memory import Region
from edgekit_runtime.service.oip.time_slices import Sliced
from edgekit_runtime.tensors import Array

HEADER_LENGTH: Final = "Inference-Header-Content-Length"
_FEW_VALUES: Final = 128  # are written at once
_MAX_VALUE_CHARACTERS: Final = 26  # of a number in JSON, with its comma
_dump = json.JSONEncoder(separators=(",", ":")).encode

Held: TypeAlias = Mapping[str, Region]  # of an output


def sort_outputs(
    plan: Plan, outputs: Mapping[str, Array], held: Held
) -> tuple[list[Array], list[Array], bool]:
    """Return the outputs asked for, those that follow the JSON, and whether the JSON holds no values.

    Those for shared memory are written there.

    Raises:
        RequestError: one does not fit into its shared memory.
    """
    arrays, data = [], []
    is_repeatable = True
    for planned in plan.outputs:
        array = outputs[planned.name]
        arrays.append(array)
        if planned.shared is not None:
            _write(planned.shared, held[planned.name], planned.name, array)
        elif planned.is_binary:
            data.append(array if array.flags.c_contiguous else np.ascontiguousarray(array))
        else:
            is_repeatable = False
    return arrays, data, is_repeatable


def measure_json(plan: Plan, outputs: Mapping[str, Array], limit_bytes: int) -> int | None:
    """Return how much memory a response with many values in its JSON takes at most, or None for few.

    Args:
        plan: of the request.
        outputs: of the model.
        limit_bytes: of the JSON.
    """
    values = size_bytes = 0
    for planned in plan.outputs:
        if not planned.is_binary and planned.shared is None:
            values += outputs[planned.name].size
            size_bytes += outputs[planned.name].nbytes
    if values <= _FEW_VALUES:
        return None
    return size_bytes + min(values * _MAX_VALUE_CHARACTERS, limit_bytes)


def write_json(
    names: Mapping[str, str], plan: Plan, arrays: Sequence[Array], limit_bytes: int
) -> Sliced[tuple[bytes, memoryview]]:
    """Return the head of a response, and its JSON.

    Args:
        names: of the model and its version, as the response states them.
        plan: of the request.
        arrays: the outputs asked for.
        limit_bytes: of the JSON.

    Raises:
        RequestError: it would be longer, or JSON cannot express a value.
    """
    text = bytearray(f'{_dump(names)[:-1]},"outputs":['.encode("ascii"))
    binary_bytes = 0
    for index, (planned, array) in enumerate(zip(plan.outputs, arrays, strict=True)):
        entry = _dump(_describe(planned, array)).encode("ascii")
        text += b"," + entry if index else entry
        if planned.shared is not None:
            continue
        if planned.is_binary:
            binary_bytes += array.nbytes
            continue
        if len(text) + 2 * array.size > limit_bytes:  # each value has a digit and a comma
            raise _refuse_long(limit_bytes)
        text[-1:] = b',"data":['
        try:
            for values in write_values(array):
                text += values
                if len(text) > limit_bytes:
                    raise _refuse_long(limit_bytes)
                yield
        except ValueError as cause:
            raise RequestError(500, "an output holds NaN or infinity, ask for it as binary_data") from cause
        text += b"]}"
    text += b"]}" if plan.id is None else f'],"id":{_dump(plan.id)}}}'.encode("ascii")
    if binary_bytes:
        length = {HEADER_LENGTH: str(len(text))}
        return make_head(200, BINARY_TYPE, len(text) + binary_bytes, length), memoryview(text)
    return make_head(200, JSON_TYPE, len(text)), memoryview(text)


def _refuse_long(limit_bytes: int) -> RequestError:
    return RequestError(
        400,
        f"the answer has more than {limit_bytes} bytes of JSON, the limit here; ask for binary data"
        " (binary_data_output, or binary_data of an output), or set max_json_response_bytes",
    )


def _write(shared: Shared, region: Region, name: str, array: Array) -> None:
    if array.nbytes > shared.size_bytes:
        raise RequestError(
            400,
            f"output '{name}': has {array.nbytes} bytes, shared_memory_byte_size is only {shared.size_bytes}",
        )
    region.write(np.ascontiguousarray(array), shared.offset_bytes)


def _describe(planned: PlannedOutput, array: Array) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": planned.name,
        "datatype": DATATYPE_OF_DTYPE[array.dtype.name],
        "shape": list(array.shape),
    }
    if planned.shared is not None:
        entry["parameters"] = {
            "shared_memory_region": planned.shared.region,
            "shared_memory_offset": planned.shared.offset_bytes,
            "shared_memory_byte_size": array.nbytes,
        }
    elif planned.is_binary:
        entry["parameters"] = {"binary_data_size": array.nbytes}
    return entry
