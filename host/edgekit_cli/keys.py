"""`edgekit keys`: manages the keys that sign packages and the trusted keys. It never prints private keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgekit_cli.shared_options import as_json_option

if TYPE_CHECKING:
    from edgekit_toolkit.packaging.signing_keys import KeyInfo

_a_file = click.Path(path_type=Path)


@click.group("keys", no_args_is_help=True)
def command() -> None:
    """Create, list, export and trust the keys that sign packages.

    All keys are stored by name in the folder $EDGEKIT_HOME/keys or ~/.config/edgekit/keys, and this machine
    trusts them. A key can sign if its private part is stored here, or in an HSM or KMS.
    """


@command.command()
@click.argument("name", default="default")
@as_json_option
def generate(name: str, *, as_json: bool) -> None:
    """Create an ed25519 key called NAME, which signs on this machine."""
    from edgekit_toolkit.packaging.signing_keys import generate_key

    _report(generate_key(name), f"made, and trusted here; edgekit keys export {name} FILE shares it", as_json)


@command.command("list")
@as_json_option
def list_command(*, as_json: bool) -> None:
    """List the trusted keys, and show which of them can sign and how."""
    from edgekit_toolkit.packaging.signing_keys import list_keys

    keys = list_keys()
    if as_json:
        import dataclasses
        import json

        click.echo(json.dumps([dataclasses.asdict(key) for key in keys], indent=2))
        return
    from edgekit_host.terminal import open_console, print_line, print_section
    from edgekit_runtime.system.paths import find_keys_folder

    console = open_console()
    if not keys:
        print_line(console, f"No keys in {find_keys_folder()}; `edgekit keys generate` makes one.")
        return
    print_line(console, f"{len(keys)} in {find_keys_folder()}")
    for key in keys:
        print_section(console, key.name, [(_describe(key),), (f"key id {key.key_id}",)])


@command.command()
@click.argument("name")
@click.argument("file", type=_a_file)
@as_json_option
def export(name: str, file: Path, *, as_json: bool) -> None:
    """Write the public key NAME to a new FILE, so that others can trust it."""
    from edgekit_runtime.errors import OutputError
    from edgekit_toolkit.packaging.signing_keys import export_key

    if file.exists():  # it may be the only copy of a private key
        raise OutputError(f"{file} exists, and is not replaced; choose another file or remove it")
    _report(export_key(name, file), f"public key written to {file}; `edgekit keys trust` takes it", as_json)


@command.command()
@click.argument("file", type=_a_file)
@click.argument("name")
@as_json_option
def trust(file: Path, name: str, *, as_json: bool) -> None:
    """Trust the public key in FILE (PEM) under NAME.

    The owner of the private key can then sign packages for this machine, so compare the key id with the
    owner.
    """
    from edgekit_toolkit.packaging.signing_keys import trust_key

    _report(trust_key(file, name), "trusted here from now on", as_json)


@command.command()
@click.argument("name")
@click.argument("uri")
@click.argument("file", type=_a_file)
@as_json_option
def register(name: str, uri: str, file: Path, *, as_json: bool) -> None:
    """Register a key in an HSM or KMS under NAME, to sign with it.

    URI is the address of the key in the form of securesystemslib (hsm:, awskms:, gcpkms:, azurekms:, ...).
    FILE contains its public key in PEM.
    """
    from edgekit_toolkit.packaging.signing_keys import register_uri

    _report(register_uri(name, uri, file), "trusted here, and signs from now on", as_json)


def _report(key: KeyInfo, done: str, as_json: bool) -> None:
    if as_json:
        import dataclasses
        import json

        click.echo(json.dumps(dataclasses.asdict(key), indent=2))
        return
    from edgekit_host.terminal import open_console, print_line

    console = open_console()
    print_line(console, f"{key.name}:", done)
    print_line(console, f"key id {key.key_id}")


def _describe(key: KeyInfo) -> str:
    if key.signs_with is None:
        return "is trusted; cannot sign here"
    return f"signs with {'the private key here' if key.signs_with == 'file' else key.signs_with}"
