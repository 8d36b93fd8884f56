"""Uses measurements on a device of the target's class in place of the coefficients of the target."""

from edgekit_host.evidence import Evidence, NetworkTimes, read_measured_costs
from edgekit_runtime.errors import TargetError
from edgekit_runtime.system.engines import parse_engine
from edgekit_toolkit.measurement.arithmetic import measures_here
from edgekit_toolkit.measurement.device_profile import SOURCE, add_times, is_current
from edgekit_toolkit.targets.figures import Source
from edgekit_toolkit.targets.spec import Target


def find_costs(target: Target) -> tuple[Evidence, NetworkTimes] | None:
    """Return the evidence for predicting the latency on a target, and the network times in it, or None.

    Evidence is not used if the target has its own times, is measured on this machine, or is a GPU. It is also
    not used if the target has several power modes, because evidence does not state the mode.
    """
    if target.device_times is not None or target.backend.on_gpu or len(target.power.modes) > 1:
        return None
    if measures_here(target):
        return None
    engine = target.backend.default
    return next(
        (
            (evidence, times)
            for evidence, times in read_measured_costs(target.name)
            if parse_engine(times.engine).name == engine and is_current(times)
        ),
        None,
    )


def take_measured_costs(target: Target) -> Target:
    """Return the target with the times and power from `find_costs`. Without evidence, return `target`.

    Raises:
        TargetError: A time in the evidence is impossible for a device.
    """
    if (costs := find_costs(target)) is None:
        return target
    evidence, times = costs
    source = Source(
        SOURCE,
        f"{evidence.device.model}, {times.engine}, evidence {evidence.file_name}",
        times.date,
        derivation=f"networks measured by bench {evidence.bench}",
    )
    try:
        return add_times(
            target,
            device=evidence.device.model,
            engine=times.engine,
            seconds=times.seconds,
            power=times.power,
            source=source,
            is_real=True,
        )
    except TargetError as error:
        raise TargetError(f"evidence {evidence.file_name}: {error}") from error
