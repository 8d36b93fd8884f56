"""Measures models on this machine for the planner: `edgekit-device offload measure`.

It runs one job and ends. It needs numpy and onnxruntime, but not the package onnx. The host interprets the
kernels, see `edgekit_offload.profiling`.
"""

import contextlib
import json
import random
import statistics
import tempfile
import time
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from edgekit_runtime.codecs.compression import compress, decompress
from edgekit_runtime.codecs.media import MediaCodec, decode_media, encode_media
from edgekit_runtime.errors import BackendError, CutError
from edgekit_runtime.offload.measurement.job import (
    MAX_BLOBS_BYTES,
    Job,
    JobGraph,
    JobInput,
    JobResult,
    NodeTiming,
    Timing,
    TransferCoding,
)
from edgekit_runtime.offload.measurement.machine_facts import MachineFacts, describe_machine
from edgekit_runtime.offload.measurement.request_cost import average_middle, is_precise, measure_request
from edgekit_runtime.sessions.backends import open_model
from edgekit_runtime.sessions.latency import LatencyLimits, measure_latency
from edgekit_runtime.sessions.options import read_options
from edgekit_runtime.sessions.ort import OrtOptions, create_session, make_settings, with_weights
from edgekit_runtime.sessions.ort_providers import (
    ON_PROCESSOR,
    PROCESSOR,
    VARIABLE,
    choose_provider,
    describe_provider,
)
from edgekit_runtime.system.processor_speed import (
    MOST_WAITING,
    SpeedGate,
    begin_anywhere,
)
from edgekit_runtime.tensors import DTYPES, Array

if TYPE_CHECKING:
    import onnxruntime

_MAX_PROFILED_NODES: Final = (
    20_000  # onnxruntime writes 800 bytes for each, and Python reads them all at once
)
_NODE_BYTES: Final = 150  # least size in the file of a graph without weights
_MIN_ROUNDS: Final = 5
_MAX_ROUNDS: Final = 2000
_WARMUP_ROUNDS: Final = 3
_IN_A_ROW: Final = 5
_BATCH_S: Final = 0.03
_FIND_SPEED_S: Final = 1.2
# Pause before a run: a request comes after a while, when others use caches, TLBs and branch predictors.
# Small models then take 1.4 to 2.6 times as long as runs in a row, in processor time too, whether the
# processor sleeps meanwhile or not. Pauses of 100 ms add another 5 to 10 %.
PAUSE_S: Final = 0.02
_REQUEST_SHARE: Final = 0.5  # share of a job's time
_KERNEL_SUFFIX: Final = "_kernel_time"
_TRUNCATED_S: Final = 0.5e-6  # onnxruntime cuts times to whole microseconds: half of one is lost on average


def measure(job: Job, blobs: Sequence[memoryview]) -> JobResult:
    """Run a job, and return its measurements.

    Raises:
        CutError: an input does not fit its blob, or a tensor to encode or decode is missing.
        BackendError: onnxruntime is missing, or refused a graph or its inputs.
        TransportError: this machine cannot connect to itself.
    """
    if job.kind == "batch":
        return _time_batches(job, blobs)
    gate = SpeedGate(job.usual_s, min(job.seconds, _FIND_SPEED_S))
    gpu = describe_provider(choose_provider())
    facts = replace(describe_machine(job.quota), usual_s=gate.usual_s, gpu=gpu)
    with tempfile.TemporaryDirectory(prefix="edgekit-measure-") as folder:
        if job.kind == "profile":
            measured = _profile(facts, job, blobs, Path(folder), gate)
            request = measure_request(PAUSE_S, job.seconds * _REQUEST_SHARE, gate, facts.quota or 1.0)
            return replace(measured, machine=replace(facts, usual_s=gate.usual_s), request=request)
        runs = [_open_half(graph, blobs, Path(folder), number) for number, graph in enumerate(job.graphs)]
        clocks, has_waits = [_Clock(run, gate, job.quota) for run in runs], _has_waits(facts, job)
        for run in runs * _WARMUP_ROUNDS:
            run()
        orders, until_s = np.random.default_rng(0), time.monotonic() + job.seconds * MOST_WAITING
        while _lacks_rounds(clocks, job.seconds, until_s):
            for number in orders.permutation(len(clocks)):
                clocks[number].run()  # refills caches that the others used; a device runs one way repeatedly
                for _ in range(_IN_A_ROW):
                    clocks[number].time()
        usual_s = _settle(clocks, gate)
    timings = (replace(_summarise(clock.seconds, has_waits), usual_s=usual_s) for clock in clocks)
    return JobResult(replace(facts, usual_s=usual_s), tuple(timings))


