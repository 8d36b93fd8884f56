"""The client: inference, and asking what a service has."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

import numpy as np

from edgekit_runtime.client.link import Address, Link, ReplyHead
from edgekit_runtime.client.shared import SharedMemory
from edgekit_runtime.errors import DataError, RequestError, TransportError
from edgekit_runtime.service.datatypes import DATATYPE_OF_DTYPE, DTYPE_OF_DATATYPE
from edgekit_runtime.sessions.session import Array
from edgekit_runtime.tensors import DTYPES

_MAX_KEPT: Final = 64
_MEMORY: Final = "/v2/systemsharedmemory/region"


class Client:
    """Talks to one service over one connection; for one thread at a time.

    A connection that the service closed while it was idle is made anew without a word.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        timeout_s: float = 30.0,
        ca_file: str | None = None,
    ) -> None:
        """Make a client; it connects with its first request.

        Args:
            address: path of a Unix socket, `host:port` or `https://host:port`; by default the socket of this
                device's service.
            token: for TCP.
            timeout_s: of a request where none is given.
            ca_file: PEM file of the authority that signed the service's certificate.

        Raises:
            TransportError: `address` is none of these.
        """
        if address is None:
            from edgekit_runtime.service.sockets import find_socket

            address = str(find_socket())
        self._link = Link(Address.parse(address, ca_file))
        self._timeout_s = timeout_s
        self._fields = "Host: localhost\r\n" + (f"Authorization: Bearer {token}\r\n" if token else "")
        self._requests: dict[object, bytes] = {}
        self._replies: dict[bytes, list[tuple[str, np.dtype[Any], tuple[int, ...], int]]] = {}
        self._shared: list[SharedMemory] = []

    def infer(
        self,
        name: str,
        inputs: Mapping[str, Array],
        *,
        version: str | None = None,
        outputs: Mapping[str, Array] | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> dict[str, Array]:
        """Return the outputs of a model.

        Arrays from `shared` travel in shared memory, in place; all others as binary data.

        Args:
            name: of the model.
            inputs: input name -> array.
            version: of the model; by default the one that the service prefers.
            outputs: output name -> array from `shared` to write it to; only these outputs are returned. By
                default all are returned as arrays of their own.
            priority: 1 is the highest, 0 the model's default.
            timeout_s: for the answer; the service refuses the request if it cannot begin within that time.

        Raises:
            RequestError: the service refused the request.
            TransportError: the service cannot be reached, or does not answer in time.
            DataError: an array cannot be sent, or an output is not from `shared`.
        """
        parts = self._make_parts(name, version, inputs, outputs, priority, timeout_s)
        head, body = self._ask(parts, timeout_s)
        return self._read_outputs(head, body, outputs)

    def bind(
        self,
        name: str,
        inputs: Mapping[str, Array],
        *,
        version: str | None = None,
        outputs: Mapping[str, Array] | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Callable[[], dict[str, Array]]:
        """Return a function that sends these arrays as they are when it is called, and returns the outputs.

        For loops: what `infer` finds out for each call is found out once.

        Args:
            name: of the model.
            inputs: input name -> C-contiguous array, from `shared` or not.
            version: as for `infer`.
            outputs: as for `infer`.
            priority: as for `infer`.
            timeout_s: as for `infer`.

        Raises:
            DataError: an array cannot be sent or has gaps, or an output is not from `shared`.
        """
        if gaps := [key for key, array in inputs.items() if not array.flags.c_contiguous]:
            raise DataError(f"input '{gaps[0]}': has gaps, so it cannot be bound; copy it first")
        parts = self._make_parts(name, version, inputs, outputs, priority, timeout_s)

        def call() -> dict[str, Array]:
            head, body = self._ask(parts, timeout_s)
            return self._read_outputs(head, body, outputs)

        return call

    def shared(self, shape: Sequence[int], dtype: Any = np.float32) -> Array:
        """Return an array of zeros in memory that the service reads and writes in place; Unix socket only.

        It stays shared until this client is closed.

        Raises:
            TransportError: the client is not connected over a Unix socket, or there is no memory for it.
        """
        if not self._link.passes_descriptors:
            raise TransportError("shared memory needs a Unix socket; connect to the path of one")
        memory = SharedMemory(tuple(shape), np.dtype(dtype))
        self._shared.append(memory)
        return memory.array

    def metadata(self, name: str | None = None, version: str | None = None) -> dict[str, Any]:
        """Return what the service says of a model, or of itself."""
        found: dict[str, Any] = self._call("GET", "/v2" if name is None else _path(name, version))
        return found

    def ready(self, name: str | None = None, version: str | None = None) -> bool:
        """Return whether a model, or every model of the service, takes requests."""
        path = "/v2/health/ready" if name is None else f"{_path(name, version)}/ready"
        try:
            self._call("GET", path)
        except RequestError:
            return False
        return True

    def index(self) -> list[dict[str, Any]]:
        """Return name, version and state of all models."""
        lines: list[dict[str, Any]] = self._call("POST", "/v2/repository/index")
        return lines

    def load(self, name: str) -> None:
        """Have the service load the installed versions of a model, in the place of those it serves."""
        self._call("POST", f"/v2/repository/models/{name}/load")

    def unload(self, name: str) -> None:
        """Have the service drop a model."""
        self._call("POST", f"/v2/repository/models/{name}/unload")

    def close(self) -> None:
        """Disconnect; the service forgets the shared memory of this client."""
        self._link.close()
        for memory in self._shared:
            memory.close()
        self._shared.clear()
        self._requests.clear()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: str, path: str) -> Any:
        request = f"{method} {path} HTTP/1.1\r\n{self._fields}Content-Length: 0\r\n\r\n".encode("latin-1")
        _, body = self._ask((request,), None)
        return _load(body)

    def _ask(self, parts: Sequence[Any], timeout_s: float | None) -> tuple[ReplyHead, memoryview]:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        for _ in range(2):
            if self._shared:
                self._register(timeout_s)
            found = self._link.ask(parts, timeout_s)
            if found is not None:
                head, body = found
                if head.status != 200:
                    raise _error(head, body)
                return found
        raise TransportError("the service closes every connection before it answers")

    def _register(self, timeout_s: float) -> None:
        """Make the service know all shared memory; on a new connection it has forgotten it."""
        self._link.connect(timeout_s)
        for memory in self._shared:
            if memory.generation == self._link.generation:
                continue
            body = json.dumps({"key": memory.name, "offset": 0, "byte_size": memory.size_bytes}).encode()
            head = (
                f"POST {_MEMORY}/{memory.name}/register HTTP/1.1\r\n{self._fields}Expect: 100-continue\r\n"
                f"Edgekit-Descriptor: 1\r\nContent-Length: {len(body)}\r\n\r\n"
            ).encode("latin-1")
            reply, content = self._link.pass_descriptor(head, body, memory.descriptor, timeout_s)
            if reply.status != 200:
                raise _error(reply, content)
            memory.generation = self._link.generation

    def _place(self, array: Array) -> tuple[str, int] | None:
        for memory in self._shared:
            offset = memory.offset_of(array)
            if offset is not None:
                return memory.name, offset
        return None

    def _targets(self, outputs: Mapping[str, Array] | None) -> tuple[tuple[str, str, int, int], ...] | None:
        if outputs is None:
            return None
        targets = []
        for name, array in outputs.items():
            place = self._place(array)
            if place is None:
                raise DataError(f"output '{name}': expected an array from shared(), without gaps")
            targets.append((name, *place, array.nbytes))
        return tuple(targets)

    def _make_parts(
        self,
        name: str,
        version: str | None,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array] | None,
        priority: int,
        timeout_s: float | None,
    ) -> list[Any]:
        """Return the bytes and arrays of a request."""
        arrays = tuple(inputs.values())
        places: Sequence[tuple[str, int] | None] | None = None
        if self._shared:
            places = tuple([self._place(array) for array in arrays])
        targets = None if outputs is None else self._targets(outputs)
        key = (
            *(name, version, priority, timeout_s, targets, places, *inputs),
            *[(array.dtype.str, array.shape) for array in arrays],
        )
        request = self._requests.get(key)
        if request is None:
            places = (None,) * len(arrays) if places is None else places
            request = self._make_request(name, version, inputs, places, targets, priority, timeout_s)
            if len(self._requests) >= _MAX_KEPT:
                self._requests.clear()
            self._requests[key] = request
        parts: list[Any] = [request]
        for index, array in enumerate(arrays):
            if places is None or places[index] is None:
                parts.append(array if array.flags.c_contiguous else np.ascontiguousarray(array))
        return parts

    def _make_request(
        self,
        name: str,
        version: str | None,
        inputs: Mapping[str, Array],
        places: Sequence[tuple[str, int] | None],
        targets: Iterable[tuple[str, str, int, int]] | None,
        priority: int,
        timeout_s: float | None,
    ) -> bytes:
        """Return the head of the request with its JSON."""
        parameters: dict[str, Any] = {"binary_data_output": True}
        if priority:
            parameters["priority"] = priority
        if timeout_s is not None:
            parameters["timeout"] = max(1, int(timeout_s * 1e6))
        document: dict[str, Any] = {
            "inputs": [
                _describe(name, array, place)
                for (name, array), place in zip(inputs.items(), places, strict=True)
            ],
            "parameters": parameters,
        }
        if targets is not None:
            document["outputs"] = [
                {"name": name, "parameters": _memory_parameters(region, offset, size_bytes)}
                for name, region, offset, size_bytes in targets
            ]
        text = json.dumps(document, separators=(",", ":")).encode()
        binary_bytes = sum(
            array.nbytes for array, place in zip(inputs.values(), places, strict=True) if place is None
        )
        head = (
            f"POST {_path(name, version)}/infer HTTP/1.1\r\n{self._fields}"
            f"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: {len(text)}\r\n"
            f"Content-Length: {len(text) + binary_bytes}\r\n\r\n"
        )
        return head.encode("latin-1") + text

    def _read_outputs(
        self, head: ReplyHead, body: memoryview, targets: Mapping[str, Array] | None
    ) -> dict[str, Array]:
        json_bytes = len(body) if head.json_bytes is None else head.json_bytes
        text = bytes(body[:json_bytes])
        layout = self._replies.get(text)
        if layout is None:
            layout = _parse_layout(text, targets or {})
            if len(self._replies) >= _MAX_KEPT:
                self._replies.clear()
            self._replies[text] = layout
        found = {}
        for name, dtype, shape, start in layout:
            if start < 0 and targets is not None:
                target = targets[name]
                if target.shape != shape:
                    target = target.reshape(-1)[: math.prod(shape)].reshape(shape)
                found[name] = target
                continue
            try:
                array: Array = np.ndarray(shape, dtype, body, json_bytes + start)
            except TypeError as cause:  # the buffer is too small
                raise TransportError(f"output '{name}': the answer is shorter than it states") from cause
            found[name] = array if array.flags.aligned and array.flags.writeable else array.copy()
        return found


