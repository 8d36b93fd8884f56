"""`edgekit fleet`: manages devices and what they run. Each file has one command or a few related ones."""

from pathlib import Path

import click

from edgekit_cli.fleet.fleet_options import keep_server
from edgekit_cli.lazy_commands import OrderedGroup, lazy_commands

# In the order of a first use. The text is what `edgekit fleet --help` shows.
COMMANDS = {
    "demo": "See a fleet on this machine: a good release, a bad one, a network cut.",
    "up": "Start the manager, its broker and its web server on this machine.",
    "enroll": "Create one-time codes with which devices join.",
    "release": "Make a release of packages.",
    "withdraw": "Withdraw a release, so that no rollout can offer it.",
    "rollout": "Plan, start, watch, pause and stop rollouts.",
    "verdict": "Show whether a rollout passes or stops, for a CI job.",
    "evidence": "Add the evidence of an external judge to a rollout.",
    "rollback": "Return devices to the versions that they ran before.",
    "devices": "List the devices.",
    "device": "Show, tag, configure or revoke one device, or show its logs.",
    "tag": "Set tags of a device, after a question if it would get another version.",
    "stream": "Set which models run on which cameras of a device.",
    "samples": "Collect requests from the field, for labels and for the next version.",
    "why": "Explain in one sentence why a device runs its versions.",
    "audit": "Show who did what, when.",
    "keys": "Replace the keys that sign packages and documents.",
    "doctor": "Test a broker, and list what expires in a fleet.",
    "bundle": "Write a release into a file, for devices without a network.",
    "collect": "Read the results of devices without a network.",
    "backup": "Write a whole fleet into one file.",
    "restore": "Restore a fleet from a backup.",
    "user": "Add, list and remove users of the console.",
    "token": "Make, list and revoke tokens of programs.",
    "webhook": "Call a URL when something happens.",
}

# Commands in the file of another one.
_FILES = {
    "withdraw": "release",
    "rollback": "rollout",
    "evidence": "verdict",
    "devices": "device",
    "tag": "device",
    "why": "device",
    "collect": "bundle",
    "restore": "backup",
}

command = OrderedGroup(
    "fleet",
    commands=lazy_commands(COMMANDS, __name__, _FILES),
    help="Manage devices: who they are, what they run, and what they should run.",
    callback=keep_server,
    params=[
        click.Option(
            ["--server"],
            envvar="EDGEKIT_FLEET_SERVER",
            metavar="URL",
            help="A fleet on another machine, as https://HOST:8444.  [default: the fleet in --folder]",
        ),
        click.Option(
            ["--token-file"],
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="File with the token for the server.  [default: EDGEKIT_FLEET_TOKEN]",
        ),
        click.Option(
            ["--ca"],
            envvar="EDGEKIT_FLEET_CA",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="Certificate of the authority that signed the server's certificate, as for `curl --cacert`."
            "  [default: the authorities of this system]",
        ),
    ],
)
