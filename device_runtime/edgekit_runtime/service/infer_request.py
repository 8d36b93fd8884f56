"""The JSON of an inference request, checked against a model and laid out as a plan that can be used again.

Everything that depends on the JSON alone is decided here, once for each different JSON. It reads no tensors
but those that stand in the JSON itself.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import numpy as np

from edgekit_runtime.errors import RequestError
from edgekit_runtime.service.datatypes import DATATYPE_OF_DTYPE, find_dtype
from edgekit_runtime.sessions.session import Array
from edgekit_runtime.tensors import DTYPES, MAX_DIMENSION, TensorSpec

_MAX_ID: Final = 256  # characters
_JSON_KINDS: Final = {"b": (bool,), "i": (int,), "u": (int,), "f": (int, float)}


@dataclass(frozen=True, slots=True)
class Shared:
    """A place in shared memory.

    Attributes:
        region: its name.
        offset_bytes, size_bytes: within it.
    """

    region: str
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class PlannedInput:
    """Where the values of one input come from: exactly one of three places.

    Attributes:
        name, dtype, shape: of the tensor.
        start_bytes: behind the JSON, for binary data.
        shared: in shared memory, or None.
        values: from the JSON, or None.
    """

    name: str
    dtype: "np.dtype[Any]"
    shape: tuple[int, ...]
    start_bytes: int = 0
    shared: Shared | None = None
    values: "Array | None" = None


@dataclass(frozen=True, slots=True)
class PlannedOutput:
    """How one output goes back.

    Attributes:
        name: of the tensor.
        is_binary: behind the JSON instead of in it.
        shared: in shared memory, or None.
    """

    name: str
    is_binary: bool
    shared: Shared | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What a request asks for.

    Attributes:
        inputs: one for each of the model.
        outputs: in the order of the answer.
        binary_bytes: of all binary data behind the JSON.
        id: that the answer repeats, or None.
        priority: 1 is the highest, 0 the model's default.
        timeout_us: for waiting, or None.
        heads: of answers, by the shapes of their outputs; filled by the codec.
    """

    inputs: tuple[PlannedInput, ...]
    outputs: tuple[PlannedOutput, ...]
    binary_bytes: int
    id: str | None
    priority: int
    timeout_us: int | None
    heads: dict[tuple[tuple[int, ...], ...], bytes] = field(default_factory=dict)

    @property
    def is_repeatable(self) -> bool:
        """Whether the plan holds for the next request with the same JSON and is worth keeping."""
        return all(planned.values is None for planned in self.inputs)


