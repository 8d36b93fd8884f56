"""`edgekit targets`: lists the targets, or shows the figures of one target with their sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from edgekit_cli.shared_options import as_json_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from edgekit_host.evidence import Evidence, Figure, NetworkTimes
    from edgekit_toolkit.targets.figures import Source
    from edgekit_toolkit.targets.spec import Release, Target

_INDENT = 2


@click.command("targets")
@click.argument("name", required=False)
@as_json_option
def command(name: str | None, *, as_json: bool) -> None:
    """List the targets, or show the one called NAME (a name, an alias, or the path of a .toml file)."""
    from edgekit_toolkit.targets.loader import find_user_targets, list_targets, load_target

    dirs = [find_user_targets()]
    targets = [load_target(name, dirs)] if name else list_targets(dirs)
    if as_json:
        import dataclasses
        import json

        documents = [
            {**dataclasses.asdict(target), "evidence": [dataclasses.asdict(run) for run in _seen(target)]}
            for target in targets
        ]
        click.echo(json.dumps(documents[0] if name else documents, indent=2))
        return
    from edgekit_host.terminal import open_console

    console = open_console()
    if name:
        _show(console, targets[0])
    else:
        _list(console, targets)


def _list(console: Console, targets: Sequence[Target]) -> None:
    from edgekit_host.terminal import print_line

    for target in targets:
        aliases = [f"= {alias}" for alias in target.aliases]
        print_line(console, (" ".join([target.name, *aliases]), "bold"), target.title, indent=_INDENT)
        facts = (
            " > ".join(target.backend.names),
            f"{target.quantization.form} int8",
            f"{target.memory.free.value / 1e9:.1f} GB free",
            f"power mode {', '.join(mode.name for mode in target.power.modes)}",
            f"seen: {', '.join(_runs(target)) or 'no run'}",
        )
        print_line(console, "; ".join(facts), first_indent=_INDENT, indent=_INDENT)
    console.print()
    hint = "`edgekit targets NAME` shows the figures of one, and where each comes from."
    print_line(console, (hint, "dim"))


def _runs(target: Target) -> list[str]:
    """Return observations and measurements on devices of this class, with dates."""
    runs = [f"{evidence.kind} {evidence.date[:10]}" for evidence in _seen(target)]
    if (costs := _find_costs(target)) is not None:
        evidence, times = costs
        runs.append(f"costs measured on {evidence.device.model}, {times.date}")
    profiled = [source for source in target.sources if target.device_times and source.key == "profile"]
    return [*runs, *(f"profile {source.date}" for source in profiled)]


def _show(console: Console, target: Target) -> None:
    from edgekit_host.terminal import print_line, print_section

    form = target.quantization
    print_line(console, (f"{target.name}: {target.title}", "bold"))
    if target.notes:
        print_line(console, target.notes)
    facts = (
        ("aliases", ", ".join(target.aliases) or "none"),
        ("architecture", f"{target.arch}, {target.cpu.model} ({', '.join(target.cpu.isa)})"),
        ("accelerator", target.accelerator or "none"),
        ("storage", target.storage.kind),
        ("backend", f"{target.backend.default}, fallback {target.backend.fallback or 'none'}"),
        *([("optional", ", ".join(target.backend.optional))] if target.backend.optional else []),
        ("int8 form", f"{form.form}, {form.activations} activations, {form.weights} weights"),
        ("power modes", _power_modes(target)),
        *((release.name, _engines(release)) for release in target.releases),
    )
    print_section(console, "Class", facts)
    _show_evidence(console, target)
    figures = [
        (path, f"{figure.value:.4g}", figure.unit, figure.status, figure.source)
        for path, figure in target.figures()
    ]
    print_section(console, "Figures: value, unit, status, source", figures)
    print_section(console, "Sources", [_describe_source(source) for source in target.sources])


def _describe_source(source: Source) -> tuple[str, str]:
    parts = (source.title, source.where, source.derivation, source.date)
    return source.key, "; ".join(part for part in parts if part)


def _seen(target: Target) -> list[Evidence]:
    """Return the newest evidence of each bench with this target."""
    from edgekit_host.evidence import read_newest

    return read_newest(target.name)


def _find_costs(target: Target) -> tuple[Evidence, NetworkTimes] | None:
    """Return the evidence with measured costs of a target and its times, or None."""
    from edgekit_host.evidence import read_measured_costs

    if not read_measured_costs(target.name):
        return None  # without the slow import
    from edgekit_toolkit.measurement.measured_costs import find_costs

    return find_costs(target)


def _describe_costs(target: Target) -> str:
    """Describe the source of the latency and energy costs, and their errors."""
    active = target.power.mode(target.power.default_mode).active
    energy = f"Energy is that times {active.value:g} W ({active.status})."
    if (times := target.device_times) is not None:
        from edgekit_runtime.system.engines import parse_engine
        from edgekit_toolkit.measurement.device_profile import is_current

        if parse_engine(times.engine).name != target.backend.default or not is_current(times):
            return (
                f"Latency is modelled by the coefficients below: the profile, of {times.engine}, is of other"
                " networks than those of this release, or of another engine than the target prefers; measure"
                f" it again: edgekit profile --on. {energy}"
            )
        return f"Latency is predicted by the profile of source `profile`. {energy}"
    if (costs := _find_costs(target)) is None:
        return "Latency, unless measured here, and energy are modelled by the coefficients below."
    evidence, measured = costs
    if measured.power is not None:
        energy = f"Energy is that times {measured.power.active_w:g} W, which a meter read in that run."
    text = (
        f"Latency is calibrated: measured on {evidence.device.model} by bench {evidence.bench},"
        f" {measured.date} ({evidence.file_name})."
    )
    if errors := evidence.latency_errors:
        worst = max(errors, key=abs)
        text += f" That run predicted {len(errors)} latencies of whole models, {worst:+.0%} off at worst."
    return f"{text} {energy}"


def _show_evidence(console: Console, target: Target) -> None:
    """Show the results of bench runs, each with its source."""
    from edgekit_host.evidence import describe_source, read_checkout
    from edgekit_host.terminal import print_line, print_section

    console.print()
    print_line(console, _describe_costs(target))
    runs = _seen(target)
    if not runs:
        print_line(
            console,
            "No run on a bench yet: `edgekit hil run` shows how far off a prediction is on yours.",
        )
    current = read_checkout()
    for evidence in runs:
        device = evidence.device
        engines = [f"{name} {version}" for name, version in device.engines.items()]
        facts = [device.model, device.os, f"kernel {device.kernel}", *engines, device.clock]
        title = (
            f"{evidence.kind}: bench {evidence.bench}, {', '.join(filter(None, facts))};"
            f" {evidence.date[:10]}, {describe_source(evidence, current)}; tests: {evidence.describe_tests()}"
        )
        print_section(console, title, [_describe_figure(figure) for figure in evidence.figures])


def _describe_figure(figure: Figure) -> tuple[str, str, str]:
    value = "none" if figure.value is None else f"{figure.value:.4g} {figure.unit}"
    if figure.predicted is not None:
        value += f" (predicted {figure.predicted:.4g} {figure.unit}"
        value += ")" if figure.error is None else f", {figure.error:+.0%} off)"
    return figure.name, value, figure.method


def _power_modes(target: Target) -> str:
    """Return a text with the names for `edgekit package --power-mode`."""
    names = [mode.name for mode in target.power.modes]
    if len(names) == 1:
        return f"{names[0]}, the only one"
    default = target.power.default_mode
    return ", ".join(f"{name} (default)" if name == default else name for name in names) + " (--power-mode)"


def _engines(release: Release) -> str:
    versions = ", ".join(f"{engine} {version}" for engine, version in sorted(release.engines.items()))
    return f"Python {release.python}; {versions}"
