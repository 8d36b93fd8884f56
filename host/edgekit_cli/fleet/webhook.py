"""`edgekit fleet webhook`: addresses that are told of what happens."""

from __future__ import annotations

from pathlib import Path

import click

from edgekit_cli.fleet.fleet_options import folder_and_json_options, print_json
from edgekit_cli.fleet.fleet_server import connect


@click.group("webhook")
def command() -> None:
    """Call a URL when something happens, with signed messages."""


@command.command("add")
@click.argument("name")
@click.argument("url")
@click.option(
    "--action", "actions", multiple=True, help="Only actions that begin so, such as rollout.  [default: all]"
)
@folder_and_json_options
def add(name: str, url: str, actions: tuple[str, ...], path: Path | None, as_json: bool) -> None:
    """Call URL for each action from now on; print the secret that signs the messages."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.access import AddWebhook, add_webhook

        webhook = fleet.call(add_webhook, AddWebhook(name=name, url=url, actions=actions))
    if as_json:
        print_json(webhook)
    else:
        click.echo(webhook.secret)


@command.command("list")
@folder_and_json_options
def list_command(path: Path | None, as_json: bool) -> None:
    """List the webhooks, and whether their messages arrive."""
    from edgekit_runtime.system.shown_text import clean

    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.access import list_webhooks
        from edgekit_fleet.api.endpoints.endpoint import Nothing

        webhooks = fleet.call(list_webhooks, Nothing()).items
    if as_json:
        print_json(webhooks)
        return
    for webhook in webhooks:
        state = f"failed {webhook.failures} times: {webhook.because}" if webhook.failures else "well"
        click.echo(clean(f"{webhook.name}: {webhook.url}, {state}"))
    if not webhooks:
        click.echo("no webhooks; make one: edgekit fleet webhook add NAME URL")


@command.command("remove")
@click.argument("name")
@folder_and_json_options
def remove(name: str, path: Path | None, as_json: bool) -> None:
    """Delete the webhook NAME."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.access import remove_webhook
        from edgekit_fleet.api.endpoints.endpoint import Named

        webhooks = fleet.call(remove_webhook, Named(name=name)).items
    if as_json:
        print_json(webhooks)
    else:
        click.echo(f"{name} is removed; {len(webhooks)} webhooks are left")
