"""Arguments and slots for the commands that work on installed models."""

import argparse
from pathlib import Path

from edgekit_runtime.client.control import load_installed
from edgekit_runtime.errors import SlotError
from edgekit_runtime.slots import Slots
from edgekit_runtime.system.paths import (
    find_device_target,
    find_keys_folder,
    find_running_service,
    find_state_folder,
)


def add_arguments(parser: argparse.ArgumentParser, *, switches: bool = True) -> None:
    """Add `--state`, `--keys` and `--json`. If `switches` is True, also add `--socket`."""
    parser.add_argument(
        "--state", type=Path, metavar="FOLDER", help="where models are installed (default: $EDGEKIT_STATE)"
    )
    parser.add_argument("--keys", type=Path, help="folder of trusted keys (default: your own)")
    if switches:
        parser.add_argument(
            "--socket",
            type=Path,
            metavar="PATH",
            help="socket of the service that switches versions (default: the running one, if any)",
        )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def find_keys(arguments: argparse.Namespace) -> Path:
    """Return the folder given with `--keys`, by default the user's own folder of keys."""
    return find_keys_folder() if arguments.keys is None else Path(arguments.keys)


def open_slots(arguments: argparse.Namespace) -> Slots:
    """Return the slots in the folder given with `--state`, or in the default folder."""
    from edgekit_runtime.trust.trust_store import TrustStore  # with libraries that the agent does without

    folder = find_state_folder() if arguments.state is None else arguments.state
    return Slots(folder, TrustStore.from_folder(find_keys(arguments)), find_device_target())


def switch(arguments: argparse.Namespace, slots: Slots, model: str) -> bool:
    """Make the running service load the active version of `model`, and return whether a service runs.

    Raises:
        SlotError: the version failed and the previous version runs again, or the service did not answer.
    """
    before = slots.load(model).state
    socket_path: Path | None = arguments.socket
    if socket_path is None:
        socket_path = find_running_service()
    if socket_path is None or not load_installed(socket_path, model):
        return False
    for rejection in slots.load(model).state.rejected:
        if rejection not in before.rejected:
            raise SlotError(
                f"{model} {rejection.version}: failed here and was rolled back: {rejection.reason}"
            )
    return True
