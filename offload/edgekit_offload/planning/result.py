"""The result of planning: every way to run the model, what it costs, and where it is the best one.

Report, demo, export, benchmarks and the terminal read this record; `to_plain` and `from_plain` of
`edgekit_runtime.dataclass_json` make JSON of it and read it. It decides and measures nothing.
"""

from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.remote.cut_table import CutTable, Objective, OffloadPlan

Label: TypeAlias = Literal["measured", "emulated", "modelled"]
Kind: TypeAlias = Literal["local", "upload", "cut", "cascade"]
NEVER: Final = 1e15
"""A score that stands for infinity in JSON: a limit does not hold."""
_Figure: TypeAlias = Annotated[float, Range(0, 1e15)]


@dataclass(frozen=True, slots=True)
class PlannedMachine:
    """A machine that the plan is for.

    Attributes:
        name: what it is, such as `Cortex-A76, 4 cores` or a URL.
        label: how its times were found.
        memory_bytes: the limit of weights and activations that was given; None where there was none.
        weights_bytes: the limit of weights alone.
    """

    name: str
    label: Label
    memory_bytes: float | None = None
    weights_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Certificate:
    """How sure it is that no placement costs less, at one setting of the link.

    Attributes:
        proof: `enumerated` (every placement was tried), `dual` (a checked bound) or `solver`
            (the bound of a search).
        cost, bound: of the model of costs, in `unit`; no placement costs less than `bound`.
        gap: by which share of its cost the cut may be dearer than the best one.
        placements: how many were tried one by one; 0 where the proof is a bound.
        bandwidth_mbit_s, rtt_ms: the link at which this holds.
        device_slowdown, server_slowdown: the loads at which this holds; 1 is an idle machine.
        unit: of cost and bound.
        splits_only: whether it is the cheapest only of the placements with a kernel on each side.
        has_pins: whether it is the cheapest only of those that send nothing refused for its leakage.
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


@dataclass(frozen=True, slots=True)
class SentTensor:
    """A tensor that crosses the link.

    Attributes:
        name: in the model's graph.
        coding: `raw`, `int8`, `int4`, `uint8`, `delta`, or a media codec such as `jpeg:90`.
        raw_bytes, sent_bytes: of one request, before and after coding and compression.
        rounding: what a coding of 16 bits does to values that are not exact, in words, or the sample rate of
            sound; else empty.
    """

    name: str
    coding: str
    raw_bytes: float
    sent_bytes: float
    rounding: str = ""


@dataclass(frozen=True, slots=True)
class WinRange:
    """Bandwidths over which a way is the best one, on unloaded machines.

    Attributes:
        rtt_ms: the round trip for which this holds.
        from_mbit_s, to_mbit_s: both inclusive, points of the grid.
    """

    rtt_ms: float
    from_mbit_s: _Figure
    to_mbit_s: _Figure


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the model.

    Attributes:
        kind: local, upload (whole model on the server), cut or cascade.
        plan: its name and costs, as they stand in the cut table if it gets there.
        label: how its times were found; `modelled` are sums over kernels.
        sent: what crosses the link.
        latency_ms: [RTTs][bandwidths] of one request on unloaded machines.
        score: [RTTs][bandwidths] of what the objective minimises: ms, mJ, ms a request of the pipeline, or
            server ms kept a request; `NEVER` where the latency limit does not hold.
        wins: where it is the best one; empty where it never is.
        in_table: whether it is in the cut table; it may be best under load alone.
        kernels_on_device: of how many the head consists; for a cut.
        device_bytes: weights and activations on the device, modelled; None if unknown.
        devices_per_server: how many devices a server carries at the latency limit, modelled; capacity only.
        certificate: of a cut; None for one that three tiers led to: `PlanningResult.tiers` has its proof.
        explanation: one sentence.
        expected_loss: share of the answers that its coding is expected to make wrong, by the probabilities
            that the model gives to its answers (estimated); None if unknown.
        is_over_loss: whether that is more than `PlanningResult.max_loss`, or unknown of a coding that is not
            exact; then it is shown, and not offered.
        sends_input: whether it sends an input itself, be it in a coding, so that no leakage is measured.
    """

    kind: Kind
    plan: OffloadPlan
    label: Label
    sent: tuple[SentTensor, ...]
    latency_ms: tuple[tuple[float, ...], ...]
    score: tuple[tuple[float, ...], ...]
    wins: tuple[WinRange, ...] = ()
    in_table: bool = False
    kernels_on_device: int = 0
    device_bytes: float | None = None
    devices_per_server: int | None = None
    certificate: Certificate | None = None
    explanation: str = ""
    expected_loss: Annotated[float, Range(0, 1)] | None = None
    is_over_loss: bool = False
    sends_input: bool = False

    @property
    def name(self) -> str:
        """The name of its plan."""
        return self.plan.name


@dataclass(frozen=True, slots=True)
class Refusal:
    """A way that was considered and is not offered.

    Attributes:
        name: of the way, such as `jpeg:90`, `cascade`, `cuts`.
        reason: one sentence.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class TierPlan:
    """A placement on device, edge and cloud at one setting of both links.

    Attributes:
        bandwidths_mbit_s, rtts_ms: of the two links, from the device on.
        kernels: how many run on each tier.
        sent: the tensors that cross each link.
        compute_ms: on each tier.
        total_ms: with both links.
        certificate: of the placement.
        coding: family of codings in which tensors are sent.
        tiers: the tier of each kernel.
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


@dataclass(frozen=True, slots=True)
class PlanningResult:
    """What `edgekit offload plan` found.

    Attributes:
        model: its file name; `model_sha256` is of its bytes.
        objective: what was minimised; `unit` says of what `Way.score` is.
        device, server: machines that the costs belong to.
        bandwidths_mbit_s, rtts_ms: the grid.
        ways: local first, then whole-model ways, then cuts.
        table: the plans that are best somewhere, also under load; what the package carries.
        refusals: what was considered and is not offered.
        warnings: what the user should know before trusting this.
        sentences: where offloading pays and where not.
        kernels: of the graph; 0 where the model cannot be cut.
        samples: how many samples sizes and accuracy were measured on.
        tiers: placements on three tiers, where asked for.
        max_loss: share of the answers that a coding may be expected to make wrong.
    """

    model: str
    model_sha256: str
    objective: Objective
    unit: str
    device: PlannedMachine
    server: PlannedMachine
    bandwidths_mbit_s: tuple[float, ...]
    rtts_ms: tuple[float, ...]
    ways: tuple[Way, ...]
    table: CutTable
    refusals: tuple[Refusal, ...] = ()
    warnings: tuple[str, ...] = ()
    sentences: tuple[str, ...] = ()
    kernels: int = 0
    samples: int = 0
    tiers: tuple[TierPlan, ...] = ()
    max_loss: Annotated[float, Range(0, 1)] = 1.0

    def best(self, bandwidth_mbit_s: float, rtt_ms: float) -> Way:
        """Return the way that wins at the point of the grid nearest to a setting."""
        column = min(
            range(len(self.bandwidths_mbit_s)),
            key=lambda n: abs(self.bandwidths_mbit_s[n] - bandwidth_mbit_s),
        )
        row = min(range(len(self.rtts_ms)), key=lambda n: abs(self.rtts_ms[n] - rtt_ms))
        rtt, bandwidth = self.rtts_ms[row], self.bandwidths_mbit_s[column]
        return next(
            way
            for way in self.ways
            if any(win.rtt_ms == rtt and win.from_mbit_s <= bandwidth <= win.to_mbit_s for win in way.wins)
        )
