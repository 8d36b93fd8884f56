"""Opens, finds and ends the isolated models of a service."""

import asyncio
import dataclasses
import logging
import os
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Final

from edgekit_runtime.errors import EdgekitError, PackageError, UnavailableError
from edgekit_runtime.package.archive import Limits, OpenedPackage
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.protocol.rest import parse_infer_path
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.request_head import RequestHead
from edgekit_runtime.service.http.server import HttpServer
from edgekit_runtime.service.models.registry import Registry
from edgekit_runtime.service.oip.shared_memory import Region, Regions
from edgekit_runtime.service.options.config import ServiceConfig
from edgekit_runtime.service.options.model import ModelOptions
from edgekit_runtime.service.serving.loader import Loaded
from edgekit_runtime.system.resource_errors import check_lack

if TYPE_CHECKING:
    from edgekit_runtime.service.observability.prometheus import MetricFamily
    from edgekit_runtime.service.worker_wire.messages import VerifiedPackage, WorkerSpec
    from edgekit_runtime.service.workers.isolated_model import IsolatedModel
    from edgekit_runtime.service.workers.worker_handle import WorkerHandle

_POLL_S: Final = 0.005
OWN_SHARE: Final = 0.8  # share of `start_timeout_s` to load a version
_TRIES: Final = 3  # to load a version for the first time
_SPARE_S: Final = 30.0  # for the waits between them, and for processes to end
_RETRY_AFTER_S: Final = 1.0

_logger = logging.getLogger(__name__)


