"""`edgekit-device agent`."""

import argparse
import logging
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edgekit_runtime.commands.command import Outcome, positive
from edgekit_runtime.commands.installed import add_arguments, find_keys

if TYPE_CHECKING:
    from edgekit_runtime.agent.link_watch import Renewal

_RENEWAL_S: Final = 60.0
_NOT_DUE: Final = 3  # exit code of `agent.enrolment`
_LOCK_S: Final = 10.0  # for an agent that is about to end

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
# Reads the last lines of its own unit and the service's, if the fleet asks; --no-logs forbids that.
SupplementaryGroups=systemd-journal
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
    parser = commands.add_parser(
        "agent",
        help="do what the fleet wants of this device, and report",
        description="Connect to the fleet of this device. Download, install and try the versions that it"
        " wants, and report the state of this device, until SIGTERM or Ctrl-C.",
    )
    add_arguments(parser)
    parser.add_argument("--cap-kbit-s", type=positive, metavar="N", help="maximum bandwidth of downloads")
    parser.add_argument(
        "--month-mb", type=positive, metavar="N", help="maximum downloads in a month, megabytes"
    )
    parser.add_argument(
        "--live",
        default="",
        metavar="URL",
        help="address of this device's live page, for the fleet's console",
    )
    parser.add_argument("--no-logs", action="store_true", help="never show log lines to the fleet")
    parser.add_argument(
        "--no-settings",
        action="store_true",
        help="ignore settings of the fleet, which cannot change the options above",
    )
    parser.add_argument("--print-unit", action="store_true", help="print a systemd unit and exit")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Outcome:
    """Run until told to stop. With `--print-unit`, only return a systemd unit."""
    if arguments.print_unit:
        unit = _UNIT.format(command=Path(sys.executable).parent / "edgekit-device")
        return Outcome({"unit": unit}, unit.splitlines())
    from edgekit_runtime.agent.agent import Agent, AgentOptions
    from edgekit_runtime.agent.execution.install import Installer
    from edgekit_runtime.agent.execution.step_child import ChildSteps, StepPlaces
    from edgekit_runtime.agent.journal import hold_journal
    from edgekit_runtime.agent.link_watch import RefusalPause
    from edgekit_runtime.agent.membership import read_membership
    from edgekit_runtime.slots import Slots
    from edgekit_runtime.system.paths import find_config_folder, find_state_folder
    from edgekit_runtime.system.recent_log import keep_lines
    from edgekit_runtime.trust.verifier_process import VerifyingProcess

    logging.getLogger("edgekit_runtime").setLevel(logging.INFO)
    keep_lines()
    config, keys = find_config_folder(), find_keys(arguments)
    state: Path = arguments.state or find_state_folder()
    socket_path = arguments.socket
    limits = {"cap-kbit-s": arguments.cap_kbit_s, "month-mb": arguments.month_mb}
    options = AgentOptions(
        fixed={key: str(limit) for key, limit in limits.items() if limit is not None},
        live_url=arguments.live,
        shows_logs=not arguments.no_logs,
        takes_settings=not arguments.no_settings,
    )
    folders = StepPlaces(
        config=str(config.absolute()),
        state=str(state.absolute()),
        keys=str(keys.absolute()),
        socket_path=None if socket_path is None else str(socket_path.absolute()),
    )
    stop, pause = threading.Event(), RefusalPause()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with hold_journal(state / "fleet", _LOCK_S), VerifyingProcess(keys) as trust:
        trust.check_keys()
        trust.stop_when_idle()
        while not stop.is_set():
            member = read_membership(config)
            installer = Installer(Slots(state, trust, member.enrolment.target), socket_path)
            parts = (member, state / "fleet", installer, options)
            renew = partial(renew_certificate, config)
            Agent(*parts, carrier=ChildSteps(folders), renew=renew, pause=pause).run(stop)
    return Outcome({"stopped": True}, ["stopped"])


def renew_certificate(config: Path, is_refused: bool, stated_s: float) -> "Renewal":
    """Fetch and store a new certificate if a renewal is due.

    If the broker refuses this device (`is_refused`), a renewal is always due. For `stated_s` see
    `TrustedTime`.
    """
    from edgekit_runtime.agent.link_watch import Renewal
    from edgekit_runtime.system.child_process import ChildProcess

    options = [str(stated_s), *(["--refused"] if is_refused else [])]
    with ChildProcess("edgekit_runtime.agent.enrolment", str(config.absolute()), *options) as child:
        code = child.wait(_RENEWAL_S)
        problem = "" if code in (0, _NOT_DUE) else child.last_line
    if problem:
        logging.getLogger(__name__).warning("the certificate is not renewed: %s", problem)
    return Renewal(is_new=code == 0, problem=problem)
