"""Verifies signatures and decrypts packages in a child process.

The libraries (`cryptography`, `securesystemslib`) take 10 MB of memory and are needed only briefly for each
package. The child process runs `trust_store` and `encryption.opening`. For an encrypted package, it sends the
descriptor of the plaintext in memory.
"""

import base64
import contextlib
import hashlib
import json
import socket
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeAlias

from edgekit_runtime.encryption import DEVICE_KEY
from edgekit_runtime.errors import EdgekitError, SignatureError, UnavailableError
from edgekit_runtime.system.atomic_files import find_size
from edgekit_runtime.system.child_process import JsonChild, open_channel
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.dsse import Statement, read_unverified
from edgekit_runtime.trust.keys import KeysStamp, stamp_keys

if TYPE_CHECKING:
    from edgekit_runtime.encryption.opening import Decrypted

_MAX_GOOD: Final = 256  # envelopes
_END_S: Final = 1.0  # for the exit code of a process that closed its channel

_MODULE: Final = "edgekit_runtime.trust.verifier_process"
_KEYS: Final = "keys"  # asks whether the keys can be read

_BYTES_PER_S: Final = 10e6  # a small device without instructions for AES decrypts several times as many

_Question: TypeAlias = "tuple[str, str, str] | tuple[str, int] | None"
"""An envelope in base64, its predicate type and place, or the path and maximum size of an encrypted package,
or None to ask whether the keys can be read."""
_Answer: TypeAlias = "EdgekitError | Decrypted | None"
"""The error to raise, the plaintext, or None for success."""


class VerifyingProcess:
    """A `Verifier` that checks signatures in a child process, with the keys in a folder.

    The first child starts immediately and runs until `stop_when_idle`. Each later child ends after one
    answer. Each child reads the keys when it starts. A verified envelope is not verified again while the
    folder is unchanged.
    """

    def __init__(
        self, keys: Path | None = None, *, answer_s: float = 30.0, first_share: float = 2 / 3
    ) -> None:
        """Start the first process.

        Args:
            keys: folder of the trusted keys; by default `find_keys_folder()`.
            answer_s: time limit of an answer, also of a process that starts on a slow device.
            first_share: share of `answer_s` after which a process that hangs is replaced by another one.
        """
        self._keys = (find_keys_folder() if keys is None else keys).absolute()
        self._answer_s, self._first_share = answer_s, first_share
        self._lock = threading.Lock()
        self._good: dict[str, KeysStamp] = {}
        self._stays, self._is_over = True, False
        self._stamp = stamp_keys(self._keys)  # of the keys that the process reads
        self._child: JsonChild | None = self._start()

    def verify(self, envelope: bytes, predicate_type: str, where: str) -> tuple[Statement, str]:
        """Verify an envelope, see `Verifier`."""
        about, stamp = _name(envelope, predicate_type), stamp_keys(self._keys)
        if self._good.get(about) != stamp:
            self._ask((base64.b64encode(envelope).decode("ascii"), predicate_type, where), about, stamp)
            if len(self._good) == _MAX_GOOD:
                self._good.clear()  # versions come and go
            self._good[about] = stamp
        return read_unverified(envelope, predicate_type, where)

    def decrypt(self, path: Path, max_bytes: int) -> "Decrypted":
        """Return the plaintext of an encrypted package, see `decrypt_file`."""
        question = str(path.absolute()), max_bytes
        extra_s = min(find_size(path), max_bytes) / _BYTES_PER_S
        decrypted = self._ask(question, str(question), stamp_keys(self._keys), extra_s)
        assert decrypted is not None  # noqa: S101  # for the type checker: a plain yes is refused
        return decrypted

    def check_keys(self) -> None:
        """Check that the keys can be read.

        Raises:
            SignatureError: A file is not a public key.
            UnavailableError: A file cannot be read now, or the child does not answer.
        """
        self._ask(None, _KEYS, stamp_keys(self._keys))

    def stop_when_idle(self) -> None:
        """End the child after its current answer, and start a new one for each later request.

        This returns immediately.
        """
        self._stays = False
        self._end_if_idle()

    def __enter__(self) -> "VerifyingProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        child = self._child
        if child is not None:
            child.kill()  # a thread that waits for its answer gets an error
        self.stop_when_idle()

    def _ask(
        self, question: _Question, about: str, stamp: KeysStamp, extra_s: float = 0.0
    ) -> "Decrypted | None":
        try:
            with self._lock:
                answer = self._ask_twice(question, about, stamp, self._answer_s + extra_s)
        finally:
            self._end_if_idle()
        if isinstance(answer, EdgekitError):
            raise answer
        return answer

    def _ask_twice(self, question: _Question, about: str, stamp: KeysStamp, answer_s: float) -> _Answer:
        """Return the answer of the process, or of the next one if it was killed or hangs."""
        if self._stamp != stamp:
            self._end()
        self._stamp = stamp
        end_s = time.monotonic() + answer_s
        try:
            return self._ask_once(question, about, self._first_share * answer_s)
        except UnavailableError:
            if self._is_over:
                raise
            left_s = max(end_s - time.monotonic(), (1 - self._first_share) * answer_s)
            return self._ask_once(question, about, left_s)

    def _ask_once(self, question: _Question, about: str, limit_s: float) -> _Answer:
        try:
            if self._child is None:
                self._child = self._start()
                if not self._stays:  # requests are being answered, and a new version can wait
                    self._child.lower_priority()
            self._check_going_on()  # now that `__exit__` can see the child
            return _ask_child(self._child, question, about, limit_s)
        except BaseException:
            self._end()  # it may still answer this question, and must not answer the next one so
            raise

    def _check_going_on(self) -> None:
        if self._is_over:
            raise UnavailableError(f"{self._keys}: the service ends and verifies no more signatures")

    def _start(self) -> JsonChild:
        try:
            return JsonChild(_MODULE, str(self._keys), own_session=True)
        except OSError as cause:
            raise UnavailableError(
                f"no process that verifies signatures can be started: {cause}; try again"
            ) from cause

    def _end_if_idle(self) -> None:
        """End a process that need not stay; a thread that waits for its answer does this afterwards."""
        if not self._stays and self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()


