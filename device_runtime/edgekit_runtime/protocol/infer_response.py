"""Encodes the outputs of a model as a JSON response, and decodes such responses."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from edgekit_runtime.errors import RequestError, TransportError
from edgekit_runtime.protocol.byte_strings import size_on_wire
from edgekit_runtime.protocol.datatypes import DATATYPE_OF_DTYPE, DTYPE_OF_DATATYPE
from edgekit_runtime.protocol.infer_request import InferRequest, InferTensor, RequestedOutput, SharedPlace
from edgekit_runtime.protocol.json_tensors import Sliced, read_values, write_values
from edgekit_runtime.tensors import DTYPES, Array

_BINARY: Final = "binary data (binary_data_output, or binary_data of an output)"
_dump = json.JSONEncoder(separators=(",", ":")).encode


def encode_response(
    names: Mapping[str, str], request: InferRequest, arrays: Sequence[Array], limit_bytes: int
) -> Sliced[tuple[memoryview, int]]:
    """Return the JSON of a response, and the size of the binary data that follows it.

    `names` holds `model_name` and `model_version`. `arrays` are the outputs that the request names.
    `limit_bytes` limits the size of the JSON.

    Raises:
        RequestError: The JSON would exceed the limit, or cannot express a value.
    """
    text = bytearray(f'{_dump(names)[:-1]},"outputs":['.encode("ascii"))
    binary_bytes = 0
    for index, (output, array) in enumerate(zip(request.outputs, arrays, strict=True)):
        entry = _dump(_describe(output, array)).encode("ascii")
        text += b"," + entry if index else entry
        if output.shared is not None:
            continue
        if output.is_binary:
            binary_bytes += size_on_wire(array)
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
            raise RequestError(
                400,
                f"output '{output.name}' holds NaN or infinity, which JSON cannot express; ask for {_BINARY}",
            ) from cause
        text += b"]}"
    text += b"]}" if request.id is None else f'],"id":{_dump(request.id)}}}'.encode("ascii")
    return memoryview(text), binary_bytes


def _refuse_long(limit_bytes: int) -> RequestError:
    return RequestError(
        400,
        f"the answer has more than {limit_bytes} bytes of JSON, the limit here; ask for {_BINARY}, or set"
        " max_json_response_bytes",
    )


def _describe(output: RequestedOutput, array: Array) -> dict[str, Any]:
    datatype = "BYTES" if array.dtype.kind == "O" else DATATYPE_OF_DTYPE[array.dtype.name]
    entry: dict[str, Any] = {"name": output.name, "datatype": datatype, "shape": list(array.shape)}
    if output.shared is not None:
        shared = SharedPlace(output.shared.region, output.shared.offset_bytes, array.nbytes)
        entry["parameters"] = shared.to_json()
    elif output.is_binary:
        entry["parameters"] = {"binary_data_size": size_on_wire(array)}
    return entry


def decode_response(text: bytes) -> list[InferTensor]:
    """Return the outputs in the JSON of a response, with their values if the JSON contains them.

    Raises:
        TransportError: The text is not a response of the protocol.
    """
    outputs: list[InferTensor] = []
    start_bytes = 0
    try:
        for entry in json.loads(text)["outputs"]:
            outputs.append(_decode_output(entry, start_bytes))
            start_bytes += outputs[-1].binary_bytes
    except (ValueError, KeyError, TypeError, RequestError) as cause:
        raise TransportError(f"the answer is not one of the protocol: {cause!r}") from cause
    return outputs


def _decode_output(entry: Mapping[str, Any], start_bytes: int) -> InferTensor:
    name: str = entry["name"]
    shape = tuple(int(size) for size in entry["shape"])
    dtype = DTYPES[DTYPE_OF_DATATYPE[entry["datatype"]]]
    if "data" in entry:
        return InferTensor(name, dtype, shape, values=read_values(entry["data"], dtype, shape, name))
    parameters = entry["parameters"]
    if "shared_memory_region" in parameters:
        offset, size = (parameters.get(f"shared_memory_{key}", 0) for key in ("offset", "byte_size"))
        return InferTensor(
            name, dtype, shape, shared=SharedPlace(parameters["shared_memory_region"], offset, size)
        )
    tensor = InferTensor(name, dtype, shape, start_bytes)
    if int(parameters["binary_data_size"]) != tensor.binary_bytes:
        raise ValueError(f"output '{name}' has {parameters['binary_data_size']} bytes")
    return tensor
