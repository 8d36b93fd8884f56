"""Scores candidates on evaluation samples. Only half of the samples are used to choose a candidate.

A candidate that was chosen for its high score on some samples usually has a lower score on new samples. The
drop from the score of the source model is therefore measured on the other, held-back half of the samples.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.package.row_sets import row_axes
from edgekit_runtime.preprocessing.placement import Placement
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.evaluation.detections import layout_of_task
from edgekit_toolkit.evaluation.drops import Drop, Floats, leave_out, mean_drops, set_drop
from edgekit_toolkit.evaluation.metrics import Metric, Outputs, Probes, SetMetric, find_metric
from edgekit_toolkit.models.model import Runner
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.samples.shards import Batching
from edgekit_toolkit.samples.source import draw_mask
from edgekit_toolkit.samples.split import Part
from edgekit_toolkit.samples.truth import truth_array

# Samples in a batch if the model leaves it free and its activations are not too large. Otherwise one.
_BATCH = 16
_SMALL_INPUT_BYTES = 1 << 18
CONFIRMATION_SHARE: Final = 0.5
# With fewer samples, neither half is meaningful.
LEAST_TO_HOLD_BACK: Final = 12
_SPLIT_SEED = 2  # not the seed of the split between calibration and evaluation

# Samples by which `auto` tells what the outputs are.
_PROBES: Final = 16
# The rounding error of a score of the model against itself.
_ROUNDING: Final = 1e-6

# The mean number of copies of a sample for a metric over the whole set. More take longer and round less.
_COPIES: Final = 4

Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one candidate on one set of samples.

    Attributes:
        value: The score of the candidate, 0..1.
        baseline: The score of the source model, 0..1.
        drop: The drop from the score of the source model to that of the candidate.
    """

    value: float
    baseline: float
    drop: Drop


