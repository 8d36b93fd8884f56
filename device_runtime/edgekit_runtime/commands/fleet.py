"""`edgekit-device fleet status` and `fleet apply`."""

import argparse
import time
from pathlib import Path
from typing import Any

from edgekit_runtime.commands.command import Outcome, seconds
from edgekit_runtime.commands.installed import add_arguments, find_keys
from edgekit_runtime.system.paths import find_config_folder, find_state_folder


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("fleet", help="show what the fleet wants of this device")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    status = actions.add_parser(
        "status",
        help="show the fleet, the desired version and the last updates",
        description="Show the journal of the agent, which need not run.",
    )
    status.add_argument("--state", type=Path, metavar="FOLDER", help="where models are installed")
    status.add_argument("--json", action="store_true", help="print one JSON object")
    status.set_defaults(run=run)
    apply = actions.add_parser(
        "apply",
        help="apply a bundle of the fleet without a network",
        description="Check and carry out what `edgekit fleet bundle` has packed for this device, and write"
        " results for `edgekit fleet collect`. The agent must not run.",
    )
    apply.add_argument("bundle", type=Path, metavar="BUNDLE")
    apply.add_argument("-o", "--results", type=Path, metavar="FILE", help="default: DEVICE.results.json")
    apply.add_argument("--timeout", type=seconds, default=600.0, metavar="S", help="default: 600")
    add_arguments(apply)
    apply.set_defaults(run=run_apply)


def run(arguments: argparse.Namespace) -> Outcome:
    from edgekit_runtime.agent.journal import is_held, read_journal
    from edgekit_runtime.agent.manager_keys import ManagerKeys, read_held
    from edgekit_runtime.agent.membership import read_link_status, read_membership
    from edgekit_runtime.agent.trusted_time import format_utc
    from edgekit_runtime.dataclass_json import to_plain

    member = read_membership(find_config_folder())
    folder = (arguments.state or find_state_folder()) / "fleet"
    record = read_journal(folder / "journal.json")
    desired = read_held(record.desired, ManagerKeys(folder, member.enrolment.tuf_root).read())
    enrolment = member.enrolment
    link, runs, clock_fault = read_link_status(folder), is_held(folder), member.read_time(folder).explain()
    document: dict[str, Any] = {
        "device": enrolment.device,
        "target": enrolment.target,
        "desired": None if desired is None else to_plain(desired),
        "executions": [to_plain(execution.report) for execution in record.executions],
        "month": record.month,
        "metered_bytes": record.metered_bytes,
        "agent_runs": runs,
        "link": None if link is None else to_plain(link),
        "clock_fault": clock_fault,
    }
    lines = [f"{enrolment.device}, target {enrolment.target}, broker {', '.join(enrolment.brokers)}"]
    if not runs:
        since = (
            f"; the fleet was last reached at {format_utc(link.since_at)}" if link and link.since_at else ""
        )
        lines.append(f"  no agent runs{since}; run edgekit-device agent")
    elif link is not None:
        state = "connected" if link.is_connected else "not connected"
        lines.append(f"  {state} since {format_utc(link.since_at)}{link.problem and f': {link.problem}'}")
    if desired is not None and desired.notice:
        lines.append(f"  the fleet says: {desired.notice}")
    if clock_fault:
        lines.append(f"  {clock_fault}")
    elif desired is not None and time.time() > desired.expires_at:
        ended, now = format_utc(desired.expires_at), format_utc(time.time())
        lines.append(
            f"  the fleet's document ended at {ended}, and the clock says {now}: is the clock right?"
        )
    if desired is None:
        lines.append("  no desired document yet: the fleet has ordered nothing of it")
    else:
        lines += [
            f"  {model.model}: desired {model.version} (document {desired.version})"
            for model in desired.models
        ]
    for execution in record.executions:
        report = execution.report
        reason = f": {report.reason}" if report.reason else ""
        lines.append(f"  {report.model} {report.version} {report.state}{reason}")
    return Outcome(document, lines)


def run_apply(arguments: argparse.Namespace) -> Outcome:
    from edgekit_runtime.agent.execution.bundle import apply_bundle
    from edgekit_runtime.agent.execution.install import Installer
    from edgekit_runtime.agent.journal import hold_journal
    from edgekit_runtime.agent.membership import read_membership
    from edgekit_runtime.dataclass_json import to_plain
    from edgekit_runtime.slots import Slots
    from edgekit_runtime.trust.trust_store import TrustStore

    member = read_membership(find_config_folder())
    state: Path = arguments.state or find_state_folder()
    trust = TrustStore.from_folder(find_keys(arguments))
    installer = Installer(Slots(state, trust, member.enrolment.target), arguments.socket)
    results: Path = arguments.results or Path(f"{member.enrolment.device}.results.json")
    folder = state / "fleet"
    with hold_journal(folder, 0.0):
        applied = apply_bundle(
            arguments.bundle, results, member, folder, installer, timeout_s=arguments.timeout
        )
    report = applied.report
    status = "unfinished" if report is None else report.status
    lines = [f"{member.enrolment.device}: {status}; results in {results}"]
    if report is not None:
        lines += [f"  {model.model} {model.version}: {model.health}" for model in report.models]
        lines += [
            f"  {execution.model} {execution.version} {execution.state}: {execution.reason}"
            for execution in report.executions
        ]
    lines += [f"  {event}" for event in applied.events]
    document = {
        "status": status,
        "results": str(results),
        "report": None if report is None else to_plain(report),
        "events": list(applied.events),
    }
    return Outcome(document, lines, exit_code=0 if status == "converged" else 1)
