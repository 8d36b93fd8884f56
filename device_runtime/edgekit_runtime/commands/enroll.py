"""`edgekit-device enroll`."""

import argparse
import os
import platform
import sys
from typing import Final

from edgekit_runtime import __version__
from edgekit_runtime.commands.command import Outcome
from edgekit_runtime.system.paths import find_config_folder, find_device_target

_TARGETS: Final = {"x86_64": "x86-64"}  # machines with one target


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "enroll",
        help="join a fleet by a one-time code",
        description="Create a key on this device, get a certificate for it from the fleet that made the"
        " code, and store the keys that this device must trust. `edgekit-device agent` then does what the"
        " fleet wants.",
    )
    parser.add_argument(
        "--code", required=True, help="code from `edgekit fleet enroll`, or - for standard input"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Outcome:
    from edgekit_runtime.agent.documents import EnrolmentCode
    from edgekit_runtime.agent.enrolment import enrol
    from edgekit_runtime.trust.keys import list_keys

    facts = {"runtime": __version__, "machine": platform.machine(), "hostname": os.uname().nodename[:60]}
    if target := find_device_target() or _TARGETS.get(platform.machine()):
        facts["target"] = target
    code = sys.stdin.readline().strip() if arguments.code == "-" else arguments.code
    keys = find_config_folder() / "keys"
    before = list_keys(keys)
    member = enrol(EnrolmentCode.parse(code), find_config_folder(), facts)
    gone = sorted({path.name for path in before} - {path.name for path in list_keys(keys)})
    enrolment = member.enrolment
    document = {
        "device": enrolment.device,
        "target": enrolment.target,
        "brokers": list(enrolment.brokers),
        "untrusted": gone,
    }
    lines = [
        f"this device is {enrolment.device}, target {enrolment.target}",
        *(f"  trusted no more, a key of the fleet before: {name}" for name in gone),
        "  next: edgekit-device agent, or a unit for systemd: edgekit-device agent --print-unit",
    ]
    return Outcome(document, lines)
