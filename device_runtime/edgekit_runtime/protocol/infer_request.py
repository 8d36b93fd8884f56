"""Encodes inference requests as JSON and decodes them.

The result of decoding depends only on the JSON, so a server can reuse it for the next request with the same
JSON. Binary data is not read here.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from edgekit_runtime.errors import DataError, RequestError
from edgekit_runtime.protocol.datatypes import DATATYPE_OF_DTYPE
from edgekit_runtime.protocol.json_fields import show, take_field
from edgekit_runtime.protocol.json_tensors import NumberArray, read_values
from edgekit_runtime.records import dataclass
from edgekit_runtime.tensors import DTYPES, MAX_DIMENSION, Array, TensorSpec

ANSWER: Final = "answer"
"""The name of the output with the task's answer as JSON, unless the model has an output of this name."""
_MAX_ID: Final = 256  # characters
_MAX_CLASSES: Final = 1000
_MAX_SEQUENCE_ID: Final = 128  # characters, or 64 bits of a number


class SequenceStep(NamedTuple):
    """The position of a request in a sequence.

    Attributes:
        id: The id of the sequence, which the client chooses. Neither 0 nor empty.
        start: Whether this is the first request of the sequence. Its states are zeros.
        end: Whether this is the last request of the sequence. The states are discarded after it.
    """

    id: int | str
    start: bool = False
    end: bool = False


class SharedPlace(NamedTuple):
    """A part of a shared memory region.

    Attributes:
        offset_bytes: The offset from the start of the region.
    """

    region: str
    offset_bytes: int
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the request parameters for this part."""
        return {
            "shared_memory_region": self.region,
            "shared_memory_offset": self.offset_bytes,
            "shared_memory_byte_size": self.size_bytes,
        }


@dataclass(frozen=True, slots=True, eq=False)
class InferTensor:
    """One tensor of a request or a response, stored in binary data, in shared memory or in `values`.

    Attributes:
        start_bytes: The position of the binary data, counted from the end of the JSON.
        values: The values from the JSON, or None. A long array is a `NumberArray` until it is read.
        is_media: Whether the tensor is an image or audio file, which the model's preprocessing decodes.
        is_string: Whether the file is sent as a BYTES tensor, so that its length precedes it.
    """

    name: str
    dtype: "np.dtype[Any]"
    shape: tuple[int, ...]
    start_bytes: int = 0
    shared: SharedPlace | None = None
    values: "Array | NumberArray | None" = None
    is_media: bool = False
    is_string: bool = False

    @property
    def binary_bytes(self) -> int:
        """The size of the tensor's binary data, or 0 if the values are stored elsewhere."""
        is_elsewhere = self.shared is not None or self.values is not None
        return 0 if is_elsewhere else math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """Where the response stores one output: in the JSON, in binary data or in shared memory.

    Attributes:
        is_binary: Whether the values are sent as binary data after the JSON.
        classes: The number of best classes to return instead of the values, or 0 to return the values.
    """

    name: str
    is_binary: bool
    shared: SharedPlace | None = None
    classes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class InferRequest:
    """An inference request.

    Attributes:
        inputs: The input tensors, in the order of their binary data.
        outputs: The outputs to return, in order. If empty, all outputs are returned as binary data.
        id: The id that the response repeats, or None.
        priority: The priority. 1 is the highest, 0 is the model's default.
        timeout_us: The longest wait in the queue in microseconds, or None.
        media_type: The media type of an image or audio input. If empty, the model's default is used.
        sequence: The position in a sequence, or None.
        wants_answer: Whether one of the outputs is the answer of the model's task.
        response_heads: The server's cache of response heads. The keys are the shapes of the outputs.
        binary_bytes: The size of all binary data.
        shares_outputs: Whether an output is written to shared memory.
        has_json_outputs: Whether the values of an output are written to the JSON.
        has_media: Whether an input is a file that must be decoded.
    """

    inputs: tuple[InferTensor, ...]
    outputs: tuple[RequestedOutput, ...] = ()
    id: str | None = None
    priority: int = 0
    timeout_us: int | None = None
    media_type: str = ""
    sequence: SequenceStep | None = None
    wants_answer: bool = False
    response_heads: dict[tuple[tuple[int, ...], ...], bytes] = field(default_factory=dict)
    binary_bytes: int = field(init=False)
    shares_outputs: bool = field(init=False)
    has_json_outputs: bool = field(init=False)
    has_media: bool = field(init=False)

    def __post_init__(self) -> None:
        # Kept, because every request with the same JSON needs them.
        object.__setattr__(self, "binary_bytes", sum(tensor.binary_bytes for tensor in self.inputs))
        object.__setattr__(self, "shares_outputs", any(output.shared for output in self.outputs))
        writes = any(output.shared is None and not output.is_binary for output in self.outputs)
        object.__setattr__(self, "has_json_outputs", writes)
        object.__setattr__(self, "has_media", any(tensor.is_media for tensor in self.inputs))

    @property
    def is_repeatable(self) -> bool:
        """Whether the JSON contains no tensor values, so that the decoded request can be reused."""
        return all(tensor.values is None for tensor in self.inputs)


