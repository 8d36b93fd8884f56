"""Downloads and installations in a separate process, which ends after the step.

The libraries for a step, such as python-tuf and numpy, need at least 20 MB of memory, and an agent uses them
for only some seconds a month. The process and the agent exchange lines of JSON:

    to the process      the order, and `"stop"` to stop the step
    to the agent        a `StepNews` twice a second, after each 64 KiB, and at the end
"""

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TextIO

from edgekit_runtime.agent.execution.step_result import NoteKind, StepOrder, StepResult
from edgekit_runtime.dataclass_json import from_plain, to_plain
from edgekit_runtime.errors import ConfigError
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.child_process import JsonChild, open_channel
from edgekit_runtime.system.shown_text import log_lines

_MODULE: Final = "edgekit_runtime.agent.execution.step_child"
_PERIOD_S: Final = 0.5
_PIECE_BYTES: Final = 64 << 10  # per report. A killed process leaves at most this unreported
_SEND_S: Final = 10.0
MAX_FAILURES: Final = 3
_END_S: Final = 1.0  # wait for the exit code of a process that closed its channel
_MAX_NEWS_BYTES: Final = 1 << 16
_MAX_TEXT: Final = 1000  # characters of an event


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlaces:
    """Paths for a step process.

    Attributes:
        config: configuration folder.
        state: folder of the slots. It contains the agent's folder.
        keys: folder of the keys whose packages are trusted.
        socket_path: socket of the service, or None to look for a running service.
    """

    config: str
    state: str
    keys: str
    socket_path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNews:
    """Progress or result that a step process reports.

    Attributes:
        received_bytes: bytes received since the last report.
        notes: kind and text of each event since the last report.
        result: result of the step, or None while the step is running.
    """

    received_bytes: int
    notes: tuple[tuple[NoteKind, str], ...] = ()
    result: StepResult | None = None


class ChildSteps:
    """A `StepCarrier` that starts a process for each step."""

    def __init__(
        self,
        folders: StepPlaces,
        *,
        module: str = _MODULE,
        silence_s: float = 60.0,
        stop_s: float = 3.0,
    ) -> None:
        """Use the paths in `folders`.

        Args:
            folders: paths of steps.
            module: module that carries a step out.
            silence_s: time without news after which the process or its disk hangs.
            stop_s: wait for a process that was told to stop, before it is killed.
        """
        self._folders, self._module = folders, module
        self._silence_s, self._stop_s = silence_s, stop_s

    def carry_out(
        self,
        order: StepOrder,
        stop: threading.Event,
        note: Callable[[NoteKind, str], None],
        count: Callable[[int], None],
    ) -> StepResult:
        """Carry out a step in a new process, see `StepCarrier`. If the process fails, return `retry`."""
        try:
            with JsonChild(self._module, own_session=True) as child:
                child.lower_priority()
                try:
                    child.send([to_plain(self._folders), to_plain(order)], _SEND_S)
                    return self._follow(child, stop, note, count)
                except TimeoutError:
                    how = f"hangs ({self._silence_s:.0f} s)"
                except (ValueError, ConfigError, RecursionError) as error:
                    how = f"sent no news of a step: {error}"
                except (OSError, EOFError):
                    child.wait(_END_S)
                    how = f"ended {child.explain_end()}"
        except OSError as cause:
            how = f"cannot be started: {cause}"
        reason = f"the process of the step '{order.step.action}' {how}"
        return StepResult(outcome="retry", code="internal", reason=reason, max_failures=MAX_FAILURES)

    def _follow(
        self,
        child: JsonChild,
        stop: threading.Event,
        note: Callable[[NoteKind, str], None],
        count: Callable[[int], None],
    ) -> StepResult:
        """Return the result of the process, and pass on its reports.

        A process that continues after it was told to stop is left without a result; the caller ends it.

        Raises:
            TimeoutError: the process is silent for too long.
            OSError, EOFError: it has ended.
            ValueError, ConfigError, RecursionError: it sent something other than `StepNews`.
        """
        heard_s, give_up_s = time.monotonic(), math.inf
        while time.monotonic() < give_up_s:
            if stop.is_set() and give_up_s == math.inf:
                give_up_s = time.monotonic() + self._stop_s
                with contextlib.suppress(OSError):  # it may have ended; earlier messages count
                    child.send("stop", _PERIOD_S)
            try:
                sent = child.receive(_PERIOD_S, _MAX_NEWS_BYTES)
            except TimeoutError:
                if time.monotonic() - heard_s > self._silence_s:
                    raise
                continue
            heard_s = time.monotonic()
            news = from_plain(StepNews, sent, "news of a step")
            count(news.received_bytes)
            for kind, text in news.notes:
                note(kind, text)
            if news.result is not None:
                return news.result
        return StepResult()