def _ask_child(child: JsonChild, question: _Question, about: str, limit_s: float) -> _Answer:
    try:
        child.send(question, limit_s)
        return _check_answer(child.receive(limit_s), about, child.descriptors)
    except TimeoutError as cause:
        raise UnavailableError(
            f"the process that verifies signatures hangs ({limit_s:.3g} s); is a disk that it reads from"
            " hanging, or the machine overloaded? Try again"
        ) from cause
    except (OSError, EOFError, ValueError) as cause:
        child.wait(_END_S)
        raise UnavailableError(
            f"the process that verifies signatures ended before it answered, {child.explain_end()}; try again"
        ) from cause


def _name(envelope: bytes, predicate_type: str) -> str:
    """Return the name by which an answer refers to its question."""
    return f"{hashlib.sha256(envelope).hexdigest()} {predicate_type}"


def _check_answer(answer: Any, about: str, descriptors: list[int]) -> _Answer:
    """Return the process's answer; a positive answer must name its question, so that it fits no other.

    Raises:
        ValueError: it is no answer to this question.
    """
    match answer:
        case [named] if named == about:
            return None
        case [named, str(message), (str() | None) as key_id] if named == about:
            return SignatureError(message, key_id)
        case [named, {"local_key": str(key), "key_file": str(key_file)}] if named == about and descriptors:
            from edgekit_runtime.encryption.container import ContentKey
            from edgekit_runtime.encryption.opening import Decrypted, SealedMemory

            memory = SealedMemory(descriptors.pop())
            return Decrypted(memory, ContentKey.from_text(key), base64.b64decode(key_file))
        case [named, {"problem": str(problem), "is_damaged": bool(is_damaged)}] if named == about:
            from edgekit_runtime.encryption.container import EncryptionError

            return EncryptionError(problem) if is_damaged else UnavailableError(problem)
    raise ValueError(f"{str(answer)[:80]} is no answer about {about}")


def _decrypt(path: str, max_bytes: int) -> "tuple[dict[str, Any], Decrypted | None]":
    from edgekit_runtime.encryption.opening import decrypt_file

    try:
        decrypted = decrypt_file(Path(path), max_bytes)
    except EdgekitError as error:
        return {"problem": str(error), "is_damaged": not isinstance(error, UnavailableError)}, None
    key_file = base64.b64encode(decrypted.key_file).decode("ascii")
    return {"local_key": decrypted.local_key.to_text(), "key_file": key_file}, decrypted


def _answer_questions(channel: socket.socket, lines: TextIO, keys: Path) -> None:
    """Answer each line of `lines` with a line; the work of the process."""
    from edgekit_runtime.trust.trust_store import TrustStore

    if (find_keys_folder() / DEVICE_KEY).exists():  # its packages are encrypted: not at the first of them
        import edgekit_runtime.encryption.opening  # noqa: F401
    trust: TrustStore | SignatureError
    try:
        trust = TrustStore.from_folder(keys)
    except SignatureError as error:
        trust = error
    for line in lines:
        question = json.loads(line)
        if question is not None and len(question) == len(("path", "max_bytes")):
            result, decrypted = _decrypt(*question)
            answered = json.dumps([str(tuple(question)), result])
            descriptors = [] if decrypted is None else [decrypted.memory.descriptor]
            # Its first bytes carry the descriptor.
            socket.send_fds(channel, [f"{answered}\n".encode("ascii")], descriptors)
            continue
        envelope, predicate_type, where = question or (None, "", "")
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


def _main(keys: Path) -> None:
    with open_channel() as channel, channel.makefile("rw", encoding="ascii") as lines:
        _answer_questions(channel, lines, keys)


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):  # nobody waits for the answer any more
        _main(Path(sys.argv[2]))
