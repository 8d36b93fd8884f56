"""The result of planning: all ways to run a model, their costs, and when each is the best.

The records are used by reports, the demo, exports, benchmarks and the terminal. `to_plain` and `from_plain`
of `edgekit_runtime.dataclass_json` convert them to and from JSON.
"""

from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.offload_plan import OffloadPlan

Label: TypeAlias = Literal["measured", "emulated", "modelled"]
Kind: TypeAlias = Literal["local", "upload", "cut", "cascade"]
NEVER: Final = 1e15
"""The score of a plan that exceeds a limit. It stands for infinity, which JSON does not have."""
_Figure: TypeAlias = Annotated[float, Range(0, 1e15)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMachine:
    """A machine for which a plan is made.

    Attributes:
        name: A description, such as `Cortex-A76, 4 cores`, or a URL.
        memory_bytes: The limit of weights and activations, or None.
        weights_bytes: The limit of the weights alone, or None.
    """

    name: str
    label: Label
    memory_bytes: float | None = None
    weights_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedLimit:
    """A limit of a certificate. Only placements within this limit are compared.

    Attributes:
        name: The limited quantity, such as `latency` or `weights on the device`.
        at_most: The limit in `unit`.
        unit: Seconds or bytes.
        server_waits: The waiting time on the server that a latency limit includes, as a multiple of the
            server's computing time.
    """

    name: str
    at_most: _Figure
    unit: Literal["s", "B"]
    server_waits: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The proof that a cut is the cheapest placement, up to `gap`.

    It applies only to the link, loads, coding and limits in the attributes. Under other conditions, a
    placement may cost less.

    Attributes:
        proof: `enumerated` if all placements were compared, `dual` for a bound that was checked, or `solver`
            for the bound of a search.
        cost, bound: The cost of the cut and the lower bound of all costs in the cost model, in `unit`.
        gap: How much the cost may exceed the minimum, as a fraction of the cost.
        placements: The number of placements that were compared, or 0 if the proof is a bound.
        bandwidth_mbit_s, rtt_ms: The link.
        device_slowdown, server_slowdown: The loads, where 1 is an idle machine.
        splits_only: Whether only placements with kernels on both sides were compared.
        has_pins: Whether placements were excluded because of their leakage.
        coding: The coding of sent tensors.
        limits: The limits that the placements keep.
        pinned: The tensors that stay on the device.
    """

    proof: str
    cost: _Figure
    bound: _Figure
    gap: _Figure
    placements: int
    bandwidth_mbit_s: _Figure
    rtt_ms: float
    device_slowdown: float = 1.0
    server_slowdown: float = 1.0
    unit: Literal["s", "J"] = "s"
    splits_only: bool = False
    has_pins: bool = False
    coding: str = "raw"
    limits: tuple[StatedLimit, ...] = ()
    pinned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SentTensor:
    """A tensor that is sent over the link.

    Attributes:
        coding: `raw`, `int8`, `int4`, `uint8`, `delta`, or a media codec such as `jpeg:90`.
        raw_bytes, sent_bytes: The size in a request before and after coding and compression.
        rounding: A text that says how a 16-bit coding rounds values, or at which rate sound is sampled. It is
            empty for other codings.
    """

    name: str
    coding: str
    raw_bytes: float
    sent_bytes: float
    rounding: str = ""


@dataclass(frozen=True, slots=True)
class WinRange:
    """A range of bandwidths in which a candidate is the best on unloaded machines.

    Attributes:
        rtt_ms: The round-trip time.
        from_mbit_s, to_mbit_s: The first and last bandwidth, which are points of the grid.
    """

    rtt_ms: float
    from_mbit_s: _Figure
    to_mbit_s: _Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run the model, with its costs.

    Attributes:
        kind: local, upload (the whole model on the server), cut or cascade.
        plan: The plan with its name and costs, as in the cut table.
        label: The origin of the times. `modelled` times are sums over kernels.
        latency_ms: The latency of a request on unloaded machines, [RTTs][bandwidths].
        score: The score to minimise in `PlanningResult.unit`, [RTTs][bandwidths]. It is `NEVER` if the
            latency limit is exceeded.
        wins: The ranges in which it is the best, possibly empty.
        in_table: Whether it is in the cut table. A candidate without `wins` may be in the table because it is
            the best under load, or because it can encode values that the best plans cannot encode.
        kernels_on_device: The number of kernels in the head of a cut.
        device_bytes: The modelled size of weights and activations, or None if it is unknown.
        devices_per_server: The modelled number of devices per server at the latency limit, only for the
            objective `capacity`.
        certificate: The proof of a cut. It is None for three tiers, whose proof is in `PlanningResult.tiers`.
        expected_loss: The fraction of answers that its coding probably makes wrong (see `AnswerChange`), or
            None if it is unknown.
        loss_error: The standard error of `expected_loss`.
        samples_needed: The number of samples needed to estimate the loss, or 0 if there are enough.
        is_over_loss: Whether `expected_loss` plus `loss_error` exceeds `PlanningResult.max_loss`, or is
            unknown for an inexact coding. The candidate is then shown but not used.
        sends_input: Whether it sends an input or a converted input. If True, leakage is not measured.
        known_inputs: The number of inputs that the attacker knew, or 0 if leakage was not measured.
    """

    kind: Kind
    plan: OffloadPlan
    label: Label
    sent: tuple[SentTensor, ...] = ()
    latency_ms: tuple[tuple[float, ...], ...] = ()
    score: tuple[tuple[float, ...], ...] = ()
    wins: tuple[WinRange, ...] = ()
    in_table: bool = False
    kernels_on_device: int = 0
    device_bytes: float | None = None
    devices_per_server: int | None = None
    certificate: Certificate | None = None
    explanation: str = ""
    expected_loss: Annotated[float, Range(0, 1)] | None = None
    loss_error: Annotated[float, Range(0, 1)] = 0.0
    samples_needed: Annotated[int, Range(0, 1e6)] = 0
    is_over_loss: bool = False
    sends_input: bool = False
    known_inputs: Annotated[int, Range(0, 1e6)] = 0

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def has_known_loss(self) -> bool:
        """Whether `expected_loss` is known from enough samples."""
        return self.expected_loss is not None and not self.samples_needed


@dataclass(frozen=True, slots=True)
class Refusal:
    """A candidate that is not offered, with the reason.

    Attributes:
        name: The name of the candidate, such as `jpeg:90` or `cascade`, or `cuts` for all cuts.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """A placement on device, edge and cloud for one state of both links.

    Attributes:
        bandwidths_mbit_s, rtts_ms: The bandwidths and round-trip times of the links, starting at the device.
        kernels: The number of kernels on each tier.
        sent: The tensors that are sent over each link.
        compute_ms: The time of the kernels on each tier.
        total_ms: The latency including both links.
        tiers: The tier of each kernel.
    """

    bandwidths_mbit_s: tuple[float, ...]
    rtts_ms: tuple[float, ...]
    kernels: tuple[int, ...]
    sent: tuple[tuple[SentTensor, ...], ...]
    compute_ms: tuple[float, ...]
    total_ms: float
    certificate: Certificate
    coding: str = "raw"
    tiers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningResult:
    """The result of `edgekit offload plan`.

    Attributes:
        model: The file name of the model.
        model_sha256: The digest of the model's file.
        objective: The objective that was minimised.
        unit: The unit of `Candidate.score`.
        bandwidths_mbit_s, rtts_ms: The grid.
        candidates: The candidates: local, uploads and cuts, in this order.
        table: The plans for the package. Each plan is `local`, is the best under some conditions, or can
            encode values that the best plans cannot encode.
        kernels: The number of kernels in the graph, or 0 if the model cannot be cut.
        samples: The number of samples on which sizes and accuracy were measured.
        max_loss: The maximum fraction of answers that a coding may make wrong, see `PlanInputs`.
        sentences: Sentences that say when offloading is better, see `explain_plan`.
        tiers: The fastest placements on three tiers, empty without an edge machine.
    """

    model: str
    model_sha256: str
    objective: str
    unit: str
    device: PlannedMachine
    server: PlannedMachine
    bandwidths_mbit_s: tuple[float, ...]
    rtts_ms: tuple[float, ...]
    candidates: tuple[Candidate, ...]
    table: CutTable
    refusals: tuple[Refusal, ...] = ()
    warnings: tuple[str, ...] = ()
    sentences: tuple[str, ...] = ()
    kernels: int = 0
    samples: int = 0
    tiers: tuple[TierPlan, ...] = ()
    max_loss: Annotated[float, Range(0, 1)] = 1.0

    def best(self, bandwidth_mbit_s: float, rtt_ms: float) -> Candidate:
        """Return the best candidate at the nearest point of the grid.

        Raises:
            StopIteration: No candidate keeps the limits there.
        """
        column = min(
            range(len(self.bandwidths_mbit_s)),
            key=lambda n: abs(self.bandwidths_mbit_s[n] - bandwidth_mbit_s),
        )
        row = min(range(len(self.rtts_ms)), key=lambda n: abs(self.rtts_ms[n] - rtt_ms))
        rtt, bandwidth = self.rtts_ms[row], self.bandwidths_mbit_s[column]
        return next(
            candidate
            for candidate in self.candidates
            if any(
                win.rtt_ms == rtt and win.from_mbit_s <= bandwidth <= win.to_mbit_s for win in candidate.wins
            )
        )
