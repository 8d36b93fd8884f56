"""Computes the costs of a graph of kernels under given conditions, in the form that the solver needs.

Inputs that the server needs are sent like other tensors. A round trip is added once to each request that uses
the link. The outputs of the server are sent back. TCP's slow start is not included because it is not linear.
`latency_model` adds it when candidates are compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgekit_offload.cuts.costs import Costs
from edgekit_offload.cuts.kernel_graph import KernelGraph
from edgekit_offload.cuts.solver import Limit
from edgekit_offload.planning.explain import size
from edgekit_offload.planning.result import SentTensor
from edgekit_runtime.client.requests import token_line
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.latency_model import Conditions, LinkState, wire_bytes
from edgekit_runtime.offload.objectives import SECONDS, Weights
from edgekit_runtime.offload.offload_plan import Compression, OffloadPlan, PlanCosts
from edgekit_runtime.offload.offload_server import make_tail_request
from edgekit_runtime.protocol.infer_request import InferRequest, RequestedOutput
from edgekit_runtime.protocol.infer_response import encode_response
from edgekit_runtime.protocol.json_tensors import finish
from edgekit_runtime.tensors import Array

BITS: Final = 8
# A tail's name, a server's name and a token of usual length. The bytes of a request are counted on one with
# these, as the device makes it. It goes over TLS.
_TAIL: Final = "image_classifier.cut12-int8.tail.0123456789abcdef"
_FIELDS: Final = f"Host: cloud.example.com\r\n{token_line('0123456789abcdef' * 3)}"
_REPLY_HEAD_BYTES: Final = len(  # as our service writes the head
    b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nInference-Header-Content-Length: 200\r\n"
    b"Endpoint-Load-Metrics: TEXT application_utilization=0.123\r\n"
    b"Server-Timing: queue;dur=0.123, compute;dur=12.345\r\nContent-Length: 1234\r\n\r\n"
)
_MOST_JSON_BYTES: Final = 1 << 20
INPUT: Final = "input"  # in `keep_on_device`: all inputs of the model


def request_bytes(tensors: Mapping[str, Array], compression: Compression = "identity") -> float:
    """Return the size in bytes of a request with these tensors on the link.

    Raises:
        DataError: The protocol does not support a dtype.
        BackendError: zstd is not installed here.
    """
    return wire_bytes(make_tail_request(_TAIL, tensors, (), compression, _FIELDS).size_bytes)


def reply_bytes(outputs: Mapping[str, Array]) -> float:
    """Return the size in bytes of a reply with these outputs on the link."""
    names = {"model_name": _TAIL, "model_version": "1"}
    request = InferRequest((), tuple(RequestedOutput(name, True) for name in outputs), id="0")
    text, binary_bytes = finish(encode_response(names, request, list(outputs.values()), _MOST_JSON_BYTES))
    return wire_bytes(_REPLY_HEAD_BYTES + len(text) + binary_bytes)


def _described_bytes(count: int) -> float:
    return request_bytes({f"tensor_{number}": np.zeros((1, 0), np.float32) for number in range(count)})


# For sums over kernels: bytes of a message without tensors, and bytes that describe a tensor.
TENSOR_BYTES: Final = _described_bytes(2) - _described_bytes(1)
MESSAGE_BYTES: Final = _described_bytes(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedTensors:
    """The sizes and times of tensors in one coding, in the order of `KernelGraph.tensors`.

    Attributes:
        names: The coding of each tensor, which is `raw` if the coding does not apply to it.
        sent_bytes: The size of each tensor after coding and compression, float64 [tensors].
        encode_s: The time to encode each tensor on the device, float64 [tensors].
        decode_s: The time to decode each tensor on the server, float64 [tensors].
        reply_bytes: The size of each tensor in a reply, without compression, float64 [tensors].
    """

    names: tuple[str, ...]
    sent_bytes: NDArray[np.float64]
    encode_s: NDArray[np.float64]
    decode_s: NDArray[np.float64]
    reply_bytes: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCosts:
    """A graph of kernels with measurements for one request.

    Attributes:
        seconds: The time of each kernel on each machine, float64 [kernels, machines]. The first machine is
            the device.
        raw_bytes: The sizes of `graph.tensors`, float64 [tensors].
        weight_bytes: The sizes of the weights, float64 [weights].
        weight_readers: Whether a kernel reads a weight, bool [kernels, weights].
        codings: A dict from a coding to the sizes and times of the tensors. It always contains `raw`.
        nodes: The indices of each kernel's nodes in the model, see `PlanningGraph`.
    """

    graph: KernelGraph
    seconds: NDArray[np.float64]
    raw_bytes: NDArray[np.float64]
    weight_bytes: NDArray[np.float64]
    weight_readers: NDArray[np.bool_]
    codings: Mapping[str, CodedTensors]
    nodes: tuple[tuple[int, ...], ...] = ()

    def sent(self, tiers: tuple[int, ...], link: int = 0) -> tuple[int, ...]:
        """Return the indices of the tensors that are sent over a link.

        `tiers` is the tier of each kernel, where 0 is the device.
        """
        graph = self.graph
        crossing = []
        for row, tensor in enumerate(graph.tensors):
            producer_tier = tiers[graph.producer[tensor]] if tensor in graph.producer else 0
            if producer_tier <= link and any(tiers[reader] > link for reader in graph.consumers[tensor]):
                crossing.append(row)
        return tuple(crossing)

    def sent_tensors(self, tiers: tuple[int, ...], coding: str, link: int = 0) -> tuple[SentTensor, ...]:
        coded = self.codings[coding]
        return tuple(
            SentTensor(
                name=self.graph.tensors[row],
                coding=coded.names[row],
                raw_bytes=float(self.raw_bytes[row]),
                sent_bytes=float(coded.sent_bytes[row]),
            )
            for row in self.sent(tiers, link)
        )

    def returned(self, tiers: tuple[int, ...], link: int = 0) -> tuple[int, ...]:
        """Return the indices of the outputs that are sent back over a link. See `sent` for the arguments."""
        graph = self.graph
        return tuple(
            row
            for row, tensor in enumerate(graph.tensors)
            if tensor in graph.outputs and tensor in graph.producer and tiers[graph.producer[tensor]] > link
        )

    def wire_bytes(self, tiers: tuple[int, ...], coding: str, link: int = 0) -> tuple[float, float]:
        coded, sent, returned = self.codings[coding], self.sent(tiers, link), self.returned(tiers, link)
        up = float(coded.sent_bytes[list(sent)].sum()) + MESSAGE_BYTES + TENSOR_BYTES * len(sent)
        down = float(coded.reply_bytes[list(returned)].sum()) + MESSAGE_BYTES + TENSOR_BYTES * len(returned)
        return up, down

    def plan_costs(self, tiers: tuple[int, ...], coding: str) -> PlanCosts:
        """Return the costs of a request for a placement on two tiers, as sums over kernels."""
        coded, placed = self.codings[coding], np.array(tiers)
        sent = list(self.sent(tiers))
        return PlanCosts(
            float(self.seconds[placed == 0, 0].sum() + coded.encode_s[sent].sum()),
            float(self.seconds[placed == 1, 1].sum() + coded.decode_s[sent].sum()),
            *self.wire_bytes(tiers, coding),
        )


@dataclass(frozen=True, slots=True)
class PowerModel:
    """The power of a device in watts, not including its idle power. It is used to model energies.

    Attributes:
        radio_w: The power while the device sends, receives or waits for a reply.
    """

    compute_w: float
    radio_w: float


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The limits of the device's memory. None means no limit.

    Attributes:
        weights_bytes: The limit of the weights alone.
        memory_bytes: The limit of the weights and the live activations together.
    """

    weights_bytes: float | None = None
    memory_bytes: float | None = None

    def of(self, costs: GraphCosts) -> tuple[Limit, ...]:
        """Return the limits in the form that the solver needs, for the tiers of `costs`."""
        limits = () if self.memory_bytes is None else memory_limits(costs, self.memory_bytes)
        if self.weights_bytes is not None:
            limits += (weight_limit(costs, self.weights_bytes),)
        return limits

    def describe_excess(self, weights_bytes: float, needed_bytes: float) -> str:
        """Describe which limit a model on the device exceeds and by how much, or return an empty text."""
        for limit, needed, quantity in (
            (self.weights_bytes, weights_bytes, "weights"),
            (self.memory_bytes, needed_bytes, "weights and activations"),
        ):
            if limit is not None and needed > limit:
                return f"needs {size(needed)} of {quantity}, the limit is {size(limit)}"
        return ""


