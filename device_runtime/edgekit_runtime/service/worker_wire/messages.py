"""Forms of the messages between the service and a worker process."""

import dataclasses
import json
import struct
from typing import Final, Literal, TypeAlias, get_args

from edgekit_runtime.package.archive import Limits
from edgekit_runtime.records import dataclass
from edgekit_runtime.service.options.config import ServiceConfig
from edgekit_runtime.service.options.model import Isolation
from edgekit_runtime.service.worker_wire.channel import ChannelError

LENT: Final = struct.Struct("<I??")  # index, is_local, whether the model was asked for without a version
INDEX: Final = struct.Struct("<I")
REGION: Final = struct.Struct("<QQ?H")  # offset_bytes, size_bytes, is_mapped, bytes of the name; name, key
SETTLED: Final = struct.Struct("<?")  # whether the candidate takes over; its version
ENERGY: Final = struct.Struct("<dd")  # joules per request, of the candidate and of the current version
HEARTBEAT_S: Final = 1.0
MAX_REASON: Final = 2000
STUCK_EXIT_CODE: Final = 75  # of a worker in which a run cannot be stopped


@dataclass(frozen=True, slots=True)
class VerifiedPackage:
    """A package whose signature the service has verified.

    Attributes:
        version: version of the model.
        manifest_sha256: digest of the signed manifest, compared when the worker opens the package.
        submodel: the part of the package that is the model; None for all of it.
        local_key: for an encrypted package, its `local_key` as text. The worker gets the package decrypted,
            and encrypts the files that it stores with this key. None for a plain package.
    """

    version: str
    manifest_sha256: str
    submodel: str | None = None
    local_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The order to a worker. The worker gets the order as a JSON file, together with the package's file.

    Attributes:
        config: configuration of the worker's own service, which does not listen.
        isolation: limits of this process.
        limits: limits of reading packages.
        token: the token that clients over TCP must send, or None.
        connections: how many connections may be lent to the worker at one time.
    """

    config: ServiceConfig
    isolation: Isolation
    name: str
    package: VerifiedPackage
    limits: Limits
    token: str | None
    connections: int


TrialOutcome: TypeAlias = Literal["tried", "refused", "unavailable", "promote", "rollback"]


@dataclass(frozen=True, slots=True)
class TrialReport:
    """A worker's report on a version that it tries.

    Attributes:
        outcome: first `tried` if the trial has begun, `refused` if the version cannot be loaded, or
            `unavailable` if memory or descriptors are lacking now. Later `promote` or `rollback`.
        gate: the missed gate, for `rollback`.
        reason: why it was rolled back or not tried.
    """

    version: str
    outcome: TrialOutcome
    gate: str = ""
    reason: str = ""

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode("ascii")


def read_trial_report(payload: bytes) -> TrialReport:
    """Return what `TrialReport.to_bytes` wrote.

    Raises:
        ChannelError: the payload has another form.
    """
    try:
        message = TrialReport(**json.loads(payload))
    except (ValueError, TypeError, RecursionError) as cause:
        raise ChannelError(f"it sent a trial message that cannot be read: {cause!r}"[:300]) from cause
    texts = (message.version, message.outcome, message.gate, message.reason)
    if not all(isinstance(text, str) and len(text) <= MAX_REASON for text in texts):
        raise ChannelError("it sent a trial message with a field that is no text or too long")
    if message.outcome not in get_args(TrialOutcome):
        raise ChannelError(f"it sent a trial message with the outcome {message.outcome[:40]!r}")
    return message
