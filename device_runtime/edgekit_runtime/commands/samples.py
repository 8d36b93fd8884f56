"""`edgekit-device samples`: what waits for the fleet here, and what it ordered."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgekit_runtime.commands.command import Outcome
from edgekit_runtime.errors import NotFoundError
from edgekit_runtime.samples.folder import SAMPLES_FOLDER, SampleFolder, StoredSample
from edgekit_runtime.system.paths import find_running_service, find_state_folder


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "samples",
        help="list, show or delete the samples that wait for the fleet",
        description="List the requests that are stored as samples until the fleet has them, and what it"
        " ordered. Samples are sealed: only the fleet can open them. To take none at all, set allow = false"
        " in [samples] of the service's configuration.",
    )
    parser.add_argument("id", nargs="*", metavar="ID", help="identifiers of samples (default: all)")
    parser.add_argument("--delete", action="store_true", help="delete them, unsent")
    parser.add_argument("--state", type=Path, metavar="FOLDER", help="folder of installed models")
    parser.add_argument(
        "--socket", type=Path, metavar="PATH", help="socket of the service (default: the running one)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Outcome:
    """List or delete samples.

    Raises:
        NotFoundError: one of the identifiers is none.
        OutputError: a sample cannot be deleted.
    """
    state: Path = arguments.state or find_state_folder()
    folder = SampleFolder(state / "fleet" / SAMPLES_FOLDER)
    samples = _choose(folder.list_samples(), arguments.id)
    described = [_describe(sample) for sample in samples]
    if arguments.delete:
        for sample in samples:
            folder.remove(sample)
        return Outcome({"deleted": described}, [f"deleted: {len(samples)}"])
    stated = _ask_service(arguments.socket)
    total_bytes = sum(sample.size_bytes for sample in samples)
    lines = [f"waiting: {len(samples)}, {total_bytes} bytes{_explain(stated)}"]
    lines += [f"  {order}: {_count(entry)}" for order, entry in stated.get("orders", {}).items()]
    lines += [
        f"  {sample['id']}  {sample['stored_at']}  {sample['model']}  {sample['kind']}"
        f"  {sample['size_bytes']} bytes  order {sample['order']}"
        for sample in described
    ]
    document = {"samples": described, "allowed": stated.get("allowed"), "orders": stated.get("orders", {})}
    return Outcome(document, lines)


def _choose(samples: Sequence[StoredSample], ids: Sequence[str]) -> list[StoredSample]:
    unknown = set(ids) - {sample.id for sample in samples}
    if unknown:
        raise NotFoundError(f"no sample {', '.join(sorted(unknown))[:200]} waits here; it may have been sent")
    return [sample for sample in samples if not ids or sample.id in ids]


def _describe(sample: StoredSample) -> dict[str, Any]:
    from edgekit_runtime.agent.trusted_time import format_utc

    return {
        "id": sample.id,
        "model": sample.model,
        "order": sample.order,
        "kind": sample.kind,
        "size_bytes": sample.size_bytes,
        "stored_at": format_utc(sample.stored_at),
        "path": str(sample.path),
    }


def _ask_service(stated: Path | None) -> Mapping[str, Any]:
    """Return what the service states of samples; empty without one."""
    from edgekit_runtime.client.control import read_samples

    socket_path = stated or find_running_service()
    return {} if socket_path is None else read_samples(socket_path)


def _explain(stated: Mapping[str, Any]) -> str:
    allowed = stated.get("allowed")
    if allowed is None:
        return "; no service runs here, and without its word none is sent"
    if not allowed:
        return "; this device's owner forbids samples"
    return "" if stated.get("orders") else "; the fleet orders none"


def _count(entry: Mapping[str, Any]) -> str:
    """Return what an order drew since the service was started."""
    counts = ", ".join(f"{count} {kind}" for kind, count in entry.get("triggers", {}).items())
    error = f"; {entry['error']}" if entry.get("error") else ""
    return f"{counts}; {entry.get('dropped', 0)} dropped{error}"
