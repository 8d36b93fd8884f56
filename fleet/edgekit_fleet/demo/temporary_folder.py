"""A temporary folder that is removed when the process that created it ends or is killed.

The child process `python -m ...temporary_folder DESCRIPTOR FOLDER` waits until the other end of its socket is
closed, which also happens when its parent is killed. It then removes the folder.
"""

import contextlib
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from edgekit_runtime.system.child_process import ChildProcess

_REMOVAL_LIMIT_S: Final = 60.0  # processes that end with the owner may still write for a while
_PAUSE_S: Final = 0.1


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a new folder, which is removed at the end of the `with` block or of this process."""
    path = Path(tempfile.mkdtemp(prefix=prefix))
    near, far = socket.socketpair()
    with near:
        with far:
            child = ChildProcess(__name__, str(path), channel=far, own_session=True)
        with child:
            try:
                yield path
            finally:
                near.close()
                child.wait(_REMOVAL_LIMIT_S)


def remove(path: Path) -> None:
    """Remove a folder that other processes may still write to. Give up after a minute."""
    for _ in range(int(_REMOVAL_LIMIT_S / _PAUSE_S)):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        channel.recv(1)
    remove(Path(sys.argv[2]))
