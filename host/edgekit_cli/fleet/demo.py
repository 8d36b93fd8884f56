"""`edgekit fleet demo`: a fleet on this machine in less than two minutes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from edgekit_cli.fleet.fleet_options import check_installed, print_json
from edgekit_cli.shared_options import as_json_option

if TYPE_CHECKING:
    from edgekit_fleet.demo.director import DemoStep


_SHOWN_S = 0.05


@click.command("demo")
@as_json_option
def command(*, as_json: bool) -> None:
    """Show a fleet with a good release, a bad one that is stopped automatically, and a network failure.

    The manager, its broker and one device with service and agent run on this machine, and 20 more devices are
    simulated. The demo leaves no files.
    """
    import time

    begin_s = time.monotonic()
    check_installed()
    from edgekit_cli.fleet.demo_packages import make_setup
    from edgekit_fleet.demo.director import DemoStep, run_demo
    from edgekit_fleet.demo.temporary_folder import temporary_folder
    from edgekit_fleet.demo.unpacked_mosquitto import provide_mosquitto
    from edgekit_host.terminal import open_console, print_line

    console = open_console()
    steps: list[DemoStep] = []

    def show(step: DemoStep) -> None:
        steps.append(step)
        if not as_json:
            head = f"{step.at_s:5.1f} s "
            duration = f" ({step.took_s:.1f} s)" if step.took_s >= _SHOWN_S else ""
            print_line(console, head, (f"{step.what}{duration}:", "bold"), step.why, indent=9)

    provide_mosquitto(lambda text: click.echo(text, err=True))
    with temporary_folder("edgekit-fleet-demo-") as folder:
        setup = make_setup(folder)
        now_s = time.monotonic() - begin_s
        why = f"version {setup.bad.version} is bad: noise on its weights, as after a training that went wrong"
        show(DemoStep(at_s=now_s, took_s=now_s, what="four versions of a model are packaged", why=why))
        run_demo(setup, begin_s, show)
    if as_json:
        print_json({"seconds": time.monotonic() - begin_s, "steps": steps})
