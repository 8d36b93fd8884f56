"""All isolated models of a service: opened from packages, found by requests, ended."""

import asyncio
import dataclasses
import logging
import os
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong
from typing import TYPE_CHECKING, Final

from edgekit_runtime.errors import EdgekitError, PackageError, UnavailableError
from edgekit_runtime.package.archive import Limits, OpenedPackage
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.protocol.rest import parse_infer_path
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.request_head import RequestHead
from edgekit_runtime.service.http.server import HttpServer
from edgekit_runtime.service.observability.prometheus import Family
from edgekit_runtime.service.oip.shared_memory import Region, Regions
from edgekit_runtime.service.options.config import Listen, ServiceConfig
from edgekit_runtime.service.options.model import Isolation, ModelOptions
from edgekit_runtime.service.options.resources import ModelMemory
from edgekit_runtime.service.rollout.trial import find_difference
from edgekit_runtime.service.serving.loader import Loaded
from edgekit_runtime.service.worker_wire.messages import Given, Order
from edgekit_runtime.service.workers.remote_model import IsolatedLane
from edgekit_runtime.system.resource_errors import check_lack

if TYPE_CHECKING:
    from edgekit_runtime.service.models.registry import Registry
    from edgekit_runtime.service.workers.process_group import IsolatedModel

_POLL_S: Final = 0.005
OWN_SHARE: Final = 0.8  # of `start_timeout_s` may a version be loading
_TRIES: Final = 3  # to load a version for the first time
_SPARE_S: Final = 30.0  # for the waits between them, and for processes to end
_RETRY_AFTER_S: Final = 1.0

_logger = logging.getLogger(__name__)


