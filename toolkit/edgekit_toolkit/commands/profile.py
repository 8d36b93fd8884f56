"""`edgekit profile`: measures a device once, so that `edgekit package` predicts latency on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from edgekit_offload.profiling.machine import RunnableGraph
    from edgekit_runtime.remote.measurement.job import Measured
    from edgekit_runtime.remote.measurement.machine_facts import MachineFacts, MeasuredEngine
    from edgekit_toolkit.commands.hil.bench_machine import MeteredMachine
    from edgekit_toolkit.costs.device_transfer import FittedRatios
    from edgekit_toolkit.measurement.host_run import HostRuns
    from edgekit_toolkit.targets.spec import DeviceTimes, Target


_REST_SHARE = 6  # of the measurement: so much time the device rests before, if there is a meter


@click.command("profile")
@click.option(
    "--on", "on", metavar="MACHINE", required=True,
    help="The device: 'ssh:HOST', a bench of `edgekit hil` (its file or name), or 'local@20%' (this machine"
    " slowed down, needs root).",
)  # fmt: skip
@click.option(
    "--target", "base", metavar="TARGET",
    help="The target that the device is one of.  [default: that of the bench]",
)  # fmt: skip
@click.option(
    "--name", help="Name of the new target.  [default: TARGET-BENCH of a bench, else TARGET-profiled]"
)
@click.option(
    "--seconds", type=click.FloatRange(5, 3600), default=60.0, show_default=True,
    help="How long to measure on the device.",
)  # fmt: skip
@click.option(
    "--output", type=click.Path(path_type=Path), help="Write the target file here.  [default: your targets]"
)
@click.option("--force", is_flag=True, help="Replace an existing target file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
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

    Small networks run on the device, and the profile is their times. It holds on any machine: there
    `edgekit package` runs the same networks beside a model. How much longer each kind of kernel takes on the
    device is fitted on whole networks; the error of networks that the fit has not seen is the uncertainty
    that reports state.

    With a meter of the whole device on the bench, the profile has its power at rest and while the networks
    run, and energy is that power times the predicted latency.

    `edgekit hil run` makes its packages by the profile of a bench, and shows how far off it is there.

    A machine named 'ssh:HOST' needs `edgekit[device]` installed, and a login without a password.
    """
    import json

    from edgekit_runtime.dataclass_json import to_plain
    from edgekit_runtime.remote.measurement.machine_facts import describe_engine
    from edgekit_toolkit.commands.hil.bench_machine import find_device
    from edgekit_toolkit.commands.progress import ProgressBar
    from edgekit_toolkit.console import open_console, print_line
    from edgekit_toolkit.measurement.device_profile import parse_engine
    from edgekit_toolkit.targets.loader import find_user_targets

    device, target = find_device(on), _find_target(on, base, name)
    path = output or find_user_targets() / f"{target.name}.toml"
    _check(target, path, is_forced=force)
    with ProgressBar(open_console(stderr=True)) as progress, device as opened:
        found = measure_profile(opened, target, path, seconds, progress.show)
    networks = dict(zip(found.here.networks, found.fitted.errors, strict=True))
    if as_json:
        document = {
            "target": target.name,
            "file": str(path),
            "machine": to_plain(found.machine),
            "label": opened.machine.label,
            "power": {"at_rest_and_busy_w": found.watts, "text": found.power_text},
            "fit": to_plain(found.fitted),
            "uncertainty": found.fitted.uncertainty,
            "networks": {
                network: {
                    "here_s": found.here.networks[network].whole_s,
                    "there_s": found.times.seconds[network].value,
                    "error": error,
                }
                for network, error in networks.items()
            },
        }
        click.echo(json.dumps(document, indent=2))
    else:
        console = open_console()
        _show(console, target.name, path, found, networks)
        if found.machine.engine != (here := describe_engine(parse_engine(found.machine.engine))):
            there = f"the device runs {found.machine.engine}, this machine {here}"
            print_line(
                console, ("Note:", "yellow"), f"{there}; kernels of two releases may differ.", indent=0
            )


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    """A profile as it was measured: facts about the device, the networks on both sides, the fit, the power.

    Attributes:
        machine, here, times, fitted: as their types say.
        watts: power of the device at rest and while the networks ran, or None.
        power_text: what measured it, or why nothing did.
    """

    machine: MachineFacts
    here: HostRuns
    times: DeviceTimes
    fitted: FittedRatios
    watts: tuple[float, float] | None
    power_text: str


def measure_profile(
    device: MeteredMachine, target: Target, path: Path, seconds: float, show: Callable[..., None]
) -> MeasuredProfile:
    """Measure a device, and write a target with its profile.

    Args:
        device: the device.
        target: target without a profile, under the name that it gets.
        path: file of the target.
        seconds: how long to measure on the device.
        show: called with a description of each step.

    Raises:
        CutError: the device does not measure.
        BenchError: its meter does not.
    """
    from edgekit_offload.profiling.machine import RunnableGraph
    from edgekit_toolkit.measurement.calibration_models import make_calibration_models
    from edgekit_toolkit.measurement.device_profile import HOST_S, SOURCE, add_times, fit_here
    from edgekit_toolkit.measurement.host_run import measure_host_runs
    from edgekit_toolkit.targets.figures import Figure, Source, Status
    from edgekit_toolkit.targets.writer import write_target

    engine = target.backend.default
    assert engine != "tensorrt"  # noqa: S101  # see `_check`
    networks = make_calibration_models(engine)
    graphs = [RunnableGraph(network.content) for network in networks.values()]
    measured, watts, power_text = _measure(device, graphs, engine, seconds, show)
    facts, label = measured.machine, device.machine.label
    title = f"edgekit profile of {facts.cpu}, {facts.cores} cores ({label}), {facts.engine}"
    power = "" if watts is None else f"; power at rest and meanwhile: {power_text}"
    source = Source(
        *(SOURCE, title),
        date=facts.date[:10],
        derivation=f"{len(networks)} networks ran there; ratios are fitted by relative error where a package"
        f" is made, and the worst network that was left out of the fit is the uncertainty{power}",
    )
    there = {name: each.seconds for name, each in zip(networks, measured.timings, strict=True)}
    is_real = label == "measured"
    profiled = add_times(target, facts.cpu, facts.engine, there, watts, source, is_real=is_real)
    write_target(path, profiled)  # what follows can be repeated
    show("measuring here")
    here, times = measure_host_runs((), engine, HOST_S), profiled.device_times
    assert times is not None  # noqa: S101  # for the type checker
    fitted = fit_here(times, here)
    status: Status = "measured" if times.is_real else "estimated"
    times = replace(times, uncertainty=Figure(fitted.uncertainty, "1", status, SOURCE))
    write_target(path, replace(profiled, device_times=times))
    return MeasuredProfile(facts, here, times, fitted, watts, power_text)


