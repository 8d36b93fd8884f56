"""Which request goes where: the addresses of the protocol, and what answers them.

Source: KServe Open Inference Protocol v2 (HTTP/REST); Triton's extensions model_repository, statistics and
    shared_memory.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from edgekit_runtime import __version__
from edgekit_runtime.errors import EdgekitError, RequestError
from edgekit_runtime.service.answers import MethodError, make_error, make_head, make_json
from edgekit_runtime.service.call import Answer, Call
from edgekit_runtime.service.connection import Connection
from edgekit_runtime.service.datatypes import DATATYPE_OF_DTYPE
from edgekit_runtime.service.exposition import CONTENT_TYPE
from edgekit_runtime.service.heads import Head
from edgekit_runtime.service.infer_request import load_object, take_count
from edgekit_runtime.service.model import EvictedError
from edgekit_runtime.service.registry import Registry
from edgekit_runtime.service.served import Served
from edgekit_runtime.service.sharedmem import Region, Regions
from edgekit_runtime.service.statistics import describe_statistics
from edgekit_runtime.tensors import TensorSpec

Action: TypeAlias = Callable[[Connection, Head, memoryview], None]

_READ: Final = ("GET", "HEAD")
_WRITE: Final = ("POST",)
_EXTENSIONS: Final = (
    *("binary_tensor_data", "model_repository", "schedule_policy", "shared_memory", "statistics"),
    "system_shared_memory",
)
_MAX_SMALL_BYTES: Final = 64 << 10

_logger = logging.getLogger(__name__)


class Routes:
    """Answers requests from the registry."""

    def __init__(self, registry: Registry, regions: Regions, metrics: Callable[[], bytes]) -> None:
        """Make the routes.

        Args:
            registry: of the models.
            regions: shared memory of clients.
            metrics: writes the text for Prometheus.
        """
        self._registry, self._models = registry, registry.models
        self._regions = regions
        self._metrics = metrics
        self._owned: dict[Connection, list[Region]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, connection: Connection, head: Head, body: memoryview) -> None:
        """Answer the first request with this head, now or later; further ones go where `head.route` says.

        Raises:
            EdgekitError: the answer is this error.
        """
        action = head.route = self._resolve(head)
        action(connection, head, body)

    def _resolve(self, head: Head) -> Action:
        parts = [unquote(part) for part in head.path.strip("/").split("/")]
        found = self._find(parts)
        if found is None:
            raise RequestError(404, f"there is nothing at {head.path[:200]}")
        methods, action = found
        if head.method not in methods:
            raise MethodError(head.method, head.path[:200], methods)
        return action

    def _find(self, parts: list[str]) -> tuple[tuple[str, ...], Action] | None:
        match parts:
            case ["v2"]:
                return _READ, _reply_with(self._describe_server)
            case ["v2", "health", "live"]:
                return _READ, _reply_with(lambda: {"live": True})
            case ["v2", "health", "ready"]:
                return _READ, self._answer_ready
            case ["metrics"]:
                return _READ, self._answer_metrics
            case ["v2", "models", "stats"]:
                return _READ, _reply_with(lambda: _describe_statistics(self._models.served()))
            case ["v2", "models", name, "versions", version, *rest] if len(rest) <= 1:
                return self._find_model(name, version, rest)
            case ["v2", "models", name, *rest] if len(rest) <= 1:
                return self._find_model(name, None, rest)
            case ["v2", "repository", "index"]:
                return _WRITE, self._answer_index
            case ["v2", "repository", "models", name, "load"]:
                return _WRITE, functools.partial(self._change, self._registry.load, name)
            case ["v2", "repository", "models", name, "unload"]:
                return _WRITE, functools.partial(self._change, self._registry.unload, name)
            case ["v2", "systemsharedmemory", *rest]:
                return self._find_memory(rest)
        return None

    def _find_model(
        self, name: str, version: str | None, rest: list[str]
    ) -> tuple[tuple[str, ...], Action] | None:
        match rest:
            case ["infer"]:
                return _WRITE, functools.partial(self._infer, name, version)
            case []:
                return _READ, functools.partial(self._answer_model, name, version)
            case ["ready"]:
                return _READ, _reply_with(lambda: self._describe_ready(name, version))
            case ["stats"]:
                return _READ, _reply_with(lambda: _describe_statistics([self._models.find(name, version)]))
        return None

    def _find_memory(self, rest: list[str]) -> tuple[tuple[str, ...], Action] | None:
        match rest:
            case ["status"]:
                return _READ, functools.partial(self._answer_regions, None)
            case ["region", name, "status"]:
                return _READ, functools.partial(self._answer_regions, name)
            case ["region", name, "register"]:
                return _WRITE, functools.partial(self._register, name)
            case ["region", name, "unregister"]:
                return _WRITE, functools.partial(self._unregister, name)
            case ["unregister"]:
                return _WRITE, functools.partial(self._unregister, None)
        return None

    # Inference

    def _infer(
        self, name: str, version: str | None, connection: Connection, head: Head, body: memoryview
    ) -> None:
        try:
            served = self._models.find(name, version)
        except EvictedError:
            self._when_loaded(
                name, connection, functools.partial(self._infer, name, version, connection, head, body)
            )
            return
        codec = served.codec
        is_local = connection.is_local
        plan, inputs = codec.decode(body, head.json_bytes, is_local=is_local)
        held = codec.hold(plan, is_local=is_local)

        def reply(answer: Answer) -> None:
            if isinstance(answer, EdgekitError):
                connection.answer(*make_error(answer))
                return
            try:
                head, data = codec.encode(plan, answer, held)
            except EdgekitError as error:
                connection.answer(*make_error(error))
                return
            except Exception:  # of a third party's backend that returned what is no tensor
                _logger.exception("the outputs of %s are not what its package says", name)
                connection.answer(*make_error(RequestError(500, "the model's outputs cannot be sent")))
                return
            connection.answer(head, *data)

        deadline_s = None if plan.timeout_us is None else time.monotonic() + plan.timeout_us / 1e6
        served.lane.submit(Call(inputs, reply, plan.priority, deadline_s))

    def _when_loaded(self, name: str, connection: Connection, act: Callable[[], None]) -> None:
        """Do `act` once a model is loaded again that was unloaded for others."""

        async def wait() -> None:
            try:
                await self._registry.wait_for(name)
                act()
            except EdgekitError as error:
                connection.answer(*make_error(error))
            except Exception:
                _logger.exception("loading model '%s' for a request failed inside the service", name)
                connection.answer(*make_error(RequestError(500, "the service failed; its log says why")))

        self._start(wait())

    # Everything else

    def _answer_ready(self, connection: Connection, _head: Head, _body: memoryview) -> None:
        is_ready = self._models.is_ready()
        connection.answer(*make_json({"ready": is_ready}, 200 if is_ready else 503))

    def _answer_metrics(self, connection: Connection, _head: Head, _body: memoryview) -> None:
        text = self._metrics()
        connection.answer(make_head(200, CONTENT_TYPE, len(text)), text)

    def _answer_index(self, connection: Connection, _head: Head, body: memoryview) -> None:
        wants_ready = len(body) > 0 and _load_small(body).get("ready") is True

        async def list_models() -> list[dict[str, str]]:
            return [
                {"name": line.name, "version": line.version, "state": line.state, "reason": line.reason}
                for line in await self._registry.index()
                if not wants_ready or line.state == "READY"
            ]

        self._answer_later(connection, list_models(), "listing the models")

    def _describe_server(self) -> dict[str, Any]:
        return {"name": "edgekit", "version": __version__, "extensions": list(_EXTENSIONS)}

    def _answer_model(
        self, name: str, version: str | None, connection: Connection, head: Head, body: memoryview
    ) -> None:
        try:
            described = self._describe_model(name, version)
        except EvictedError:
            again = functools.partial(self._answer_model, name, version, connection, head, body)
            self._when_loaded(name, connection, again)
            return
        connection.answer(*make_json(described))

    def _describe_ready(self, name: str, version: str | None) -> dict[str, Any]:
        with contextlib.suppress(EvictedError):  # its next request loads it
            self._models.find(name, version)
        return {"name": name, "ready": True}

    def _describe_model(self, name: str, version: str | None) -> dict[str, Any]:
        served = self._models.find(name, version)
        manifest = served.loaded.manifest
        return {
            "name": name,
            "versions": self._models.versions_of(name),
            "platform": f"edgekit_{manifest.backend.name}",
            "inputs": [_describe_tensor(spec) for spec in served.codec.inputs],
            "outputs": [_describe_tensor(spec) for spec in served.codec.outputs],
        }

    def _change(
        self,
        change: Callable[[str], Coroutine[Any, Any, None]],
        name: str,
        connection: Connection,
        _head: Head,
        body: memoryview,
    ) -> None:
        """Load or unload; the answer comes when that is done."""
        stated = _load_small(body).get("parameters", {}) if len(body) else {}
        if (
            not isinstance(stated, dict)
            or "config" in stated
            or any(key.startswith("file:") for key in stated)
        ):
            raise RequestError(
                400, "models come from signed packages: config and files in a request are refused"
            )

        self._answer_later(connection, change(name), f"changing model '{name}'")

    def _answer_later(self, connection: Connection, work: Coroutine[Any, Any, Any], what: str) -> None:
        """Answer with the JSON of what `work` returns; nothing becomes an empty object."""

        async def act() -> None:
            try:
                value = await work
            except EdgekitError as error:
                connection.answer(*make_error(error))
            except Exception:
                _logger.exception("%s failed inside the service", what)
                connection.answer(*make_error(RequestError(500, "the service failed; its log says why")))
            else:
                connection.answer(*make_json({} if value is None else value))

        self._start(act())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _register(self, name: str, connection: Connection, _head: Head, body: memoryview) -> None:
        stated = _load_small(body)
        key = stated.get("key")
        if not isinstance(key, str) or not 1 <= len(name) <= 256:
            raise RequestError(
                400, f"region '{name[:80]}': expected a name, a key, byte_size and maybe offset"
            )
        offset_bytes = take_count(stated, "offset", f"region '{name}'", 0)
        size_bytes = take_count(stated, "byte_size", f"region '{name}'")
        if connection.descriptors:
            region = self._regions.add_memfd(
                name, key, connection.descriptors[0], offset_bytes=offset_bytes, size_bytes=size_bytes
            )
            del connection.descriptors[0]  # the region's from now on
            self._own(connection, region)
        else:
            self._regions.add_posix(name, key, offset_bytes=offset_bytes, size_bytes=size_bytes)
        connection.answer(*make_json({}))

    def _answer_regions(
        self, name: str | None, connection: Connection, _head: Head, _body: memoryview
    ) -> None:
        is_local = connection.is_local
        regions = self._regions.of(is_local=is_local)
        found = regions if name is None else [self._regions.find(name, is_local=is_local)]
        connection.answer(*make_json([_describe_region(region) for region in found]))

    def _unregister(self, name: str | None, connection: Connection, _head: Head, _body: memoryview) -> None:
        """Forget one region or all; one that this client cannot use is left alone."""
        for region in self._regions.of(is_local=connection.is_local):
            if name is None or region.name == name:
                self._regions.remove(region)
        connection.answer(*make_json({}))

    def _own(self, connection: Connection, region: Region) -> None:
        """Let `region` end with the connection: a client that dies unregisters nothing."""
        if connection not in self._owned:  # one that was lent and came back still has what it owned before
            connection.on_close = functools.partial(self._disown, connection, connection.on_close)
        owned = self._owned.get(connection, ())
        # Without those that were unregistered meanwhile, whose mappings end with the last reference.
        self._owned[connection] = [*(one for one in owned if one.descriptor >= 0), region]

    def _disown(self, connection: Connection, further: Callable[[], None] | None) -> None:
        for region in self._owned.pop(connection, ()):
            self._regions.remove(region)
        if further is not None:
            further()


def _load_small(body: memoryview) -> dict[str, Any]:
    """Return the JSON object of a request that is no inference; more than some lines would hold up the loop.

    Raises:
        RequestError: it is none, or too long.
    """
    if len(body) > _MAX_SMALL_BYTES:
        raise RequestError(413, f"the body has {len(body)} bytes, the limit here is {_MAX_SMALL_BYTES}")
    return load_object(bytes(body), "the request")


def _reply_with(make: Callable[[], Any]) -> Action:
    """Return an action that answers with the JSON of what `make` returns; nothing becomes an empty object."""

    def act(connection: Connection, _head: Head, _body: memoryview) -> None:
        value = make()
        connection.answer(*make_json({} if value is None else value))

    return act


def _describe_tensor(spec: TensorSpec) -> dict[str, Any]:
    shape = [size if isinstance(size, int) else -1 for size in spec.shape]
    return {"name": spec.name, "datatype": DATATYPE_OF_DTYPE[spec.dtype], "shape": shape}


def _describe_statistics(served: Sequence[Served]) -> dict[str, Any]:
    document = describe_statistics(one.metrics for one in served)
    for entry, one in zip(document["model_stats"], served, strict=True):
        entry.update(one.to_json())
    return document


def _describe_region(region: Region) -> dict[str, Any]:
    return {
        "name": region.name,
        "key": region.key,
        "offset": region.offset_bytes,
        "byte_size": region.size_bytes,
    }
