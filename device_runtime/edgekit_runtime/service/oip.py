"""Inference requests and responses of the Open Inference Protocol v2: bytes to arrays and back.

Tensors come as JSON, as binary data behind the JSON, or in shared memory. A client repeats its JSON, so what
the last few different ones mean is kept. Nothing here waits or runs a model.

Source: KServe Open Inference Protocol v2 (HTTP/REST); Triton's extensions binary_tensor_data, shared_memory
    and schedule_policy (`priority`, `timeout`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from edgekit_runtime.errors import RequestError
from edgekit_runtime.service.answers import BINARY_TYPE, make_head, make_json
from edgekit_runtime.service.datatypes import DATATYPE_OF_DTYPE
from edgekit_runtime.service.infer_request import find_agreements, parse_plan
from edgekit_runtime.service.outgoing import Buffer
from edgekit_runtime.service.plan import Plan, PlannedInput, PlannedOutput, Shared
from edgekit_runtime.service.sharedmem import Region, Regions
from edgekit_runtime.sessions.session import Array
from edgekit_runtime.tensors import TensorSpec

HEADER_LENGTH: Final = "Inference-Header-Content-Length"
_MAX_KEPT: Final = 64
_MAX_KEPT_BYTES: Final = 4096
_INDEX_BYTES: Final = 4  # no engine takes indices of fewer
_MAX_COPIED_BYTES: Final = 4096  # from shared memory; less than the rest of a request costs
_MAX_KEPT_HEADS: Final = 32  # of one plan: a model with free sizes has answers of many shapes

Held: TypeAlias = Mapping[str, Region]  # of an output


class Codec:
    """Reads requests to one version of a model and writes its responses.

    Attributes:
        name: of the model.
        inputs, outputs: of the model.
    """

    __slots__ = (
        *("_agreements", "_max_json_bytes", "_names", "_plans", "_regions", "inputs", "name", "outputs"),
    )

    def __init__(
        self,
        name: str,
        version: str,
        *,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        regions: Regions,
        max_json_bytes: int,
    ) -> None:
        """Make a codec.

        Args:
            name: that responses state.
            version: that responses state.
            inputs: of the model.
            outputs: of the model.
            regions: shared memory that requests may name.
            max_json_bytes: of one request; JSON is read on the event loop and takes many times its size.
        """
        self.name = name
        self._names = {"model_name": name, "model_version": version}
        self.inputs = tuple(inputs)
        self._agreements = find_agreements(inputs)
        self.outputs = tuple(outputs)
        self._regions = regions
        self._max_json_bytes = max_json_bytes
        self._plans: dict[bytes, Plan] = {}

    def decode(
        self, body: memoryview, json_bytes: int | None, *, is_local: bool = True
    ) -> tuple[Plan, dict[str, Array]]:
        """Return what a request asks for, and its inputs.

        Args:
            body: of the request; arrays may be views of it.
            json_bytes: how much of it is JSON, or None for all.
            is_local: whether it came over the Unix socket, see `Regions.find`.

        Raises:
            RequestError: the request is malformed or does not fit the model.
        """
        json_bytes = len(body) if json_bytes is None else json_bytes
        if json_bytes > len(body):
            raise RequestError(400, f"{HEADER_LENGTH} is {json_bytes}, the body has only {len(body)} bytes")
        if json_bytes > self._max_json_bytes:
            raise RequestError(
                413,
                f"the JSON has {json_bytes} bytes, the limit here is {self._max_json_bytes}; send tensors as"
                f" binary data (binary_data_size and the header {HEADER_LENGTH}), or set max_json_bytes",
            )
        text = bytes(body[:json_bytes])
        plan = self._plans.get(text)
        if plan is None:
            plan = self._parse(text)
        if len(body) - json_bytes != plan.binary_bytes:
            raise RequestError(
                400,
                f"{len(body) - json_bytes} bytes follow the JSON, expected {plan.binary_bytes} by"
                " binary_data_size",
            )
        inputs = {}
        for planned in plan.inputs:
            inputs[planned.name] = self._read(planned, body, json_bytes, is_local)
        return plan, inputs

    def hold(self, plan: Plan, *, is_local: bool) -> Held:
        """Return the regions that outputs go to: their names may be others' when the answer comes.

        Raises:
            RequestError: there is none of that name, or an output's place does not lie within it.
        """
        held = {}
        for planned in plan.outputs:
            if planned.shared is not None:
                shared = planned.shared
                region = self._regions.find(shared.region, is_local=is_local)
                region.check_place(shared.offset_bytes, shared.size_bytes)
                held[planned.name] = region
        return held

    def encode(self, plan: Plan, outputs: Mapping[str, Array], held: Held) -> tuple[Buffer, ...]:
        """Return the parts of the response: its head with the JSON, and the binary data that follow.

        Args:
            plan: of the request.
            outputs: all outputs of the model.
            held: from `hold`.

        Raises:
            RequestError: an output does not fit into its shared memory, or JSON cannot express it.
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
        if not is_repeatable:
            return self._make_head(plan, arrays), *data
        shapes = tuple([array.shape for array in arrays])
        head = plan.heads.get(shapes)
        if head is None:
            head = self._make_head(plan, arrays)
            if len(plan.heads) < _MAX_KEPT_HEADS:
                plan.heads[shapes] = head
        return head, *data

    def _parse(self, text: bytes) -> Plan:
        plan = parse_plan(text, self.inputs, self.outputs, self._agreements)
        if plan.is_repeatable and len(text) <= _MAX_KEPT_BYTES:
            if len(self._plans) >= _MAX_KEPT:
                self._plans.clear()
            self._plans[text] = plan
        return plan

    def _read(self, planned: PlannedInput, body: memoryview, json_bytes: int, is_local: bool) -> Array:
        if planned.values is not None:
            return planned.values
        is_bool = planned.dtype.kind == "b"
        if planned.shared is not None:
            shared = planned.shared
            region = self._regions.find(shared.region, is_local=is_local)
            array = region.read(planned.dtype, planned.shape, shared.offset_bytes)
            is_index = array.dtype.kind in "iu" and array.itemsize >= _INDEX_BYTES
            if is_bool or is_index or array.nbytes <= _MAX_COPIED_BYTES:
                # The client may write to it between a check and the use: ours of truth values, and those of
                # engines, which check indices, shapes and scales and then read them again.
                array = array.copy()
        else:
            array = np.ndarray(planned.shape, planned.dtype, body, json_bytes + planned.start_bytes)
            if not array.flags.aligned:
                array = array.copy()
        if is_bool and array.size and array.view(np.uint8).max() > 1:
            raise RequestError(400, f"input '{planned.name}': a BOOL is neither 0 nor 1")
        return array

    def _make_head(self, plan: Plan, arrays: Sequence[Array]) -> bytes:
        """Return the head of the response with its JSON."""
        entries = [_describe(planned, array) for planned, array in zip(plan.outputs, arrays, strict=True)]
        stated: dict[str, Any] = {**self._names, "outputs": entries}
        if plan.id is not None:
            stated["id"] = plan.id
        binary_bytes = sum(
            array.nbytes
            for planned, array in zip(plan.outputs, arrays, strict=True)
            if planned.is_binary and planned.shared is None
        )
        try:
            head, text = make_json(stated)
        except ValueError as cause:
            raise RequestError(500, "an output holds NaN or infinity, ask for it as binary_data") from cause
        if binary_bytes:
            length = {HEADER_LENGTH: str(len(text))}
            head = make_head(200, BINARY_TYPE, len(text) + binary_bytes, length)
        return head + text


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
    else:
        entry["data"] = array.reshape(-1).tolist()
    return entry
