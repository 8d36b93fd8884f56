"""Measures the peak memory of a new process on this machine that opens and runs one model.

The results hold for this machine only. `costs.peak_memory` estimates the memory on a target.
"""

import functools
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import BackendError
from edgekit_runtime.system.child_process import ChildProcess, describe_end
from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.measurement.brevity import is_brief
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.samples.generated import Feeds

_MODULE: Final = "edgekit_toolkit.measurement.peak_memory_child"
_RUNS: Final = 3  # the second can need more than the first
_TIME_LIMIT_S: Final = 120.0
_PROC_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The peak resident memory of a process that opens a package with `open_session` and runs its model.

    Attributes:
        total_bytes: The memory of the whole process, including the interpreter, the runtime and the engine.
        engine_bytes: The memory of a process that runs `trivial_model` on the same engine.
    """

    total_bytes: int
    engine_bytes: int

    @property
    def model_bytes(self) -> int:
        """The memory that the model needs in addition to the engine."""
        return self.total_bytes - self.engine_bytes


def measure_peak_memory(
    model: bytes,
    feeds: Feeds,
    *,
    engine: str = "ort",
    threads: int = 1,
    options: Mapping[str, JsonValue] | None = None,
    time_limit_s: float = _TIME_LIMIT_S,
) -> PeakMemory:
    """Measure the peak memory of a new process on this machine that opens and runs a model with the runtime.

    Args:
        model: The content of the model's file.
        feeds: The arrays of all inputs, by name.
        engine: The name of the engine.
        threads: The number of threads of the engine.
        options: The backend options, as in a manifest. Only onnxruntime has any.
        time_limit_s: The time limit of the process.

    Raises:
        BackendError: The process failed or took too long, or this system has no /proc.
    """
    engine_bytes = measure_engine_bytes(engine, threads)
    request = {"engine": engine, "threads": threads, "options": dict(options or {})}
    return PeakMemory(_peak_bytes(model, feeds, request, time_limit_s), engine_bytes)


def measure_model_memory(model: Model, feeds: Feeds) -> PeakMemory:
    """Measure the peak memory of a new process here that opens the model as a device does, and runs it.

    Raises:
        BackendError: The process failed or took too long, or this system has no /proc.
    """
    if is_brief("memory"):
        engine_bytes = measure_engine_bytes(model.engine)
        return PeakMemory(engine_bytes + len(model.content), engine_bytes)
    return measure_peak_memory(model.content, feeds, engine=model.engine, options=model.options)


def measure_engine_bytes(engine: str = "ort", threads: int = 1) -> int:
    """Return the peak memory, in bytes, of a process that runs `trivial_model` on this machine.

    The result is cached for each engine and number of threads.

    Raises:
        BackendError: The process failed or took too long, or this system has no /proc.
    """
    return _measure_engine_bytes(engine, threads)  # a cache counts left-out arguments as others


@functools.cache
def _measure_engine_bytes(engine: str, threads: int) -> int:
    feeds: Feeds = {"x": np.zeros(1, np.float32)}
    request: dict[str, Any] = {"engine": engine, "threads": threads, "options": {}}
    return _peak_bytes(trivial_model(engine), feeds, request, _TIME_LIMIT_S)


def trivial_model(engine: str) -> bytes:
    """Return the file of a model that computes y = Relu(x). Both tensors are float32 of shape [1].

    Raises:
        TargetError: `engine` is not in `SUPPORTS`.
    """
    value = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"}
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "trivial", [value["x"]], [value["y"]])
    # The oldest versions that suffice, so that any engine loads it.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=7)
    return find_support(engine).maker.convert(model).content


def _peak_bytes(
    model: bytes,
    feeds: Mapping[str, NDArray[Any]],
    request: Mapping[str, Any],
    time_limit_s: float,
) -> int:
    if not _PROC_STATUS.exists():
        raise BackendError(
            "peak memory is read from /proc/self/status, which this system does not have; use Linux"
        )
    try:
        with tempfile.TemporaryDirectory(prefix="edgekit-memory-") as name:
            path = _write_request(Path(name), model, feeds, request)
            with ChildProcess(_MODULE, str(path), folder=path.parent, output="keep") as child:
                code = child.wait(time_limit_s)
                output, last_line = child.output, child.last_line
    except OSError as error:
        raise BackendError(
            f"measuring memory needs temporary files: {error}; free space or set TMPDIR"
        ) from error
    if code is None:
        raise BackendError(f"measuring memory took longer than {time_limit_s:g} s")
    if code < 0:
        how = describe_end(code)
        hint = " (often: out of memory)" if how.endswith("SIGKILL") else ""
        raise BackendError(f"the process that loads and runs the model was ended {how}{hint}")
    if code > 0:
        raise BackendError(f"the process that loads and runs the model failed: {last_line}")
    return int(json.loads(output)["peak_bytes"])


def _write_request(
    folder: Path, model: bytes, feeds: Mapping[str, NDArray[Any]], request: Mapping[str, Any]
) -> Path:
    (folder / "model").write_bytes(model)
    paths = {}
    for index, (input_name, array) in enumerate(feeds.items()):
        paths[input_name] = str(folder / f"{index}.npy")
        np.save(paths[input_name], array, allow_pickle=False)
    whole = {**request, "model": str(folder / "model"), "feeds": paths, "runs": _RUNS}
    path = folder / "request.json"
    path.write_text(json.dumps(whole), encoding="utf-8")
    return path
