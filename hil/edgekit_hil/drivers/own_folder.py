"""Temporary folders of emulated devices. If this process is killed, the next run deletes them."""

import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "edgekit-bench"


def make_folder(kind: str) -> Path:
    """Create an empty folder.

    Before that, delete the folders of processes that have ended, and kill all programs that run in them.

    Args:
        kind: The kind of device, which becomes part of the folder's name.
    """
    for stale_folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*-*-*"):
        owner = stale_folder.name.split("-")[-2]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _end_programs(stale_folder)
            shutil.rmtree(stale_folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}-{kind}-{os.getpid()}-"))


def _end_programs(folder: Path) -> None:
    """Kill the programs that run in a folder."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            if (process / "cwd").readlink().is_relative_to(folder):
                os.kill(int(process.name), signal.SIGKILL)
