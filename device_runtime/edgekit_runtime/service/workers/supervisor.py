"""All isolated models of a service: opened from packages, found by requests, ended."""

import asyncio
import dataclasses
import functools
import logging
import os
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as WaitedTooLong
from typing import TYPE_CHECKING, Final, Protocol

from edgekit_runtime.errors import PackageError, UnavailableError
from edgekit_runtime.package.archive import Limits, OpenedPackage
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.protocol.rest import parse_infer_path
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.request_head import RequestHead
from edgekit_runtime.service.http.server import HttpServer
from edgekit_runtime.service.observability.prometheus import MetricFamily
from edgekit_runtime.service.oip.shared_memory import Region, Regions
from edgekit_runtime.service.options.config import Listen, ServiceConfig
from edgekit_runtime.service.options.model import ModelOptions
from edgekit_runtime.service.options.resources import ModelMemory
from edgekit_runtime.service.rollout.trial import find_difference
from edgekit_runtime.service.serving.loader import Loaded
from edgekit_runtime.service.serving.remote import RemoteVersion
from edgekit_runtime.service.worker_wire.messages import VerifiedPackage, WorkerSpec
from edgekit_runtime.system.resource_errors import check_lack

if TYPE_CHECKING:
    from edgekit_runtime.service.workers.remote_model import RemoteModel

_POLL_S: Final = 0.005
OWN_SHARE: Final = 0.8  # of `start_timeout_s` may a version be loading
_TRIES: Final = 3  # to load a version for the first time
_SPARE_S: Final = 30.0  # for the waits between them, and for processes to end
_RETRY_AFTER_S: Final = 1.0

_logger = logging.getLogger(__name__)


class Versions(Protocol):
    """The versions that the service serves."""

    def find_remote(self, name: str, version: str | None) -> RemoteVersion | None:
        """Return a version in worker processes, or None if it is not ready or not there."""

    def report_crash(self, name: str, version: str, reason: str, *, is_loop: bool) -> None:
        """Wait again before a version that crashed counts as good; replace one that crashes in a loop."""


