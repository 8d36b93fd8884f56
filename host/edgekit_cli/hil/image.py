"""`edgekit hil image`: the system of the emulated ARM64 devices, made from Debian's packages."""

from __future__ import annotations

import time

import click
from rich.console import Console

from edgekit_cli.progress import ProgressBar


@click.command("image")
@click.option("--rebuild", is_flag=True, help="Make it even if there is one with the same packages.")
def command(*, rebuild: bool) -> None:
    """Make the ARM64 system of the benches arm64-userland and arm64-booted, unless it exists.

    It needs root, and takes Debian's packages from the mirror and the release that this machine's apt uses.
    The image stays in your cache; the two newest are kept.
    """
    from edgekit_hil.drivers.boot_strategy import save_snapshot
    from edgekit_hil.images.image_cache import make_image

    begun_s = time.monotonic()
    with ProgressBar(Console(stderr=True)) as bar:
        image = make_image(bar.show, rebuild=rebuild)
        if not image.snapshot.exists():
            save_snapshot(image, bar.show)
    click.echo(f"{image.folder} ({time.monotonic() - begun_s:.0f} s)")
