"""Every way that the planner found for a model, ready to run: heads and tails, each a whole ONNX model."""

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from edgekit_offload.partition.calibrate import SOUND, find_bytes, find_series
from edgekit_offload.partition.coding import Coding
from edgekit_offload.partition.split import Part, SplitModels, whole_upload
from edgekit_offload.planning.envelope import Grid
from edgekit_offload.planning.planner import PlanInputs, plan
from edgekit_offload.planning.realise import MeasuredCuts
from edgekit_offload.planning.result import PlanningResult, Way
from edgekit_offload.profiling.machine import Machine, RunnableGraph, profile_kernels
from edgekit_runtime.codecs.media import MediaCodec, encode_media
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from offload_bench import Feeds

PROFILE_S, REALISE_S = 1.5, 1.0
GRAPH = {"threads": 1}


@dataclass(frozen=True)
class PlannedWay:
    """One way to run a model.

    Attributes:
        name, kind: as the planner says: local, upload or cut.
        head: runs on the device; None where the inputs are sent as they are.
        tail: runs on the server; None where nothing is sent.
        sent: the tail's inputs.
        media: tensor that is sent as a file -> codec.
        compression: of the request.
        predicted_ms: [bandwidths] at the first round trip.
        device_s, server_s: as measured for the plan.
        upload_bytes, download_bytes: bodies of request and response, as planned.
        accuracy_change: share of the samples with another best class, negative; None if unknown.
        feeds: what the tail gets of the first sample.
    """

    name: str
    kind: str
    head: bytes | None
    tail: bytes | None
    sent: tuple[str, ...]
    media: Mapping[str, str]
    compression: str
    predicted_ms: tuple[float, ...]
    device_s: float
    server_s: float
    upload_bytes: float
    download_bytes: float
    accuracy_change: float | None = None
    feeds: Feeds = field(default_factory=dict)

    @property
    def tail_name(self) -> str | None:
        """The name of the tail on the server."""
        if self.tail is None:
            return None
        content = self.tail + repr(sorted(self.media.items())).encode()
        return f"tail-{hashlib.sha256(content).hexdigest()[:16]}"


def one_core() -> Machine:
    """Return the server: one core of this machine, as the emulated server has."""
    core = str(min(os.sched_getaffinity(0)))
    return Machine("local, one core", ("taskset", "-c", core, sys.executable, "-m", "edgekit_runtime.cli"))


def plan_ways(
    name: str,
    content: bytes,
    feeds: Sequence[Feeds],
    *,
    share: float,
    grid: Grid,
    **limits: Any,
) -> tuple[PlanningResult, list[PlannedWay]]:
    """Profile a model on both machines, plan it, and return all ways with their parts.

    Args:
        name: of the model.
        content: the ONNX model.
        feeds: samples.
        share: of a processor that the device has.
        grid: links.
        limits: further fields of `PlanInputs`.
    """
    device, server = Machine.parse(f"local@{share:.0%}"), one_core()
    profiles = [
        profile_kernels(one, RunnableGraph(content, GRAPH, inputs=feeds[0]), name=name, seconds=PROFILE_S)
        for one in (device, server)
    ]
    cuts = MeasuredCuts(content, feeds, device, server, REALISE_S)
    result = plan(PlanInputs(name, content, *profiles, grid, feeds, realise=cuts, **limits))
    return result, [open_way(way, content, feeds, cuts.splits) for way in result.ways]


def open_way(
    way: Way, content: bytes, feeds: Sequence[Feeds], splits: Mapping[str, SplitModels]
) -> PlannedWay:
    """Return a way with its parts."""
    costs, latency = way.plan.costs, way.latency_ms[0]
    sizes = (costs.upload_bytes, costs.download_bytes)
    figures = (latency, costs.device_s, costs.server_s, *sizes, way.plan.accuracy_change)
    if way.plan.tail is None:
        return PlannedWay(way.name, way.kind, content, None, (), {}, "identity", *figures)
    split = splits.get(way.name) or code_upload(way, content, feeds)
    head = None if split.head is None else embed_weights(split.head, content)
    media = {spec.name: codec for spec, codec in zip(split.sent, way.plan.media.values(), strict=False)}
    made = feeds[0] if head is None else {**feeds[0], **OrtSession(head, OrtOptions(threads=1)).run(feeds[0])}
    sent = {spec.name: made[spec.name] for spec in split.sent}
    for tensor, codec in media.items():
        sent[tensor] = np.frombuffer(encode_media(MediaCodec.parse(codec), sent[tensor][0]), np.uint8)
    return PlannedWay(
        way.name, way.kind, head, embed_weights(split.tail, content), tuple(sent), media,
        way.plan.compression, *figures, sent,
    )  # fmt: skip


def code_upload(way: Way, content: bytes, feeds: Sequence[Feeds]) -> SplitModels:
    """Return the whole model behind the coding of an upload."""
    (name,) = feeds[0]
    values = np.concatenate([one[name] for one in feeds])
    kind, lattice = way.sent[0].coding, None
    if kind == "delta":
        lattice = find_series(values)
    elif kind.startswith("opus"):
        kind, lattice = "samples", SOUND
    elif kind != "raw":
        kind, lattice = ("uint8" if kind == "uint8" else "pixels"), find_bytes(values)
    if lattice is None:
        return whole_upload(content)
    return whole_upload(content, Coding(kind, {name: lattice}))  # type: ignore[arg-type]  # a kind


def embed_weights(part: Part, content: bytes) -> bytes:
    """Return a submodel that holds its weights itself."""
    model = onnx.load_from_string(part.content)
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            place = {one.key: one.value for one in tensor.external_data}
            begin = int(place["offset"])
            tensor.raw_data = content[begin : begin + int(place["length"])]
            del tensor.external_data[:]
            tensor.data_location = onnx.TensorProto.DEFAULT
    return model.SerializeToString()
