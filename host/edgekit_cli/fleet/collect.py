"""`edgekit fleet collect`: take in the results of devices without a network."""

from __future__ import annotations

from pathlib import Path

import click

from edgekit_cli.fleet.fleet_options import find_actor, folder_and_json_options, open_fleet, print_json


@click.command("collect")
@click.argument(
    "results", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@folder_and_json_options
def command(results: tuple[Path, ...], *, path: Path | None, as_json: bool) -> None:
    """Take in RESULTS, which `edgekit-device fleet apply` has written, as if they came over the network."""
    with open_fleet(path) as (_folder, store):
        from edgekit_fleet.operations.bundles import collect_results

        collected = collect_results(store, results, actor=find_actor())
    if as_json:
        print_json(collected)
        return
    from edgekit_runtime.system.shown_text import clean

    for result in collected:
        refused = "".join(f", {count} refused ({reason})" for reason, count in result.refused.items())
        click.echo(clean(f"{result.path}: {result.device}, {result.accepted} messages taken in{refused}"))
