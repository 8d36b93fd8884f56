"""Steps carried out on a thread, one at a time, and what came of each.

A step ends by itself: downloads when nothing comes or when they are stopped, installations and loads by
limits of their own. What went wrong is turned into the next state of the execution here, and nowhere else.
"""

import contextlib
import logging
import queue
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from edgekit_runtime.agent.artifacts.deltas import apply_delta, find_delta
from edgekit_runtime.agent.artifacts.download import (
    Downloader,
    DownloadLimitError,
    DownloadStoppedError,
    SlowError,
)
from edgekit_runtime.agent.artifacts.repository import Offer, RepositoryAttackError, RepositoryClient
from edgekit_runtime.agent.documents import DeltaOffer, DesiredModel
from edgekit_runtime.agent.enrolment import Membership
from edgekit_runtime.agent.execution.install import Installer
from edgekit_runtime.agent.journal import Progress
from edgekit_runtime.agent.reconcile import Step
from edgekit_runtime.errors import (
    BackendError,
    EdgekitError,
    OutputError,
    PackageError,
    SlotError,
    TransportError,
    UnavailableError,
)
from edgekit_runtime.sessions.session import EngineMissingError, check_backends
from edgekit_runtime.slots.access import RecordError
from edgekit_runtime.system.machine import available_bytes, machine_bytes

Finish: TypeAlias = Callable[[Progress], Progress]
"""Takes an execution and returns it after its step."""

_MAX_WRITE_FAILURES: Final = 3  # of a full disk, before the execution fails
_LOAD_AGAIN_S: Final = 10.0
_MEMORY_AGAIN_S: Final = 300.0

_logger = logging.getLogger(__name__)


