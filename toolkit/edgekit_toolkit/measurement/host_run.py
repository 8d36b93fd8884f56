"""Time of each kind of kernel in one inference here, by one thread: the base of a prediction for a device.

Models and calibration networks run in turns, so that what slows this machine meanwhile slows both alike. Each
network measured for a while by itself differed by 5 to 10 % from one minute to the next; in turns, its time
over that of the others differs by less than 1 %.
"""

import functools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime

from edgekit_runtime.errors import BackendError
from edgekit_runtime.remote.measurement.job_runner import make_inputs
from edgekit_runtime.sessions.ort import create_session, make_settings
from edgekit_toolkit.costs.device_transfer import CACHE_BYTES, HostRun, KernelKind
from edgekit_toolkit.measurement.calibration_networks import make_calibration_networks
from edgekit_toolkit.models.ort_session import session_for
from edgekit_toolkit.onnx_graph.ort_options import ort_options
from edgekit_toolkit.samples.generated import Feeds

_CALL: Final = "call"  # the network whose time is what the engine takes beside kernels
_MIN_ROUNDS: Final = 7
_BATCH_S: Final = 0.005  # runs in a row
_PROFILED_ROUNDS: Final = 5
_KERNEL_SUFFIX: Final = "_kernel_time"
_OPTIMISED: Final = "optimised.onnx"
_MATMULS: Final = ("MatMul", "Gemm", "FusedMatMul", "FusedGemm", "MatMulNBits")
_INT8_MATMULS: Final = ("QGemm", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat")
_CONVS: Final = ("Conv", "FusedConv", "NhwcFusedConv")
_INT8_CONVS: Final = ("QLinearConv", "ConvInteger")
_RECURRENT: Final = ("LSTM", "GRU", "RNN", "DynamicQuantizeLSTM")


@dataclass(frozen=True, slots=True)
class HostRuns:
    """Runs on this machine, measured in turns.

    Attributes:
        networks: run of each calibration network, by its name.
        models: runs of the models, in order.
    """

    networks: Mapping[str, HostRun]
    models: Sequence[HostRun]


def measure_host_runs(models: Sequence[tuple[onnx.ModelProto, Feeds]], seconds: float) -> HostRuns:
    """Return the time of one inference of each model and calibration network, for each kind of kernel.

    Args:
        models: models, which onnxruntime runs with their own options, and values of their inputs by name.
        seconds: how long to measure, approximately; each runs seven times at least.

    Raises:
        BackendError: onnxruntime refuses a model or its inputs.
    """
    networks = _open_networks()
    sessions = [*networks.values(), *(_open_timed(model, feeds) for model, feeds in models)]
    whole_s = _time_in_turns(sessions, seconds)
    call_s = whole_s[list(networks).index(_CALL)]
    runs = [session.split(whole, call_s) for session, whole in zip(sessions, whole_s, strict=True)]
    return HostRuns(dict(zip(networks, runs, strict=False)), runs[len(networks) :])


def engine_name() -> str:
    """Return the engine of this machine as profiles name it."""
    return f"onnxruntime {onnxruntime.__version__}"


@dataclass(frozen=True, slots=True)
class _TimedSession:
    """A model that is open.

    Attributes:
        run: runs it once.
        repeats: runs that fill a batch.
        shares: share of each kind of kernel in the time of all kernels.
        spilled_bytes: bytes beyond `CACHE_BYTES` that its kernels read and write in a run.
    """

    run: Callable[[], object]
    repeats: int
    shares: Mapping[KernelKind, float]
    spilled_bytes: float

    def split(self, whole_s: float, call_s: float) -> HostRun:
        """Return the run that takes `whole_s`, split into kinds of kernels."""
        call_s = min(call_s, whole_s)
        kernels = {kind: share * (whole_s - call_s) for kind, share in self.shares.items()}
        return HostRun({**kernels, "call": call_s}, self.spilled_bytes)


@functools.cache
def _open_networks() -> Mapping[str, _TimedSession]:
    networks = make_calibration_networks()
    return {
        name: _open_timed(network, make_inputs(session_for(network, threads=1)))
        for name, network in networks.items()
    }


def _open_timed(model: onnx.ModelProto, feeds: Feeds) -> _TimedSession:
    try:
        session = _open(model, None)
        inner, names = getattr(session, "_sess", session), [node.name for node in session.get_outputs()]

        def run() -> object:
            return inner.run(names, feeds, None)  # the compiled session, as devices run it

        begin_s, repeats = time.perf_counter(), 0
        while not repeats or time.perf_counter() - begin_s < _BATCH_S:
            run()
            repeats += 1
        with tempfile.TemporaryDirectory(prefix="edgekit-profile-") as folder:
            shares, spilled_bytes = _profile(model, feeds, Path(folder))
    except Exception as error:  # onnxruntime's classes share no base but Exception
        raise BackendError(f"onnxruntime cannot run the model: {error}") from error
    return _TimedSession(run, repeats, shares, spilled_bytes)


def _time_in_turns(sessions: Sequence[_TimedSession], seconds: float) -> list[float]:
    """Return the median time of a run of each, from batches in turns of random order."""
    found: list[list[float]] = [[] for _ in sessions]
    orders, until_s = np.random.default_rng(0), time.monotonic() + seconds
    while len(found[0]) < _MIN_ROUNDS or time.monotonic() < until_s:
        for number in orders.permutation(len(sessions)):
            run, repeats = sessions[number].run, sessions[number].repeats
            if repeats > 1:
                run()  # refills caches that the others used
            begin_s = (
                time.thread_time()
            )  # waiting for a processor does not count; the engine has no other thread
            for _ in range(repeats):
                run()
            found[number].append((time.thread_time() - begin_s) / repeats)
    return [float(np.median(times)) for times in found]


def _open(model: onnx.ModelProto, folder: Path | None) -> onnxruntime.InferenceSession:
    """Return a session; with a folder it is profiled, and its optimised graph is written there."""
    options = replace(ort_options(model), threads=1)
    settings = make_settings(options)
    if folder is not None:
        settings.enable_profiling = True
        settings.profile_file_prefix = str(folder / "profile")
        settings.optimized_model_filepath = str(folder / _OPTIMISED)
    return create_session(model.SerializeToString(), settings, options.disabled_optimizers)


def _profile(model: onnx.ModelProto, feeds: Feeds, folder: Path) -> tuple[dict[KernelKind, float], float]:
    """Return the share of each kind of kernel in the time of all kernels, and the spilled bytes of a run."""
    session = _open(model, folder)
    for _ in range(_PROFILED_ROUNDS + 1):
        session.run(None, feeds)
    events: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for event in json.loads(Path(session.end_profiling()).read_bytes()):
        name = event.get("name", "")
        if event.get("cat") == "Node" and name.endswith(_KERNEL_SUFFIX):
            events[name.removesuffix(_KERNEL_SUFFIX), event["args"]["op_name"]].append(event)
    optimised = onnx.load(folder / _OPTIMISED)
    grouped = {node.name for node in optimised.graph.node if _count_groups(node) > 1}
    found: dict[KernelKind, float] = defaultdict(float)
    spilled_bytes = 0
    for (name, op), of_kernel in events.items():
        # The first run allocates. Nodes in the body of a loop run several times.
        rest = of_kernel[len(of_kernel) // (_PROFILED_ROUNDS + 1) :]
        # onnxruntime truncates times to whole microseconds.
        found[_find_kind(op, is_grouped=name in grouped)] += sum(event["dur"] + 0.5 for event in rest)
        spilled_bytes += sum(max(_count_bytes(event["args"]) - CACHE_BYTES, 0) for event in rest)
    if not (total := sum(found.values())):
        return {"other": 1.0}, 0.0
    return {kind: value / total for kind, value in found.items()}, spilled_bytes / _PROFILED_ROUNDS


def _count_bytes(kernel: Mapping[str, Any]) -> int:
    """Return the bytes that a kernel reads and writes, from its profile."""
    return sum(int(kernel.get(part, 0)) for part in ("activation_size", "parameter_size", "output_size"))


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
