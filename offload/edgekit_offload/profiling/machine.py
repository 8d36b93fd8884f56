"""Runs measurements for the planner on this machine, with or without a CPU limit, or over ssh.

All machines run the same program, `edgekit-device offload measure`, with a different command prefix. It
terminates after the measurement.
"""

import json
import re
import sys
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import numpy as np
import onnx

from edgekit_host.emulation.cpu_quota import LEAST_SHARE, MOST_SHARE, CpuQuota
from edgekit_offload.profiling.fused_graph import (
    find_obstacle,
    is_plain,
    measure_sizes,
    read_kernels,
    tensors_of,
)
from edgekit_offload.profiling.model_profile import (
    WHOLE_MODEL_ONLY,
    KernelTime,
    Label,
    ModelProfile,
    describe_cause,
    digest_model,
)
from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.dataclass_json import from_json, to_plain
from edgekit_runtime.errors import ConfigError, CutError
from edgekit_runtime.offload.measurement.job import (
    Job,
    JobGraph,
    JobInput,
    JobKind,
    JobResult,
    Timing,
    TransferCoding,
)
from edgekit_runtime.system.child_process import ProgramResult, describe_end, run_program
from edgekit_runtime.tensors import Array

MEASURE: Final = ("offload", "measure")
_LOADING_LIMIT_S: Final = 300.0  # for sending, loading and warming up. The job's own time is added
_SSH_FAILED: Final = 255
_NOT_FOUND: Final = 127  # exit code of a shell
_MAX_RESULT_BYTES: Final = 256 << 20
_QUOTA: Final = re.compile(r"local@([0-9]{1,4})%")
# It enters the group of the quota before anything is computed, and then becomes the program.
_ENTER: Final = ("sh", "-c", 'echo $$ > "$0" && exec "$@"')
_HOST: Final = re.compile(r"ssh:([A-Za-z0-9_][A-Za-z0-9_.@:-]*)")  # never an option of ssh

Execute: TypeAlias = Callable[[Sequence[str], Iterable[bytes | memoryview], float, int], ProgramResult]