@dataclass(frozen=True, slots=True)
class PartScores:
    """The scores of all candidates on one set of samples.

    Attributes:
        baseline: The score of the source model, 0..1.
        scores: The score of each candidate, 0..1.
    """

    samples: int
    baseline: float
    scores: tuple[float, ...]
    drops: tuple[Drop, ...]

    def of(self, index: int) -> Score:
        return Score(self.scores[index], self.baseline, self.drops[index])

    def without(self, dropped: Collection[int]) -> "PartScores":
        """Return the scores without the candidates at these positions."""
        remaining = [index for index in range(len(self.scores)) if index not in dropped]
        return replace(
            self,
            scores=tuple(self.scores[index] for index in remaining),
            drops=tuple(self.drops[index] for index in remaining),
        )

    def joined(self, added: "PartScores") -> "PartScores":
        """Return these scores, followed by the scores of more candidates on the same samples."""
        return replace(self, scores=(*self.scores, *added.scores), drops=(*self.drops, *added.drops))


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores on the evaluation samples.

    Attributes:
        choosing: The scores on the samples that are used to choose a candidate.
        confirmation: The scores on the held-back samples, or None if there are too few samples.
        spoiled: A dict from the index of a candidate to a message, for candidates whose outputs are NaN or
            infinite where those of the source model are finite. They must not be used.
        unjudged: The number of samples without a score, because no model finds anything in them.
        outcomes: The score of each sample, [models, samples], with the source model first. NaN where a model
            finds nothing. None for a `SetMetric`.
        weights: The weight of each column of `outcomes`, or None for equal weights.
    """

    metric: Metric | SetMetric
    choosing: PartScores
    confirmation: PartScores | None
    spoiled: Mapping[int, str] = field(default_factory=dict)
    unjudged: int = 0
    outcomes: Floats | None = None
    weights: Floats | None = None

    @property
    def samples(self) -> int:
        return self.choosing.samples + (0 if self.confirmation is None else self.confirmation.samples)

    @property
    def stated(self) -> PartScores:
        """The scores that a package states, which are on the held-back samples if there are any."""
        return self.confirmation or self.choosing

    def without(self, dropped: Collection[int]) -> "Scores":
        """Return the scores without some candidates.

        `dropped` are the indices of the candidates, which must include those of all spoiled candidates.
        """
        confirmation = None if self.confirmation is None else self.confirmation.without(dropped)
        rows = [index + 1 for index in dropped]
        return replace(
            self,
            choosing=self.choosing.without(dropped),
            confirmation=confirmation,
            spoiled={},
            outcomes=None if self.outcomes is None else np.delete(self.outcomes, rows, axis=0),
        )

    def joined(self, added: "Scores") -> "Scores":
        """Return these scores, followed by the scores of more candidates on the same samples."""
        if isinstance(self.metric, Metric) and self.outcomes is not None and added.outcomes is not None:
            outcomes = np.concatenate([self.outcomes, added.outcomes[1:]])
            hold_back = self.confirmation is not None
            return _scores_of_outcomes(self.metric, outcomes, {}, weights=self.weights, hold_back=hold_back)
        confirmation = None
        if self.confirmation is not None and added.confirmation is not None:
            confirmation = self.confirmation.joined(added.confirmation)
        return replace(self, choosing=self.choosing.joined(added.choosing), confirmation=confirmation)


def score_candidates(
    source: Runner,
    candidates: Sequence[Runner],
    part: Part,
    metric_name: str,
    *,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    alone: bool,
    progress: Callable[[int, int], None],
    task: TaskChoice | None = None,
    labels: int = 0,
) -> Scores:
    """Return the scores of the source model and of the candidates.

    Args:
        source: The float model of the user. Some metrics compare candidates with its outputs.
        candidates: The candidates, with the inputs and outputs of the source in the same order.
        part: The evaluation samples.
        metric_name: The name of the metric, see `metrics.find_metric`.
        inputs: The inputs of the source.
        outputs: The outputs of the source.
        alone: Whether candidates run one sample at a time. This is required if the batch is fixed, or if
            quantization ranges are computed from the whole batch.
        progress: Called with the number of completed samples and the number of samples.
        task: The task of the model, if it is known.
        labels: The number of labelled classes, or 0.

    Raises:
        DataError: The metric does not suit the model or the data.
        BackendError: A model does not run on a sample.
    """
    names = [spec.name for spec in outputs]
    runs = [_named(run, names) for run in (source, *candidates)]
    stacked = Batching.of(inputs, in_front=part.in_front).stacked
    feeds = spread_feeds(part)
    placement = Placement.of_input(feeds[0][inputs[0].name].shape)
    probes = take_probes(source, part, feeds, inputs=inputs, outputs=outputs)
    probes = replace(probes, stated_layout=layout_of_task(task, placement, labels))
    metric = find_metric(
        metric_name,
        probes,
        part.labelled,
        is_generated=part.is_generated,
        truth=part.truth,
        task=task,
        labels=labels,
    )
    alone = alone or isinstance(metric, SetMetric) or not probes.are_stackable
    is_small = sum(array.nbytes for array in feeds[0].values()) <= _SMALL_INPUT_BYTES
    judging = _ScoreCollector(
        part, _BATCH if is_small and not alone else 1, stacked=stacked, progress=progress
    )
    return judging.by_set(runs, metric) if isinstance(metric, SetMetric) else judging.by_sample(runs, metric)


def spread_feeds(part: Part, count: int = _PROBES) -> list[Feeds]:
    """Return up to `count` evenly spaced samples, because samples are often sorted by class or time.

    Raises:
        DataError: There are no samples.
    """
    step = max(1, part.count // count)
    feeds = [feeds for feeds, _ in islice(part.stream(1), 0, step * count, step)]
    if not feeds:
        raise DataError("there are no evaluation samples")
    return feeds


def take_probes(
    source: Runner,
    part: Part,
    feeds: Sequence[Feeds],
    *,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
) -> Probes:
    """Run the source model on `feeds`, so that a metric or a task can infer the meaning of its outputs."""
    run = _named(source, [spec.name for spec in outputs])
    probed = [run(sample) for sample in feeds]
    stacked = Batching.of(inputs, in_front=part.in_front).stacked
    return Probes(probed, _count(feeds[0], stacked), row_axes(feeds, probed))


def _count(feeds: Feeds, stacked: bool) -> int:
    return len(next(iter(feeds.values()))) if stacked else 1


def _named(run: Runner, names: Sequence[str]) -> Callable[[Feeds], Outputs]:
    return lambda feeds: dict(zip(names, run(feeds), strict=True))


@dataclass(slots=True)
class _ScoreCollector:
    """Collects scores in one pass over the samples, or in one pass for each model.

    Attributes:
        batch: samples at once if the model leaves that free.
        stacked: whether samples share a leading axis.
        progress: called with the number of samples done, and how many there are.
        spoiled: (place of a candidate, output) -> samples.
    """

    part: Part
    batch: int
    stacked: bool
    progress: Callable[[int, int], None]
    spoiled: Counter[tuple[int, str]] = field(default_factory=Counter)

    def by_sample(self, runs: Sequence[Callable[[Feeds], Outputs]], metric: Metric) -> Scores:
        """Return the means of scores of single samples."""
        rows: list[Floats] = []
        weights: list[Floats] = []
        part_weights = self.part.weights
        done = 0
        reference: Outputs = {}
        for feeds, labels in self.part.stream(self.batch):
            reference = runs[0](feeds)
            finite = _finite_values(reference)
            count = _count(feeds, self.stacked)
            scores = []
            for index, run in enumerate(runs):
                outputs = run(feeds) if index else reference
                self._note_spoiled(index - 1, outputs, finite, count)
                scores.append(_for_samples(metric.score(outputs, reference, labels), count))
            rows.append(np.stack(scores))
            if part_weights is not None:
                own = part_weights[done : done + count]
                weights.append(own if len(scores[0]) == count else own.mean(keepdims=True))
            done += count
            self.progress(min(done, self.part.count), self.part.count)
        table = np.concatenate(rows, axis=1)
        judged = _scores_of_outcomes(
            metric,
            table,
            reference,
            weights=np.concatenate(weights) if weights else None,
            hold_back=not self.part.is_generated,
        )
        return replace(judged, spoiled=self._reasons(table.shape[1]))

    def by_set(self, runs: Sequence[Callable[[Feeds], Outputs]], metric: SetMetric) -> Scores:
        """Return scores over whole sets. Reduced outputs of only two models are in memory at a time."""
        count = self.part.count
        labels: list[Any] = []
        finite: list[Outputs] = []  # where the source model's outputs are
        references: list[Any] = []
        parts: list[Positions] = []
        scores_of_parts: list[list[tuple[float, Floats]]] = []
        weights = self.part.weights
        copies = _draw_copies(weights) if weights is not None and metric.weighs_copies else None
        for index, run in enumerate(runs):
            outputs: list[Any] = []
            for feeds, own_labels in self.part.stream(1):
                rows = _sample_rows(run(feeds), _count(feeds, self.stacked))
                own = [None] * len(rows) if own_labels is None else own_labels.tolist()
                if index:
                    for row, reference in zip(rows, finite[len(outputs) :], strict=False):
                        self._note_spoiled(index - 1, row, reference, 1)
                else:
                    labels += own
                    finite += [_finite_values(row) for row in rows]
                outputs += [metric.reduce(row, label) for row, label in zip(rows, own, strict=True)]
                self.progress(index * count + len(outputs), count * len(runs))
            if not index:
                references = outputs
                parts = split_evaluation(len(references), hold_back=not self.part.is_generated)
                scores_of_parts = [[] for _ in parts]
            label_array = truth_array(labels) if self.part.labelled else None
            for part, entries in zip(parts, scores_of_parts, strict=True):
                entries.append(_score_set(metric, outputs, references, label_array, part, copies))
        scores = [
            _set_scores(len(part), entries) for part, entries in zip(parts, scores_of_parts, strict=True)
        ]
        return Scores(metric, scores[0], scores[1] if scores[1:] else None, self._reasons(len(references)))

    def _note_spoiled(self, candidate: int, outputs: Outputs, finite: Outputs, count: int) -> None:
        for name, rows in _spoiled_rows(outputs, finite, count).items():
            self.spoiled[candidate, name] += rows

    def _reasons(self, samples: int) -> dict[int, str]:
        """Name the output of each spoiled candidate that is wrong on the most samples."""
        worst: dict[int, tuple[str, int]] = {}
        for (candidate, name), count in self.spoiled.items():
            if candidate not in worst or count > worst[candidate][1]:
                worst[candidate] = name, count
        return {
            candidate: f"output '{name}' is NaN or infinite on {count} of {samples} evaluation samples, where"
            " the source model's is finite"
            for candidate, (name, count) in worst.items()
        }


def _scores_of_outcomes(
    metric: Metric, outcomes: Floats, reference: Outputs, *, weights: Floats | None, hold_back: bool
) -> Scores:
    judged = judged_table(metric, outcomes, reference)
    unjudged = outcomes.shape[1] - judged.shape[1]
    own = None if weights is None else weights[~np.isnan(outcomes).all(axis=0)]
    scores = scores_of_table(metric, judged, weights=own, hold_back=hold_back)
    return replace(scores, unjudged=unjudged, outcomes=outcomes, weights=weights)


def scores_of_table(
    metric: Metric, table: Floats, *, weights: Floats | None = None, hold_back: bool
) -> Scores:
    """Return the scores of a table of outcomes.

    `table` has the scores 0..1, [models, samples], with the source model first. `weights` are the weights of
    the samples, or None for equal weights. If `hold_back` is True, half of the samples are held back if there
    are enough.
    """
    parts = []
    max_gain = 0.0 if metric.against_source else 1.0
    for samples in split_evaluation(table.shape[1], hold_back=hold_back):
        part, own = table[:, samples], None if weights is None else weights[samples]
        means = [float(mean) for mean in np.average(part, axis=1, weights=own)]
        drops = mean_drops(part[0], part[1:], max_gain=max_gain, weights=own)
        parts.append(PartScores(len(samples), means[0], tuple(means[1:]), tuple(drops)))
    return Scores(metric, parts[0], parts[1] if parts[1:] else None)


def split_evaluation(count: int, *, hold_back: bool) -> list[Positions]:
    """Return the indices of the samples used to choose, and of the held-back samples if there are any.

    Samples are held back only if `hold_back` is True and there are enough samples.
    """
    if count < LEAST_TO_HOLD_BACK or not hold_back:
        return [np.arange(count)]
    held_back = draw_mask(count, CONFIRMATION_SHARE, _SPLIT_SEED)
    return [np.flatnonzero(~held_back), np.flatnonzero(held_back)]


def judged_table(metric: Metric, table: Floats, reference: Outputs) -> Floats:
    """Remove NaN from a table of outcomes, so that candidates can be judged by it.

    NaN means that neither the model nor the source model finds anything in the sample. They agree, so NaN
    is replaced by 1. The columns of samples with NaN for all models are removed.

    Args:
        metric: The metric of the scores.
        table: The scores, which are 0..1 or NaN, [models, samples], with the source model first.
        reference: The outputs of the source model for one sample, for messages.

    Raises:
        DataError: All columns were removed, or the source model scores less than 1 compared with itself.
    """
    shapes = ", ".join(f"'{name}' {list(value.shape)}" for name, value in reference.items())
    judged = ~np.isnan(table).all(axis=0)
    if not judged.any():
        raise DataError(
            f"nothing was detected in any of the {table.shape[1]} evaluation samples (outputs {shapes}), so"
            " nothing can be judged: give samples in which the model finds something (--eval),"
            " preprocessed as in its training, or another --metric"
        )
    table = np.where(np.isnan(table), 1.0, table)[:, judged]
    unlike = int(np.count_nonzero(table[0] < 1 - _ROUNDING))
    if metric.against_source and unlike:
        raise DataError(
            f"by metric {metric.name!r} the model differs from itself on {unlike} of {table.shape[1]}"
            f" evaluation samples (score {table[0].min():.3g}), so it cannot judge the outputs"
            f" {shapes}: they are NaN or infinite there, or of another kind; remove such samples, or give"
            " another --metric"
        )
    return table


def _for_samples(scores: Floats, count: int) -> Floats:
    """Return the scores of a feed: one for each sample, or their mean if their number differs.

    Such a feed then counts as one sample, since its samples are not independent.
    """
    if scores.size == count:
        return scores
    return scores.mean(keepdims=True) if scores.size else np.full(1, np.nan)


def _sample_rows(outputs: Outputs, count: int) -> list[Outputs]:
    """Return the outputs of each sample, as copies that a metric cannot change: it sees them many times.

    Raises:
        DataError: the model takes several samples at once, and an output has no row for each.
    """
    if count > 1 and any(value.shape[:1] != (count,) for value in outputs.values()):
        shapes = {name: list(value.shape) for name, value in outputs.items()}
        raise DataError(
            f"a metric over the whole set needs the outputs of each sample; the model takes {count} at once"
            f" and gives {shapes}; export it with a batch of 1"
        )
    rows: list[Outputs] = []
    for index in range(count):
        row = {name: value if count == 1 else value[index : index + 1] for name, value in outputs.items()}
        copies = {name: value.copy() for name, value in row.items()}
        for value in copies.values():
            value.flags.writeable = False
        rows.append(copies)
    return rows


def _score_set(
    metric: SetMetric,
    outputs: Sequence[Any],
    references: Sequence[Any],
    labels: NDArray[Any] | None,
    part: Positions,
    copies: Positions | None = None,
) -> tuple[float, Floats]:
    """Return the score on a part of the samples, and the scores without each of its groups.

    AUC has no score where a class is left out.

    Raises:
        DataError: more than half of the scores without a group are missing.
    """

    def score(positions: Positions) -> float:
        rows = part[positions]
        if copies is not None:
            rows = np.repeat(rows, copies[rows])
        return metric.score(
            [outputs[row] for row in rows],
            [references[row] for row in rows],
            None if labels is None else labels[rows],
        )

    whole = score(np.arange(len(part)))
    return whole, leave_out(score, len(part)) if len(part) > 1 else np.array([whole])


def _draw_copies(weights: Floats) -> Positions:
    """Return how often a metric over the whole set sees each sample, so that it counts by its weight.

    Systematic rounding: each number is the weight's share, rounded up or down, and right in the mean.
    """
    bounds = np.cumsum(weights / weights.sum()) * _COPIES * len(weights)
    start = np.random.default_rng(_SPLIT_SEED).random()
    return np.diff(np.floor(bounds + start), prepend=np.floor(start)).astype(np.int64)


def _set_scores(count: int, entries: Sequence[tuple[float, Floats]]) -> PartScores:
    (baseline, source), *others = entries
    drops = tuple(set_drop(baseline, score, (source, without), count) for score, without in others)
    return PartScores(count, baseline, tuple(score for score, _ in others), drops)


def _finite_values(outputs: Outputs) -> Outputs:
    """Return where float outputs are finite, bool of their shapes; without memory where all values are."""
    finite = {name: np.isfinite(value) for name, value in outputs.items() if value.dtype.kind == "f"}
    return {
        name: np.broadcast_to(np.True_, mask.shape) if mask.all() else mask for name, mask in finite.items()
    }


def _spoiled_rows(outputs: Outputs, finite: Outputs, count: int) -> dict[str, int]:
    """Samples of `count` on which an output is NaN or infinite and the reference is finite, by output."""
    rows = {}
    for name, reference in finite.items():
        output = outputs[name]
        if np.isfinite(output).all():
            continue
        # The values of an output of another shape (a list of detections) have no counterparts.
        allowed = ~reference if output.shape == reference.shape else not reference.all()
        strange = ~np.isfinite(output) & ~np.asarray(allowed)
        if strange.any():
            alike = output.ndim > 0 and len(output) == count
            rows[name] = int(strange.reshape(count, -1).any(axis=1).sum()) if alike else count
    return rows