def encode_request(request: InferRequest) -> bytes:
    """Return the JSON of a request. The caller must send the binary data after it.

    Raises:
        DataError: The protocol does not support a dtype, or JSON cannot express a value.
    """
    parameters: dict[str, Any] = {}
    document: dict[str, Any] = {"inputs": list(map(_encode_input, request.inputs)), "parameters": parameters}
    if request.outputs:
        document["outputs"] = [
            {
                "name": output.name,
                "parameters": output.shared.to_json() if output.shared else {"binary_data": output.is_binary},
            }
            for output in request.outputs
        ]
    else:
        parameters["binary_data_output"] = True
    if request.priority:
        parameters["priority"] = request.priority
    if request.timeout_us is not None:
        parameters["timeout"] = request.timeout_us
    if request.sequence is not None:
        parameters |= {f"sequence_{key}": value for key, value in request.sequence._asdict().items()}
    if request.id is not None:
        document["id"] = request.id
    try:
        return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as cause:
        raise DataError("an input holds NaN or infinity, send it as binary data") from cause


def _encode_input(tensor: InferTensor) -> dict[str, Any]:
    datatype = DATATYPE_OF_DTYPE.get(tensor.dtype.name)
    if datatype is None or not tensor.dtype.isnative:
        raise DataError(
            f"input '{tensor.name}': dtype {tensor.dtype.str} cannot be sent; convert it with .astype(...)"
        )
    entry: dict[str, Any] = {"name": tensor.name, "datatype": datatype, "shape": list(tensor.shape)}
    if isinstance(tensor.values, np.ndarray):
        return {**entry, "data": tensor.values.reshape(-1).tolist()}
    if tensor.shared is not None:
        return {**entry, "parameters": tensor.shared.to_json()}
    return {**entry, "parameters": {"binary_data_size": tensor.binary_bytes}}


def decode_request(
    document: Mapping[str, Any],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    may_be_empty: Collection[str] = (),
    *,
    media_input: str | None = None,
    has_answer: bool = False,
    states: Mapping[str, str] = MappingProxyType({}),
) -> InferRequest:
    """Decode a JSON document to a request for a model.

    Args:
        document: The JSON object. It may contain a `NumberArray` in place of a list.
        inputs: The inputs of the model.
        outputs: The outputs of the model.
        may_be_empty: The names of inputs that may have no elements, such as a cache before the first step.
        media_input: The name of the input that may be an image or audio file, or None.
        has_answer: Whether the client may request the output `ANSWER`.
        states: A dict from each state output to the input that receives its value in the next request. These
            inputs are optional, and these outputs are returned only if the request names them.

    Raises:
        RequestError: The document is not a request of the protocol, or does not fit the model.
    """
    parameters = take_field(document, "parameters", "the request", dict, {})
    sequence = take_sequence(parameters)
    if sequence is not None and not states:
        raise RequestError(400, "parameter 'sequence_id': this model keeps no state between requests")
    request_id = take_field(document, "id", "the request", str, "")
    if len(request_id) > _MAX_ID:
        raise RequestError(400, f"id: expected at most {_MAX_ID} characters")
    requested = _decode_outputs(document, outputs, parameters, states=states, has_answer=has_answer)
    return InferRequest(
        _decode_inputs(
            document,
            inputs,
            may_be_empty,
            may_be_missing=states.values(),
            media_input=media_input,
        ),
        requested,
        request_id or None,
        take_field(parameters, "priority", "the request", int, 0),
        take_field(parameters, "timeout", "the request", int, 0) or None,
        _find_media_type(document, parameters) if media_input else "",
        sequence,
        wants_answer=has_answer and any(output.name == ANSWER for output in requested),
    )


