"""Adds further variants of the model to the package of a run.

On the device, a tournament or a governor chooses a variant. No files are written.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from edgekit_runtime.errors import DataError
from edgekit_toolkit.packaging.assemble import combine, package_file
from edgekit_toolkit.packaging.recipe import RecipeVariant, tool_versions
from edgekit_toolkit.packaging.signing_keys import StatementSigner
from edgekit_toolkit.pipeline.acceptance import check_accepted
from edgekit_toolkit.pipeline.drafts import size_figures
from edgekit_toolkit.pipeline.request import Progress
from edgekit_toolkit.pipeline.run import FurtherVariant, JudgedCandidate, Run
from edgekit_toolkit.pipeline.untimed_forms import make_untimed
from edgekit_toolkit.selection.budget import Budget
from edgekit_toolkit.selection.choice import rank_further

_UNTIMED_NOTE: Final = (
    "the variant '{name}' was computed on an emulated processor, and its latency is not measured:"
    " `edgekit-device tournament` says on the device whether it is faster"
)


def carry_variants(runs: Sequence[Run], signer: StatementSigner, progress: Progress) -> Run:
    """Return the first run with as many further variants in its package as the request allows.

    Untimed forms are added first, and then the chosen candidates of the other runs. Then other candidates
    that meet all limits are added in the order of `rank_further`. The limit on the size applies to the whole
    package. Variants that do not fit are reported as warnings. If the first run has no chosen candidate, it
    is returned unchanged.

    `runs` contains a run for each engine, with the same request and prepared model.

    Raises:
        TargetError: The target does not support a requested untimed form.
        EngineMissingError: An untimed form cannot be computed on this machine.
    """
    run, chosen = runs[0], runs[0].chosen
    if chosen is None or (run.request.variants == 1 and not run.request.also):
        return run
    notes: list[str] = []
    for offer in itertools.chain(make_untimed(run, signer, progress), _offers(runs)):
        if isinstance(offer, str):
            notes.append(f"variant left out: {offer}")
            continue
        is_timed = offer.candidate.latency is not None
        if is_timed and count_timed(run) == run.request.variants:
            break
        wider = (*run.variants, replace(offer, name=_name(offer, run.variants)))
        try:
            whole = _combine(chosen, wider, signer, run.limits)
        except DataError as error:
            notes.append(f"variant left out: {offer}: {error}")
            continue
        if problem := _find_problem(offer, whole, run, signer):
            notes.append(f"variant left out: {offer}: {problem}")
            continue
        run = replace(run, variants=wider, whole=whole)
        notes += [] if is_timed else [_UNTIMED_NOTE.format(name=wider[-1].name)]
    warnings = [*run.warnings, *notes, *_shortfall(run), *_narrowing(run, chosen)]
    return replace(run, warnings=warnings)


def count_timed(run: Run) -> int:
    return 1 + sum(variant.candidate.latency is not None for variant in run.variants)


def _offers(runs: Sequence[Run]) -> Iterator[FurtherVariant]:
    """Yield candidates for variants, without names yet, the best first."""
    # Ids are unique in one run only, so they get the engine's name.
    offers = {
        f"{run.request.backend} {candidate.id}": FurtherVariant("", run, candidate)
        for run in runs
        for candidate in run.candidates
    }
    chosen = [f"{run.request.backend} {run.choice.chosen}" for run in runs if run.choice.chosen is not None]
    for name in chosen[1:]:
        yield offers[name]
    measured = [replace(offer.candidate.measured, id=name) for name, offer in offers.items()]
    for further in rank_further(measured, runs[0].limits):
        if further.id not in chosen:
            yield offers[further.id]


def _name(offer: FurtherVariant, chosen: Sequence[FurtherVariant]) -> str:
    """Return a name from the engine and the form, with a number if that is taken."""
    stem, *others = (
        f"{carried.candidate.recipe.backend}-{carried.candidate.recipe.form.kind}"
        for carried in (offer, *chosen)
    )
    alike = Counter(others)[stem]
    return f"{stem}-{alike + 1}" if alike else stem


def _combine(
    first: JudgedCandidate, carried: Sequence[FurtherVariant], signer: StatementSigner, limits: Budget
) -> JudgedCandidate:
    """Return `first` with variants in its package; of its costs only the size differs.

    Raises:
        DataError: the variants take or give other tensors.
    """
    recipes = {variant.name: variant.candidate.recipe for variant in carried}
    recipe = replace(
        first.recipe,
        variants=tuple(
            RecipeVariant(
                name, recipe.backend, recipe.form, recipe.model_sha256, recipe.figures, recipe.threads
            )
            for name, recipe in recipes.items()
        ),
        tools=tool_versions(first.recipe.backend, *(recipe.backend for recipe in recipes.values())),
    )
    package = combine(first.package, {variant.name: variant.candidate.package for variant in carried}, recipe)
    figures = {**first.measured.figures, **size_figures(package_file(package, signer), limits)}
    return replace(first, recipe=recipe, package=package, measured=replace(first.measured, figures=figures))


def _find_problem(
    offer: FurtherVariant, whole: JudgedCandidate, run: Run, signer: StatementSigner
) -> str | None:
    drop, most = offer.candidate.stated_drop, run.limits.limits.get("drop")
    if drop is not None and most is not None and drop.exceeds(most, strict=run.request.strict):
        points = f"up to {drop.interval.high:.2f}" if run.request.strict else f"{drop.drop.points:.2f}"
        return f"its drop on samples that chose nothing is {points} points, the limit is {most:g}"
    for name, verb in (("size", "have"), ("transport", "send")):
        size_bytes, limit = whole.measured.figures.get(name, 0.0), run.limits.limits.get(name)
        if limit is not None and size_bytes > limit:
            return f"the whole package would {verb} {size_bytes:,.0f} bytes, the limit is {limit:,.0f}"
    if violations := [
        name for name in run.limits.violations(offer.candidate.measured.figures) if name != "size"
    ]:
        return f"no figure shows that it keeps the limit on {', '.join(violations)}"
    if offer.candidate.latency is None:
        return None  # the release that devices run has made its golden outputs
    candidate = offer.candidate
    acceptance = check_accepted(
        offer.run.request.backend, candidate.model, candidate.package, run.prepared.feeds[0], signer
    )
    # What could not be checked, the choice of the default has said.
    return f"{acceptance.refuser} refuses it: {acceptance.refusal}" if acceptance.refuser else None


def _shortfall(run: Run) -> list[str]:
    requested, carried = run.request.variants, count_timed(run)
    if carried == requested:
        return []
    count = "1 variant" if carried == 1 else f"{carried} variants"
    note = (
        f"the package carries {count}, {requested} were asked for: no further candidate keeps every limit and"
        " is more accurate, faster or smaller than the others"
    )
    return [note]


def _narrowing(run: Run, chosen: JudgedCandidate) -> list[str]:
    """Return a note if the default variant alone would accept more shapes than all variants together."""
    if run.whole is None:
        return []
    own, stated = chosen.package.manifest.inputs, run.whole.package.manifest.inputs
    shapes = [f"'{spec.name}' {list(spec.shape)}" for spec in stated if spec not in own]
    if not shapes:
        return []
    note = (
        f"inputs are stated as every variant takes them: {', '.join(shapes)}; without --variants this model"
        " takes other sizes too"
    )
    return [note]
