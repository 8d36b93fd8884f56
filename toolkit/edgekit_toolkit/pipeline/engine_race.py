"""A race between the chosen candidates of all engines, with different numbers of threads.

Measurements decide which engine and which number of threads the package uses. They also decide which of
several forms with similar predicted latencies is the fastest. If this machine has the kernels of the target,
a form that is slower than float32 can only win if float32 exceeds a limit. For other targets, this rule does
not apply, because latencies on this machine are not representative.
"""

import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from edgekit_runtime.autotune.tournament import hold_tournament
from edgekit_runtime.errors import BackendError, OutputError
from edgekit_runtime.package.archive import read_package, write_package
from edgekit_runtime.package.variants import MAX_VARIANTS
from edgekit_runtime.sessions.latency import TIE_SHARE, Latency
from edgekit_runtime.system.engines import find_engine
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.measurement.arithmetic import measures_here
from edgekit_toolkit.measurement.brevity import is_brief, shorten_s
from edgekit_toolkit.packaging.assemble import combine, with_threads
from edgekit_toolkit.packaging.signing_keys import load_signer
from edgekit_toolkit.pipeline.request import Progress, Request
from edgekit_toolkit.pipeline.run import JudgedCandidate, Run

_SECONDS: Final = 20.0  # approximate time of a race. Models of less than a millisecond take 2 to 6
_GAIN_OF_THREADS: Final = 0.1  # a smaller gain is not worth another number of threads than the engine's own
_GAIN_OF_FORM: Final = 0.03  # a smaller one in any process may be chance, which must not change a package
_MAX_CONTENDERS: Final = MAX_VARIANTS + 1  # they are the variants of one package
_MAX_RIVALS: Final = 3  # of an engine, beside its choice and its float model
_CLOSE_ENGINE: Final = 1.5  # an engine that is slower than the fastest by this factor has no rivals


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A candidate for one engine and number of threads, with its latency.

    Attributes:
        usual: Whether the number of threads is the engine's default.
        is_float: Whether the candidate is the float model.
        is_eligible: Whether the candidate meets all limits.
        latency: The latency in each process that ran the model, or None if it did not run.
        reason: Why the model did not run, or an empty string.
    """

    engine: str
    candidate: JudgedCandidate
    threads: int
    usual: bool
    is_float: bool = False
    is_eligible: bool = True
    latency: Latency | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RaceResult:
    """The result of a race.

    Attributes:
        best: The contender to package for each engine, by the name of the engine. Engines in `reasons` are
            missing.
        winner: The name of the engine that wins.
        reasons: A dict from each engine without a contender to the reason.
        faster_float: A float model that is faster than the winner but exceeds a limit, or None.
    """

    best: Mapping[str, Contender]
    winner: str
    reasons: Mapping[str, str]
    faster_float: Contender | None = None


def hold_race(runs: Mapping[str, Run], request: Request, progress: Progress) -> RaceResult:
    """Compare the latencies of the chosen candidates of all engines on this machine.

    The first race finds the number of threads of each candidate. If latencies on this machine are valid for
    the target, a second race includes the fastest candidates and the float model of each engine.

    `runs` is a dict from the engines to their runs. The preferred engine is first.

    Raises:
        BackendError: No candidate runs in a separate process.
        OutputError: The package cannot be written to the temporary folder.
    """
    entering = [contender for run in runs.values() for contender in _enter(run, request)]
    result = decide(_time(entering, progress))
    if request.like is not None or not measures_here(request.target) or is_brief("races"):
        return result
    second = decide(_time(_find_rivals(runs, result.best), progress))
    return replace(second, reasons={**result.reasons, **second.reasons})


def _time(contenders: Sequence[Contender], progress: Progress) -> list[Contender]:
    """Return contenders with their times, taken in turns in fresh processes."""
    first, *others = (
        with_threads(contender.candidate.package, contender.candidate.recipe, contender.threads)[0]
        for contender in contenders
    )
    recipe = contenders[0].candidate.recipe
    whole = combine(first, {f"entrant-{number}": other for number, other in enumerate(others)}, recipe)
    try:
        with tempfile.TemporaryDirectory(prefix="edgekit-tournament-") as name:
            path, keys = Path(name, whole.manifest.file_name), Path(name, "keys")
            # A key of its own: the user's key may be in an HSM, which signs only what leaves this machine.
            write_package(path, whole.manifest, whole.artifacts, load_signer(folder=keys))
            with read_package(path, TrustStore.from_folder(keys)) as package:
                tournament = hold_tournament(
                    package,
                    keys,
                    seconds=shorten_s(_SECONDS),
                    report=lambda line: progress(f"tournament: {line}", None, None),
                )
    except OSError as error:
        raise OutputError(
            f"measuring engines needs temporary files: {error}; free space or set TMPDIR"
        ) from error
    return [
        replace(contender, latency=entrant.latency, reason=entrant.reason or "")
        for contender, entrant in zip(contenders, tournament.entrants, strict=True)
    ]


def _enter(run: Run, request: Request) -> Iterator[Contender]:
    """Yield the choice of a run with each number of threads."""
    if run.chosen is None:
        return
    counts = request.thread_counts or (request.threads,)
    usual = max(counts) if find_support(run.request.backend).shares_cores else min(counts)
    for count in counts:
        yield Contender(
            engine=run.request.backend,
            candidate=run.chosen,
            threads=count,
            usual=count == usual,
            is_float=run.chosen is run.candidates[0],
        )


def _find_rivals(runs: Mapping[str, Run], best: Mapping[str, Contender]) -> list[Contender]:
    """Return each engine's choice, its float model, and as many of its fastest candidates as allowed."""
    limit_s = _CLOSE_ENGINE * min(map(_median_s, best.values()))
    engines = sorted(best, key=lambda engine: _median_s(best[engine]))
    by_engine = [list(_rank_rivals(runs[engine], best[engine], limit_s)) for engine in engines]
    by_rank = [rival for rivals in itertools.zip_longest(*by_engine) for rival in rivals if rival is not None]
    entering = sorted(by_rank[:_MAX_CONTENDERS], key=lambda rival: rival.is_float)
    return [rival for engine in best for rival in entering if rival.engine == engine]


