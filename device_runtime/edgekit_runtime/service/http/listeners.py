"""Listening sockets: the Unix socket, TCP sockets, and sockets opened by systemd."""

import contextlib
import fcntl
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from edgekit_runtime.errors import TransportError
from edgekit_runtime.records import dataclass

_BACKLOG: Final = 1024
_MODE: Final = 0o660  # the user and the group of the service
_LOCK_TRIES: Final = 100
_LOCK_PAUSE_S: Final = 0.01
_FIRST_INHERITED: Final = 3  # SD_LISTEN_FDS_START
_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred: process, user, group. 0 if there is no peer


@dataclass(frozen=True, slots=True)
class SocketFile:
    """The file of a listening Unix socket. If another file replaces it, the inode differs.

    Attributes:
        device, inode: The values of `stat` when the socket was opened.
    """

    path: Path
    device: int
    inode: int

    @classmethod
    def find(cls, path: Path) -> "SocketFile":
        status = path.lstat()
        return cls(path, status.st_dev, status.st_ino)

    def remove(self) -> None:
        """Remove the file, unless another file has replaced it."""
        with contextlib.suppress(OSError), _locked(self.path.parent):  # the folder may be gone, too
            if SocketFile.find(self.path) == self:
                self.path.unlink()


def find_peer(connected: socket.socket) -> int:
    """Return the process id of the peer on a Unix socket, or 0 if unknown, for example in a container."""
    return _find_credentials(connected)[0]


def is_own_user(connected: socket.socket) -> bool:
    """Return whether the peer on a Unix socket runs as the user of this process or as root."""
    return _find_credentials(connected)[1] in (0, os.geteuid())


def _find_credentials(connected: socket.socket) -> tuple[int, int]:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    return pid, user


def find_client(connected: socket.socket) -> str:
    """Return a client's address, or its process id on a Unix socket. Empty if it has disconnected."""
    if connected.family == socket.AF_UNIX:
        return str(find_peer(connected))
    with contextlib.suppress(OSError):
        return str(connected.getpeername()[0])
    return ""


def listen_unix(path: Path) -> socket.socket:
    """Listen on a Unix socket for clients of the service's user and group. A stale socket is replaced.

    Raises:
        TransportError: Another service listens on `path`, the file is not a socket, or the folder is not
            writable.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        with _locked(path.parent):
            _remove_stale(path)
            before = os.umask(0o777 & ~_MODE)
            try:
                listener.bind(str(path))
            finally:
                os.umask(before)
            listener.listen(_BACKLOG)
    except OSError as cause:
        listener.close()
        raise TransportError(f"cannot listen at {path}: {cause}; set unix_socket to another path") from cause
    except BaseException:
        listener.close()
        raise
    return listener


def listen_tcp(host: str, port: int) -> socket.socket:
    """Listen at `host` and `port`, and return the socket.

    Raises:
        TransportError: The address is in use, or does not belong to this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as cause:
        raise TransportError(f"cannot listen on {host}: {cause}") from cause
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as cause:
        listener.close()
        raise TransportError(f"cannot listen on {host}:{port}: {cause}; choose another port") from cause
    return listener


def inherit_listeners() -> list[socket.socket]:
    """Return the listening Unix sockets that systemd opened for this process. Further calls return [].

    Source: sd_listen_fds(3).
    """
    process, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if process != str(os.getpid()) or not count.isdecimal():
        return []
    descriptors = []
    for descriptor in range(_FIRST_INHERITED, _FIRST_INHERITED + int(count)):
        os.set_inheritable(descriptor, False)
        listener = socket.socket(fileno=descriptor)
        if listener.family != socket.AF_UNIX:
            raise TransportError(
                "systemd passed a socket that is no Unix socket; let the service open TCP itself"
            )
        descriptors.append(listener)
    return descriptors


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock `folder` against other services while this service checks, removes or binds a socket there."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for _ in range(_LOCK_TRIES):  # not for ever: every process that may read the folder can hold the lock
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOCK_PAUSE_S)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(path: Path) -> None:
    """Remove a socket at `path` at which no process listens."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise TransportError(f"{path} is no socket, so it is not replaced; set unix_socket to another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # the queue of a process that never accepts may be full
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return
        except BlockingIOError:
            pass
        pid = find_peer(probe)
        service = f"another service (process {pid})" if pid else "another service"
        raise TransportError(f"{service} listens at {path}; stop it, or set unix_socket to another path")
