"""Inference requests and responses of the Open Inference Protocol v2: bytes to arrays and back.

Tensors come as JSON, as binary data behind the JSON, or in shared memory. A client repeats its JSON, so what
the last few different ones mean is kept. Nothing here waits or runs a model.

Source: KServe Open Inference Protocol v2 (HTTP/REST); Triton's extensions binary_tensor_data, shared_memory
    and schedule_policy (`priority`, `timeout`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from edgekit_runtime.errors import RequestError
from edgekit_runtime.service.http.send_buffer import Buffer
from edgekit_runtime.service.oip.infer_plan import Plan, PlannedInput
from edgekit_runtime.service.oip.infer_request import find_agreements, parse_plan
from edgekit_runtime.service.oip.infer_response import (
    HEADER_LENGTH,
    Held,
    measure_json,
    sort_outputs,
    write_json,
)
from edgekit_runtime.service.oip.input_limit import InputLimit
from edgekit_runtime.service.oip.json_arrays import NumberArray, load_document
from edgekit_runtime.service.oip.json_fields import load_object
from edgekit_runtime.service.oip.shared_memory import Regions
from edgekit_runtime.service.oip.time_slices import Sliced, finish
from edgekit_runtime.tensors import Array, TensorSpec

_MAX_KEPT: Final = 64
_MAX_KEPT_BYTES: Final = 4096
_INDEX_BYTES: Final = 4  # no engine takes indices of fewer
_MAX_COPIED_BYTES: Final = 4096  # from shared memory; less than the rest of a request costs
_MAX_KEPT_HEADS: Final = 32  # of one plan: a model with free sizes has answers of many shapes


class Codec:
    """Reads requests to one version of a model and writes its responses.

    Attributes:
        name: of the model.
        inputs, outputs: of the model.
    """

    __slots__ = (
        *(
            "_agreements",
            "_input_limit",
            "_max_json_bytes",
            "_max_json_response_bytes",
            "_names",
            "_plans",
            "_regions",
        ),
        *("inputs", "name", "outputs"),
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
        max_json_response_bytes: int,
        input_limit: InputLimit | None = None,
    ) -> None:
        """Make a codec.

        Args:
            name: that responses state.
            version: that responses state.
            inputs: of the model.
            outputs: of the model.
            regions: shared memory that requests may name.
            max_json_bytes: of one request.
            max_json_response_bytes: of one response.
            input_limit: of all inputs of one request, or None.
        """
        self.name = name
        self._names = {"model_name": name, "model_version": version}
        self.inputs = tuple(inputs)
        self._agreements = find_agreements(inputs)
        self.outputs = tuple(outputs)
        self._regions = regions
        self._input_limit = input_limit
        self._max_json_bytes = max_json_bytes
        self._max_json_response_bytes = max_json_response_bytes
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
        text = self._take_json(body, json_bytes)
        plan = self._plans.get(text)
        if plan is None:
            plan = self._parse(text)
        _check_binary(plan, body, len(text))
        inputs = {}
        for planned in plan.inputs:
            inputs[planned.name] = self._read(planned, body, len(text), is_local)
        return plan, inputs

    def decode_in_slices(
        self, body: memoryview, json_bytes: int | None, *, is_local: bool = True
    ) -> Sliced[tuple[Plan, dict[str, Array]]]:
        """Return the same for a request with long JSON, in slices; see `is_long`."""
        text = self._take_json(body, json_bytes)
        document = yield from load_document(text, "the request")
        plan = self._make_plan(document)
        _check_binary(plan, body, len(text))
        inputs = {}
        for planned in plan.inputs:
            values = planned.values
            if isinstance(values, NumberArray):
                where = f"input '{planned.name}'"
                inputs[planned.name] = yield from values.read(planned.dtype, planned.shape, where)
            else:
                inputs[planned.name] = self._read(planned, body, len(text), is_local)
        return plan, inputs

    def _take_json(self, body: memoryview, json_bytes: int | None) -> bytes:
        json_bytes = len(body) if json_bytes is None else json_bytes
        if json_bytes > len(body):
            raise RequestError(400, f"{HEADER_LENGTH} is {json_bytes}, the body has only {len(body)} bytes")
        if json_bytes > self._max_json_bytes:
            raise RequestError(
                413,
                f"the JSON has {json_bytes} bytes, the limit here is {self._max_json_bytes}; send tensors as"
                f" binary data (binary_data_size and the header {HEADER_LENGTH}), or set max_json_bytes",
            )
        return bytes(body[:json_bytes])

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
            RequestError: an output does not fit into its shared memory, or JSON cannot express it, or not
                within its limit.
        """
        arrays, data, is_repeatable = sort_outputs(plan, outputs, held)
        if not is_repeatable:
            return *finish(self._write_json(plan, arrays)), *data
        shapes = tuple([array.shape for array in arrays])
        head = plan.heads.get(shapes)
        if head is None:
            head = b"".join(finish(self._write_json(plan, arrays)))
            if len(plan.heads) < _MAX_KEPT_HEADS:
                plan.heads[shapes] = head
        return head, *data

    def encode_in_slices(
        self, plan: Plan, outputs: Mapping[str, Array], held: Held
    ) -> Sliced[tuple[Buffer, ...]]:
        """Return the same for a response with long JSON, in slices; see `measure_json`."""
        arrays, data, _ = sort_outputs(plan, outputs, held)
        parts = yield from self._write_json(plan, arrays)
        return *parts, *data

    def measure_json(self, plan: Plan, outputs: Mapping[str, Array]) -> int | None:
        """Return how much memory the JSON of a long response takes at most, or None of a short one."""
        return measure_json(plan, outputs, self._max_json_response_bytes)

    def _write_json(self, plan: Plan, arrays: Sequence[Array]) -> Sliced[tuple[bytes, memoryview]]:
        return write_json(self._names, plan, arrays, self._max_json_response_bytes)

    def _make_plan(self, document: Mapping[str, Any]) -> Plan:
        plan = parse_plan(document, self.inputs, self.outputs, self._agreements)
        if self._input_limit is not None:
            self._input_limit.check(plan.inputs)
        return plan

    def _parse(self, text: bytes) -> Plan:
        plan = self._make_plan(load_object(text, "the request"))
        if plan.is_repeatable and len(text) <= _MAX_KEPT_BYTES:
            if len(self._plans) >= _MAX_KEPT:
                self._plans.clear()
            self._plans[text] = plan
        return plan

    def _read(self, planned: PlannedInput, body: memoryview, json_bytes: int, is_local: bool) -> Array:
        if planned.values is not None:
            return planned.values  # type: ignore[return-value]  # `decode` leaves no values unread
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


def is_long(body: memoryview, json_bytes: int | None) -> bool:
    """Whether a request has so much JSON that it is to be decoded in slices."""
    return (len(body) if json_bytes is None else json_bytes) > _MAX_KEPT_BYTES


def _check_binary(plan: Plan, body: memoryview, json_bytes: int) -> None:
    if len(body) - json_bytes != plan.binary_bytes:
        raise RequestError(
            400,
            f"{len(body) - json_bytes} bytes follow the JSON, expected {plan.binary_bytes} by"
            " binary_data_size",
        )