def _rank_rivals(run: Run, best: Contender, limit_s: float) -> Iterator[Contender]:
    """Yield an engine's choice, its float model, and then its fastest candidates, all with equal threads.

    Where transport is limited, the choice is the most accurate of the fast ones, and has one rival.
    """
    floats = run.candidates[0]
    within = [candidate for candidate in run.candidates if _keeps_limits(candidate, run)]
    fastest = sorted(within, key=lambda candidate: candidate.measured.host_ratio)
    count = 1 if "transport" in run.limits.limits else _MAX_RIVALS
    if _median_s(best) > limit_s:
        count = 0
    ranked = (best.candidate, floats, *fastest[:count])
    for candidate in {candidate.id: candidate for candidate in ranked}.values():
        is_eligible = candidate is best.candidate or candidate in within
        yield replace(best, candidate=candidate, is_float=candidate is floats, is_eligible=is_eligible)


def _keeps_limits(candidate: JudgedCandidate, run: Run) -> bool:
    drop, limit = candidate.stated_drop, run.limits.limits.get("drop")
    if drop is not None and drop.exceeds(limit, strict=run.request.strict):
        return False
    return not run.limits.violations(candidate.measured.figures)


def decide(contenders: Sequence[Contender]) -> RaceResult:
    """Return the result of a race. The contenders of each engine must be in order of preference.

    Raises:
        BackendError: No contender ran.
    """
    ran = [contender for contender in _settle_threads(contenders) if contender.latency is not None]
    best: dict[str, Contender] = {}
    for engine in dict.fromkeys(contender.engine for contender in ran):
        own = [contender for contender in ran if contender.engine == engine]
        eligible = [contender for contender in own if contender.is_eligible]
        floats = [contender for contender in own if contender.is_float]
        harmless = [
            contender for contender in eligible if not any(_is_slower(contender, other) for other in floats)
        ]
        if eligible:
            best[engine] = _prefer(harmless) if harmless else min(eligible, key=_median_s)
    reasons = {contender.engine: contender.reason for contender in contenders if contender.engine not in best}
    if not best:
        listed = "; ".join(f"{engine}: {reason}" for engine, reason in reasons.items())
        raise BackendError(f"no engine runs here what was packaged for it: {listed}; choose one by --backend")
    limit = (1 + TIE_SHARE) * min(map(_median_s, best.values()))
    alike = [contender for contender in best.values() if _median_s(contender) <= limit]
    winner = min(alike, key=lambda contender: contender.threads)
    faster = [contender for contender in ran if contender.is_float and _is_slower(winner, contender)]
    return RaceResult(best, winner.engine, reasons, min(faster, key=_median_s, default=None))


def _prefer(contenders: Sequence[Contender]) -> Contender:
    """Return the first contender, or the fastest if that is clearly faster."""
    first, fastest = contenders[0], min(contenders, key=_median_s)
    return fastest if _gains(fastest, first, _GAIN_OF_FORM) else first


def _gains(contender: Contender, other: Contender, share: float) -> bool:
    """Return whether a contender is faster than another one by a share of its time, beyond chance."""
    if contender.latency is None or other.latency is None:
        return other.latency is None
    return contender.latency.ratio_interval_to(other.latency)[1] <= 1 - share


def _settle_threads(contenders: Sequence[Contender]) -> list[Contender]:
    """Return each candidate once: with its engine's usual threads unless others are clearly faster."""
    settled: dict[tuple[str, str], Contender] = {}
    for contender in sorted(contenders, key=lambda contender: not contender.usual):
        key = (contender.engine, contender.candidate.id)
        present = settled.get(key)
        if present is None or _gains(contender, present, _GAIN_OF_THREADS):
            settled[key] = contender
    order = dict.fromkeys((contender.engine, contender.candidate.id) for contender in contenders)
    return [settled[key] for key in order]


def _is_slower(contender: Contender, other: Contender) -> bool:
    """Return whether a contender is slower than another one beyond chance and 2 %."""
    if contender.latency is None or other.latency is None:
        return False
    return contender.latency.ratio_interval_to(other.latency)[0] > 1 + TIE_SHARE


def _median_s(contender: Contender) -> float:
    return float("inf") if contender.latency is None else contender.latency.median_s


def packaged_threads(contender: Contender, cores: int) -> int | None:
    """Return the number of threads for the package, or None for the default of the engine.

    Args:
        contender: The winner of a race on this machine.
        cores: The number of cores of the target. The result is at least this number, unless a single thread
            is the fastest.
    """
    if contender.usual:
        return None
    return 1 if contender.threads == 1 else max(contender.threads, cores)


def describe_faster(result: RaceResult) -> str:
    """Return a text such as `1.20 x LABEL on ENGINE` for `faster_float`, or an empty string."""
    winner, faster = result.best[result.winner], result.faster_float
    if faster is None or faster.latency is None or winner.latency is None:
        return ""
    ratio = winner.latency.ratio_to(faster.latency)
    return f"{ratio:.2f} x {faster.candidate.label} on {find_engine(faster.engine).title}"
