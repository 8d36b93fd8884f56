"""`edgekit package --backend auto`: searches with every engine of the target, and chooses the fastest.

Each engine has its own search. Then the chosen candidates compete on this machine as in `edgekit-device
tournament`, as variants of a temporary package. TensorRT is not included, because it needs the device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from edgekit_runtime.errors import BudgetError, EdgekitError, ModelError
from edgekit_runtime.sessions import EngineMissingError
from edgekit_runtime.system.engines import find_engine
from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.packaging.assemble import package_file, with_threads
from edgekit_toolkit.packaging.signing_keys import StatementSigner
from edgekit_toolkit.pipeline.acceptance import check_accepted
from edgekit_toolkit.pipeline.drafts import size_figures
from edgekit_toolkit.pipeline.engine_race import Contender, describe_faster, hold_race, packaged_threads
from edgekit_toolkit.pipeline.prepare import Preparation
from edgekit_toolkit.pipeline.request import Progress, Request
from edgekit_toolkit.pipeline.run import EngineResult, Run
from edgekit_toolkit.pipeline.search import search
from edgekit_toolkit.pipeline.variants import carry_variants
from edgekit_toolkit.selection.choice import find_slowdown
from edgekit_toolkit.targets.spec import Target


def engines_of(target: Target) -> list[str]:
    """Return the engines of a target that run on hosts. The preferred engine is first.

    Optional engines that are not installed are left out.
    """
    return [
        name
        for name in target.backend.names
        if find_support(name).runs_here
        and (name not in target.backend.optional or find_engine(name).installation.is_complete)
    ]


def engines_here(target: Target) -> list[str]:
    return [name for name in engines_of(target) if find_engine(name).installation.is_complete]


def search_engines(request: Request, signer: StatementSigner, progress: Progress) -> Run:
    """Search with each engine of the request, and return the run with the fastest candidate on this machine.

    The engines share the search limit. If the request allows several variants, the package also contains
    variants for other engines. If no engine meets the budget, the run of the preferred engine is returned
    with the reason. Engines that refuse the model or are not installed are reported.

    Raises:
        ModelError: No engine supports the model.
        BudgetError: No form of the model can meet the limit on the size.
        EngineMissingError: The target has only one engine, which is not installed.
        DataError: The samples do not fit the model.
        BackendError: An engine fails on the source model, or no candidate runs.
        OutputError: There is no space for temporary files.
    """
    names = engines_of(request.target) if request.backend == "auto" else [request.backend]
    runs, refused = _search_each(names, request, signer, progress)
    if not runs:
        raise refused[names[0]]
    progress("tournament", None, None)
    choosing = {name: run for name, run in runs.items() if run.chosen is not None}
    if not choosing:
        return _finish(next(iter(runs)), runs, {name: _refusal(name, runs, refused) for name in names})
    race = hold_race(choosing, request, progress)
    results = {}
    for name in names:
        contender = race.best.get(name)
        if contender is None or contender.latency is None:
            refusal = _refusal(name, runs, refused)
            results[name] = replace(refusal, reason=race.reasons.get(name) or refusal.reason)
            continue
        runs[name] = _take(runs[name], contender, signer)
        results[name] = EngineResult(
            name,
            runs[name].chosen,
            contender.latency.median_s * 1e3,
            "",
            is_packaged=False,
            threads=contender.threads,
        )
    failed = {name for name in choosing if name not in race.best}
    runs = {name: run for name, run in runs.items() if name not in failed}
    run = _finish(race.winner, runs, results)
    if slower := describe_faster(race):
        run = replace(
            run, slower_than=slower, warnings=[*run.warnings, f"slower than {slower}, which breaks a limit"]
        )
    return carry_variants(
        [run, *(other for name, other in runs.items() if name != race.winner)], signer, progress
    )


def _finish(winner: str, runs: Mapping[str, Run], results: Mapping[str, EngineResult]) -> Run:
    """Return the winner's run, with the results of all engines if there are several."""
    rows = tuple(replace(result, is_packaged=name == winner) for name, result in results.items())
    return replace(runs[winner], tournament=rows if len(rows) > 1 else ())


def _refusal(name: str, runs: Mapping[str, Run], refused: Mapping[str, EdgekitError]) -> EngineResult:
    reason = " ".join(str(refused[name]).split()) if name in refused else runs[name].choice.reason
    return EngineResult(name, None, None, reason, is_packaged=False)


def _take(run: Run, contender: Contender, signer: StatementSigner) -> Run:
    """Return a run that chooses a contender of its, with the contender's threads."""
    candidate, before = contender.candidate, run.chosen
    if before is not None and candidate.id != before.id:
        feeds = run.prepared.feeds[0]
        acceptance = check_accepted(run.request.backend, candidate.model, candidate.package, feeds, signer)
        if acceptance.refuser:
            return run
        reason = f"{candidate.label}: within every limit; {before.label} is slower in a race here"
        choice = replace(run.choice, chosen=candidate.id, reason=reason)
        stale = find_slowdown(run.float_ratio(before), run.request.target.name)
        warnings = [warning for warning in run.warnings if warning not in stale]
        run = replace(run, choice=choice, acceptance=acceptance, warnings=warnings)
    threads = packaged_threads(contender, int(run.request.target.cpu.cores.value))
    if threads is None:
        return run
    package, recipe = with_threads(candidate.package, candidate.recipe, threads)
    sizes = size_figures(package_file(package, signer), run.limits)
    figures = {**candidate.measured.figures, **sizes}
    if run.limits.violations(figures):
        return run
    measured = replace(candidate.measured, figures=figures)
    stating = replace(candidate, package=package, recipe=recipe, measured=measured)
    candidates = (stating if other.id == candidate.id else other for other in run.candidates)
    return replace(run, candidates=tuple(candidates))


def _search_each(
    names: Sequence[str], request: Request, signer: StatementSigner, progress: Progress
) -> tuple[dict[str, Run], dict[str, EdgekitError]]:
    """Return the runs of the engines, and why some engines have none."""
    shares = max(1, sum(find_engine(name).installation.is_complete for name in names))
    runs: dict[str, Run] = {}
    prepared: Preparation | None = None
    refused: dict[str, EdgekitError] = {}
    for name in names:
        share = replace(request, backend=name, search_s=request.search_s / shares, search_shares=shares)
        engine_progress = _named(progress, name) if len(names) > 1 else progress
        try:
            runs[name] = search(share, signer, engine_progress, prepared)
            prepared = runs[name].prepared
        except (ModelError, EngineMissingError, BudgetError) as error:
            refused[name] = error
    return runs, refused


def _named(progress: Progress, name: str) -> Progress:
    return lambda phase, done, total: progress(f"{name}: {phase}", done, total)
