"""What a rollout would do, before it does anything: who gets which packages, who does not and why."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.slots.versions import is_older

_ASSUMED_MBIT_S: Final = 8.0
_FACTS: Final = ("free_bytes", "memory_bytes", "engines")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageView:
    """A package of a release.

    Attributes:
        model, target, version, manifest_sha256, path, size_bytes, sha256: see `ReleasePackageRow`.
        engines: one of them must be on the device; empty if that is not known.
        memory_bytes: estimated peak beside the engine's own, or None if that is not known.
        agreement: the least with the version before that is right for this release, or None for the default.
        deltas: `DeltaOffer`s as plain values.
    """

    model: str
    target: str
    version: str
    manifest_sha256: str
    path: str
    size_bytes: int
    sha256: str
    engines: tuple[str, ...] = ()
    memory_bytes: int | None = None
    agreement: float | None = None
    deltas: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """A device that a selector matches.

    Attributes:
        name, target: of the device.
        facts: as it reported them.
        versions: model -> (version, digest of the manifest) that it runs.
        pinned: models that must stay at their version.
        rollout: an open rollout that has the device, or empty.
        is_revoked: whether it was shut out.
    """

    name: str
    target: str
    facts: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    pinned: Collection[str] = ()
    rollout: str = ""
    is_revoked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A device that gets packages.

    Attributes:
        device, target: which.
        packages: that it gets.
        bytes: to download, with a delta where one fits.
        minutes: estimated, from the link that the device reports, else from 8 Mbit/s.
        note: what is not known, or empty.
    """

    device: str
    target: str
    packages: tuple[PackageView, ...]
    bytes: Annotated[int, Range(0, 1 << 50)]
    minutes: float
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A device that gets nothing; `code` groups the sentence `reason`."""

    device: str
    code: str
    reason: str


def preview(
    devices: Iterable[DeviceView], packages: Sequence[PackageView], *, is_return: bool = False
) -> tuple[tuple[Planned, ...], tuple[Refused, ...]]:
    """Return the devices that get packages, and those that do not.

    Args:
        devices: that the selector matches.
        packages: of the release.
        is_return: whether an older version may replace a newer one.
    """
    planned, refused = [], []
    for device in sorted(devices, key=lambda one: one.name):
        found = _plan(device, [one for one in packages if one.target == device.target], is_return)
        if isinstance(found, Planned):
            planned.append(found)
        else:
            refused.append(found)
    return tuple(planned), tuple(refused)


def _plan(device: DeviceView, packages: Sequence[PackageView], is_return: bool) -> Planned | Refused:
    def refuse(code: str, reason: str) -> Refused:
        return Refused(device=device.name, code=code, reason=reason)

    if device.is_revoked:
        return refuse("revoked", "it was revoked")
    if not packages:
        return refuse("class", f"the release holds no package for class '{device.target}'")
    if device.rollout:
        return refuse("other-rollout", f"rollout '{device.rollout}' has it; wait for its end or abort it")
    wanted, reasons = [], []
    for package in packages:
        reason = _find_obstacle(device, package, is_return)
        if reason is None:
            wanted.append(package)
        else:
            reasons.append(reason)
    blocking = [reason for reason in reasons if reason[0] != "same"]
    if blocking or not wanted:
        return refuse(*(blocking or reasons)[0])
    total = sum(_download_bytes(device, package) for package in wanted)
    free_bytes = _number(device.facts.get("free_bytes"))
    needed = sum(package.size_bytes for package in wanted)
    if free_bytes is not None and free_bytes < needed:
        return refuse("disk", f"it has {free_bytes:.0f} bytes free, the packages need {needed}")
    memory = _number(device.facts.get("memory_bytes"))
    peak = sum(package.memory_bytes or 0 for package in wanted)
    if memory is not None and memory < peak:
        return refuse("memory", f"it has {memory:.0f} bytes of memory, the packages need about {peak}")
    unknown = [name for name in _FACTS if name not in device.facts]
    unknown += [f"memory of {package.model}" for package in wanted if package.memory_bytes is None]
    return Planned(
        device=device.name,
        target=device.target,
        packages=tuple(wanted),
        bytes=total,
        minutes=total * 8e-6 / (_number(device.facts.get("link_mbit_s")) or _ASSUMED_MBIT_S) / 60,
        note=f"unknown: {', '.join(unknown)}" if unknown else "",
    )


def _find_obstacle(device: DeviceView, package: PackageView, is_return: bool) -> tuple[str, str] | None:
    version, digest = device.versions.get(package.model, ("", ""))
    if digest == package.manifest_sha256:
        return "same", f"it runs {package.model} {version} already"
    if package.model in device.pinned:
        return "pinned", f"{package.model} is pinned at {version or 'its version'} on the device"
    if version and is_older(package.version, version) and not is_return:
        return "newer", f"it runs {package.model} {version}, which is newer than {package.version}"
    engines = {name.strip() for name in device.facts.get("engines", "").split(",") if name.strip()}
    if engines and package.engines and engines.isdisjoint(package.engines):
        needs = " or ".join(package.engines)
        return "engine", f"{package.model} needs the engine {needs}, it has {', '.join(sorted(engines))}"
    return None


def _download_bytes(device: DeviceView, package: PackageView) -> int:
    _, digest = device.versions.get(package.model, ("", ""))
    sizes = [int(delta["size_bytes"]) for delta in package.deltas if delta["from_sha256"] == digest]
    return min([package.size_bytes, *sizes])


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