def _measure(
    device: MeteredMachine,
    graphs: list[RunnableGraph],
    engine: MeasuredEngine,
    seconds: float,
    show: Callable[..., None],
) -> tuple[Measured, tuple[float, float] | None, str]:
    """Return the times of graphs on a device, its watts at rest and meanwhile, and what measured those."""
    import statistics
    import time

    from edgekit_offload.profiling.machine import time_batches

    text = f"measuring {len(graphs)} networks on {device.machine.text}, about {seconds:.0f} s"
    meter, power_text = device.meter, device.meter_text
    if meter is not None and not meter.is_whole:
        meter, power_text = None, f"of a part of the device, {power_text}"
    if meter is None:
        show(text)
        return time_batches(device.machine, graphs, seconds=seconds, engine=engine), None, power_text
    rest_s = seconds / _REST_SHARE
    show(f"reading the meter at rest, {rest_s:.0f} s")
    with meter.measure() as idle:
        time.sleep(rest_s)
    show(text)
    with meter.measure() as busy:
        measured = time_batches(device.machine, graphs, seconds=seconds, engine=engine)
    idle_w, busy_w = (statistics.median(watts for _, watts in each) for each in (idle, busy))
    if not 0 < idle_w < busy_w:  # a plug may read nothing for a small board
        readings = f"{idle_w:g} W at rest and {busy_w:g} W meanwhile"
        power_text = f"{power_text} reads {readings}"
        return measured, None, power_text
    return measured, (idle_w, busy_w), power_text


def _find_target(on: str, base: str | None, name: str | None) -> Target:
    """Return the target that a profile is made from, with the name of the new one."""
    from edgekit_runtime.errors import TargetError
    from edgekit_toolkit.commands.hil.bench_machine import find_names
    from edgekit_toolkit.targets.loader import find_user_targets, load_target

    own_base, own_name = find_names(on) or (None, None)
    if (base := base or own_base) is None:
        raise click.UsageError(f"{on} is no bench, whose file would say it: name the device's --target")
    target = load_target(base, [find_user_targets()])
    if target.device_times is not None:  # its power may be that of another device
        raise TargetError(f"{target.name} is a profile; name the target that it was made of")
    if base != own_base or own_name is None:
        own_name = f"{target.name}-profiled"
    return replace(target, name=name or own_name, aliases=(), device_times=None)


def _check(target: Target, path: Path, *, is_forced: bool) -> None:
    """Refuse a profile that could not be used, before anything is measured."""
    from edgekit_runtime.errors import OutputError, TargetError

    if target.backend.default == "tensorrt":
        raise TargetError(
            f"{target.name}: expected a target that prefers onnxruntime or LiteRT, got TensorRT, whose"
            " latency is modelled by coefficients; measure packages on the device: edgekit-device tournament"
        )
    if path.exists() and not is_forced:
        raise OutputError(f"{path} exists; give another --name, or --force to replace it")


def _show(console: Console, name: str, path: Path, found: MeasuredProfile, errors: dict[str, float]) -> None:
    from edgekit_toolkit.console import print_line, print_section
    from edgekit_toolkit.costs.device_transfer import CACHE_BYTES

    fitted = found.fitted
    ratios = [(kind, f"{ratio:.2f} x as long as here") for kind, ratio in sorted(fitted.ratios.items())]
    spilled = f"{fitted.s_per_spilled_byte * 1e12:.0f} us more for each MB"
    spill_row = (f"data of a kernel beyond {CACHE_BYTES >> 10} KiB", spilled)
    thread_row, sharing = ("threads", "none that help"), fitted.sharing
    if sharing.share < 1:
        long = f"what a kernel takes beyond {sharing.alone_s * 1e6:.0f} us here"
        thread_row = (long, f"{sharing.share:.0%} of it, since threads share it")
    print_section(console, "Kernels on the device", [*ratios, spill_row, thread_row])
    worst = sorted(errors, key=lambda network: -abs(errors[network]))[:5]
    rows = [(network, f"{errors[network]:+.1%}") for network in worst]
    print_section(console, "Worst predictions of networks that the fit had not seen", rows)
    console.print()
    if found.watts is None:
        power = f"that of the target, not measured; meter: {found.power_text}"
    else:
        power = f"{found.watts[0]:.3g} W at rest, {found.watts[1]:.3g} W meanwhile ({found.power_text})"
    print_line(console, "Power:", power, indent=0)
    print_line(console, "Uncertainty:", f"{fitted.uncertainty:.2f} x", indent=0)
    print_line(console, "Target:", str(path), indent=0)
    print_line(console, "Next:", f"edgekit package MODEL --target {name}", indent=0)
