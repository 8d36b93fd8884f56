"""`edgekit offload demo`: emulates a slow device, a server and a changing link on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgekit_cli.number_range import NumberRange

if TYPE_CHECKING:
    from edgekit_host.emulation.testbed import LinkKind
    from edgekit_offload.demo.demo_package import DemoPackage
    from edgekit_offload.demo.director import DemoSetup

_LEAST_PHASES_S = 10.0
_START_S = 8.0  # of the processes, before the first phase


@click.command("demo")
@click.option(
    "--seconds",
    type=NumberRange(min=20, max=600),
    default=60,
    show_default=True,
    help="Total duration. Planning comes first, and the phases take at least 10 s.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("offload-demo.html"),
    show_default=True,
    help="File in which the page is saved.",
)
@click.option("--proxy", is_flag=True, help="Limit the link with a proxy, even as root.")
@click.option("--no-browser", is_flag=True, help="Do not open the page that follows the demo.")
@click.option("--json", "as_json", is_flag=True, help="Print the measurements as JSON.")
def command(seconds: float, *, output: Path, proxy: bool, no_browser: bool, as_json: bool) -> None:
    """Show offloading while the link slows down and the server is first loaded and then killed.

    A slow device and a server run on this machine. The bandwidth between them goes from 20 to 2 Mbit/s and
    back. A local web page shows the demo and is saved at the end. With root rights, cgroups slow the device
    down, and iproute2 links two network namespaces. Otherwise a proxy limits the link, and the page says so.
    """
    import contextlib
    import json
    import tempfile
    import time

    from edgekit_cli.progress import ProgressBar
    from edgekit_host.emulation.testbed import can_make_namespaces
    from edgekit_host.terminal import open_console
    from edgekit_offload.demo.demo_package import make_demo_package
    from edgekit_offload.demo.demo_page import render_saved_page, summarize
    from edgekit_offload.demo.director import run_demo
    from edgekit_offload.demo.live_server import LiveServer
    from edgekit_offload.demo.recording import Recording, to_json
    from edgekit_runtime.system.atomic_files import check_target, write_text_atomically

    check_target(output)
    begin_s = time.monotonic()
    console = open_console(stderr=as_json)
    states = [Recording(model="a network is made and planned")]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgekit-demo-")))
        live = stack.enter_context(LiveServer(lambda: states[-1]))
        console.print(f"The demo is at {live.url}")
        if not no_browser:
            _open_browser(live.url)
        progress = stack.enter_context(ProgressBar(console))
        packed = make_demo_package(folder, progress.show)

        def show(recording: Recording) -> None:
            states.append(recording)
            progress.show(recording.begun[-1].phase.title if recording.begun else "starting")

        kind: LinkKind = "namespaces" if can_make_namespaces() and not proxy else "proxy"
        setup = prepare(folder, packed, is_tls=kind == "namespaces")
        rest_s = seconds - (time.monotonic() - begin_s) - _START_S
        recording = run_demo(setup, seconds=max(rest_s, _LEAST_PHASES_S), kind=kind, on_change=show)
    write_text_atomically(output, render_saved_page(recording))
    if as_json:
        click.echo(json.dumps(to_json(recording)))
        return
    for line in summarize(recording):
        console.print(line)
    console.print(f"Written: {output}")


def prepare(folder: Path, packed: DemoPackage, *, is_tls: bool) -> DemoSetup:
    """Return the setup of the demo. If `is_tls`, write a certificate and a token into `folder`."""
    import sys

    from edgekit_host.emulation.namespace_link import SERVER_HOST
    from edgekit_offload.demo.demo_model import DESCRIPTION, OUTPUT
    from edgekit_offload.demo.demo_package import write_certificate, write_token
    from edgekit_offload.demo.director import DemoSetup

    secured: list[str] = []
    token_file, ca_file = "", ""
    if is_tls:
        certificate, private = write_certificate(folder, SERVER_HOST)
        token_file, ca_file = str(write_token(folder)), str(certificate)
        secured = ["--tls-cert", ca_file, "--tls-key", str(private), "--token-file", token_file]

    def serve(host: str, port: int) -> list[str]:
        command = [sys.executable, "-m", "edgekit_cli", "offload", "serve", str(packed.path)]
        return [
            *command,
            "--host",
            host,
            "--port",
            str(port),
            "--keys",
            str(packed.keys),
            "--threads",
            "1",
            *secured,
        ]

    return DemoSetup(
        folder=folder,
        package=packed.path,
        home=packed.keys.parent,
        serve=serve,
        scheme="https" if is_tls else "http",
        token_file=token_file,
        ca_file=ca_file,
        plans=packed.plans,
        requests=packed.requests,
        output=OUTPUT,
        model=DESCRIPTION,
    )


def _open_browser(url: str) -> None:
    """Open a page if there is a graphical display. Otherwise a text browser would occupy the terminal."""
    import os
    import sys
    import webbrowser

    if sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(url)
