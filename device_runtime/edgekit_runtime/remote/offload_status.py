"""What sessions that offload do now: one small file a process and session, written when something changes."""

import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.errors import OutputError
from edgekit_runtime.system.atomic_files import write_atomically
from edgekit_runtime.system.paths import find_cache_folder

_MAX_FILES: Final = 256
_MAX_BYTES: Final = 64 << 10
_PAUSE_S: Final = 1.0  # between two writes, which cost a slow device milliseconds


@dataclass(slots=True)
class Counts:
    """How requests were answered.

    Attributes:
        local: by this device alone, as planned.
        remote: with the server.
        hedged: a local run was begun because the reply was late.
        failed: the server's part failed, and the device answered.
        uncoded: of all of these, the inputs were not finite or beyond the codes of the usual plan, and went
            another way.
    """

    local: int = 0
    remote: int = 0
    hedged: int = 0
    failed: int = 0
    uncoded: int = 0


@dataclass(frozen=True, slots=True)
class OffloadStatus:
    """One session.

    Attributes:
        model: name of the package.
        process: process id.
        server: address of the server.
        plan: what it runs now.
        reason: why, in one sentence.
        up_bits_per_s, down_bits_per_s, rtt_s: the link, None before it was measured.
        device: note where the costs were measured on another machine, else empty.
        counts: how requests were answered.
        switches: the last changes of the plan, the oldest first: plan and reason.
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
    """The file of one session; it is removed at `close`."""

    def __init__(self, key: int) -> None:
        """Name the file; `key` tells sessions of one process apart."""
        self._path = _find_folder() / f"{os.getpid()}-{key:x}.json"
        self._last: dict[str, Any] | None = None
        self._next_s = float("-inf")

    def write(self, status: OffloadStatus) -> None:
        """Write it if it changed, but not too often; a folder that cannot be written is no reason to fail."""
        now_s = time.monotonic()
        if now_s < self._next_s or (document := to_plain(status)) == self._last:
            return
        self._last, self._next_s = document, now_s + _PAUSE_S
        with contextlib.suppress(OSError, OutputError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with write_atomically(self._path, mode=0o600) as file:
                file.write(json.dumps(document).encode())

    def close(self) -> None:
        """Remove the file."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def read_statuses() -> list[dict[str, Any]]:
    """Return what the sessions of living processes wrote; files of processes that ended are ignored."""
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(_find_folder().glob("*-*.json"))[:_MAX_FILES]:
            with contextlib.suppress(OSError, ValueError):
                if Path(f"/proc/{int(path.name.split('-')[0])}").exists():
                    document = json.loads(path.read_bytes()[:_MAX_BYTES])
                    found.append(dict(document))
    return found


def _find_folder() -> Path:
    return find_cache_folder() / "offload"
