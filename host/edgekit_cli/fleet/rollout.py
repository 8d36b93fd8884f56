"""`edgekit fleet rollout`: rolls a release out to devices in waves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekit_cli.fleet.fleet_options import (
    folder_and_json_options,
    folder_option,
    format_time,
    show,
)
from edgekit_cli.fleet.fleet_server import connect
from edgekit_cli.number_range import NumberRange
from edgekit_cli.shared_options import as_json_option
from edgekit_fleet.rollouts.gate_table import LIMITS
from edgekit_fleet.rollouts.outside_gates import OutsideGate
from edgekit_runtime.dataclass_json import from_plain, list_settings, to_plain
from edgekit_runtime.system.shown_text import clean

if TYPE_CHECKING:
    from edgekit_fleet.api.client import FleetCaller
    from edgekit_fleet.operations.rollouts import RolloutPlan, RolloutSummary
    from edgekit_fleet.rollouts.progress import Order

_MOST_LISTED = 20
_WATCH_S = 0.5
_ORDERS = ("new-first", "old-first", "unloaded")
_OPEN = ("running", "paused", "returning")


def _by_model(
    convert: Callable[[str], Any],
) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], dict[str, Any]]:
    """Return a parser of `VALUE`, for all models, and `MODEL=VALUE`. The key for all models is empty."""

    def read(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
        try:
            return {model: convert(text) for model, _, text in (value.rpartition("=") for value in values)}
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return read


def _read_order(text: str) -> str:
    if text not in _ORDERS:
        raise ValueError(f"{text!r} is none of {', '.join(_ORDERS)}")
    return text


def _read_priority(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is no whole number from 0")
    return int(text)


def _read_evidence(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, OutsideGate]:
    """Parse outside gates such as `conversion worse=lower limit=-0.02`, and return them by name."""
    import shlex

    from edgekit_runtime.errors import ConfigError

    kinds = {setting.name: setting.kind for setting in list_settings(OutsideGate)}
    gates = {}
    try:
        for value in values:
            name, *words = shlex.split(value)
            pairs = [word.partition("=")[::2] for word in words]
            gates[name] = from_plain(OutsideGate, {key: kinds[key](text) for key, text in pairs}, name)
    except (ValueError, KeyError, ConfigError) as error:
        keys = ", ".join(f"{key}=" for key in kinds)
        raise click.BadParameter(f"{error}; expected NAME and some of {keys}") from error
    return gates


@click.group("rollout")
def command() -> None:
    """Roll a release out to devices in waves, which stop automatically if the release is bad."""


def _request_options(function: Callable[..., None]) -> Callable[..., None]:
    options = (
        click.argument("release"),
        click.option(
            "--to",
            "selector",
            required=True,
            metavar="SELECTOR",
            help='Selector of devices, such as "class=jetson and site=lyon", or "all".',
        ),
        click.option(
            "--waves",
            default="1%,10%,50%,100%",
            show_default=True,
            help="Shares or numbers of devices after each wave.",
        ),
        click.option(
            "--minimum",
            type=click.IntRange(min=1),
            help="Number of devices in the first step.  [default: a tenth, from 1 to 30]",
        ),
        folder_and_json_options,
    )
    for option in reversed(options):
        function = option(function)
    return function


@command.command("plan")
@_request_options
def plan(
    release: str, *, selector: str, waves: str, minimum: int | None, path: Path | None, as_json: bool
) -> None:
    """Show which devices would get RELEASE, and why others would not. This changes nothing."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.releases import plan_rollout
        from edgekit_fleet.operations.rollouts import PlanRollout

        request = PlanRollout(release=release, selector=selector, waves=waves, minimum=minimum)
        rollout_plan = fleet.call(plan_rollout, request)
    _print_plan(rollout_plan, as_json)


def _limit_options(function: Callable[..., None]) -> Callable[..., None]:
    for limit in reversed(LIMITS):
        accepted = limit.range
        number = click.IntRange(int(accepted.least), int(accepted.most))
        function = click.option(
            f"--{limit.name.replace('_', '-')}",
            type=number if limit.is_whole else NumberRange(accepted.least, accepted.most),
            help=f"{limit.label}.  [default: {limit.shown_default}]",
        )(function)
    return function


