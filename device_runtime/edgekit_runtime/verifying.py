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
from typing import Final, TypeAlias

from edgekit_runtime.errors import SignatureError, UnavailableError
from edgekit_runtime.processes import child_environment, give_way
from edgekit_runtime.statements import Statement, read_unverified

_MAX_GOOD: Final = 256  # envelopes

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
            if self._child is None:
                self._child = _Child(self._arguments, gives_way=True)
            try:
                answer = self._child.ask(question)
            except UnavailableError:
                self._end()
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
                    [sys.executable, "-m", "edgekit_runtime.verifying", *arguments],
                    cwd="/",  # nobody but the system's owner can put modules there
                    env=child_environment(),
                    stdin=far.fileno(),
                    stdout=far.fileno(),
                    start_new_session=True,  # Ctrl-C is for the service
                )
            except OSError as cause:
                raise UnavailableError(
                    f"no process that verifies signatures can be started: {cause}"
                ) from cause
            if gives_way:  # to requests: a new version can wait for them, they cannot wait for it
                give_way(self._process.pid)
            self._lines = near.makefile("rw")

    def ask(self, question: _Question) -> _Answer:
        try:
            self._lines.write(f"{json.dumps(question)}\n")
            self._lines.flush()
            answer: _Answer = json.loads(self._lines.readline())
        except (OSError, ValueError) as cause:  # no line is no JSON
            raise UnavailableError(
                "the process that verifies signatures ended before it answered; load the model again"
            ) from cause
        return answer

    def end(self) -> None:
        self._process.kill()  # it has nothing to lose, and by itself it takes 10 ms
        self._process.wait()
        with contextlib.suppress(OSError):  # a question that nobody reads any more
            self._lines.close()


def _answer_questions(keys: Path | None) -> None:
    """Answer each line of the standard input with a line: what the process is there for."""
    from edgekit_runtime.signing import TrustStore, find_keys_folder

    try:
        trust = TrustStore.from_folder(find_keys_folder() if keys is None else keys)
    except SignatureError as error:
        for _ in sys.stdin:
            _answer((str(error), None))
        return
    for line in sys.stdin:
        question: _Question = json.loads(line)
        try:
            if question is not None:
                envelope, predicate_type, where = question
                trust.verify(base64.b64decode(envelope), predicate_type, where)
        except SignatureError as error:
            _answer((str(error), error.key_id))
        else:
            _answer(None)


def _answer(answer: _Answer) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _answer_questions(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
