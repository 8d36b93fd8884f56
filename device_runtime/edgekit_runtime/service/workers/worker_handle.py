"""Starts, monitors and ends one worker process, and lends connections to it.

After a worker has ended, each of its connections is answered or closed, depending on the last state that the
worker recorded for the connection, see `lease`.
"""

import contextlib
import json
import mmap
import os
import signal
import socket
from array import array
from collections.abc import Callable
from typing import Final, Protocol, TextIO

from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.errors import UnavailableError
from edgekit_runtime.records import dataclass
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.lease import HANDED, IDLE, RESPONDING
from edgekit_runtime.service.http.server import HttpServer
from edgekit_runtime.service.oip.shared_memory import Region
from edgekit_runtime.service.worker_wire.channel import CLOSED, Channel, ChannelError, Kind, Passed
from edgekit_runtime.service.worker_wire.messages import (
    HEARTBEAT_S,
    INDEX,
    LENT,
    MAX_REASON,
    REGION,
    SETTLED,
    STUCK_EXIT_CODE,
    TrialReport,
    VerifiedPackage,
    WorkerSpec,
    read_trial_report,
)
from edgekit_runtime.service.workers.restart_policy import End
from edgekit_runtime.system.child_process import ChildProcess, describe_end

MODULE: Final = "edgekit_runtime.service.worker"
_ENDING_S: Final = 2.0  # for a process that has closed its channel
_RETRY_AFTER_S: Final = 1.0


@dataclass(slots=True, eq=False)
class _Lent:
    connected: socket.socket
    is_local: bool
    on_close: Callable[[], None] | None


class WorkerOwner(Protocol):
    """The callbacks of a worker's owner."""

    def on_ready(self, worker: "WorkerHandle") -> None:
        """Called when the worker has loaded its model."""

    def on_snapshots(self, worker: "WorkerHandle", payload: bytes) -> None:
        """Called with the statistics of the worker's versions. Decode them with `read_snapshots`.

        Raises:
            ChannelError: The statistics are invalid. The worker is then ended.
        """

    def on_trial_message(self, worker: "WorkerHandle", message: TrialReport) -> None:
        """Called with a report on a version on trial.

        Raises:
            ChannelError: The report is not allowed at this time. The worker is then ended.
        """

    def on_end(self, worker: "WorkerHandle", end: End, reason: str) -> None:
        """Called last, when the process has ended and its connections have been returned."""


