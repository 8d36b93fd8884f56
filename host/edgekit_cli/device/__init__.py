"""`edgekit device`: the runtime on a device reached by ssh. Each command is a file in this folder."""

from edgekit_cli.lazy_commands import OrderedGroup, lazy_commands

# In the order of a first use. The text is what `edgekit device --help` shows.
COMMANDS = {
    "install": "Install or upgrade edgekit on a device.",
    "status": "Show what a device is and what runs on it.",
    "uninstall": "Remove edgekit from a device.",
}

command = OrderedGroup(
    "device",
    commands=lazy_commands(COMMANDS, __name__),
    help="Set up a device over ssh. The device needs no network of its own.",
)