class _Reporter:
    def __init__(self, lines: TextIO) -> None:
        self._lines, self._lock = lines, threading.Lock()
        self._came_bytes = 0
        self._notes: list[tuple[NoteKind, str]] = []

    def count(self, received_bytes: int) -> None:
        with self._lock:
            self._came_bytes += received_bytes
            is_much = self._came_bytes >= _PIECE_BYTES
        if is_much:
            with contextlib.suppress(OSError, ValueError):  # the agent has ended, and this process will
                self.send()

    def note(self, kind: NoteKind, text: str) -> None:
        with self._lock:
            self._notes.append((kind, text[:_MAX_TEXT].replace("\0", " ")))

    def send(self, result: StepResult | None = None) -> None:
        with self._lock:
            news = StepNews(received_bytes=self._came_bytes, notes=tuple(self._notes), result=result)
            self._came_bytes, self._notes = 0, []
            self._lines.write(f"{json.dumps(to_plain(news))}\n")
            self._lines.flush()

    def run(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # it ends with the agent, or after the result
            while True:
                time.sleep(_PERIOD_S)
                self.send()


def _carry_out(
    folders: StepPlaces, order: StepOrder, stop: threading.Event, reporter: _Reporter
) -> StepResult:
    from edgekit_runtime.agent.artifacts.download import Downloader, DownloadLimits
    from edgekit_runtime.agent.execution.install import Installer
    from edgekit_runtime.agent.execution.local_steps import LocalSteps
    from edgekit_runtime.agent.membership import read_membership
    from edgekit_runtime.agent.trusted_time import TrustedTime
    from edgekit_runtime.slots import Slots
    from edgekit_runtime.trust.trust_store import TrustStore

    member, state = read_membership(Path(folders.config)), Path(folders.state)
    slots = Slots(state, TrustStore.from_folder(Path(folders.keys)), member.enrolment.target)
    installer = Installer(slots, None if folders.socket_path is None else Path(folders.socket_path))
    limits = DownloadLimits(bytes_per_s=order.bytes_per_s)
    trusted_time = TrustedTime(member.enrolment.certificate)
    trusted_time.note(order.known_time_s)
    downloader = Downloader(member.make_download_context(trusted_time), limits, slots.disk)
    steps = LocalSteps(member, state / "fleet", installer, downloader, clock=time.time)
    return steps.carry_out(order, stop, reporter.note, reporter.count)


def _main() -> None:
    log_lines()
    with open_channel() as channel, channel.makefile("r") as sent, channel.makefile("w") as lines:
        sent_folders, sent_order = json.loads(sent.readline())
        folders = from_plain(StepPlaces, sent_folders, "folders")
        order = from_plain(StepOrder, sent_order, "order")
        stop, reporter = threading.Event(), _Reporter(lines)

        def listen() -> None:
            with contextlib.suppress(OSError, ValueError):
                sent.readline()
            stop.set()

        for work in (listen, reporter.run):
            threading.Thread(target=work, daemon=True).start()
        code = 1
        try:
            reporter.send(_carry_out(folders, order, stop, reporter))
            code = 0
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)  # a plain end would wait for `listen`, which still reads


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):  # nobody waits for the answer any more
        _main()
