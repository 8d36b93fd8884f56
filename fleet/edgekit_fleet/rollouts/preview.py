"""Computes which devices would get which packages in a rollout, and why other devices would get none."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from edgekit_runtime.agent.conditions import count_needed_bytes
from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.package.version_order import is_older

NO_DECRYPTION_KEY: Final = (
    "it enrolled without a decryption key: enrol it again to receive encrypted releases"
)
_ASSUMED_MBIT_S: Final = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageView:
    """A package of a release.

    Attributes:
        model, target, version, manifest_sha256, path, size_bytes, sha256: See `ReleasePackageRow`.
        engines: The engines that can run the model. A device needs one of them. Empty if unknown.
        memory_bytes: The estimated peak memory of the model without its engine, or None if unknown.
        agreement: The minimum agreement with the previous version, or None for the default of the gate.
        deltas: The `DeltaOffer`s as plain values.
        is_encrypted: Whether a device needs a decryption key to open the package.
        allows_plain: Whether this unencrypted package may replace an encrypted version.
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
    is_encrypted: bool = False
    allows_plain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Situation:
    """The facts that decide which packages a device gets. Devices with the same facts share an instance.

    Attributes:
        facts: The reported facts `memory_bytes`, `engines` and `link_mbit_s` by name.
        versions: The running version of each model, with the SHA-256 of its manifest.
        pinned: The models that must keep their version.
        rollout: The name of an open rollout that includes the devices, or an empty string.
        is_revoked: Whether the devices were revoked.
        can_decrypt: Whether the devices have a decryption key.
        encrypted: The models whose running version is encrypted.
        is_disk_known: Whether the devices reported `free_bytes`.
    """

    target: str
    facts: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    has_reported: bool = True
    pinned: Collection[str] = ()
    rollout: str = ""
    is_revoked: bool = False
    can_decrypt: bool = False
    encrypted: Collection[str] = ()
    is_disk_known: bool = False


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device that matches a selector.

    Attributes:
        situation: See `Situation`.
        free_bytes: The free disk space that the device reported, as text. It is None if it is unknown, or if
            it is certainly enough for the packages.
    """

    name: str
    situation: Situation
    free_bytes: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """A device that gets packages.

    Attributes:
        bytes: The total download size, with the smallest usable file of each package, such as a delta.
        minutes: The estimated download time at the link speed that the device reported, by default 8 Mbit/s.
        note: A text with the names of unknown facts, or an empty string.
    """

    device: str
    target: str
    packages: tuple[PackageView, ...]
    bytes: Annotated[int, Range(0, 1 << 50)]
    minutes: float
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRefusal:
    """A device that gets no package, with the reason as a code such as `disk` and as a sentence."""

    device: str
    code: str
    reason: str


def preview(
    devices: Iterable[DeviceView], packages: Sequence[PackageView]
) -> tuple[tuple[DevicePlan, ...], tuple[DeviceRefusal, ...]]:
    """Return the devices that get packages and the devices that get none, both sorted by name."""
    planned, refused = [], []
    outcomes: dict[Situation, _Outcome] = {}
    for device in sorted(devices, key=lambda device: device.name):
        outcome = outcomes.get(device.situation)
        if outcome is None:
            outcome = outcomes[device.situation] = _decide(device.situation, packages)
        free_bytes = read_number(device.free_bytes) if outcome.packages else None
        if free_bytes is not None and free_bytes < outcome.needed_bytes:
            reason = f"it has {free_bytes:.0f} bytes free, the update needs {outcome.needed_bytes}"
            refused.append(DeviceRefusal(device=device.name, code="disk", reason=reason))
        elif outcome.code:
            refused.append(DeviceRefusal(device=device.name, code=outcome.code, reason=outcome.reason))
        else:
            planned.append(
                DevicePlan(
                    device=device.name,
                    target=device.situation.target,
                    packages=outcome.packages,
                    bytes=outcome.bytes,
                    minutes=outcome.minutes,
                    note=outcome.note,
                )
            )
    return tuple(planned), tuple(refused)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The packages for the devices of one situation if their disks have room, or the reason for none."""

    code: str = ""
    reason: str = ""
    packages: tuple[PackageView, ...] = ()
    needed_bytes: int = 0
    bytes: int = 0
    minutes: float = 0.0
    note: str = ""