class Workers:
    """The isolated models of one service; on the thread of its loop but for `open`."""

    def __init__(
        self, http: HttpServer, regions: Regions, config: ServiceConfig, limits: Limits, token: bytes | None
    ) -> None:
        """Make it without workers.

        Args:
            http: whose connections are lent.
            regions: shared memory of clients.
            config: of the service.
            limits: of reading packages.
            token: that clients over TCP must send, or None.
        """
        self._http, self._regions, self._config = http, regions, config
        self._limits, self._token = limits, token
        self._names = {name for name, options in config.models.items() if options.isolated}
        self._models: dict[IsolatedModel, Future[IsolatedLane]] = {}
        self._ended: list[IsolatedModel] = []
        self._is_over = False
        self._tasks: set[asyncio.Future[None]] = set()
        self.served: Registry | None = None
        regions.on_add, regions.on_remove = self._add_region, self._remove_region

    @property
    def models(self) -> "tuple[IsolatedModel, ...]":
        """All that were opened and not ended."""
        return tuple(self._models)

    def open(self, package: OpenedPackage, options: ModelOptions, beside: Loaded | None) -> IsolatedLane:
        """Return the model of `package`, loaded in a process of its own; waits for that, on another thread.

        Args:
            package: verified.
            options: of the model.
            beside: a version in use, in whose process this one is to be tried; or None.

        Raises:
            BackendError: it cannot be loaded there.
            PackageError: the package cannot be read again.
            UnavailableError: it cannot be loaded now, which says nothing of the package.
        """
        isolation = options.isolation
        manifest = package.manifest
        if beside is None:
            return self._open_process(package, options, isolation)
        remote = beside.remote
        current = next((model for model in self.models if remote is model.lane), None)
        if current is None:
            reason = "it needs a process of its own, and the version in use has none to try it in"
            raise _not_now(manifest, f"{reason}; set isolated = true, or rollout to swap")
        if manifest.version == beside.manifest.version or find_difference(beside.manifest, manifest):
            return IsolatedLane(current, manifest)  # there is nothing to try, as the caller will find
        return self._open_beside(package, current, isolation)

    def may_take(self, head: RequestHead) -> bool:
        """Return whether requests with this head can be for an isolated model."""
        target = parse_infer_path(head.path)
        return target is not None and target[0] in self._names

    def pass_on(self, connection: Connection, head: RequestHead) -> bool:
        """Return whether the request was passed to a worker, together with its connection."""
        target = parse_infer_path(head.path)
        if target is None or self.served is None:
            return False
        remote = self.served.find_remote(*target)
        return remote is not None and remote.lend(connection, is_default=target[1] is None)

    def begin_stop(self) -> None:
        """Have the connections back, and open nothing more."""
        self._is_over = True
        for model, opened in list(self._models.items()):
            if opened.done():
                model.drain(model.lane, _nothing)
            else:
                model.end()
                opened.cancel()

    async def close(self) -> None:
        """End all processes, and wait until they have ended."""
        for model in self.models:
            model.end()
        while not all(model.is_over for model in self._ended):
            await asyncio.sleep(_POLL_S)

    def count_restarts(self) -> Family:
        """Return how often workers were started after a crash, for Prometheus."""
        counts = tuple(
            ({"model": one.lane.manifest.name, "version": one.lane.manifest.version}, one.restarts)
            for one in self._models
        )
        return Family(
            "edgekit_worker_restarts_total",
            "counter",
            "How often a model's process was started again after it was lost.",
            counts,
        )

    # What models tell

    def on_started(self, model: "IsolatedModel", error: EdgekitError | None) -> None:
        """Let `open` return."""
        opened = self._models[model]
        if not opened.set_running_or_notify_cancel():
            model.end()  # nobody waits for it any more
        elif error is None:
            opened.set_result(model.lane)
        else:
            opened.set_exception(error)

    def on_crash(self, model: "IsolatedModel", reason: str, *, is_loop: bool) -> None:
        """Doubt the version, and give it up where it keeps crashing."""
        if self.served is None:
            return
        name, version = model.lane.manifest.name, model.lane.manifest.version
        self.served.put_off(name, version)
        if is_loop:
            task = asyncio.ensure_future(self.served.give_up(name, version, reason))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def on_end(self, model: "IsolatedModel") -> None:
        """Forget it, but for its processes that have not ended yet."""
        self._models.pop(model, None)
        self._ended = [each for each in (*self._ended, model) if not each.is_over]

    def _open_process(
        self, package: OpenedPackage, options: ModelOptions, isolation: Isolation
    ) -> IsolatedLane:
        opened: Future[IsolatedLane] = Future()
        order = self._make_order(package, options, isolation)
        descriptor = _open_again(package)
        self._http.loop.call_soon_threadsafe(self._begin, package.manifest, order, descriptor, opened)
        return _wait_for(opened, package.manifest, _TRIES * isolation.start_timeout_s + _SPARE_S)

    def _open_beside(
        self, package: OpenedPackage, current: "IsolatedModel", isolation: Isolation
    ) -> IsolatedLane:
        opened: Future[IsolatedLane] = Future()
        given = _describe(package)
        descriptor = _open_again(package)
        self._http.loop.call_soon_threadsafe(current.try_beside, package.manifest, given, descriptor, opened)
        return _wait_for(opened, package.manifest, isolation.start_timeout_s + _SPARE_S)

    def _begin(
        self, manifest: Manifest, order: Order, descriptor: int, opened: "Future[IsolatedLane]"
    ) -> None:
        if self._is_over:
            os.close(descriptor)
            opened.cancel()
            return
        if manifest.name not in self._names:  # for what the package holds, not by the configuration
            self._names.add(manifest.name)
            self._http.clearance += 1
        model: IsolatedModel | None = None
        try:
            from edgekit_runtime.service.workers import (
                process_group,  # most services have none
            )

            model = process_group.IsolatedModel(
                self._http, self._regions, manifest, order, package=descriptor, workers=self
            )
            self._models[model] = opened
            model.begin()
        except Exception as cause:  # the thread that loads all models waits for this
            _logger.exception("%s %s: its process cannot be started", manifest.name, manifest.version)
            if model is None:
                os.close(descriptor)
            else:
                model.end()
            if opened.set_running_or_notify_cancel():
                opened.set_exception(_not_now(manifest, repr(cause)))

    def _make_order(self, package: OpenedPackage, options: ModelOptions, isolation: Isolation) -> Order:
        # Less than the process has, which then says why it refuses a version, and need not be killed.
        limit_s = OWN_SHARE * isolation.start_timeout_s
        limit_s = min(limit_s, options.load_timeout_s or limit_s)
        alone = dataclasses.replace(options, isolated=False, load_timeout_s=limit_s)
        config = dataclasses.replace(
            self._config,
            listen=Listen(unix_socket="-", host=""),
            memory=ModelMemory(),
            models={package.manifest.name: alone},
        )
        return Order(
            config=config,
            isolation=isolation,
            name=package.manifest.name,
            given=_describe(package),
            limits=self._limits,
            token=None if self._token is None else self._token.decode("ascii"),
            connections=self._config.http.max_connections,
        )

    def _add_region(self, region: Region) -> None:
        for model in self._models:
            model.lives.add_region(region)

    def _remove_region(self, name: str) -> None:
        for model in self._models:
            model.lives.remove_region(name)


def _describe(package: OpenedPackage) -> Given:
    manifest = package.manifest
    return Given(manifest.version, manifest.sha256)


def _open_again(package: OpenedPackage) -> int:
    """Return a descriptor of the file, which a worker finds unchanged whenever it is started."""
    try:
        return os.open(package.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as cause:
        check_lack(cause, f"cannot read package {package.path}")
        raise PackageError(f"cannot read package {package.path}: {cause.strerror}") from cause


def _wait_for(opened: "Future[IsolatedLane]", manifest: Manifest, limit_s: float) -> IsolatedLane:
    try:
        return opened.result(limit_s)
    except WaitedTooLong:
        if not opened.cancel():
            return opened.result()  # it came just now
        raise _not_now(manifest, f"no word of it for {limit_s:g} s") from None


def _not_now(manifest: Manifest, reason: str) -> UnavailableError:
    text = f"{manifest.name} {manifest.version} cannot be loaded in a process of its own: {reason}"
    return UnavailableError(f"{text}; load it again later", _RETRY_AFTER_S)


def _nothing() -> None:
    pass