def parse_plan(data: bytes, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Plan:
    """Return what the JSON in `data` asks of a model with these inputs and outputs.

    Raises:
        RequestError: not JSON, not a request of the protocol, or not one that fits the model.
    """
    request = load_object(data, "the request")
    parameters = _take_parameters(request, "the request")
    for name in ("sequence_id", "sequence_start", "sequence_end"):
        if parameters.get(name):
            raise RequestError(400, f"parameter '{name}': models with state are not supported")
    planned, binary_bytes = _plan_inputs(request, inputs)
    request_id = request.get("id", "")
    if not isinstance(request_id, str) or len(request_id) > _MAX_ID:
        raise RequestError(400, f"id: expected a string of at most {_MAX_ID} characters")
    return Plan(
        planned,
        _plan_outputs(request, outputs, parameters),
        binary_bytes,
        request_id or None,
        take_count(parameters, "priority", "the request", 0),
        take_count(parameters, "timeout", "the request", 0) or None,
    )


def load_object(data: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in `data`.

    Raises:
        RequestError: not an object, not JSON, not UTF-8, with NaN, or nested too deeply.
    """
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError as cause:
        raise RequestError(400, f"{where}: the JSON is nested too deeply") from cause
    except ValueError as cause:  # includes UnicodeDecodeError
        raise RequestError(400, f"{where}: not a JSON document in UTF-8: {cause}") from cause
    if not isinstance(value, dict):
        raise RequestError(400, f"{where}: the JSON is a {type(value).__name__}, expected an object")
    return value


def take_count(fields: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    """Return the whole number from 0 in `fields`, or `default` where it is missing.

    Raises:
        RequestError: it is something else, or missing without a default.
    """
    value = fields.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_DIMENSION:
        raise RequestError(400, f"{where}: {name} is {_show(value)}, expected a whole number from 0")
    return value


def _plan_inputs(
    request: Mapping[str, Any], specs: Sequence[TensorSpec]
) -> tuple[tuple[PlannedInput, ...], int]:
    entries = request.get("inputs")
    if not isinstance(entries, list):
        raise RequestError(400, f"inputs is {_show(entries)}, expected a list")
    known = {spec.name: spec for spec in specs}
    planned: dict[str, PlannedInput] = {}
    start_bytes = 0
    for entry in entries:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name not in known:
            raise RequestError(400, f"input {_show(name)} is not one of the model: {', '.join(known)}")
        if name in planned:
            raise RequestError(400, f"input '{name}' stands twice")
        planned[name], used_bytes = _plan_input(entry, known[name], start_bytes)
        start_bytes += used_bytes
    if missing := [name for name in known if name not in planned]:
        raise RequestError(400, f"input '{missing[0]}' is missing; the model takes {', '.join(known)}")
    return tuple(planned.values()), start_bytes


def _plan_input(entry: Mapping[str, Any], spec: TensorSpec, start_bytes: int) -> tuple[PlannedInput, int]:
    """Return the plan of one input, and how many bytes behind the JSON it takes."""
    where = f"input '{spec.name}'"
    dtype_name = find_dtype(entry.get("datatype"), where)
    if dtype_name != spec.dtype:
        raise RequestError(
            400, f"{where}: datatype is {entry.get('datatype')}, expected {DATATYPE_OF_DTYPE[spec.dtype]}"
        )
    shape = _take_shape(entry, spec, where)
    dtype = DTYPES[dtype_name]
    size_bytes = math.prod(shape) * dtype.itemsize
    parameters = _take_parameters(entry, where)
    shared = _take_shared(parameters, where)
    stated = parameters.get("binary_data_size")
    if (shared is not None) + (stated is not None) + ("data" in entry) != 1:
        raise RequestError(
            400, f"{where}: expected its values either in data, or as binary_data_size, or in shared memory"
        )
    if shared is not None:
        if shared.size_bytes != size_bytes:
            raise RequestError(
                400,
                f"{where}: shared_memory_byte_size is {shared.size_bytes}, expected {size_bytes} for shape"
                f" {list(shape)}",
            )
        return PlannedInput(spec.name, dtype, shape, shared=shared), 0
    if stated is not None:
        if take_count(parameters, "binary_data_size", where) != size_bytes:
            raise RequestError(
                400, f"{where}: binary_data_size is {stated}, expected {size_bytes} for shape {list(shape)}"
            )
        return PlannedInput(spec.name, dtype, shape, start_bytes), size_bytes
    return PlannedInput(spec.name, dtype, shape, values=_read_values(entry["data"], dtype, shape, where)), 0


def _take_shape(entry: Mapping[str, Any], spec: TensorSpec, where: str) -> tuple[int, ...]:
    shape = entry.get("shape")
    if not isinstance(shape, list) or len(shape) != len(spec.shape):
        raise RequestError(400, f"{where}: shape is {_show(shape)}, expected {list(spec.shape)}")
    for size, wanted in zip(shape, spec.shape, strict=True):
        # No model is trained on tensors without elements, and engines divide by sizes.
        # Of the type itself: 4.0 and true equal sizes too, and numpy takes neither for one.
        is_size = type(size) is int and 1 <= size <= MAX_DIMENSION
        if type(size) is not int or (size != wanted and not (isinstance(wanted, str) and is_size)):
            raise RequestError(400, f"{where}: shape is {_show(shape)}, expected {list(spec.shape)}")
    return tuple(shape)


def _read_values(data: object, dtype: "np.dtype[Any]", shape: tuple[int, ...], where: str) -> Array:
    """Return the values of a JSON array, nested as its shape or flat.

    numpy is not asked to guess: it would make numbers of strings and truth values, and round.
    """
    count = math.prod(shape)
    flat: Any = data
    if isinstance(data, list) and data and isinstance(data[0], list):
        for axis in range(len(shape) - 1):
            if len(flat) != math.prod(shape[: axis + 1]) or not all(isinstance(row, list) for row in flat):
                raise RequestError(400, f"{where}: data is not nested as shape {list(shape)} says")
            flat = [value for row in flat for value in row]
    if not isinstance(flat, list) or len(flat) != count:
        got = f"{len(flat)} values" if isinstance(flat, list) else type(flat).__name__
        raise RequestError(400, f"{where}: data has {got}, expected {count} for shape {list(shape)}")
    kinds = _JSON_KINDS[dtype.kind]
    for kind in set(map(type, flat)):
        if kind not in kinds:
            raise RequestError(
                400, f"{where}: data holds a {kind.__name__}, expected {DATATYPE_OF_DTYPE[dtype.name]} values"
            )
    try:
        with np.errstate(over="raise"):
            _check_range(flat, dtype)
            return np.array(flat, dtype).reshape(shape)
    except (OverflowError, FloatingPointError) as cause:
        raise RequestError(400, f"{where}: data is out of the range of {dtype.name}") from cause


def _check_range(flat: list[Any], dtype: "np.dtype[Any]") -> None:
    """Raise what numpy does not: before 2.0 it wraps integers, and 1e400 is infinite already."""
    if dtype.kind == "f" and not all(map(math.isfinite, flat)):
        raise OverflowError
    if dtype.kind in "iu" and flat:
        bounds = np.iinfo(dtype)
        if min(flat) < bounds.min or max(flat) > bounds.max:
            raise OverflowError


def _plan_outputs(
    request: Mapping[str, Any], specs: Sequence[TensorSpec], defaults: Mapping[str, Any]
) -> tuple[PlannedOutput, ...]:
    is_binary = _take_flag(defaults, "binary_data_output", "the request", default=False)
    entries = request.get("outputs")
    if entries is None or entries == []:
        return tuple(PlannedOutput(spec.name, is_binary) for spec in specs)
    if not isinstance(entries, list):
        raise RequestError(400, f"outputs is {_show(entries)}, expected a list")
    known = [spec.name for spec in specs]
    planned: dict[str, PlannedOutput] = {}
    for entry in entries:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name not in known:
            raise RequestError(400, f"output {_show(name)} is not one of the model: {', '.join(known)}")
        where = f"output '{name}'"
        if name in planned:
            raise RequestError(400, f"{where} stands twice")
        parameters = _take_parameters(entry, where)
        if parameters.get("classification"):
            raise RequestError(400, f"{where}: classification is not supported; ask for the scores")
        wants_binary = _take_flag(parameters, "binary_data", where, default=is_binary)
        planned[name] = PlannedOutput(name, wants_binary, _take_shared(parameters, where))
    return tuple(planned.values())


def _take_parameters(entry: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    parameters = entry.get("parameters", {})
    if not isinstance(parameters, dict):
        raise RequestError(400, f"{where}: parameters is {_show(parameters)}, expected an object")
    return parameters


def _take_shared(parameters: Mapping[str, Any], where: str) -> Shared | None:
    region = parameters.get("shared_memory_region")
    if region is None:
        return None
    if not isinstance(region, str):
        raise RequestError(400, f"{where}: shared_memory_region is {_show(region)}, expected a name")
    return Shared(
        region,
        take_count(parameters, "shared_memory_offset", where, 0),
        take_count(parameters, "shared_memory_byte_size", where),
    )


def _take_flag(parameters: Mapping[str, Any], name: str, where: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(400, f"{where}: {name} is {_show(value)}, expected true or false")
    return value


def _show(value: object) -> str:
    """Return `value` short enough for a message; a number of any length has no other bound."""
    try:
        return repr(value)[:80]
    except ValueError:  # Python prints no integers of over 4300 digits
        return "a huge number"


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")
