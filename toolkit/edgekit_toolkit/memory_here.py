"""The memory of what was chosen, measured on this machine, and what the service takes with it."""

from dataclasses import replace

from edgekit_runtime.errors import BackendError
from edgekit_toolkit.artifacts import Model, content_of, engine_of
from edgekit_toolkit.feeds import Feeds
from edgekit_toolkit.measure import PeakMemory, measure_peak_memory
from edgekit_toolkit.measure_service import measure_service_bytes
from edgekit_toolkit.memory import MemoryEstimate
from edgekit_toolkit.nesting import has_foldable_weights
from edgekit_toolkit.runs import Run


def with_measured_memory(run: Run, candidate_id: str) -> Run:
    """Return the run with the peak memory of a fresh process here that runs the candidate's package.

    Where memory is limited, the run also says what the service takes with it.
    """
    place = run.position(candidate_id)
    model, known = run.found.candidates[place].model, run.judged.memory[place]
    warnings = list(run.warnings)
    peak = known if isinstance(known, PeakMemory) else None
    try:
        peak = peak or _measure(model, run.prepared.feeds[0])
    except BackendError as error:
        warnings.append(f"peak memory was not measured here: {str(error).splitlines()[0]}")
    service_bytes = None
    if known is not None and "memory" in run.request.budget.limits:
        try:
            service_bytes = measure_service_bytes(engine_of(model)) + known.model_bytes
            warnings.append(_describe(known, service_bytes, run.request.budget.limits["memory"]))
        except BackendError as error:
            warnings.append(str(error).splitlines()[0])
    return replace(run, peak=peak, service_bytes=service_bytes, warnings=warnings)


def _measure(model: Model, feeds: Feeds) -> PeakMemory:
    return measure_peak_memory(
        content_of(model),
        feeds,
        engine=engine_of(model),
        fold_weights=not isinstance(model, bytes) and has_foldable_weights(model),
    )


def _describe(memory: MemoryEstimate | PeakMemory, service_bytes: int, limit_bytes: float) -> str:
    over = ", OVER THE LIMIT" if service_bytes > limit_bytes else ""
    return (
        f"memory of {memory.total_bytes / 1e6:.1f} MB is that of a process that opens the package with"
        f" open_session; edgekit-device serve takes about {service_bytes / 1e6:.1f} MB with this model"
        f" (estimated){over}"
    )
