"""The formats of messages between the service and a worker process."""

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
        version: The version of the model.
        manifest_sha256: The digest of the signed manifest. The package in the worker must have this digest.
        submodel: The submodel of the package to load, or None for the whole package.
        local_key: The key, as text, with which the worker encrypts files that it stores. None if the package
            is not encrypted. The worker receives the decrypted package.
    """

    version: str
    manifest_sha256: str
    submodel: str | None = None
    local_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The configuration of a worker. It is sent as JSON together with the file of the package.

    Attributes:
        config: The configuration of the worker, see `ServiceConfig.for_worker`.
        isolation: The limits of the worker process.
        limits: The limits for reading packages.
        token: The token that TCP clients must send, or None.
        connections: The maximum number of connections that may be lent to the worker.
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
    """A report of a worker on a version on trial.

    Attributes:
        outcome: `tried` if the trial has started, `refused` if the version cannot be loaded, or
            `unavailable` if memory or file descriptors ran out. When the trial ends, `promote` or
            `rollback`.
        gate: The gate that caused the rollback.
        reason: The reason why the version was rolled back or not tried.
    """

    version: str
    outcome: TrialOutcome
    gate: str = ""
    reason: str = ""

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode("ascii")


def read_trial_report(payload: bytes) -> TrialReport:
    """Parse the bytes that `TrialReport.to_bytes` returned.

    Raises:
        ChannelError: The bytes have another format.
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