class WorkerHandle:
    """A worker process. Use it on the event loop only.

    Attributes:
        owner: The object whose callbacks are called.
        is_ready: Whether the worker has loaded its model.
    """

    def __init__(self, http: HttpServer, owner: WorkerOwner, spec: WorkerSpec, package: int) -> None:
        """Start the process. `package` is the file descriptor of the package, which the caller must close.

        Raises:
            OSError: The process cannot be started.
        """
        self._http, self._isolation = http, spec.isolation
        self.owner = owner
        self._loop = http.loop
        self._begun_s, self._ready_s = self._loop.time(), 0.0
        self._silent_s = 0.0
        self.is_ready = self._is_killed = False
        self._end, self._reason = End.CRASH, ""
        self._tried: set[str] = set()  # versions
        self._lent: dict[int, _Lent] = {}
        self._free: list[int] = []
        self._unused = spec.connections
        near = self._start(spec, package)
        self.channel = Channel(self._loop, near, self._handle_message, self._on_channel_end)
        self._process.call_at_end(self._loop, self._on_exit)

    @property
    def pid(self) -> int:
        """The process id of the worker."""
        return self._process.pid

    @property
    def ready_for_s(self) -> float:
        """The seconds since the worker became ready, or 0 if it is not ready."""
        return self._loop.time() - self._ready_s if self.is_ready else 0.0

    @property
    def lent(self) -> int:
        """The number of connections that the worker has."""
        return len(self._lent)

    @property
    def is_idle(self) -> bool:
        """Whether no request is running on the connections of the worker."""
        return all(self._states[index] == IDLE for index in self._lent)

    def lend(self, connection: Connection, *, is_default: bool) -> bool:
        """Let the worker answer the current request and all later ones on `connection`.

        `is_default` states whether the current request names no version.

        Returns:
            False if the worker cannot take more connections. The connection is then unchanged.
        """
        if self._is_killed or self.channel.is_full or not (self._free or self._unused):
            return False
        on_close, connection.on_close = connection.on_close, None
        is_local = connection.is_local
        connected, unread = connection.release()
        if not self._free:
            self._unused -= 1
            self._free.append(self._unused)
        index = self._free.pop()
        self._states[index] = HANDED
        self._lent[index] = _Lent(connected, is_local, on_close)
        self._http.lend(is_local=is_local)
        words = LENT.pack(index, is_local, is_default)
        self.channel.send(Kind.MAIN_LEND, words + unread, connected)
        return True

    def remove_region(self, name: str) -> None:
        self.channel.send(Kind.MAIN_FORGET_REGION, name.encode(errors="surrogatepass"))

    def add_region(self, region: Region) -> None:
        """Allow requests of the worker to use a region of shared memory."""
        name, key = (text.encode(errors="surrogatepass") for text in (region.name, region.key))
        words = REGION.pack(region.offset_bytes, region.size_bytes, region.is_mapped, len(name))
        self.channel.send(Kind.MAIN_REGION, words + name + key, region)

    def start_trial(self, candidate: VerifiedPackage, package: Passed) -> None:
        """Make the worker try a version beside the version that it serves.

        `package` owns the open file of the candidate. The caller must close it.
        """
        self._tried.add(candidate.version)
        self.channel.send(Kind.MAIN_TRY, json.dumps(to_plain(candidate)).encode("ascii"), package)

    def end_trial(self, version: str, *, is_promoted: bool) -> None:
        """Make the worker end its trial of `version`.

        If `is_promoted` is True, the worker serves only `version` from now on. Otherwise it unloads
        `version`.
        """
        self.channel.send(Kind.MAIN_SETTLE, SETTLED.pack(is_promoted) + version.encode())

    def check_heartbeat(self) -> None:
        """Kill the process if it hangs or loads for too long. Call this every `HEARTBEAT_S` seconds.

        The time without a heartbeat is measured in calls of this method. A pause of the whole service
        therefore does not count as a hang.
        """
        self._silent_s += HEARTBEAT_S
        isolation = self._isolation
        if self.is_ready:
            if self._silent_s > isolation.hang_s:
                self.kill(f"it sent no heartbeat for {isolation.hang_s:g} s")
        elif self._loop.time() - self._begun_s > isolation.start_timeout_s:
            self.kill(f"it did not load the model within {isolation.start_timeout_s:g} s")

    def kill(self, reason: str) -> None:
        """Kill the process and pass `reason` to `on_end`. Its connections are returned when it has ended."""
        if not self._is_killed:
            self._is_killed, self._reason = True, reason
            self._process.kill()

    def _start(self, spec: WorkerSpec, package: int) -> socket.socket:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far, contextlib.ExitStack() as undo:
            undo.enter_context(near)
            with _create_memory("edgekit-spec") as file, _create_memory("edgekit-leases") as leases:
                json.dump(to_plain(spec), file)
                file.flush()
                leases.truncate(spec.connections)
                self._states = mmap.mmap(leases.fileno(), spec.connections)
                passed = array("i", (file.fileno(), package, leases.fileno()))
                near.sendmsg([b"open"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
            self._process = ChildProcess(MODULE, output="log", channel=far)
            undo.pop_all()
        return near

    def _handle_message(self, kind: Kind, payload: bytes, descriptors: list[int]) -> None:
        if descriptors:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ChannelError("it sent descriptors, which no message of a worker has")
        if kind is Kind.WORKER_HEARTBEAT:
            self._silent_s = 0.0
            if payload:
                self.owner.on_snapshots(self, payload)
        elif kind is Kind.WORKER_RETURNS:
            _, lent = self._pop_lent(payload)
            self._adopt(lent, payload[INDEX.size :])
        elif kind is Kind.WORKER_CLOSED:
            self._on_closed(*self._pop_lent(payload))
        elif kind is Kind.WORKER_TRIAL:
            self._on_trial_message(read_trial_report(payload))
        elif kind is Kind.WORKER_READY and not self.is_ready:
            self.is_ready, self._ready_s = True, self._loop.time()
            if not self._is_killed:
                self.owner.on_ready(self)
        elif kind in (Kind.WORKER_REFUSED, Kind.WORKER_UNAVAILABLE) and not self.is_ready:
            self._end = End.REFUSED if kind is Kind.WORKER_REFUSED else End.UNAVAILABLE
            self.kill(payload.decode("utf-8", "replace")[:MAX_REASON])
        else:
            raise ChannelError(f"it sent a message {kind.name} at the wrong time")

    def _on_trial_message(self, message: TrialReport) -> None:
        if message.version not in self._tried:
            raise ChannelError(f"it sent a verdict of version {message.version[:80]}, which it does not try")
        if not self._is_killed:
            self.owner.on_trial_message(self, message)

    def _on_closed(self, index: int, lent: _Lent) -> None:
        if self._states[index] == HANDED:  # it had no descriptor for it
            error = UnavailableError("the model's process has no descriptor free; try again", _RETRY_AFTER_S)
            self._adopt(lent).refuse(error)
        else:
            self._close(lent)

    def _pop_lent(self, payload: bytes) -> tuple[int, _Lent]:
        if len(payload) < INDEX.size:
            raise ChannelError(f"it sent {len(payload)} bytes about a connection")
        (index,) = INDEX.unpack_from(payload)
        lent = self._lent.pop(index, None)
        if lent is None:
            raise ChannelError(f"it returned connection {index}, which it does not have")
        self._free.append(index)
        return index, lent

    def _adopt(self, lent: _Lent, unread: bytes = b"") -> Connection:
        connection = Connection(self._http, lent.connected, is_local=lent.is_local, on_close=lent.on_close)
        connection.resume(unread)
        self._http.take_back(is_local=lent.is_local)
        if self._http.is_draining:
            connection.close_when_idle()
        return connection

    def _on_channel_end(self, reason: str) -> None:
        if reason != CLOSED:
            self.kill(reason)
        else:  # a process that ends closes its channel just before; how it ended tells more
            self._loop.call_later(_ENDING_S, self.kill, reason)

    def _on_exit(self, code: int) -> None:
        self._is_killed = True
        self.channel.receive_rest()
        if code in (-signal.SIGFPE, STUCK_EXIT_CODE) and self.is_ready:
            self._end = End.TRAP
        if code == STUCK_EXIT_CODE:
            self._reason = self._reason or "a run did not end, and its engine cannot be stopped"
        self.channel.close()
        self._process.close()
        lent, self._lent = self._lent, {}
        for index, connection in lent.items():
            state = self._states[index]
            if state == RESPONDING:
                self._close(connection)
            elif state == IDLE:
                self._adopt(connection)
            else:
                error = UnavailableError("the model's process ended while it worked on this", _RETRY_AFTER_S)
                self._adopt(connection).refuse(error)
        self._states.close()
        self.owner.on_end(self, self._end, self._reason or f"it ended {describe_end(code)}")

    def _close(self, lent: _Lent) -> None:
        lent.connected.close()
        if lent.on_close is not None:
            lent.on_close()
        self._http.take_back(is_local=lent.is_local)


def _create_memory(name: str) -> TextIO:
    return os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC), "w")
