"""How often the judge calls a limit kept that is not: simulated scores, through the real rule.

A candidate loses just over the limit; the float model is the fallback. Its true drop is known, so it is an
error to choose it and to call the limit kept, or to package it with `--strict`. The bias is the mean of the
stated drop where it is chosen, less the mean over all draws, which is the true one but for chance. Only a
rejection by the held-back samples can cause it, since the samples that choose are others. So the same
difference from the mean where it was chosen or rejected shows it with less noise: that is the bias by
rejection. A third of the samples are copies in the rows with copies.

Usage, with scripts/python benchmarks/judge_errors.py
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.evaluation.drops import Drop, leave_out, set_drop
from edgekit_toolkit.evaluation.metrics import METRICS
from edgekit_toolkit.evaluation.scoring import PartScores, Scores, scores_of_table, split_evaluation
from edgekit_toolkit.samples.split import choose_samples, feeds_only
from edgekit_toolkit.selection.budget import Budget
from edgekit_toolkit.selection.choice import CandidateFigures, choose
from edgekit_toolkit.selection.confirmation import AcceptedChoice, HeldDrop, choose_confirmed
from results import make_parser, print_head

COUNTS = (20, 40, 80, 100, 200, 250, 500, 1000)
POWER_COUNTS = (500, 1000, 2000, 4000)
DRAWS = 500
LARGE = 2_000_000  # samples that give the true drop
LARGE_SET = 500_000  # the same for a metric over the whole set

Array = NDArray[np.float64]
# (random numbers, samples) -> changes of the score of each sample
Changes = Callable[[np.random.Generator, int], Array]
# Scores of the source and a candidate on all samples of a part or on some of them
SetScore = Callable[[NDArray[np.int64]], float]
# (random numbers, samples) -> score of the source and of the candidate
SetScores = Callable[[np.random.Generator, int], tuple[SetScore, SetScore]]


def losses(rare: float, noise: Changes, *, gains: float = 0.0) -> Changes:
    """Return changes of which shares are a total loss or gain, and the others noise."""

    def draw_changes(draw: np.random.Generator, count: int) -> Array:
        kind = draw.random(count)
        return np.where(kind < rare, 1.0, np.where(kind > 1 - gains, -1.0, noise(draw, count)))

    return draw_changes


def gamma(mean: float, shape: float) -> Changes:
    """Return losses that all samples have: the smaller `shape`, the heavier their tail."""
    return lambda draw, count: np.clip(draw.gamma(shape, mean / shape, count), 0, 1)


def lognormal(mean: float, sigma: float) -> Changes:
    return lambda draw, count: np.clip(mean * draw.lognormal(-(sigma**2) / 2, sigma, count), 0, 1)


def in_pixels(changes: Changes, pixels: int = 4096) -> Changes:
    return lambda draw, count: draw.binomial(pixels, np.clip(changes(draw, count), 0, 1)) / pixels


def none(_draw: np.random.Generator, count: int) -> Array:
    return np.zeros(count)


def shaped(noise: float) -> dict[str, Changes]:
    """Return the shapes of a loss of about a point, beside noise on all samples."""
    return {
        "rare total losses": losses(0.0109, gamma(noise, 1)),
        "all a little": gamma(0.01, 4),
        "mixed": losses(0.005, gamma(0.006, 1)),
        "heavy tail": lognormal(0.011, 2.0),
    }


MEANS: dict[str, dict[str, Changes]] = {
    "top1": {
        "rare total losses": losses(0.0115, none),
        "losses and gains": losses(0.03, none, gains=0.019),
        "many losses and gains": losses(0.1, none, gains=0.088),
    },
    "similarity": shaped(1e-3),
    "mask_overlap": shaped(3e-3),
    "pixel_agreement": {shape: in_pixels(changes) for shape, changes in shaped(1e-3).items()},
}
SET_SHAPES = {
    "rare total losses": losses(0.0115, none),
    "all a little": gamma(0.012, 1),
    "mixed": losses(0.005, gamma(0.006, 1)),
    "heavy tail": lognormal(0.013, 2.0),
}


def character_errors(changes: Changes) -> SetScores:
    """Return 1 less the wrong characters over all characters, of lines of 1 to some 100 characters."""

    def draw_scores(draw: np.random.Generator, count: int) -> tuple[SetScore, SetScore]:
        lengths = np.ceil(draw.lognormal(3, 0.6, count))
        source = draw.binomial(lengths.astype(np.int64), 0.02)

        def score(errors: Array) -> SetScore:
            return lambda positions: float(1 - errors[positions].sum() / lengths[positions].sum())

        lost = draw.binomial((lengths - source).astype(np.int64), np.clip(changes(draw, count), 0, 1))
        return score(source), score(source + lost)

    return draw_scores


def mean_precision(changes: Changes) -> SetScores:
    """Return the average precision of boxes: a sample has 1 to 8 objects, a loss takes their boxes away."""

    def draw_scores(draw: np.random.Generator, count: int) -> tuple[SetScore, SetScore]:
        objects = 1 + draw.binomial(7, 0.3, count)
        image = np.repeat(np.arange(count), 2 * objects)  # half of the boxes are no objects
        is_object = np.arange(len(image)) % 2 == 0
        confidence = np.where(is_object, draw.beta(5, 2, len(image)), draw.beta(2, 5, len(image)))
        order = np.argsort(-confidence)
        image, is_object = image[order], is_object[order]

        def score(found: NDArray[np.bool_]) -> SetScore:
            images, hits = image[found], is_object[found]

            def call(positions: NDArray[np.int64]) -> float:
                drawn = np.zeros(count, np.bool_)
                drawn[positions] = True
                ranked = hits[drawn[images]]
                precision = ranked.cumsum() / np.arange(1, len(ranked) + 1)
                return float(precision[ranked].sum() / objects[positions].sum())

            return call

        everything = np.ones(len(image), np.bool_)
        shares = np.clip(changes(draw, count), 0, 1)[image]
        return score(everything), score(draw.random(len(image)) >= shares)

    return draw_scores


SETS = {"mAP": mean_precision, "character errors": character_errors}


@dataclass(slots=True)
class Tally:
    """What came out for one cell: false `ok`, false `--strict`, and drops on held-back samples.

    Attributes:
        stated: where the candidate is chosen.
        rejected: where the held-back samples reject it.
        drops: of all draws.
    """

    ok: int = 0
    strict: int = 0
    stated: list[float] = field(default_factory=list)
    rejected: list[float] = field(default_factory=list)
    drops: list[float] = field(default_factory=list)

    @property
    def biases(self) -> list[tuple[float, float]]:
        """Bias and bias by rejection in points, both with their standard errors."""
        count = len(self.stated)
        if not count:
            return [(0.0, 0.0), (0.0, 0.0)]
        stated, checked = float(np.mean(self.stated)), float(np.mean(self.stated + self.rejected))
        error = float(np.std(self.drops)) * (1 / count - 1 / len(self.drops)) ** 0.5
        rejection_error = float(np.linalg.norm(np.array(self.rejected) - checked)) / count
        return [(stated - float(np.mean(self.drops)), error), (stated - checked, rejection_error)]


def set_scores(draw_scores: SetScores, draw: np.random.Generator, count: int) -> Scores:
    """Return the scores of one draw for a metric over the whole set, the float model first."""
    source, candidate = draw_scores(draw, count)
    halves = []
    for part in split_evaluation(count, hold_back=True):

        def of_part(score: SetScore, part: NDArray[np.int64] = part) -> tuple[float, Array]:
            return score(part), leave_out(lambda positions: score(part[positions]), len(part))

        whole, without = of_part(source)
        results = [(whole, without), of_part(candidate)]
        drops: list[Drop] = [
            set_drop(whole, value, (without, others), len(part)) for value, others in results
        ]
        halves.append(PartScores(len(part), whole, tuple(value for value, _ in results), tuple(drops)))
    return Scores(METRICS["top1"], halves[0], halves[1] if halves[1:] else None)


def mean_scores(metric: str, draw: np.random.Generator, count: int, changes: Changes) -> Scores:
    """Return the scores of one draw for a mean, the float model first; a gain scores 2 instead of 1 to 0."""
    table = np.ones((3, count))
    table[2] -= changes(draw, count)
    return scores_of_table(METRICS[metric], table, hold_back=True)


def judge(scores: Scores, limit: float, tally: Tally) -> None:
    limits = Budget({"drop": limit})
    rest = {"size": 1.0, "memory": 1.0, "energy": 1.0}
    measured = [
        CandidateFigures(str(place), str(place), {**rest, "latency": 100 / 2**place, "drop": drop.points})
        for place, drop in enumerate(scores.choosing.drops)
    ]

    def confirm(*, strict: bool) -> tuple[bool, HeldDrop]:
        """Return whether the candidate is chosen, and its drop."""
        confirmed = choose_confirmed(
            measured,
            scores,
            limits,
            lambda left: AcceptedChoice(choose(left, limits), None, []),
            has_data=True,
            strict=strict,
        )
        assert confirmed.held is not None
        return confirmed.accepted.choice.chosen == "1", confirmed.held[1]

    tally.drops.append(scores.stated.drops[1].points)
    is_chosen, stated_drop = confirm(strict=False)
    if is_chosen:
        tally.ok += stated_drop.state(limit) == "ok"
        tally.stated.append(stated_drop.drop.points)
    elif stated_drop.held_back:
        tally.rejected.append(stated_drop.drop.points)
    tally.strict += confirm(strict=True)[0]


def true_drop(metric: str, changes: Changes) -> float:
    """Return the drop in points on a large number of samples."""
    draw = np.random.default_rng(1)
    if metric in MEANS:
        return 100 * float(changes(draw, LARGE).mean())
    source, candidate = SETS[metric](changes)(draw, LARGE_SET)
    everything = np.arange(LARGE_SET)
    return 100 * (source(everything) - candidate(everything))


def distinct_samples(count: int) -> int:
    """Return how many of `count` samples judge if a third of them are copies."""
    x = np.arange(count, dtype=np.float32)[:, np.newaxis]
    x[count - count // 3 :] = x[np.random.default_rng(2).integers(0, count - count // 3, count // 3)]
    inputs = (TensorSpec("x", "float32", ("N", 1)),)
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "calibration.npz", Path(folder) / "evaluation.npz"
        np.savez(files[0], x=np.full((1, 1), -1, np.float32))
        np.savez(files[1], x=x)
        return len(list(feeds_only(choose_samples(inputs, *files, {}).evaluation)))


def run_cell(metric: str, changes: Changes, count: int, limit: float, draws: int) -> Tally:
    """Return what the rule makes of as many draws of `count` samples."""
    draw, tally = np.random.default_rng([count, draws]), Tally()
    sets = None if metric in MEANS else SETS[metric](changes)
    for _ in range(draws):
        scores = set_scores(sets, draw, count) if sets else mean_scores(metric, draw, count, changes)
        judge(scores, limit, tally)
    return tally


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="*", help="metrics", choices=(*MEANS, *SETS))
    parser.add_argument("--counts", nargs="*", type=int, default=COUNTS)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--power", action="store_true", help="how often a limit that is kept is called ok")
    options = parser.parse_args()
    if options.power:
        print_power(options.draws)
        return
    print_head(
        "metric | loss | true drop | samples | copies | false ok | false --strict | bias | by rejection"
    )
    worst: dict[str, float] = dict.fromkeys(("ok", "strict", "bias"), 0.0)
    for metric in options.only or (*MEANS, *SETS):
        for shape, changes in (MEANS.get(metric) or SET_SHAPES).items():
            true = true_drop(metric, changes)
            for count in options.counts:
                for copies in (False, True):
                    judging = distinct_samples(count) if copies else count
                    tally = run_cell(metric, changes, judging, true * 0.999, options.draws)
                    shares = 100 * tally.ok / options.draws, 100 * tally.strict / options.draws
                    cell = f"{metric} | {shape} | {true:.2f} | {count} | {count - judging}"
                    figures = f"{shares[0]:.1f} % | {shares[1]:.1f} %"
                    stated = " | ".join(f"{bias:+.3f} ± {error:.3f}" for bias, error in tally.biases)
                    print(f"| {cell} | {figures} | {stated} |", flush=True)
                    for name, value in zip(worst, (*shares, abs(tally.biases[1][0])), strict=True):
                        worst[name] = max(worst[name], value)
    print(
        "\nWorst: false ok {ok:.1f} %, --strict {strict:.1f} %, bias by rejection {bias:.3f}".format(**worst)
    )


def print_power(draws: int) -> None:
    """Print how often the limit of 1 point is called kept for equal models and for half of the limit."""
    kept: Sequence[tuple[str, str, Changes]] = (
        ("top1", "equal: no answer changes", none),
        ("top1", "equal: 0.2 % lost, 0.2 % gained", losses(0.002, none, gains=0.002)),
        ("top1", "0.5 points lost", losses(0.005, none)),
        ("similarity", "all lose 0.1 points", gamma(0.001, 4)),
        ("similarity", "all lose 0.5 points", gamma(0.005, 4)),
        ("mask_overlap", "0.25 points in total losses, 0.25 in noise", losses(0.0025, gamma(0.0025, 1))),
    )
    print("| metric | loss | samples | ok |\n|---|---|---|---|")
    for metric, name, changes in kept:
        for count in POWER_COUNTS:
            tally = run_cell(metric, changes, count, 1.0, draws)
            print(f"| {metric} | {name} | {count} | {100 * tally.ok / draws:.0f} % |", flush=True)


if __name__ == "__main__":
    main()