def _decide(device: Situation, release: Sequence[PackageView]) -> _Outcome:
    packages = [package for package in release if package.target == device.target]
    if device.is_revoked:
        return _Outcome(code="revoked", reason="it was revoked")
    if not packages:
        return _Outcome(code="class", reason=f"the release holds no package for class '{device.target}'")
    if device.rollout:
        reason = f"rollout '{device.rollout}' has it; wait for its end or abort it"
        return _Outcome(code="other-rollout", reason=reason)
    fetched, reasons = [], []
    for package in packages:
        obstacle = _find_obstacle(device, package)
        if obstacle is None:
            fetched.append(package)
        else:
            reasons.append(obstacle)
    blocking = [reason for reason in reasons if reason[0] != "same"]
    if blocking or not fetched:
        code, reason = (blocking or reasons)[0]
        return _Outcome(code=code, reason=reason)
    needed_bytes = count_needed_bytes([package.size_bytes for package in fetched])
    memory = read_number(device.facts.get("memory_bytes"))
    peak = sum(package.memory_bytes or 0 for package in fetched)
    if memory is not None and memory < peak:
        reason = f"it has {memory:.0f} bytes of memory, the packages need about {peak}"
        return _Outcome(code="memory", reason=reason, packages=tuple(fetched), needed_bytes=needed_bytes)
    unknown = [] if device.is_disk_known else ["free_bytes"]
    unknown += [name for name in ("memory_bytes", "engines") if name not in device.facts]
    unknown += [f"memory of {package.model}" for package in fetched if package.memory_bytes is None]
    total = sum(_download_bytes(device, package) for package in fetched)
    return _Outcome(
        packages=tuple(fetched),
        needed_bytes=needed_bytes,
        bytes=total,
        minutes=total * 8e-6 / (read_number(device.facts.get("link_mbit_s")) or _ASSUMED_MBIT_S) / 60,
        note=f"unknown: {', '.join(unknown)}" if unknown else "",
    )


def _find_obstacle(device: Situation, package: PackageView) -> tuple[str, str] | None:
    version, digest = device.versions.get(package.model, ("", ""))
    if digest == package.manifest_sha256:
        return "same", f"it runs {package.model} {version} already"
    if package.model in device.pinned:
        return "pinned", f"{package.model} is pinned at {version or 'its version'} on the device"
    if version and is_older(package.version, version):
        return "newer", f"it runs {package.model} {version}, which is newer than {package.version}"
    if package.is_encrypted and not device.can_decrypt:
        return "no-key", NO_DECRYPTION_KEY
    if package.model in device.encrypted and not (package.is_encrypted or package.allows_plain):
        return "plain", (
            f"it runs {package.model} {version} encrypted, and {package.version} is plain: release it with"
            " --encrypt, or with --allow-plain if anybody may read it"
        )
    engines = {name.strip() for name in device.facts.get("engines", "").split(",") if name.strip()}
    if engines and package.engines and engines.isdisjoint(package.engines):
        needs = " or ".join(package.engines)
        return "engine", f"{package.model} needs the engine {needs}, it has {', '.join(sorted(engines))}"
    return None


def _download_bytes(device: Situation, package: PackageView) -> int:
    _, digest = device.versions.get(package.model, ("", ""))
    sizes = [int(delta["size_bytes"]) for delta in package.deltas if delta["from_sha256"] in ("", digest)]
    return min([package.size_bytes, *sizes])


def read_number(text: str | None) -> float | None:
    """Parse a number, or return None if the text is None or not a number."""
    try:
        return float(text) if text else None
    except ValueError:
        return None
