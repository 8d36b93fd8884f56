"""Inference over gRPC: converts messages to the equivalent HTTP requests, and responses back to messages.

Both protocols therefore share one implementation. Requests of a client usually differ only in
`raw_input_contents`, and responses only in the tensors. The conversions of all other parts are cached.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from edgekit_runtime.errors import EdgekitError, RequestError, UnavailableError
from edgekit_runtime.protocol.datatypes import DTYPE_OF_DATATYPE
from edgekit_runtime.protocol.rest import HEADER_LENGTH, encode_error, model_path
from edgekit_runtime.service.api.inference import InferenceHandler
from edgekit_runtime.service.grpc.http2 import Buffer
from edgekit_runtime.service.grpc.messages import (
    head_of_bytes,
    read_message,
    split_raw_contents,
    unpack_varints,
    write_message,
)
from edgekit_runtime.service.grpc.rpcs import MessageResponder, Method, RpcHead
from edgekit_runtime.service.http.loopback import Loopback
from edgekit_runtime.service.http.send_buffer import flatten
from edgekit_runtime.service.models.registry import Registry
from edgekit_runtime.service.options.config import Inference
from edgekit_runtime.system.tasks import Tasks
from edgekit_runtime.tensors import allocate_aligned

_RAW_OUTPUT: Final = 6  # raw_output_contents of ModelInferResponse
_INFER_RESPONSE: Final = 2  # infer_response of ModelStreamInferResponse
_MAX_KEPT: Final = 64
_MAX_KEPT_BYTES: Final = 4096
_ALIGNMENT: Final = 16  # of the memory of `bytes`. The JSON is padded so that tensors are aligned
_SMALL_BYTES: Final = 64 << 10
# By datatype, the field of InferTensorContents that carries it. FP16 has none.
_CONTENTS: Final[Mapping[str, str]] = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


class _RequestHead(NamedTuple):
    """Stands in for the head of an HTTP request, of which handlers read `json_bytes`.

    Attributes:
        name, version: the model; None is its default version.
        text: JSON of the request.
        sizes: bytes of each tensor behind it.
    """

    name: str
    version: str | None
    text: bytes
    json_bytes: int
    sizes: list[int]


class _ResponseHead(NamedTuple):
    """A ModelInferResponse without `raw_output_contents`, whose sizes follow; None is for shared memory."""

    message: bytes
    sizes: tuple[int | None, ...]


class InferMethod(Method):
    """The methods `ModelInfer` and, with `is_stream`, `ModelStreamInfer`."""

    def __init__(
        self, handler: InferenceHandler, registry: Registry, limits: Inference, *, is_stream: bool
    ) -> None:
        self._handler, self._find_remote = handler, registry.find_remote
        self._max_bytes = limits.max_json_bytes
        self.is_stream = is_stream
        self._tasks = Tasks()  # of isolated models
        self._requests: dict[bytes, _RequestHead] = {}
        self._responses: dict[bytes, _ResponseHead] = {}

    def handle(self, responder: MessageResponder, head: RpcHead, message: memoryview) -> None:
        described, raw = split_raw_contents(message)
        request = self._requests.get(described)
        if request is None or request.sizes != [len(data) for data in raw]:
            request, raw = self._read(described, raw)
        body = _join(request.text, raw)
        if self._find_remote(request.name, request.version) is not None:
            _post(self._tasks, responder, head, request, body)
            return
        arguments: Any = responder, request, memoryview(body)  # they have what the handler uses
        self._handler.handle_request(request.name, request.version, *arguments)

    def _read(self, described: bytes, raw: list[memoryview]) -> tuple[_RequestHead, list[memoryview]]:
        if len(described) > self._max_bytes:
            raise RequestError(
                413,
                f"the message has {len(described)} bytes beside its raw_input_contents, the limit here is"
                f" {self._max_bytes}; send tensors as raw_input_contents, or set max_json_bytes",
            )
        document = read_message("ModelInferRequest", described)
        contents = [_read_tensor(tensor) for tensor in document["inputs"] if "contents" in tensor]
        if contents and raw:
            raise RequestError(400, "tensors in contents beside others in raw_input_contents")
        sizes = [len(data) for data in contents or raw]
        text = json.dumps(_describe_request(document, sizes), separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        version = document["model_version"] or None
        request = _RequestHead(document["model_name"], version, text, len(text), sizes)
        if not contents:
            _remember(self._requests, described, request)
        return request, contents or raw

    def encode_response(self, head: bytes, *data: Buffer) -> list[Buffer]:
        text = head.partition(b"\r\n\r\n")[2]
        stated = self._responses.get(text)
        if stated is None:
            stated = _translate_response(json.loads(text))
            _remember(self._responses, text, stated)
        parts: list[Buffer] = [stated.message]
        tensors = iter(map(flatten, data)) if len(data) != 1 else _split(flatten(data[0]), stated.sizes)
        for size in stated.sizes:
            # Clients count on an entry for each output, also without values.
            parts.append(head_of_bytes(_RAW_OUTPUT, size or 0))
            if size is not None:
                parts.append(next(tensors))
        if self.is_stream:
            parts.insert(0, head_of_bytes(_INFER_RESPONSE, sum(map(len, parts))))
        return parts

    def encode_error(self, error: EdgekitError) -> bytes | None:
        if not self.is_stream:
            return None
        return write_message("ModelStreamInferResponse", {"error_message": encode_error(error)["error"]})


def _post(
    tasks: Tasks, responder: MessageResponder, head: RpcHead, request: _RequestHead, body: Buffer
) -> None:
    """Send a request to an isolated model with the rights of the client, which gets the response."""
    server = responder.rpc.owner.server
    if server.is_full(is_local=responder.is_local):
        raise UnavailableError("too many connections; try again", 1.0)
    fields = {HEADER_LENGTH: str(request.json_bytes)}
    if head.authorization is not None:
        fields["Authorization"] = head.authorization.decode("latin-1")

    async def post() -> None:
        loopback = Loopback(server, is_local=responder.is_local, address=responder.client)
        with contextlib.closing(loopback):
            path = f"{model_path(request.name, request.version)}/infer"
            stated, content = await loopback.post(path, fields, body)
        at = int(stated.get(HEADER_LENGTH.lower(), len(content)))
        responder.respond(b"\r\n\r\n" + content[:at], content[at:])

    responder.on_close = tasks.start(post(), responder.respond_error).cancel


def _split(data: memoryview, sizes: Sequence[int | None]) -> Iterator[memoryview]:
    at = 0
    for size in sizes:
        if size is not None:
            yield data[at : at + size]
            at += size


def _remember(cache: dict[bytes, Any], key: bytes, meaning: object) -> None:
    if len(key) <= _MAX_KEPT_BYTES:
        if len(cache) >= _MAX_KEPT:
            cache.clear()
        cache[key] = meaning


def _join(text: bytes, tensors: Sequence[memoryview]) -> "bytes | memoryview":
    """Return the body of a request over HTTP, with the first tensor aligned."""
    size = len(text) + sum(map(len, tensors))
    if size <= _SMALL_BYTES:
        return b"".join((text, *tensors))
    body, at = allocate_aligned(size, len(text)), 0
    parts: list[bytes | memoryview] = [text, *tensors]
    for part in parts:
        body[at : at + len(part)] = part
        at += len(part)
    return body


def _describe_request(message: Mapping[str, Any], sizes: Sequence[int]) -> dict[str, Any]:
    """Return the JSON of an equal request over HTTP, whose tensors of `sizes` follow as binary data.

    Raises:
        RequestError: there are not as many tensors as inputs outside of shared memory.
    """
    sizes, inputs = list(sizes), []
    for tensor in message["inputs"]:
        parameters = read_parameters(tensor)
        if parameters.get("shared_memory_region") is None:
            if not sizes:
                raise RequestError(400, f"input '{tensor['name'][:80]}': raw_input_contents has no entry")
            parameters["binary_data_size"] = sizes.pop(0)
        inputs.append(
            {"parameters": parameters, **{name: tensor[name] for name in ("name", "datatype", "shape")}}
        )
    if sizes:
        raise RequestError(400, f"{len(sizes)} tensors more than inputs; the last has {sizes[-1]} bytes")
    outputs = [
        {"name": output["name"], "parameters": read_parameters(output)} for output in message["outputs"]
    ]
    parameters = {**read_parameters(message), "binary_data_output": True}
    return {"id": message["id"], "inputs": inputs, "outputs": outputs, "parameters": parameters}


def read_parameters(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message's parameters as a dict of plain values, without HTTP-only parameters."""
    parameters = {name: next(iter(choice.values()), None) for name, choice in message["parameters"].items()}
    for name in ("binary_data", "binary_data_size"):  # of HTTP: here all tensors are
        parameters.pop(name, None)
    return parameters


