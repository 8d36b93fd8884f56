"""The journal: the state that must survive a restart, in one file that is always replaced as a whole.

Each step is recorded before it begins, and can be repeated after a power cut. The file contains a digest of
its content. If the file is damaged, it is renamed, and the device starts with an empty journal. The manager
then sends its document again, and the slots still contain the installed packages.
"""

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

from edgekit_runtime.agent.documents import ENDED, Execution, ExecutionState
from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.dataclass_json import Range, from_plain, to_plain
from edgekit_runtime.errors import ConfigError, EdgekitError
from edgekit_runtime.records import dataclass
from edgekit_runtime.slots.access import RecordError, hold
from edgekit_runtime.system.atomic_files import DISK, Disk, make_folders, write_atomically

_MAX_BYTES: Final = 1 << 20
_SEQUENCES: Final = 1024  # numbers that one write reserves, so that a report needs no write
_COUNT: Final = Range(0, 1 << 53)
_MOST_TAKEN: Final = 1 << 52  # a thief of the manager's key can state any number, but some must remain

_logger = logging.getLogger(__name__)


class JournalError(EdgekitError):
    """The journal is damaged, cannot be read, or is locked by another process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of this device with one execution.

    Attributes:
        age_s: age of the execution, without the time when the agent was not running.
        failures: number of consecutive failures of the current step.
        same_failures: number of consecutive failures with the same code as the last failure.
        retry_age_s: value of `age_s` at which the step is tried again.
    """

    report: Execution
    manifest_sha256: str
    age_s: float = 0.0
    failures: int = 0
    same_failures: int = 0
    retry_age_s: float = 0.0

    @property
    def has_ended(self) -> bool:
        return self.report.state in ENDED

    def enter(self, state: ExecutionState, *, code: str = "", reason: str = "") -> "Progress":
        """Return the execution with a state, code and reason. A new state resets the counts of failures."""
        report = replace(self.report, state=state, code=code, reason=reason)
        if state == self.report.state:
            return replace(self, report=report)
        return replace(self, report=report, failures=0, same_failures=0, retry_age_s=self.age_s)

    def fail_once(self, code: str, reason: str, delay_s: float) -> "Progress":
        """Return the execution after a temporary failure. The step is tried again after `delay_s`."""
        return replace(
            self,
            report=replace(self.report, code=code, reason=reason),
            failures=self.failures + 1,
            same_failures=self.count_same(code) + 1,
            retry_age_s=self.age_s + delay_s,
        )

    def count_same(self, code: str) -> int:
        """Return the current number of consecutive failures with this code."""
        return self.same_failures if code == self.report.code else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRecord:
    """The content of the journal.

    Attributes:
        desired: the last accepted envelope as text, or empty.
        sequence_bound: number that is higher than the numbers of all sent documents.
        month: the last month in which steps sent or received bytes, such as `2026-11` (UTC).
        metered_bytes: number of bytes sent and received in that month.
        known_time_s: the newest time in a verified document. If the clock shows an earlier time, it is wrong.
        executions: the running execution of each model, or its last execution if none is running.
        logs_request: name of the last `LogRequest` that was answered.
    """

    desired: str = ""
    sequence_bound: Annotated[int, _COUNT] = 0
    month: str = ""
    metered_bytes: int = 0
    known_time_s: Annotated[float, _COUNT] = 0.0
    executions: tuple[Progress, ...] = ()
    logs_request: str = ""


class Journal:
    """The journal of one device. It is not thread-safe."""

    def __init__(self, path: Path, disk: Disk = DISK, clock: Callable[[], float] = time.time) -> None:
        """Read the journal at `path`, or begin a new one if it is missing or damaged; create its folder.

        `clock`: seconds since 1970, from which a new journal numbers its documents.

        Raises:
            OutputError: the folder cannot be made.
        """
        make_folders(path.parent, 0o700, disk)
        self._path, self._disk = path, disk
        try:
            self.record = read_journal(path)
        except JournalError as error:
            _logger.warning("%s; the device begins like a new one", error)
            self.record = JournalRecord()
            with contextlib.suppress(OSError):  # the damaged file stays beside it, to find the cause
                disk.replace(path, path.with_suffix(".damaged"))
        # A lost journal must not make documents look old; if the clock is wrong, the manager names the
        # number.
        self._sequence = self.record.sequence_bound or int(max(0.0, clock()) * 1000)

    def write(self, record: JournalRecord) -> None:
        """Replace the record, and return when the new record is safely on the disk.

        Raises:
            OutputError: the record cannot be written. The old record is kept.
        """
        if record == self.record:
            return
        body = to_plain(record)
        digest = hashlib.sha256(encode_json(body)).hexdigest()
        with write_atomically(self._path, mode=0o600, disk=self._disk) as file:
            file.write(encode_json({"record": body, "sha256": digest}))
        self.record = record

    def count_metered(self, month: str) -> int:
        """Return the number of bytes transferred in `month`, or 0 if another month is recorded."""
        return self.record.metered_bytes if self.record.month == month else 0

    def raise_sequence(self, used: int) -> bool:
        """Make the next sequence number higher than `used`, and return whether the number changed.

        A number of 2^52 or more is ignored.
        """
        if not self._sequence <= used < _MOST_TAKEN:
            return False
        self._sequence = used + 1
        return True

    def next_sequence(self) -> int:
        """Return a sequence number for the next document. The numbers always rise, even after a restart.

        Raises:
            OutputError: the journal cannot be written.
        """
        if self._sequence >= self.record.sequence_bound:
            self.write(replace(self.record, sequence_bound=self._sequence + _SEQUENCES))
        self._sequence += 1
        return self._sequence - 1


@contextlib.contextmanager
def hold_journal(folder: Path, wait_s: float) -> Iterator[None]:
    """Create and lock the agent's folder, so that only this process acts for the fleet.

    Raises:
        JournalError: another process holds the lock for longer than `wait_s`.
        OutputError: the folder cannot be created.
    """
    make_folders(folder, 0o700)
    with contextlib.ExitStack() as locks:
        try:
            locks.enter_context(hold(folder, wait_s))
        except RecordError as cause:
            raise JournalError(
                f"{cause}; does `edgekit-device agent` or `fleet apply` run? End it first: one process at a"
                " time does what the fleet wants"
            ) from cause
        yield


def is_held(folder: Path) -> bool:
    """Return whether another process holds the lock, see `hold_journal`."""
    if not folder.is_dir():
        return False
    try:
        with hold_journal(folder, 0.0):
            return False
    except EdgekitError:
        return True


def read_journal(path: Path) -> JournalRecord:
    """Return the content of the journal at `path`, or an empty record if there is no journal.

    Raises:
        JournalError: the journal is damaged or cannot be read.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return JournalRecord()
    except OSError as cause:
        raise JournalError(f"{path}: cannot be read: {cause.strerror}") from cause
    if len(data) > _MAX_BYTES:
        raise JournalError(f"{path}: is over {_MAX_BYTES} bytes")
    try:
        content: dict[str, Any] = json.loads(data)
        body, stated = content["record"], content["sha256"]
        is_whole = stated == hashlib.sha256(encode_json(body)).hexdigest()
    except (ValueError, KeyError, TypeError, RecursionError) as cause:
        raise JournalError(f"{path}: is damaged: {cause}") from cause
    if not is_whole:
        raise JournalError(f"{path}: does not have the digest that it states")
    try:
        return from_plain(JournalRecord, body, str(path))
    except ConfigError as cause:
        raise JournalError(f"{path}: is of another edgekit: {cause}") from cause
