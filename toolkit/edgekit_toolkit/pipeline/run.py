"""The results of one run of `edgekit package`, for the package, the evidence and the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgekit_runtime.sessions.latency import Latency
from edgekit_toolkit.costs.peak_memory import MemoryEstimate
from edgekit_toolkit.evaluation.drops import CONFIDENCE
from edgekit_toolkit.evaluation.host_memory import MemoryHere
from edgekit_toolkit.evaluation.judge import TargetCosts
from edgekit_toolkit.evaluation.scoring import Score, Scores
from edgekit_toolkit.measurement.arithmetic import measures_here
from edgekit_toolkit.measurement.host_load import HostLoad
from edgekit_toolkit.measurement.peak_memory import PeakMemory
from edgekit_toolkit.packaging.assemble import PackageDraft
from edgekit_toolkit.packaging.recipe import Recipe
from edgekit_toolkit.pipeline.candidates import Candidate, CandidateSet
from edgekit_toolkit.pipeline.prepare import Preparation
from edgekit_toolkit.pipeline.request import Request
from edgekit_toolkit.quantize.quantizer import Quantizer
from edgekit_toolkit.selection.budget import Budget
from edgekit_toolkit.selection.choice import CandidateFigures, Choice, FloatRatio
from edgekit_toolkit.selection.confirmation import Acceptance, HeldDrop, limits_in_force


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedCandidate(Candidate):
    """A form of the model with its figures, recipe and package.

    Attributes:
        score: The score on the samples that are used to choose a candidate.
        confirmation: The score on the held-back samples, or None if there are too few.
        latency: The latency on this machine, or None for an untimed form.
        memory: The memory of a process that runs the form, or a text that says why it is unknown.
        measured: The figures that are used to compare candidates.
        held: The drop that was compared with the limit, or None without user samples.
    """

    score: Score
    confirmation: Score | None
    latency: Latency | None
    modelled: TargetCosts
    memory: MemoryEstimate | PeakMemory | str
    recipe: Recipe
    package: PackageDraft
    measured: CandidateFigures
    held: HeldDrop | None = None

    @property
    def id(self) -> str:
        """A short name that is unique in a run."""
        return self.measured.id

    @property
    def stated_drop(self) -> HeldDrop | None:
        """The drop on the held-back samples if there are any, else `held`."""
        if self.held is None or self.confirmation is None or self.held.held_back:
            return self.held
        return HeldDrop(self.confirmation.drop, CONFIDENCE, held_back=True)


@dataclass(frozen=True, slots=True)
class EngineResult:
    """The result of one engine in a tournament.

    Attributes:
        candidate: The chosen candidate of the engine, or None.
        latency_ms: The median latency on this machine, or None if the candidate did not run.
        reason: Why there is no candidate or latency, or an empty string.
        is_packaged: Whether the package is for this engine.
        threads: The number of threads of the measurement.
    """

    backend: str
    candidate: JudgedCandidate | None
    latency_ms: float | None
    reason: str
    is_packaged: bool
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class FurtherVariant:
    name: str
    run: "Run"
    candidate: JudgedCandidate

    def __str__(self) -> str:
        return f"{self.run.request.backend} {self.candidate.label}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All results of one run.

    Attributes:
        candidate_set: The built forms, the dropped forms, and the noise of blocks.
        candidates: The judged candidates. The float model is first.
        scores: The metric, the samples and the score of the source model.
        source_latency: The latency of the source model on this machine, measured in turns with the
            candidates.
        load: The load of this machine during the measurements.
        front: The ids of the candidates on the Pareto front, see `pareto_front`.
        acceptance: Whether the engine of the target accepts the chosen candidate, or None if no candidate was
            chosen.
        seconds: A dict from the phases of the run to their durations.
        warnings: Sentences for the user, see `find_warnings`.
        memory_here: The memory of the chosen candidate, or None before it is measured.
        tournament: The results of all engines. Empty without a tournament.
        slower_than: A text such as `1.20 x LABEL on ENGINE` if the chosen candidate is slower on this machine
            than a float model that exceeds a limit. Otherwise an empty string.
        variants: The further variants of the package.
        whole: The chosen candidate after its variants were added or its version was changed. None if neither
            happened.
    """

    request: Request
    prepared: Preparation
    quantizer: Quantizer
    candidate_set: CandidateSet
    candidates: tuple[JudgedCandidate, ...]
    scores: Scores
    source_latency: Latency
    load: HostLoad
    front: frozenset[str]
    choice: Choice
    acceptance: Acceptance | None
    seconds: Mapping[str, float]
    warnings: Sequence[str]
    memory_here: MemoryHere | None = None
    tournament: tuple[EngineResult, ...] = ()
    slower_than: str = ""
    variants: tuple[FurtherVariant, ...] = ()
    whole: JudgedCandidate | None = None

    @property
    def chosen(self) -> JudgedCandidate | None:
        return None if self.choice.chosen is None else self.candidate(self.choice.chosen)

    @property
    def subject(self) -> JudgedCandidate:
        """The candidate for reports: the chosen one, or the closest to the limits if none was chosen."""
        return self.candidate(self.choice.chosen or self.choice.closest or self.candidates[0].id)

    @property
    def packaged(self) -> JudgedCandidate | None:
        """The candidate to write, which is the chosen one with its variants."""
        return self.whole or self.chosen

    @property
    def limits(self) -> Budget:
        return limits_in_force(
            self.request.budget, has_data=self.prepared.has_data, strict=self.request.strict
        )

    def candidate(self, candidate_id: str) -> JudgedCandidate:
        return next(candidate for candidate in self.candidates if candidate.id == candidate_id)

    def float_ratio(self, candidate: JudgedCandidate) -> FloatRatio:
        """Return the latency of a candidate relative to the float model."""
        floats, target = self.candidates[0], self.request.target
        assert candidate.latency is not None and floats.latency is not None  # noqa: S101  # for the type checker: only variants are untimed
        own_ms, floats_ms = candidate.modelled.latency_ms, floats.modelled.latency_ms
        modelled = own_ms / floats_ms if own_ms is not None and floats_ms else None
        return FloatRatio(
            modelled=None if measures_here(target) else modelled,
            uncertainty=candidate.modelled.uncertainty,
            here=candidate.latency.ratio_to(floats.latency),
            here_to_source=candidate.latency.ratio_to(self.source_latency),
        )
