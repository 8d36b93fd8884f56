"""The result of planning: every way to run the model, its costs, and where it is the best one.

Report, demo, export, benchmarks and the terminal read this record; `to_plain` and `from_plain` of
`edgekit_runtime.dataclass_json` convert it to JSON and back. It decides and measures nothing.
"""

from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.offload_plan import OffloadPlan

Label: TypeAlias = Literal["measured", "emulated", "modelled"]
Kind: TypeAlias = Literal["local", "upload", "cut", "cascade"]
NEVER: Final = 1e15
"""A score that stands for infinity in JSON: a limit is exceeded."""
_Figure: TypeAlias = Annotated[float, Range(0, 1e15)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMachine:
    """A machine that the plan is for.

    Attributes:
        name: such as `Cortex-A76, 4 cores` or a URL.
        memory_bytes: the given limit of weights and activations; None if there was none.
        weights_bytes: the given limit of the weights alone.
    """

    name: str
    label: Label
    memory_bytes: float | None = None
    weights_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedLimit:
    """A limit within which a certificate holds.

    Attributes:
        name: name of the limited quantity, such as `latency` or `weights on the device`.
        at_most: value of the limit, in `unit`.
        unit: seconds or bytes.
        server_waits: wait on the server that a limited latency includes, as a multiple of the server's time.
    """

    name: str
    at_most: _Figure
    unit: Literal["s", "B"]
    server_waits: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The proof that no placement costs less, at one setting of the link.

    Attributes:
        proof: `enumerated` (every placement was tried), `dual` (a checked bound) or `solver` (the bound of a
            search).
        cost, bound: cost and lower bound in the cost model, in `unit`; no placement costs less than `bound`.
        gap: upper bound of the excess over the best placement's cost, as a share of the cut's cost.
        placements: number of placements tried one by one; 0 if the proof is a bound.
        bandwidth_mbit_s, rtt_ms: link for which the proof holds.
        device_slowdown, server_slowdown: loads for which the proof holds; 1 is an idle machine.
        splits_only: True if only placements with a kernel on each side were compared.
        has_pins: True if placements that send a tensor refused for its leakage were not compared.
        coding: coding for which the proof holds; in another one, a placement may cost less.
        limits: limits that the placements keep; a placement that exceeds one may cost less.
        pinned: tensors that stay on the device; a placement that sends one may cost less.
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
    """A tensor that crosses the link.

    Attributes:
        coding: `raw`, `int8`, `int4`, `uint8`, `delta`, or a media codec such as `jpeg:90`.
        raw_bytes, sent_bytes: bytes of one request, before and after coding and compression.
        rounding: description of how a 16-bit coding rounds values that it cannot restore exactly, or the
            sample rate of sound; else empty.
    """

    name: str
    coding: str
    raw_bytes: float
    sent_bytes: float
    rounding: str = ""


@dataclass(frozen=True, slots=True)
class WinRange:
    """Bandwidths over which a candidate is the best one, on unloaded machines.

    Attributes:
        rtt_ms: round trip for which this holds.
        from_mbit_s, to_mbit_s: first and last bandwidth, points of the grid.
    """

    rtt_ms: float
    from_mbit_s: _Figure
    to_mbit_s: _Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run the model, with its costs.

    Attributes:
        kind: local, upload (whole model on the server), cut or cascade.
        plan: its name and costs; the cut table has the same costs if it contains the candidate.
        label: how its times were found; `modelled` are sums over kernels.
        latency_ms: [RTTs][bandwidths], latency of one request on unloaded machines.
        score: [RTTs][bandwidths], score that the objective minimises, in `PlanningResult.unit`; `NEVER` if
            the latency limit does not hold.
        wins: where it is the best one; empty if it never is.
        in_table: whether it is in the cut table; it may be best only under load, or for inputs that the best
            plans cannot send.
        kernels_on_device: number of kernels of the head; for a cut.
        device_bytes: weights and activations on the device, modelled; None if unknown.
        devices_per_server: number of devices that a server carries at the latency limit, modelled; only for
            the objective capacity.
        certificate: proof of a cut; None for a cut from a plan on three tiers: `PlanningResult.tiers` has its
            proof.
        expected_loss: share of the answers that its coding is expected to make wrong, see `AnswerChange`;
            None if unknown.
        loss_error: standard error of `expected_loss`.
        samples_needed: number of samples that the estimate of its loss needs; 0 if there are enough.
        is_over_loss: whether `expected_loss` plus `loss_error` is more than `PlanningResult.max_loss`, or
            unknown for a coding that is not exact; then the candidate is shown, but not offered.
        sends_input: whether it sends an input itself or another form of it, with or without a coding, so that
            no leakage is measured.
        known_inputs: number of inputs that the attacker knew, each with its sent tensors; 0 if no leakage was
            measured.
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
        """Whether `expected_loss` is known, and from as many samples as its estimate needs."""
        return self.expected_loss is not None and not self.samples_needed


@dataclass(frozen=True, slots=True)
class Refusal:
    """A candidate that was considered and is not offered.

    Attributes:
        name: name of the candidate, such as `jpeg:90`, `cascade`; `cuts` for all cuts together.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """A placement on device, edge and cloud at one setting of both links.

    Attributes:
        bandwidths_mbit_s, rtts_ms: bandwidths and round trips of both links, the device's first.
        kernels: number of kernels on each tier.
        sent: for each link the tensors that cross it.
        compute_ms: time of the kernels on each tier.
        total_ms: latency including both links.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningResult:
    """The result of `edgekit offload plan`.

    Attributes:
        model: file name of the model; `model_sha256` is the digest of its bytes.
        objective: the minimised objective; `unit` is the unit of `Candidate.score`.
        bandwidths_mbit_s, rtts_ms: the grid.
        candidates: local first, then whole-model candidates, then cuts.
        table: the plans that are best somewhere, also under load and for inputs that other plans cannot send;
            the package carries them.
        kernels: number of kernels of the graph; 0 if the model cannot be cut.
        samples: number of samples for sizes and accuracy.
        max_loss: share of the answers that a coding may be expected to make wrong, with one standard error.
        sentences: where offloading pays, in words, see `explain_plan`.
        tiers: the fastest placements on three tiers; empty without a machine at the edge.
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
        """Return the candidate that wins at the grid point nearest to a setting.

        Raises:
            StopIteration: no candidate keeps the limits there.
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
