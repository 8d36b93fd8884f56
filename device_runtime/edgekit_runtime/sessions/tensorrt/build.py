"""Builds TensorRT engines in a separate process and waits for them."""

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from edgekit_runtime.errors import BackendError, UnavailableError
from edgekit_runtime.records import dataclass
from edgekit_runtime.sessions.tensorrt.cache import StoppedError
from edgekit_runtime.sessions.tensorrt.options import TensorRtOptions
from edgekit_runtime.system.child_process import ChildProcess
from edgekit_runtime.system.engines import find_engine
from edgekit_runtime.system.memory_folder import MEMORY, open_memory_folder

_POLL_S: Final = 0.2
_PREFIX: Final = "edgekit-tensorrt-"


@dataclass(frozen=True, slots=True)
class BuiltEngines:
    """The result of a build.

    Attributes:
        plans: A dict from precision (`int8`, `fp16` or `fp32`) to serialized engine.
        refused: A dict from precision to the reason why its engine was not built. The key `model` has the
            reason why the model cannot be parsed.
        timing: The timing cache of TensorRT, or None.
    """

    plans: Mapping[str, bytes]
    refused: Mapping[str, str]
    timing: bytes | None


def build_engines(
    model: bytes,
    options: TensorRtOptions,
    *,
    timings: tuple[bytes, ...],
    stop: threading.Event,
    library: str = "tensorrt",
    compute_capability: str | None = None,
) -> BuiltEngines:
    """Build the engines of a model in a process with low priority, and return them.

    Args:
        model: The whole ONNX model.
        options: The build options.
        timings: The timing caches to start from.
        stop: An event that cancels the build.
        library: The name of the TensorRT module.
        compute_capability: The GPU to build for, such as `SM86`, or None for the GPU of this machine. Only
            TensorRT-RTX can build for another GPU.

    Raises:
        StoppedError: `stop` was set.
        BackendError: The process crashed or took too long. A refused precision is not an error.
    """
    with _work_folder() as folder:
        (folder / "model.onnx").write_bytes(model)
        for index, timing in enumerate(timings):
            (folder / f"timing-{index}.cache").write_bytes(timing)
        request = {**options.to_json(), "library": library, "compute_capability": compute_capability}
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        _run_child(folder, stop)
        answer: dict[str, Any] = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
        plans = {precision: (folder / f"{precision}.plan").read_bytes() for precision in answer["built"]}
        timing_path = folder / "timing.cache"
        timing_cache = timing_path.read_bytes() if timing_path.exists() else None
    refused = {precision: "; ".join(messages) for precision, messages in answer["refused"].items()}
    return BuiltEngines(plans, refused, timing_cache)


@contextlib.contextmanager
def _work_folder() -> Iterator[Path]:
    """Yield an empty folder in memory: the model of an encrypted package must touch no disk.

    Folders of processes that were killed are removed first.

    Raises:
        BackendError: this machine has no such folder.
    """
    for path in MEMORY.glob(f"{_PREFIX}*"):
        if not Path("/proc", path.name.split("-")[2]).exists():
            shutil.rmtree(path, ignore_errors=True)
    try:
        with open_memory_folder(f"{_PREFIX}{os.getpid()}-") as folder:
            yield folder
    except UnavailableError as cause:
        raise BackendError(f"engines cannot be built: {cause}") from cause


def _run_child(folder: Path, stop: threading.Event) -> None:
    limit_s = find_engine("tensorrt").builds_for_s
    end_s = time.monotonic() + limit_s
    with ChildProcess("edgekit_runtime.sessions.tensorrt.child", folder=folder) as child:
        while (code := child.wait(0)) is None:
            if stop.wait(_POLL_S):
                raise StoppedError
            if time.monotonic() > end_s:
                raise BackendError(f"building engines took over {limit_s:g} s; shrink the model")
        if code:
            raise BackendError(f"building engines ended {child.explain_end()}")
