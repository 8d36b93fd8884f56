"""The main module of the process whose memory `peak_memory` measures.

The process imports the same modules as `open_session`, maps the model's file into memory, and opens and runs
the model as a device does. It does not read or verify a package, because a device frees that memory before it
opens the model. It prints one JSON object, `{"peak_bytes": int}`.
"""

import json
import mmap
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgekit_runtime import sessions
from edgekit_runtime.sessions.backends import open_model
from edgekit_runtime.trust import verifier_process  # noqa: F401  # not used here: `open_session` imports it


def _open(request: Mapping[str, Any]) -> sessions.Session:
    with Path(request["model"]).open("rb") as file:
        model = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return open_model(request["engine"], model, request["options"], request["threads"])


def _main(request_path: str) -> None:
    request: dict[str, Any] = json.loads(Path(request_path).read_text(encoding="utf-8"))
    session = _open(request)
    feeds = {name: np.load(path, allow_pickle=False) for name, path in request["feeds"].items()}
    for _ in range(request["runs"]):
        session.run(feeds)  # the outputs are dropped before the next run
    json.dump({"peak_bytes": peak_bytes()}, sys.stdout)


def peak_bytes(process: int | str = "self") -> int:
    """Return the peak resident memory of a process so far, in bytes.

    Args:
        process: The process id, or "self".

    Raises:
        OSError: There is no such process, or no /proc.
    """
    # Not ru_maxrss: a process inherits it from its parent through exec.
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    try:
        _main(sys.argv[1])
    except Exception as error:  # the parent reports it; a traceback of this process would help nobody
        sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))
