"""Routes requests to their handlers, and handles requests about the server, models and the repository.

Source: KServe Open Inference Protocol v2 (HTTP/REST), and Triton's extensions model_repository, statistics
and shared_memory.
"""

import asyncio
import contextlib
import functools
import os
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import unquote

from edgekit_runtime import __version__
from edgekit_runtime.errors import RequestError
from edgekit_runtime.protocol.json_fields import load_small, take_field
from edgekit_runtime.service.answers.answer_path import AnswerPath
from edgekit_runtime.service.api.answer import AnswerHandler
from edgekit_runtime.service.api.compressed_bodies import CompressedBodies
from edgekit_runtime.service.api.descriptions import describe_model, describe_versions
from edgekit_runtime.service.api.shared_memory import SharedMemoryHandler
from edgekit_runtime.service.api.timed_inference import make_inference_handler
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.request_head import RequestHead
from edgekit_runtime.service.http.response import MethodError, make_head, make_json
from edgekit_runtime.service.models.catalogue import EvictedError
from edgekit_runtime.service.models.registry import Registry
from edgekit_runtime.service.observability.server_timing import RunTimes
from edgekit_runtime.service.oip.shared_memory import Regions
from edgekit_runtime.service.oip.time_slices import Slicer
from edgekit_runtime.service.options.config import SampleOptions
from edgekit_runtime.service.options.http import HttpLimits
from edgekit_runtime.system.tasks import Tasks

if TYPE_CHECKING:
    from edgekit_runtime.service.samples.fleet_samples import FleetSamples

Action: TypeAlias = Callable[[Connection, RequestHead, memoryview], None]
Route: TypeAlias = tuple[tuple[str, ...], Action]  # methods, and what handles them

_READ: Final = ("GET", "HEAD")
_WRITE: Final = ("POST",)
_EXTENSIONS: Final = tuple(
    "binary_tensor_data model_repository schedule_policy sequence shared_memory statistics".split()
)


