"""Measures each kernel of an inference here with one thread, as the basis of predictions for a device.

Models and calibration networks run in turns, so that other load on this machine slows down both. If each
network is measured separately, its time differs by 5 to 10 % from one minute to the next. In turns, its time
relative to the others differs by about 1 %.
"""

import functools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import onnx

from edgekit_runtime.errors import BackendError
from edgekit_runtime.sessions.ort import create_session, make_settings
from edgekit_toolkit.costs.device_transfer import CACHE_BYTES, HostRun, KernelKind, KernelTime
from edgekit_toolkit.costs.target_model import NodeCost, kernel_latency_s
from edgekit_toolkit.measurement.brevity import shorten_batch_s, shorten_s
from edgekit_toolkit.measurement.calibration_networks import make_calibration_models
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.ort_options import ort_options, stated_options
from edgekit_toolkit.onnx_graph.traversal import nodes
from edgekit_toolkit.openings.model_opening import check_opening
from edgekit_toolkit.samples.generated import Feeds, generate_feeds
from edgekit_toolkit.targets.loader import load_target

_CALL: Final = "call"  # the network whose time is the engine's overhead beside kernels
_MIN_ROUNDS: Final = 3
_BATCH_S: Final = 0.005  # length of a batch of consecutive runs
_PROFILED_ROUNDS: Final = 6  # the first one allocates
_KERNEL_SUFFIX: Final = "_kernel_time"
_MATMULS: Final = ("MatMul", "Gemm", "FusedMatMul", "FusedGemm", "MatMulNBits")
_INT8_MATMULS: Final = ("QGemm", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat")
_CONVS: Final = ("Conv", "FusedConv", "NhwcFusedConv")
_INT8_CONVS: Final = ("QLinearConv", "ConvInteger")
_TFLITE_CONVS: Final = ("CONV_2D", "CONV_3D", "TRANSPOSE_CONV")
_TFLITE_MATMULS: Final = ("FULLY_CONNECTED", "BATCH_MATMUL")
_CONTROL_FLOW: Final = ("If", "Loop", "Scan")
_VIEWS: Final = ("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")
_LOOKUPS: Final = ("Gather", "GatherElements", "GatherND", "EmbedLayerNormalization")
_TFLITE_LOOKUPS: Final = ("EMBEDDING_LOOKUP", "GATHER", "GATHER_ND")
_RECURRENT: Final = ("LSTM", "GRU", "RNN", "DynamicQuantizeLSTM")


@dataclass(frozen=True, slots=True)
class HostRuns:
    """Runs on this machine, which were measured in turns.

    Attributes:
        networks: A dict from the name of a calibration network to its run.
        models: The runs of the models, in order.
    """

    networks: Mapping[str, HostRun]
    models: Sequence[HostRun]


def measure_host_runs(models: Sequence[tuple[Model, Feeds]], engine: str, seconds: float) -> HostRuns:
    """Return the time of one inference of each model and calibration network, split into kernels.

    `models` are pairs of a model for this engine and its inputs. Each model runs with its own options.
    `seconds` is the approximate duration of all measurements. Each model runs at least three times.

    Raises:
        BackendError: The engine refuses a model or its inputs.
        ModelError: The work of a model for LiteRT cannot be counted.
    """
    networks = _open_networks(engine)
    sessions = [*networks.values(), *(_open_timed(model, feeds) for model, feeds in models)]
    whole_s = _time_in_turns(sessions, shorten_s(seconds))
    call_s = whole_s[list(networks).index(_CALL)]
    runs = [session.split(whole, call_s) for session, whole in zip(sessions, whole_s, strict=True)]
    return HostRuns(dict(zip(networks, runs, strict=False)), runs[len(networks) :])


@dataclass(frozen=True, slots=True)
class _TimedSession:
    """A model that is open.

    Attributes:
        run: runs it once.
        repeats: runs that fill a batch.
        kernels: its kernels; only the ratios of their times count.
        spilled_bytes: bytes beyond `CACHE_BYTES` that its kernels read and write in a run.
    """

    run: Callable[[], object]
    repeats: int
    kernels: Sequence[KernelTime]
    spilled_bytes: float

    def split(self, whole_s: float, call_s: float) -> HostRun:
        """Return the run that takes `whole_s`, split into kernels."""
        call = KernelTime("call", min(call_s, whole_s))
        profiled = self.kernels or [KernelTime("other", 1.0)]
        factor = (whole_s - call.seconds) / HostRun(profiled).whole_s
        kernels = [replace(kernel, seconds=factor * kernel.seconds) for kernel in profiled]
        return HostRun([*kernels, call], self.spilled_bytes)


@functools.cache
def _open_networks(engine: str) -> Mapping[str, _TimedSession]:
    models = make_calibration_models(engine)
    return {name: _open_timed(model, _make_feeds(model)) for name, model in models.items()}


def _make_feeds(model: Model) -> Feeds:
    (feeds,) = generate_feeds(model.specs()[0], 1, 0)
    return feeds


def _open_timed(model: Model, feeds: Feeds) -> _TimedSession:
    if isinstance(model, OnnxModel):
        events, grouped = _profile(model.proto, feeds)
        kernels, spilled_bytes = read_kernels(events, grouped, _find_shortest_us())
    else:
        kernels, spilled_bytes = _model_kernels(model.node_costs({}))
    run = functools.partial(model.open_session(threads=1).run, feeds)
    return _TimedSession(run, _fill_batch(run), kernels, spilled_bytes)


def _fill_batch(run: Callable[[], object]) -> int:
    """Return how many runs fill a batch."""
    run()  # the first one allocates
    end_s, repeats = time.perf_counter() + shorten_batch_s(_BATCH_S), 0
    while not repeats or time.perf_counter() < end_s:
        run()
        repeats += 1
    return repeats


def _time_in_turns(sessions: Sequence[_TimedSession], seconds: float) -> list[float]:
    """Return the median processor time of a run of each, from batches in turns of random order.

    The engine has no other thread than this one.
    """
    durations: list[list[float]] = [[] for _ in sessions]
    orders, until_s = np.random.default_rng(0), time.monotonic() + seconds
    while len(durations[0]) < _MIN_ROUNDS or time.monotonic() < until_s:
        for number in orders.permutation(len(sessions)):
            run, repeats = sessions[number].run, sessions[number].repeats
            run()  # refills caches that the others used
            begin_s = time.thread_time()
            for _ in range(repeats):
                run()
            durations[number].append((time.thread_time() - begin_s) / repeats)
    return [float(np.median(times)) for times in durations]


_KernelEvents: TypeAlias = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]
"""A dict from (name, operator) of a kernel to onnxruntime's events of this kernel, in order. A kernel in a
loop has several events in each run."""