class StepRunner:
    """Carries out steps. All functions are for the agent's thread."""

    def __init__(
        self,
        member: Membership,
        folder: Path,
        installer: Installer,
        downloader: Downloader,
        *,
        clock: Callable[[], float],
    ) -> None:
        """Prepare; the folder of downloads is made.

        Args:
            member: this device in its fleet.
            folder: of the agent.
            installer: the models of the device.
            downloader: fetches metadata and packages.
            clock: seconds since 1970.
        """
        disk = installer.slots.disk
        self._installer, self._target = installer, member.enrolment.target
        self._downloads = folder / "downloads"
        self._downloads.mkdir(mode=0o700, exist_ok=True)
        self._downloader = downloader
        self._repository = RepositoryClient(
            folder / "tuf", member.enrolment.artifacts, member.enrolment.tuf_root, self._downloader, clock
        )
        self._disk = disk
        self._bad_deltas: set[str] = set()
        self._finished: queue.SimpleQueue[tuple[str, Finish]] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._came_bytes = 0
        self._counted: DesiredModel | None = None
        self._step: Step | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a step is being carried out."""
        return self._thread is not None

    def begin(self, step: Step, most_bytes: int | None, known_time_s: float) -> None:
        """Begin a step; nothing else is being carried out.

        Args:
            step: from `reconcile`.
            most_bytes: what a download may receive, or None.
            known_time_s: it is not earlier, whatever the clock shows.
        """
        self._step, self._stop = step, threading.Event()
        if step.action == "download":
            self._counted = step.wanted

        def work() -> None:
            name = "" if step.wanted is None else step.wanted.execution
            try:
                finish = self._carry_out(step, most_bytes, known_time_s)
            except Exception as error:  # the execution must end, and the agent must not
                _logger.exception("step %s of %s", step.action, step.model)
                finish = _fail("internal", f"{type(error).__name__}: {error}")
            self._finished.put((name, finish))

        self._thread = threading.Thread(target=work, name="edgekit-step", daemon=True)
        self._thread.start()

    def collect(self) -> list[tuple[str, Finish]]:
        """Return what has ended since the last call: name of the execution, and what becomes of it."""
        ended = []
        while not self._finished.empty():
            ended.append(self._finished.get())
            self._thread = self._step = None
        return ended

    def take_events(self) -> list[tuple[str, str]]:
        """Return kind and text of what is to be reported at once."""
        taken = []
        while not self._events.empty():
            taken.append(self._events.get())
        return taken

    def take_counts(self) -> tuple[str, int, int]:
        """Return the execution that downloads, the bytes that came since the last call, and those there."""
        with self._lock:
            came_bytes, self._came_bytes = self._came_bytes, 0
        wanted = self._counted  # also after its step: what came last is counted, too
        if wanted is None:
            return "", came_bytes, 0
        return wanted.execution, came_bytes, self._read_size(wanted)

    def retain(self, executions: set[str]) -> None:
        """Stop a download whose execution is not among these any more."""
        step = self._step
        if step is None or step.action != "download" or step.wanted is None:
            return
        if step.wanted.execution not in executions:
            self._stop.set()

    def list_downloaded(self) -> frozenset[str]:
        """Return the sha256 of the files that are there whole."""
        try:
            names = [path.name for path in self._downloads.iterdir()]
        except OSError:
            return frozenset()
        return frozenset(name for name in names if not name.endswith(".part"))

    def close(self) -> None:
        """Stop a download, and wait a while for the step."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def _read_size(self, wanted: DesiredModel) -> int:
        for name in (wanted.sha256, f"{wanted.sha256}.part"):
            with contextlib.suppress(OSError):
                return (self._downloads / name).stat().st_size
        return 0

    def _carry_out(self, step: Step, most_bytes: int | None, known_time_s: float) -> Finish:
        wanted = step.wanted
        try:
            if wanted is None:
                self._installer.remove(step.model)
                return _leave
            if step.action == "download":
                return self._download(wanted, most_bytes, known_time_s)
            if step.action == "install":
                return self._install(wanted)
            if step.action == "load":
                self._installer.load(wanted)
                return _retry("load", "the service was asked to load it", _LOAD_AGAIN_S)
            self._installer.unload(step.model)
        except EdgekitError as error:
            if step.action == "load":
                return _retry("load", str(error), _LOAD_AGAIN_S)
            _logger.warning("%s of %s: %s", step.action, step.model, error)
        return _leave

    def _download(self, wanted: DesiredModel, most_bytes: int | None, known_time_s: float) -> Finish:
        try:
            offer = self._repository.find(wanted.path, self._target, known_time_s, self._count)
            if (problem := _find_mismatch(wanted, offer, self._target)) or offer is None:
                return _refuse("not-offered", problem)
            if finish := _check_needs(wanted, offer):
                return finish
            self._remove_others(wanted)
            path = self._downloads / wanted.sha256
            if not self._make_from_delta(wanted, path, most_bytes, known_time_s):
                self._fetch(offer, path, most_bytes)
        except RepositoryAttackError as error:
            self._events.put(("attack", str(error)))
            return _retry(error.attack, str(error))
        except PackageError as error:
            self._events.put(("attack", str(error)))
            return _retry("digest", str(error))
        except DownloadLimitError as error:
            return _refuse("budget", str(error))
        except DownloadStoppedError:
            return _leave
        except SlowError as error:
            self._events.put(("slow-retrieval", str(error)))
            return _retry("slow", str(error))
        except TransportError as error:
            return _retry("network", str(error))
        except OutputError as error:
            self._events.put(("disk-full", str(error)))
            return _retry("disk-full", str(error), most=_MAX_WRITE_FAILURES)
        return _leave

    def _fetch(self, offer: Offer, path: Path, most_bytes: int | None) -> None:
        self._downloader.fetch(
            *(offer.url, path, offer.size_bytes),
            count=self._count,
            stop=self._stop,
            most_bytes=most_bytes,
            sha256=offer.sha256,
        )

    def _make_from_delta(
        self, wanted: DesiredModel, path: Path, most_bytes: int | None, known_time_s: float
    ) -> bool:
        """Make the package of an installed one and a delta; returns False where the whole file is needed."""
        if path.with_name(f"{path.name}.part").exists():
            return False
        delta: DeltaOffer | None = None
        try:
            installed = self._installer.list_installed(wanted.model)
            delta = find_delta(wanted, installed - self._bad_deltas)
            offer = None if delta is None else self._repository.find(delta.path, self._target, known_time_s)
            if (
                delta is None
                or offer is None
                or (offer.sha256, offer.size_bytes)
                != (
                    delta.sha256,
                    delta.size_bytes,
                )
            ):
                return False
            source = self._downloads / f"{delta.sha256}.delta"
            self._fetch(offer, source, most_bytes)
            return self._apply(delta, source, wanted, path)
        except RepositoryAttackError:
            raise
        except (PackageError, SlotError) as error:
            if delta is not None:
                self._bad_deltas.add(delta.from_sha256)
            self._events.put(("delta", f"{wanted.model} {wanted.version}: {error}; fetches the whole file"))
            return False

    def _apply(self, delta: DeltaOffer, source: Path, wanted: DesiredModel, path: Path) -> bool:
        try:
            with self._installer.slots.open(wanted.model, delta.from_sha256) as base:
                apply_delta(
                    *(source, base.path, path),
                    size_bytes=wanted.size_bytes,
                    sha256=wanted.sha256,
                    stop=self._stop,
                    disk=self._disk,
                )
        finally:
            if not self._stop.is_set():
                with contextlib.suppress(OSError):
                    self._disk.remove(source)
        return True

    def _install(self, wanted: DesiredModel) -> Finish:
        path = self._downloads / wanted.sha256
        try:
            self._installer.install(path, wanted)
        except UnavailableError as error:
            return _retry("unavailable", str(error))
        except (RecordError, OutputError) as error:
            self._events.put(("disk-full", str(error)))
            return _retry("disk-full", str(error), most=_MAX_WRITE_FAILURES)
        except EngineMissingError as error:
            return _refuse("engine", str(error))
        except SlotError as error:
            return _fail("slots", str(error))
        except BackendError as error:
            return _fail("self-test", str(error))
        except PackageError as error:
            self._events.put(("attack", str(error)))
            return _fail("package", str(error))
        with contextlib.suppress(OSError):
            self._disk.remove(path)
        return lambda progress: progress.enter("trying", code="load")

    def _remove_others(self, wanted: DesiredModel) -> None:
        """Remove what other executions left: one at a time downloads, and space is scarce."""
        whole = (wanted.sha256, *(f"{delta.sha256}.delta" for delta in wanted.deltas))
        kept = {*whole, *(f"{name}.part" for name in whole)}
        with contextlib.suppress(OSError):
            for path in self._downloads.iterdir():
                if path.name not in kept:
                    self._disk.remove(path)

    def _count(self, received_bytes: int) -> None:
        with self._lock:
            self._came_bytes += received_bytes


