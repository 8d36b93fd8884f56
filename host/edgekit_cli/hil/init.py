"""`edgekit hil init`: describes a bench, and checks that its device answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgekit_runtime.errors import BenchError, OutputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgekit_hil.benches.opening import Bench

_NONE = "none"
_SENSORS = "sensors"
_COMMAND = "command:"


def _read_meter(text: str) -> str:
    """Parse the text for a power meter.

    Raises:
        click.BadParameter: The text is none of `sensors`, `command:COMMAND` and `none`.
    """
    has_command = text.startswith(_COMMAND) and text.removeprefix(_COMMAND).strip()
    if text not in (_SENSORS, _NONE) and not has_command:
        raise click.BadParameter(f"{text!r}: expected {_SENSORS}, {_COMMAND}COMMAND or {_NONE}")
    return text


@click.command("init")
@click.option("--host", help="Device, as USER@HOST[:PORT].")
@click.option("--target", help="Target of the device, as in `edgekit targets`.")
@click.option(
    "--power",
    metavar="SWITCH",
    help="Power switch: MODEL:HOST:OUTLET with a model of labgrid's NetworkPowerPort, usb:HUB:PORT for a hub"
    " that uhubctl switches, or none.  [default: none]",
)
@click.option(
    "--meter",
    type=_read_meter,
    metavar="METER",
    help="Power meter: `sensors` for the device's own INA3221, `command:COMMAND` for a command on this"
    " machine that prints watts, or none.  [default: sensors]",
)
@click.option(
    "--key", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Private key of ssh."
)
@click.option(
    "--python",
    default="/opt/edgekit/current/bin/python",
    show_default=True,
    help="Python with the runtime on the device.  [default: that of `edgekit device install`]",
)
@click.option("--name", help="Name of the bench.  [default: the host]")
@click.option(
    "--out",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("bench.yaml"),
    show_default=True,
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
def command(
    *,
    host: str | None,
    target: str | None,
    power: str | None,
    meter: str | None,
    key: Path | None,
    python: str,
    name: str | None,
    out: Path,
    force: bool,
) -> None:
    """Write the environment file of a bench, then connect to its device and show facts about it.

    The command asks for everything that no option states.
    """
    from edgekit_hil.benches.bench_file import read_bench
    from edgekit_hil.benches.bench_writer import SshBench, write_bench
    from edgekit_hil.benches.opening import open_bench
    from edgekit_toolkit.targets.loader import find_user_targets, list_targets, load_target

    if out.exists() and not force:
        raise OutputError(f"{out} exists; --force replaces it, -o writes another file")
    host = host or _ask("Host of the device, as USER@HOST[:PORT]", "--host")
    target = target or _ask("Target, one of `edgekit targets`", "--target")
    loaded = load_target(target, [find_user_targets()])
    if loaded.name not in {target.name for target in list_targets([find_user_targets()])}:
        raise BenchError(
            f"{target}: tests take a target by its name; copy the file to"
            f" {find_user_targets()}/{loaded.name}.toml"
        )
    power = power or _ask("Power switch, as MODEL:HOST:OUTLET or usb:HUB:PORT", "--power", _NONE)
    meter = meter or _ask(
        f"Power meter of the device: {_SENSORS} (such as an INA3221), {_COMMAND}COMMAND, or {_NONE}",
        "--meter",
        _SENSORS,
        _read_meter,
    )
    bench = SshBench.parse(host, power=None if power == _NONE else power)
    write_bench(
        out,
        bench,
        settings={
            "name": name or bench.address.replace(".", "-"),
            "kind": "real",
            "target": loaded.name,
            "architecture": loaded.arch,
            "python": python,
        },
        key=key,
        meter=None if meter == _NONE else meter,
    )
    file = read_bench(out)
    click.echo(f"written: {out}")
    try:
        with open_bench(file) as opened:
            _show(opened)
    except BenchError as error:
        raise BenchError(f"{out} is written, but the bench is not usable yet: {error}") from error


def _ask(
    question: str, option: str, default: str | None = None, read: Callable[[str], str] | None = None
) -> str:
    """Ask the user, and return the answer.

    `default` is the answer if the user enters nothing or cannot be asked.

    Raises:
        click.UsageError: The user cannot be asked, and there is no default.
    """
    if sys.stdin.isatty():
        return str(click.prompt(question, default=default, value_proc=read))
    if default is None:
        raise click.UsageError(f"nobody to ask here: name it as {option}")
    return default


def _show(bench: Bench) -> None:
    from edgekit_host.terminal import open_console, print_section

    facts = bench.facts
    engines = ", ".join(f"{name} {version}" for name, version in facts.engines.items())
    rows = [
        ("device", f"{facts.model}, {facts.architecture}, {facts.memory_bytes / 1e9:.1f} GB"),
        ("system", f"{facts.os}, kernel {facts.kernel}"),
        ("Python", facts.python),
        ("engines", engines or "none: the tests of engines will be skipped"),
        (
            "power",
            "none: tests with power cuts will be skipped" if bench.power is None else bench.power_label,
        ),
        ("power meter", bench.meter_text),
        ("free disk", f"{facts.free_bytes / 1e9:.1f} GB"),
    ]
    print_section(open_console(), "Found", rows)
    click.echo(f"next: edgekit hil run --bench {bench.file.path}")
