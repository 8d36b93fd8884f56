"""`edgekit fleet bundle` and `collect`: files for devices without a network, and their results."""

from __future__ import annotations

from pathlib import Path

import click

from edgekit_cli.fleet.fleet_options import (
    find_actor,
    folder_and_json_options,
    format_time,
    open_fleet,
    show,
)


@click.command("bundle")
@click.argument("release")
@click.option(
    "--to", "selector", required=True, metavar="SELECTOR", help='Selector of devices, such as "site=lyon".'
)
@click.option(
    "-o",
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Bundle file to write.",
)
@folder_and_json_options
def command(release: str, *, selector: str, out: Path, path: Path | None, as_json: bool) -> None:
    """Write RELEASE and signed documents for devices into one file, which a person carries to them.

    First start a rollout to the devices: `edgekit fleet rollout start RELEASE --to SELECTOR --waves 100%`.
    Then run `edgekit-device fleet apply FILE` on each device, and `edgekit fleet collect RESULTS` here.
    """
    with open_fleet(path) as (folder, store):
        from edgekit_fleet.operations.bundles import write_bundle

        bundle = write_bundle(folder, store, release, selector, out, actor=find_actor())
    lines = [
        f"{out}  {bundle.size_bytes / 1e6:.3f} MB, good until {format_time(bundle.expires_at)}",
        f"  for {len(bundle.devices)} devices: {', '.join(bundle.devices[:10])}",
        *(f"  not for {name}: {reason}" for name, reason in bundle.refused),
    ]
    show(bundle, lines, as_json=as_json)


@click.command("collect")
@click.argument(
    "results", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@folder_and_json_options
def collect(results: tuple[Path, ...], *, path: Path | None, as_json: bool) -> None:
    """Read RESULTS of `edgekit-device fleet apply`, as if they had arrived over the network."""
    with open_fleet(path) as (_folder, store):
        from edgekit_fleet.operations.bundles import collect_results

        collected = collect_results(store, results, actor=find_actor())
    lines = []
    for result in collected:
        refused = "".join(f", {count} refused ({reason})" for reason, count in result.refused.items())
        lines.append(f"{result.path}: {result.device}, {result.accepted} messages taken in{refused}")
    show(collected, lines, as_json=as_json)
