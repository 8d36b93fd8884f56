"""`edgekit-device keys`: the keys whose packages are trusted on this device, and the device's own key."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from edgekit_runtime.commands.command import Outcome
from edgekit_runtime.commands.installed import find_keys
from edgekit_runtime.trust.keys import PUBLIC_KEY_SUFFIX
from edgekit_runtime.trust.trusted_keys import TrustedKey, list_trusted, remove_key, trust_key


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "keys",
        help="list, trust or remove the keys whose packages are accepted, or show the key of this device",
        description="Packages are accepted if one of these keys has signed them. They are in"
        " $EDGEKIT_HOME/keys, else ~/.config/edgekit/keys. Write access to this folder decides what is"
        " trusted.",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="show the keys with their ids")
    listing.set_defaults(run=run_list)
    trusting = actions.add_parser(
        "trust",
        help="trust a public key from now on",
        description="Trust the public key in FILE (PEM) from now on. Its owner can then sign packages for"
        " this device, so compare the key id with the owner.",
    )
    trusting.add_argument("file", type=Path, metavar="FILE", help="public key, from `edgekit keys export`")
    trusting.add_argument("name", nargs="?", metavar="NAME", help="name of the key (default: that of FILE)")
    trusting.set_defaults(run=run_trust)
    removing = actions.add_parser("remove", help="stop trusting a key")
    removing.add_argument("name", metavar="NAME")
    removing.set_defaults(run=run_remove)
    device = actions.add_parser(
        "device",
        help="show the public key of this device, for which packages are encrypted",
        description="Print the public key of this device for `edgekit package --encrypt-for`. The first call"
        " creates the key in the TPM 2.0 if there is one, else under a key that the boot loads into the"
        " kernel's keyring, else in a file. It is in $EDGEKIT_HOME/keys, else ~/.config/edgekit/keys. Run"
        " this as the user of the service.",
    )
    device.add_argument(
        "--holder",
        metavar="NAME",
        help="who holds a new key: tpm, keyring or file (default: the first possible)",
    )
    device.add_argument("--json", action="store_true", help="print one JSON object")
    device.set_defaults(run=run_device)
    for action in (listing, trusting, removing):
        action.add_argument("--keys", type=Path, metavar="FOLDER", help="folder of keys (default: your own)")
        action.add_argument("--json", action="store_true", help="print one JSON object")


def run_list(arguments: argparse.Namespace) -> Outcome:
    folder = find_keys(arguments)
    keys = list_trusted(folder)
    lines = [f"{key.name}  {key.key_id}" for key in keys] or [
        f"no keys in {folder}; `edgekit-device keys trust FILE` adds one"
    ]
    return Outcome({"folder": str(folder), "keys": [asdict(key) for key in keys]}, lines)


def run_trust(arguments: argparse.Namespace) -> Outcome:
    file: Path = arguments.file
    name = arguments.name or file.name.removesuffix(PUBLIC_KEY_SUFFIX).removesuffix(".pem")
    return _describe(trust_key(file, name, find_keys(arguments)), "is trusted from now on", arguments)


def run_remove(arguments: argparse.Namespace) -> Outcome:
    return _describe(remove_key(arguments.name, find_keys(arguments)), "is trusted no more", arguments)


def run_device(arguments: argparse.Namespace) -> Outcome:
    """Return the public key of this device. The first call creates the key."""
    from edgekit_runtime.encryption.device_key import make_device_key

    key = make_device_key(holder=arguments.holder or "")
    document = {
        "key_id": key.key_id,
        "holder": key.holder.name,
        "protection": key.holder.sentence,
        "public_key": key.pem,
    }
    print(f"key id {key.key_id}, {key.holder.sentence}", file=sys.stderr)
    return Outcome(document, key.pem.splitlines())


def _describe(key: TrustedKey, done: str, arguments: argparse.Namespace) -> Outcome:
    folder = find_keys(arguments)
    lines = [f"{key.name} {done} ({folder})", f"  key id {key.key_id}"]
    return Outcome({"folder": str(folder), **asdict(key)}, lines)
