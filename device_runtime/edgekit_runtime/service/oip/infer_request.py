"""The JSON of an inference request, checked against a model and laid out as a plan that can be used again.

Everything that depends on the JSON alone is decided here, once for each different JSON. It reads no tensors
but those that stand in the JSON itself.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from edgekit_runtime.errors import RequestError
from edgekit_runtime.protocol.datatypes import DATATYPE_OF_DTYPE, find_dtype
from edgekit_runtime.service.oip.infer_plan import Plan, PlannedInput, PlannedOutput, Shared
from edgekit_runtime.service.oip.json_arrays import NumberArray
from edgekit_runtime.service.oip.json_fields import show, take_count, take_flag, take_parameters
from edgekit_runtime.service.oip.json_values import read_values
from edgekit_runtime.tensors import DTYPES, MAX_DIMENSION, TensorSpec

_MAX_ID: Final = 256  # characters


Agreement: TypeAlias = tuple[
    str, tuple[tuple[str, int], ...]
]  # a dimension; the inputs and axes that have it


def find_agreements(inputs: Sequence[TensorSpec]) -> tuple[Agreement, ...]:
    """Return which free dimensions must have one size in a request: those with one name."""
    places: dict[str, list[tuple[str, int]]] = {}
    for spec in inputs:
        for axis, size in enumerate(spec.shape):
            if isinstance(size, str):
                places.setdefault(size, []).append((spec.name, axis))
    return tuple((name, tuple(found)) for name, found in places.items() if len(found) > 1)


def parse_plan(
    request: Mapping[str, Any],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    agreements: Sequence[Agreement] = (),
) -> Plan:
    """Return what a request asks of a model with these inputs and outputs.

    Args:
        request: the object in its JSON, maybe with a `NumberArray` instead of a list.
        inputs: of the model.
        outputs: of the model.
        agreements: of the inputs.

    Raises:
        RequestError: not a request of the protocol, or not one that fits the model.
    """
    parameters = take_parameters(request, "the request")
    for name in ("sequence_id", "sequence_start", "sequence_end"):
        if parameters.get(name):
            raise RequestError(400, f"parameter '{name}': models with state are not supported")
    planned, binary_bytes = _plan_inputs(request, inputs)
    if agreements:
        _check_agreements({one.name: one.shape for one in planned}, agreements)
    request_id = request.get("id")
    if request_id is None:  # many writers of JSON have null for what is missing
        request_id = ""
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


def _plan_inputs(
    request: Mapping[str, Any], specs: Sequence[TensorSpec]
) -> tuple[tuple[PlannedInput, ...], int]:
    entries = request.get("inputs")
    if not isinstance(entries, list):
        raise RequestError(400, f"inputs is {show(entries)}, expected a list")
    known = {spec.name: spec for spec in specs}
    planned: dict[str, PlannedInput] = {}
    start_bytes = 0
    for entry in entries:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name not in known:
            raise RequestError(400, f"input {show(name)} is not one of the model: {', '.join(known)}")
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
    parameters = take_parameters(entry, where)
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
    data = entry["data"]
    values = data if isinstance(data, NumberArray) else read_values(data, dtype, shape, where)
    return PlannedInput(spec.name, dtype, shape, values=values), 0


def _check_agreements(shapes: Mapping[str, tuple[int, ...]], agreements: Sequence[Agreement]) -> None:
    for name, ((first, first_axis), *others) in agreements:
        size = shapes[first][first_axis]
        for other, axis in others:
            if shapes[other][axis] != size:
                raise RequestError(
                    400,
                    f"dimension '{name}' is {size} in input '{first}' and {shapes[other][axis]} in input"
                    f" '{other}', expected one size",
                )


def _take_shape(entry: Mapping[str, Any], spec: TensorSpec, where: str) -> tuple[int, ...]:
    shape = entry.get("shape")
    if not isinstance(shape, list) or len(shape) != len(spec.shape):
        raise RequestError(400, f"{where}: shape is {show(shape)}, expected {list(spec.shape)}")
    for size, wanted in zip(shape, spec.shape, strict=True):
        # No model is trained on tensors without elements, and engines divide by sizes.
        # Of the type itself: 4.0 and true equal sizes too, and numpy takes neither for one.
        is_size = type(size) is int and 1 <= size <= MAX_DIMENSION
        if type(size) is not int or (size != wanted and not (isinstance(wanted, str) and is_size)):
            raise RequestError(400, f"{where}: shape is {show(shape)}, expected {list(spec.shape)}")
    return tuple(shape)


def _plan_outputs(
    request: Mapping[str, Any], specs: Sequence[TensorSpec], defaults: Mapping[str, Any]
) -> tuple[PlannedOutput, ...]:
    is_binary = take_flag(defaults, "binary_data_output", "the request", default=False)
    entries = request.get("outputs")
    if entries is None or entries == []:
        return tuple(PlannedOutput(spec.name, is_binary) for spec in specs)
    if not isinstance(entries, list):
        raise RequestError(400, f"outputs is {show(entries)}, expected a list")
    known = [spec.name for spec in specs]
    planned: dict[str, PlannedOutput] = {}
    for entry in entries:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name not in known:
            raise RequestError(400, f"output {show(name)} is not one of the model: {', '.join(known)}")
        where = f"output '{name}'"
        if name in planned:
            raise RequestError(400, f"{where} stands twice")
        parameters = take_parameters(entry, where)
        if parameters.get("classification"):
            raise RequestError(400, f"{where}: classification is not supported; ask for the scores")
        wants_binary = take_flag(parameters, "binary_data", where, default=is_binary)
        planned[name] = PlannedOutput(name, wants_binary, _take_shared(parameters, where))
    return tuple(planned.values())


def _take_shared(parameters: Mapping[str, Any], where: str) -> Shared | None:
    region = parameters.get("shared_memory_region")
    if region is None:
        return None
    if not isinstance(region, str):
        raise RequestError(400, f"{where}: shared_memory_region is {show(region)}, expected a name")
    return Shared(
        region,
        take_count(parameters, "shared_memory_offset", where, 0),
        take_count(parameters, "shared_memory_byte_size", where),
    )
