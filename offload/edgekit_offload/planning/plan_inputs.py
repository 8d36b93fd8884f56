"""What a plan is made from: a model, its profiles on both machines, samples, a goal and limits."""

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
    """A plan that was extracted and ran.

    Attributes:
        plan: plan with measured costs, or with modelled ones if it was not measured.
        change: change of the answers to the samples; None if no classes are known, or the plan did not run.
    """

    plan: OffloadPlan
    label: Label
    change: AnswerChange | None = None


class Measure(Protocol):
    """Extracts candidates as submodels and times them by turns. A candidate that does not work is refused."""

    def __call__(
        self, uploads: Sequence[UploadCandidate], cuts: Sequence[CutCandidate]
    ) -> Mapping[str, ExtractedPlan | Refusal]:
        """Return name of each candidate -> its result; `local`, timed beside them, may be among them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """The inputs of a plan.

    Attributes:
        feeds: samples, one request each.
        power: power of the device, for energy; the table carries it for devices that prefer energy.
        latency_limit_s: for capacity, the limit of 99 % of requests; for energy, the limit of the predicted
            latency.
        requests_per_s: rate of one device, for capacity.
        keep_on_device: names of tensors that stay on the device, or `input`.
        edge: profile of the machine between device and server, for three tiers: the device sends to this
            machine.
        measure: extracts and measures candidates; with None, costs are only sums over kernels.
        leakage: measures the leakage of sent tensors; None for no attack.
        cascade: a small model for the device, and the required agreement.
        max_loss: share of the answers that a coding may be expected to make wrong, with one standard error.
            The loss is unknown if outputs are not known to be classes, nothing ran, or samples are too few or
            made up. Only a limit of 1 accepts an unknown loss.
        has_samples: whether `feeds` are the user's data. Golden and made-up inputs are no evidence of what a
            coding changes.
        is_server_modelled: whether the server's profile is another machine's, scaled.
        sample_rate_hz: sample rate of sound; None if unknown.
        notes: warnings about profiles and samples for the user.
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
        """The objective with its limit on latency."""
        return Goal(objective=self.objective, power=self.power, latency_limit_s=self.latency_limit_s)

    @property
    def peer(self) -> ModelProfile:
        return self.edge or self.server

    def check(self) -> None:
        """Check that there is something to plan.

        Raises:
            CutError: samples are missing or of another model, the link is down, or the objective lacks data.
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
