"""Time of each kind of kernel in one inference here, by one thread: the base of a prediction for a device."""

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime

from edgekit_runtime.errors import BackendError
from edgekit_runtime.sessions.ort import create_session, make_settings
from edgekit_runtime.system.processor_speed import find_cpu, time_fixed_work
from edgekit_toolkit.costs.device_transfer import HostRun
from edgekit_toolkit.measurement.calibration_networks import digest_calibration_networks, make_call_network
from edgekit_toolkit.onnx_graph.ort_options import ort_options
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.targets.spec import KernelKind, Transfer

_MIN_ROUNDS, _MAX_ROUNDS = 7, 100
_CALLS: Final = 200  # of the network with one value, in a row
_BATCH_S: Final = 0.005  # runs in a row; the fixed work between them has emptied the nearest caches
_PROFILED_ROUNDS: Final = 5
_KERNEL_SUFFIX: Final = "_kernel_time"
_OPTIMISED: Final = "optimised.onnx"
_MATMULS: Final = ("MatMul", "Gemm", "FusedMatMul", "FusedGemm", "MatMulNBits")
_INT8_MATMULS: Final = ("QGemm", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat")
_CONVS: Final = ("Conv", "FusedConv", "NhwcFusedConv")
_INT8_CONVS: Final = ("QLinearConv", "ConvInteger")
_RECURRENT: Final = ("LSTM", "GRU", "RNN", "DynamicQuantizeLSTM")


def measure_host_run(model: onnx.ModelProto, feeds: Feeds, *, work_s: float, seconds: float = 1.0) -> HostRun:
    """Return the time of one inference by one thread, for each kind of kernel.

    A processor that others share changes its speed. So each run is compared with a fixed piece of work beside
    it, and the times returned are those at one speed.

    Args:
        model: the model, which onnxruntime runs with its own options.
        feeds: name -> values of each input.
        work_s: processor time of the fixed work at that speed.
        seconds: how long to measure, approximately.

    Raises:
        BackendError: onnxruntime refuses the model or its inputs.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="edgekit-profile-") as folder:
            return _measure(model, feeds, work_s, seconds, Path(folder))
    except Exception as error:  # onnxruntime's classes share no base but Exception
        raise BackendError(f"onnxruntime cannot run the model: {error}") from error


def engine_name() -> str:
    """Return the engine of this machine as profiles name it."""
    return f"onnxruntime {onnxruntime.__version__}"


def find_foreign_profile(transfer: Transfer) -> str | None:
    """Return how a profile was made if it does not hold here, such as on another machine, or None."""
    if transfer.host != find_cpu():
        return f"on a host with {transfer.host}, not {find_cpu()}"
    if transfer.engine != engine_name():
        return f"with {transfer.engine}, not {engine_name()}"
    if transfer.networks != digest_calibration_networks():
        return "with other networks"
    return None


def _measure(model: onnx.ModelProto, feeds: Feeds, work_s: float, seconds: float, folder: Path) -> HostRun:
    session = _open(model, None)
    run, names = getattr(session, "_sess", session).run, [node.name for node in session.get_outputs()]
    begin_s, repeats = time.perf_counter(), 0
    while not repeats or time.perf_counter() - begin_s < _BATCH_S:
        run(names, feeds, None)  # the compiled session under the public one, as devices run it
        repeats += 1
    call = _open_call()
    ratios: list[float] = []
    call_ratios: list[float] = []
    until_s = time.monotonic() + seconds
    while len(ratios) < _MIN_ROUNDS or (len(ratios) < _MAX_ROUNDS and time.monotonic() < until_s):
        begin_s = time.perf_counter()
        for _ in range(repeats):
            run(names, feeds, None)
        now_s = time.perf_counter()
        for _ in range(_CALLS):
            call()
        call_s, fixed_s = (time.perf_counter() - now_s) / _CALLS, time_fixed_work()
        ratios.append((now_s - begin_s) / repeats / fixed_s)
        call_ratios.append(call_s / fixed_s)
    shares = _measure_shares(model, feeds, folder)
    whole_s = statistics.median(ratios) * work_s
    called_s = min(statistics.median(call_ratios) * work_s, whole_s)
    kernels: dict[KernelKind, float] = {kind: share * (whole_s - called_s) for kind, share in shares.items()}
    return HostRun({**kernels, "call": called_s})


def _open_call() -> Callable[[], Any]:
    """Return a function that runs a network of one value: nearly all of its time is the call."""
    session = _open(make_call_network(), None)
    run, names = getattr(session, "_sess", session).run, [node.name for node in session.get_outputs()]
    feeds = {"input": np.zeros(1, np.float32)}
    return lambda: run(names, feeds, None)


def _open(model: onnx.ModelProto, folder: Path | None) -> onnxruntime.InferenceSession:
    """Return a session; with a folder it is profiled, and its optimised graph is written there."""
    options = replace(ort_options(model), threads=1)
    settings = make_settings(options)
    if folder is not None:
        settings.enable_profiling = True
        settings.profile_file_prefix = str(folder / "profile")
        settings.optimized_model_filepath = str(folder / _OPTIMISED)
    return create_session(model.SerializeToString(), settings, options.disabled_optimizers)


def _measure_shares(model: onnx.ModelProto, feeds: Feeds, folder: Path) -> dict[KernelKind, float]:
    """Return the share of each kind of kernel in the time of all kernels."""
    session = _open(model, folder)
    for _ in range(_PROFILED_ROUNDS + 1):
        session.run(None, feeds)
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in json.loads(Path(session.end_profiling()).read_bytes()):
        name = event.get("name", "")
        if event.get("cat") == "Node" and name.endswith(_KERNEL_SUFFIX):
            key = (name.removesuffix(_KERNEL_SUFFIX), event["args"]["op_name"])
            times[key].append(event["dur"] + 0.5)  # onnxruntime truncates times to whole microseconds
    optimised = onnx.load(folder / _OPTIMISED)
    grouped = {node.name for node in optimised.graph.node if _count_groups(node) > 1}
    found: dict[KernelKind, float] = defaultdict(float)
    for (name, op), values in times.items():
        # The first run allocates. Nodes in the body of a loop run several times.
        rest = values[len(values) // (_PROFILED_ROUNDS + 1) :]
        found[_find_kind(op, is_grouped=name in grouped)] += sum(rest)
    total = sum(found.values())
    return {kind: value / total for kind, value in found.items()} if total else {"other": 1.0}


def _count_groups(node: onnx.NodeProto) -> int:
    return next((int(each.i) for each in node.attribute if each.name == "group"), 1)


def _find_kind(op: str, *, is_grouped: bool) -> KernelKind:
    """Return the kind of an operator of onnxruntime's optimised graphs."""
    if op in _RECURRENT:
        return "recurrent"
    if op in _MATMULS:
        return "matmul"
    if op in _INT8_MATMULS:
        return "int8-matmul"
    if op in _CONVS:
        return "depthwise" if is_grouped else "conv"
    if op in _INT8_CONVS:
        return "int8-depthwise" if is_grouped else "int8-conv"
    return "other"
