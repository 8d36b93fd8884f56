"""`edgekit profile`: measures a device once, so that `edgekit package` can predict latency on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgekit_cli.number_range import NumberRange
from edgekit_cli.shared_options import as_json_option

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from edgekit_cli.hil.bench_machine import MeteredMachine
    from edgekit_host.evidence import MeasuredPower
    from edgekit_offload.profiling.machine import RunnableGraph
    from edgekit_runtime.offload.measurement.job import JobResult
    from edgekit_runtime.offload.measurement.machine_facts import MachineFacts
    from edgekit_toolkit.costs.device_transfer import FittedRatios
    from edgekit_toolkit.measurement.host_run import HostRuns
    from edgekit_toolkit.targets.spec import DeviceTimes, Target


_REST_SHARE = 6  # with a meter, the device first rests for a sixth of the measurement
_MIN_REST_S = 1.0


@click.command("profile")
@click.option(
    "--on",
    "on",
    metavar="MACHINE",
    required=True,
    help="The device: 'ssh:HOST', a bench of `edgekit hil` (its file or name), or 'local@20%' (this machine"
    " slowed down, needs root).",
)
@click.option(
    "--target",
    "base",
    metavar="TARGET",
    help="Target of the device.  [default: that of the bench]",
)
@click.option(
    "--name", help="Name of the new target.  [default: TARGET-BENCH of a bench, else TARGET-profiled]"
)
@click.option(
    "--seconds",
    type=NumberRange(1, 3600),
    default=60.0,
    show_default=True,
    help="Duration of the measurement on the device in seconds.",
)
@click.option(
    "--output", type=click.Path(path_type=Path), help="Target file to write.  [default: your targets]"
)
@click.option("--force", is_flag=True, help="Replace an existing target file.")
@as_json_option
def command(
    on: str,
    *,
    base: str | None,
    name: str | None,
    seconds: float,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Measure MACHINE and write a target with which `edgekit package` predicts latency and energy on it.

    The command times small networks on the device. Later, `edgekit package` times the same networks and the
    model on any machine. For each kind of kernel, it fits the ratio of the time on the device to the time on
    that machine. The uncertainty in reports is the error on networks that were left out of the fit.

    If the bench has a power meter for the whole device, the profile includes the power at rest and under
    load. The predicted energy is the power under load times the predicted latency.

    `edgekit hil run` packages its models with the bench's profile, and shows the error of its predictions.

    A machine named 'ssh:HOST' needs `edgekit[device]` installed, and a login without a password.
    """
    import json

    from edgekit_cli.hil.bench_machine import find_device
    from edgekit_cli.progress import ProgressBar
    from edgekit_host.terminal import open_console, print_line
    from edgekit_runtime.offload.measurement.machine_facts import describe_engine
    from edgekit_runtime.system.engines import parse_engine
    from edgekit_toolkit.targets.loader import find_user_targets

    device, target = find_device(on), _find_target(on, base, name)
    path = output or find_user_targets() / f"{target.name}.toml"
    _check(target, path, is_forced=force)
    with ProgressBar(open_console(stderr=True)) as progress, device as opened:
        profile = measure_profile(opened, target, path, seconds, progress.show)
    if as_json:
        facts = {"target": target.name, "file": str(path), "label": opened.machine.label}
        click.echo(json.dumps({**facts, **profile.describe()}, indent=2))
    else:
        console = open_console()
        _show(console, target.name if output is None else str(output), path, profile)
        if profile.machine.engine != (here := describe_engine(parse_engine(profile.machine.engine).name)):
            there = f"the device runs {profile.machine.engine}, this machine {here}"
            print_line(
                console, ("Note:", "yellow"), f"{there}; kernels of two releases may differ.", indent=0
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile:
    """A measured profile of a device.

    Attributes:
        here: The runs of the calibration networks on this machine.
        times: The times of the calibration networks on the device.
        fitted: The ratios that convert times on this machine into times on the device.
        power: The power of the device, or None if unknown.
        power_text: What measured the power, or why it is unknown.
    """

    machine: MachineFacts
    here: HostRuns
    times: DeviceTimes
    fitted: FittedRatios
    power: MeasuredPower | None
    power_text: str

    @property
    def errors(self) -> dict[str, float]:
        """The relative error of the predicted time of each network, from a fit without this network."""
        return dict(zip(self.here.networks, self.fitted.errors, strict=True))

    def describe(self) -> dict[str, object]:
        """Return the profile as a dict for JSON, with times in seconds."""
        from edgekit_runtime.dataclass_json import to_plain

        networks = {
            name: {
                "here_s": self.here.networks[name].whole_s,
                "there_s": self.times.seconds[name].value,
                "error": error,
            }
            for name, error in self.errors.items()
        }
        return {
            "machine": to_plain(self.machine),
            "power": None if self.power is None else to_plain(self.power),
            "power_text": self.power_text,
            "fit": to_plain(self.fitted),
            "uncertainty": self.fitted.uncertainty,
            "networks": networks,
        }

    def describe_power(self) -> str:
        """Return a text with the measured power and its meter, or why the power of the target is used."""
        if self.power is None:
            return f"that of the target, not measured; {self.power_text}"
        return f"{self.power.idle_w:.3g} W at rest, {self.power.active_w:.3g} W meanwhile ({self.power_text})"


def measure_profile(
    device: MeteredMachine, target: Target, path: Path, seconds: float, show: Callable[..., None]
) -> MeasuredProfile:
    """Time the calibration networks on a device and on this machine, and write a target with the times.

    An existing file at `path` is replaced.

    Raises:
        CutError: The networks cannot run on the device.
        TargetError: A measured time or power is implausible.
    """
    from edgekit_offload.profiling.machine import RunnableGraph
    from edgekit_toolkit.measurement.calibration_networks import make_calibration_models
    from edgekit_toolkit.measurement.device_profile import HOST_S, SOURCE, add_times, fit_here
    from edgekit_toolkit.measurement.host_run import measure_host_runs
    from edgekit_toolkit.targets.figures import Figure, Source, Status
    from edgekit_toolkit.targets.writer import write_target

    engine = target.backend.default
    networks = make_calibration_models(engine)
    graphs = [RunnableGraph(network.content) for network in networks.values()]
    has_modes = len(target.power.modes) > 1
    measured, measured_power, power_text = _measure(
        device, graphs, engine, seconds, show, has_modes=has_modes
    )
    facts, label = measured.machine, device.machine.label
    title = f"edgekit profile of {facts.cpu}, {facts.cores} cores ({label}), {facts.engine}"
    power = "" if measured_power is None else f"; power at rest and meanwhile: {power_text}"
    source = Source(
        SOURCE,
        title,
        date=facts.date[:10],
        derivation=f"{len(networks)} networks ran there; ratios are fitted by relative error where a package"
        f" is made, and the worst network that was left out of the fit is the uncertainty{power}",
    )
    there = {name: timing.seconds for name, timing in zip(networks, measured.timings, strict=True)}
    profiled = add_times(
        target,
        device=facts.cpu,
        engine=facts.engine,
        seconds=there,
        power=measured_power,
        source=source,
        is_real=label == "measured",
    )
    write_target(path, profiled)  # what follows can be repeated
    show("measuring here")
    here, times = measure_host_runs((), engine, min(seconds, HOST_S)), profiled.device_times
    assert times is not None  # noqa: S101  # for the type checker
    fitted = fit_here(times, here)
    status: Status = "measured" if times.is_real else "estimated"
    times = replace(times, uncertainty=Figure(fitted.uncertainty, "1", status, SOURCE))
    write_target(path, replace(profiled, device_times=times))
    return MeasuredProfile(
        machine=facts, here=here, times=times, fitted=fitted, power=measured_power, power_text=power_text
    )


def _measure(
    device: MeteredMachine,
    graphs: list[RunnableGraph],
    engine: str,
    seconds: float,
    show: Callable[..., None],
    *,
    has_modes: bool,
) -> tuple[JobResult, MeasuredPower | None, str]:
    """Return the times of graphs on a device, its power, and its meter or the reason for none.

    If the meter fails, only the power is missing.
    """
    import time

    from edgekit_hil.drivers.meter import summarize
    from edgekit_offload.profiling.machine import time_batches
    from edgekit_runtime.errors import BenchError

    text = f"measuring {len(graphs)} networks on {device.machine.text}, about {seconds:.0f} s"
    meter, meter_text = device.meter, f"meter: {device.meter_text}"
    if meter is not None and not meter.is_whole:
        meter, meter_text = None, f"the meter reads only a part of the device: {device.meter_text}"
    if has_modes:
        meter, meter_text = None, "a target with several power modes keeps its own"
    measured = None
    try:
        if meter is not None:
            show("reading the meter at rest")
            with meter.measure() as idle:
                time.sleep(max(seconds / _REST_SHARE, _MIN_REST_S))
            with meter.measure() as active:
                show(text)
                measured = time_batches(device.machine, graphs, seconds=seconds, engine=engine)
            return measured, summarize(idle, active), meter_text
    except BenchError as error:
        meter_text = f"{meter_text}: {error}"
    if measured is None:
        show(text)
        measured = time_batches(device.machine, graphs, seconds=seconds, engine=engine)
    return measured, None, meter_text


def _find_target(on: str, base: str | None, name: str | None) -> Target:
    """Return the base target of a profile, with the name of the new target."""
    from edgekit_cli.hil.bench_machine import find_names
    from edgekit_toolkit.measurement.device_profile import start_profile
    from edgekit_toolkit.targets.loader import find_user_targets, load_target

    own_base, own_name = find_names(on) or (None, None)
    if (base := base or own_base) is None:
        raise click.UsageError(f"{on} is no bench, whose file would say it: name the device's --target")
    target = load_target(base, [find_user_targets()])
    if base != own_base or own_name is None:
        own_name = f"{target.name}-profiled"
    return start_profile(target, name or own_name)


def _check(target: Target, path: Path, *, is_forced: bool) -> None:
    """Refuse a profile that could not be used, before the measurement."""
    from edgekit_runtime.errors import OutputError, TargetError
    from edgekit_runtime.system.engines import find_engine

    if target.backend.on_gpu:
        title = find_engine(target.backend.default).title
        raise TargetError(
            f"{target.name}: expected a target that prefers an engine on the processor, got {title}, whose"
            " latency is modelled by coefficients; measure packages on the device: edgekit-device tournament"
        )
    if path.exists() and not is_forced:
        raise OutputError(f"{path} exists; give another --name, or --force to replace it")


def _show(console: Console, name: str, path: Path, profile: MeasuredProfile) -> None:
    from edgekit_host.terminal import print_line, print_section
    from edgekit_toolkit.costs.device_transfer import CACHE_BYTES

    fitted, errors = profile.fitted, profile.errors
    ratios = [(kind, f"{ratio:.2f} x as long as here") for kind, ratio in sorted(fitted.ratios.items())]
    spilled = f"{fitted.s_per_spilled_byte * 1e12:.0f} us more for each MB"
    spill_row = (f"data of a kernel beyond {CACHE_BYTES >> 10} KiB", spilled)
    thread_row, sharing = ("threads", "none that help"), fitted.sharing
    if sharing.share < 1:
        long = f"kernels much longer than {sharing.alone_s * 1e6:.0f} us here"
        thread_row = (long, f"{sharing.share:.0%} of that, since threads share them")
    print_section(console, "Kernels on the device", [*ratios, spill_row, thread_row])
    worst = sorted(errors, key=lambda network: -abs(errors[network]))[:5]
    rows = [(network, f"{errors[network]:+.1%}") for network in worst]
    print_section(console, "Worst predictions of networks that the fit had not seen", rows)
    console.print()
    print_line(console, "Power:", profile.describe_power(), indent=0)
    print_line(console, "Uncertainty:", f"{fitted.uncertainty:.2f} x", indent=0)
    print_line(console, "Target:", str(path), indent=0)
    print_line(console, "Next:", f"edgekit package MODEL --target {name}", indent=0)