class Supervisor:
    """The isolated models of a service. Use it on the event loop, except for `open`."""

    def __init__(
        self,
        http: HttpServer,
        regions: Regions,
        config: ServiceConfig,
        registry: Registry,
        *,
        limits: Limits,
        token: bytes | None,
    ) -> None:
        """Create a supervisor without workers. `token` is the token that TCP clients must send, or None."""
        self._http, self._regions, self._config = http, regions, config
        self._registry, self._limits, self._token = registry, limits, token
        self._names = {name for name, options in config.models.items() if options.isolated}
        self._models: list[IsolatedModel] = []  # also those on trial, and those of which a process still ends
        self._is_over = False
        regions.on_add, regions.on_remove = self._add_region, self._remove_region

    @property
    def models(self) -> "tuple[IsolatedModel, ...]":
        """The versions that have their own workers. Versions on trial have none."""
        return tuple(model for model in self._models if model.is_in_use)

    def open(self, package: OpenedPackage, options: ModelOptions, beside: Loaded | None) -> "IsolatedModel":
        """Load the model of `package` in a worker, and wait for it. Do not call this on the event loop.

        Args:
            package: The verified package.
            options: The options of the model.
            beside: The version in use if the package is a version on trial, else None. The trial runs in a
                worker of the version in use.

        Raises:
            BackendError: The model cannot be loaded in a worker.
            PackageError: The package cannot be read again.
            UnavailableError: The model cannot be loaded now, for example because memory is short.
                This is no evidence against the package.
        """
        manifest = package.manifest
        host: IsolatedModel | None = None
        if beside is None:
            spec = self._make_spec(package, options)
            limit_s = _TRIES * spec.isolation.start_timeout_s
        else:
            host = next((model for model in self.models if model is beside.remote), None)
            if host is None:
                reason = "it needs a process of its own, and the version in use has none to try it in"
                raise _unavailable(manifest, f"{reason}; set isolated = true, or rollout to swap")
            spec = dataclasses.replace(host.spec, package=_describe(package))
            limit_s = spec.isolation.start_timeout_s
        opening = self._open(manifest, spec, _open_again(package), limit_s + _SPARE_S, host)
        try:
            return asyncio.run_coroutine_threadsafe(opening, self._http.loop).result()
        except (CancelledError, RuntimeError):  # the latter where the loop is closed already
            raise _unavailable(manifest, "the service, or the version in use, is ending") from None

    def pass_on(self, connection: Connection, head: RequestHead) -> bool:
        """Pass a request with its connection to a worker. Return True if a worker accepted it.

        If the path does not belong to an isolated model, set `head.clearance`, so that the server need not
        call this method for later requests with the same head.
        """
        target = parse_infer_path(head.path)
        if target is None or target[0] not in self._names:
            head.clearance = self._http.clearance
            return False
        remote = self._registry.find_remote(*target)
        return remote is not None and remote.lend(connection, is_default=target[1] is None)

    def begin_stop(self) -> None:
        """Ask the workers to return all connections. No more models can be opened."""
        self._is_over = True
        for model in self.models:
            model.drain(lambda: None)

    async def close(self) -> None:
        """Kill all worker processes, and wait until they have ended."""
        for model in self._models:
            model.end()
        while not all(model.is_over for model in self._models):
            await asyncio.sleep(_POLL_S)

    def count_restarts(self) -> "MetricFamily":
        """Return the number of worker restarts as a Prometheus metric."""
        from edgekit_runtime.service.observability.prometheus import MetricFamily  # which no worker needs

        return MetricFamily(
            "edgekit_worker_restarts_total",
            "counter",
            "How often a model's process was started again after it was lost.",
            tuple(
                ({"model": model.manifest.name, "version": model.manifest.version}, model.restarts)
                for model in self.models
            ),
        )

    async def _open(
        self,
        manifest: Manifest,
        spec: "WorkerSpec",
        package: int,
        limit_s: float,
        host: "IsolatedModel | None",
    ) -> "IsolatedModel":
        """Return a version that started within `limit_s`, in its own workers or on trial in `host`."""
        from edgekit_runtime.service.workers.isolated_model import IsolatedModel  # most services have none

        if self._is_over:
            os.close(package)
            raise asyncio.CancelledError
        if manifest.name not in self._names:  # isolated for what the package holds, not by the configuration
            self._names.add(manifest.name)
            self._http.clearance += 1
        self._models = [model for model in self._models if not model.is_over]
        model: IsolatedModel | None = None
        try:
            report_crash = self._registry.report_crash
            model = IsolatedModel(
                self._http, self._regions, manifest, spec, package=package, report_crash=report_crash
            )
            self._models.append(model)
            if host is None:
                model.begin()
            else:
                from edgekit_runtime.service.rollout.trial import find_difference

                if manifest.version == host.manifest.version or find_difference(host.manifest, manifest):
                    return model  # there is nothing to try; the caller notices that
                model.begin_trial(host)
            await asyncio.wait_for(model.opened, limit_s)
        except BaseException as cause:
            if model is None:
                os.close(package)
            else:
                model.end()
            if isinstance(cause, asyncio.TimeoutError):
                raise _unavailable(manifest, f"no answer for {limit_s:g} s") from None
            if isinstance(cause, EdgekitError) or not isinstance(cause, Exception):
                raise
            _logger.exception("%s %s: its process cannot be started", manifest.name, manifest.version)
            raise _unavailable(manifest, repr(cause)) from cause
        return model

    def _make_spec(self, package: OpenedPackage, options: ModelOptions) -> "WorkerSpec":
        from edgekit_runtime.service.worker_wire.messages import WorkerSpec

        # Less than the process has, which then reports why it refuses a version, and need not be killed.
        limit_s = OWN_SHARE * options.isolation.start_timeout_s
        limit_s = min(limit_s, options.load_timeout_s or limit_s)
        alone = dataclasses.replace(options, isolated=False, load_timeout_s=limit_s)
        manifest = package.manifest
        return WorkerSpec(
            config=self._config.for_worker(manifest.name, alone),
            isolation=options.isolation,
            name=manifest.name,
            package=_describe(package),
            limits=self._limits,
            token=None if self._token is None else self._token.decode("ascii"),
            connections=self._config.http.max_connections,
        )

    def _add_region(self, region: Region) -> None:
        for worker in self._workers():
            worker.add_region(region)

    def _remove_region(self, name: str) -> None:
        for worker in self._workers():
            worker.remove_region(name)

    def _workers(self) -> "list[WorkerHandle]":
        return [worker for model in self.models for worker in model.workers]


def _open_again(package: OpenedPackage) -> int:
    """Return a file descriptor of the package's content. It does not change for workers that start later."""
    try:
        return package.open_content()
    except OSError as cause:
        check_lack(cause, f"cannot read package {package.path}")
        raise PackageError(f"cannot read package {package.path}: {cause.strerror}") from cause


def _describe(package: OpenedPackage) -> "VerifiedPackage":
    from edgekit_runtime.service.worker_wire.messages import VerifiedPackage

    return VerifiedPackage(
        version=package.manifest.version,
        manifest_sha256=package.signed_sha256,
        submodel=package.submodel,
        local_key=None if package.local_key is None else package.local_key.to_text(),
    )


def _unavailable(manifest: Manifest, reason: str) -> UnavailableError:
    text = f"{manifest.name} {manifest.version} cannot be loaded in a process of its own: {reason}"
    return UnavailableError(f"{text}; load it again later", _RETRY_AFTER_S)
