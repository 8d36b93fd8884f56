"""`edgekit-device agent`."""

import argparse
import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Final

from edgekit_runtime.commands.command import Outcome
from edgekit_runtime.commands.installed import add_arguments, find_keys

_UNIT: Final = """\
[Unit]
Description=edgekit fleet agent
After=network-online.target edgekit.service
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart={command} agent
Environment=EDGEKIT_STATE=/var/lib/edgekit EDGEKIT_HOME=/etc/edgekit EDGEKIT_CACHE=/var/cache/edgekit
Restart=always
RestartSec=2s
TimeoutStopSec=30s
# The user of the service: the agent writes the slots that the service reads.
User=edgekit
Group=edgekit
StateDirectory=edgekit
ReadWritePaths=/etc/edgekit/fleet /etc/edgekit/keys
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectControlGroups=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=yes
LockPersonality=yes
SystemCallArchitectures=native
UMask=0027

[Install]
WantedBy=multi-user.target
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of this command."""
    parser = commands.add_parser(
        "agent",
        help="do what the fleet wants of this device, and report",
        description="Keep a connection to the fleet that this device has joined; download, install and try"
        " what it wants; report what is true here. Until SIGTERM or Ctrl-C.",
    )
    add_arguments(parser)
    parser.add_argument("--cap-kbit-s", type=float, metavar="N", help="most bandwidth of downloads")
    parser.add_argument("--month-mb", type=float, metavar="N", help="most downloads in a month, megabytes")
    parser.add_argument("--print-unit", action="store_true", help="print a systemd unit, and do not run")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Outcome:
    """Run until told to stop."""
    if arguments.print_unit:
        unit = _UNIT.format(command=Path(sys.executable).parent / "edgekit-device")
        return Outcome({"unit": unit}, unit.splitlines())
    from edgekit_runtime.agent.agent import Agent, AgentOptions
    from edgekit_runtime.agent.enrolment import read_membership, renew
    from edgekit_runtime.agent.execution.install import Installer
    from edgekit_runtime.errors import EdgekitError
    from edgekit_runtime.slots import Slots
    from edgekit_runtime.system.paths import find_config_folder, find_state_folder
    from edgekit_runtime.trust.trust_store import TrustStore

    logging.getLogger("edgekit_runtime").setLevel(logging.INFO)
    config = find_config_folder()
    state: Path = arguments.state or find_state_folder()
    cap, month = arguments.cap_kbit_s, arguments.month_mb
    options = AgentOptions(
        bytes_per_s=None if cap is None else cap * 125.0,
        month_bytes=None if month is None else int(month * 1e6),
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    while not stop.is_set():
        member = read_membership(config)
        trust = TrustStore.from_folder(find_keys(arguments))
        installer = Installer(Slots(state, trust, member.enrolment.target), arguments.socket)
        if Agent(member, state / "fleet", installer, options).run(stop) == "renew":
            try:
                renew(config)
            except EdgekitError as error:
                logging.getLogger(__name__).warning("the certificate is not renewed: %s", error)
    return Outcome({"stopped": True}, ["stopped"])
