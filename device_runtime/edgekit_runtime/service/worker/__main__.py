"""A worker process, which runs the service with one model and without a listening socket.

The service that started the worker passes connections to it. The worker answers the requests on a connection,
and returns the connection when a request is not for its model. It ends when its channel to the service is
closed.
"""

import asyncio
import json
import logging
import mmap
import os
import socket
from array import array
from collections import deque
from typing import Final

from edgekit_runtime.dataclass_json import from_json, from_plain
from edgekit_runtime.errors import EdgekitError, UnavailableError
from edgekit_runtime.protocol.rest import parse_infer_path
from edgekit_runtime.service.http.access import check_access
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.lease import Lease
from edgekit_runtime.service.http.request_head import RequestHead
from edgekit_runtime.service.models.catalogue import ModelEntry
from edgekit_runtime.service.observability.traceback_limiter import log_limited
from edgekit_runtime.service.rollout.gates import Promote, Rollback
from edgekit_runtime.service.server import Service
from edgekit_runtime.service.serving.served_version import Trial
from edgekit_runtime.service.worker.confinement import confine
from edgekit_runtime.service.worker.package_source import ReceivedPackages
from edgekit_runtime.service.worker.shared_memory import ForwardedRegions
from edgekit_runtime.service.worker_wire.channel import Channel, Kind
from edgekit_runtime.service.worker_wire.messages import (
    ENERGY,
    HEARTBEAT_S,
    INDEX,
    LENT,
    MAX_REASON,
    SETTLED,
    STUCK_EXIT_CODE,
    TrialOutcome,
    TrialReport,
    VerifiedPackage,
    WorkerSpec,
)
from edgekit_runtime.service.worker_wire.snapshots import write_snapshots
from edgekit_runtime.system.child_process import open_channel
from edgekit_runtime.system.engines import EngineMissingError
from edgekit_runtime.system.tasks import Tasks

_DESCRIPTORS: Final = 3
_ANSWER_S: Final = 0.1

_logger = logging.getLogger(__name__)


