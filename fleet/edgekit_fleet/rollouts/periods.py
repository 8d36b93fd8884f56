"""What a device counted of one version between two of its reports.

Devices report counts since the version was opened. Differences of them are the figures of a period, so that
two devices, or one before and after a switch, can be compared over the same hours.
"""

from dataclasses import dataclass

from edgekit_runtime.agent.documents import ModelFigures


@dataclass(frozen=True, slots=True)
class Period:
    """Figures of one version on one device in a period.

    Attributes:
        requests: calls that were answered.
        latency_ms, energy_mj: means of a call, or None where they are not known.
        errors: share of the calls that failed, or None without calls.
        drift: as it was at the end, or None.
    """

    requests: int = 0
    latency_ms: float | None = None
    energy_mj: float | None = None
    errors: float | None = None
    drift: float | None = None


def find_period(begin: ModelFigures | None, end: ModelFigures) -> Period:
    """Return the figures between two reports of the same version.

    Args:
        begin: the earlier report, or None for the time at which the version was opened. One that states more
            calls than the later report was made before a restart of the service, and counts as None.
        end: the later report.
    """
    if begin is None or begin.requests > end.requests or begin.failed > end.failed:
        begin = ModelFigures(model=end.model, version=end.version)
    requests, failed = end.requests - begin.requests, end.failed - begin.failed
    good = requests - failed
    answer_s = end.answer_s - begin.answer_s
    energy_mj = None
    if end.energy_mj is not None and requests > 0:  # the device states the mean since the opening
        total = end.energy_mj * end.requests - (begin.energy_mj or 0.0) * begin.requests
        energy_mj = total / requests
    return Period(
        requests=requests,
        latency_ms=1e3 * answer_s / good if good > 0 and answer_s > 0 else None,
        energy_mj=energy_mj if energy_mj is not None and energy_mj > 0 else None,
        errors=failed / requests if requests > 0 else None,
        drift=end.drift,
    )
