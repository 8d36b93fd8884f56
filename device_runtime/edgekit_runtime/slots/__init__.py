"""Stores two versions and a factory package of each model, so that a valid version can always start.

    slots = Slots(find_state_folder(), trust, find_device_target())
    choice = slots.begin_start("kws")         # records the start before anything is loaded
    with choice.package as package:
        session = open_session(package)       # self-test, serve
    slots.confirm("kws", choice.version)      # or: choice = slots.reject("kws", choice.version, "why")

Source: docs/explanation/slots.md.
"""

from edgekit_runtime.slots.choice import Choice
from edgekit_runtime.slots.state import HEALTHY, REJECTED, UNPROVEN, Installed, ModelState, Rejection
from edgekit_runtime.slots.store import Receipt, Slots
from edgekit_runtime.slots.transitions import MAX_BEGUN, Permissions

__all__ = [
    "HEALTHY",
    "MAX_BEGUN",
    "REJECTED",
    "UNPROVEN",
    "Choice",
    "Installed",
    "ModelState",
    "Permissions",
    "Receipt",
    "Rejection",
    "Slots",
]