def _parse_layout(
    text: bytes, targets: Mapping[str, Array]
) -> list[tuple[str, "np.dtype[Any]", tuple[int, ...], int]]:
    """Return name, dtype, shape and start behind the JSON of each output; -1 for one in shared memory."""
    layout, start = [], 0
    try:
        for entry in json.loads(text)["outputs"]:
            dtype = DTYPES[DTYPE_OF_DATATYPE[entry["datatype"]]]
            shape = tuple(int(size) for size in entry["shape"])
            parameters = entry.get("parameters", {})
            if "shared_memory_region" in parameters:
                layout.append((entry["name"], targets[entry["name"]].dtype, shape, -1))
                continue
            layout.append((entry["name"], dtype, shape, start))
            start += int(parameters["binary_data_size"])
    except (ValueError, KeyError, TypeError) as cause:
        raise TransportError(f"the answer is not one of the protocol: {cause!r}") from cause
    return layout


def _describe(name: str, array: Array, place: tuple[str, int] | None) -> dict[str, Any]:
    datatype = DATATYPE_OF_DTYPE.get(array.dtype.name)
    if datatype is None or not array.dtype.isnative:
        raise DataError(
            f"input '{name}': dtype {array.dtype.str} cannot be sent; convert it with .astype(...)"
        )
    parameters = (
        {"binary_data_size": array.nbytes} if place is None else _memory_parameters(*place, array.nbytes)
    )
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "parameters": parameters}


def _memory_parameters(region: str, offset_bytes: int, size_bytes: int) -> dict[str, Any]:
    return {
        "shared_memory_region": region,
        "shared_memory_offset": offset_bytes,
        "shared_memory_byte_size": size_bytes,
    }


def _path(name: str, version: str | None) -> str:
    from urllib.parse import quote

    path = f"/v2/models/{quote(name, safe='')}"
    return path if version is None else f"{path}/versions/{quote(version, safe='')}"


def _load(body: memoryview) -> Any:
    try:
        return json.loads(bytes(body)) if len(body) else {}
    except ValueError as cause:
        raise TransportError(f"the answer is not JSON: {cause}") from cause


def _error(head: ReplyHead, body: memoryview) -> RequestError:
    try:
        message = str(json.loads(bytes(body))["error"])
    except (ValueError, KeyError, TypeError):
        message = f"the service answered with status {head.status}"
    return RequestError(head.status, message, retry_after_s=head.retry_after_s)
