"""Targets whose latency is predicted from the times of the calibration networks on a device.

The times were measured by `edgekit profile`, or come from the evidence of a test run on a real device. They
can be used on any host that can run the networks and the model itself.
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
"""The key of the source of figures that were measured on a device."""
HOST_S: Final = 4.0
"""The time that models and networks run on this host, in seconds."""


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
    """Return a target with measured times of the calibration networks on a device, and with its power.

    Args:
        target: The target to which the device belongs.
        device: The model of the device.
        engine: The name and release of the engine on the device.
        seconds: A dict from the name of a calibration network to the seconds of one inference.
        power: The power of the device. None keeps the power of the target.
        source: The source of these figures. Its `key` must be `SOURCE`. It replaces the target's source with
            that key.
        is_real: Whether the device is real and not emulated.

    Raises:
        TargetError: There are no times, a time is impossible, or the idle power is above the active power.
        EngineMissingError: No engine of this name is registered.
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
    """Return a copy of `target` with the name of a new profile, to which times can be added.

    Raises:
        TargetError: `target` is itself a profile, so its power may be that of another device.
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
    """Return whether `times` are from the networks of this release and can be compared with runs here."""
    engine = parse_engine(times.engine).name
    return times.networks == digest_calibration_models(engine) and set(times.seconds) == calibration_names()


def fit_here(times: DeviceTimes, here: HostRuns) -> FittedRatios:
    """Return the ratios that convert runs of the calibration networks here to their times on a device."""
    device_s = [times.seconds[name].value for name in here.networks]
    may_share = find_support(parse_engine(times.engine).name).shares_cores
    return fit_ratios(list(here.networks.values()), device_s, may_share=may_share)


def predict_latencies(
    models: Sequence[tuple[Model, Feeds]], times: DeviceTimes
) -> tuple[list[float], FittedRatios]:
    """Measure models here. Return the predicted seconds of one inference on a device, and the fit.

    Raises:
        BackendError: The engine refuses a model or its inputs.
        ModelError: The work of a model for LiteRT cannot be counted.
    """
    here = measure_host_runs(models, parse_engine(times.engine).name, HOST_S)
    fitted = fit_here(times, here)
    return [fitted.predict_s(run) for run in here.models], fitted
