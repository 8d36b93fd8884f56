"""A job of measuring as it comes to a device, and its result: a line of JSON, then blobs; one JSON object.

It runs nothing (`job_runner`).
"""

import json
from collections.abc import Mapping, Sequence  # noqa: F401  # `from_plain` looks up names of JsonValue here
from dataclasses import dataclass, field
from typing import IO, Annotated, Final, Literal, TypeAlias

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.dataclass_json import Range, from_plain
from edgekit_runtime.errors import CutError
from edgekit_runtime.remote.cut_table import Compression
from edgekit_runtime.remote.measurement.machine_facts import MachineFacts
from edgekit_runtime.remote.measurement.request_cost import RequestCost

MAX_HEADER_BYTES: Final = 4 << 20
MAX_BLOBS_BYTES: Final = 16 << 30

JobKind: TypeAlias = Literal["profile", "time", "batch"]
_Quota: TypeAlias = Annotated[float, Range(0, 1e4)]
_Seconds: TypeAlias = Annotated[float, Range(0, 86400)]


@dataclass(frozen=True, slots=True)
class JobInput:
    """One input of a graph; its values are a blob.

    Attributes:
        name, dtype, shape: of the input; dtype is one of `tensors.DTYPES`.
        blob: number of the blob.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    blob: int


@dataclass(frozen=True, slots=True)
class TransferCoding:
    """What a half of a model does with the tensors that cross the link, beside its graph.

    Attributes:
        tensors: those that are sent, outputs or inputs of a head, or inputs of a tail.
        does: `encode` of a head, after its run; `decode` of a tail, before its run.
        media: tensor that is sent as a file -> its codec.
        compression: of the body.
    """

    tensors: tuple[str, ...]
    does: Literal["encode", "decode"]
    media: Mapping[str, str] = field(default_factory=dict)
    compression: Compression = "identity"


@dataclass(frozen=True, slots=True)
class JobGraph:
    """A graph to run.

    Attributes:
        model: number of the blob with the ONNX model; None for a head that only codes its inputs.
        options: `OrtOptions` that differ from their defaults.
        weights: location of external data -> number of the blob.
        inputs: what it runs on; where they are empty, values are made up, and free dimensions are 1.
        coding: what is timed with it; None for the graph alone.
    """

    model: int | None
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[JobInput, ...] = ()
    coding: TransferCoding | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure.

    Attributes:
        kind: `profile` for the kernels of the one graph; `time` for whole runs of all, five in a row in turn;
            `batch` for the mean of runs that follow one another without a pause, of all in turn.
        graphs: the graphs.
        blob_bytes: size of each blob.
        seconds: time limit, kept approximately; loading is not counted. Runs at another than the usual speed
            of the processor do not count, up to twice that time.
        quota: processor time that the sender grants, in cores; None for what the system says.
        usual_s: of `MachineFacts`, from an earlier job whose times these are compared with; where the
            processor hardly ever has that speed, times at another one count.
    """

    kind: JobKind
    graphs: tuple[JobGraph, ...]
    blob_bytes: tuple[int, ...]
    seconds: _Seconds = 10.0
    quota: _Quota | None = None
    usual_s: _Seconds | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one run, after a pause of 20 ms unless it is one of a batch.

    Attributes:
        seconds: the mean of the middle half of the runs, at one speed of the processor; of all, where the
            kernel makes runs wait for a quota.
        spread: distance of the quartiles, as a share of the median.
        rounds: how many runs were timed.
        usual_s: that speed (`SpeedGate`), the same for all timings of a job; None of a node.
    """

    seconds: _Seconds
    spread: Annotated[float, Range(0, 1e9)]
    rounds: int
    usual_s: _Seconds | None = None


@dataclass(frozen=True, slots=True)
class NodeTiming:
    """Time of one node of the optimised graph.

    Attributes:
        name: of the node, as onnxruntime has it.
        op: its operator.
        timing: its time.
        output_bytes: sizes of its outputs.
    """

    name: str
    op: str
    timing: Timing
    output_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a job.

    Attributes:
        machine: where it was measured.
        timings: one for each graph.
        nodes: of a profile, in the order in which they ran.
        graph: the optimised graph without large weights, an ONNX model in base64.
        obstacle: why there are no nodes; empty where there are.
        request: of a profile, what a request takes beside the model.
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
        CutError: it is malformed, too large, or ends too soon.
    """
    line = stream.readline(MAX_HEADER_BYTES)
    try:
        job = from_plain(Job, json.loads(line), "job", CutError)
    except (ValueError, RecursionError) as cause:
        raise CutError(f"job: its first line is no JSON: {cause}; send it by `edgekit offload`") from cause
    if sum(job.blob_bytes) > MAX_BLOBS_BYTES:
        raise CutError(f"job: blobs of {sum(job.blob_bytes)} bytes, expected at most {MAX_BLOBS_BYTES}")
    if not job.graphs or (job.kind == "profile" and len(job.graphs) > 1):
        raise CutError(f"job: {len(job.graphs)} graphs, expected one, or some for 'time'")
    for graph in job.graphs:
        if graph.model is None and (job.kind == "profile" or graph.coding is None):
            raise CutError("job: a graph without a model codes its inputs, and cannot be profiled")
        models = () if graph.model is None else (graph.model,)
        for number in (*models, *graph.weights.values(), *(one.blob for one in graph.inputs)):
            if number >= len(job.blob_bytes):
                raise CutError(f"job: names blob {number}, there are {len(job.blob_bytes)}")
    blobs = []
    for size_bytes in job.blob_bytes:
        blob = memoryview(bytearray(size_bytes))
        filled = 0
        while filled < size_bytes:
            got = stream.readinto(blob[filled:])  # type: ignore[attr-defined]  # of every binary stream
            if not got:
                raise CutError("job: the stream ended before the last blob")
            filled += got
        blobs.append(blob)
    return job, blobs
