"""Builds, starts and stops the service process."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from edgekit_runtime.service.answers.answer_path import AnswerPath
from edgekit_runtime.service.api.routes import Router
from edgekit_runtime.service.http.access import check_access, read_token
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.request_head import RequestHead
from edgekit_runtime.service.http.server import HttpServer
from edgekit_runtime.service.listening import Listening
from edgekit_runtime.service.models.registry import Registry
from edgekit_runtime.service.models.source import Source
from edgekit_runtime.service.monitor import Monitor
from edgekit_runtime.service.observability.metrics import ServiceMetrics
from edgekit_runtime.service.oip.shared_memory import Regions
from edgekit_runtime.service.options.config import ServiceConfig
from edgekit_runtime.service.options.resources import Power
from edgekit_runtime.service.scheduling.fair_pool import Pool, Threads
from edgekit_runtime.service.serving.lane_factory import LaneFactory
from edgekit_runtime.service.serving.load_deadline import count_hung
from edgekit_runtime.service.systemd import Notifier
from edgekit_runtime.service.workers.supervisor import Supervisor

if TYPE_CHECKING:
    from edgekit_runtime.service.api.fleet import FleetHandler
    from edgekit_runtime.service.api.routes import Route
    from edgekit_runtime.service.api.streams import StreamsHandler

UNLOAD_TIMEOUT_S: Final = 2.0  # after what was under way has been answered or given up

_logger = logging.getLogger(__name__)


class Service:
    """A service in one event loop.

    Attributes:
        registry: Loads, swaps and unloads the models.
        http: The HTTP server with its connections.
        pool: The threads of models that do not run on the event loop.
        answers: Handles requests that contain a picture or sound.
        workers: The worker processes of isolated models.
    """

    def __init__(
        self,
        config: ServiceConfig,
        source: Source,
        regions: Regions | None = None,
        *,
        tries_in_child: bool = False,
    ) -> None:
        """Create the parts of the service inside a running event loop. Nothing listens or loads yet.

        `regions` is the shared memory of clients, or None to create it. For `tries_in_child`, see
        `load_tested`.
        """
        loop = asyncio.get_running_loop()
        self._config = config
        self._token = None if config.listen.token_file is None else read_token(config.listen.token_file)
        self._regions = Regions(config.shared_memory) if regions is None else regions
        self._threads = Threads(loop, os.cpu_count() or 1)
        self.pool = Pool(self._threads, loop)
        self.metrics = ServiceMetrics()
        self.workers: Supervisor
        lanes = LaneFactory(loop, self.pool, self._regions, config)
        self.registry = Registry(
            source,
            lanes.make,
            config.models,
            # The workers are made below.
            open_remote=lambda package, options, beside: self.workers.open(package, options, beside),  # noqa: PLW0108
            memory=config.memory,
            metrics=self.metrics,
            drain_timeout_s=config.inference.drain_timeout_s,
            tries_in_child=tries_in_child,
        )
        self.answers = AnswerPath(loop, config.media)
        self._router = router = Router(
            self.registry,
            self._regions,
            self._write_metrics,
            answers=self.answers,
            limits=config.http,
            times=lanes.times,
            streams=self._find_route,
            samples=config.samples,
        )
        self._streams: StreamsHandler | None = None
        self._fleet: FleetHandler | None = None
        self._settings_file = config.fleet_streams.settings_file
        self._monitor: Monitor | None = None
        self.http = HttpServer(loop, router.handle_request, self._screen, config.http)
        self.workers = Supervisor(
            self.http, self._regions, config, self.registry, limits=source.limits, token=self._token
        )
        self._listening = Listening(self.http, config)

    async def listen(self) -> list[str]:
        """Start to accept connections, and return the addresses. The address of HTTP over TCP is last.

        Raises:
            TransportError: An address is in use or cannot be used.
            ConfigError: gRPC is configured, but support for it is not installed.
        """
        return self._listening.open(self._router, self.registry, token=self._token)

    async def stop(self) -> bool:
        """Answer the running requests, then free all resources.

        Returns:
            True if all work has ended. Otherwise some threads continue until the process ends.
        """
        self._listening.begin_stop()
        if self._monitor is not None:
            self._monitor.stop()
        self.workers.begin_stop()
        if self._streams is not None:
            await self._streams.streams.close()
        await self.http.drain(self._config.inference.stop_timeout_s)
        await self.workers.close()
        self.pool.stop()
        has_closed = True
        try:
            await asyncio.wait_for(self.registry.close(), UNLOAD_TIMEOUT_S)
        except asyncio.TimeoutError:
            _logger.error("a model did not unload in time; stopping without waiting for it")  # noqa: TRY400  # says all
            self.registry.abandon()
            has_closed = False
        self.http.close()  # what came back from workers too late
        has_ended = True
        for part in (self._threads, self._router, self.answers):
            has_ended &= part.close(UNLOAD_TIMEOUT_S / 3)
        if not has_ended:
            _logger.error("an inference did not end in time; stopping without waiting for it")
        self._regions.remove_all()
        return has_closed and has_ended and not count_hung()

    def _screen(self, connection: Connection, head: RequestHead) -> bool:
        """Refuse clients without access. Return whether the connection was passed to a worker."""
        if not connection.is_local:
            check_access(head, self._token)
        return self.workers.pass_on(connection, head)

    def _write_metrics(self) -> bytes:
        from edgekit_runtime.service.api.metrics_page import write_metrics  # which no worker needs

        connections = self.http.connection_count + self.http.lent
        restarts = self.workers.count_restarts()
        errors = self.http.error_counts
        families = () if self._streams is None else tuple(self._streams.streams.families())
        return write_metrics(
            self.registry.models.served(), self.metrics, connections, errors, (restarts, *families)
        ).encode()

    def find_streams(self) -> "StreamsHandler":
        """Return the handler of streams, which is created on first use."""
        if self._streams is None:
            from edgekit_runtime.service.api.streams import open_streams

            self._streams = open_streams(self._config, self.answers, self.registry, self.http)
        return self._streams

    def watch(self) -> None:
        """Start to check trials, sensors, governors and the fleet's orders once a second."""
        if self._monitor is None:
            power, loop = self._config.power, self.http.loop
            self._monitor = Monitor(self.registry.models, self.metrics, power, loop, self._follow_fleet)
            self._follow_fleet()

    def _follow_fleet(self) -> None:
        file = self._config.fleet_streams.file
        if file and (self._streams is not None or os.path.exists(file)):  # noqa: PTH110  # each second
            self.find_streams().follow_fleet()
        if file and (self._fleet is not None or os.path.exists(self._settings_file)):  # noqa: PTH110
            self._find_fleet().look()
        self.follow_samples()

    def _find_fleet(self) -> "FleetHandler":
        """Return the handler of the fleet's settings, which is created on first use."""
        if self._fleet is None:
            from pathlib import Path

            from edgekit_runtime.service.api.fleet import FleetHandler

            self._fleet = FleetHandler(Path(self._settings_file), self._config, self._limit_power)
        return self._fleet

    def _limit_power(self, power: Power) -> None:
        if self._monitor is not None:
            self._monitor.limit_power(power)

    def _find_route(self, parts: list[str]) -> "Route | None":
        if parts[1:2] != ["fleet"]:
            return self.find_streams().find(parts)
        return self._find_fleet().find(parts) if self._settings_file else None

    def follow_samples(self) -> None:
        """Apply the fleet's orders of samples if they have changed. This is called once a second."""
        self._router.follow_samples()


