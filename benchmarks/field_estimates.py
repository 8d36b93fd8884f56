"""Accuracy from field samples, with and without their probabilities of selection, over simulated fleets.

    python benchmarks/field_estimates.py [--simulations 200]

Each simulation draws devices that see different numbers of requests of different difficulty, over 14 days.
A request is uncertain or not; the model is right less often on uncertain ones. Triggers draw with
probabilities that each device fixes before a day from its budget and from the rates of the day before. What
was drawn is labelled, and the accuracy over all requests is estimated: naively, as the mean over the samples,
and weighted, by the inverse probabilities, with the interval of the packager. Then a candidate that errs on
some further requests is judged: its drop against the source, weighted and naively.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.evaluation.drops import Drop, estimate_mean, mean_drops
from results import make_parser, print_head, print_row

_DAYS = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What devices are asked for.

    Attributes:
        uncertain_per_day, random_per_day: budgets of the triggers on each device.
    """

    name: str
    devices: int
    uncertain_per_day: float
    random_per_day: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one simulation showed; all but `samples` in points.

    Attributes:
        error, naive_error: estimate less truth, of the accuracy.
        drop_error, naive_drop_error: the same of the candidate's drop.
        is_covered, is_drop_covered: whether the interval holds the truth.
    """

    samples: int
    error: float
    naive_error: float
    drop_error: float
    naive_drop_error: float
    width: float
    is_covered: bool
    is_drop_covered: bool


SCENARIOS = (
    Scenario(name="uncertain 15, random 5 a day", devices=20, uncertain_per_day=15, random_per_day=5),
    Scenario(name="uncertain 18, random 2 a day", devices=20, uncertain_per_day=18, random_per_day=2),
    Scenario(name="random 5 a day alone", devices=20, uncertain_per_day=0, random_per_day=5),
    Scenario(name="few: 4 devices, 3 and 1 a day", devices=4, uncertain_per_day=3, random_per_day=1),
)


def simulate(scenario: Scenario, stream: np.random.Generator) -> Outcome:
    """Return what one fleet shows."""
    columns = [_simulate_device(scenario, stream) for _ in range(scenario.devices)]
    correct, candidate, probabilities = (np.concatenate(column) for column in zip(*columns, strict=True))
    drawn = stream.random(len(correct)) < probabilities
    scores, others, weights = correct[drawn], candidate[drawn], 1 / probabilities[drawn]
    mean, interval = estimate_mean(scores, weights)
    (drop,) = mean_drops(scores, others[np.newaxis], weights=weights)
    truth, drop_truth = float(correct.mean()), 100 * float((correct - candidate).mean())
    return Outcome(
        samples=len(scores),
        error=100 * (mean - truth),
        naive_error=100 * (float(scores.mean()) - truth),
        drop_error=drop.points - drop_truth,
        naive_drop_error=100 * float((scores - others).mean()) - drop_truth,
        width=100 * (interval.high - interval.low),
        is_covered=interval.low <= truth <= interval.high,
        is_drop_covered=_holds(drop, drop_truth),
    )


def _holds(drop: Drop, truth: float) -> bool:
    interval = drop.interval()
    return interval.low <= truth <= interval.high


def _simulate_device(
    scenario: Scenario, stream: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return whether source and candidate are right on each request, and the probability of its selection."""
    a_day = int(stream.lognormal(6, 0.7))
    uncertain_share = stream.beta(2, 12)
    right_if_certain, right_if_uncertain = stream.beta(95, 5), stream.beta(11, 9)
    seen, uncertain_seen = float(a_day), float(a_day) * 0.2  # a guess before the first day
    parts = []
    for _ in range(_DAYS):
        count = max(1, stream.poisson(a_day))
        is_uncertain = stream.random(count) < uncertain_share
        correct = stream.random(count) < np.where(is_uncertain, right_if_uncertain, right_if_certain)
        loses = stream.random(count) < np.where(is_uncertain, 0.15, 0.01)
        at_random = min(1.0, scenario.random_per_day / max(seen, 1.0))
        if_uncertain = min(1.0, scenario.uncertain_per_day / max(uncertain_seen, 1.0))
        probability = 1 - (1 - at_random) * (1 - np.where(is_uncertain, if_uncertain, 0.0))
        parts.append((correct.astype(float), (correct & ~loses).astype(float), probability))
        seen, uncertain_seen = float(count), float(is_uncertain.sum())
    correct, candidate, probabilities = (np.concatenate(column) for column in zip(*parts, strict=True))
    return correct, candidate, probabilities


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--simulations", type=int, default=200)
    simulations = parser.parse_args().simulations
    print("accuracy, and drop of a candidate, in points; coverage of the intervals of 95 %")
    print_head("devices send | samples | error | covered | width | naive | error of a drop | covered | naive")
    for scenario in SCENARIOS:
        outcomes = [simulate(scenario, np.random.default_rng(seed)) for seed in range(simulations)]
        print_row(*_describe(scenario, outcomes))


def _describe(scenario: Scenario, outcomes: list[Outcome]) -> list[str]:
    def mean(name: str) -> float:
        return float(np.mean([getattr(outcome, name) for outcome in outcomes]))

    def error(name: str) -> str:
        values = [getattr(outcome, name) for outcome in outcomes]
        return f"{np.mean(values):+.2f} ± {1.96 * np.std(values, ddof=1) / np.sqrt(len(values)):.2f}"

    return [
        scenario.name,
        f"{mean('samples'):.0f}",
        error("error"),
        f"{mean('is_covered'):.1%}",
        f"{mean('width'):.1f}",
        f"{mean('naive_error'):+.1f}",
        error("drop_error"),
        f"{mean('is_drop_covered'):.1%}",
        f"{mean('naive_drop_error'):+.1f}",
    ]


if __name__ == "__main__":
    main()
