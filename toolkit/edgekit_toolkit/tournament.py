"""`--backend auto`: package for every engine of the target, and keep the fastest of those that run here.

Each engine gets a search of its own; then what they chose takes turns on the same input. TensorRT has no
part: it needs the device, where `edgekit-device tournament` holds this contest.
"""

from dataclasses import replace
from importlib.util import find_spec
from typing import Final

from edgekit_runtime.errors import EdgekitError, ModelError
from edgekit_runtime.latency import Latency, LatencyLimits, find_tied
from edgekit_runtime.sessions import EngineMissingError
from edgekit_runtime.turns import Runner, take_turns
from edgekit_toolkit.artifacts import Model, open_session
from edgekit_toolkit.packaging import Progress, search
from edgekit_toolkit.runs import Prepared, Request, Run, Standing
from edgekit_toolkit.sign import StatementSigner
from edgekit_toolkit.targets import Target
from edgekit_toolkit.variants import carry_variants

_LIMITS: Final = LatencyLimits(warmup_rounds=0, min_rounds=30, time_limit_s=20.0)


def engines_of(target: Target) -> list[str]:
    """Return the engines of a target that a host can run, the preferred first."""
    return [name for name in (target.backend.default, target.backend.fallback) if name in {"ort", "litert"}]


def engines_here(target: Target) -> list[str]:
    """Return those of them that are installed; onnxruntime always is, since it judges every model."""
    return [name for name in engines_of(target) if name == "ort" or find_spec("ai_edge_litert")]


def search_engines(request: Request, signer: StatementSigner, progress: Progress) -> Run:
    """Return the run of the engine whose choice is the fastest here, with how all of them did.

    Where the request asks for several variants, the package carries those of the other engines too.

    One that does not take the model, or is not installed, is reported with the reason. The time for mixing
    precisions is shared out. Where no engine keeps the budget, the run of the preferred one is returned: it
    says why.

    Raises:
        ModelError: no engine takes the model.
        EngineMissingError: the target has one engine, which is not installed here.
        DataError: the samples do not fit.
        BackendError: an engine fails on the source model.
    """
    names = engines_of(request.target)
    shares = max(1, len(engines_here(request.target)))
    runs: dict[str, Run] = {}
    prepared: Prepared | None = None
    refused: dict[str, EdgekitError] = {}
    for name in names:
        share = replace(request, backend=name, search_s=request.search_s / shares)
        try:
            runs[name] = search(share, signer, _named(progress, name), prepared)
            prepared = runs[name].prepared
        except (ModelError, EngineMissingError) as error:
            refused[name] = error
    if not runs:
        raise refused[names[0]]
    progress("tournament", None, None)
    latencies = _race({name: run for name, run in runs.items() if run.choice.chosen is not None})
    winner = find_tied(latencies)[0] if latencies else next(iter(runs))
    standings = [
        _standing(name, runs.get(name), latencies.get(name), refused.get(name), kept=name == winner)
        for name in names
    ]
    kept = replace(runs[winner], tournament=tuple(standings))
    return carry_variants([kept, *(run for name, run in runs.items() if name != winner)], signer)


def _named(progress: Progress, name: str) -> Progress:
    return lambda what, done, total: progress(f"{name}: {what}", done, total)


def _race(runs: dict[str, Run]) -> dict[str, Latency]:
    """Return the latency of each run's choice; empty where there is none."""
    sessions = {name: open_session(_chosen(run), threads=run.request.threads) for name, run in runs.items()}
    try:
        feeds = next(iter(runs.values())).prepared.feeds[0] if runs else {}
        runners = {name: Runner([session], feeds) for name, session in sessions.items()}
        return take_turns(runners, _LIMITS) if runners else {}
    finally:
        for session in sessions.values():
            session.close()


def _chosen(run: Run) -> Model:
    assert run.choice.chosen is not None  # noqa: S101  # for the type checker: refusals take no part
    model: Model = run.found.candidates[run.position(run.choice.chosen)].model
    return model


def _standing(
    name: str, run: Run | None, latency: Latency | None, error: EdgekitError | None, *, kept: bool
) -> Standing:
    if run is None or run.choice.chosen is None or latency is None:
        reason = " ".join(str(error).split()) if run is None else run.choice.reason
        return Standing(name, None, None, None, None, reason, kept=kept)
    costs = run.drafts[run.position(run.choice.chosen)].measured
    return Standing(
        name, costs.label, costs.figures["size"], costs.figures["drop"], latency.median_s * 1e3, "", kept=kept
    )