def _find_mismatch(wanted: DesiredModel, offer: Offer | None, target: str) -> str:
    if offer is None:
        return f"the fleet offers no {wanted.path} for target {target}"
    if (offer.sha256, offer.size_bytes) != (wanted.sha256, wanted.size_bytes):
        return (
            f"{wanted.path}: the fleet offers sha256 {offer.sha256[:12]} of {offer.size_bytes} bytes, desired"
            f" is {wanted.sha256[:12]} of {wanted.size_bytes}"
        )
    return ""


def _check_needs(wanted: DesiredModel, offer: Offer) -> Finish | None:
    """Return what becomes of an execution whose package this device cannot run, as its metadata states."""
    what = f"{wanted.model} {wanted.version}"
    engines = offer.custom.get("engines")
    if isinstance(engines, list) and engines:
        try:
            check_backends([str(engine) for engine in engines], what)
        except EngineMissingError as error:
            return _refuse("engine", str(error))
    needed_bytes = offer.custom.get("memory_bytes")
    if not isinstance(needed_bytes, int):
        return None
    if needed_bytes > machine_bytes():
        return _refuse("memory", f"{what} needs {needed_bytes} bytes of memory, here are {machine_bytes()}")
    free_bytes = available_bytes()
    if needed_bytes > free_bytes and wanted.order == "new-first":  # beside what is there
        reason = f"{what} needs {needed_bytes} bytes of memory beside the old version, {free_bytes} are free"
        return _retry("memory", reason, _MEMORY_AGAIN_S)
    return None


def _leave(progress: Progress) -> Progress:
    return progress


def _refuse(code: str, reason: str) -> Finish:
    return lambda progress: progress.enter("refused", code=code, reason=reason)


def _fail(code: str, reason: str) -> Finish:
    return lambda progress: progress.enter("failed", code=code, reason=reason)


def _retry(code: str, reason: str, delay_s: float | None = None, most: int | None = None) -> Finish:
    def finish(progress: Progress) -> Progress:
        if most is not None and progress.failures + 1 >= most:
            return progress.enter("failed", code=code, reason=reason)
        width_s = min(300.0, 2.0 ** min(progress.failures + 1, 9))
        wait_s = random.uniform(0.0, width_s) if delay_s is None else delay_s  # noqa: S311  # no secret
        return progress.fail_once(code, reason, wait_s)

    return finish
