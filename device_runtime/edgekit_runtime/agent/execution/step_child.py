"""Downloads and installations in a process of their own, which ends when that is done.

What verifies metadata, applies deltas and reads packages (python-tuf, securesystemslib, numpy) takes 20 MB
and more, and an agent needs it for some seconds a month. The process exchanges lines of JSON with the agent:

    agent -> process    the order; later perhaps `"stop"`
    process -> agent    [bytes that came, events, result or null], twice a second and at the end
"""

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

from edgekit_runtime.agent.execution.step_result import StepOrder, StepResult
from edgekit_runtime.dataclass_json import from_plain, to_plain
from edgekit_runtime.system.child_process import JsonChild, open_channel

_MODULE: Final = "edgekit_runtime.agent.execution.step_child"
_PERIOD_S: Final = 0.5
_SILENCE_S: Final = 60.0  # then the process hangs, or its disk does
_SEND_S: Final = 10.0
_MAX_FAILURES: Final = 3
_END_S: Final = 1.0  # for the exit code of a process that closed its channel


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlaces:
    """Where a process of its own finds what it needs.

    Attributes:
        config: folder of the configuration, with the device's membership.
        state: folder of the slots; that of the agent is below it.
        keys: folder of the keys whose packages are trusted.
        socket_path: of the service, or None for the one that runs, if any.
        bytes_per_s: cap of the bandwidth, or None.
    """

    config: str
    state: str
    keys: str
    socket_path: str | None = None
    bytes_per_s: float | None = None


class ChildSteps:
    """A `StepCarrier` that starts a process for each step."""

    def __init__(self, places: StepPlaces) -> None:
        """Use what is at `places`."""
        self._places = places

    def carry_out(
        self,
        order: StepOrder,
        stop: threading.Event,
        note: Callable[[str, str], None],
        count: Callable[[int], None],
    ) -> StepResult:
        """Carry out a step, see `StepCarrier`; a process that ends too early is replaced a few times."""
        try:
            with JsonChild(_MODULE, own_session=True) as child:
                child.lower_priority()
                try:
                    child.send([to_plain(self._places), to_plain(order)], _SEND_S)
                    return _follow(child, stop, note, count)
                except TimeoutError:
                    how = f"hangs ({_SILENCE_S:.0f} s)"
                except (OSError, EOFError, ValueError):
                    child.wait(_END_S)
                    how = f"ended {child.explain_end()}"
        except OSError as cause:
            how = f"cannot be started: {cause}"
        reason = f"the process of the step '{order.step.action}' {how}"
        return StepResult(outcome="retry", code="internal", reason=reason, max_failures=_MAX_FAILURES)


def _follow(
    child: JsonChild, stop: threading.Event, note: Callable[[str, str], None], count: Callable[[int], None]
) -> StepResult:
    """Return the result of the process, and pass on what it reports before.

    Raises:
        TimeoutError: it is silent for too long.
        OSError, EOFError, ValueError: it has ended, or sent something else.
    """
    is_told = False
    while True:
        came_bytes, events, result = child.receive(_SILENCE_S)
        count(came_bytes)
        for kind, text in events:
            note(kind, text)
        if result is not None:
            return from_plain(StepResult, result, "the result of a step")
        if stop.is_set() and not is_told:
            child.send("stop", _SEND_S)
            is_told = True


class _Reporter:
    """Sends what has come since the last time."""

    def __init__(self, lines: TextIO) -> None:
        self._lines, self._lock = lines, threading.Lock()
        self._came_bytes = 0
        self._events: list[tuple[str, str]] = []

    def count(self, received_bytes: int) -> None:
        with self._lock:
            self._came_bytes += received_bytes

    def note(self, kind: str, text: str) -> None:
        with self._lock:
            self._events.append((kind, text))

    def send(self, result: StepResult | None = None) -> None:
        with self._lock:
            message: Any = [self._came_bytes, self._events, None if result is None else to_plain(result)]
            self._came_bytes, self._events = 0, []
            self._lines.write(f"{json.dumps(message)}\n")
            self._lines.flush()

    def run(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # it ends with the agent, or after the result
            while True:
                time.sleep(_PERIOD_S)
                self.send()


def _carry_out(
    places: StepPlaces, order: StepOrder, stop: threading.Event, reporter: _Reporter
) -> StepResult:
    from edgekit_runtime.agent.artifacts.download import Downloader, DownloadLimits
    from edgekit_runtime.agent.execution.install import Installer
    from edgekit_runtime.agent.execution.local_steps import LocalSteps
    from edgekit_runtime.agent.membership import read_membership
    from edgekit_runtime.slots import Slots
    from edgekit_runtime.trust.trust_store import TrustStore

    member, state = read_membership(Path(places.config)), Path(places.state)
    slots = Slots(state, TrustStore.from_folder(Path(places.keys)), member.enrolment.target)
    installer = Installer(slots, None if places.socket_path is None else Path(places.socket_path))
    downloader = Downloader(member.make_context(), DownloadLimits(bytes_per_s=places.bytes_per_s), slots.disk)
    steps = LocalSteps(member, state / "fleet", installer, downloader, clock=time.time)
    return steps.carry_out(order, stop, reporter.note, reporter.count)


def _main() -> None:
    logging.basicConfig()
    with open_channel() as channel, channel.makefile("r") as sent, channel.makefile("w") as lines:
        sent_places, sent_order = json.loads(sent.readline())
        places = from_plain(StepPlaces, sent_places, "places")
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
            reporter.send(_carry_out(places, order, stop, reporter))
            code = 0
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)  # a plain end would wait for `listen`, which still reads


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):  # nobody waits for the answer any more
        _main()