NO_LIMITS: Final = DeviceLimits()


def add_energy(plan: OffloadPlan, power: PowerModel | None) -> OffloadPlan:
    joules = None if power is None else power.compute_w * plan.costs.device_s
    return replace(plan, costs=replace(plan.costs, device_j=joules))


def weigh_costs(
    costs: GraphCosts,
    coding: str,
    conditions: Conditions,
    pinned: NDArray[np.bool_] | None = None,
    weights: Weights = SECONDS,
) -> Costs:
    """Return the costs of one request on two tiers, in seconds of latency by default.

    Args:
        costs: The graph with its measurements.
        coding: A key of `costs.codings`.
        conditions: The link and the loads.
        pinned: Whether a tensor must not leave the device, bool [tensors].
        weights: The weights that define the unit of the costs.

    Raises:
        CutError: The link is down.
    """
    link, coded = conditions.link, costs.codings[coding]
    if link is None or link.up_bits_per_s <= 0 or link.down_bits_per_s <= 0:
        raise CutError("the link is down (bandwidth 0): nothing can be sent, so there is nothing to plan")
    device = weights.device * conditions.device_slowdown
    server = weights.server * conditions.server_slowdown
    up, down = (weights.link * BITS / rate for rate in (link.up_bits_per_s, link.down_bits_per_s))
    upload = (coded.sent_bytes + TENSOR_BYTES) * up + coded.encode_s * device + coded.decode_s * server
    download = (coded.reply_bytes + TENSOR_BYTES) * down
    setup = weights.wait * (link.rtt_s + conditions.server_wait_s) + MESSAGE_BYTES * (up + down)
    compute = _stay(costs, costs.seconds[:, :2] * [device, server], pinned)
    if pinned is not None:
        upload = np.where(pinned, np.inf, upload)
    return Costs(compute, upload[:, np.newaxis], download[:, np.newaxis], np.array([setup]))


