"""Signatures verified in a process of its own, which ends when that is done.

What it takes (`cryptography`, `securesystemslib`) is 10 MB, a sixth of an idle service, and needed for a
moment once a package. Keys and rules are those of `signing`, which that process runs.
"""

import base64
import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Final, TextIO, TypeAlias

from edgekit_runtime.errors import SignatureError, UnavailableError
from edgekit_runtime.system.child_process import child_environment, describe_end, give_way
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.dsse import Statement, read_unverified
from edgekit_runtime.trust.keys import KeysStamp, stamp_keys

_MAX_GOOD: Final = 256  # envelopes
_ANSWER_S: Final = 30.0  # for an answer, also of a process that starts, slowed, on a small device
_FIRST_SHARE: Final = 2 / 3  # of that time, after which a process that hangs is replaced by another one
_END_S: Final = 1.0  # for the end of one that was killed; what hangs in the system is not waited for
_MAX_LAST_WORDS: Final = 300  # characters

_KEYS: Final = "keys"

_Question: TypeAlias = "tuple[str, str, str] | None"
"""An envelope in base64, its predicate type and where it lies; None: can the keys be read?"""
_Answer: TypeAlias = "tuple[str, str | None] | None"
"""The message of a `SignatureError` and its key id; None: yes."""


class VerifyingProcess:
    """A `Verifier` of the keys in a folder, which each process reads anew.

    The first process starts at once, beside whatever its maker does next, and stays until `rest`; later ones
    end with their answer. What was found good is not asked again while the folder is as it was.
    """

    def __init__(self, keys: Path | None = None) -> None:
        """Start the first process.

        Args:
            keys: folder of the trusted keys; by default `find_keys_folder()`.

        Raises:
            UnavailableError: it cannot be started.
        """
        self._keys = (find_keys_folder() if keys is None else keys).absolute()
        self._lock = threading.Lock()
        self._good: dict[str, KeysStamp] = {}
        self._stays, self._is_over = True, False
        self._child: _Child | None = _Child(self._keys, stamp_keys(self._keys))

    def verify(self, envelope: bytes, predicate_type: str, where: str) -> tuple[Statement, str]:
        """Return the statement in an envelope and the id of the key that signed it, see `Verifier`."""
        about, stamp = _name(envelope, predicate_type), stamp_keys(self._keys)
        if self._good.get(about) != stamp:
            self._ask((base64.b64encode(envelope).decode("ascii"), predicate_type, where), about, stamp)
            if len(self._good) == _MAX_GOOD:
                self._good.clear()  # versions come and go
            self._good[about] = stamp
        return read_unverified(envelope, predicate_type, where)

    def check_keys(self) -> None:
        """Return if the keys can be read.

        Raises:
            SignatureError: one of the files is no public key.
            UnavailableError: it cannot be found out now.
        """
        self._ask(None, _KEYS, stamp_keys(self._keys))

    def rest(self) -> None:
        """End the process once it has answered; from now on each question starts one of its own.

        This waits for no answer.
        """
        self._stays = False
        self._tidy()

    def __enter__(self) -> "VerifyingProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        child = self._child
        if child is not None:
            child.kill()  # whoever waits for its answer hears of it
        self.rest()

    def _ask(self, question: _Question, about: str, stamp: KeysStamp) -> None:
        try:
            with self._lock:
                answer = self._try(question, about, stamp)
        finally:
            self._tidy()
        if answer is not None:
            raise SignatureError(*answer)

    def _try(self, question: _Question, about: str, stamp: KeysStamp) -> _Answer:
        if self._child is not None and self._child.stamp != stamp:
            self._end()  # it knows the keys of before
        end_s = time.monotonic() + _ANSWER_S
        try:
            return self._try_once(question, about, stamp, _FIRST_SHARE * _ANSWER_S)
        except UnavailableError:  # it may have been ended for want of memory, or by hand
            if self._is_over:
                raise
            left_s = max(end_s - time.monotonic(), (1 - _FIRST_SHARE) * _ANSWER_S)
            return self._try_once(question, about, stamp, left_s)

    def _try_once(self, question: _Question, about: str, stamp: KeysStamp, limit_s: float) -> _Answer:
        try:
            if self._child is None:
                self._child = _Child(self._keys, stamp, gives_way=not self._stays)
            self._check_going_on()  # now that who ends this sees the child
            return self._child.ask(question, about, limit_s)
        except BaseException:
            self._end()  # its answer may still come, and is none to the next question
            raise

    def _check_going_on(self) -> None:
        if self._is_over:
            raise UnavailableError(f"{self._keys}: no more signatures are verified, since the service ends")

    def _tidy(self) -> None:
        """End a process that shall not stay, unless one is waiting for it, who does this afterwards."""
        if not self._stays and self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


