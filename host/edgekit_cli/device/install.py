"""`edgekit device install`: installs or updates edgekit on a device."""

from __future__ import annotations

import json
from pathlib import Path

import click

from edgekit_cli.device.device_options import host_option, parse_host, ssh_config_option
from edgekit_cli.shared_options import as_json_option
from edgekit_runtime.system.engines import list_registered

_ENGINES = [engine.name for engine in list_registered() if engine.installation.pinned_list]


@click.command("install")
@host_option
@click.option(
    "--engine",
    type=click.Choice(_ENGINES),
    default="ort",
    show_default=True,
    help="Engine to install. TensorRT is also used if JetPack provides it.",
)
@click.option(
    "--trust",
    "keys",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Public key (NAME.pub.pem) whose packages the device accepts. May be repeated.  [default: your"
    " keys]",
)
@click.option(
    "--target", default="", help="Target of the packages that the device accepts, as in `edgekit targets`."
)
@click.option(
    "--code", default="", help="One-time code of `edgekit fleet enroll`: the device joins the fleet."
)
@ssh_config_option
@as_json_option
def command(
    *,
    host: str,
    engine: str,
    keys: tuple[Path, ...],
    target: str,
    code: str,
    ssh_config: Path | None,
    as_json: bool,
) -> None:
    """Install edgekit on a device, or update it. Only what differs is changed.

    This machine downloads the packages for the device's Python and architecture. Both machines check the
    hashes. The new version replaces the old one only if it starts.
    """
    device = parse_host(host, ssh_config)
    from edgekit_cli.progress import ProgressBar
    from edgekit_hil.provisioning.install import InstallRequest, install
    from edgekit_host.terminal import open_console
    from edgekit_runtime.dataclass_json import to_plain
    from edgekit_runtime.errors import ProvisioningError
    from edgekit_runtime.system.paths import find_keys_folder
    from edgekit_runtime.trust.keys import PUBLIC_KEY_SUFFIX, list_keys
    from edgekit_toolkit.targets.loader import find_user_targets, load_target

    if wrong := [str(key) for key in keys if not key.name.endswith(PUBLIC_KEY_SUFFIX)]:
        raise ProvisioningError(f"{', '.join(wrong)}: expected files named NAME{PUBLIC_KEY_SUFFIX}")
    if target:  # packages state the name, never an alias or a file
        target = load_target(target, [find_user_targets()]).name
    request = InstallRequest(
        engine=engine,
        keys=keys or tuple(list_keys(find_keys_folder())),
        target=target,
        code=code,
    )
    with ProgressBar(open_console(stderr=True)) as progress:
        installation = install(device, request, progress.show)
    if as_json:
        body = {
            "host": host,
            "release": installation.release,
            "changed": installation.changed,
            "notes": installation.notes,
        }
        click.echo(json.dumps({**body, "facts": to_plain(installation.facts)}, indent=2))
        return
    for change in installation.changed:
        click.echo(f"  {change}")
    for note in installation.notes:
        click.echo(f"  note: {note}")
    if not request.keys:
        click.echo(
            "  note: the device trusts no key yet; make one with `edgekit keys generate`, then run this again"
        )
    click.echo(
        f"{host}: {'set up' if installation.changed else 'nothing to change'}, release {installation.release}"
    )
    click.echo(f"  next: edgekit device status --host {host}")
