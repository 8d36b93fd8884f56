"""Runs a module of this project in a child process.

Only this module starts child processes. They run isolated models, verify signatures, build TensorRT engines,
and do work of the toolkit that may crash, hang or use all memory.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Final, Literal, TypeAlias

from edgekit_runtime.records import dataclass

if TYPE_CHECKING:
    import asyncio

    from typing_extensions import Self

Output: TypeAlias = Literal["drop", "keep", "log"]
"""The use of a child's standard output. With `log`, both of its outputs go to our standard error."""

_PARENT: Final = "EDGEKIT_PARENT"  # variable of a child with its parent's process id
_ROOT: Final = Path("/")  # only root can put modules there
_TRACER_S: Final = 1.0
_PR_SET_PDEATHSIG: Final = 1
_KILL_LIMIT_S: Final = 1.0  # a killed process may still hang in the kernel, or have no processor to end on
_POLL_S: Final = 0.05  # for kernels without process descriptors
_NICENESS: Final = 5  # above ours: a third of the weight, so that it is slowed but not starved
_OOM_SCORE: Final = 200  # as that of a worker
_MAX_TAIL_BYTES: Final = 1 << 16
_MAX_LINE: Final = 2000  # characters
_PART_BYTES: Final = 1 << 16


def child_environment() -> dict[str, str]:
    """Return the environment of this process, with its import path as `PYTHONPATH`."""
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path}


def describe_end(exit_code: int) -> str:
    """Return a text such as `with exit code 3` or `by SIGSEGV`, for a message after the word "ended".

    Args:
        exit_code: The exit code, or the negative number of a signal.
    """
    return f"by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"with exit code {exit_code}"


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The result of a program.

    Attributes:
        exit_code: The exit code, the negative number of a signal, or None if the time limit was exceeded.
        output: The standard output, or its end if it was long.
        last_line: The last line of the standard error, or an empty string.
    """

    exit_code: int | None
    output: bytes
    last_line: str


def run_program(
    argv: Sequence[str], sent: Iterable[bytes | memoryview], limit_s: float, max_output_bytes: int
) -> ProgramResult:
    """Run a program and return its result.

    Args:
        argv: The path or name of the program, and its arguments.
        sent: The standard input, in parts.
        limit_s: The time after which the program is killed.
        max_output_bytes: The maximum size of the returned output. If the output is longer, its end is
            returned.

    Raises:
        OSError: The program cannot be started.
    """
    with _open_unnamed() as source, _open_unnamed() as output, _open_unnamed() as errors:
        source.writelines(sent)
        source.flush()
        source.seek(0)
        process = subprocess.Popen(  # noqa: TID251  # no shell; here alone
            list(argv), stdin=source, stdout=output, stderr=errors, env=child_environment()
        )
        try:
            exit_code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            process.kill()  # does nothing if it has ended
            process.wait()
        return ProgramResult(exit_code, _read_tail(output, max_output_bytes), _find_last_line(errors))


class ChildProcess:
    """A running `python -m MODULE`, which is killed by `close` or at the end of a `with` block.

    The standard input is empty. The standard error is stored for `last_line` unless `output` is `log`.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        folder: Path = _ROOT,
        output: Output = "drop",
        variables: Mapping[str, str] | None = None,
        channel: socket.socket | None = None,
        own_session: bool = False,
        python: Sequence[str] = (),
    ) -> None:
        """Start the process.

        Args:
            module: name of one of our modules.
            arguments: arguments of the command line.
            folder: working folder. Python looks there first for modules, so nobody else may write into it.
            output: `drop` its standard output, `keep` it for `output`, or `log` it to our standard error.
            variables: variables of the environment, in addition to this process's.
            channel: the child's end of a socket pair, whose descriptor it gets before `arguments`, see
                `open_channel`; stays the caller's.
            own_session: whether signals of the terminal (Ctrl-C) do not reach it.
            python: command of the Python that runs the module, such as an emulated one; by default this one.

        Raises:
            OSError: the process cannot be started.
        """
        passed = () if channel is None else (channel.fileno(),)
        with contextlib.ExitStack() as files:
            self._errors = None if output == "log" else files.enter_context(_open_unnamed())
            self._output = files.enter_context(_open_unnamed()) if output == "keep" else None
            self._process = subprocess.Popen(  # noqa: TID251  # here alone
                [*(python or (sys.executable,)), "-m", module, *map(str, passed), *arguments],
                cwd=folder,
                env={**child_environment(), _PARENT: str(os.getpid()), **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=self._output or (2 if output == "log" else subprocess.DEVNULL),
                stderr=self._errors,
                pass_fds=passed,
                start_new_session=own_session,
            )
            self._files = files.pop_all()
        self.pid = self._process.pid
        self._pidfd = open_pidfd(self.pid)

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait(self, limit_s: float) -> int | None:
        """Return the exit code, the negative number of a signal, or None if it still runs after `limit_s`."""
        if self._pidfd is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(limit_s)
        elif self._process.poll() is None:  # `select` does not accept descriptors over 1023
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if poll.poll(limit_s * 1000):
                # A tracer such as strace sees the end first, and until then there is no exit code.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_TRACER_S)
        return self._process.poll()

    def call_at_end(self, loop: "asyncio.AbstractEventLoop", done: Callable[[int], None]) -> None:
        """Call `done` with the exit code on the thread of `loop` when the process has ended."""

        def check() -> None:
            code = self._process.poll()
            if code is not None:
                if self._pidfd is not None:
                    loop.remove_reader(self._pidfd)
                done(code)
            elif self._pidfd is None:
                loop.call_later(_POLL_S, check)

        if self._pidfd is None:
            loop.call_later(_POLL_S, check)
        else:
            loop.add_reader(self._pidfd, check)

    def kill(self) -> None:
        """Kill the process with SIGKILL if it is still running."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process and free its resources. A second call does nothing."""
        self.kill()
        if self.wait(_KILL_LIMIT_S) is None:
            threading.Thread(target=self._process.wait, daemon=True).start()
        self._files.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def lower_priority(self) -> None:
        """Give the child a lower priority than this process. The child must have its own session.

        If memory runs out, the kernel kills the child first. The autogroup scheduler compares niceness only
        within a session, so the niceness of the session is set too. Errors are ignored.

        Source: sched(7), "The autogroup feature".
        """
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.pid, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.pid}/autogroup").write_text(str(_NICENESS))
        with contextlib.suppress(OSError):
            score = Path(f"/proc/{self.pid}/oom_score_adj")
            score.write_text(str(max(_OOM_SCORE, int(score.read_text()))))

    @property
    def output(self) -> bytes:
        """The standard output so far. It is empty unless the process was started with `output="keep"`."""
        return b"" if self._output is None else _read_tail(self._output, None)

    @property
    def last_line(self) -> str:
        """The last line of the standard error, or an empty string."""
        return "" if self._errors is None else _find_last_line(self._errors)

    def explain_end(self) -> str:
        """Return the text of `describe_end` and the last line, such as `by SIGSEGV: out of memory`."""
        code = self._process.poll()
        how = "for an unknown reason" if code is None else describe_end(code)
        return f"{how}: {self.last_line or 'it printed no message'}"


