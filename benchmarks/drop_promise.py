"""Whether a drop that is called kept holds on samples that chose nothing: 200 resampled judging sets a model.

Each model is searched once. Then the real rule (`scoring`, `confirmation`) decides on judging sets drawn from
the evaluation samples, and what it chose is held against the samples that were not drawn. Sets larger than
the evaluation samples are drawn with replacement and held against all of them.

Usage, with scripts/python benchmarks/drop_promise.py
"""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.evaluation.metrics import METRICS, Metric
from edgekit_toolkit.evaluation.scoring import scores_of_table
from edgekit_toolkit.packaging.signing_keys import load_signer
from edgekit_toolkit.pipeline.request import Request
from edgekit_toolkit.pipeline.run import Run
from edgekit_toolkit.pipeline.search import search
from edgekit_toolkit.samples.source import open_data
from edgekit_toolkit.selection.budget import parse_budget
from edgekit_toolkit.selection.choice import CandidateFigures, choose
from edgekit_toolkit.selection.confirmation import AcceptedChoice, ConfirmedChoice, choose_confirmed
from edgekit_toolkit.targets.loader import load_target
from results import make_parser, print_head
from works import Subject, list_subjects

COUNTS = (20, 100, 500, 2000)
RESAMPLINGS = 200
LIMIT = 1.0
# With fewer left out, a drop there is chance.
LEAST_LEFT_OUT = 50

Table = NDArray[np.float64]  # scores [models, samples], the source model first


@dataclass(frozen=True)
class Case:
    """A model with its outcomes."""

    name: str
    metric: Metric
    table: Table
    measured: tuple[CandidateFigures, ...]


@dataclass
class Counts:
    """How the decisions on the judging sets came out, and how many were wrong on other samples."""

    kept: int = 0
    kept_wrong: int = 0
    unresolved: int = 0
    unresolved_wrong: int = 0
    refused: int = 0
    plain: int = 0
    plain_wrong: int = 0


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="*", help="names of models")
    only = parser.parse_args().only
    print_head(
        "model (metric, samples, candidates) | judging samples | kept | of them wrong | not resolved"
        " | of them over 1 point | refused | estimate alone: ok | of them wrong"
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EDGEKIT_HOME"] = folder
        for subject in list_subjects(only):
            if subject.name == "mnist8" or (subject.work and subject.work.metric not in METRICS):
                continue
            case = _case(subject)
            for count in COUNTS:
                _print_row(case, count)


def _case(subject: Subject) -> Case:
    request = Request(
        model=subject.model, target=load_target("x86-64"), budget=parse_budget(""), name=subject.name,
        version="1", calibration=subject.calibration, evaluation=subject.evaluation, search_s=10.0, threads=2,
    )  # fmt: skip
    run = search(request, load_signer(), lambda *_: None)
    metric = run.scores.metric
    assert isinstance(metric, Metric)
    return Case(
        subject.name, metric, _outcomes(run, metric), tuple(draft.measured for draft in run.candidates)
    )


def _outcomes(run: Run, metric: Metric) -> Table:
    """Score every model on every evaluation sample, one at a time."""
    source = run.prepared.source
    names = [spec.name for spec in source.outputs]
    models = [one.open(names, threads=2) for one in (source.model, *(c.model for c in run.candidates))]
    assert run.request.evaluation is not None
    columns = []
    for feeds, labels in open_data(run.request.evaluation, source.inputs).stream(1):
        outputs = [dict(zip(names, model(feeds), strict=True)) for model in models]
        columns.append([float(metric.score(one, outputs[0], labels).mean()) for one in outputs])
    return np.array(columns).T


def _print_row(case: Case, count: int) -> None:
    pool = case.table.shape[1]
    is_larger = count > pool
    if not is_larger and pool - count < LEAST_LEFT_OUT:
        return
    draw = np.random.default_rng(count)
    found = Counts()
    for _ in range(RESAMPLINGS):
        order = draw.integers(0, pool, count) if is_larger else draw.permutation(pool)
        judging, rest = order[:count], order if is_larger else order[count:]
        truth = case.table if is_larger else case.table[:, rest]
        _count(case, case.table[:, judging], truth, found)
    label = f"{case.name} ({case.metric.name}, {pool}, {len(case.measured)})"
    drawn = f"{count} (drawn with replacement)" if is_larger else str(count)
    print(
        f"| {label} | {drawn} | {found.kept} | {found.kept_wrong} | {found.unresolved} |"
        f" {found.unresolved_wrong} | {found.refused} | {found.plain} | {found.plain_wrong} |",
        flush=True,
    )


def _count(case: Case, judging: Table, truth: Table, found: Counts) -> None:
    limits = parse_budget("")
    drops = 100 * (truth[0].mean() - truth[1:].mean(axis=1))
    scores = scores_of_table(case.metric, judging, hold_back=True)
    measured = _with_drops(case.measured, [drop.points for drop in scores.choosing.drops])
    confirmed = choose_confirmed(
        measured, scores, limits, lambda left: AcceptedChoice(choose(left, limits), None, []),
        has_data=True, strict=False,
    )  # fmt: skip
    place = _chosen(confirmed)
    if place is None or confirmed.held is None:
        found.refused += 1
    elif confirmed.held[place].state(LIMIT) == "ok":
        found.kept += 1
        found.kept_wrong += drops[place] > LIMIT
    else:
        found.unresolved += 1
        found.unresolved_wrong += drops[place] > LIMIT
    # As it was before: chosen and called ok by the estimate on all samples.
    estimates = 100 * (judging[0].mean() - judging[1:].mean(axis=1))
    chosen = choose(_with_drops(case.measured, estimates.tolist()), limits).chosen
    if chosen is not None:
        found.plain += 1
        found.plain_wrong += drops[[one.id for one in case.measured].index(chosen)] > LIMIT


def _with_drops(measured: Sequence[CandidateFigures], drops: Sequence[float]) -> list[CandidateFigures]:
    return [
        replace(one, figures={**one.figures, "drop": drop}) for one, drop in zip(measured, drops, strict=True)
    ]


def _chosen(confirmed: ConfirmedChoice) -> int | None:
    ids = [one.id for one in confirmed.measured]
    chosen = confirmed.accepted.choice.chosen
    return None if chosen is None else ids.index(chosen)


if __name__ == "__main__":
    main()
