"""What the service and a worker process say to each other beyond single words: forms of the messages."""

import dataclasses
import json
import struct
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from edgekit_runtime.package.archive import Limits
from edgekit_runtime.service.options.config import ServiceConfig
from edgekit_runtime.service.options.model import Isolation
from edgekit_runtime.service.worker_wire.channel import ChannelError

LENT: Final = struct.Struct("<I??")  # index, is_local, whether the model was asked for without a version
INDEX: Final = struct.Struct("<I")
REGION: Final = struct.Struct("<QQ?H")  # offset_bytes, size_bytes, is_mapped, bytes of the name; name, key
SETTLED: Final = struct.Struct("<?")  # whether the candidate takes over; its version
ENERGY: Final = struct.Struct("<dd")  # joules per request, of the candidate and of the current version
BEAT_S: Final = 1.0
MAX_REASON: Final = 2000


@dataclass(frozen=True, slots=True)
class Given:
    """A package whose signature the service has verified.

    Attributes:
        version: of the model.
        manifest_sha256: of the package, which must still be this one.
    """

    version: str
    manifest_sha256: str


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is to do; it comes as JSON in a file, with the package and the memory of the leases.

    Attributes:
        config: of the service in the process, which does not listen.
        isolation: of this process.
        name: of the model.
        given: its package.
        limits: of reading packages.
        token: that clients over TCP must send, or None.
        connections: how many may be lent at one time.
    """

    config: ServiceConfig
    isolation: Isolation
    name: str
    given: Given
    limits: Limits
    token: str | None
    connections: int


Outcome: TypeAlias = Literal["tried", "refused", "lacking", "promote", "rollback"]


@dataclass(frozen=True, slots=True)
class TrialWord:
    """What a worker says of a version that it was told to try.

    Attributes:
        version: of it.
        outcome: `tried` once its trial has begun, `refused` where it cannot, `lacking` where it cannot now,
            for want of what the machine has to give; after `tried`, the verdict.
        gate: that was missed, where it is rolled back.
        reason: for people, where it is not tried or rolled back.
    """

    version: str
    outcome: Outcome
    gate: str = ""
    reason: str = ""

    def to_bytes(self) -> bytes:
        """Return the message."""
        return json.dumps(dataclasses.asdict(self)).encode("ascii")


def read_word(payload: bytes) -> TrialWord:
    """Return what `TrialWord.to_bytes` wrote.

    Raises:
        ChannelError: it did not write this.
    """
    try:
        word = TrialWord(**json.loads(payload))
    except (ValueError, TypeError, RecursionError) as cause:
        raise ChannelError(f"it sent a word of a trial that cannot be read: {cause!r}"[:300]) from cause
    texts = (word.version, word.outcome, word.gate, word.reason)
    if not all(isinstance(text, str) and len(text) <= MAX_REASON for text in texts):
        raise ChannelError("it sent a word of a trial that is none")
    if word.outcome not in get_args(Outcome):
        raise ChannelError(f"it sent a word of a trial with the outcome {word.outcome[:40]!r}")
    return word