@command.command("start")
@_request_options
@click.option("--name", default="", help="Name of the rollout.")
@click.option("--window", help="Local time of day in which devices may switch, such as 01:00-04:00.")
@click.option(
    "--approve",
    "approval",
    type=click.Choice(["none", "first", "each"]),
    default="none",
    show_default=True,
    help="Waves that wait for `rollout approve`.",
)
@click.option("--trial", type=click.Choice(["none", "shadow", "canary"]), default="none", show_default=True)
@click.option(
    "--order",
    "orders",
    multiple=True,
    callback=_by_model(_read_order),
    metavar="[MODEL=]ORDER",
    help="With new-first, the new version is loaded before the old one is unloaded, and with old-first after"
    " that. With unloaded, the old version is only unloaded.  [default: new-first]",
)
@click.option(
    "--priority",
    "priorities",
    multiple=True,
    callback=_by_model(_read_priority),
    metavar="[MODEL=]NUMBER",
    help="Models with a higher priority are updated first on a device.  [default: 0]",
)
@click.option(
    "--soak",
    "soak_s",
    type=NumberRange(min=0),
    default=300.0,
    show_default=True,
    help="Seconds after which a device with the release is judged.",
)
@click.option(
    "--spread",
    "spread_s",
    type=NumberRange(0, 86_400),
    default=0.0,
    show_default=True,
    help="Seconds over which the devices of a step begin.",
)
@click.option(
    "--retries",
    type=click.IntRange(0, 10),
    default=2,
    show_default=True,
    help="Number of further attempts on a device after a transient failure.",
)
@_limit_options
@click.option(
    "--evidence",
    multiple=True,
    callback=_read_evidence,
    metavar='"NAME KEY=VALUE..."',
    help='Gate for an external judge, such as "conversion compare=difference worse=lower limit=-0.02". See'
    " docs/explanation/rollouts.md for the keys.",
)
@click.option("--join", "is_dynamic", is_flag=True, help="Add devices that match later at the end.")
def start(release: str, *, path: Path | None, as_json: bool, **options: Any) -> None:
    """Start a rollout of RELEASE. Its devices are selected now and stay the same."""
    for option, option_by_model in (("order", "orders"), ("priority", "priorities")):
        if "" in options[option_by_model]:
            options[option] = options[option_by_model].pop("")
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.releases import start_rollout
        from edgekit_fleet.operations.rollouts import RolloutLimits, StartRollout

        limits = RolloutLimits(**{limit.name: options.pop(limit.name) for limit in LIMITS})
        summary = fleet.call(start_rollout, StartRollout(release=release, limits=limits, **options))
    _print_summaries([summary], as_json)
    if not as_json:
        click.echo(f"watch it: edgekit fleet rollout watch {summary.name}")


@command.command("list")
@folder_and_json_options
def list_command(path: Path | None, as_json: bool) -> None:
    """List the rollouts of the fleet, newest first."""
    with connect(path) as fleet:
        from edgekit_fleet.api.client import list_all
        from edgekit_fleet.api.endpoints.releases import ListPage, list_rollouts

        _print_summaries(list(list_all(fleet, list_rollouts, ListPage)), as_json)


@command.command("watch")
@click.argument("name")
@folder_and_json_options
def watch(name: str, path: Path | None, as_json: bool) -> None:
    """Watch a rollout until it ends.

    Without a terminal, the command prints a line for each change. In this case it also ends when the rollout
    pauses, because only a person can end a pause. The exit code is 1 if the rollout did not succeed.
    """
    from edgekit_host.terminal import open_console

    console, summary = open_console(), None
    with connect(path) as fleet:
        if console.is_terminal and not as_json:
            from rich.live import Live

            with Live(console=console, refresh_per_second=4) as live:
                for summary in _follow(fleet, name):
                    live.update(clean(_describe(summary)))
        else:
            for summary in _follow(fleet, name):
                _print_summaries([summary], as_json)
                if summary.state == "paused":
                    break
    if summary is None or summary.state != "succeeded":
        click.get_current_context().exit(1)


def _follow(fleet: FleetCaller, name: str) -> Iterator[RolloutSummary]:
    """Yield a rollout after each change until it has ended."""
    from edgekit_fleet.api.endpoints.releases import GetRollout, get_rollout

    last = None
    while True:
        summary = fleet.call(get_rollout, GetRollout(name=name))
        if summary != last:
            yield summary
        last = summary
        if summary.state not in _OPEN:
            return
        time.sleep(_WATCH_S)