class _Worker:
    def __init__(
        self, spec: WorkerSpec, source: ReceivedPackages, connected: socket.socket, states: memoryview
    ) -> None:
        self._spec, self._source, self._states = spec, source, states
        self._loop = asyncio.get_running_loop()
        self._name = spec.name
        self._token = None if spec.token is None else spec.token.encode("ascii")
        self._is_default = self._is_retired = False
        self._indices: dict[Connection, int] = {}
        self._later: deque[tuple[Kind, bytes, list[int]]] = deque()
        self._sent = b""  # snapshots
        self._tasks = Tasks()
        self._channel = Channel(self._loop, connected, self._handle_message, _end)

    async def run(self) -> None:
        """Load the model, then serve until the process ends."""
        spec = self._spec
        self._regions = ForwardedRegions(spec.config.shared_memory, self._channel)
        self._service = Service(spec.config, self._source, self._regions)
        self._registry = self._service.registry
        self._registry.rollouts.report = self._send_verdict
        self._http = self._service.http
        self._http.screen = self._screen
        self._service.pool.on_abandoned = self._end_stuck
        if any(options.governor is not None for options in spec.config.models.values()):
            self._service.watch()  # it reads the sensors here, too
        self._send_heartbeat()
        try:
            await self._registry.load(self._name)
        except (UnavailableError, EngineMissingError) as error:
            self._channel.send(Kind.WORKER_UNAVAILABLE, str(error).encode())
        except EdgekitError as error:
            self._channel.send(Kind.WORKER_REFUSED, str(error).encode())
        else:
            self._send_snapshots()
            self._channel.send(Kind.WORKER_READY)
        await self._loop.create_future()

    def _end_stuck(self) -> None:
        """End this process because a run cannot be stopped, after its clients have their answers."""
        self._loop.call_later(_ANSWER_S, os._exit, STUCK_EXIT_CODE)

    def _handle_message(self, kind: Kind, payload: bytes, descriptors: list[int]) -> None:
        """Register regions at once, because a request may use them. Handle all other messages in order."""
        if kind is Kind.MAIN_REGION:
            self._regions.receive(payload, descriptors)
        elif kind is Kind.MAIN_FORGET_REGION:
            self._regions.forget(payload)
        else:
            self._later.append((kind, payload, descriptors))
            self._loop.call_soon(self._handle_later)

    def _handle_later(self) -> None:
        kind, payload, descriptors = self._later.popleft()
        if kind is Kind.MAIN_LEND:
            self._adopt(payload, descriptors)
        elif kind is Kind.MAIN_RETIRE:
            self._retire()
        elif kind is Kind.MAIN_TRY:
            package = from_json(VerifiedPackage, payload, "the version to try")
            self._tasks.start(self._try(package, descriptors), _end_after)
        elif kind is Kind.MAIN_SETTLE:
            (is_promoted,) = SETTLED.unpack_from(payload)
            version = payload[SETTLED.size :].decode()
            self._tasks.start(self._settle(version, is_promoted=is_promoted), _end_after)
        elif kind is Kind.MAIN_ENERGY:
            for served in self._registry.models.served()[1:]:
                if served.trial is not None:
                    served.trial.runner.add_energy(*ENERGY.unpack(payload))

    def _adopt(self, payload: bytes, descriptors: list[int]) -> None:
        index, is_local, is_default = LENT.unpack_from(payload)
        self._is_default |= is_default
        if not descriptors:  # this process had no descriptor free
            self._channel.send(Kind.WORKER_CLOSED, INDEX.pack(index))
            return
        connected = socket.socket(fileno=descriptors[0])
        unread = payload[LENT.size :]
        connection = Connection(
            self._http,
            connected,
            is_local=is_local,
            lease=Lease(self._states, index),
            on_close=lambda: self._forget(connection),
        )
        self._indices[connection] = index
        if self._is_retired:
            self._return(connection, unread)
        else:
            connection.resume(unread)

    def _forget(self, connection: Connection) -> None:
        self._channel.send(Kind.WORKER_CLOSED, INDEX.pack(self._indices.pop(connection)))

    def _screen(self, connection: Connection, head: RequestHead) -> bool:
        if not connection.is_local:
            check_access(head, self._token)
        target = parse_infer_path(head.path)
        is_ours = target is not None and target[0] == self._name
        if is_ours and target is not None and not self._is_retired:
            version = target[1]
            versions = self._registry.models.versions_of(self._name)
            if self._is_default if version is None else version in versions:
                if version is None:  # versions come and go; a retired worker gives requests back unread
                    head.clearance = self._http.clearance
                return False
        self._return(connection)
        return True

    def _return(self, connection: Connection, unread: bytes = b"") -> None:
        index = self._indices.pop(connection)
        connection.on_close = None
        connected, waiting = connection.release()
        # Closed first: once the service gets the message, it reads this connection itself.
        connected.close()
        self._channel.send(Kind.WORKER_RETURNS, INDEX.pack(index) + unread + waiting)

    def _retire(self) -> None:
        """Return all connections. A connection in use is returned after its answer."""
        self._is_retired = True
        self._http.on_response_sent = self._return
        for connection in list(self._indices):
            if connection.is_between_requests:
                self._return(connection)

    def _send_heartbeat(self) -> None:
        """Judge the trial, follow the fleet's orders, and send all changes.

        This is called at each heartbeat.
        """
        self._loop.call_later(HEARTBEAT_S, self._send_heartbeat)
        self._registry.models.judge_trials()
        self._service.follow_samples()
        self._send_snapshots()

    def _send_snapshots(self) -> None:
        """Send the reports of all versions if they changed, before any verdict that depends on them."""
        snapshots = write_snapshots(self._registry.models.served())
        self._channel.send(Kind.WORKER_HEARTBEAT, b"" if snapshots == self._sent else snapshots)
        self._sent = snapshots

    # Trials, of which the service decides the outcome

    async def _try(self, package: VerifiedPackage, descriptors: list[int]) -> None:
        try:
            if not descriptors:
                raise UnavailableError("its process had no descriptor free for the package")
            self._source.add(package, descriptors[0])
            await self._registry.load(self._name)
            self._registry.models.find(self._name, package.version)
        except EdgekitError as error:
            self._source.remove([package.version])
            is_lacking = isinstance(error, UnavailableError | EngineMissingError)
            outcome: TrialOutcome = "unavailable" if is_lacking else "refused"
            message = TrialReport(package.version, outcome, reason=str(error)[:MAX_REASON])
        else:
            message = TrialReport(package.version, "tried")
            self._send_snapshots()
        self._channel.send(Kind.WORKER_TRIAL, message.to_bytes())

    async def _settle(self, version: str, *, is_promoted: bool) -> None:
        over = [
            candidate_version
            for candidate_version in self._source.versions
            if (candidate_version != version) == is_promoted
        ]
        await self._registry.settle_trial(self._name, version, is_promoted=is_promoted)
        self._source.remove(over)

    def _send_verdict(self, _model: ModelEntry, trial: Trial, verdict: Promote | Rollback) -> None:
        version = trial.candidate.version
        if isinstance(verdict, Promote):
            message = TrialReport(version, "promote")
        else:
            message = TrialReport(version, "rollback", verdict.gate, verdict.reason[:MAX_REASON])
        self._send_snapshots()  # the service compares the verdict with them
        self._channel.send(Kind.WORKER_TRIAL, message.to_bytes())


def _end_after(error: BaseException) -> None:
    _logger.error("a change of the version failed", exc_info=error)
    os._exit(1)  # the service may assume another state; the next worker has one version only


def _end(_reason: str) -> None:
    os._exit(0)  # the service has ended, or ends this process: nothing here needs an orderly end


def main() -> None:
    """Serve the model that the service sends, until the channel to the service is closed.

    The first argument is the file descriptor of the channel.
    """
    connected = open_channel()
    room = socket.CMSG_SPACE(_DESCRIPTORS * array("i").itemsize)
    _, extras, _, _ = connected.recvmsg(16, room, socket.MSG_CMSG_CLOEXEC)
    spec_file, package, leases = array("i", extras[0][2])
    with os.fdopen(spec_file) as file:
        file.seek(0)
        spec = from_plain(WorkerSpec, json.load(file))
    log_limited(f"edgekit-worker {spec.name}: ")
    for refused in confine(spec.isolation):
        _logger.warning("the system does not allow %s", refused)
    states = memoryview(mmap.mmap(leases, spec.connections))
    os.close(leases)

    async def serve() -> None:
        source = ReceivedPackages(spec.name, spec.limits)
        source.add(spec.package, package)
        await _Worker(spec, source, connected, states).run()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
