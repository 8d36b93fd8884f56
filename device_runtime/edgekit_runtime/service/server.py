"""The service as a process: everything wired together, started, and drained on SIGTERM."""

import asyncio
import contextlib
import functools
import hmac
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edgekit_runtime.errors import RequestError
from edgekit_runtime.service.config import ServiceConfig, read_token
from edgekit_runtime.service.connection import Connection
from edgekit_runtime.service.exposition import Family, lane_families, service_families, write_exposition
from edgekit_runtime.service.heads import Head
from edgekit_runtime.service.http import HttpServer
from edgekit_runtime.service.loading import Loaded
from edgekit_runtime.service.metrics import LaneMetrics, ServiceMetrics
from edgekit_runtime.service.oip import Codec
from edgekit_runtime.service.pool import Pool, Threads
from edgekit_runtime.service.registry import Registry, Served, Source
from edgekit_runtime.service.routes import Routes
from edgekit_runtime.service.scheduling import Scheduler
from edgekit_runtime.service.sharedmem import Regions
from edgekit_runtime.service.sockets import listen_tcp, listen_unix, take_inherited

if TYPE_CHECKING:
    from edgekit_runtime.service.tls import TlsListener

_UNLOAD_TIMEOUT_S: Final = 4.0  # after what was under way has been answered or given up

_logger = logging.getLogger(__name__)


class Service:
    """One service in one event loop.

    Attributes:
        registry: of its models.
        http: its connections.
        metrics: of the whole service; models have their own.
    """

    def __init__(self, config: ServiceConfig, source: Source) -> None:
        """Wire the service; nothing listens or loads yet. Called inside a running event loop."""
        loop = asyncio.get_running_loop()
        self._config = config
        self._token = None if config.listen.token_file is None else read_token(config.listen.token_file)
        self._regions = Regions(config.shared_memory)
        self._threads = Threads(loop, os.cpu_count() or 1)
        self._pool = Pool(self._threads)
        self.metrics = ServiceMetrics()
        self.registry = Registry(
            source,
            self._make_served,
            config.models,
            self.metrics,
            cap_bytes=config.inference.max_models_bytes,
        )
        routes = Routes(self.registry, self._regions, self._write_metrics)
        self.http = HttpServer(loop, routes.handle, self._screen, config.http)
        self._socket_path: Path | None = None
        self._tls: TlsListener | None = None

    async def listen(self) -> list[str]:
        """Accept connections from now on; returns where, for people.

        Raises:
            TransportError: an address is in use or cannot be used.
        """
        listen = self._config.listen
        inherited = take_inherited()
        listeners = list(inherited)
        if listen.unix_socket and not inherited:
            self._socket_path = Path(listen.unix_socket)
            listeners.append(listen_unix(self._socket_path))
        if listen.host and listen.tls_certificate is None:
            listeners.append(listen_tcp(listen.host, listen.port))
        for listener in listeners:
            self.http.listen(listener)
        addresses = [_name(listener) for listener in listeners]
        if listen.host and listen.tls_certificate is not None and listen.tls_key is not None:
            from edgekit_runtime.service.tls import TlsListener, make_context

            context = make_context(listen.tls_certificate, listen.tls_key)
            encrypted = listen_tcp(listen.host, listen.port)
            self._tls = TlsListener(self.http, encrypted, context)
            addresses.append(f"https://{_name(encrypted)}")
        return addresses

    async def stop(self) -> None:
        """Answer what is under way, then free everything."""
        if self._tls is not None:
            self._tls.close()
        if self._socket_path is not None:
            # While it listens, so that it is surely its own and not a successor's.
            self._socket_path.unlink(missing_ok=True)
        await self.http.drain(self._config.inference.drain_timeout_s)
        try:
            await asyncio.wait_for(self.registry.close(), _UNLOAD_TIMEOUT_S)
        except asyncio.TimeoutError:
            _logger.error("a model does not come to its end; stopping without it")  # noqa: TRY400  # says all
            self.registry.abandon()
        if not self._threads.close(_UNLOAD_TIMEOUT_S / 2):
            _logger.error("an inference does not come to its end; stopping without it")
        self._regions.remove_all()

    def _screen(self, connection: Connection, head: Head) -> bool:
        """Turn away who may not ask; always returns False, since no connection is released here."""
        if connection.is_local:
            return False
        if head.has_origin:
            # Any web page that is open on this machine can reach a loopback address.
            raise RequestError(403, "requests from web pages are refused: the Origin header is set")
        if self._token is None and head.has_foreign_host:
            # A page needs no Origin to read from its own name, which its owner can let point here.
            raise RequestError(403, "the Host header is not a name of this machine; use its address")
        if self._token is not None and not hmac.compare_digest(head.authorization or b"", self._token):
            raise RequestError(401, "the bearer token is missing or wrong; send Authorization: Bearer TOKEN")
        return False

    def _write_metrics(self) -> bytes:
        lanes = lane_families(served.metrics for served in self.registry.served())
        connections = Family(
            "edgekit_connections", "gauge", "Clients that are connected.", (({}, self.http.connection_count),)
        )
        return write_exposition([*lanes, *service_families(self.metrics), connections]).encode()

    def _make_served(self, loaded: Loaded) -> Served:
        manifest, session = loaded.manifest, loaded.instances[0]
        codec = Codec(
            manifest.name,
            manifest.version,
            inputs=session.inputs,
            outputs=session.outputs,
            regions=self._regions,
            max_json_bytes=self._config.inference.max_json_bytes,
        )
        metrics = LaneMetrics(manifest.name, manifest.version)
        lane = Scheduler(
            loaded.instances, loaded.scheduling, pool=self._pool, loop=self.http.loop, metrics=metrics
        )
        for run in loaded.warm_runs:
            lane.learn(run.size_bytes, run.seconds)
        return Served(loaded, codec, metrics, lane, lane)


async def serve(config: ServiceConfig, source: Source, announce: Callable[[Sequence[str]], None]) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        config: of the service.
        source: where packages lie.
        announce: called with the addresses once the models are loaded.

    Raises:
        TransportError: an address is in use or cannot be used.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    service = Service(config, source)
    try:
        addresses = await service.listen()
        loading = asyncio.ensure_future(service.registry.load_all())
        loading.add_done_callback(functools.partial(_announce, announce, addresses, stopping))
        await stopping.wait()
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loading
    finally:
        await service.stop()


def _announce(
    announce: Callable[[Sequence[str]], None],
    addresses: Sequence[str],
    stopping: asyncio.Event,
    loading: "asyncio.Future[None]",
) -> None:
    if loading.cancelled():
        return
    if loading.exception() is None:
        announce(addresses)
    else:
        stopping.set()  # where it is raised


def _name(listener: socket.socket) -> str:
    address = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{os.fsdecode(address)}"
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{host}:{address[1]}"