@functools.cache
def _find_shortest_us() -> float:
    """Return the time in onnxruntime's profile of a kernel on one value, which does next to nothing."""
    model = make_calibration_models("ort")[_CALL]
    assert isinstance(model, OnnxModel)  # noqa: S101  # for the type checker
    (events,) = _profile(model.proto, _make_feeds(model))[0].values()
    return float(statistics.median(event["dur"] for event in events))


def _profile(model: onnx.ModelProto, feeds: Feeds) -> tuple[_KernelEvents, Collection[str]]:
    """Return the events of each kernel in some runs, and the names of convolutions in groups.

    Raises:
        BackendError: onnxruntime refuses the model or its inputs.
    """
    options = replace(ort_options(model), threads=1)
    settings = make_settings(options)
    settings.enable_profiling = True
    with tempfile.TemporaryDirectory(prefix="edgekit-profile-") as folder:
        settings.profile_file_prefix = f"{folder}/profile"
        settings.optimized_model_filepath = optimised = f"{folder}/optimised.onnx"
        try:
            content = model.SerializeToString()
            check_opening("ort", content, stated_options(model))
            session = create_session(content, settings, options)
            for _ in range(_PROFILED_ROUNDS):
                session.run(None, feeds)
        except Exception as error:  # onnxruntime's classes share no base but Exception
            raise BackendError(f"onnxruntime cannot run the model: {error}") from error
        profile = json.loads(Path(session.end_profiling()).read_bytes())
        grouped = {node.name for node in nodes(onnx.load(optimised)) if _count_groups(node) > 1}
    events: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for event in profile:
        name = event.get("name", "")
        if event.get("cat") == "Node" and name.endswith(_KERNEL_SUFFIX):
            events[name.removesuffix(_KERNEL_SUFFIX), event["args"]["op_name"]].append(event)
    return events, grouped


