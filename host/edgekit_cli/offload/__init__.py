"""`edgekit offload`: splits a model between device and server. Each command is a file in this folder."""

import click

from edgekit_cli.lazy_commands import OrderedGroup, lazy_commands

# In the order of a first use. The text is what `edgekit offload --help` shows.
COMMANDS = {
    "demo": "See a slow device, a server and a changing link, on this machine.",
    "profile": "Measure a model's kernels, and the link to a server.",
    "plan": "Find the best ways to run a model between device and server, and package them.",
    "serve": "Serve the server parts of packages.",
    "export": "Write the server parts for Triton, KServe or HAProxy.",
}

command = OrderedGroup(
    "offload",
    commands=lazy_commands(COMMANDS, __name__),
    help="Split a model between device and server, from measured costs.",
)

insecure_option = click.option(
    "--insecure",
    is_flag=True,
    help="Allow plain HTTP to another machine. Anybody on the way can then read what is sent, and answer"
    " with wrong numbers. A token is never sent over plain HTTP.",
)