@command.command("replay")
@click.argument("name")
@folder_and_json_options
def replay(name: str, path: Path | None, as_json: bool) -> None:
    """Repeat the decisions of a rollout from the audit log. If any differ, show them and exit with 1."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.endpoint import Named
        from edgekit_fleet.api.endpoints.releases import replay_rollout

        differences = fleet.call(replay_rollout, Named(name=name)).differences
    lines = []
    for difference in differences:
        decided = (
            "nothing"
            if difference.decided is None
            else f"{difference.decided.action}: {difference.decided.sentence}"
        )
        logged = f"logged {difference.logged.action}: {difference.logged.sentence}"
        lines += [f"{format_time(difference.at)}: {logged}", f"  decided now: {decided}"]
    plain = [to_plain(difference) for difference in differences]
    comparison = {"rollout": name, "is_equal": not differences, "differences": plain}
    equal = f"{name}: equal, its log gives every decision again"
    show(comparison, lines or [equal], as_json=as_json)
    if differences:
        click.get_current_context().exit(1)


def _make_order(order: Order, text: str) -> click.Command:
    @click.command(order, help=text)
    @click.argument("name")
    @click.option("--note", default="", help="A note for the audit log.")
    @folder_option
    @as_json_option
    def run(name: str, note: str, path: Path | None, as_json: bool) -> None:
        give_order(name, order, note, path=path, as_json=as_json)

    return run


def give_order(
    name: str, order: Order, note: str, *, path: Path | None, as_json: bool, allow_plain: bool = False
) -> None:
    """Give an order to a rollout, and print the rollout."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.releases import OrderRollout, order_rollout

        request = OrderRollout(name=name, order=order, note=note, allow_plain=allow_plain)
        _print_summaries([fleet.call(order_rollout, request)], as_json)


command.add_command(_make_order("approve", "Start the wave that waits for an approval."))
command.add_command(_make_order("pause", "Start no more devices. Gates still stop a bad release."))
command.add_command(_make_order("resume", "Continue after a pause."))
command.add_command(_make_order("abort", "Stop, and return every updated device to its old version."))


def _print_plan(rollout_plan: RolloutPlan, as_json: bool) -> None:
    plain = {**to_plain(rollout_plan), "bytes": rollout_plan.bytes}
    show(plain, _describe_plan(rollout_plan), as_json=as_json)


def _describe_plan(rollout_plan: RolloutPlan) -> Iterator[str]:
    count = len(rollout_plan.planned)
    if not count and not rollout_plan.refused:
        yield f"no device matches {rollout_plan.selector!r}; `edgekit fleet devices` lists devices and tags"
        return
    minutes = max((device.minutes for device in rollout_plan.planned), default=0.0)
    yield (
        f"devices that get it: {count}; {rollout_plan.bytes / 1e6:.1f} MB in all,"
        f" at most {minutes:.1f} minutes each (estimated)"
    )
    for device in rollout_plan.planned[:_MOST_LISTED]:
        packages = ", ".join(f"{package.model} {package.version}" for package in device.packages)
        note = f" ({device.note})" if device.note else ""
        yield f"  {device.device}: {packages}, {device.bytes / 1e6:.1f} MB{note}"
    yield from _describe_rest(count)
    yield f"devices that match and get nothing: {len(rollout_plan.refused)}"
    for refusal in rollout_plan.refused[:_MOST_LISTED]:
        yield f"  {refusal.device}: {refusal.reason}"
    yield from _describe_rest(len(rollout_plan.refused))
    if count:
        yield f"devices at the end of each wave: {', '.join(map(str, rollout_plan.waves))}"
        yield f"agreement with the version before: at least {rollout_plan.min_agreement:g}, if it is tried"


def _describe_rest(count: int) -> Iterator[str]:
    if count > _MOST_LISTED:
        yield f"  and {count - _MOST_LISTED} more; --json lists all"


def _print_summaries(rollouts: list[RolloutSummary], as_json: bool) -> None:
    none = "no rollouts; start one: edgekit fleet rollout start RELEASE --to SELECTOR"
    show(rollouts, list(map(_describe, rollouts)) or [none], as_json=as_json)


def _describe(summary: RolloutSummary) -> str:
    devices = ", ".join(f"{count} {state}" for state, count in sorted(summary.members.items()))
    wave = f"wave {summary.wave} of {len(summary.waves)}"
    return f"{summary.name}: {summary.state}, {wave}; {devices}; {summary.because}"


@click.command("rollback")
@click.argument("rollout")
@click.option("--note", default="", help="A note for the audit log.")
@click.option("--allow-plain", is_flag=True, help="Go back even from an encrypted version to a plain one.")
@folder_and_json_options
def rollback(rollout: str, *, note: str, allow_plain: bool, path: Path | None, as_json: bool) -> None:
    """Stop ROLLOUT, or undo it after its end. All devices that it updated go back to their old version."""
    give_order(rollout, "abort", note, path=path, as_json=as_json, allow_plain=allow_plain)
