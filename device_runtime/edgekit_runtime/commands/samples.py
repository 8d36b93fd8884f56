"""`edgekit-device samples`: the samples that are waiting to be sent to the fleet, and the fleet's orders."""

import argparse
from pathlib import Path

from edgekit_runtime.commands.command import Outcome
from edgekit_runtime.errors import NotFoundError
from edgekit_runtime.samples.folder import SAMPLES_FOLDER, SampleFolder
from edgekit_runtime.system.paths import find_running_service, find_state_folder


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "samples",
        help="list, show or delete the samples that wait for the fleet",
        description="List the samples that the fleet does not have yet, and its orders. Only the fleet can"
        " open samples, because they are sealed. To take none, set allow = false in [samples] of the"
        " service's configuration.",
    )
    parser.add_argument("id", nargs="*", metavar="ID", help="identifiers of samples (default: all)")
    parser.add_argument("--delete", action="store_true", help="delete them without sending them")
    parser.add_argument("--state", type=Path, metavar="FOLDER", help="folder of installed models")
    parser.add_argument(
        "--socket", type=Path, metavar="PATH", help="socket of the service (default: the running one)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Outcome:
    from edgekit_runtime.agent.trusted_time import format_utc
    from edgekit_runtime.client.control import read_samples

    folder = SampleFolder((arguments.state or find_state_folder()) / "fleet" / SAMPLES_FOLDER)
    waiting = {sample.id: sample for sample in folder.list_samples()}
    if unknown := [sample_id[:40] for sample_id in arguments.id if sample_id not in waiting]:
        raise NotFoundError(f"no sample {', '.join(unknown)} waits here; it may have been sent")
    samples = [waiting[sample_id] for sample_id in arguments.id or waiting]
    socket_path = arguments.socket or find_running_service()
    stated = {} if socket_path is None else read_samples(socket_path)
    remark = {
        None: "; without the word of a running service none is sent",
        False: "; the owner forbids samples",
    }
    lines = [f"waiting: {len(samples)}{remark.get(stated.get('allowed'), '')}"]
    for order, entry in stated.get("orders", {}).items():
        drawn = ", ".join(f"{count} {kind}" for kind, count in entry["triggers"].items())
        lines.append(f"  order {order}: {drawn}, {entry['dropped']} dropped {entry['error']}".rstrip())
    document = {"samples": [], **stated, "deleted": arguments.delete}
    for sample in samples:
        fields = {
            "id": sample.id,
            "model": sample.model,
            "kind": sample.kind,
            "order": sample.order,
            "size_bytes": sample.size_bytes,
            "stored_at": format_utc(sample.stored_at),
        }
        document["samples"].append(fields)
        lines.append(f"  {'  '.join(map(str, fields.values()))}{'  deleted' if arguments.delete else ''}")
        if arguments.delete:
            folder.remove(sample)
    return Outcome(document, lines)
