"""The format of a measurement job and its result.

A job is a line of JSON followed by blobs. The result is one JSON object. `job_runner` runs the job.
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
    """One input of a graph. Its values are in a blob.

    Attributes:
        dtype: one of `tensors.DTYPES`.
        blob: index of the blob.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    blob: int


@dataclass(frozen=True, slots=True)
class TransferCoding:
    """How the tensors that cross the link are encoded or decoded, outside of the graph.

    Attributes:
        tensors: names of the tensors. To encode, they are outputs or inputs of the graph. To decode, they are
            inputs of the graph.
        does: `encode` after the graph has run on the device, or `decode` before it runs on the server.
        media: a dict from each tensor that is sent as a file to its codec.
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
        model: index of the blob with the model, or None for a head that only encodes its inputs.
        options: `OrtOptions` that differ from their defaults.
        weights: a dict from the location of external data to the index of the blob.
        inputs: inputs of the run. If there are none, values are generated, and dynamic dimensions are 1.
        coding: encoding or decoding that is timed together with the graph, or None for the graph alone.
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
        kind: `profile` measures the kernels of one graph. `time` measures whole runs of the graphs in turn,
            with pauses. `batch` measures consecutive runs of the graphs in turn, without pauses.
        seconds: approximate time limit. Only runs at the usual processor speed count towards it. All runs
            together take at most three times as long.
        engine: engine that runs the graphs. Jobs of the kind `batch` may use LiteRT for `.tflite` files.
            Their graphs have no options, inputs or weights, and run in the same sessions as packages.
        quota: processor time that the sender grants, in cores, or None for the limit of the system.
        usual_s: `MachineFacts.usual_s` of an earlier job, which sets the usual processor speed, or None. It
            is replaced if the processor rarely has this speed.
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
    """Time of one run. There is a pause of 20 ms before the run, unless it is part of a batch.

    Attributes:
        seconds: mean of the middle half of the runs at one processor speed. It is the mean of all runs if
            the kernel makes runs wait for a quota.
        spread: distance between the quartiles, as a share of the median.
        usual_s: `MachineFacts.usual_s` during these runs, or None for the time of a node.
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
        op: operator of the node.
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
        graph: the optimised graph without large weights, as an ONNX model in base64.
        obstacle: why the nodes could not be measured, or empty.
        request: for a profile, the costs of a request in addition to the model.
    """

    machine: MachineFacts
    timings: tuple[Timing, ...]
    nodes: tuple[NodeTiming, ...] = ()
    graph: str = ""
    obstacle: str = ""
    request: RequestCost = field(default_factory=RequestCost)


def read_job(stream: IO[bytes]) -> tuple[Job, list[memoryview]]:
    """Read a job and its blobs from a stream.

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
