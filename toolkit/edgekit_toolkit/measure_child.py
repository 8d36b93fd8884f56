"""The process whose memory `measure` reads: `python -m edgekit_toolkit.measure_child REQUEST.json`.

It imports and does what a minimal device process does: numpy, the engine, load a model from a file, run it.
For onnxruntime it goes around our own session, which imports what verifies packages.
It writes one JSON object to the standard output: `{"peak_bytes": int}`.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Run = Callable[[Mapping[str, Any]], object]


def _open_ort(request: Mapping[str, Any]) -> Run:
    import onnxruntime

    from edgekit_runtime.ort_memory import lean_loading, make_lean

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    settings.intra_op_num_threads = request["threads"]
    settings.inter_op_num_threads = 1
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if request["fold_weights"]:
        settings.add_session_config_entry("session.disable_quant_qdq", "1")
    make_lean(settings)
    with lean_loading():
        session = onnxruntime.InferenceSession(
            request["model"], settings, providers=["CPUExecutionProvider"], enable_fallback=0
        )
    return lambda feeds: session.run(None, feeds)


def _open_litert(request: Mapping[str, Any]) -> Run:
    # Our session, which knows names and codes of files without a signature.
    from edgekit_runtime.sessions.litert import LiteRtOptions, LiteRtSession

    return LiteRtSession(Path(request["model"]), LiteRtOptions(threads=request["threads"])).run


_OPEN: Mapping[str, Callable[[Mapping[str, Any]], Run]] = {"ort": _open_ort, "litert": _open_litert}


def _peak_bytes() -> int:
    # Not ru_maxrss: Linux hands that one down from the parent process through exec.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _main(request_path: str) -> None:
    request: dict[str, Any] = json.loads(Path(request_path).read_text(encoding="utf-8"))
    run = _OPEN[request["engine"]](request)
    feeds = {name: np.load(path, allow_pickle=False) for name, path in request["feeds"].items()}
    for _ in range(request["runs"]):
        run(feeds)  # the outputs are dropped before the next run
    json.dump({"peak_bytes": _peak_bytes()}, sys.stdout)


if __name__ == "__main__":
    try:
        _main(sys.argv[1])
    except Exception as error:  # the parent reports it; a traceback of this process would help nobody
        sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))
