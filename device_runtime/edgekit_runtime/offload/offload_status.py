"""The state of sessions that offload: a small file per process and session, written after changes."""

import contextlib
import json
import os
import time
from dataclasses import field
from pathlib import Path
from typing import Any, Final

from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.errors import OutputError
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.atomic_files import write_atomically
from edgekit_runtime.system.paths import SYSTEM_CACHE, find_cache_folder

_FOLDER: Final = "offload"
_PATTERN: Final = "*-*-*.json"  # process id, its start, session
_START_AT: Final = 19  # index among the fields behind the name in /proc/PID/stat (proc(5): starttime)
_MAX_FILES: Final = 256
_MAX_BYTES: Final = 64 << 10
_PAUSE_S: Final = 1.0  # least time between two writes, which cost a slow device milliseconds


@dataclass(slots=True)
class Counts:
    """Number of requests by how they were answered.

    Attributes:
        local: requests that this device answered alone, as planned.
        remote: requests that the server answered in time.
        hedged: requests with a local run that began because the reply was late.
        failed: requests that this device answered because the server's part failed.
        uncoded: requests that the usual plan could not encode, so that another plan ran. The other fields
            count these requests, too.
    """

    local: int = 0
    remote: int = 0
    hedged: int = 0
    failed: int = 0
    uncoded: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadStatus:
    """The state of one session.

    Attributes:
        model: name of the package.
        process: id of the process.
        plan: name of the plan that the session runs now.
        reason: why that plan runs, in one sentence.
        up_bits_per_s, down_bits_per_s, rtt_s: the estimated link, or None before the first measurement.
        device: a note if the costs were measured on another machine, otherwise empty.
        counts: how requests were answered.
        switches: plan and reason of the last changes of the plan, the oldest first.
    """

    model: str
    process: int
    server: str
    plan: str
    reason: str
    up_bits_per_s: float | None = None
    rtt_s: float | None = None
    down_bits_per_s: float | None = None
    device: str = ""
    counts: Counts = field(default_factory=Counts)
    switches: tuple[str, ...] = ()


class StatusFile:
    """The status file of one session. `close` removes it."""

    def __init__(self, key: int) -> None:
        """Name the file, and remove files of dead processes; `key` identifies the session in its process."""
        folder = find_cache_folder() / _FOLDER
        with contextlib.suppress(OSError):
            for path in folder.glob(_PATTERN):
                if not _is_living(path):
                    path.unlink(missing_ok=True)
        self._path = folder / f"{os.getpid()}-{_read_start(os.getpid())}-{key:x}.json"
        self._last: dict[str, Any] | None = None
        self._next_s = float("-inf")

    def write(self, status: OffloadStatus) -> None:
        """Write the status if it has changed, at most once a second. Ignore errors of the file system."""
        now_s = time.monotonic()
        if now_s < self._next_s or (document := to_plain(status)) == self._last:
            return
        self._last, self._next_s = document, now_s + _PAUSE_S
        with contextlib.suppress(OSError, OutputError):
            self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            with write_atomically(self._path, mode=0o640) as file:  # for the group that may use the service
                file.write(json.dumps(document).encode())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()


def read_statuses() -> list[dict[str, Any]]:
    """Return the `OffloadStatus` of each running session as a dict.

    These are the sessions of this user and of the system's service.
    """
    status_files, paths = [], list[Path]()
    for cache in dict.fromkeys((find_cache_folder(), SYSTEM_CACHE)):
        with contextlib.suppress(OSError):  # of another user
            paths += [path for path in sorted((cache / _FOLDER).glob(_PATTERN)) if _is_living(path)]
    for path in paths[:_MAX_FILES]:
        with contextlib.suppress(OSError, ValueError):
            document = json.loads(path.read_bytes()[:_MAX_BYTES])
            status_files.append(dict(document))
    return status_files


def _is_living(path: Path) -> bool:
    """Return whether the process of a file lives; after a restart another one may have its number."""
    process, start, _ = path.name.split("-", 2)
    return process.isdecimal() and start == _read_start(int(process))


def _read_start(process: int) -> str:
    """Return when a process started, in clock ticks since boot; empty if it does not live."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return fields[_START_AT]
