"""Every way that the planner and published methods found for a model, ready to run as whole ONNX models."""

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import onnx

from edgekit_offload.partition.calibrate import SOUND, find_bytes, find_series
from edgekit_offload.partition.coding import Coding
from edgekit_offload.partition.opened_model import OpenedModel
from edgekit_offload.partition.split import Part, SplitModels, split_model, whole_upload
from edgekit_offload.planning.costs import NO_LIMITS, CodedTensors, GraphCosts, device_bytes, weigh_costs
from edgekit_offload.planning.envelope import Grid
from edgekit_offload.planning.measurement import CutMeasurement
from edgekit_offload.planning.plan_inputs import PlanInputs
from edgekit_offload.planning.planner import plan
from edgekit_offload.planning.result import Candidate, PlanningResult
from edgekit_offload.profiling.machine import Machine, RunnableGraph, profile_kernels
from edgekit_offload.profiling.model_profile import ModelProfile
from edgekit_offload.profiling.planning_graph import join_profiles
from edgekit_runtime.codecs.media import MediaCodec, encode_media
from edgekit_runtime.offload.latency_model import Conditions
from edgekit_runtime.offload.offload_plan import OffloadPlan
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from offload_bench import Feeds
from peers.published_cuts import place_by_dads, place_linearly

PROFILE_S = 1.5
GRAPH = {"threads": 1}  # what `write_signed` signs, so what every session runs


class Planning(NamedTuple):
    """What planning a model gave: profiles of device and server, measured candidates, and the result."""

    profiles: list[ModelProfile]
    measurement: CutMeasurement
    result: PlanningResult


def plan_model(
    name: str,
    content: bytes,
    feeds: Sequence[Feeds],
    machines: tuple[Machine, Machine],
    grid: Grid,
    *,
    seconds: float,
    **limits: Any,
) -> Planning:
    """Profile a model on a device and a server and plan it; `limits` are further fields of `PlanInputs`."""
    graph = RunnableGraph(content, GRAPH, inputs=feeds[0])
    profiles = [profile_kernels(machine, graph, name=name, seconds=seconds) for machine in machines]
    model = OpenedModel(content)
    classes = [output.name for output in onnx.load_from_string(content).graph.output]  # all are classifiers
    measurement = CutMeasurement(
        model=model,
        feeds=feeds,
        device=machines[0].at_speed_of(profiles[0]),
        server=machines[1].at_speed_of(profiles[1]),
        seconds=seconds,
        options=GRAPH,
        classes=classes,
    )
    inputs = PlanInputs(
        name=name,
        model=model,
        device=profiles[0],
        server=profiles[1],
        grid=grid,
        feeds=feeds,
        measure=measurement,
        **limits,
    )
    return Planning(profiles, measurement, plan(inputs))


@dataclass(frozen=True)
class PlannedWay:
    """One way to run a model.

    Attributes:
        plan: its name and costs, as planned.
        kind: as the planner says: local, upload or cut; or peer, a cut that a published method chose.
        head: runs on the device; None where the inputs are sent as they are.
        tail: runs on the server; None where nothing is sent.
        sent: the tail's inputs.
        feeds: what the tail gets of the first sample.
        devices: how many the server carries, simulated; for capacity only.
        is_offered: whether the plan offers it at the default `--max-loss`.
    """

    plan: OffloadPlan
    kind: str
    head: bytes | None
    tail: bytes | None
    sent: tuple[str, ...] = ()
    feeds: Feeds = field(default_factory=dict)
    devices: int | None = None
    is_offered: bool = True

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def tail_name(self) -> str | None:
        if self.tail is None:
            return None
        content = self.tail + repr(sorted(self.plan.media.items())).encode()
        return f"tail-{hashlib.sha256(content).hexdigest()[:16]}"


@dataclass(frozen=True)
class Peer:
    """What a published method chose at one setting: the name of a way, or the obstacle to it."""

    method: str
    way: str
    obstacle: str = ""