def _find_media_type(document: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    """Return the parameter `content_type` of the request, or of an input, or an empty text."""
    entries = (entry.get("parameters") for entry in document["inputs"])
    candidates = [parameters, *(entry for entry in entries if isinstance(entry, dict))]
    types = [take_field(entry, "content_type", "the request", str, "") for entry in candidates]
    return next(filter(None, types), "")


def take_sequence(parameters: Mapping[str, Any]) -> SequenceStep | None:
    """Return the sequence step from the parameters of a request, or None if there is no sequence.

    Raises:
        RequestError: The id is neither text nor an integer, or is too long, or a flag is set without an id.
    """
    sequence_id = parameters.get("sequence_id", 0)
    start, end = (
        take_field(parameters, f"sequence_{flag}", "the request", bool, default=False)
        for flag in ("start", "end")
    )
    is_id = (
        len(sequence_id) <= _MAX_SEQUENCE_ID
        if isinstance(sequence_id, str)
        else (type(sequence_id) is int and 0 <= sequence_id < 1 << 64)
    )
    if not is_id:
        raise RequestError(
            400,
            f"parameter 'sequence_id' is {show(sequence_id)}, expected a whole number of at most 64 bits, or"
            f" text of at most {_MAX_SEQUENCE_ID} characters",
        )
    if sequence_id:
        return SequenceStep(sequence_id, start, end)
    if start or end:
        raise RequestError(400, "sequence_start and sequence_end need a sequence_id other than 0")
    return None


def _decode_inputs(
    document: Mapping[str, Any],
    specs: Sequence[TensorSpec],
    may_be_empty: Collection[str],
    *,
    may_be_missing: Collection[str],
    media_input: str | None,
) -> tuple[InferTensor, ...]:
    specs_by_name = {spec.name: spec for spec in specs}
    tensors: dict[str, InferTensor] = {}
    sizes: dict[int | str, tuple[str, int]] = {}  # size of each dimension, and the first input with it
    start_bytes = 0
    for entry in take_field(document, "inputs", "the request", list):
        name = _take_name(entry, specs_by_name, tensors, "input")
        if name == media_input and _is_media(entry):
            tensors[name] = _decode_media(entry, name, start_bytes)
            start_bytes += tensors[name].binary_bytes
            continue
        tensors[name] = _decode_input(
            entry, specs_by_name[name], start_bytes, least=int(name not in may_be_empty)
        )
        start_bytes += tensors[name].binary_bytes
        for size, dimension in zip(tensors[name].shape, specs_by_name[name].shape, strict=True):
            other, expected = sizes.setdefault(dimension, (name, size))
            if size != expected:
                raise RequestError(
                    400,
                    f"dimension '{dimension}' is {expected} in input '{other}' and {size} in input '{name}',"
                    " expected one size",
                )
    if missing := [name for name in specs_by_name if name not in tensors and name not in may_be_missing]:
        raise RequestError(
            400, f"input '{missing[0]}' is missing; the model takes {', '.join(specs_by_name)}"
        )
    return tuple(tensors.values())


def _take_name(
    entry: object, allowed: Mapping[str, object], previous: Mapping[str, object], role: str
) -> str:
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or name not in allowed:
        raise RequestError(400, f"{role} {show(name)} is not one of the model: {', '.join(allowed)}")
    if name in previous:
        raise RequestError(400, f"{role} '{name}' stands twice")
    return name


def _is_media(entry: Mapping[str, Any]) -> bool:
    """Whether an input is a file: a BYTES tensor, or an UINT8 one with a media type."""
    parameters = entry.get("parameters")
    has_type = isinstance(parameters, dict) and "content_type" in parameters
    return entry.get("datatype") == "BYTES" or (entry.get("datatype") == "UINT8" and has_type)


def _decode_media(entry: Mapping[str, Any], name: str, start_bytes: int) -> InferTensor:
    where = f"input '{name}'"
    is_string, shape = entry["datatype"] == "BYTES", entry.get("shape")
    parameters = take_field(entry, "parameters", where, dict, {})
    shared = _take_place(parameters, where)
    if shared is None:
        size_bytes = take_field(parameters, "binary_data_size", where, int)
    else:
        size_bytes = shared.size_bytes
    expected = ([1], [1, 1]) if is_string else ([size_bytes], [1, size_bytes])
    if shape not in expected or "data" in entry:
        raise RequestError(
            400,
            f"{where}: shape is {show(shape)}; send a file as binary data or in shared memory, as"
            " BYTES [1] or UINT8 [bytes]",
        )
    return InferTensor(
        name, DTYPES["uint8"], (size_bytes,), start_bytes, shared, is_media=True, is_string=is_string
    )


def _decode_input(entry: Mapping[str, Any], spec: TensorSpec, start_bytes: int, *, least: int) -> InferTensor:
    where = f"input '{spec.name}'"
    datatype, expected = entry.get("datatype"), DATATYPE_OF_DTYPE[spec.dtype]
    if datatype != expected:
        raise RequestError(400, f"{where}: datatype is {show(datatype)}, expected {expected}")
    shape = _take_shape(entry, spec, where, least)
    dtype = DTYPES[spec.dtype]
    parameters = take_field(entry, "parameters", where, dict, {})
    shared = _take_place(parameters, where)
    is_binary = parameters.get("binary_data_size") is not None
    if (shared is not None) + is_binary + ("data" in entry) != 1:
        raise RequestError(
            400, f"{where}: expected its values either in data, or as binary_data_size, or in shared memory"
        )
    if "data" in entry:
        data = entry["data"]
        values = data if isinstance(data, NumberArray) else read_values(data, dtype, shape, where)
        return InferTensor(spec.name, dtype, shape, values=values)
    stated_bytes = shared.size_bytes if shared else take_field(parameters, "binary_data_size", where, int)
    size_bytes = math.prod(shape) * dtype.itemsize
    if stated_bytes != size_bytes:
        raise RequestError(
            400, f"{where}: {stated_bytes} bytes are stated, expected {size_bytes} for shape {list(shape)}"
        )
    return InferTensor(spec.name, dtype, shape, start_bytes, shared)


def _take_shape(entry: Mapping[str, Any], spec: TensorSpec, where: str, least: int) -> tuple[int, ...]:
    shape = entry.get("shape")
    if not isinstance(shape, list) or len(shape) != len(spec.shape):
        raise RequestError(400, f"{where}: shape is {show(shape)}, expected {list(spec.shape)}")
    for size, expected in zip(shape, spec.shape, strict=True):
        # Few models are trained on tensors without elements, and engines divide by sizes.
        # Exactly this type: 4.0 and true also equal sizes, but numpy accepts neither as a size.
        is_size = type(size) is int and least <= size <= MAX_DIMENSION
        if type(size) is not int or (size != expected and not (isinstance(expected, str) and is_size)):
            raise RequestError(400, f"{where}: shape is {show(shape)}, expected {list(spec.shape)}")
    return tuple(shape)


def _decode_outputs(
    document: Mapping[str, Any],
    specs: Sequence[TensorSpec],
    defaults: Mapping[str, Any],
    *,
    states: Collection[str],
    has_answer: bool,
) -> tuple[RequestedOutput, ...]:
    is_binary = take_field(defaults, "binary_data_output", "the request", bool, default=False)
    entries = take_field(document, "outputs", "the request", list, [])
    if not entries:
        return tuple(RequestedOutput(spec.name, is_binary) for spec in specs if spec.name not in states)
    names = dict.fromkeys([spec.name for spec in specs] + ([ANSWER] if has_answer else []))
    outputs: dict[str, RequestedOutput] = {}
    for entry in entries:
        name = _take_name(entry, names, outputs, "output")
        where = f"output '{name}'"
        parameters = take_field(entry, "parameters", where, dict, {})
        classes = take_field(parameters, "classification", where, int, 0)
        if classes > _MAX_CLASSES:
            raise RequestError(400, f"{where}: classification is {classes}, expected at most {_MAX_CLASSES}")
        wants_binary = take_field(parameters, "binary_data", where, bool, default=is_binary)
        shared = _take_place(parameters, where)
        is_answer = has_answer and name == ANSWER
        if (shared is not None) + (classes > 0) + is_answer > 1:
            raise RequestError(400, f"{where}: byte strings have no classes and do not go to shared memory")
        outputs[name] = RequestedOutput(name, wants_binary, shared, classes)
    return tuple(outputs.values())


def _take_place(parameters: Mapping[str, Any], where: str) -> SharedPlace | None:
    if parameters.get("shared_memory_region") is None:
        return None
    return SharedPlace(
        take_field(parameters, "shared_memory_region", where, str),
        take_field(parameters, "shared_memory_offset", where, int, 0),
        take_field(parameters, "shared_memory_byte_size", where, int),
    )