def _cannot_start(cause: OSError) -> UnavailableError:
    return UnavailableError(f"no process that verifies signatures can be started: {cause}; try again")


class _Child:
    """The process, and what it is asked.

    Attributes:
        stamp: of the keys, before it read them.
    """

    def __init__(self, keys: Path, stamp: KeysStamp, *, gives_way: bool = False) -> None:
        self.stamp = stamp
        try:
            near, far = socket.socketpair()
        except OSError as cause:
            raise _cannot_start(cause) from cause
        with near, far:
            passed = (str(far.fileno()), str(os.getpid()), str(keys))
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "edgekit_runtime.trust.verifier_process", *passed],
                    cwd="/",  # nobody but the system's owner can put modules there
                    env=child_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # what is imported may print, and that is no answer
                    stderr=subprocess.PIPE,
                    pass_fds=(far.fileno(),),
                    start_new_session=True,  # Ctrl-C is for the service
                )
            except OSError as cause:
                raise _cannot_start(cause) from cause
            if gives_way:  # to requests: a new version can wait for them, they cannot wait for it
                give_way(self._process.pid)
            self._near = near
            self._lines = near.makefile("rw", encoding="ascii")

    def ask(self, question: _Question, about: str, limit_s: float) -> _Answer:
        self._near.settimeout(limit_s)
        try:
            self._lines.write(f"{json.dumps(question)}\n")
            self._lines.flush()
            return _read_answer(self._lines.readline(), about)
        except TimeoutError as cause:
            raise UnavailableError(
                f"the process that verifies signatures hangs ({limit_s:.3g} s); is a disk that it reads from"
                " hanging, or the machine overloaded? Try again"
            ) from cause
        except (OSError, ValueError) as cause:  # no line is no JSON
            raise UnavailableError(
                f"the process that verifies signatures ended before it answered{self._explain()}; try again"
            ) from cause

    def kill(self) -> None:
        self._process.kill()  # it has nothing to lose, and by itself it takes 10 ms

    def end(self) -> None:
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        with contextlib.suppress(OSError):  # a question that nobody reads any more
            self._lines.close()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _explain(self) -> str:
        """Return how it ended and the last line that it wrote about that, to follow the word 'answered'."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        code, stream = self._process.poll(), self._process.stderr
        how = "" if code is None else f", {describe_end(code)}"
        if stream is None:
            return how
        os.set_blocking(stream.fileno(), False)  # a process that it started may hold the other end
        lines = (stream.read() or b"").decode(errors="replace").strip().splitlines()
        return f"{how}: {lines[-1][:_MAX_LAST_WORDS]}" if lines else how


def _name(envelope: bytes, predicate_type: str) -> str:
    """Return what an answer says that it is about."""
    return f"{hashlib.sha256(envelope).hexdigest()} {predicate_type}"


def _read_answer(line: str, about: str) -> _Answer:
    """Return the answer on a line; yes is to name what was asked about, and nothing else.

    Raises:
        ValueError: it is none, or one to another question.
    """
    match json.loads(line):
        case [named] if named == about:
            return None
        case [named, str(message), (str() | None) as key_id] if named == about:
            return message, key_id
    raise ValueError(f"{line[:80]!r} is no answer about {about}")


def _answer_questions(lines: TextIO, keys: Path) -> None:
    """Answer each line of `lines` with a line: what the process is there for."""
    from edgekit_runtime.trust.trust_store import TrustStore

    trust: TrustStore | SignatureError
    try:
        trust = TrustStore.from_folder(keys)
    except SignatureError as error:
        trust = error
    for line in lines:
        envelope, predicate_type, where = json.loads(line) or (None, "", "")
        data = b"" if envelope is None else base64.b64decode(envelope)
        answer: list[str | None] = [_KEYS if envelope is None else _name(data, predicate_type)]
        try:
            if isinstance(trust, SignatureError):
                raise trust
            if envelope is not None:
                trust.verify(data, predicate_type, where)
        except SignatureError as error:
            answer += [str(error), error.key_id]
        lines.write(f"{json.dumps(answer)}\n")
        lines.flush()


def _main(descriptor: int, parent: int, keys: Path) -> None:
    from edgekit_runtime.system.child_process import end_with

    end_with(parent)
    with socket.socket(fileno=descriptor) as far, far.makefile("rw", encoding="ascii") as lines:
        _answer_questions(lines, keys)


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):  # nobody waits for the answer any more
        _main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
