"""`edgekit fleet webhook`: manages URLs that are notified of actions."""

from __future__ import annotations

from pathlib import Path

import click

from edgekit_cli.fleet.fleet_options import folder_and_json_options, show
from edgekit_cli.fleet.fleet_server import connect


@click.group("webhook")
def command() -> None:
    """Send signed messages to a URL when something happens."""


@command.command("add")
@click.argument("name")
@click.argument("url")
@click.option(
    "--action",
    "actions",
    multiple=True,
    help="Only actions that begin with this text, such as rollout.  [default: all]",
)
@folder_and_json_options
def add(name: str, url: str, actions: tuple[str, ...], path: Path | None, as_json: bool) -> None:
    """Send a message to URL for each action from now on, and print the secret that signs the messages."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.access import AddWebhook, add_webhook

        webhook = fleet.call(add_webhook, AddWebhook(name=name, url=url, actions=actions))
    show(webhook, [webhook.secret], as_json=as_json)


@command.command("list")
@folder_and_json_options
def list_command(path: Path | None, as_json: bool) -> None:
    """List the webhooks, and whether their messages are delivered."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.access import list_webhooks
        from edgekit_fleet.api.endpoints.endpoint import Nothing

        webhooks = fleet.call(list_webhooks, Nothing()).items
    lines = []
    for webhook in webhooks:
        state = f"failed {webhook.failures} times: {webhook.because}" if webhook.failures else "well"
        lines.append(f"{webhook.name}: {webhook.url}, {state}")
    none = "no webhooks; make one: edgekit fleet webhook add NAME URL"
    show(webhooks, lines or [none], as_json=as_json)


@command.command("remove")
@click.argument("name")
@folder_and_json_options
def remove(name: str, path: Path | None, as_json: bool) -> None:
    """Delete the webhook NAME."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.access import remove_webhook
        from edgekit_fleet.api.endpoints.endpoint import Named

        webhooks = fleet.call(remove_webhook, Named(name=name)).items
    show(webhooks, [f"{name} is removed; {len(webhooks)} webhooks are left"], as_json=as_json)
