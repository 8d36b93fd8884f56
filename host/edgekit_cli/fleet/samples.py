"""`edgekit fleet samples`: collects samples of inputs from devices in the field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from edgekit_cli.fleet.fleet_options import folder_and_json_options, format_time, show
from edgekit_cli.fleet.fleet_server import connect
from edgekit_cli.number_range import NumberRange
from edgekit_runtime.system.shown_text import clean

if TYPE_CHECKING:
    from edgekit_fleet.operations.samples import SampleOrderStatus, SampleStatus

_RATE: Final = re.compile(r"([0-9.]+)/(day|hour)")


@click.group("samples")
def command() -> None:
    """Collect samples of a model's requests from devices, for labelling and for judging the next version."""


@command.command("on")
@click.option(
    "--days",
    type=NumberRange(min=0.01, max=3650),
    help="Number of days for which samples are stored.  [default: 90, or as before]",
)
@click.option(
    "--max-gb",
    type=NumberRange(min=0.001, max=10**5),
    help="Maximum size of all samples in GB.  [default: 21, or as before]",
)
@folder_and_json_options
def switch_on(days: float | None, max_gb: float | None, path: Path | None, as_json: bool) -> None:
    """Allow devices to send samples, and people to order them."""
    max_bytes = None if max_gb is None else round(max_gb * 1e9)
    _switch(path, as_json=as_json, is_on=True, days=days, max_bytes=max_bytes)


@command.command("off")
@folder_and_json_options
def switch_off(path: Path | None, as_json: bool) -> None:
    """Receive no more samples. Stored samples are kept until their storage time ends."""
    _switch(path, as_json=as_json, is_on=False)


@command.command("start")
@click.option("--model", required=True, help="Name of the model.")
@click.option(
    "--to",
    "selector",
    default="all",
    help='Selector of devices, such as "site=lyon". New devices are included.',
)
@click.option(
    "--when",
    "triggers",
    default="random",
    help="Reasons to keep a request, joined by ' or ': uncertain[:THRESHOLD], disagreement, drift,"
    " random[:PER_DAY], kept.",
    show_default=True,
)
@click.option(
    "--rate",
    default="20/day",
    help="Maximum rate of samples per device, as N/day or N/hour.",
    show_default=True,
)
@click.option(
    "--max-mb",
    type=NumberRange(min=0.001, max=10**6),
    default=50,
    help="Maximum size of the samples on a device in MB.",
    show_default=True,
)
@click.option(
    "--days",
    type=NumberRange(min=0.01, max=3650),
    default=14,
    help="Duration of the order in days.",
    show_default=True,
)
@click.option(
    "--window",
    help="Local time of day in which devices send samples, such as 01:00-04:00.  [default: any time]",
)
@folder_and_json_options
def start(
    *,
    model: str,
    selector: str,
    triggers: str,
    rate: str,
    max_mb: float,
    days: float,
    window: str | None,
    path: Path | None,
    as_json: bool,
) -> None:
    """Order samples of a model from devices."""
    per_day = _read_rate(rate)
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.samples import start_samples
        from edgekit_fleet.operations.samples import StartSamples, parse_triggers

        request = StartSamples(
            model=model,
            selector=selector,
            triggers=parse_triggers(triggers),
            per_day=per_day,
            max_bytes=round(max_mb * 1e6),
            days=days,
            window=window,
        )
        order = fleet.call(start_samples, request)
    lines = [_describe_order(order), f"End it early: edgekit fleet samples stop {order.id}"]
    show(order, lines, as_json=as_json)


@command.command("stop")
@click.argument("order")
@folder_and_json_options
def stop(order: str, path: Path | None, as_json: bool) -> None:
    """Stop the order ORDER. Received samples are kept."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.endpoint import Named
        from edgekit_fleet.api.endpoints.samples import stop_samples

        status = fleet.call(stop_samples, Named(name=order))
    show(status, [_describe_order(status)], as_json=as_json)


@command.command("status")
@folder_and_json_options
def show_status(path: Path | None, as_json: bool) -> None:
    """Show the orders for samples, the number of received samples, and whether collection is on."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.endpoint import Nothing
        from edgekit_fleet.api.endpoints.samples import get_sample_status

        status = fleet.call(get_sample_status, Nothing())
    _show_status(status, as_json=as_json)


