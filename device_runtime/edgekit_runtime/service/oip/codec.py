"""Decodes the requests for one version of a model, and encodes its outputs as responses.

Tensors are sent as JSON, as binary data after the JSON, or in shared memory. Clients often repeat the same
JSON, so the codec caches the last decoded documents. It never blocks, and it does not run models.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from edgekit_runtime.errors import RequestError
from edgekit_runtime.package.states import RecurrentState
from edgekit_runtime.protocol.byte_strings import serialize_strings, take_string
from edgekit_runtime.protocol.infer_request import (
    ANSWER,
    InferRequest,
    InferTensor,
    decode_request,
)
from edgekit_runtime.protocol.infer_response import encode_response
from edgekit_runtime.protocol.json_fields import load_object
from edgekit_runtime.protocol.json_tensors import NumberArray, Sliced, finish, load_document
from edgekit_runtime.protocol.rest import HEADER_LENGTH
from edgekit_runtime.service.http.response import BINARY_TYPE, JSON_TYPE, make_head
from edgekit_runtime.service.http.send_buffer import Buffer
from edgekit_runtime.service.oip.shared_memory import Region, Regions
from edgekit_runtime.tensors import Array, TensorSpec

if TYPE_CHECKING:
    from edgekit_runtime.tasks.answerer import Answerer

_MAX_KEPT: Final = 64
_MAX_KEPT_STEPS: Final = 1024  # of a model with states: each sequence has requests of its own
_MAX_KEPT_BYTES: Final = 4096
_INDEX_BYTES: Final = 4  # no engine takes smaller indices
_MAX_CLASS_STRINGS: Final = 1 << 14  # of one output: some microseconds each, on the thread of the loop
_MAX_COPIED_BYTES: Final = 4096  # from shared memory, in less time than the rest of a request takes
_FEW_VALUES: Final = 128  # values that are written to JSON at once
_MAX_VALUE_CHARACTERS: Final = 26  # of a number in JSON, with its comma
_MAX_KEPT_HEADS: Final = 32  # of one request: a model with free sizes has responses of many shapes

RegionMap: TypeAlias = Mapping[str, Region]
"""A dict from output names to their regions."""


class Codec:
    """Decodes requests for one version of a model, and encodes the responses."""

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
        check_inputs: Callable[[Sequence[InferTensor]], None] | None = None,
        may_be_empty: Collection[str] = (),
        answerer: "Answerer | None" = None,
        states: Sequence[RecurrentState] = (),
    ) -> None:
        """Create a codec.

        Args:
            name: The name of the model for responses.
            version: The version of the model for responses.
            inputs: The inputs of the model.
            outputs: The outputs of the model.
            regions: The shared memory that requests may use.
            max_json_bytes: The size limit of the JSON of a request.
            max_json_response_bytes: The size limit of the JSON of a response.
            check_inputs: Raises RequestError if the inputs of a request are too large, or None.
            may_be_empty: The inputs that may have no elements.
            answerer: The preprocessing, task and labels of the package, or None.
            states: The outputs that are inputs of the next request of a sequence.
        """
        self._answerer = answerer
        self.states = {state.output: state.input for state in states}
        self._max_kept = _MAX_KEPT_STEPS if states else _MAX_KEPT
        self._may_be_empty = may_be_empty
        self._names = {"model_name": name, "model_version": version}
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self._regions = regions
        self._check_inputs = check_inputs
        self._max_json_bytes = max_json_bytes
        self._max_json_response_bytes = max_json_response_bytes
        self._requests: dict[bytes, InferRequest] = {}

    def decode(
        self, body: memoryview, json_bytes: int | None, *, is_local: bool = True
    ) -> tuple[InferRequest, dict[str, Array]]:
        """Return the decoded request and its inputs.

        Args:
            body: The body of the request. The returned arrays may be views of it.
            json_bytes: The size of the JSON at the start of the body, or None if the whole body is JSON.
            is_local: Whether the request came over the Unix socket, see `Regions.find`.

        Raises:
            RequestError: The request is malformed or does not fit the model.
        """
        text = self._cut_json(body, json_bytes)
        request = self._requests.get(text)
        if request is None:
            request = self._decode_json(load_object(text, "the request"))
            if request.is_repeatable and len(text) <= _MAX_KEPT_BYTES:
                if len(self._requests) >= self._max_kept:
                    self._requests.clear()
                self._requests[text] = request
        _check_binary(request, body, len(text))
        inputs = {}
        for tensor in request.inputs:
            inputs[tensor.name] = self._read(tensor, body, len(text), is_local)
        return request, inputs

    def decode_in_slices(
        self, body: memoryview, json_bytes: int | None, *, is_local: bool = True
    ) -> Sliced[tuple[InferRequest, dict[str, Array]]]:
        """Decode a request with long JSON like `decode`, but in slices. See `is_long`."""
        text = self._cut_json(body, json_bytes)
        document = yield from load_document(text, "the request")
        request = self._decode_json(document)
        _check_binary(request, body, len(text))
        inputs = {}
        for tensor in request.inputs:
            if isinstance(tensor.values, NumberArray):
                where = f"input '{tensor.name}'"
                inputs[tensor.name] = yield from tensor.values.read(tensor.dtype, tensor.shape, where)
            else:
                inputs[tensor.name] = self._read(tensor, body, len(text), is_local)
        return request, inputs

    def hold(self, request: InferRequest, *, is_local: bool) -> RegionMap:
        """Return a dict from output names to their shared memory regions.

        The result stays valid for this request, even if a client registers another region with the same name.

        Args:
            request: The request.
            is_local: Whether the request came over the Unix socket, see `Regions.find`.

        Raises:
            RequestError: A region is unknown, or an output does not lie within its region.
        """
        regions = {}
        for output in request.outputs:
            if output.shared is not None:
                region = self._regions.find(output.shared.region, is_local=is_local)
                region.check_place(output.shared.offset_bytes, output.shared.size_bytes)
                regions[output.name] = region
        return regions

    def encode(
        self, request: InferRequest, outputs: Mapping[str, Array], regions: RegionMap
    ) -> tuple[Buffer, ...]:
        """Return the parts of the response: the head with the JSON, then the binary data.

        Args:
            request: The request.
            outputs: All outputs of the model.
            regions: The regions that `hold` returned.

        Raises:
            RequestError: An output does not fit into its shared memory, cannot be written as JSON, or makes
                the JSON too long.
        """
        if request.has_json_outputs:
            return finish(self.encode_in_slices(request, outputs, regions))
        arrays, data = self._sort_outputs(request, outputs, regions)
        shapes = (arrays[0].shape,) if len(arrays) == 1 else tuple([array.shape for array in arrays])
        head = request.response_heads.get(shapes)
        if head is None:
            head = b"".join(finish(self._write_head(request, arrays)))
            has_strings = any(array.dtype.kind == "O" for array in arrays)  # of any length
            if len(request.response_heads) < _MAX_KEPT_HEADS and not has_strings:
                request.response_heads[shapes] = head
        return head, *data

    def encode_in_slices(
        self, request: InferRequest, outputs: Mapping[str, Array], regions: RegionMap
    ) -> Sliced[tuple[Buffer, ...]]:
        """Do the same as `encode`, with the same result and errors, but yield every 100 us.

        Use this if `measure_json` returns a size.
        """
        arrays, data = self._sort_outputs(request, outputs, regions)
        parts = yield from self._write_head(request, arrays)
        return *parts, *data

    def measure_json(self, request: InferRequest, outputs: Mapping[str, Array]) -> int | None:
        """Return the maximum memory for the JSON of a response in bytes, or None if the JSON is short."""
        arrays = [
            outputs[requested.name]
            for requested in request.outputs
            if not requested.is_binary and requested.shared is None
        ]
        values = sum(array.size for array in arrays if array.dtype.kind != "O")
        if values <= _FEW_VALUES:
            return None
        text_bytes = min(values * _MAX_VALUE_CHARACTERS, self._max_json_response_bytes)
        return text_bytes + sum(array.nbytes for array in arrays)

    def _cut_json(self, body: memoryview, json_bytes: int | None) -> bytes:
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

    def _decode_json(self, document: Mapping[str, Any]) -> InferRequest:
        answerer = self._answerer
        has_answer = answerer is not None and answerer.task is not None
        request = decode_request(
            document,
            self.inputs,
            self.outputs,
            self._may_be_empty,
            media_input=None if answerer is None else answerer.media_input,
            states=self.states,
            has_answer=has_answer and all(spec.name != ANSWER for spec in self.outputs),
        )
        if self._check_inputs is not None:
            self._check_inputs([tensor for tensor in request.inputs if not tensor.is_media])
        return request

    def check_inputs(self, inputs: Mapping[str, Array]) -> None:
        """Check the size of inputs that were decoded from a file.

        Raises:
            RequestError: The inputs exceed the size limit of a request.
        """
        if self._check_inputs is not None:
            self._check_inputs(
                [InferTensor(name, array.dtype, array.shape) for name, array in inputs.items()]
            )

    def _read(self, tensor: InferTensor, body: memoryview, json_bytes: int, is_local: bool) -> Array:
        if tensor.values is not None:
            return tensor.values  # type: ignore[return-value]  # `decode` leaves no values unread
        if tensor.is_string:
            return take_string(
                self._read(replace(tensor, is_string=False), body, json_bytes, is_local), tensor.name
            )
        is_bool = tensor.dtype.kind == "b"
        if tensor.shared is not None:
            region = self._regions.find(tensor.shared.region, is_local=is_local)
            array = region.read(tensor.dtype, tensor.shape, tensor.shared.offset_bytes)
            is_index = array.dtype.kind in "iu" and array.itemsize >= _INDEX_BYTES
            if is_bool or is_index or array.nbytes <= _MAX_COPIED_BYTES:
                # The client may write to it between a check and the use. We check truth values; engines
                # check indices, shapes and scales, and then read them again.
                array = array.copy()
        else:
            array = np.ndarray(tensor.shape, tensor.dtype, body, json_bytes + tensor.start_bytes)
            if not array.flags.aligned:
                array = array.copy()
        if is_bool and array.size and array.view(np.uint8).max() > 1:
            raise RequestError(400, f"input '{tensor.name}': a BOOL is neither 0 nor 1")
        return array

    def _sort_outputs(
        self, request: InferRequest, outputs: Mapping[str, Array], regions: RegionMap
    ) -> tuple[list[Array], list[Array]]:
        """Return the requested outputs, and those of them that follow the JSON.

        Others go to shared memory.
        """
        arrays, data = [], []
        for output in request.outputs:
            array = outputs[output.name]
            if output.classes:
                array = classify(array, output.classes, self._labels)
            arrays.append(array)
            shared = output.shared
            if shared is not None:
                if array.nbytes > shared.size_bytes:
                    raise RequestError(
                        400,
                        f"output '{output.name}': has {array.nbytes} bytes, shared_memory_byte_size is only"
                        f" {shared.size_bytes}",
                    )
                regions[output.name].write(np.ascontiguousarray(array), shared.offset_bytes)
            elif output.is_binary:
                array = serialize_strings(array) if array.dtype.kind == "O" else array
                data.append(array if array.flags.c_contiguous else np.ascontiguousarray(array))
        return arrays, data

    @property
    def _labels(self) -> Sequence[str]:
        return () if self._answerer is None else self._answerer.labels

    def _write_head(self, request: InferRequest, arrays: Sequence[Array]) -> Sliced[tuple[bytes, memoryview]]:
        text, binary_bytes = yield from encode_response(
            self._names, request, arrays, self._max_json_response_bytes
        )
        if not binary_bytes:
            return make_head(200, JSON_TYPE, len(text)), text
        fields = {HEADER_LENGTH: str(len(text))}
        return make_head(200, BINARY_TYPE, len(text) + binary_bytes, fields), text


def is_long(body: memoryview, json_bytes: int | None) -> bool:
    """Return whether the JSON is longer than 4 KiB and should be decoded in slices."""
    return (len(body) if json_bytes is None else json_bytes) > _MAX_KEPT_BYTES


def _check_binary(request: InferRequest, body: memoryview, json_bytes: int) -> None:
    if len(body) - json_bytes != request.binary_bytes:
        raise RequestError(
            400,
            f"{len(body) - json_bytes} bytes follow the JSON, expected {request.binary_bytes} by"
            " binary_data_size",
        )


def classify(scores: Array, count: int, labels: Sequence[str]) -> Array:
    """Return the best classes of each row as byte strings `SCORE:INDEX:LABEL`, of shape [..., count].

    Args:
        scores: The class scores, of shape [..., classes].
        count: The number of classes to return, at most the number of classes in `scores`.
        labels: The class names by index. Classes without a name are written as `SCORE:INDEX`.

    Raises:
        RequestError: There are so many rows that writing them would delay other requests.

    Source: Triton's classification extension.
    """
    rows = scores.reshape(-1, scores.shape[-1] if scores.ndim else 1)
    if len(rows) * min(count, rows.shape[1]) > _MAX_CLASS_STRINGS:
        raise RequestError(
            400,
            f"classification: {len(rows)} rows of the shape {list(scores.shape)} have over"
            f" {_MAX_CLASS_STRINGS} best classes; ask for the scores",
        )
    best = np.argsort(-rows.astype(np.float64), axis=1, kind="stable")[:, :count]
    strings = np.empty(best.shape, object)
    for row, indices in enumerate(best.tolist()):
        for column, index in enumerate(indices):
            label = f":{labels[index]}" if index < len(labels) else ""
            strings[row, column] = f"{rows[row, index]:f}:{index}{label}".encode()
    return strings.reshape(*scores.shape[:-1], best.shape[1])