def tier_costs(
    costs: GraphCosts, coding: str, links: tuple[LinkState, ...], pinned: NDArray[np.bool_] | None = None
) -> Costs:
    """Return the costs on several tiers in seconds of latency.

    There is one link between neighbouring tiers. The other arguments are those of `weigh_costs`.
    """
    coded = costs.codings[coding]
    upload, download, setup = [], [], []
    for link in links:
        up, down = BITS / link.up_bits_per_s, BITS / link.down_bits_per_s
        upload.append((coded.sent_bytes + TENSOR_BYTES) * up + coded.encode_s + coded.decode_s)
        download.append((coded.reply_bytes + TENSOR_BYTES) * down)
        setup.append(link.rtt_s + MESSAGE_BYTES * (up + down))
    sending = np.stack(upload, axis=1)
    if pinned is not None:
        sending[pinned, :] = np.inf
    compute = _stay(costs, costs.seconds, pinned)
    return Costs(compute, sending, np.stack(download, axis=1), np.array(setup))


def pinned_tensors(graph: KernelGraph, keep_on_device: tuple[str, ...]) -> NDArray[np.bool_]:
    """Return whether each tensor must not leave the device, bool [tensors].

    `keep_on_device` has the names of tensors. `input` stands for all inputs.

    Raises:
        CutError: The graph has no such tensor.
    """
    pinned = np.zeros(len(graph.tensors), np.bool_)
    for name in keep_on_device:
        if name == INPUT and name not in graph.tensors:
            pinned[: len(graph.inputs)] = True
        elif name in graph.tensors:
            pinned[graph.tensors.index(name)] = True
        else:
            names = ", ".join(graph.tensors[:12])
            raise CutError(
                f"--keep-on-device {name}: no tensor of that name can be sent; expected `input` or one of"
                f" {names}{', ...' if len(graph.tensors) > 12 else ''}"
            )
    return pinned


