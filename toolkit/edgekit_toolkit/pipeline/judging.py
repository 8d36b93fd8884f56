"""Measures the scores, packages and latencies of the candidates of a search."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from edgekit_runtime.sessions.latency import Latency
from edgekit_runtime.sessions.ort_products import saturates
from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.evaluation.judge import (
    TargetCosts,
    measure_latencies,
    measure_processor_ratios,
    model_on_target,
)
from edgekit_toolkit.evaluation.scoring import Scores, score_candidates, split_evaluation
from edgekit_toolkit.measurement.arithmetic import measures_here
from edgekit_toolkit.measurement.host_load import HostLoad, LoadMeter
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.packaging.signing_keys import StatementSigner
from edgekit_toolkit.pipeline.candidates import Candidate, CandidateSet
from edgekit_toolkit.pipeline.drafts import draft_packages
from edgekit_toolkit.pipeline.prepare import Preparation
from edgekit_toolkit.pipeline.request import Phases, Request
from edgekit_toolkit.pipeline.run import JudgedCandidate
from edgekit_toolkit.quantize.forms import DYNAMIC_INT8, Form
from edgekit_toolkit.quantize.quantizer import Quantizer
from edgekit_toolkit.quantize.sensitivity import Fidelity, decibel
from edgekit_toolkit.samples.split import feeds_only
from edgekit_toolkit.selection.budget import Budget
from edgekit_toolkit.selection.choice import CandidateFigures
from edgekit_toolkit.selection.confirmation import limits_in_force

_NOISE_SAMPLES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedSet:
    """The candidates with all their figures, and the limits in force."""

    limits: Budget
    scores: Scores
    candidates: list[JudgedCandidate]
    source_latency: Latency
    load: HostLoad


class Judging:
    """Scores candidates, drafts their packages and measures their costs. More candidates may be added later.

    Attributes:
        limits: The budget with the limits in force.
        drafts: The drafts of the candidates, in order.

    Args:
        candidate_set: The candidates. Unusable candidates are removed from it.
        signer: Signs the package of each candidate, so that its size includes the signature.
    """

    def __init__(
        self,
        request: Request,
        prepared: Preparation,
        candidate_set: CandidateSet,
        signer: StatementSigner,
        phases: Phases,
        *,
        quantizer: Quantizer,
    ) -> None:
        self._request, self._prepared, self._set = request, prepared, candidate_set
        self._signer, self._phases, self._quantizer = signer, phases, quantizer
        self.limits = limits_in_force(request.budget, has_data=prepared.has_data, strict=request.strict)
        self._scores: Scores | None = None
        self.drafts: list[JudgedCandidate] = []

    def judge_added(self) -> None:
        """Score and draft the candidates that have no draft yet, and remove unusable candidates."""
        first = len(self.drafts)
        with self._phases.phase("judge"):
            scores = self._score(self._set.candidates[first:], first)
            joined = scores if self._scores is None else self._scores.joined(scores)
        if self._scores is not None and joined.unjudged != self._scores.unjudged:
            first = 0  # other samples are judged now
        self._scores = joined
        with self._phases.phase("draft"):
            self.drafts[first:] = draft_packages(
                replace(self._request, budget=self.limits),
                self._prepared,
                self._set.candidates[first:],
                joined.without(range(first)),
                self._signer,
            )

    def measure(self) -> JudgedSet:
        """Measure the latencies of all candidates in turns, and return the candidates with all figures.

        Call `judge_added` first.
        """
        if self._scores is None:
            raise ValueError("no candidate is judged")
        request, prepared = self._request, self._prepared
        names, feeds = self._names, prepared.feeds[0]
        with self._phases.phase("measure"):
            models = [draft.model for draft in self.drafts]
            meter = LoadMeter()
            runs = [model.open(names, threads=request.threads) for model in (prepared.source.model, *models)]
            source_latency, *latencies = measure_latencies(runs, feeds)
            load = meter.finish(source_latency)
            if request.threads != 1:
                runs = [model.open(names, threads=1) for model in (prepared.source.model, *models)]
            _, *ratios = measure_processor_ratios(runs, feeds)
            on_target = model_on_target(models, request.target, prepared.dims, feeds)
        rows = zip(self.drafts, latencies, ratios, on_target, self._measure_noises(), strict=True)
        candidates = [self._complete(f"C{index}", *row) for index, row in enumerate(rows)]
        return JudgedSet(
            limits=self.limits,
            scores=self._scores,
            candidates=candidates,
            source_latency=source_latency,
            load=load,
        )

    @property
    def _names(self) -> list[str]:
        return [spec.name for spec in self._prepared.source.outputs]

    def _complete(
        self,
        candidate_id: str,
        draft: JudgedCandidate,
        latency: Latency,
        ratio: float,
        modelled: TargetCosts,
        snr_db: float,
    ) -> JudgedCandidate:
        here = measures_here(self._request.target)
        costs = {
            **draft.measured.figures,
            "latency": _known(latency.median_s * 1e3 if here else modelled.latency_ms),
            "energy": _known(modelled.energy_mj),
        }
        measured = CandidateFigures(
            candidate_id,
            draft.label,
            costs,
            latency_uncertainty=1.0 if here else modelled.uncertainty,
            host_ratio=ratio if self._is_timed_as_on_target(draft.form) else math.inf,
            drop_error=draft.score.drop.standard_error,
            snr_db=snr_db,
        )
        return replace(draft, latency=latency, modelled=modelled, measured=measured)

    def _is_timed_as_on_target(self, form: Form) -> bool:
        """Return whether times here may choose a form: exact kernels are slower where VNNI is missing."""
        if not self._request.target.quantization.reduce_range or form.plan is None or saturates():
            return True
        return form.plan.scheme.is_narrow or not find_support(self._request.backend).slows_exact_products

    def _measure_noises(self) -> list[float]:
        """Return the signal to noise, in dB, of each candidate on the samples that choose.

        It tells forms within a limit on transport apart, so others are not measured. Rounding has adapted to
        the calibration samples, so their noise says less.
        """
        limit = self.limits.limits.get("transport", 0.0)
        within = [draft.measured.figures.get("transport", math.inf) <= limit for draft in self.drafts]
        part = self._prepared.samples.evaluation
        is_aligned = self._scores is not None and not self._scores.unjudged and part.group == 1
        is_aligned &= self._prepared.sequences is None
        if sum(within) < 2 or not is_aligned:
            return [draft.snr_db for draft in self.drafts]
        choosing = set(split_evaluation(part.count, hold_back=not part.is_generated)[0].tolist())
        feeds = (feed for index, feed in enumerate(feeds_only(part)) if index in choosing)
        samples = list(islice(feeds, _NOISE_SAMPLES))
        fidelity = Fidelity(
            self._quantizer.model,
            samples,
            threads=self._request.threads,
            softmax_axes=self._quantizer.softmax_axes(),
            parts=self._quantizer.output_parts(samples[0]),
        )
        return [
            decibel(fidelity.noise(draft.model)) if is_within else draft.snr_db
            for draft, is_within in zip(self.drafts, within, strict=True)
        ]

    def _score(self, candidates: list[Candidate], first: int) -> Scores:
        """Return scores of the candidates from `first` on; removes those that cannot be chosen."""
        evaluation = self._prepared.samples.evaluation
        # Dynamic int8 takes its ranges from the whole batch, so samples run alone, as on the device. A
        # converted .tflite has a fixed batch.
        takes_batch_range = any(candidate.form.kind == DYNAMIC_INT8 for candidate in candidates)
        alone = takes_batch_range or find_support(self._request.backend).maker.fixes_sizes
        scores = self._score_models([candidate.model for candidate in candidates], alone=alone)
        self._set.leave_out({first + index: reason for index, reason in scores.spoiled.items()})
        scores = scores.without(scores.spoiled)
        if not evaluation.is_generated:
            return scores
        # Generated inputs say nothing of accuracy, but a form that computes nonsense on them must not be
        # chosen because it is the smallest or fastest.
        most = self._request.budget.limits.get("drop", math.inf)
        unlike = {
            index: f"{drop.points:.2f} points less {scores.metric.title} on generated inputs"
            for index, drop in enumerate(scores.choosing.drops)
            if first + index and drop.points > most
        }
        self._set.set_apart({first + index: reason for index, reason in unlike.items()})
        return scores.without(unlike)

    def _score_models(self, models: Sequence[Model], *, alone: bool) -> Scores:
        source, names, threads = self._prepared.source, self._names, self._request.threads
        part, outputs = self._prepared.samples.evaluation, source.outputs
        runs = [
            source.model.open(names, threads=threads, rewrites=False),
            *(model.open(names, threads=threads) for model in models),
        ]
        if (sequences := self._prepared.sequences) is not None:
            runs = [sequences.over_judged(run, part) for run in runs]
            outputs, alone = sequences.judged, True
        return score_candidates(
            runs[0],
            runs[1:],
            part,
            self._request.metric,
            inputs=source.inputs,
            outputs=outputs,
            alone=alone,
            task=self._prepared.task.choice,
            labels=len(self._request.class_names),
            progress=lambda done, total: self._phases.progress("judging on held-out samples", done, total),
        )

    def measure_drops(self, models: Sequence[Model]) -> list[float]:
        """Return the drop of the score of each float model in points.

        The scores are measured on the samples that are used to choose candidates.
        """
        return [drop.points for drop in self._score_models(models, alone=False).choosing.drops]


def _known(cost: float | None) -> float:
    """Return a cost; an unknown one is infinite, so that no limit on it is kept."""
    return math.inf if cost is None else cost