async def serve(
    config: ServiceConfig, source: Source, announce: Callable[[Sequence[str], Sequence[str]], None]
) -> bool:
    """Serve until SIGTERM, SIGINT or SIGHUP. SIGHUP is ignored under `nohup`.

    Args:
        config: The configuration of the service.
        source: The source of the packages.
        announce: Called when the models are loaded, with the addresses and the names of all models.

    Returns:
        True if all work has ended, see `Service.stop`.

    Raises:
        TransportError: An address is in use or cannot be used.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, stopping.set)
    notifier = Notifier(loop)
    is_python = not getattr(sys, "frozen", False)  # a program in one file cannot start another Python
    service = Service(config, source, tries_in_child=is_python)
    try:
        addresses = await service.listen()
        if config.streams:
            service.find_streams().streams.add_all(config.streams)
        notifier.notify_starting()
        loading = asyncio.ensure_future(service.registry.load_all())
        service.watch()

        def report(_: "asyncio.Future[None]") -> None:
            if loading.cancelled():
                return
            if loading.exception() is None:
                announce(addresses, list(service.registry.models.by_name))
                notifier.notify_ready(f"ready at {', '.join(addresses)}")
            else:
                stopping.set()  # where it is raised

        loading.add_done_callback(report)
        await stopping.wait()
        notifier.notify_stopping()
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loading
    finally:
        has_ended = await service.stop()
    return has_ended
