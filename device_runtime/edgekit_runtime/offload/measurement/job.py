"""A measurement job as a device gets it, a line of JSON and blobs, and its result, one JSON object.

This module runs nothing (`job_runner` does).
"""

from collections.abc import Mapping, Sequence  # noqa: F401  # `from_plain` looks up names of JsonValue here
from dataclasses import field
from typing import IO, Annotated, Final, Literal, TypeAlias

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.dataclass_json import Range, from_json
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.measurement.machine_facts import MachineFacts
from edgekit_runtime.offload.measurement.request_cost import RequestCost
from edgekit_runtime.offload.offload_plan import Compression
from edgekit_runtime.records import dataclass

MAX_HEADER_BYTES: Final = 4 << 20
MAX_BLOBS_BYTES: Final = 16 << 30

JobKind: TypeAlias = Literal["profile", "time", "batch"]
_Quota: TypeAlias = Annotated[float, Range(0, 1e4)]
_Seconds: TypeAlias = Annotated[float, Range(0, 86400)]


@dataclass(frozen=True, slots=True)
class JobInput:
    """One input of a graph; its values are in a blob.

    Attributes:
        dtype: one of `tensors.DTYPES`.
        blob: number of the blob.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    blob: int


@dataclass(frozen=True, slots=True)
class TransferCoding:
    """How one half of a model codes the tensors that cross the link, outside of its graph.

    Attributes:
        tensors: names of the sent tensors: outputs or inputs of a head, or inputs of a tail.
        does: `encode` for a head, after its run; `decode` for a tail, before its run.
        media: tensor that is sent as a file -> its codec.
        compression: compression of the body.
    """

    tensors: tuple[str, ...]
    does: Literal["encode", "decode"]
    media: Mapping[str, str] = field(default_factory=dict)
    compression: Compression = "identity"


@dataclass(frozen=True, slots=True)
class JobGraph:
    """A graph to run.

    Attributes:
        model: number of the blob with the model; None for a head that only codes its inputs.
        options: `OrtOptions` that differ from their defaults.
        weights: location of external data -> number of the blob.
        inputs: inputs of the run; if they are empty, values are generated, and free dimensions are 1.
        coding: coding that is timed with the graph; None for the graph alone.
    """

    model: int | None
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[JobInput, ...] = ()
    coding: TransferCoding | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A measurement job.

    Attributes:
        kind: `profile`: measure the kernels of the one graph. `time`: measure whole runs with a pause before
            each; the graphs take turns. `batch`: measure consecutive runs without pauses, also in turns.
        seconds: time limit of the runs that count, kept approximately. Runs at an unusual speed of the
            processor do not count; all runs take at most three times as long.
        engine: what runs the graphs. Jobs of the kind `batch` may use LiteRT, for `.tflite` files. Their
            graphs have no options, inputs or weights, and run in sessions as packages have them.
        quota: processor time that the sender grants, in cores; None for the system's figure.
        usual_s: `MachineFacts.usual_s` of an earlier job, whose times are to be compared. If the processor
            rarely has that speed, runs at another speed count.
    """

    kind: JobKind
    graphs: tuple[JobGraph, ...]
    blob_bytes: tuple[int, ...]
    seconds: _Seconds = 10.0
    engine: str = "ort"
    quota: _Quota | None = None
    usual_s: _Seconds | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one run, after a pause of 20 ms unless the run is part of a batch.

    Attributes:
        seconds: mean of the middle half of the runs at one speed of the processor. It is the mean of all runs
            if the kernel makes runs wait for a quota.
        spread: distance between the quartiles, as a share of the median.
        usual_s: `MachineFacts.usual_s` during these runs; None for a node.
    """

    seconds: _Seconds
    spread: Annotated[float, Range(0, 1e9)]
    rounds: int
    usual_s: _Seconds | None = None


@dataclass(frozen=True, slots=True)
class NodeTiming:
    """Time of one node of the optimised graph.

    Attributes:
        name: name of the node in onnxruntime.
        op: its operator.
    """

    name: str
    op: str
    timing: Timing
    output_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a job.

    Attributes:
        timings: one timing for each graph.
        nodes: nodes of a profile, in the order in which they ran.
        graph: the optimised graph without large weights, an ONNX model in base64.
        obstacle: why there are no nodes; empty if there are.
        request: for a profile, the costs of a request beside the model.
    """

    machine: MachineFacts
    timings: tuple[Timing, ...]
    nodes: tuple[NodeTiming, ...] = ()
    graph: str = ""
    obstacle: str = ""
    request: RequestCost = field(default_factory=RequestCost)


def read_job(stream: IO[bytes]) -> tuple[Job, list[memoryview]]:
    """Return the job on a stream, and its blobs.

    Raises:
        CutError: the job is malformed, too large, or ends too soon.
    """
    line = stream.readline(MAX_HEADER_BYTES)
    job = from_json(Job, line, "job", CutError, hint="send it by `edgekit offload`")
    if sum(job.blob_bytes) > MAX_BLOBS_BYTES:
        raise CutError(f"job: blobs of {sum(job.blob_bytes)} bytes, expected at most {MAX_BLOBS_BYTES}")
    if not job.graphs or (job.kind == "profile" and len(job.graphs) > 1):
        raise CutError(f"job: {len(job.graphs)} graphs, expected 1, or more for 'time' and 'batch'")
    for graph in job.graphs:
        if graph.model is None and (job.kind == "profile" or graph.coding is None):
            raise CutError("job: a graph without a model codes its inputs, and cannot be profiled")
        models = () if graph.model is None else (graph.model,)
        for number in (*models, *graph.weights.values(), *(job_input.blob for job_input in graph.inputs)):
            if number >= len(job.blob_bytes):
                raise CutError(f"job: names blob {number}, there are {len(job.blob_bytes)}")
    blobs = []
    for size_bytes in job.blob_bytes:
        blob = memoryview(bytearray(size_bytes))
        filled = 0
        while filled < size_bytes:
            count = stream.readinto(blob[filled:])  # type: ignore[attr-defined]  # of every binary stream
            if not count:
                raise CutError("job: the stream ended before the last blob")
            filled += count
        blobs.append(blob)
    return job, blobs
