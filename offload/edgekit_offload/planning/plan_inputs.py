"""The inputs of planning: a model, its profiles on both machines, samples, an objective and limits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from edgekit_offload.partition.opened_model import Feeds, OpenedModel
from edgekit_offload.planning.cascade import CascadeInputs
from edgekit_offload.planning.coding_costs import AnswerChange
from edgekit_offload.planning.costs import NO_LIMITS, DeviceLimits, PowerModel
from edgekit_offload.planning.cut_candidates import CutCandidate
from edgekit_offload.planning.envelope import Grid
from edgekit_offload.planning.leakage import Leakage
from edgekit_offload.planning.objectives import Goal
from edgekit_offload.planning.result import Label, Refusal, SentTensor
from edgekit_offload.planning.uploads import UploadCandidate
from edgekit_offload.profiling.model_profile import ModelProfile
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.latency_model import LinkState
from edgekit_runtime.offload.offload_plan import OffloadPlan

MAX_LOSS: Final = 1e-3  # expected loss of accuracy by a coding that is allowed by default


@dataclass(frozen=True, slots=True)
class ExtractedPlan:
    """A plan whose submodels were extracted and run.

    Attributes:
        plan: The plan with measured costs, or with modelled costs if it was not measured.
        change: The change of the answers, or None if there are no known classes or the plan did not run.
    """

    plan: OffloadPlan
    label: Label
    change: AnswerChange | None = None


class Measure(Protocol):
    """Extracts the submodels of candidates and measures them. Candidates that fail are refused."""

    def __call__(
        self, uploads: Sequence[UploadCandidate], cuts: Sequence[CutCandidate]
    ) -> Mapping[str, ExtractedPlan | Refusal]:
        """Return name of each candidate -> its result; `local`, timed beside them, may be among them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """The inputs of planning.

    Attributes:
        feeds: The samples, one request each.
        power: The power of the device, for the objective `energy`. It is also written to the cut table.
        latency_limit_s: The latency limit. It applies to 99 % of the requests for the objective `capacity`,
            and to the predicted latency for `energy`.
        requests_per_s: The request rate of one device, for the objective `capacity`.
        keep_on_device: The names of tensors that must stay on the device. `input` stands for all inputs.
        edge: The profile of an edge machine between device and server, if there are three tiers. The device
            then sends to this machine.
        measure: Extracts and measures candidates. If it is None, the costs are sums over kernels.
        leakage: Measures the leakage of sent tensors, or None.
        cascade: The small model of a cascade and the required agreement.
        max_loss: The maximum fraction of answers that a coding may make wrong. It limits the estimated loss
            plus one standard error. The loss is unknown if the model has no known class scores, was not run,
            or has too few real samples. If `max_loss` is below 1, codings with an unknown loss are not used.
        has_samples: Whether `feeds` are the user's data. The loss is not estimated from golden or generated
            inputs.
        is_server_modelled: Whether the server's profile is scaled from another machine.
        sample_rate_hz: The sample rate of sound, or None if it is unknown.
        notes: Warnings for the user about profiles and samples.
    """

    name: str
    model: OpenedModel
    device: ModelProfile
    server: ModelProfile
    grid: Grid
    feeds: Sequence[Feeds]
    objective: str = "latency"
    power: PowerModel | None = None
    latency_limit_s: float | None = None
    requests_per_s: float = 1.0
    limits: DeviceLimits = NO_LIMITS
    keep_on_device: tuple[str, ...] = ()
    edge: ModelProfile | None = None
    edge_link: LinkState | None = None
    measure: Measure | None = None
    leakage: Callable[[Sequence[SentTensor]], Leakage | None] | None = None
    most_leakage_db: float | None = None
    notes: tuple[str, ...] = ()
    is_server_modelled: bool = False
    cascade: CascadeInputs | None = None
    max_loss: float = MAX_LOSS
    has_samples: bool = True
    sample_rate_hz: float | None = None

    @property
    def goal(self) -> Goal:
        """The objective with its latency limit."""
        return Goal(objective=self.objective, power=self.power, latency_limit_s=self.latency_limit_s)

    @property
    def peer(self) -> ModelProfile:
        return self.edge or self.server

    def check(self) -> None:
        """Check the inputs.

        Raises:
            CutError: Samples are missing or do not fit the model, the link is down, or the objective lacks
                data.
        """
        if not self.feeds:
            raise CutError("planning needs samples: the sizes of sent tensors depend on their values")
        if min(self.grid.bandwidths_mbit_s, default=0.0) <= 0:
            raise CutError("the link is down (bandwidth 0): nothing can be sent, so there is nothing to plan")
        self.goal.check()
        expected = set(self.feeds[0])
        if self.device.inputs and expected != set(self.device.inputs):
            raise CutError(
                f"the samples have {', '.join(sorted(expected))}, the model takes"
                f" {', '.join(sorted(self.device.inputs))}"
            )