@command.command("list")
@click.option("--model", default="", help="Only samples of this model.")
@click.option("--device", default="", help="Only samples of this device.")
@click.option("--trigger", default="", help="Only samples that this trigger drew.")
@folder_and_json_options
def list_command(model: str, device: str, trigger: str, path: Path | None, as_json: bool) -> None:
    """List the received samples, newest first."""
    with connect(path) as fleet:
        from edgekit_fleet.api.client import list_all
        from edgekit_fleet.api.endpoints.samples import ListSamples, list_samples

        choice = {"model": model, "device": device, "trigger": trigger}
        items = list(list_all(fleet, list_samples, ListSamples, **choice))
    lines = []
    for item in items:
        facts = (
            item.id,
            item.device,
            f"{item.model} {item.version}",
            ", ".join(item.triggers),
            f"p {item.probability:.3g}",
            item.media_type or "tensors",
            f"{item.size_bytes / 1e3:.1f} kB",
            format_time(item.received_at),
        )
        lines.append("  ".join(facts))
    show(items, lines or ["there is no such sample"], as_json=as_json)


@command.command("get")
@click.option("--model", required=True, help="Name of the model.")
@click.option("--device", default="", help="Only samples of this device.")
@click.option("--order", default="", help="Only samples of this order.")
@click.option("-o", "--output", "folder", type=click.Path(path_type=Path, file_okay=False), required=True)
@folder_and_json_options
def get(*, model: str, device: str, order: str, folder: Path, path: Path | None, as_json: bool) -> None:
    """Download samples for `edgekit package` into a folder. Samples that are already there are skipped.

    Then fill in the column `label` in labels.csv. `edgekit package` weights each sample by its selection
    probability in selection.csv.
    """
    with connect(path) as fleet:
        from edgekit_fleet.api.field_folder import write_field_folder

        count, faults = write_field_folder(fleet, folder, model=model, device=device, order=order)
    for fault in faults if not as_json else ():
        click.echo(clean(f"left out: {fault}"), err=True)
    lines = [f"{count} new samples in {folder}"]
    if count:
        labels = folder / "labels.csv"
        task = (
            f"Fill in 'label' in {labels}" if labels.exists() else "Add labels as an array 'y' to each .npz"
        )
        lines.append(f"{task}, then:")
        lines.append(f"  edgekit package MODEL --target TARGET --calibration {folder} --eval {folder}")
    show({"folder": str(folder), "new": count, "faults": faults}, lines, as_json=as_json)


@command.command("delete")
@click.argument("ids", nargs=-1)
@click.option("--model", default="", help="Samples of this model.")
@click.option("--device", default="", help="Samples of this device.")
@click.option("--order", default="", help="Samples of this order.")
@click.option(
    "--older-than-days",
    type=NumberRange(min=0, max=3650),
    default=0,
    help="Samples that are older than this number of days.",
)
@folder_and_json_options
def delete(
    *,
    ids: tuple[str, ...],
    model: str,
    device: str,
    order: str,
    older_than_days: float,
    path: Path | None,
    as_json: bool,
) -> None:
    """Delete the samples that match IDS, if given, and every given option. They cannot be restored."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.samples import delete_samples
        from edgekit_fleet.operations.samples import SampleChoice

        choice = SampleChoice(
            ids=ids, model=model, device=device, order=order, older_than_days=older_than_days
        )
        count = fleet.call(delete_samples, choice).count
    show({"deleted": count}, [f"{count} samples are deleted"], as_json=as_json)


def _switch(path: Path | None, *, as_json: bool, is_on: bool, **changes: float | None) -> None:
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.samples import SwitchSamples, switch_samples

        status = fleet.call(switch_samples, SwitchSamples(is_on=is_on, **changes))  # type: ignore[arg-type]
    _show_status(status, as_json=as_json)


def _read_rate(text: str) -> float:
    match = _RATE.fullmatch(text)
    try:
        per_day = float(match[1]) * (24 if match[2] == "hour" else 1) if match is not None else 0.0
    except ValueError:
        per_day = 0.0
    if not 0 < per_day <= 10**6:
        raise click.UsageError(f"--rate {text!r}: expected N/day or N/hour, such as 20/day")
    return per_day


def _show_status(status: SampleStatus, *, as_json: bool) -> None:
    first = "This fleet takes no samples; an administrator allows it: edgekit fleet samples on"
    if status.is_on:
        first = f"This fleet takes samples, and stores them for {status.days:g} days."
    counts = ", ".join(f"{count} {kind}" for kind, count in status.by_trigger.items())
    sizes = f"{status.size_bytes / 1e6:.1f} of {status.max_bytes / 1e6:.0f} MB"
    stored = f"{status.samples} samples, {sizes}{f': {counts}' if counts else ''}"
    show(status, [first, stored, *map(_describe_order, status.orders)], as_json=as_json)


def _describe_order(order: SampleOrderStatus) -> str:
    triggers = " or ".join(trigger.kind for trigger in order.triggers)
    rate = f"{order.per_day:g} a day and device, until {format_time(order.ends_at)}"
    devices = f"{order.model} of {order.selector}"
    return f"{order.id}  {order.state}  {devices}: {triggers}, {rate}; {order.samples} samples"
