"""Conditions under which an update may begin or continue.

These functions are pure. The caller measures the conditions.
"""

import re
from collections.abc import Sequence
from typing import Final, Literal

from edgekit_runtime.agent.documents import DesiredModel
from edgekit_runtime.package.version_order import is_older
from edgekit_runtime.records import dataclass

MIN_BATTERY: Final = 0.2
"""The lowest charge to begin an update on a device that is not charging."""
SPARE_BYTES: Final = 16 << 20
"""The disk space that must stay free during an installation."""

_WINDOW: Final = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-3]):([0-5][0-9])", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """The state of one model on the device.

    Attributes:
        version, manifest_sha256: the active installed package, or empty if none is installed.
        health: `unproven`, `healthy`, `rejected` or `missing`.
        previous: version in the spare slot, or empty if that slot is empty or its version was rejected.
        pinned: version to which somebody pinned the model, or None.
        rejected: manifest_sha256 and reason of each version that failed on this device.
        served: versions that the service serves, or None if no service runs.
        on_trial: version that the service tries beside the active one, or empty.
        remark: the service's remark on the trial, or on versions that it does not serve.
        not_finite: number of answers of `version` with NaN or infinity although the inputs were finite.
    """

    model: str
    version: str = ""
    manifest_sha256: str = ""
    health: Literal["unproven", "healthy", "rejected", "missing"] = "missing"
    previous: str = ""
    pinned: str | None = None
    rejected: tuple[tuple[str, str], ...] = ()
    served: tuple[str, ...] | None = None
    on_trial: str = ""
    remark: str = ""
    not_finite: int = 0

    def find_rejection(self, manifest_sha256: str) -> str | None:
        """Return why a version was rejected here, or None if it was not."""
        return next((reason for sha256, reason in self.rejected if sha256 == manifest_sha256), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConditions:
    """Measurements of the device on which the decision depends.

    Attributes:
        now_s: seconds since 1970, see `TrustedTime`.
        minute_of_day: local time in minutes, 0..1439, or None if the clock is certainly wrong.
        free_bytes: free space on the disk of the agent's folder.
        budget_left_bytes: bytes that may still be downloaded this month, or None if there is no limit.
        battery: charge from 0 to 1, or None without a battery.
        is_charging: whether the device has another source of power than its battery.
        downloaded: sha256 of each package file that is completely downloaded.
    """

    now_s: float
    minute_of_day: int | None = 0
    free_bytes: int = 1 << 50
    budget_left_bytes: int | None = None
    battery: float | None = None
    is_charging: bool = False
    downloaded: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A condition that prevents an update.

    Attributes:
        code, reason: the same fields as in `Execution`.
        may_pass: True if the update waits until the condition has passed, False if the update is refused.
    """

    code: str
    reason: str
    may_pass: bool = False


def find_obstacle(
    desired_model: DesiredModel, view: ModelView, conditions: DeviceConditions, done_bytes: int
) -> Obstacle | None:
    """Return the condition that prevents the download of `desired_model`, or None.

    A download may begin at any time of day, but a malformed `desired_model.window` prevents it. `done_bytes`
    is the number of bytes that are already downloaded.
    """
    rejection = view.find_rejection(desired_model.manifest_sha256)
    if rejection is not None and not desired_model.is_return:
        return Obstacle("rejected-here", f"version {desired_model.version} was rejected here: {rejection}")
    if view.pinned not in (None, desired_model.version):
        return Obstacle("pinned", f"the model is pinned to {view.pinned} by hand; unpin it")
    if view.version and is_older(desired_model.version, view.version) and not desired_model.is_return:
        return Obstacle(
            "older", f"version {desired_model.version} is older than {view.version}, which is here"
        )
    if desired_model.window is not None and not is_window(desired_model.window):
        return Obstacle("window", f"window {desired_model.window[:20]!r} is not of the form 01:00-04:00")
    needed_bytes = count_needed_bytes((desired_model.size_bytes,), done_bytes)
    if desired_model.sha256 not in conditions.downloaded and needed_bytes > conditions.free_bytes:
        return Obstacle(
            "disk-full", f"the update needs {needed_bytes} bytes, {conditions.free_bytes} are free"
        )
    return _find_shortage(desired_model, conditions, done_bytes)


def count_needed_bytes(sizes_bytes: Sequence[int], done_bytes: int = 0) -> int:
    """Return the free space, in bytes, that a device needs to install packages one after the other.

    `sizes_bytes` has the size of each package, at least one. `done_bytes` are already downloaded.
    """
    return sum(sizes_bytes) - done_bytes + max(sizes_bytes) + SPARE_BYTES


def _find_shortage(
    desired_model: DesiredModel, conditions: DeviceConditions, done_bytes: int
) -> Obstacle | None:
    if not has_power(conditions):
        reason = f"the battery is at {conditions.battery:.0%}, an update needs {MIN_BATTERY:.0%} or a charger"
        return Obstacle("battery", reason, may_pass=True)
    budget = conditions.budget_left_bytes
    if desired_model.sha256 in conditions.downloaded or budget is None:
        return None
    smallest = min(
        (desired_model.size_bytes - done_bytes, *(delta.size_bytes for delta in desired_model.deltas))
    )
    if smallest > budget:
        return Obstacle("budget", f"{smallest} bytes are to come, {budget} are left of this month's budget")
    return None


def has_power(conditions: DeviceConditions) -> bool:
    """Return whether the device has no battery, is charging, or has a charge of at least `MIN_BATTERY`."""
    battery = conditions.battery
    return battery is None or battery >= MIN_BATTERY or conditions.is_charging


def is_window(text: str) -> bool:
    """Return whether a text is a non-empty range of times of day, such as `01:00-04:00`."""
    match = _WINDOW.fullmatch(text)
    return match is not None and match.group(1, 2) != match.group(3, 4)


def check_window(window: str | None, conditions: DeviceConditions) -> Obstacle | None:
    """Return the condition that prevents a switch of versions now, or None.

    The window may span midnight, and None allows a switch at any time. If the local time is unknown, every
    window is closed.
    """
    if window is None:
        return None
    match = _WINDOW.fullmatch(window)
    if match is None:
        return Obstacle("window", f"window {window[:20]!r} is not of the form 01:00-04:00")
    if conditions.minute_of_day is None:
        return Obstacle("clock", f"waits for {window} local time, and the clock is not set", may_pass=True)
    begin, end = int(match[1]) * 60 + int(match[2]), int(match[3]) * 60 + int(match[4])
    now = conditions.minute_of_day
    is_within = begin <= now < end if begin <= end else now >= begin or now < end
    return None if is_within else Obstacle("window", f"waits for {window} local time", may_pass=True)
