"""A target with measured costs: times of the calibration networks on a device, beside their times here.

The times on the device are measured now (`edgekit profile`), or come from evidence of another host.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from edgekit_runtime.errors import TargetError
from edgekit_runtime.remote.measurement.job_runner import make_inputs
from edgekit_runtime.system.processor_speed import SpeedGate, find_cpu
from edgekit_toolkit.costs.device_transfer import FittedRatios, HostRun, fit_ratios
from edgekit_toolkit.measurement.calibration_networks import (
    digest_calibration_networks,
    make_calibration_networks,
)
from edgekit_toolkit.measurement.host_run import engine_name, measure_host_run
from edgekit_toolkit.models.ort_session import session_for
from edgekit_toolkit.targets.figures import Figure, Source
from edgekit_toolkit.targets.spec import Target, Transfer

SOURCE: Final = "profile"
"""Key of the source of what was measured on a device."""
HOST_S: Final = 6.0
"""Seconds that the networks run here."""


@dataclass(frozen=True, slots=True)
class HostRuns:
    """Runs of the calibration networks on this machine.

    Attributes:
        work_s: processor time of the fixed work at the speed at which the times count.
        runs: run of each network, by its name.
    """

    work_s: float
    runs: Mapping[str, HostRun]


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Times of the calibration networks on a device.

    Attributes:
        engine: name and release of the engine there.
        networks: digest of the networks.
        seconds: time of one inference of each network, by its name.
        is_real: whether a real device was measured, not an emulated one.
        source: source of the times.
    """

    engine: str
    networks: str
    seconds: Mapping[str, float]
    is_real: bool
    source: Source


def run_networks_here(seconds: float, show: Callable[..., None]) -> HostRuns:
    """Run the calibration networks on this machine.

    Args:
        seconds: how long to measure them, together.
        show: called with a description of the step, the number of networks done, and their count.
    """
    networks, work_s = make_calibration_networks(), SpeedGate().usual_s
    runs = {}
    for number, (name, network) in enumerate(networks.items()):
        show("measuring here", number, len(networks))
        feeds = make_inputs(session_for(network, threads=1))
        runs[name] = measure_host_run(network, feeds, work_s=work_s, seconds=seconds / len(networks))
    return HostRuns(work_s, runs)


def add_profile(target: Target, here: HostRuns, there: DeviceTimes) -> tuple[Target, FittedRatios]:
    """Return a target with a profile that holds on this machine, and its fit.

    Raises:
        TargetError: the times are of other networks than those that ran here.
    """
    if there.networks != digest_calibration_networks() or set(there.seconds) != set(here.runs):
        raise TargetError(
            f"{there.source.title}: its times are of other calibration networks than those of this release"
        )
    fitted = fit_ratios(list(here.runs.values()), [there.seconds[name] for name in here.runs])

    def figure(value: float, unit: str) -> Figure:
        return Figure(value, unit, "measured" if there.is_real else "estimated", SOURCE)

    transfer = Transfer(
        host=find_cpu(),
        engine=engine_name(),
        work=figure(here.work_s, "s"),
        ratios={kind: figure(ratio, "1") for kind, ratio in fitted.ratios.items()},
        uncertainty=figure(fitted.uncertainty, "1"),
        device_engine=there.engine,
        networks=there.networks,
        times={name: figure(seconds, "s") for name, seconds in there.seconds.items()},
    )
    derivation = (
        f"{there.source.derivation}; {len(here.runs)} networks ran there and by one thread on {find_cpu()};"
        " ratios fitted by relative error; uncertainty is the worst network that was left out of the fit"
    )
    sources = (
        *(each for each in target.sources if each.key != SOURCE),
        replace(there.source, derivation=derivation),
    )
    return replace(target, transfer=transfer, sources=sources), fitted