def _read_tensor(tensor: Mapping[str, Any]) -> memoryview:
    """Return the typed `contents` of an input as binary data of its datatype.

    Raises:
        RequestError: they are in another field than that of the datatype, or a value is out of range.
    """
    where, datatype, contents = f"input '{tensor['name'][:80]}'", tensor["datatype"], tensor["contents"]
    field = _CONTENTS.get(datatype)
    filled = [name for name, values in contents.items() if len(values)]
    if field is None or filled not in ([], [field]):
        expected = field or "raw_input_contents"
        raise RequestError(400, f"{where}: {datatype[:16]} comes in {expected}, not in {', '.join(filled)}")
    values = contents[field]
    if datatype == "BYTES":
        return memoryview(b"".join(len(value).to_bytes(4, "little") + value for value in values))
    if field.startswith("fp"):
        return memoryview(values)
    dtype = np.dtype(DTYPE_OF_DATATYPE[datatype])
    numbers = unpack_varints(values)
    if dtype.kind == "i":
        numbers = numbers.view(np.int64)
    if dtype.kind != "b" and len(numbers):
        bounds = np.iinfo(dtype)
        if numbers.min() < bounds.min or numbers.max() > bounds.max:
            raise RequestError(400, f"{where}: a value is out of the range of {datatype}")
    return memoryview(numbers.astype(dtype).tobytes())


def _translate_response(document: Mapping[str, Any]) -> _ResponseHead:
    outputs, sizes = [], []
    for output in document["outputs"]:
        stated = dict(output["parameters"])
        sizes.append(stated.pop("binary_data_size", None))
        parameters = {
            name: {"string_param" if isinstance(value, str) else "int64_param": value}
            for name, value in stated.items()
        }
        outputs.append({**output, "parameters": parameters})
    message = write_message("ModelInferResponse", {**document, "outputs": outputs})
    return _ResponseHead(message, tuple(sizes))
