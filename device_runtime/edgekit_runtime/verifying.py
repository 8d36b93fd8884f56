"""Signatures verified in a process of its own, which ends when that is done.

What it takes (`cryptography`, `securesystemslib`) is 11 MB, a sixth of an idle service, and needed for a
moment once a package. Keys and rules are those of `signing`, which that process runs.
"""

import base64
import contextlib
import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Final, TextIO, TypeAlias

from edgekit_runtime.errors import SignatureError, UnavailableError
from edgekit_runtime.processes import child_environment, give_way
from edgekit_runtime.statements import Statement, read_unverified

_MAX_GOOD: Final = 256  # envelopes
_TRIES: Final = 2  # processes a question: one may be ended for want of memory, or by hand
_ANSWER_S: Final = 30.0  # for an answer of a process that starts, slowed, on a small device

_Question: TypeAlias = "tuple[str, str, str] | None"
"""An envelope in base64, its predicate type and where it lies; None: can the keys be read?"""
_Answer: TypeAlias = "tuple[str, str | None] | None"
"""The message of a `SignatureError` and its key id; None: yes."""


class VerifyingProcess:
    """A `Verifier` of the keys in a folder, which each process reads anew.

    The first process starts at once, beside whatever its maker does next, and stays until `rest`; later ones
    end with their answer. What was found good is not asked again.
    """

    def __init__(self, keys: Path | None = None) -> None:
        """Start the first process.

        Args:
            keys: folder of the trusted keys; by default `signing.find_keys_folder()`.

        Raises:
            UnavailableError: it cannot be started.
        """
        self._arguments = [] if keys is None else [str(keys.absolute())]
        self._lock = threading.Lock()
        self._good: set[tuple[bytes, str]] = set()
        self._stays = True
        self._child: _Child | None = _Child(self._arguments)

    def verify(self, envelope: bytes, predicate_type: str, where: str) -> tuple[Statement, str]:
        """Return the statement in an envelope and the id of the key that signed it, see `Verifier`."""
        if (envelope, predicate_type) not in self._good:
            self._ask((base64.b64encode(envelope).decode("ascii"), predicate_type, where))
            if len(self._good) == _MAX_GOOD:
                self._good.clear()  # versions come and go
            self._good.add((envelope, predicate_type))
        return read_unverified(envelope, predicate_type, where)

    def check_keys(self) -> None:
        """Return if the keys can be read.

        Raises:
            SignatureError: one of the files is no public key.
            UnavailableError: it cannot be found out now.
        """
        self._ask(None)

    def rest(self) -> None:
        """End the process; from now on each question starts one of its own."""
        with self._lock:
            self._stays = False
            self._end()

    def __enter__(self) -> "VerifyingProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.rest()

    def _ask(self, question: _Question) -> None:
        with self._lock:
            for left in reversed(range(_TRIES)):
                try:
                    if self._child is None:
                        self._child = _Child(self._arguments, gives_way=not self._stays)
                    answer = self._child.ask(question)
                    break
                except UnavailableError:
                    self._end()
                    if not left:
                        raise
            if not self._stays:
                self._end()
        if answer is not None:
            raise SignatureError(*answer)

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class _Child:
    """The process, and what it is asked."""

    def __init__(self, arguments: list[str], *, gives_way: bool = False) -> None:
        near, far = socket.socketpair()
        with near, far:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "edgekit_runtime.verifying", str(far.fileno()), *arguments],
                    cwd="/",  # nobody but the system's owner can put modules there
                    env=child_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # what is imported may print, and that is no answer
                    pass_fds=(far.fileno(),),
                    start_new_session=True,  # Ctrl-C is for the service
                )
            except OSError as cause:
                raise UnavailableError(
                    f"no process that verifies signatures can be started: {cause}"
                ) from cause
            if gives_way:  # to requests: a new version can wait for them, they cannot wait for it
                give_way(self._process.pid)
            near.settimeout(_ANSWER_S)
            self._lines = near.makefile("rw", encoding="ascii")

    def ask(self, question: _Question) -> _Answer:
        try:
            self._lines.write(f"{json.dumps(question)}\n")
            self._lines.flush()
            return _read_answer(self._lines.readline())
        except TimeoutError as cause:
            raise UnavailableError(
                f"the process that verifies signatures hangs ({_ANSWER_S:g} s); load the model again"
            ) from cause
        except (OSError, ValueError) as cause:  # no line is no JSON
            raise UnavailableError(
                "the process that verifies signatures ended before it answered; load the model again"
            ) from cause

    def end(self) -> None:
        self._process.kill()  # it has nothing to lose, and by itself it takes 10 ms
        self._process.wait()
        with contextlib.suppress(OSError):  # a question that nobody reads any more
            self._lines.close()


def _read_answer(line: str) -> _Answer:
    """Return the answer on a line; yes is one thing only.

    Raises:
        ValueError: it is none.
    """
    answer = json.loads(line)
    if answer is None:
        return None
    match answer:
        case [str(message), str() | None as key_id]:
            return message, key_id
    raise ValueError(f"{line[:80]!r} is no answer")


def _answer_questions(lines: TextIO, keys: Path | None) -> None:
    """Answer each line of `lines` with a line: what the process is there for."""
    from edgekit_runtime.signing import TrustStore, find_keys_folder

    try:
        trust = TrustStore.from_folder(find_keys_folder() if keys is None else keys)
    except SignatureError as error:
        for _ in lines:
            _answer(lines, (str(error), None))
        return
    for line in lines:
        question: _Question = json.loads(line)
        try:
            if question is not None:
                envelope, predicate_type, where = question
                trust.verify(base64.b64decode(envelope), predicate_type, where)
        except SignatureError as error:
            _answer(lines, (str(error), error.key_id))
        else:
            _answer(lines, None)


def _answer(lines: TextIO, answer: _Answer) -> None:
    lines.write(f"{json.dumps(answer)}\n")
    lines.flush()


def _main(descriptor: int, keys: Path | None) -> None:
    with socket.socket(fileno=descriptor) as far, far.makefile("rw", encoding="ascii") as lines:
        _answer_questions(lines, keys)


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):  # nobody waits for the answer any more
        _main(int(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