class JsonChild(ChildProcess):
    """A child process that exchanges lines of JSON with this process.

    Attributes:
        descriptors: The received file descriptors. A caller that removes a descriptor must close it.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        own_session: bool = False,
        python: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process, see `ChildProcess`.

        Raises:
            OSError: the process cannot be started.
        """
        near, far = socket.socketpair()
        with far, contextlib.ExitStack() as undo:
            undo.enter_context(near)
            super().__init__(
                module,
                *arguments,
                channel=far,
                own_session=own_session,
                python=python,
                variables=variables,
            )
            undo.pop_all()
        self._near, self._received = near, bytearray()
        self.descriptors: list[int] = []  # received with documents; the code that removes one closes it

    def send(self, document: Any, limit_s: float) -> None:
        """Send one document.

        Raises:
            TimeoutError: The child did not read the document within `limit_s`.
            OSError: The child has ended.
        """
        self._near.settimeout(limit_s)
        self._near.sendall(f"{json.dumps(document)}\n".encode("ascii"))

    def receive(self, limit_s: float, most_bytes: int | None = None) -> Any:
        """Return the next document, and add the file descriptors that came with it to `descriptors`.

        Args:
            limit_s: The maximum time to wait. After a timeout, the next call continues to wait.
            most_bytes: The maximum size, or None.

        Raises:
            TimeoutError: The document did not arrive within `limit_s`.
            EOFError: The child has ended.
            OSError: The child has ended before it read all documents.
            ValueError: The document is not JSON, or is too long.
        """
        end_s, received_count = time.monotonic() + limit_s, 0
        while (size := self._received.find(b"\n", received_count)) < 0:
            received_count = len(self._received)
            if most_bytes is not None and received_count > most_bytes:
                break
            self._near.settimeout(max(1e-3, end_s - time.monotonic()))
            part, descriptors, _, _ = socket.recv_fds(self._near, _PART_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            self.descriptors += descriptors
            if not part:
                raise EOFError("it closed its channel")
            self._received += part
        if most_bytes is not None and not 0 <= size <= most_bytes:
            raise ValueError(f"it sent a line of over {most_bytes} bytes")
        line = self._received[:size].decode("ascii")
        del self._received[: size + 1]
        return json.loads(line)

    def close(self) -> None:
        """Kill the process and free its resources."""
        super().close()
        self._near.close()
        while self.descriptors:
            os.close(self.descriptors.pop())


def open_channel() -> socket.socket:
    """Return this process's end of the channel to its parent.

    After this, the kernel kills this process when the parent ends. If the parent has already ended, this
    process exits.
    """
    end_with_parent()
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    return channel


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends. Exit if the parent has already ended.

    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    import ctypes  # which the parent should not import for its children

    with contextlib.suppress(OSError, AttributeError):  # no glibc or musl: the channel's end shows it too
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[_PARENT]):
        os._exit(0)


def _open_unnamed() -> IO[bytes]:
    """Return a file without a name: in memory, or in a temporary folder if that is not possible."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("edgekit-child"), "w+b")
    import tempfile  # which an idle service should not import

    return tempfile.TemporaryFile()


def _read_tail(file: IO[bytes], most_bytes: int | None) -> bytes:
    """Return at most `most_bytes` of a file's end, without moving the offset at which the child writes."""
    size_bytes = os.fstat(file.fileno()).st_size
    begin = 0 if most_bytes is None else max(0, size_bytes - most_bytes)
    return os.pread(file.fileno(), size_bytes - begin, begin)


def _find_last_line(file: IO[bytes]) -> str:
    lines = _read_tail(file, _MAX_TAIL_BYTES).decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:_MAX_LINE] if lines else ""


def open_pidfd(pid: int) -> int | None:
    """Return a new descriptor that becomes readable when the process ends, or None before Linux 5.3."""
    with contextlib.suppress(OSError, AttributeError):
        return os.pidfd_open(pid)
    return None
