"""A temporary folder of an emulated device, which the next run removes if this process is killed."""

import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "edgekit-bench"


def make_folder(kind: str) -> Path:
    """Make and return an empty folder.

    First, remove the folders that ended processes left, and kill the programs that run in those folders.

    Args:
        kind: kind of the device; part of the folder's name.
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
