"""Carries out steps on a thread, one at a time, and stores their results."""

import contextlib
import logging
import queue
import threading
from pathlib import Path
from typing import Final

from edgekit_runtime.agent.documents import DesiredModel
from edgekit_runtime.agent.execution.install import Installer
from edgekit_runtime.agent.execution.step_result import NoteKind, StepCarrier, StepOrder, StepResult
from edgekit_runtime.agent.reconcile import Action, Step
from edgekit_runtime.encryption import KEY_SUFFIX
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.system.atomic_files import make_folders

_LOAD_AGAIN_S: Final = 10.0
_CLOSE_S: Final = 10.0  # a step in this process may hang

_logger = logging.getLogger(__name__)


class StepRunner:
    """Carries out steps. Only the agent's thread calls these methods."""

    def __init__(self, folder: Path, installer: Installer, carrier: StepCarrier) -> None:
        """Prepare, and create the folder of downloads.

        Raises:
            OutputError: the folder cannot be made.
        """
        self._installer, self._carrier = installer, carrier
        self._downloads = folder / "downloads"
        make_folders(self._downloads, 0o700)
        self._finished: queue.SimpleQueue[tuple[str, StepResult]] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._came_bytes = 0
        self._counted: DesiredModel | None = None
        self._step: Step | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None

    def begin(self, order: StepOrder) -> None:
        """Begin a step on a new thread. No other step may be running."""
        step = order.step
        self._step, self._stop = step, threading.Event()
        if step.action in (
            "download",
            "refresh",
            "upload",
        ):  # the bytes of the latter two are of no execution
            self._counted = step.desired_model

        def work() -> None:
            name = "" if step.desired_model is None else step.desired_model.execution
            try:
                result = self._carry_out(order)
            except Exception as error:  # the execution must end, but not the agent
                _logger.exception("step %s of %s", step.action, step.model)
                reason = f"{type(error).__name__}: {error}"
                result = StepResult(outcome="failed", code="internal", reason=reason)
            self._finished.put((name, result))

        self._thread = threading.Thread(target=work, name="edgekit-step", daemon=True)
        self._thread.start()

    def collect(self) -> list[tuple[str, StepResult]]:
        """Return the steps that have ended since the last call, as pairs of execution (or '') and result."""
        ended = []
        while not self._finished.empty():
            ended.append(self._finished.get())
            self._thread = self._step = None
        return ended

    def take_events(self) -> list[tuple[str, str]]:
        """Return the kind and text of each event that must be reported at once."""
        results = []
        while not self._events.empty():
            results.append(self._events.get())
        return results

    def take_counts(self) -> tuple[str, int, int]:
        """Return the number of bytes transferred since the last call.

        Returns:
            The name of the execution or '', the number of bytes, and the size of the partial file.
        """
        with self._lock:
            came_bytes, self._came_bytes = self._came_bytes, 0
        desired_model = self._counted  # also after its step, to count the last bytes
        if desired_model is None:
            return "", came_bytes, 0
        return desired_model.execution, came_bytes, self._read_size(desired_model)

    @property
    def action(self) -> Action | None:
        return None if self._step is None else self._step.action

    def stop(self) -> None:
        """Tell the step to stop, and return without waiting. Some steps run to their end."""
        self._stop.set()

    def retain(self, downloading: set[str], under_way: set[str]) -> None:
        """Stop the current step if it is no longer needed.

        Args:
            downloading: names of the executions that may download.
            under_way: names of the executions that may carry out other steps.
        """
        step = self._step
        if step is None or step.desired_model is None:
            return
        if step.desired_model.execution not in (downloading if step.action == "download" else under_way):
            self._stop.set()

    def list_downloaded(self) -> frozenset[str]:
        """Return the sha256 of each package file that is completely downloaded."""
        try:
            names = [path.name for path in self._downloads.iterdir()]
        except OSError:
            return frozenset()
        return frozenset(name for name in names if not name.endswith((".part", KEY_SUFFIX)))

    def close(self) -> None:
        """Stop the step, and wait up to 10 s for its end."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _read_size(self, desired_model: DesiredModel) -> int:
        for name in (desired_model.sha256, f"{desired_model.sha256}.part"):
            with contextlib.suppress(OSError):
                return (self._downloads / name).stat().st_size
        return 0

    def _carry_out(self, order: StepOrder) -> StepResult:
        step = order.step
        if step.action in ("download", "install", "refresh", "upload"):
            return self._carrier.carry_out(order, self._stop, self._note, self._count)
        try:
            if step.desired_model is None:
                self._installer.remove(step.model)
            elif step.action == "load":
                self._installer.load(step.desired_model)
                return _load_again("the service was asked to load it")
            else:
                self._installer.unload(step.model)
        except EdgekitError as error:
            if step.action == "load":
                return _load_again(str(error))
            _logger.warning("%s of %s: %s", step.action, step.model, error)
        return StepResult()

    def _note(self, kind: NoteKind, text: str) -> None:
        self._events.put((kind, text))

    def _count(self, received_bytes: int) -> None:
        with self._lock:
            self._came_bytes += received_bytes


def _load_again(reason: str) -> StepResult:
    return StepResult(outcome="retry", code="load", reason=reason, wait_s=_LOAD_AGAIN_S)