class Supervisor:
    """The isolated models of one service; on the thread of its loop but for `open`.

    Attributes:
        versions: the versions that requests are for; None until the service has them.
    """

    def __init__(
        self, http: HttpServer, regions: Regions, config: ServiceConfig, limits: Limits, token: bytes | None
    ) -> None:
        """Begin without workers.

        Args:
            http: the HTTP server whose connections are lent.
            regions: shared memory of clients.
            config: configuration of the service.
            limits: limits of reading packages.
            token: the token that clients over TCP must send, or None.
        """
        self._http, self._regions, self._config = http, regions, config
        self._limits, self._token = limits, token
        self._names = {name for name, options in config.models.items() if options.isolated}
        self._models: list[RemoteModel] = []  # also those on trial, and those of which a process still ends
        self._is_over = False
        self.versions: Versions | None = None
        regions.on_add, regions.on_remove = self._add_region, self._remove_region

    @property
    def models(self) -> "tuple[RemoteModel, ...]":
        """The versions in use."""
        return tuple(model for model in self._models if model.is_in_use)

    def open(self, package: OpenedPackage, options: ModelOptions, beside: Loaded | None) -> "RemoteModel":
        """Return the model of `package`, loaded in a process of its own; waits for that, on another thread.

        Args:
            package: verified.
            options: options of the model.
            beside: a version in use, in whose process this one is to be tried; or None.

        Raises:
            BackendError: it cannot be loaded there.
            PackageError: the package cannot be read again.
            UnavailableError: it cannot be loaded now, which says nothing of the package.
        """
        manifest = package.manifest
        if beside is None:
            spec = self._make_spec(package, options)
            return self._open(package, spec, _TRIES * spec.isolation.start_timeout_s)
        host = next((model for model in self.models if model is beside.remote), None)
        if host is None:
            reason = "it needs a process of its own, and the version in use has none to try it in"
            raise _unavailable(manifest, f"{reason}; set isolated = true, or rollout to swap")
        spec = dataclasses.replace(host.spec, package=VerifiedPackage(manifest.version, manifest.sha256))
        if manifest.version == beside.manifest.version or find_difference(beside.manifest, manifest):
            return self._make_model(
                manifest, spec, -1, Future()
            )  # there is nothing to try, as the caller finds
        return self._open(package, spec, spec.isolation.start_timeout_s, host)

    def may_take(self, head: RequestHead) -> bool:
        """Return whether requests with this head can be for an isolated model."""
        target = parse_infer_path(head.path)
        return target is not None and target[0] in self._names

    def pass_on(self, connection: Connection, head: RequestHead) -> bool:
        """Return whether the request was passed to a worker, together with its connection."""
        target = parse_infer_path(head.path)
        if target is None or self.versions is None:
            return False
        remote = self.versions.find_remote(*target)
        return remote is not None and remote.lend(connection, is_default=target[1] is None)

    def begin_stop(self) -> None:
        """Request all connections back, and open nothing more."""
        self._is_over = True
        for model in self.models:
            model.begin_stop()

    async def close(self) -> None:
        """End all processes, and wait until they have ended."""
        for model in self._models:
            model.end()
        while not all(model.is_over for model in self._models):
            await asyncio.sleep(_POLL_S)

    def count_restarts(self) -> MetricFamily:
        """Return how often workers were started after a crash, for Prometheus."""
        return MetricFamily(
            "edgekit_worker_restarts_total",
            "counter",
            "How often a model's process was started again after it was lost.",
            tuple(
                ({"model": one.manifest.name, "version": one.manifest.version}, one.restarts)
                for one in self.models
            ),
        )

    def _open(
        self, package: OpenedPackage, spec: WorkerSpec, limit_s: float, host: "RemoteModel | None" = None
    ) -> "RemoteModel":
        """Return a version that has begun within `limit_s`: in workers of its own, or on trial in `host`."""
        opened: Future[RemoteModel] = Future()
        begin = functools.partial(self._begin, package.manifest, spec, _open_again(package), opened, host)
        self._http.loop.call_soon_threadsafe(begin)
        limit_s += _SPARE_S
        try:
            return opened.result(limit_s)
        except CancelledError:
            raise _unavailable(package.manifest, "the service, or the version in use, is ending") from None
        except WaitedTooLong:
            if not opened.cancel():
                return opened.result()  # it came just now
            raise _unavailable(package.manifest, f"no answer for {limit_s:g} s") from None

    def _begin(
        self,
        manifest: Manifest,
        spec: WorkerSpec,
        package: int,
        opened: "Future[RemoteModel]",
        host: "RemoteModel | None",
    ) -> None:
        if self._is_over:
            os.close(package)
            opened.cancel()
            return
        if manifest.name not in self._names:  # isolated for what the package holds, not by the configuration
            self._names.add(manifest.name)
            self._http.clearance += 1
        self._models = [model for model in self._models if not model.is_over]
        model: RemoteModel | None = None
        try:
            model = self._make_model(manifest, spec, package, opened)
            self._models.append(model)
            if host is None:
                model.begin()
            else:
                model.begin_trial(host)
        except Exception as cause:  # the thread that loads all models waits for an outcome
            _logger.exception("%s %s: its process cannot be started", manifest.name, manifest.version)
            if model is None:
                os.close(package)
            else:
                model.end()
            if opened.set_running_or_notify_cancel():
                opened.set_exception(_unavailable(manifest, repr(cause)))

    def _make_model(
        self, manifest: Manifest, spec: WorkerSpec, package: int, opened: "Future[RemoteModel]"
    ) -> "RemoteModel":
        from edgekit_runtime.service.workers.remote_model import RemoteModel  # most services have none

        return RemoteModel(
            *(self._http, self._regions, manifest, spec),
            package=package,
            opened=opened,
            report_crash=self._on_crash,
        )

    def _on_crash(self, model: "RemoteModel", reason: str, is_loop: bool) -> None:
        if self.versions is not None:
            name, version = model.manifest.name, model.manifest.version
            self.versions.report_crash(name, version, reason, is_loop=is_loop)

    def _make_spec(self, package: OpenedPackage, options: ModelOptions) -> WorkerSpec:
        # Less than the process has, which then reports why it refuses a version, and need not be killed.
        limit_s = OWN_SHARE * options.isolation.start_timeout_s
        limit_s = min(limit_s, options.load_timeout_s or limit_s)
        alone = dataclasses.replace(options, isolated=False, load_timeout_s=limit_s)
        manifest = package.manifest
        config = dataclasses.replace(
            self._config,
            listen=Listen(unix_socket="-", host=""),
            memory=ModelMemory(),
            models={manifest.name: alone},
        )
        return WorkerSpec(
            config=config,
            isolation=options.isolation,
            name=manifest.name,
            package=VerifiedPackage(manifest.version, manifest.sha256),
            limits=self._limits,
            token=None if self._token is None else self._token.decode("ascii"),
            connections=self._config.http.max_connections,
        )

    def _add_region(self, region: Region) -> None:
        for model in self.models:
            model.add_region(region)

    def _remove_region(self, name: str) -> None:
        for model in self.models:
            model.remove_region(name)


def _open_again(package: OpenedPackage) -> int:
    """Return a descriptor of the file, which a worker finds unchanged whenever it starts."""
    try:
        return os.open(package.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as cause:
        check_lack(cause, f"cannot read package {package.path}")
        raise PackageError(f"cannot read package {package.path}: {cause.strerror}") from cause


def _unavailable(manifest: Manifest, reason: str) -> UnavailableError:
    text = f"{manifest.name} {manifest.version} cannot be loaded in a process of its own: {reason}"
    return UnavailableError(f"{text}; load it again later", _RETRY_AFTER_S)
