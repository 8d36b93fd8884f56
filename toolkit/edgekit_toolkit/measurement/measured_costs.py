"""Costs that runs on a device of the target's class have measured: they take the place of coefficients."""

from edgekit_hil.evidence.evidence_file import Evidence, read_measured_costs
from edgekit_runtime.errors import TargetError
from edgekit_toolkit.measurement.arithmetic import measures_here
from edgekit_toolkit.measurement.calibration_models import digest_calibration_models
from edgekit_toolkit.measurement.calibration_networks import make_calibration_networks
from edgekit_toolkit.measurement.device_profile import SOURCE, add_times
from edgekit_toolkit.targets.figures import Source
from edgekit_toolkit.targets.spec import Target


def find_costs(target: Target) -> Evidence | None:
    """Return the evidence whose times predict latency on a target, or None.

    A target with a profile of its own keeps that one, and one that is measured on this machine needs none.
    Evidence does not state a power mode, so it counts only for targets with one.
    """
    if target.device_times is not None or target.backend.default == "tensorrt" or len(target.power.modes) > 1:
        return None
    if read_measured_costs(target.name) is None or measures_here(target):
        return None  # the usual case, without the networks
    found = read_measured_costs(target.name, digest_calibration_models(target.backend.default))
    if found is None or found.network_times is None:
        return None
    return found if set(found.network_times.seconds) == set(make_calibration_networks()) else None


def take_measured_costs(target: Target) -> Target:
    """Return the target with the costs that evidence has measured, if there is any.

    Args:
        target: target of a package.

    Raises:
        TargetError: a time in the evidence is none of a device.
    """
    if (evidence := find_costs(target)) is None:
        return target
    times = evidence.network_times
    assert times is not None  # noqa: S101  # `find_costs` asks for it
    source = Source(
        SOURCE,
        f"{evidence.device.model}, {times.engine}, evidence {evidence.file_name}",
        times.date,
        derivation=f"networks measured by bench {evidence.bench}",
    )
    try:
        return add_times(target, evidence.device.model, times.engine, times.seconds, source, is_real=True)
    except TargetError as error:
        raise TargetError(f"evidence {evidence.file_name}: {error}") from error
