"""`edgekit-device status`."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgekit_runtime.client.control import read_index
from edgekit_runtime.commands.command import Outcome
from edgekit_runtime.commands.installed import add_arguments, open_slots
from edgekit_runtime.encryption import DEVICE_KEY
from edgekit_runtime.errors import EdgekitError, SlotError
from edgekit_runtime.slots import UNPROVEN, Slots
from edgekit_runtime.system.paths import find_config_folder, find_keys_folder, find_running_service


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "status",
        help="show the installed models, their versions and what was rejected",
        description="Verify every installed package, and show which versions are opened, in the other slot,"
        f" on trial or rejected. The exit code is {SlotError.exit_code} if a model has no version to open.",
    )
    add_arguments(parser, switches=False)
    parser.add_argument(
        "--socket",
        type=Path,
        metavar="PATH",
        help="socket of the service (default: the running one)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Outcome:
    slots = open_slots(arguments)
    socket_path: Path | None = arguments.socket or find_running_service()
    serving = None if socket_path is None else read_index(socket_path)
    models = [
        {**_describe(slots, model), "service": None if serving is None else serving.get(model, [])}
        for model in slots.models()
    ]
    device_key, clock_fault = _describe_key(), _explain_clock(slots.folder)
    document = {
        "folder": str(slots.folder),
        "target": slots.target,
        "device_key": device_key,
        "models": models,
        "clock_fault": clock_fault,
    }
    failed = any(model["opens"] is None for model in models)
    lines = [line for model in models for line in _lines(model)] or [f"no models in {slots.folder}"]
    if device_key is not None:
        lines.append(f"key of this device: {device_key['protection']}")
    lines += [clock_fault] if clock_fault else []
    return Outcome(document, lines, SlotError.exit_code if failed else 0)


def _describe_key() -> dict[str, str] | None:
    """Return who holds the key for encrypted packages, or None where this device has none."""
    if not (find_keys_folder() / DEVICE_KEY).exists():
        return None
    from edgekit_runtime.encryption.device_key import read_device_key  # few devices have one

    try:
        key = read_device_key()
    except EdgekitError as cause:
        return {"key_id": "", "holder": "", "protection": str(cause)}
    if key is None:
        return None
    return {"key_id": key.key_id, "holder": key.holder.name, "protection": key.holder.sentence}


def _explain_clock(folder: Path) -> str:
    """Return what is wrong with the clock, by what a fleet has signed for this device; or nothing."""
    from edgekit_runtime.agent.membership import read_membership
    from edgekit_runtime.agent.trusted_time import TrustedTime

    try:
        return read_membership(find_config_folder()).read_time(folder / "fleet").explain()
    except EdgekitError:  # it is in no fleet, or its files are damaged
        return TrustedTime().explain()


def _describe(slots: Slots, model: str) -> dict[str, Any]:
    try:
        loaded, slot_states = slots.examine(model)
    except SlotError as cause:
        return {
            "model": model,
            "opens": None,
            "why": str(cause),
            "problem": None,
            "pinned": None,
            "places": [],
            "rejected": [],
        }
    try:
        choice = slots.choose(model)
        choice.package.close()
        opens, why = choice.version, choice.why
    except SlotError as cause:
        opens, why = None, str(cause)
    return {
        "model": model,
        "opens": opens,
        "why": why,
        "problem": loaded.problem,
        "pinned": loaded.state.pinned,
        "places": [
            {
                "place": slot.name,
                "version": slot.installed.version,
                "manifest_sha256": slot.installed.sha256,
                "health": slot.installed.health,
                "begun": slot.installed.begun,
                "path": str(slot.path),
                "encrypted": slot.installed.encrypted,
                "problem": slot.problem,
            }
            for slot in slot_states
        ],
        "rejected": [
            {"version": item.version, "manifest_sha256": item.sha256, "reason": item.reason}
            for item in loaded.state.rejected
        ],
    }


def _lines(model: dict[str, Any]) -> Iterator[str]:
    opens = f"opens {model['opens']}" if model["opens"] else "OPENS NOTHING"
    pinned = f", pinned to {model['pinned']}" if model["pinned"] else ""
    yield f"{model['model']}: {opens}{pinned}" + ("" if model["opens"] else f": {model['why']}")
    if model["problem"]:
        yield f"  {model['problem']}"
    for slot in model["places"]:
        health = slot["health"]
        if health == UNPROVEN:
            starts = "1 start" if slot["begun"] == 1 else f"{slot['begun']} starts"
            health = f"on trial, {starts}"
        if slot["encrypted"]:
            health += ", encrypted"
        problem = f"; DAMAGED: {slot['problem']}" if slot["problem"] else ""
        yield f"  {slot['place']:8} {slot['version']:12} {health}{problem}"
    for line in model["service"] or ():
        version = f" {line['version']}" if line["version"] else ""
        yield f"  service  {line['state']}{version}" + (f": {line['reason']}" if line["reason"] else "")
    for rejection in model["rejected"]:
        yield f"  rejected {rejection['version']:12} {rejection['reason']}"
