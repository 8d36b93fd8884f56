"""One worker process as the service sees it: started, lent connections, watched, ended.

What becomes of the connections of a worker that died is decided by what it last said of each, see `leases`.
"""

import contextlib
import json
import mmap
import os
import signal
import socket
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.errors import UnavailableError
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.lease import HANDED, IDLE, RESPONDING
from edgekit_runtime.service.http.server import HttpServer
from edgekit_runtime.service.oip.shared_memory import Region
from edgekit_runtime.service.worker_wire.channel import CLOSED, Channel, ChannelError, Kind, Passed
from edgekit_runtime.service.worker_wire.messages import (
    ENERGY,
    INDEX,
    LENT,
    MAX_REASON,
    REGION,
    SETTLED,
    Given,
    Order,
    TrialWord,
    read_word,
)
from edgekit_runtime.system.child_process import ChildProcess, describe_end

if TYPE_CHECKING:
    from edgekit_runtime.service.workers.process_group import IsolatedModel

_MODULE: Final = "edgekit_runtime.service.worker"
_ENDING_S: Final = 2.0  # for a process that has closed its channel
_RETRY_AFTER_S: Final = 1.0


@dataclass(slots=True, eq=False)
class _Lent:
    connected: socket.socket
    is_local: bool
    on_close: Callable[[], None] | None


