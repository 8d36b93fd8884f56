"""The results of one run of `edgekit package`. Data only; package, evidence and report are made from it."""

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
    """A form of the model with its figures, recipe and draft of a package.

    Attributes:
        score: score on the samples that choose between candidates.
        confirmation: score on the samples held back; None if there are too few.
        latency: measured on this machine in turns with all other candidates; None for an untimed form.
        memory: memory of a process that runs the form, or a text that says why it is unknown.
        measured: the figures that candidates are compared by.
        held: drop in score that was compared with the limit; None without data.
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
        """Short name, unique in a run."""
        return self.measured.id

    @property
    def stated_drop(self) -> HeldDrop | None:
        """The drop on the held-back samples; without such samples, `held`. None without data."""
        if self.held is None or self.confirmation is None or self.held.held_back:
            return self.held
        return HeldDrop(self.confirmation.drop, CONFIDENCE, held_back=True)


@dataclass(frozen=True, slots=True)
class EngineResult:
    """The result of one engine in a tournament.

    Attributes:
        candidate: the engine's chosen candidate; None without one.
        latency_ms: median over processes, measured on this machine; None if the engine did not run.
        reason: why the engine has no candidate or no latency; empty otherwise.
        is_packaged: whether the package is for this engine.
        threads: threads of one inference when `latency_ms` was measured.
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
        candidate_set: forms to choose from, forms that were dropped, and the noise of blocks.
        candidates: the float model first.
        scores: metric, samples and score of the source model; the scores of candidates are in `candidates`.
        source_latency: latency of the source model here, measured in turns with the candidates.
        load: load of this machine while it measured.
        front: ids of the candidates on the Pareto front, see `pareto_front`.
        acceptance: whether the target's engine accepts the chosen candidate; None if none is chosen.
        seconds: phase of the run -> its duration in seconds.
        warnings: sentences for the user, see `find_warnings`.
        memory_here: memory of the chosen candidate, once it is measured.
        tournament: the result of each engine; empty without a tournament.
        slower_than: names a float model that is faster here but breaks a limit; empty if there is none.
        variants: the further variants of the package.
        whole: the chosen candidate as packaged, if variants or a version were added; else None.
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
        """The candidate that a report shows: the chosen one, else the one nearest to the limits."""
        return self.candidate(self.choice.chosen or self.choice.closest or self.candidates[0].id)

    @property
    def packaged(self) -> JudgedCandidate | None:
        """The candidate to write: the chosen one, with its variants if there are any."""
        return self.whole or self.chosen

    @property
    def limits(self) -> Budget:
        return limits_in_force(
            self.request.budget, has_data=self.prepared.has_data, strict=self.request.strict
        )

    def candidate(self, candidate_id: str) -> JudgedCandidate:
        return next(candidate for candidate in self.candidates if candidate.id == candidate_id)

    def float_ratio(self, candidate: JudgedCandidate) -> FloatRatio:
        """Return the latency of a candidate relative to the float model, which is the first candidate."""
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
