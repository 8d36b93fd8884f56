"""Describes evaluation samples from the field: their number, their weights and what they show."""

from collections.abc import Iterator

import numpy as np

from edgekit_toolkit.evaluation.drops import estimate_mean
from edgekit_toolkit.evaluation.metrics import Metric, SetMetric
from edgekit_toolkit.evaluation.scoring import Scores
from edgekit_toolkit.samples.selection import count_effective
from edgekit_toolkit.samples.split import Part


def describe_field(part: Part, scores: Scores) -> Iterator[str]:
    """Yield sentences about the samples from the field and their weights, or none without such samples."""
    weights = part.weights
    if weights is None or not part.field_count:
        return
    origin = f"{part.field_count} of {part.count} evaluation samples come from the field"
    if isinstance(scores.metric, SetMetric) and not scores.metric.weighs_copies:
        yield f"{origin}; {scores.metric.title} has no weights, so that all count alike"
        return
    yield (
        f"{origin}; each counts for as many requests as the probability of its selection says, together as"
        f" {count_effective(weights):.0f} samples of equal weight"
    )
    if isinstance(scores.metric, Metric) and not scores.metric.against_source and scores.outcomes is not None:
        is_judged = ~np.isnan(scores.outcomes[0])
        own = None if scores.weights is None else scores.weights[is_judged]
        mean, interval = estimate_mean(scores.outcomes[0][is_judged], own)
        yield (
            f"over all requests, {scores.metric.title} of the source model is {100 * mean:.1f} %, between"
            f" {100 * interval.low:.1f} and {100 * interval.high:.1f} % with {interval.confidence:.0%}"
            " confidence"
        )
