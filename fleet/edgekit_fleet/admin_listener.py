"""Starts the server for users and programs: the console at `/` and the HTTP interface at `/api/v1`.

It has its own port, so a firewall can separate it from the server for devices. It uses TLS, except on
loopback.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgekit_fleet.access.first_admin import FirstAdminCode, has_users
from edgekit_fleet.api.endpoints.endpoint import Fleet
from edgekit_fleet.api.routes import join_apps, make_api
from edgekit_fleet.console.app import make_app
from edgekit_fleet.console.fleet_page import warm_up
from edgekit_fleet.console.shell import Console
from edgekit_fleet.identity.authority import Authority
from edgekit_fleet.operations.webhooks import WebhookSender
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings, bracket
from edgekit_fleet.web.server import WebServer


@dataclass(frozen=True, slots=True)
class AdminListener:
    """The running server.

    Attributes:
        first_link: The link that creates the first administrator. It is empty if the fleet has users.
    """

    url: str
    first_link: str


@contextlib.contextmanager
def serve_people(
    store: Store, folder: FleetFolder, settings: FleetSettings, authority: Authority, name: str
) -> Iterator[AdminListener]:
    """Serve the console and the HTTP interface, and send webhooks, until the `with` block ends.

    The server uses the certificate in the settings, or a certificate of `authority` if none is set.
    `name` is the DNS name or address under which users reach this machine.

    Raises:
        TransportError: The port is taken or may not be used.
        ConfigError: The certificate or key cannot be read.
        OutputError: The store cannot be read.
    """
    pair = None
    if settings.console_certificate:
        pair = Path(settings.console_certificate), Path(settings.console_key)
    elif not settings.is_local:
        pair = authority.pair("server")
    code = FirstAdminCode()
    console = Console(store, folder, settings, code)
    app = join_apps(make_api(Fleet(folder, store)), make_app(console))
    sender = WebhookSender(store)
    warm_up(store)
    url = f"{'http' if pair is None else 'https'}://{bracket(name)}:{settings.console_port}"
    with (
        console.closing,
        WebServer(
            app,
            settings.host,
            settings.console_port,
            pair,
            option="--console-port",
            trusted_proxies=settings.trusted_proxies,
        ),
    ):
        sender.start()
        try:
            with store.snapshot() as session:
                link = "" if has_users(session) else f"{url}/first?code={code.secret}"
            yield AdminListener(url, link)
        finally:
            sender.close()