class Router:
    """Passes each request to its handler.

    Attributes:
        bodies: Decompresses request bodies.
    """

    def __init__(
        self,
        registry: Registry,
        regions: Regions,
        metrics: Callable[[], bytes],
        *,
        answers: AnswerPath,
        limits: HttpLimits,
        times: RunTimes | None = None,
        streams: Callable[[list[str]], Route | None] | None = None,
        samples: SampleOptions,
    ) -> None:
        """Create the router.

        `times` are the times of calls, which responses state, or None. `streams` finds the route of a path
        for streams or for the fleet's agent, or is None.
        """
        self._registry, self._models = registry, registry.models
        loop = asyncio.get_running_loop()
        slicer = Slicer(loop, limits.max_sending_bytes)
        self.bodies = CompressedBodies(loop, limits)
        self.inference = make_inference_handler(registry.models, self._when_loaded, slicer, answers, times)
        self._answers = AnswerHandler(registry.models, self._when_loaded, answers)
        self._memory = SharedMemoryHandler(regions)
        self._metrics = metrics
        self._find_streams = streams
        self._sample_options, self._loop = samples, loop
        self._samples: FleetSamples | None = None
        self._tasks = Tasks()

    def handle_request(self, connection: Connection, head: RequestHead, body: memoryview) -> None:
        """Handle a request, and store its handler in `head.route` for later requests with the same head.

        Raises:
            EdgekitError: The error to respond with.
        """
        parts = [unquote(part) for part in head.path.strip("/").split("/")]
        route = self._find(parts)
        if route is None:
            raise RequestError(404, f"there is nothing at {head.path[:200]}")
        methods, action = route
        if head.method not in methods:
            raise MethodError(head.method, head.path[:200], methods)
        if head.content_coding:
            action = self.bodies.decode(action)
        head.route = action
        action(connection, head, body)

    def close(self, timeout_s: float) -> bool:
        """Stop the threads that decompress bodies and store samples, and return whether they have ended."""
        has_stored = self._samples is None or self._samples.close()
        return self.bodies.close(timeout_s) and has_stored

    def follow_samples(self) -> None:
        """Apply the fleet's orders for samples if they have changed. Called once a second."""
        file = self._sample_options.file
        if self._samples is not None or (file and os.path.exists(file)):  # noqa: PTH110  # each second
            self._find_samples().look()

    def _find(self, parts: list[str]) -> Route | None:
        bind, memory = functools.partial, self._memory
        match parts:
            case ["v2"]:
                return _READ, _respond_with(self._describe_server)
            case ["v2", "health", "live"]:
                return _READ, _respond_with(lambda: {"live": True})
            case ["v2", "health", "ready"]:
                return _READ, self._respond_ready
            case ["metrics"]:
                return _READ, self._respond_metrics
            case ["v2", "streams" | "fleet", *_] | ["live", *_] if self._find_streams is not None:
                return self._find_streams(parts)
            case ["v2", "samples"]:
                return _READ, _respond_with(self._describe_samples)
            case ["v2", "models", "stats"]:
                return _READ, _respond_with(lambda: describe_versions(self._models.served()))
            case ["v2", "models", name, "versions", version, *rest] if len(rest) <= 1:
                return self._find_model(name, version, rest)
            case ["v2", "models", name, *rest] if len(rest) <= 1:
                return self._find_model(name, None, rest)
            case ["v2", "repository", "index"]:
                return _WRITE, self._respond_index
            case ["v2", "repository", "models", name, "load"]:
                return _WRITE, bind(self._change, self._load, name)
            case ["v2", "repository", "models", name, "unload"]:
                return _WRITE, bind(self._change, self._unload, name)
            case ["v2", "systemsharedmemory", "status"]:
                return _READ, bind(memory.respond_status, None)
            case ["v2", "systemsharedmemory", "region", name, "status"]:
                return _READ, bind(memory.respond_status, name)
            case ["v2", "systemsharedmemory", "region", name, "register"]:
                return _WRITE, bind(memory.register, name)
            case ["v2", "systemsharedmemory", "region", name, "unregister"]:
                return _WRITE, bind(memory.unregister, name)
            case ["v2", "systemsharedmemory", "unregister"]:
                return _WRITE, bind(memory.unregister, None)
        return None

    def _find_model(self, name: str, version: str | None, segments: list[str]) -> Route | None:
        match segments:
            case ["infer"]:
                return _WRITE, functools.partial(self.inference.handle_request, name, version)
            case ["answer"]:
                return _WRITE, functools.partial(self._answers.handle_request, name, version)
            case ["keep"] if version is None:
                return _WRITE, functools.partial(self._keep, name)
            case []:
                return _READ, functools.partial(self._respond_model, name, version)
            case ["ready"]:
                return _READ, _respond_with(lambda: self._describe_ready(name, version))
            case ["stats"]:
                return _READ, _respond_with(lambda: describe_versions([self._models.find(name, version)]))
        return None

    def _respond_ready(self, connection: Connection, _head: RequestHead, _body: memoryview) -> None:
        is_ready = self._models.is_ready()
        connection.respond(*make_json({"ready": is_ready}, 200 if is_ready else 503))

    def _respond_metrics(self, connection: Connection, _head: RequestHead, _body: memoryview) -> None:
        from edgekit_runtime.service.observability.prometheus import CONTENT_TYPE  # which no worker needs

        text = self._metrics()
        connection.respond(make_head(200, CONTENT_TYPE, len(text)), text)

    def _respond_index(self, connection: Connection, _head: RequestHead, body: memoryview) -> None:
        wants_ready = len(body) > 0 and load_small(body).get("ready") is True

        async def respond() -> None:
            lines = [
                {"name": line.name, "version": line.version, "state": line.state, "reason": line.reason}
                for line in await self._registry.index()
                if not wants_ready or line.state == "READY"
            ]
            connection.respond(*make_json(lines))

        self._tasks.start(respond(), connection.respond_error)

    def _respond_model(
        self, name: str, version: str | None, connection: Connection, head: RequestHead, body: memoryview
    ) -> None:
        try:
            described = self._describe_model(name, version)
        except EvictedError:
            again = functools.partial(self._respond_model, name, version, connection, head, body)
            self._when_loaded(name, connection, again)
            return
        connection.respond(*make_json(described))

    def _change(
        self,
        change: Callable[[str, dict[str, Any]], Coroutine[Any, Any, None]],
        name: str,
        connection: Connection,
        _head: RequestHead,
        body: memoryview,
    ) -> None:
        """Load or unload a model; respond once that is done."""
        stated = take_field(load_small(body), "parameters", "the request", dict, {}) if len(body) else {}
        if "config" in stated or any(key.startswith("file:") for key in stated):
            raise RequestError(
                400, "models come from signed packages: config and files in a request are refused"
            )

        async def respond() -> None:
            await change(name, stated)
            connection.respond(*make_json({}))

        self._tasks.start(respond(), connection.respond_error)

    async def _load(self, name: str, stated: dict[str, Any]) -> None:
        rollout = take_field(stated, "rollout", "parameters", str, "") or None
        await self._registry.load(name, rollout=rollout)

    async def _unload(self, name: str, _stated: dict[str, Any]) -> None:
        await self._registry.unload(name)

    def _when_loaded(self, name: str, connection: Connection, act: Callable[[], None]) -> None:
        """Call `act` once a model that was unloaded for others is loaded again."""

        async def wait() -> None:
            await self._registry.wait_for(name)
            act()

        self._tasks.start(wait(), connection.respond_error)

    def _describe_server(self) -> dict[str, Any]:
        extensions = [*_EXTENSIONS, *(["system_shared_memory"] if self._memory.allows_posix else [])]
        return {"name": "edgekit", "version": __version__, "extensions": extensions}

    def _find_samples(self) -> "FleetSamples":
        """Return the sampler, created at its first use: most services take no samples."""
        if self._samples is None:
            from edgekit_runtime.service.samples.fleet_samples import FleetSamples

            self._samples = FleetSamples(self._sample_options, self._models, self._loop)
        return self._samples

    def _describe_samples(self) -> dict[str, Any]:
        return self._find_samples().to_json()

    def _keep(self, name: str, connection: Connection, _head: RequestHead, body: memoryview) -> None:
        """Store a recent request as a sample: by the identifier in the body, or the last one."""
        request_id = take_field(load_small(body), "id", "the request", str, "") if len(body) else ""
        sample_id = self._find_samples().keep(name, request_id or None)
        connection.respond(*make_json({"sample": sample_id}))

    def _describe_ready(self, name: str, version: str | None) -> dict[str, Any]:
        with contextlib.suppress(EvictedError):  # its next request loads it
            self._models.find(name, version)
        return {"name": name, "ready": True}

    def _describe_model(self, name: str, version: str | None) -> dict[str, Any]:
        served = self._models.find(name, version)
        return {"name": name, "versions": self._models.versions_of(name), **describe_model(served)}


def _respond_with(make: Callable[[], dict[str, Any]]) -> Action:
    """Return an action that responds with the result of `make` as JSON."""

    def act(connection: Connection, _head: RequestHead, _body: memoryview) -> None:
        connection.respond(*make_json(make()))

    return act