@dataclass(frozen=True, slots=True)
class RunnableGraph:
    """An ONNX graph with everything that is needed to run it.

    Attributes:
        content: The ONNX model, empty if only the coding of the inputs is measured.
        options: The `OrtOptions` that differ from their defaults.
        weights: A dict from the location of an external data file to its content.
        inputs: The inputs by name. If there are none, they are generated with free dimensions of 1.
        coding: The coding to measure together with the graph, or None.
    """

    content: bytes
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    weights: Mapping[str, bytes | memoryview] = field(default_factory=dict)
    inputs: Mapping[str, Array] = field(default_factory=dict)
    coding: TransferCoding | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that can run measurements.

    Attributes:
        text: The name that the user gave, see `parse`.
        argv: The command that starts `edgekit-device` on the machine.
        label: How the times were obtained, as in `ModelProfile`.
        share: The processor time of a job in cores, or None for no limit.
        usual_s: The time of a fixed computation in seconds (`MachineFacts.usual_s`), which shows the speed of
            the processor. Only runs at this speed are used. None means the most frequent speed.
        execute: Runs the program, as `run_program` does.
    """

    text: str
    argv: tuple[str, ...]
    label: Label = "measured"
    share: float | None = None
    usual_s: float | None = None
    execute: Execute = run_program

    @classmethod
    def parse(cls, text: str) -> "Machine":
        """Parse the name of a machine: `local`, `local@20%` or `ssh:HOST`.

        Raises:
            CutError: `text` has another format.
        """
        local = (sys.executable, "-m", "edgekit_runtime.cli")
        if text == "local":
            return cls(text, local)
        if named := _QUOTA.fullmatch(text):
            share = int(named[1]) / 100
            if not LEAST_SHARE <= share <= MOST_SHARE:
                raise CutError(
                    f"machine {text!r}: {named[1]} % of a processor cannot be emulated; expected"
                    f" {LEAST_SHARE:.0%} to {MOST_SHARE:.0%}"
                )
            return cls(text, local, "emulated", share)
        if named := _HOST.fullmatch(text):
            return cls(text, ("ssh", "-o", "BatchMode=yes", "--", named[1], "edgekit-device"))
        raise CutError(f"machine {text!r}: expected 'local', 'local@20%' or 'ssh:HOST'")

    def at_speed_of(self, profile: ModelProfile) -> "Machine":
        """Return this machine, restricted to runs at the processor speed of an earlier profile."""
        return replace(self, usual_s=profile.machine.usual_s)

    def run(self, job: Job, blobs: Iterable[bytes | memoryview]) -> JobResult:
        """Run a job on the machine and return its measurements.

        `blobs` are the binary data of the job, with the sizes in `job.blob_bytes`.

        Raises:
            CutError: The machine cannot be reached or limited, or the job failed.
        """
        sent = [
            json.dumps(to_plain(replace(job, quota=self.share, usual_s=self.usual_s))).encode() + b"\n",
            *blobs,
        ]
        if self.share is None:
            return self._run(self.argv, sent, job.seconds)
        try:
            with CpuQuota(self.share) as quota:
                argv = (*_ENTER, str(quota.procs_file), *self.argv)
                return self._run(argv, sent, job.seconds / min(self.share, 1.0))
        except ConfigError as cause:
            raise CutError(f"machine {self.text}: {cause}") from cause

    def _run(self, argv: Sequence[str], sent: Iterable[bytes | memoryview], seconds: float) -> JobResult:
        limit_s = _LOADING_LIMIT_S + 4 * seconds  # the job takes three times if the processor's speed changes
        try:
            ended = self.execute((*argv, *MEASURE), sent, limit_s, _MAX_RESULT_BYTES)
        except OSError as cause:
            raise CutError(f"machine {self.text}: cannot start {argv[0]}: {cause}; install it") from cause
        if ended.exit_code is None:
            raise CutError(f"machine {self.text}: no result after {limit_s:.0f} s; measure a smaller model")
        if ended.exit_code != 0:
            raise CutError(f"machine {self.text}: {self._explain(ended.exit_code, ended.last_line)}")
        where, hint = f"result of {self.text}", "install the same release there"
        return from_json(JobResult, ended.output, where, CutError, hint=hint)

    def _explain(self, exit_code: int, last_line: str) -> str:
        """Return why there is no result, and what to do about it."""
        reason = (last_line or "it printed no message").rstrip(".")
        host = self.text.removeprefix("ssh:")
        if host == self.text:
            return f"measuring ended {describe_end(exit_code)}: {reason}"
        if exit_code == _SSH_FAILED:
            return f"ssh failed: {reason}; connect once by `ssh {host}`: it must work without a question"
        if (
            exit_code == _NOT_FOUND
            and "edgekit-device" in reason
            and "/" not in reason.partition("edgekit-device")[0]
        ):
            return (
                f"{reason}; install edgekit there, and put `edgekit-device` into a folder of the PATH that"
                f" `ssh {host} env` shows"
            )
        return (
            f"measuring ended {describe_end(exit_code)}: {reason}; see whether `ssh {host} edgekit-device"
            " --version` works there, with Python 3.10 or later and the same release"
        )


def profile_kernels(
    machine: Machine, graph: RunnableGraph, *, name: str = "model", seconds: float = 10.0
) -> ModelProfile:
    """Measure a model on a machine for about `seconds`, and return its profile.

    If the model cannot be split, it is measured as a whole and the profile has the reason.

    Raises:
        CutError: The machine failed or rejected the model.
    """
    try:
        model = onnx.load_from_string(graph.content)
    except Exception as cause:  # protobuf's errors have no common base of their own
        raise CutError(f"model '{name}' is no ONNX model: {cause}") from cause
    measured = machine.run(*_make_job("profile", [graph], seconds))
    whole = measured.timings[0]
    obstacle = measured.obstacle or find_obstacle(model)
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = tuple(value.name for value in model.graph.input if value.name not in weights)
    outputs = tuple(value.name for value in model.graph.output)
    overhead_s, scale = find_overhead([node.timing.seconds for node in measured.nodes], whole.seconds)
    kernels: tuple[KernelTime, ...] = ()
    sizes: dict[str, int] = {}
    unsendable: frozenset[str] = frozenset()
    if not obstacle:
        try:
            optimised = onnx.load_from_string(b64decode(measured.graph))
            kernels, sizes = read_kernels(
                model, optimised, measured.nodes, overhead_s=overhead_s, scale=scale
            )
            written = {tensor for kernel in kernels for tensor in kernel.writes}
            own = sorted({*inputs, *outputs, *written} & tensors_of(model))
            own_sizes, unsendable = measure_sizes(model, own, weights=graph.weights, inputs=graph.inputs)
            sizes |= own_sizes
        except Exception as cause:  # whatever this is, the whole model has been measured
            kernels, obstacle = (), describe_cause(cause)
    return ModelProfile(
        model=name,
        model_sha256=digest_model(graph.content),
        measured_on=machine.text,
        machine=measured.machine,
        label=machine.label,
        whole_s=whole.seconds,
        whole_spread=whole.spread,
        scale=scale,
        inputs=inputs,
        outputs=outputs,
        tensors=sizes,
        kernels=kernels,
        unsendable=tuple(sorted(unsendable)),
        obstacle=obstacle,
        overhead_s=overhead_s,
        request=measured.request,
    )


def find_overhead(seconds: Sequence[float], whole_s: float) -> tuple[float, float]:
    """Return the overhead of profiling for each kernel in seconds, and a scale factor for the kernels' times.

    All kernels have the same overhead, at most the shortest time of a kernel. If the overhead is subtracted
    from each time, and the results are multiplied by the factor, they add up to `whole_s`.

    `seconds` are the profiled times of the kernels. `whole_s` is the time of a run without profiling.
    """
    total_s = sum(seconds)
    if not total_s:
        return 0.0, 0.0
    overhead_s = min(max(total_s - whole_s, 0.0) / len(seconds), *seconds)
    left_s = total_s - overhead_s * len(seconds)
    return (overhead_s, whole_s / left_s) if left_s > 0 else (0.0, whole_s / total_s)


def time_models(
    machine: Machine, graphs: Sequence[RunnableGraph], *, seconds: float = 10.0
) -> tuple[Timing, ...]:
    """Return the time of a run of each graph. All graphs together are measured for about `seconds`.

    The graphs take turns in random order. In each turn, a graph is run five times in a row.

    Raises:
        CutError: The machine failed, or rejected a graph or its inputs.
    """
    return machine.run(*_make_job("time", graphs, seconds)).timings


def time_batches(
    machine: Machine,
    graphs: Sequence[RunnableGraph],
    *,
    seconds: float = 10.0,
    engine: str = "ort",
) -> JobResult:
    """Return the mean run time of each graph over many consecutive runs, and the state of the machine.

    Args:
        machine: The machine.
        graphs: At least one graph, without options, inputs or weights.
        seconds: The measuring time for all graphs together.
        engine: `ort`, or `litert` for `.tflite` files.

    Raises:
        CutError: The machine failed, or rejected a graph or its inputs.
    """
    job, blobs = _make_job("batch", graphs, seconds)
    return machine.run(replace(job, engine=engine), blobs)


def _make_job(kind: JobKind, graphs: Sequence[RunnableGraph], seconds: float) -> tuple[Job, list[memoryview]]:
    """Return a job and its blobs; content that several graphs share is sent once."""
    blobs: list[memoryview] = []
    blob_numbers: dict[int, int] = {}  # id of an object that `graphs` keep alive -> number of its blob

    def place(content: bytes | memoryview) -> int:
        if id(content) not in blob_numbers:
            blob_numbers[id(content)] = len(blobs)
            blobs.append(memoryview(content).cast("B"))
        return blob_numbers[id(content)]

    job_graphs = []
    for graph in graphs:
        inputs = []
        for name, array in graph.inputs.items():
            if not is_plain(array):
                raise CutError(
                    f"input '{name}' is no plain tensor of numbers, so it cannot be sent; {WHOLE_MODEL_ONLY}"
                )
            content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            blobs.append(memoryview(content))  # type: ignore[arg-type]  # has the buffer protocol
            inputs.append(JobInput(name, array.dtype.name, array.shape, len(blobs) - 1))
        weights = {location: place(content) for location, content in graph.weights.items()}
        model = place(graph.content) if graph.content else None
        job_graphs.append(JobGraph(model, graph.options, weights, tuple(inputs), graph.coding))
    job = Job(kind=kind, graphs=tuple(job_graphs), blob_bytes=tuple(map(len, blobs)), seconds=seconds)
    return job, blobs
