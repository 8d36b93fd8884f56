"""`edgekit-device fleet status`."""

import argparse
from pathlib import Path
from typing import Any

from edgekit_runtime.commands.command import Outcome
from edgekit_runtime.system.paths import find_config_folder, find_state_folder


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of this command."""
    parser = commands.add_parser("fleet", help="show what the fleet wants of this device")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    status = actions.add_parser(
        "status",
        help="show the fleet, the desired version and the last updates",
        description="Show what the journal of the agent holds; the agent need not run.",
    )
    status.add_argument("--state", type=Path, metavar="FOLDER", help="where models are installed")
    status.add_argument("--json", action="store_true", help="print one JSON object")
    status.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Outcome:
    """Show the journal."""
    from edgekit_runtime.agent.documents import Desired
    from edgekit_runtime.agent.enrolment import read_membership
    from edgekit_runtime.agent.journal import read_journal
    from edgekit_runtime.agent.signing import unseal
    from edgekit_runtime.dataclass_json import to_plain

    member = read_membership(find_config_folder())
    record = read_journal((arguments.state or find_state_folder()) / "fleet" / "journal.json")
    desired = None
    if record.desired:
        desired = unseal(record.desired.encode(), "desired", Desired, member.manager_keys, "journal")
    found = member.enrolment
    document: dict[str, Any] = {
        "device": found.device,
        "target": found.target,
        "desired": None if desired is None else to_plain(desired),
        "executions": [to_plain(one.report) for one in record.executions],
        "month": record.month,
        "metered_bytes": record.metered_bytes,
    }
    lines = [f"{found.device}, target {found.target}, broker {', '.join(found.brokers)}"]
    if desired is None:
        lines.append("  no desired document yet; does edgekit-device agent run?")
    else:
        lines += [
            f"  {one.model}: desired {one.version} (document {desired.version})" for one in desired.models
        ]
    for one in record.executions:
        report = one.report
        reason = f": {report.reason}" if report.reason else ""
        lines.append(f"  {report.model} {report.version} {report.state}{reason}")
    return Outcome(document, lines)
