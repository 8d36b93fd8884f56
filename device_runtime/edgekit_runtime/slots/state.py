"""The state of one model's slots and the format of its file. This module does not access files.

The state names packages by the digest of their manifest, which determines all of their content. The state
file also contains its own digest, which detects damage but not manipulation. The signature of each package is
verified in any case.

Source: docs/explanation/slots.md, section "state.json".
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import field, replace
from typing import Final

from edgekit_runtime.canonical_json import Fields, JsonValue, Record, decode_json, encode_json
from edgekit_runtime.errors import ManifestError, SlotError
from edgekit_runtime.package.manifest_entries import require_token
from edgekit_runtime.records import dataclass

FORMAT: Final = 1
MAX_REJECTIONS: Final = 16  # the file stays small. Older ones are forgotten
MAX_REASON_LENGTH: Final = 500
UNPROVEN, HEALTHY, REJECTED = "unproven", "healthy", "rejected"

_HEALTHS: Final = (UNPROVEN, HEALTHY, REJECTED)
_TRIALS: Final = ("", "shadow", "canary")
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


class DamagedStateError(SlotError):
    """The state file is damaged. The state can be rebuilt from the packages."""


class NewerStateError(SlotError):
    """The state file is from a newer edgekit and must not be changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed(Record):
    """One package in a slot.

    Attributes:
        version: The version in the manifest.
        sha256: The digest of the manifest as 64 lower-case hexadecimal digits.
        health: `unproven` before the first confirmation, `healthy` after it, or `rejected`.
        begun: The number of starts without a confirmation.
        trial: How a service tests the unproven version: `shadow`, `canary`, or empty for the default of the
            service.
        encrypted: Whether the package file is encrypted.
    """

    version: str
    sha256: str
    health: str = UNPROVEN
    begun: int = 0
    trial: str = field(default="", metadata={"optional": True})
    encrypted: bool = field(default=False, metadata={"optional": True})

    def __post_init__(self) -> None:
        _check_identity(self.version, self.sha256)
        _require(self.health in _HEALTHS, f"health is {self.health!r}, expected one of {', '.join(_HEALTHS)}")
        valid = isinstance(self.begun, int) and not isinstance(self.begun, bool) and self.begun >= 0
        _require(valid, f"begun is {self.begun!r}, expected a whole number from 0")
        _require(isinstance(self.encrypted, bool), f"encrypted is {self.encrypted!r}, expected true or false")
        _require(self.trial in _TRIALS, f"trial is {self.trial!r}, expected one of {', '.join(_TRIALS[1:])}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection(Record):
    """A version that failed on this device and is not installed again without permission."""

    version: str
    sha256: str
    reason: str

    def __post_init__(self) -> None:
        _check_identity(self.version, self.sha256)
        _require(isinstance(self.reason, str), f"reason is {self.reason!r}, expected a string")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState(Record):
    """The installed versions and the rejected versions of one model.

    Attributes:
        active: The package in the active slot, or None. See `current`.
        spare: The package in the other slot, or None.
        factory: The factory package, which is never removed, or None.
        pinned: The version to which the model is pinned, or None.
        rejected: The versions that failed, newest last. Only the last `MAX_REJECTIONS` are written.

    Raises:
        DamagedStateError: A field has the wrong type or value, or two fields contradict each other.
    """

    model: str
    active: Installed | None = None
    spare: Installed | None = None
    factory: Installed | None = None
    pinned: str | None = None
    rejected: tuple[Rejection, ...] = ()

    def __post_init__(self) -> None:
        _check_token(self.model, "model")
        if self.pinned is not None:
            _check_token(self.pinned, "pinned")
        _require(
            self.active is None or self.spare is None or self.active.sha256 != self.spare.sha256,
            "both slots hold the same package",
        )

    @property
    def current(self) -> Installed | None:
        """The package to open first, or None if nothing is installed.

        This is the active package, unless it is missing or rejected and there is a factory package. In that
        case, this is the factory package.
        """
        is_rejected = self.active is not None and self.active.health == REJECTED
        return self.factory or self.active if is_rejected else self.active or self.factory

    @property
    def installed(self) -> Iterator[Installed]:
        """The installed packages in the order active, spare, factory."""
        return (item for item in (self.active, self.spare, self.factory) if item is not None)

    def to_bytes(self) -> bytes:
        """Return the content of the state file, which is canonical JSON with a digest. See `parse_state`."""
        trimmed = replace(self, rejected=self.rejected[-MAX_REJECTIONS:])
        body: dict[str, JsonValue] = {**trimmed.to_json(), "format": FORMAT}
        return encode_json({**body, "sha256": hashlib.sha256(encode_json(body)).hexdigest()})


def parse_state(data: bytes, where: str) -> ModelState:
    """Parse the content of a state file.

    Args:
        data: The content. The caller must limit its size.
        where: The start of each error message.

    Raises:
        DamagedStateError: The content is truncated, changed or not a state.
        NewerStateError: The content is intact but in a newer format.
    """
    body = decode_json(data, where, DamagedStateError)
    # The digest comes first: it covers the number of the format, in every format.
    stated = body.pop("sha256", None)
    if stated != hashlib.sha256(encode_json(body)).hexdigest():
        raise DamagedStateError(f"{where}: does not have the digest that it states")
    fields = Fields(body, where, DamagedStateError)
    if (number := fields.take("format")) != FORMAT:
        newer = isinstance(number, int) and number > FORMAT
        error = NewerStateError if newer else DamagedStateError
        raise error(f"{where}: is of format {number!r}, this reader knows {FORMAT}; update edgekit")
    return ModelState.from_json(fields.rest(), where, DamagedStateError)


def _check_identity(version: object, sha256: object) -> None:
    _check_token(version, "version")
    valid = isinstance(sha256, str) and _SHA256.fullmatch(sha256) is not None
    _require(valid, f"sha256 is {sha256!r}, expected 64 lower-case hex digits")


def _check_token(value: object, field_name: str) -> None:
    try:
        require_token(value, field_name)
    except ManifestError as cause:
        raise DamagedStateError(f"slot state: {cause}") from cause


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise DamagedStateError(f"slot state: {message}")