def read_kernels(
    events: _KernelEvents, grouped: Collection[str], shortest_us: float, rounds: int = _PROFILED_ROUNDS
) -> tuple[list[KernelTime], float]:
    """Return the time of each kernel, and the spilled bytes of a run, see `HostRun`.

    Args:
        events: A dict from name and operator of a kernel to its events in onnxruntime's profile.
        grouped: The names of grouped convolutions.
        shortest_us: The time of a kernel that does nothing, in microseconds. Kernels that take up to this
            time get the kind `call`, because additional threads do not speed them up.
        rounds: The number of runs, at least two. The first run is ignored, because it allocates memory.
    """
    kernels: list[KernelTime] = []
    spilled_bytes = 0.0
    for (name, op), of_kernel in events.items():
        in_a_run = len(of_kernel) // rounds
        # The time of control flow is that of its body, whose kernels have events of their own.
        if op in _CONTROL_FLOW or not in_a_run:
            continue
        # The median: others take the processor away in the middle of a kernel. Times are cut to microseconds.
        later = of_kernel[in_a_run:]
        kernel_us = statistics.median(event["dur"] for event in later)
        kind = "call" if kernel_us <= shortest_us else _find_kind(op, is_grouped=name in grouped)
        kernels.append(KernelTime(kind, 1e-6 * (kernel_us + 0.5), in_a_run))
        spilled_bytes += in_a_run * max(_count_bytes(op, later[0]["args"]) - CACHE_BYTES, 0)
    return kernels, spilled_bytes


def _count_bytes(op: str, kernel: Mapping[str, Any]) -> int:
    """Return the bytes that a kernel reads and writes, from its profile."""
    if op in _VIEWS:
        return 0
    output_bytes = int(kernel.get("output_size", 0))
    if op in _LOOKUPS:  # of a table, most of which it does not touch
        return 2 * output_bytes
    return output_bytes + sum(int(kernel.get(part, 0)) for part in ("activation_size", "parameter_size"))


def _model_kernels(work: Sequence[NodeCost]) -> tuple[list[KernelTime], float]:
    """Return the time of each kernel, and the spilled bytes of a run, from the work of each kernel.

    LiteRT does not say how long its kernels take, so the times are those of the coefficients of `x86-64`.
    """
    target = load_target("x86-64")
    mode = target.power.mode(target.power.default_mode)
    kernels: list[KernelTime] = []
    spilled_bytes = 0.0
    for node in work:
        seconds = kernel_latency_s(replace(node, repeats=1), target, mode)
        kernels.append(KernelTime(_find_tflite_kind(node), seconds, node.repeats))
        touched = 2 * node.bytes_written if node.op in _TFLITE_LOOKUPS else node.traffic_bytes
        spilled_bytes += node.repeats * max(touched - CACHE_BYTES, 0)
    return kernels, spilled_bytes


def _find_tflite_kind(node: NodeCost) -> KernelKind:
    """Return the kind of an operator of a `.tflite` model."""
    if node.op in _TFLITE_CONVS:
        return "int8-conv" if node.precision == "int8" else "conv"
    if node.op == "DEPTHWISE_CONV_2D":
        return "int8-depthwise" if node.precision == "int8" else "depthwise"
    if node.op in _TFLITE_MATMULS:
        return "int8-matmul" if node.precision == "int8" else "matmul"
    return "other"


def _count_groups(node: onnx.NodeProto) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == "group"), 1)


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