class Worker:
    """One process; all of it on the thread of the loop.

    Attributes:
        silent_s: for how long it has shown no life.
        is_ready: whether it has loaded its model.
        is_over: whether the process has ended.
        has_refused: whether it said that the model cannot be loaded, in the place of crashing.
        has_lacked: whether it said that it cannot be loaded now, for want of what the machine has to give.
        has_trapped: whether the processor ended it for a division, see `traps`.
    """

    def __init__(self, http: HttpServer, owner: "IsolatedModel", order: Order, package: int) -> None:
        """Start the process.

        Args:
            http: whose connections it is lent.
            owner: hears of it; nothing after `end` was called.
            order: what it is to do.
            package: descriptor of the package; stays the caller's.

        Raises:
            OSError: it cannot be started.
        """
        self._http = http
        self._owner: IsolatedModel | None = owner
        self._loop = http.loop
        self.silent_s = 0.0
        self.is_ready = self.has_refused = self.has_lacked = self.has_trapped = False
        self._is_condemned = self.is_over = False
        self._reason: str | None = None
        self._asked: set[str] = set()
        self._lent: dict[int, _Lent] = {}
        self._free: list[int] = []
        self._unused = order.connections
        table = os.memfd_create("edgekit-leases", os.MFD_CLOEXEC)
        try:
            os.ftruncate(table, order.connections)
            self._states = mmap.mmap(table, order.connections)
            self._process, near = _start(order, package, table)
        finally:
            os.close(table)
        self._channel = Channel(self._loop, near, self._take, self._on_channel_end)
        self._process.call_at_end(self._loop, self._on_exit)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def lent(self) -> int:
        """How many connections it has."""
        return len(self._lent)

    @property
    def is_idle(self) -> bool:
        """Whether none of them has a request under way."""
        return all(self._states[index] == IDLE for index in self._lent)

    def lend(self, connection: Connection, *, is_default: bool) -> bool:
        """Let the worker answer on `connection` from its present request on.

        Args:
            connection: as `screen` gets it.
            is_default: whether the model was asked for without a version.

        Returns:
            False, with nothing done, where it can take no more.
        """
        if self._is_condemned or self._channel.is_full or not (self._free or self._unused):
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
        self._channel.send(Kind.MAIN_LEND, words + unread, connected)
        return True

    def retire(self) -> None:
        """Have all connections back, those that are in use after their answers."""
        self._channel.send(Kind.MAIN_RETIRE)

    def add_region(self, region: Region) -> None:
        """Let requests name `region`."""
        name, key = (text.encode(errors="surrogatepass") for text in (region.name, region.key))
        words = REGION.pack(region.offset_bytes, region.size_bytes, region.is_mapped, len(name))
        self._channel.send(Kind.MAIN_REGION, words + name + key, region)

    def remove_region(self, name: str) -> None:
        """Forget a region."""
        self._channel.send(Kind.MAIN_FORGET_REGION, name.encode(errors="surrogatepass"))

    def try_beside(self, candidate: Given, package: Passed) -> None:
        """Have it try a version beside the one that it serves.

        Args:
            candidate: the package.
            package: its file, which stays the caller's.
        """
        self._asked.add(candidate.version)
        self._channel.send(Kind.MAIN_TRY, json.dumps(to_plain(candidate)).encode("ascii"), package)

    def settle(self, version: str, *, is_promoted: bool) -> None:
        """Have it end the trial of `version`, which takes over or goes."""
        self._channel.send(Kind.MAIN_SETTLE, SETTLED.pack(is_promoted) + version.encode())

    def tell_energy(self, candidate_j: float, current_j: float) -> None:
        """Tell it what a request took of both versions that it has; see `Watch.add_energy`."""
        self._channel.send(Kind.MAIN_ENERGY, ENERGY.pack(candidate_j, current_j))

    def kill(self, reason: str) -> None:
        """End the process since it misbehaves; the owner hears `reason`, once it has ended."""
        self._condemn(reason)

    def end(self) -> None:
        """End the process, and take back what it was lent; the owner hears nothing more."""
        self._owner = None
        self._condemn(None)

    def _take(self, kind: Kind, payload: bytes, descriptors: list[int]) -> None:
        if descriptors:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ChannelError("it sent descriptors, which no message of a worker has")
        if kind is Kind.WORKER_BEAT:
            self.silent_s = 0.0
            if payload and self._owner is not None:
                self._owner.on_snapshots(self, payload)
        elif kind is Kind.WORKER_RETURNS:
            _, lent = self._take_lent(payload)
            self._adopt(lent, payload[INDEX.size :])
        elif kind is Kind.WORKER_CLOSED:
            self._take_closed(*self._take_lent(payload))
        elif kind is Kind.WORKER_TRIAL:
            self._take_word(read_word(payload))
        elif kind is Kind.WORKER_READY and not self.is_ready:
            self.is_ready = True
            if self._owner is not None and not self._is_condemned:
                self._owner.on_ready(self)
        elif kind in (Kind.WORKER_FAILED, Kind.WORKER_LACKS) and not self.is_ready:
            self.has_refused, self.has_lacked = kind is Kind.WORKER_FAILED, kind is Kind.WORKER_LACKS
            self._condemn(payload.decode("utf-8", "replace")[:MAX_REASON])
        else:
            raise ChannelError(f"it sent a message {kind.name} that has no place here")

    def _take_word(self, word: TrialWord) -> None:
        if word.version not in self._asked:
            raise ChannelError(f"it spoke of version {word.version[:80]}, which it was not asked to try")
        if self._owner is not None and not self._is_condemned:
            self._owner.on_word(self, word)

    def _take_closed(self, index: int, lent: _Lent) -> None:
        if self._states[index] == HANDED:  # it could not even take it
            error = UnavailableError("the model's process has no descriptor free; try again", _RETRY_AFTER_S)
            self._adopt(lent).refuse(error)
            return
        _close(lent)
        self._http.take_back(is_local=lent.is_local)

    def _take_lent(self, payload: bytes) -> tuple[int, _Lent]:
        if len(payload) < INDEX.size:
            raise ChannelError(f"it sent {len(payload)} bytes about a connection")
        (index,) = INDEX.unpack_from(payload)
        lent = self._lent.pop(index, None)
        if lent is None:
            raise ChannelError(f"it spoke of connection {index}, which it does not have")
        self._free.append(index)
        return index, lent

    def _adopt(self, lent: _Lent, unread: bytes = b"") -> Connection:
        connection = self._http.adopt(
            lent.connected, is_local=lent.is_local, unread=unread, on_close=lent.on_close
        )
        self._http.take_back(is_local=lent.is_local)
        if self._http.is_draining:
            connection.close_when_idle()
        return connection

    def _condemn(self, reason: str | None) -> None:
        """Kill the process; what it was lent is taken back once it surely does nothing any more."""
        if self._is_condemned:
            return
        self._is_condemned, self._reason = True, reason
        self._process.kill()

    def _on_channel_end(self, reason: str) -> None:
        if reason != CLOSED:
            self._condemn(reason)
        else:  # a process that ends closes its channel just before; how it ended tells more
            self._loop.call_later(_ENDING_S, self._condemn, reason)

    def _on_exit(self, code: int) -> None:
        self.is_over = self._is_condemned = True
        self.has_trapped = code == -signal.SIGFPE
        self._channel.receive_rest()
        self._channel.close()
        self._process.close()
        lent, self._lent = self._lent, {}
        for index, one in lent.items():
            self._recover(one, self._states[index])
        self._states.close()
        if self._owner is not None:
            self._owner.on_end(self, self._reason or f"it ended {describe_end(code)}")

    def _recover(self, lent: _Lent, state: int) -> None:
        if state == RESPONDING:
            _close(lent)
            self._http.take_back(is_local=lent.is_local)
            return
        connection = self._adopt(lent)
        if state != IDLE:
            error = UnavailableError("the model's process ended while it worked on this", _RETRY_AFTER_S)
            connection.refuse(error)


def _start(order: Order, package: int, table: int) -> tuple[ChildProcess, socket.socket]:
    """Return a worker that was started, and this end of its channel.

    Args:
        order: what it is to do.
        package: descriptor of the package.
        table: descriptor of the memory of the leases.

    Raises:
        OSError: it cannot be started.
    """
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with far, contextlib.ExitStack() as undo:
        undo.enter_context(near)
        with os.fdopen(os.memfd_create("edgekit-order", os.MFD_CLOEXEC), "w") as file:
            json.dump(to_plain(order), file)
            file.flush()
            passed = array("i", (file.fileno(), package, table))
            near.sendmsg([b"open"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
        process = ChildProcess(_MODULE, output="log", channel=far)
        undo.pop_all()
    return process, near


def _close(lent: _Lent) -> None:
    lent.connected.close()
    if lent.on_close is not None:
        lent.on_close()