class Planned:
    """A model, planned between a device and a server.

    Attributes:
        result: of the planner.
        ways: all ways, ready to run; those that peers chose are added by `find_peers`.
        costs: the kernels, for peers: tensors are sent raw.
    """

    def __init__(
        self, name: str, content: bytes, feeds: Sequence[Feeds], share: float, grid: Grid, **limits: Any
    ) -> None:
        """Profile a model and plan it for a device with a share of a processor."""
        machines = Machine.parse(f"local@{share:.0%}"), one_core()
        planning = plan_model(name, content, feeds, machines, grid, seconds=PROFILE_S, **limits)
        self.result, profiles, cuts = planning.result, planning.profiles, planning.measurement
        self.ways = [open_way(way, content, feeds, cuts.splits) for way in self.result.candidates]
        self._content, self._feeds = content, feeds
        self._memory_bytes = limits.get("limits", NO_LIMITS).memory_bytes
        joined = join_profiles(content, profiles)
        self._nodes = joined.nodes
        raw = np.array([joined.tensor_bytes[tensor] for tensor in joined.graph.tensors], np.float64)
        free = np.zeros(len(raw))
        coded = CodedTensors(
            names=("raw",) * len(raw), sent_bytes=raw, encode_s=free, decode_s=free, reply_bytes=raw
        )
        weights = joined.weight_bytes.astype(np.float64)
        self.costs = GraphCosts(
            graph=joined.graph,
            seconds=joined.seconds,
            raw_bytes=raw,
            weight_bytes=weights,
            weight_readers=joined.weight_readers,
            codings={"raw": coded},
        )
        self._request = profiles[0].request, profiles[1].request
        self._chosen: dict[bytes, str] = {}

    def find_peers(self, conditions: Conditions) -> list[Peer]:
        """Return what published methods choose; their cuts become ways."""
        graph, costs = self.costs.graph, weigh_costs(self.costs, "raw", conditions)
        placed = {
            "linear split (Neurosurgeon)": place_linearly(graph, costs),
            "DADS as printed": place_by_dads(graph, costs, is_corrected=False),
            "DADS corrected": place_by_dads(graph, costs, is_corrected=True),
        }
        found = []
        for method, tiers in placed.items():
            here = tuple(map(int, tiers))
            needed = device_bytes(self.costs, here)
            if not np.isfinite(costs.of(graph, tiers[np.newaxis])[0]):
                found.append(Peer(method, "", "its cut cannot run"))
            elif self._memory_bytes is not None and needed > self._memory_bytes:
                found.append(Peer(method, "", f"its cut needs {needed / 1e6:.3g} MB on the device"))
            else:
                found.append(Peer(method, self._open_peer(here)))
        return found

    def _open_peer(self, tiers: tuple[int, ...]) -> str:
        """Return the name of the way that runs a placement."""
        if len(set(tiers)) == 1:
            return "raw" if tiers[0] else "local"
        key = bytes(tiers)
        if key not in self._chosen:
            name = self._chosen[key] = f"peer{len(self._chosen) + 1}"
            nodes = [node for kernel, one in enumerate(tiers) if not one for node in self._nodes[kernel]]
            split = split_model(self._content, nodes)
            costs, (device, server) = self.costs.plan_costs(tiers, "raw"), self._request
            added = (device.seconds(costs.upload_bytes), server.seconds(costs.upload_bytes))
            costs = replace(costs, device_s=costs.device_s + added[0], server_s=costs.server_s + added[1])
            planned = OffloadPlan(name, costs, head=f"{name}.head", tail=f"{name}.tail", answers_changed=0.0)
            self.ways.append(open_split(planned, "peer", split, self._content, self._feeds))
        return self._chosen[key]


def one_core() -> Machine:
    core = str(min(os.sched_getaffinity(0)))
    return Machine("local, one core", ("taskset", "-c", core, sys.executable, "-m", "edgekit_runtime.cli"))


def open_way(
    way: Candidate, content: bytes, feeds: Sequence[Feeds], splits: Mapping[str, SplitModels]
) -> PlannedWay:
    if way.plan.tail is None:
        return PlannedWay(way.plan, way.kind, content, None)
    split = splits.get(way.name) or code_upload(way, content, feeds)
    opened = open_split(way.plan, way.kind, split, content, feeds)
    return replace(opened, devices=way.devices_per_server, is_offered=not way.is_over_loss)


def open_split(
    planned: OffloadPlan, kind: str, split: SplitModels, content: bytes, feeds: Sequence[Feeds]
) -> PlannedWay:
    """Return a way with its parts as whole models."""
    head = None if split.head is None else embed_weights(split.head, content)
    media = {spec.name: codec for spec, codec in zip(split.sent, planned.media.values(), strict=False)}
    made = feeds[0] if head is None else {**feeds[0], **OrtSession(head, OrtOptions(threads=1)).run(feeds[0])}
    sent = {spec.name: made[spec.name] for spec in split.sent}
    for tensor, codec in media.items():
        sent[tensor] = np.frombuffer(encode_media(MediaCodec.parse(codec), sent[tensor][0]), np.uint8)
    planned = replace(planned, media=media)
    return PlannedWay(planned, kind, head, embed_weights(split.tail, content), tuple(sent), sent)


def code_upload(way: Candidate, content: bytes, feeds: Sequence[Feeds]) -> SplitModels:
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
