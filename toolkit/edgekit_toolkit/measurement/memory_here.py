"""The memory of what was chosen, measured on this machine, and what the service takes with it."""

import math
from dataclasses import replace

from edgekit_runtime.errors import BackendError
from edgekit_runtime.package.figures import INTEGER_DIVISION_FIGURE
from edgekit_toolkit.costs.peak_memory import MemoryEstimate
from edgekit_toolkit.measurement.peak_memory import PeakMemory, measure_model_memory
from edgekit_toolkit.measurement.service_memory import estimate_service_bytes
from edgekit_toolkit.pipeline.state import Run


def with_measured_memory(run: Run, candidate_id: str) -> Run:
    """Return the run with the peak memory of a fresh process here that runs the candidate's package.

    Where memory is limited, the run also says what the service takes with it.
    """
    place = run.position(candidate_id)
    model, known = run.found.candidates[place].model, run.judged.memory[place]
    warnings = list(run.warnings)
    peak = known if isinstance(known, PeakMemory) else None
    try:
        peak = peak or measure_model_memory(model, run.prepared.feeds[0])
    except BackendError as error:
        warnings.append(f"peak memory was not measured here: {str(error).splitlines()[0]}")
    limit_bytes = run.request.budget.limits.get("memory", math.inf)
    if peak is not None and peak.total_bytes > limit_bytes:
        warnings.append(
            f"peak memory measured on this machine is {peak.total_bytes / 1e6:.1f} MB, OVER THE LIMIT of"
            f" {limit_bytes / 1e6:.1f} MB: measure on {run.request.target.name} before you rely on it"
        )
    service_bytes = None
    if known is not None and limit_bytes < math.inf and _is_isolated(run, place):
        warnings.append(
            "the memory limit is for one process that runs the model: edgekit-device serve runs this one"
            " beside the service, in a process of its own (it divides integers by values of its inputs)"
        )
    elif known is not None and limit_bytes < math.inf:
        try:
            service_bytes = estimate_service_bytes(model.engine, known.model_bytes, run.prepared.feeds[0])
            warnings.append(_describe(known, service_bytes, limit_bytes))
        except BackendError as error:
            warnings.append(str(error).splitlines()[0])
    return replace(run, peak=peak, service_bytes=service_bytes, warnings=warnings)


def _is_isolated(run: Run, place: int) -> bool:
    """Whether the service runs the candidate in a process of its own on the target."""
    return run.request.target.arch == "x86_64" and bool(
        run.drafts[place].recipe.figures.get(INTEGER_DIVISION_FIGURE)
    )


def _describe(memory: MemoryEstimate | PeakMemory, service_bytes: int, limit_bytes: float) -> str:
    over = ", OVER THE LIMIT" if service_bytes > limit_bytes else ""
    return (
        f"memory of {memory.total_bytes / 1e6:.1f} MB is that of a process that opens the package with"
        f" open_session; edgekit-device serve takes about {service_bytes / 1e6:.1f} MB with this model"
        f" (estimated){over}"
    )