def _has_waits(facts: MachineFacts, job: Job) -> bool:
    """Return whether the kernel makes runs wait for a quota, which their middle half does not show.

    The quota that a sender grants is spread evenly (`edgekit_host.emulation`).
    """
    return facts.quota is not None and job.quota is None


def _profile(
    facts: MachineFacts,
    job: Job,
    blobs: Sequence[memoryview],
    folder: Path,
    gate: SpeedGate,
) -> JobResult:
    """Return times of a graph's nodes, and of whole runs without profiling, in turn.

    On a GPU only whole runs are measured: onnxruntime's times of nodes there end before their kernels do.
    Times of nodes are then the processor's.
    """
    graph = job.graphs[0]
    plain = _open(graph, blobs, folder, 0)
    obstacle, session, profiled = "", None, plain
    try:
        profiled, session = _open_profiled(graph, blobs, folder)
        profiled()
    except BackendError as cause:
        obstacle = f"its kernels cannot be profiled: {cause}"
    most = _MAX_ROUNDS
    if session is not None:
        nodes = (folder / "optimised.onnx").stat().st_size // _NODE_BYTES + 1
        most = max(_MIN_ROUNDS, min(_MAX_ROUNDS, _MAX_PROFILED_NODES // nodes))
    for _ in range(_WARMUP_ROUNDS):
        plain()
    clock, until_s = _Clock(plain, gate, job.quota), time.monotonic() + job.seconds * MOST_WAITING
    while _lacks_rounds([clock], job.seconds, until_s):
        clock.time()
        if job.usual_s is None and gate.follow():
            clock.sort_again()
        if session is not None and clock.rounds <= most:
            begin_s = time.monotonic()
            time.sleep(PAUSE_S)
            profiled()
            clock.spent_s += time.monotonic() - begin_s
    _settle([clock], gate)
    whole = _summarise(clock.seconds, _has_waits(facts, job))
    if session is None:
        return JobResult(facts, (whole,), obstacle=obstacle)
    timings = _read_profile(Path(session.end_profiling()))
    content = (folder / "optimised.onnx").read_bytes()
    return JobResult(facts, (whole,), timings, b64encode(content).decode("ascii"))


def _open_profiled(
    graph: JobGraph, blobs: Sequence[memoryview], folder: Path
) -> "tuple[Callable[[], object], onnxruntime.InferenceSession]":
    def prepare(settings: "onnxruntime.SessionOptions") -> None:
        settings.enable_profiling = True
        settings.profile_file_prefix = str(folder / "profile")
        settings.optimized_model_filepath = str(folder / "optimised.onnx")
        for name, value in (
            ("initializers_file_name", "weights"),
            ("initializers_min_size_in_bytes", "1024"),
        ):
            settings.add_session_config_entry(f"session.optimized_model_external_{name}", value)

    session = _load(graph, blobs, folder / "profiled.onnx", prepare)
    return _bind(session, graph, blobs), session


def _open(graph: JobGraph, blobs: Sequence[memoryview], folder: Path, number: int) -> Callable[[], object]:
    return _bind(_load_to_run(graph, blobs, folder / f"{number}.onnx"), graph, blobs)


def _load_to_run(graph: JobGraph, blobs: Sequence[memoryview], path: Path) -> "onnxruntime.InferenceSession":
    """Return a session where packages of this machine run.

    Raises:
        BackendError: a GPU works here, and refuses this graph.
    """
    provider = choose_provider()
    session = _load(graph, blobs, path, lambda _: None, provider)
    if provider != PROCESSOR and len(session.get_providers()) == len(ON_PROCESSOR):
        raise BackendError(
            f"measuring: {describe_provider(provider)} refuses a graph; set {VARIABLE}=cpu to measure the"
            " processor, which then runs it"
        )
    return session


def _open_session(model: memoryview, engine: str) -> Callable[[], object]:
    """Return a call that runs a model once on generated values, in a session as a package has it."""
    session = open_model(engine, model)
    values = np.random.default_rng(0)
    feeds = {spec.name: _make_values(spec.dtype, spec.shape, values) for spec in session.inputs}
    return lambda: session.run(feeds)


def _open_half(
    graph: JobGraph, blobs: Sequence[memoryview], folder: Path, number: int
) -> Callable[[], object]:
    coding = graph.coding
    if coding is None:
        return _open(graph, blobs, folder, number)
    feeds = {job_input.name: _read_input(job_input, blobs[job_input.blob]) for job_input in graph.inputs}
    run: Callable[[], object] = list
    names: list[str] = []
    if graph.model is not None:
        session = _load_to_run(graph, blobs, folder / f"{number}.onnx")
        names = [node.name for node in session.get_outputs()]
        run = _bind(session, graph, blobs)
    absent = [name for name in coding.tensors if name not in feeds and name not in names]
    if absent:
        raise CutError(f"job: its graph has no tensor '{absent[0]}' to code")

    def run_and_encode() -> object:
        outputs: Any = run()
        return _encode(coding, {**feeds, **dict(zip(names, outputs, strict=True))})

    if coding.does == "encode":
        return run_and_encode
    arrived = {name: feeds[name] for name in coding.tensors}
    encoded = _encode(coding, arrived)
    return lambda: (_decode(coding, arrived, encoded), run())


def _encode(coding: TransferCoding, tensors: Mapping[str, Array]) -> list[bytes | memoryview]:
    parts: list[bytes | memoryview] = []
    for name in coding.tensors:
        array = np.ascontiguousarray(tensors[name])
        codec = coding.media.get(name)
        if codec is not None:
            parts.append(encode_media(MediaCodec.parse(codec), array[0]))
        else:
            parts.append(memoryview(array.reshape(-1).view(np.uint8)))  # type: ignore[arg-type]  # a buffer
    return [compress(b"".join(parts))] if coding.compression == "zstd" else parts


def _decode(
    coding: TransferCoding, tensors: Mapping[str, Array], parts: Sequence[bytes | memoryview]
) -> list[object]:
    """Undo `_encode`; uncoded tensors cost nothing."""
    if coding.compression == "zstd":
        return [decompress(parts[0], "zstd", max_bytes=MAX_BLOBS_BYTES)]
    files = {name: part for name, part in zip(coding.tensors, parts, strict=True) if name in coding.media}
    return [
        decode_media(
            MediaCodec.parse(coding.media[name]),
            file,
            dtype=tensors[name].dtype.name,
            channels=1 if tensors[name].shape[-1] == 1 else 3,
        )
        for name, file in files.items()
    ]


def _load(
    graph: JobGraph,
    blobs: Sequence[memoryview],
    path: Path,
    prepare: "Callable[[onnxruntime.SessionOptions], None]",
    provider: str = PROCESSOR,
) -> "onnxruntime.InferenceSession":
    options = read_options(OrtOptions, "ort", graph.options)
    try:
        settings = make_settings(options)
        prepare(settings)
        assert graph.model is not None  # noqa: S101  # for the type checker; `read_job` checks it
        path.write_bytes(blobs[graph.model])
        with contextlib.ExitStack() as stack:
            opened = str(path)
            for name, number in graph.weights.items():
                opened = stack.enter_context(with_weights(opened, name, blobs[number], settings))
            session = create_session(opened, settings, options, provider)
    except Exception as cause:  # its exceptions have no other common base
        raise BackendError(f"backend 'ort': onnxruntime refused the model: {cause}") from cause
    path.unlink()
    return session


def _bind(
    session: "onnxruntime.InferenceSession", graph: JobGraph, blobs: Sequence[memoryview]
) -> Callable[[], object]:
    """Return a call, tried once, that runs a session on the inputs of the job."""
    if graph.inputs:
        input_names = {node.name for node in session.get_inputs()}  # a head sends further inputs as they are
        feeds = {
            job_input.name: _read_input(job_input, blobs[job_input.blob])
            for job_input in graph.inputs
            if job_input.name in input_names
        }
    else:
        feeds = make_inputs(session)
    names = [node.name for node in session.get_outputs()]
    # As in `OrtSession`: the compiled session under the public one.
    run = getattr(session, "_sess", session).run

    def call() -> object:
        return run(names, feeds, None)

    try:
        call()
    except Exception as cause:  # as above
        raise BackendError(f"backend 'ort': running the model failed: {cause}") from cause
    return call


def _read_input(spec: JobInput, blob: memoryview) -> Array:
    dtype = DTYPES.get(spec.dtype)
    if dtype is None or int(np.prod(spec.shape, dtype=object)) * dtype.itemsize != len(blob):
        raise CutError(
            f"job: input '{spec.name}' is {spec.dtype} {list(spec.shape)}, its blob has {len(blob)} bytes"
        )
    return np.frombuffer(blob, dtype).reshape(spec.shape)


def _make_input(node: Any, values: np.random.Generator) -> Array:
    kind = node.type.removeprefix("tensor(").removesuffix(")")
    kind = {"float": "float32", "double": "float64"}.get(kind, kind)
    if kind not in DTYPES:
        raise BackendError(f"input '{node.name}' is a {node.type}, which is no plain tensor")
    return _make_values(kind, node.shape, values)


def _make_values(dtype: str, shape: Sequence[object], values: np.random.Generator) -> Array:
    sizes = [size if isinstance(size, int) else 1 for size in shape]
    generated = values.random(sizes) if dtype.startswith("float") else np.zeros(sizes)
    return np.asarray(generated, dtype=DTYPES[dtype])


def make_inputs(session: "onnxruntime.InferenceSession") -> dict[str, Array]:
    """Return a dict from name to generated input of a session: floats in 0..1, or 0 for integers.

    Integers are 0 because they may be indices. Dynamic dimensions are 1. The values are the same at each
    call.

    Raises:
        BackendError: an input is not a plain tensor.
    """
    values = np.random.default_rng(0)
    return {node.name: _make_input(node, values) for node in session.get_inputs()}


def _read_profile(path: Path) -> tuple[NodeTiming, ...]:
    """Return the nodes of a profile in the order in which they ran.

    The first run is left out: it allocates.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    events: dict[str, Mapping[str, Any]] = {}
    for event in json.loads(path.read_bytes()):
        name = event.get("name", "")
        if event.get("cat") == "Node" and name.endswith(_KERNEL_SUFFIX):
            key = f"{event['args']['node_index']} {name}"
            events[key] = event
            seconds[key].append(event["dur"] * 1e-6 + _TRUNCATED_S)
    return tuple(
        NodeTiming(
            events[key]["name"].removesuffix(_KERNEL_SUFFIX),
            events[key]["args"]["op_name"],
            _summarise(values[1:] or values),
            tuple(
                _count_bytes(typed_shape) for typed_shape in events[key]["args"].get("output_type_shape", ())
            ),
        )
        for key, values in seconds.items()
    )


def _count_bytes(typed_shape: Mapping[str, Sequence[int]]) -> int:
    """Return the size of a tensor in a profile's form: `{"float": [1, 16]}`."""
    size_bytes = 0
    for name, shape in typed_shape.items():
        kind = {"float": "float32", "double": "float64"}.get(name, name)
        size_bytes += int(np.prod(shape, dtype=object)) * (DTYPES[kind].itemsize if kind in DTYPES else 1)
    return size_bytes


class _Clock:
    """Times of one call.

    Attributes:
        seconds: times of the runs at the usual speed of the processor.
        others: time and speed of the other runs.
        spent_s: time of the runs at the usual speed and of profiled runs between them, with their pauses.
    """

    def __init__(self, run: Callable[[], object], gate: SpeedGate, quota: float | None) -> None:
        self.run, self._gate = run, gate
        self._draws, self._share = random.Random(0), quota or 1.0  # noqa: S311  # of moments
        self.seconds: list[float] = []
        self.others: list[tuple[float, float]] = []
        self.spent_s = 0.0
        self._runs: list[tuple[float, float, float]] = []  # time, speed before and after

    @property
    def rounds(self) -> int:
        return len(self._runs)

    def time(self) -> None:
        time.sleep(PAUSE_S)
        begin_anywhere(self._draws, self._share)
        before_s = self._gate.now_s
        begin = time.perf_counter()
        self.run()
        took_s = time.perf_counter() - begin
        if self._gate.check():
            self.spent_s += PAUSE_S + took_s
        self._runs.append((took_s, before_s, self._gate.now_s))
        self._sort(self._runs[-1])

    def sort_again(self) -> None:
        """Decide again which runs count, since the usual speed has changed."""
        self.seconds, self.others = [], []
        for timed in self._runs:
            self._sort(timed)

    def _sort(self, timed: tuple[float, float, float]) -> None:
        took_s, *speeds = timed
        if self._gate.is_usual(*speeds):
            self.seconds.append(took_s)
        else:
            self.others.append((took_s, speeds[-1]))


def _time_batches(job: Job, blobs: Sequence[memoryview]) -> JobResult:
    """Return the mean time of a run of each graph in batches, which come in turns of random order.

    What slows the machine for a while slows all graphs alike, so their times compare with each other.
    """
    facts = describe_machine(job.quota, job.engine)
    runs = {
        str(number): _open_session(blobs[graph.model or 0], job.engine)
        for number, graph in enumerate(job.graphs)
    }
    limits = LatencyLimits(
        warmup_rounds=1,
        min_rounds=_MIN_ROUNDS,
        max_rounds=_MAX_ROUNDS,
        time_limit_s=max(job.seconds, _BATCH_S),
        precision=0.0,
        batch_s=min(_BATCH_S, job.seconds / len(runs) / (_MIN_ROUNDS + 1)),
    )
    latencies = measure_latency(runs, limits)
    return JobResult(facts, tuple(_summarise(latency.seconds) for latency in latencies.values()))


def _lacks_rounds(clocks: Sequence[_Clock], seconds: float, until_s: float) -> bool:
    """Return whether another round is needed: `_MIN_ROUNDS` of each, then until all times are precise.

    That lasts for `seconds` at most.
    """
    rounds = min(clock.rounds for clock in clocks)
    if rounds < _MIN_ROUNDS:
        return True
    is_over = sum(clock.spent_s for clock in clocks) >= seconds or time.monotonic() >= until_s
    return rounds < _MAX_ROUNDS and not (is_over or all(is_precise(clock.seconds) for clock in clocks))


def _settle(clocks: Sequence[_Clock], gate: SpeedGate) -> float:
    """Return the speed of the runs that count, the same for all clocks, so that they compare.

    If the processor hardly ever had its usual speed, the speed that it had becomes the usual one.
    """
    if all(len(clock.seconds) >= _MIN_ROUNDS for clock in clocks):
        return gate.usual_s
    is_enough = all(len(clock.others) >= _MIN_ROUNDS for clock in clocks)
    gate.usual_s = statistics.median(speed_s for clock in clocks for _, speed_s in clock.others)
    for clock in clocks:
        others = [took_s for took_s, _ in clock.others]
        clock.seconds = others if is_enough else clock.seconds + others
    return gate.usual_s


def _summarise(seconds: Sequence[float], has_waits: bool = False) -> Timing:
    lower, median, upper = (float(quantile) for quantile in np.quantile(seconds, (0.25, 0.5, 0.75)))
    return Timing(
        statistics.fmean(seconds) if has_waits else average_middle(seconds),
        (upper - lower) / median if median else 0.0,
        len(seconds),
    )