def memory_limits(costs: GraphCosts, at_most_bytes: float) -> tuple[Limit, ...]:
    """Return limits that keep weights and live activations on the device within a number of bytes.

    Each limit belongs to a kernel. If the kernel runs on the device, the device's memory must be large enough
    for all its weights and for the tensors that are live while the kernel runs. A kernel needs no limit if it
    depends on a kernel with at least as much live memory, because that kernel is on the device too.

    Only inputs and tensors that are computed on the device count. See `device_bytes` for their lifetimes.
    """
    graph = costs.graph
    first, last = _lifetimes(graph)
    tensors, makers = graph.made
    needed = np.ones((len(graph.kernels), len(graph.tensors)), np.bool_)  # on the device if the kernel is
    needed[:, tensors] = graph.ancestors[:, makers]
    read, readers, starts = graph.read
    may_be_sent = np.zeros_like(needed)  # although the kernel is on the device
    if len(read):
        may_be_sent[:, read] = np.logical_or.reduceat(~graph.ancestors[:, readers], starts, axis=1)
    numbers = np.arange(len(graph.kernels))[:, np.newaxis]
    is_used, is_over = (first <= numbers) & (numbers <= last), last < numbers
    # If the kernel of a limit is on the device, some live tensors surely count, and others may count. The
    # bound is raised by the bytes of the second group, and the kernel costs the bytes of both. So if the
    # kernel is elsewhere, only the weights are limited.
    surely = (needed & is_used) @ costs.raw_bytes
    loose = (~needed & is_used, may_be_sent & is_over)
    most = surely + (loose[0] | loose[1]) @ costs.raw_bytes
    weights, limits = replace(weight_limit(costs, at_most_bytes), name="memory of the device"), []
    for number in range(len(graph.kernels)):
        earlier = graph.ancestors[number].copy()
        earlier[number] = False
        if most[number] <= surely[earlier].max(initial=-1.0):
            continue
        compute, upload = weights.costs.compute.copy(), weights.costs.upload.copy()
        np.add.at(compute[:, 0], makers, np.where(loose[0][number], costs.raw_bytes, 0.0)[tensors])
        compute[number, 0] += most[number]
        upload[:, 0] = np.where(loose[1][number], costs.raw_bytes, 0.0)
        table = replace(weights.costs, compute=compute, upload=upload)
        limits.append(replace(weights, costs=table, slack=float(most[number] - surely[number])))
    return tuple(limits)


def weight_limit(costs: GraphCosts, at_most_bytes: float) -> Limit:
    """Return the limit that keeps the weights on the device within a number of bytes."""
    compute = np.zeros_like(costs.seconds)
    sizes: dict[tuple[int, ...], float] = {}
    for column, size_bytes in enumerate(costs.weight_bytes):
        readers = np.flatnonzero(costs.weight_readers[:, column])
        # A reader is on the device only with those before it, so the first ones decide.
        before = costs.graph.ancestors[np.ix_(readers, readers)].sum(axis=1)
        kernels = tuple(int(reader) for reader in readers[before == 1])
        sizes[kernels] = sizes.get(kernels, 0.0) + float(size_bytes)
    shared = [(size_bytes, kernels) for kernels, size_bytes in sizes.items() if len(kernels) > 1]
    for kernels, size_bytes in sizes.items():
        if len(kernels) == 1:
            compute[kernels[0], 0] += size_bytes
    links = compute.shape[1] - 1
    none = np.zeros((len(costs.raw_bytes), links))
    table = Costs(compute, none, none, np.zeros(links))
    return Limit(table, at_most_bytes, "weights on the device", tuple(shared))


def device_weights(costs: GraphCosts, tiers: tuple[int, ...]) -> float:
    here = np.array(tiers) == 0
    return float(costs.weight_bytes[costs.weight_readers[here].any(axis=0)].sum())


def device_bytes(costs: GraphCosts, tiers: tuple[int, ...]) -> float:
    """Return the memory that the kernels on the device need: the weights and the most live activations.

    A tensor is live until its last reader has run. If it is sent or is an output, it is live until the end.
    """
    here, graph = np.array(tiers) == 0, costs.graph
    if not here.any():
        return float(costs.raw_bytes[: len(graph.inputs)].sum())
    first, last = _lifetimes(graph)
    is_here, is_sent = np.ones((2, len(graph.tensors)), np.bool_)
    tensors, makers = graph.made
    is_here[tensors] = here[makers]
    is_sent[:] = np.isin(np.arange(len(is_sent)), costs.sent(tiers))
    numbers = np.flatnonzero(here)[:, np.newaxis]
    live = is_here & (first <= numbers) & ((numbers <= last) | is_sent)
    return device_weights(costs, tiers) + float((live @ costs.raw_bytes).max())


def _lifetimes(graph: KernelGraph) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the numbers of the kernels that make and that read each tensor last; int [tensors] each."""
    first = [graph.producer.get(tensor, 0) for tensor in graph.tensors]
    last = [
        len(graph.kernels) - 1 if tensor in graph.outputs else max(graph.consumers[tensor], default=number)
        for tensor, number in zip(graph.tensors, first, strict=True)
    ]
    return np.array(first, np.intp), np.array(last, np.intp)


def _stay(
    costs: GraphCosts, compute: NDArray[np.float64], pinned: NDArray[np.bool_] | None
) -> NDArray[np.float64]:
    """Return costs, float64 [kernels, tiers], that keep the makers of pinned tensors on the device."""
    if pinned is None:
        return compute
    tensors, kernels = costs.graph.made
    compute = compute.copy()
    compute[kernels[pinned[tensors]], 1:] = np.inf
    return compute
