"""The client: runs inference, and asks a service for its models."""

import contextlib
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

import numpy as np

from edgekit_runtime.client.link import Address, Link
from edgekit_runtime.client.requests import (
    InferOptions,
    RequestTemplate,
    check_arrays,
    check_timeout,
    make_request_head,
    make_template,
    token_line,
)
from edgekit_runtime.client.responses import Layout, make_error, read_response
from edgekit_runtime.client.shared_memory import SharedMemory
from edgekit_runtime.errors import DataError, RequestError, TransportError
from edgekit_runtime.protocol.infer_request import RequestedOutput, SequenceStep, SharedPlace
from edgekit_runtime.protocol.rest import REPOSITORY_INDEX, model_path, region_path, repository_path
from edgekit_runtime.system.paths import find_socket
from edgekit_runtime.tensors import Array

_MAX_KEPT: Final = 64
_LEAST_TIMEOUT_S: Final = 1e-3


class Client:
    """A client of one service over one connection. It is not thread-safe.

    A call raises `RequestError` if the service refuses the request, and `TransportError` if the service
    cannot be reached or does not answer in time. `ready` returns False in place of a `RequestError`.

    If the service has closed an idle connection, the client connects again.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        timeout_s: float = 30.0,
        ca_file: str | None = None,
        insecure: bool = False,
    ) -> None:
        """Make a client; it connects with its first request.

        Args:
            address: path of a Unix socket, `unix:PATH`, `host:port` or `https://host:port/prefix`; by default
                the socket of this device's service.
            token: token for TCP.
            timeout_s: default timeout of a request, at most 1e6.
            ca_file: PEM file of the authority that signed the service's certificate.
            insecure: whether data may go to another machine over plain HTTP, where everybody on the way can
                read and change them; a token may not.

        Raises:
            TransportError: `address` is none of these.
            ConfigError: it is plain HTTP to another machine, which is not allowed.
            DataError: `token` cannot stand in a header, or `timeout_s` is out of range.
        """
        if address is None:
            address = str(find_socket())
        check_timeout(timeout_s)
        stated = Address.parse(address, ca_file, has_token=bool(token), insecure=insecure, allows_prefix=True)
        self._link = Link(stated)
        self._timeout_s = timeout_s
        self._fields = f"Host: {self._link.address.authority}\r\n{token_line(token)}"
        self._requests: dict[object, RequestTemplate] = {}
        self._shared: dict[str, SharedMemory] = {}  # by the name of its region

    def infer(
        self,
        name: str,
        inputs: Mapping[str, Array],
        *,
        version: str | None = None,
        outputs: Mapping[str, Array] | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        sequence: SequenceStep | None = None,
    ) -> dict[str, Array]:
        """Run a model on `inputs`, and return a dict from output name to array.

        Arrays from `shared` are passed in shared memory, without a copy. All others are sent as binary data.

        Args:
            name: name of the model.
            inputs: a dict from input name to array.
            version: version of the model, by default the version that the service prefers.
            outputs: a dict from output name to an array from `shared` that receives the output. Only these
                outputs are returned. By default all outputs are returned as new arrays.
            priority: priority of the request. 1 is the highest, and 0 is the model's default.
            timeout_s: time limit for the answer. The service refuses the request if it cannot begin in time.
            sequence: position of the request in a sequence, for a model with states. `inputs` need not
                contain states, and outputs that are states are not returned.

        Raises:
            DataError: an array cannot be sent, an array in `outputs` is not from `shared` or has the wrong
                dtype, or `timeout_s` is out of range.
        """
        try:
            options = InferOptions(name, version, priority, timeout_s, sequence)
            template, parts = self._prepare(options, inputs, outputs)
        except AttributeError:
            check_arrays(inputs, outputs)  # only now: a call with arrays pays nothing for it
            raise
        return self._infer(template, parts, outputs, timeout_s)

    def answer(
        self,
        name: str,
        file: "bytes | memoryview",
        media_type: str = "image/jpeg",
        *,
        version: str | None = None,
        options: Mapping[str, str | float] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Return the answer of a model's task for a photograph or sound, as the service's JSON object.

        Args:
            name: name of the model.
            file: content of the file, or raw pixels or samples.
            media_type: media type of `file`, such as `image/jpeg`, `audio/wav` or `video/x-raw; format=RGB;
                width=640; height=480`.
            version: version of the model, by default the version that the service prefers.
            options: options of the task for this answer, such as `{"min_score": 0.5}`.
            timeout_s: time limit for the answer.

        Raises:
            DataError: an option or the media type contains characters that a request may not have.
        """
        query = "&".join(f"{key}={value}" for key, value in (options or {}).items())
        path = f"{self._link.address.prefix}{model_path(name, version)}/answer"
        fields = f"{self._fields}Content-Type: {media_type}\r\n"
        if not (f"{query}{media_type}".isascii() and f"{query}{media_type}".isprintable()) or " " in query:
            raise DataError("an option or the media type holds characters that a request may not have")
        head = make_request_head("POST", f"{path}?{query}" if query else path, fields, len(file))
        _, body = self._ask(RequestTemplate(head, len(head) + len(file)), (head, file), timeout_s)
        document: dict[str, Any] = self._read_json(body)
        return document

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
        """Return a function that runs a model on the values that `inputs` have at the time of each call.

        The request is prepared only once, which makes calls in a loop faster. The function returns and raises
        the same as `infer`.

        The arguments are those of `infer`. Each array in `inputs` must be C-contiguous.

        Raises:
            DataError: an array cannot be sent or is not contiguous, an output is not from `shared`, or
                `timeout_s` is out of range.
        """
        check_arrays(inputs, outputs)
        if gaps := [key for key, array in inputs.items() if not array.flags.c_contiguous]:
            raise DataError(f"input '{gaps[0]}': has gaps, so it cannot be bound; copy it first")
        template, parts = self._prepare(InferOptions(name, version, priority, timeout_s), inputs, outputs)
        return functools.partial(self._infer, template, parts, outputs, timeout_s)

    def shared(self, shape: Sequence[int], dtype: Any = np.float32) -> Array:
        """Return an array of zeros in memory that is shared with the service. This requires a Unix socket.

        The memory stays shared until `release` or `close`. The first call that uses the array registers the
        memory with the service, and fails if the service refuses it.

        Raises:
            TransportError: the client is not connected over a Unix socket, or there is not enough memory.
            DataError: no tensor can have this shape or dtype.
        """
        if self._link.address.path is None:
            raise TransportError("shared memory needs a Unix socket; connect to the path of one")
        memory = SharedMemory(tuple(shape), np.dtype(dtype))
        self._shared[memory.name] = memory
        return memory.array

    def release(self, array: Array) -> None:
        """Unregister the memory of an array from `shared`, so that the service has room for other memory.

        The array keeps its values and is no longer shared. Functions from `bind` that use the array fail.

        Raises:
            DataError: the array is not from `shared`, or was already released.
        """
        region_slice = self._place(array)
        if region_slice is None:
            raise DataError("release: expected an array from shared() of this client, not released before")
        memory = self._shared.pop(region_slice.region)
        self._requests = {
            key: template for key, template in self._requests.items() if memory.name not in template.regions
        }
        is_known = memory.connection == self._link.connection
        memory.close()
        if is_known:
            with contextlib.suppress(TransportError):  # with its connection the service has lost it anyway
                self._call("POST", region_path(memory.name, "unregister"))

    def metadata(self, name: str | None = None, version: str | None = None) -> dict[str, Any]:
        """Return the metadata of a model, or of the service if `name` is None."""
        document: dict[str, Any] = self._call("GET", "/v2" if name is None else model_path(name, version))
        return document

    def ready(self, name: str | None = None, version: str | None = None) -> bool:
        """Return whether a model is ready, or the service with all its models if `name` is None."""
        path = "/v2/health/ready" if name is None else f"{model_path(name, version)}/ready"
        try:
            self._call("GET", path)
        except RequestError:
            return False
        return True

    def index(self) -> list[dict[str, Any]]:
        """Return `name`, `version`, `state` and `reason` of each version of each model."""
        lines: list[dict[str, Any]] = self._call("POST", REPOSITORY_INDEX)
        return lines

    def load(self, name: str) -> None:
        """Make the service load the installed versions of a model, which replace the served versions."""
        self._call("POST", repository_path(name, "load"))

    def unload(self, name: str) -> None:
        """Make the service unload a model."""
        self._call("POST", repository_path(name, "unload"))

    def close(self) -> None:
        """Disconnect. The service then unregisters the shared memory of this client."""
        self._link.close()
        for memory in self._shared.values():
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
        head = make_request_head(method, self._link.address.prefix + path, self._fields)
        _, body = self._ask(RequestTemplate(head, len(head)), (head,), None)
        return self._read_json(body)

    @staticmethod
    def _read_json(body: memoryview) -> Any:
        try:
            return json.loads(bytes(body)) if len(body) else {}
        except ValueError as cause:
            raise TransportError(f"the answer is not JSON: {cause}") from cause

    def _infer(
        self,
        template: RequestTemplate,
        parts: Sequence[Any],
        outputs: Mapping[str, Array] | None,
        timeout_s: float | None,
    ) -> dict[str, Array]:
        answers: Any = self._ask(template, parts, timeout_s)
        if isinstance(answers, Layout):
            return answers.read(outputs)
        head, body = answers
        read, template.layout = read_response(head, body, outputs, self._link.memory)
        return read

    def _ask(self, template: RequestTemplate, parts: Sequence[Any], timeout_s: float | None) -> Any:
        """Return head and body of the response, or the template's layout where the response has that."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        link, until_s, left_s = self._link, time.monotonic() + timeout_s, timeout_s
        for _ in range(2):
            for region in template.regions:
                memory = self._shared.get(region)
                if memory is None:
                    raise DataError("an array of this call was released; bind again")
                is_known = memory.connection == link.connection
                if not is_known and not memory.register(link, self._fields, left_s):
                    break
            else:
                reply: Any = link.ask(parts, template.size_bytes, left_s, template.layout)
                if reply is None:
                    left_s = max(until_s - time.monotonic(), _LEAST_TIMEOUT_S)
                    continue
                if reply is not template.layout and reply[0].status != 200:
                    raise make_error(*reply)
                return reply
        raise TransportError("the service closes every connection before it answers")

    def _place(self, array: Array) -> SharedPlace | None:
        for memory in self._shared.values():
            offset = memory.offset_of(array)
            if offset is not None:
                return SharedPlace(memory.name, offset, array.nbytes)
        return None

    def _prepare(
        self, options: InferOptions, inputs: Mapping[str, Array], outputs: Mapping[str, Array] | None
    ) -> tuple[RequestTemplate, list[Any]]:
        arrays = list(inputs.values())
        shared_places: Sequence[SharedPlace | None] = (None,) * len(arrays)
        if self._shared:
            shared_places = tuple([self._place(array) for array in arrays])
        requested = []
        sizes: list[object] = [(array.dtype, array.shape) for array in arrays]
        for name, array in outputs.items() if outputs is not None else ():
            slot = self._place(array)
            if slot is None:
                raise DataError(f"output '{name}': expected an array from shared(), without gaps")
            requested.append(RequestedOutput(name, is_binary=False, shared=slot))
            sizes.append(array.dtype)
        key = (options, shared_places, *inputs, *sizes, *requested)
        template = self._requests.get(key)
        if template is None:
            template = make_template(
                options,
                inputs,
                shared_places,
                tuple(requested),
                self._fields,
                prefix=self._link.address.prefix,
            )
            if len(self._requests) >= _MAX_KEPT:
                self._requests.clear()
            self._requests[key] = template
        parts: list[Any] = [template.start]
        for array, slot in zip(arrays, shared_places, strict=True):
            if slot is None:
                parts.append(array if array.flags.c_contiguous else np.ascontiguousarray(array))
        return template, parts
