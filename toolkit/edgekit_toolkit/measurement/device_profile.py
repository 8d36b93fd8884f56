"""A target whose latency is predicted from times of the calibration networks on a device.

The times were measured by `edgekit profile`, or come from evidence of another host. They hold wherever the
networks can run beside the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from edgekit_host.evidence import MeasuredPower, NetworkTimes
from edgekit_runtime.errors import TargetError
from edgekit_runtime.system.engines import parse_engine
from edgekit_toolkit.costs.device_transfer import FittedRatios, fit_ratios
from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.measurement.calibration_networks import (
    calibration_names,
    digest_calibration_models,
)
from edgekit_toolkit.measurement.host_run import HostRuns, measure_host_runs
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.targets.figures import Figure, Source, Status
from edgekit_toolkit.targets.spec import DeviceTimes, Power, Target

SOURCE: Final = "profile"
"""Key of the source of what was measured on a device."""
HOST_S: Final = 4.0
"""How long models and networks run here, seconds."""


def add_times(
    target: Target,
    *,
    device: str,
    engine: str,
    seconds: Mapping[str, float],
    power: MeasuredPower | None,
    source: Source,
    is_real: bool,
) -> Target:
    """Return a target with measured times of the calibration networks on a device, and its power.

    Args:
        target: the target that the device is one of.
        device: model of the device.
        engine: name and release of the engine there.
        seconds: name of a calibration network -> seconds of one inference of it.
        power: power of the device; None keeps the target's power.
        source: source of these figures. Its `key` must be `SOURCE`; it replaces the target's source with that
            key.
        is_real: whether a real device was measured, not an emulated one.

    Raises:
        TargetError: there is no time, a time is not possible on a device, or the power at rest is above the
            power at work.
        EngineMissingError: no engine of this name is registered.
        ValueError: `power` is given, and the target has several power modes.
    """
    status: Status = "measured" if is_real else "estimated"
    figures = {name: Figure(time_s, "s", status, SOURCE) for name, time_s in seconds.items()}
    others = (source for source in target.sources if source.key != SOURCE)
    networks = digest_calibration_models(parse_engine(engine).name)
    return replace(
        target,
        power=target.power if power is None else _replace_power(target.power, power, status),
        device_times=DeviceTimes(device, engine, networks, figures),
        sources=(*others, source),
    )


def start_profile(target: Target, name: str) -> Target:
    """Return a copy of `target` under the name of a new profile, to which times of a device are then added.

    Raises:
        TargetError: `target` is itself a profile: its power may be another device's.
    """
    if target.device_times is not None:
        raise TargetError(f"{target.name} is a profile; name the target that it was made of")
    return replace(target, name=name, aliases=())


def _replace_power(power: Power, measured: MeasuredPower, status: Status) -> Power:
    """Return the power of a target that has one mode with the figures of a meter."""
    (mode,) = power.modes
    idle, active = (Figure(watts, "W", status, SOURCE) for watts in (measured.idle_w, measured.active_w))
    return replace(power, idle=idle, modes=(replace(mode, active=active),))


def is_current(times: DeviceTimes | NetworkTimes) -> bool:
    """Return whether times are from this release's networks; only such times compare with runs here."""
    engine = parse_engine(times.engine).name
    return times.networks == digest_calibration_models(engine) and set(times.seconds) == calibration_names()


def fit_here(times: DeviceTimes, here: HostRuns) -> FittedRatios:
    """Return the ratios that convert runs of the calibration networks here into their times on a device."""
    device_s = [times.seconds[name].value for name in here.networks]
    may_share = find_support(parse_engine(times.engine).name).shares_cores
    return fit_ratios(list(here.networks.values()), device_s, may_share=may_share)


def predict_latencies(
    models: Sequence[tuple[Model, Feeds]], times: DeviceTimes
) -> tuple[list[float], FittedRatios]:
    """Measure models here; return the seconds of one inference of each on a device, and the fit used.

    Raises:
        BackendError: the engine refuses a model or its inputs here.
        ModelError: the work of a model for LiteRT cannot be counted.
    """
    here = measure_host_runs(models, parse_engine(times.engine).name, HOST_S)
    fitted = fit_here(times, here)
    return [fitted.predict_s(run) for run in here.models], fitted
