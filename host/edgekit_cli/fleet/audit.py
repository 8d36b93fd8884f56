"""`edgekit fleet audit`: shows who did what and when."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekit_cli.fleet.fleet_options import folder_and_json_options, format_time, print_json
from edgekit_cli.fleet.fleet_server import connect
from edgekit_runtime.errors import FleetError

if TYPE_CHECKING:
    from edgekit_fleet.api.client import FleetCaller
    from edgekit_fleet.operations.records import AuditRecord


@click.command("audit")
@click.argument("subject", required=False)
@click.option("--action", help="Show only actions that begin with this text, such as alarm or rollout.")
@click.option(
    "--limit",
    default=50,
    show_default=True,
    type=click.IntRange(1, 100_000),
    help="Maximum number of entries.",
)
@folder_and_json_options
def command(subject: str | None, *, action: str | None, limit: int, path: Path | None, as_json: bool) -> None:
    """Show the newest entries of the audit log. With SUBJECT, only those about a device, release or rollout.

    The command also checks the whole log, and fails if an entry was changed.
    """
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.devices import check_audit
        from edgekit_fleet.api.endpoints.endpoint import Nothing

        records = _read_newest(fleet, subject or "", action or "", limit)
        broken = fleet.call(check_audit, Nothing()).broken
    if as_json:
        print_json(records)
    else:
        from edgekit_host.terminal import open_console, print_line

        console = open_console()
        for record in records:
            detail = _describe(record.detail)
            words = (
                format_time(record.at),
                (record.action, "bold"),
                record.subject,
                f"by {record.actor}",
                detail,
            )
            print_line(console, *words, indent=4)
    if broken is not None:
        raise FleetError(f"entry {broken} of the audit log was changed, or one before it is missing")


def _read_newest(fleet: FleetCaller, subject: str, action: str, limit: int) -> list[AuditRecord]:
    from edgekit_fleet.api.endpoints.devices import ReadAudit, read_audit

    records: list[AuditRecord] = []
    before: int | None = 0
    while before is not None and len(records) < limit:
        size = min(limit - len(records), 1000)
        page = fleet.call(read_audit, ReadAudit(subject=subject, action=action, limit=size, before=before))
        records = [*page.items, *records]
        before = page.next
    return records


def _describe(detail: Mapping[str, Any]) -> str:
    """Return the content of an entry, as a sentence for rollout events and as JSON otherwise."""
    if "entries" in detail:
        return "; ".join(map(_describe_step, detail["entries"]))
    return json.dumps(detail, sort_keys=True) if detail else ""


def _describe_step(step: Mapping[str, Any]) -> str:
    kind = step["kind"]
    if kind == "decided":
        return str(step["sentence"])
    if kind == "answered":
        words = (step["device"], step.get("outcome") or "", step.get("code") or "", step.get("fault") or "")
        figures = "; ".join(
            f"{reading['model']}: "
            + ", ".join(f"{name} {value:.3g}" for name, value in reading["measures"].items())
            for reading in step.get("readings", ())
        )
        return " ".join(filter(None, (*words, figures)))
    if kind == "ordered":
        return " ".join(filter(None, ("order:", step["order"], step.get("note") or "")))
    return f"{kind}: {len(step['devices'])} devices"
