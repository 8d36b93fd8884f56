"""`--backend auto`: packages for every engine of the target, and keeps the fastest that runs here.

Each engine gets a search of its own. Then the chosen candidates compete as in `edgekit-device tournament` on
a device, as variants of a package made for that. TensorRT takes no part: it needs the device.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from edgekit_runtime.autotune.tournament import Entrant, hold_tournament
from edgekit_runtime.errors import BackendError, BudgetError, EdgekitError, ModelError, OutputError
from edgekit_runtime.package.archive import read_package, write_package
from edgekit_runtime.sessions import EngineMissingError
from edgekit_runtime.system.engines import find_engine
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.measurement.brevity import shorten_s
from edgekit_toolkit.packaging.assemble import combine
from edgekit_toolkit.packaging.signing_keys import StatementSigner, load_signer
from edgekit_toolkit.pipeline.prepare import Preparation
from edgekit_toolkit.pipeline.request import Progress, Request
from edgekit_toolkit.pipeline.run import EngineResult, JudgedCandidate, Run
from edgekit_toolkit.pipeline.search import search
from edgekit_toolkit.pipeline.variants import carry_variants
from edgekit_toolkit.targets.spec import Target

_SECONDS: Final = 20.0  # approximate time of the tournament; models of less than a millisecond take 2 to 6


def engines_of(target: Target) -> list[str]:
    """Return the engines of a target that a host can run, the preferred first; optional ones if installed."""
    return [
        name
        for name in target.backend.names
        if find_support(name).runs_here
        and (name not in target.backend.optional or find_engine(name).installation.is_complete)
    ]


def engines_here(target: Target) -> list[str]:
    return [name for name in engines_of(target) if find_engine(name).installation.is_complete]


def search_engines(request: Request, signer: StatementSigner, progress: Progress) -> Run:
    """Return the run of the engine whose choice is the fastest here, with the results of all engines.

    If the request asks for several variants, the package also carries those of the other engines. An engine
    that refuses the model, or is not installed, is reported with the reason. The engines share the time for
    mixing precisions. If no engine keeps the budget, the run of the preferred one is returned: it says why.

    Raises:
        ModelError: no engine takes the model.
        BudgetError: no form of the model can keep the limit on size.
        EngineMissingError: the target has one engine, which is not installed here.
        DataError: the samples do not fit.
        BackendError: an engine fails on the source model, or none runs what was packaged for it.
        OutputError: there is no room for temporary files.
    """
    names = engines_of(request.target)
    runs, refused = _search_each(request, signer, progress)
    if not runs:
        raise refused[names[0]]
    progress("tournament", None, None)
    chosen = {name: run.chosen for name, run in runs.items() if run.chosen is not None}
    entrants, winner = _race(chosen, request.threads, progress) if chosen else ({}, next(iter(runs)))
    results = [
        _result(name, runs.get(name), entrants.get(name), refused.get(name), is_kept=name == winner)
        for name in names
    ]
    winning_run = replace(runs[winner], tournament=tuple(results))
    failed = {name for name, entrant in entrants.items() if entrant.latency is None}
    others = [run for name, run in runs.items() if name != winner and name not in failed]
    return carry_variants([winning_run, *others], signer)


def _search_each(
    request: Request, signer: StatementSigner, progress: Progress
) -> tuple[dict[str, Run], dict[str, EdgekitError]]:
    """Return the runs of the target's engines, and why some engines have none."""
    shares = max(1, len(engines_here(request.target)))
    runs: dict[str, Run] = {}
    prepared: Preparation | None = None
    refused: dict[str, EdgekitError] = {}
    for name in engines_of(request.target):
        share = replace(request, backend=name, search_s=request.search_s / shares, search_shares=shares)
        try:
            runs[name] = search(share, signer, _named(progress, name), prepared)
            prepared = runs[name].prepared
        except (ModelError, EngineMissingError, BudgetError) as error:
            refused[name] = error
    return runs, refused


def _named(progress: Progress, name: str) -> Progress:
    return lambda phase, done, total: progress(f"{name}: {phase}", done, total)


def _race(
    chosen: Mapping[str, JudgedCandidate], threads: int, progress: Progress
) -> tuple[dict[str, Entrant], str]:
    """Return the result of each engine's choice, and the engine to keep.

    `chosen`: engine -> its choice, the preferred engine first, at least one.
    `threads`: threads of one inference.

    Raises:
        BackendError: none of them runs in a process of its own, or not beside the others.
        OutputError: the package cannot be written to the folder for temporary files.
    """
    (_, first), *others = chosen.items()
    whole = combine(first.package, {name: candidate.package for name, candidate in others}, first.recipe)
    try:
        with tempfile.TemporaryDirectory(prefix="edgekit-tournament-") as name:
            path, keys = Path(name, whole.manifest.file_name), Path(name, "keys")
            # A key of its own: the user's key may be in an HSM, which signs only what leaves this machine.
            write_package(path, whole.manifest, whole.artifacts, load_signer(folder=keys))
            with read_package(path, TrustStore.from_folder(keys)) as package:
                result = hold_tournament(
                    package,
                    keys,
                    threads=threads,
                    seconds=shorten_s(_SECONDS),
                    report=lambda line: progress(f"tournament: {line}", None, None),
                )
    except OSError as error:
        raise OutputError(
            f"measuring engines needs temporary files: {error}; free space or set TMPDIR"
        ) from error
    entrants = dict(zip(chosen, result.entrants, strict=True))
    if result.winner is None:
        reasons = "; ".join(f"{engine}: {entrant.reason}" for engine, entrant in entrants.items())
        raise BackendError(
            f"no engine runs here what was packaged for it: {reasons}; choose one by --backend"
        )
    return entrants, next(engine for engine, entrant in entrants.items() if entrant is result.winner)


def _result(
    name: str, run: Run | None, entrant: Entrant | None, error: EdgekitError | None, *, is_kept: bool
) -> EngineResult:
    if run is None or run.chosen is None or entrant is None or entrant.latency is None:
        reason = " ".join(str(error).split()) if run is None else run.choice.reason
        if entrant is not None and entrant.reason is not None:
            reason = entrant.reason
        return EngineResult(name, None, None, reason, kept=is_kept)
    return EngineResult(name, run.chosen, entrant.latency.median_s * 1e3, "", kept=is_kept)
