"""`edgekit hil image`: creates the system of the emulated ARM64 devices from Debian packages."""

from __future__ import annotations

import time

import click
from rich.console import Console

from edgekit_cli.progress import ProgressBar


@click.command("image")
@click.option("--rebuild", is_flag=True, help="Create the image even if one with the same packages exists.")
def command(*, rebuild: bool) -> None:
    """Create the ARM64 system of the benches arm64-userland and arm64-booted, unless it exists.

    The command needs root. It uses the Debian mirror and release in this machine's apt configuration. The
    image is stored in your cache folder, which keeps the two newest images.
    """
    from edgekit_hil.drivers.boot_strategy import save_snapshot
    from edgekit_hil.images.image_cache import make_image

    begun_s = time.monotonic()
    with ProgressBar(Console(stderr=True)) as bar:
        image = make_image(bar.show, rebuild=rebuild)
        if not image.snapshot.exists():
            save_snapshot(image, bar.show)
    click.echo(f"{image.folder} ({time.monotonic() - begun_s:.0f} s)")
