"""Carries out downloads and installations in this process. `step_child` does so in a separate process.

Every step ends by itself. A download ends if no bytes arrive or if it is stopped. An installation has its own
time limits. Only this module turns an error into the next state of the execution.
"""

import contextlib
import mmap
import os
import threading
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edgekit_runtime.agent.artifacts.download import (
    Downloader,
    DownloadLimitError,
    DownloadStoppedError,
    HttpStatusError,
    SlowError,
)
from edgekit_runtime.agent.artifacts.repository import Offer, RepositoryAttackError, RepositoryClient
from edgekit_runtime.agent.documents import DeltaOffer, DesiredModel
from edgekit_runtime.agent.execution.install import Installer
from edgekit_runtime.agent.execution.step_result import NoteKind, StepOrder, StepResult
from edgekit_runtime.agent.manager_keys import ManagerKeys
from edgekit_runtime.agent.membership import Membership
from edgekit_runtime.agent.trusted_time import TrustedTime
from edgekit_runtime.encryption import KEY_SUFFIX, key_path
from edgekit_runtime.encryption.container import ContentKey, EncryptionError, Header, decrypt_to_memory
from edgekit_runtime.errors import (
    BackendError,
    EdgekitError,
    OutputError,
    PackageError,
    SlotError,
    TransportError,
    UnavailableError,
)
from edgekit_runtime.records import dataclass
from edgekit_runtime.samples.folder import SAMPLES_FOLDER, SampleFolder
from edgekit_runtime.slots.access import RecordError
from edgekit_runtime.system.engines import EngineMissingError, check_backends
from edgekit_runtime.system.machine import available_bytes, machine_bytes

if TYPE_CHECKING:
    from edgekit_runtime.package.archive import OpenedPackage

_MAX_WRITE_FAILURES: Final = 3  # by a full disk, before the execution fails
_MAX_REFRESH_BYTES: Final = 256 << 10  # anyone at the broker can cause one, and no budget stops it
_MEMORY_AGAIN_S: Final = 300.0
_UNCHANGED: Final = StepResult()


class _Meter:
    """Counts the bytes that a step receives: metadata, delta and package share one budget.

    Attributes:
        left_bytes: bytes that may still come, or None without a limit.
    """

    def __init__(self, count: Callable[[int], None], most_bytes: int | None) -> None:
        self._count, self.came_bytes, self.left_bytes = count, 0, most_bytes

    def __call__(self, came_bytes: int) -> None:
        self._count(came_bytes)
        self.came_bytes += came_bytes
        if self.left_bytes is not None:
            self.left_bytes = max(0, self.left_bytes - came_bytes)


@dataclass(frozen=True, slots=True)
class _Job:
    desired_model: DesiredModel
    order: StepOrder
    stop: threading.Event
    note: Callable[[NoteKind, str], None]
    meter: _Meter


class LocalSteps:
    """A `StepCarrier` in this process."""

    def __init__(
        self,
        member: Membership,
        folder: Path,
        installer: Installer,
        downloader: Downloader,
        *,
        clock: Callable[[], float],
    ) -> None:
        """Prepare.

        `clock`: seconds since 1970.
        """
        self._member, self._folder = member, folder
        self._installer, self._target = installer, member.enrolment.target
        self._downloads, self._disk = folder / "downloads", installer.slots.disk
        self._downloader = downloader
        self._repository = RepositoryClient(
            folder / "tuf",
            member.enrolment.artifacts,
            member.enrolment.tuf_root,
            downloader,
            clock,
            manager_keys=ManagerKeys(folder, member.enrolment.tuf_root, self._disk),
        )

    def carry_out(
        self,
        order: StepOrder,
        stop: threading.Event,
        note: Callable[[NoteKind, str], None],
        count: Callable[[int], None],
    ) -> StepResult:
        meter = _Meter(count, order.most_bytes)
        desired_model = order.step.desired_model
        if order.step.action == "upload":
            return self._upload(order, stop, meter)
        if desired_model is None:
            return self._refresh(order, note, meter)
        job = _Job(desired_model, order, stop, note, meter)
        return self._download(job) if order.step.action == "download" else self._install(job)

    def _refresh(self, order: StepOrder, note: Callable[[NoteKind, str], None], meter: _Meter) -> StepResult:
        def count(came_bytes: int) -> None:
            meter(came_bytes)
            if meter.came_bytes > _MAX_REFRESH_BYTES:
                raise RepositoryAttackError(
                    "endless-data", f"endless-data: the metadata has over {_MAX_REFRESH_BYTES} bytes"
                )

        try:
            self._repository.refresh(order.known_time_s, count)
        except RepositoryAttackError as error:
            note("attack", str(error))
        except (TransportError, OutputError) as error:
            code = "cut-off" if meter.came_bytes else "network"
            return StepResult(outcome="retry", code=code, reason=str(error))
        return _UNCHANGED

    def _upload(self, order: StepOrder, stop: threading.Event, meter: _Meter) -> StepResult:
        from edgekit_runtime.agent.artifacts.upload import SampleLink, send_samples

        folder = SampleFolder(self._folder / SAMPLES_FOLDER, self._disk)
        samples = (sample for sample in folder.list_samples() if sample.order not in order.held_orders)
        trusted_time = TrustedTime(self._member.enrolment.certificate)
        trusted_time.note(order.known_time_s)
        web, context = self._member.enrolment.web, self._member.make_context(trusted_time)
        link = SampleLink(web, context, self._downloader.limits, count=meter, stop=stop)
        try:
            send_samples(samples, folder, link.ask, stop=stop, most_bytes=order.most_bytes)
        except (TransportError, OutputError) as error:
            return StepResult(outcome="retry", code="upload", reason=str(error))
        finally:
            link.close()
        return _UNCHANGED

    def _download(self, job: _Job) -> StepResult:
        desired_model = job.desired_model
        try:
            key = _unwrap(desired_model)
        except UnavailableError as error:
            return StepResult(outcome="retry", code="unavailable", reason=str(error))
        except EncryptionError as error:
            return StepResult(outcome="refused", code="no-key", reason=str(error))
        try:
            offer = self._repository.find(desired_model.path, self._target, job.order.known_time_s, job.meter)
            if (problem := _find_mismatch(desired_model, offer, self._target)) or offer is None:
                return StepResult(outcome="refused", code="not-offered", reason=problem)
            if result := _check_needs(desired_model, offer):
                return result
            self._remove_others(desired_model)
            path = self._downloads / desired_model.sha256
            if not self._make_from_delta(job, offer, path, key):
                self._fetch(job, offer, path)
        except UnavailableError as error:  # the installed package, or a delta, cannot be decrypted now
            return StepResult(outcome="retry", code="unavailable", reason=str(error))
        except RepositoryAttackError as error:
            job.note("attack", str(error))
            return StepResult(outcome="retry", code=error.attack, reason=str(error))
        except PackageError as error:
            job.note("attack", str(error))
            return StepResult(outcome="retry", code="digest", reason=str(error))
        except DownloadLimitError as error:
            return StepResult(outcome="refused", code="budget", reason=str(error))
        except DownloadStoppedError:
            return _UNCHANGED
        except SlowError as error:
            job.note("slow-retrieval", str(error))
            return StepResult(outcome="retry", code="slow", reason=str(error))
        except TransportError as error:
            return StepResult(outcome="retry", code="network", reason=str(error))
        except OutputError as error:
            return _report_full_disk(job, error)
        return _UNCHANGED

    def _fetch(self, job: _Job, offer: Offer, path: Path) -> None:
        self._downloader.fetch(
            offer.url,
            path,
            offer.size_bytes,
            count=job.meter,
            stop=job.stop,
            most_bytes=job.meter.left_bytes,
            sha256=offer.sha256,
        )

    def _make_from_delta(self, job: _Job, package: Offer, path: Path, key: ContentKey | None) -> bool:
        """Make the package from a delta or a coded file; return False if the whole file is needed."""
        desired_model, part = job.desired_model, path.with_name(f"{path.name}.part")
        if part.exists() or not desired_model.deltas:
            return False
        from edgekit_runtime.agent.artifacts.deltas import find_delta  # numpy: 0.1 s of a core

        try:
            delta = find_delta(desired_model, self._installer.list_installed(desired_model.model))
            if delta is None:
                return False
            offer = self._repository.find(delta.path, self._target, job.order.known_time_s, job.meter)
            if offer is None or (offer.sha256, offer.size_bytes) != (delta.sha256, delta.size_bytes):
                return False
            source = self._downloads / f"{delta.sha256}.delta"
            self._fetch(job, offer, source)
            encryption = None if key is None else (key, _read_header(package))
            self._apply(job, delta, source, path, encryption)
        except RepositoryAttackError:
            raise
        except HttpStatusError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            return False  # it may be missing where the package is there: a bundle has no deltas
        except (PackageError, SlotError) as error:
            if job.stop.is_set():
                raise DownloadStoppedError("the delta was stopped") from error
            job.note(
                "delta", f"{desired_model.model} {desired_model.version}: {error}; fetches the whole file"
            )
            with contextlib.suppress(OSError):
                self._disk.append(part, 0).close()  # then this delta is not tried again
            return False
        return True

    def _apply(
        self,
        job: _Job,
        delta: DeltaOffer,
        source: Path,
        path: Path,
        encryption: tuple[ContentKey, Header] | None,
    ) -> None:
        """Write the package to `path`; what is encrypted is plain in memory only."""
        from edgekit_runtime.agent.artifacts.deltas import apply_delta

        desired_model = job.desired_model
        size_bytes = desired_model.size_bytes if encryption is None else encryption[1].plain_bytes
        try:
            with contextlib.ExitStack() as stack:
                base: bytes | mmap.mmap = b""
                if delta.from_sha256:
                    package = self._installer.slots.open(desired_model.model, delta.from_sha256)
                    base = stack.enter_context(_map(stack.enter_context(package)))
                if encryption is None:
                    file = stack.enter_context(source.open("rb"))
                else:
                    decrypted = decrypt_to_memory(source, encryption[0], desired_model.size_bytes)
                    file = stack.enter_context(os.fdopen(decrypted, "rb"))
                    file.seek(0)
                apply_delta(
                    file,
                    base,
                    path,
                    size_bytes=size_bytes,
                    sha256=desired_model.sha256,
                    stop=job.stop,
                    disk=self._disk,
                    encryption=encryption,
                )
        finally:
            if not job.stop.is_set():
                with contextlib.suppress(OSError):
                    self._disk.remove(source)

    def _install(self, job: _Job) -> StepResult:
        path = self._downloads / job.desired_model.sha256
        try:
            self._installer.install(path, job.desired_model)
        except UnavailableError as error:
            return StepResult(outcome="retry", code="unavailable", reason=str(error))
        except (RecordError, OutputError) as error:
            return _report_full_disk(job, error)
        except EngineMissingError as error:
            return StepResult(outcome="refused", code="engine", reason=str(error))
        except SlotError as error:
            return StepResult(outcome="failed", code="slots", reason=str(error))
        except BackendError as error:
            return StepResult(outcome="failed", code="self-test", reason=str(error))
        except PackageError as error:
            job.note("attack", str(error))
            return StepResult(outcome="failed", code="package", reason=str(error))
        with contextlib.suppress(OSError):
            self._disk.remove(path)
            if job.desired_model.key_id:
                self._disk.remove(key_path(path))
        return StepResult(outcome="installed")

    def _remove_others(self, desired_model: DesiredModel) -> None:
        """Remove files of other executions: only one downloads at a time, and space is scarce."""
        sha256 = desired_model.sha256
        whole = (
            sha256,
            f"{sha256}{KEY_SUFFIX}",
            *(f"{delta.sha256}.delta" for delta in desired_model.deltas),
        )
        needed_names = {*whole, *(f"{name}.part" for name in whole)}
        with contextlib.suppress(OSError):
            for path in self._downloads.iterdir():
                if path.name not in needed_names:
                    self._disk.remove(path)


def _map(package: "OpenedPackage") -> mmap.mmap:
    descriptor = package.open_content()
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)


def _unwrap(desired_model: DesiredModel) -> ContentKey | None:
    """Return the key of an encrypted package; None for a plain one.

    Raises:
        EncryptionError: the document holds none that this device can unwrap.
        UnavailableError: it cannot be unwrapped now.
    """
    if not desired_model.key_id:
        return None
    from edgekit_runtime.encryption.device_key import read_device_key  # plain packages do without
    from edgekit_runtime.system.own_process import forbid_dumps

    forbid_dumps()
    device_key = read_device_key()
    if device_key is None or not desired_model.wrapped_key:
        raise EncryptionError(
            f"{desired_model.model} {desired_model.version} is encrypted, and the fleet has no key for this"
            " device; enrol it again"
        )
    return device_key.unwrap(desired_model.wrapped_key, desired_model.key_id)


def _read_header(package: Offer) -> Header:
    """Return the header of the encrypted package, from its signed metadata.

    Raises:
        EncryptionError: it is missing or malformed.
    """
    return Header.from_json(package.custom.get("header"), f"{package.url}: header", EncryptionError)


def _report_full_disk(job: _Job, error: EdgekitError) -> StepResult:
    job.note("disk-full", str(error))
    return StepResult(outcome="retry", code="disk-full", reason=str(error), max_failures=_MAX_WRITE_FAILURES)


def _find_mismatch(desired_model: DesiredModel, offer: Offer | None, target: str) -> str:
    if offer is None:
        return f"the fleet offers no {desired_model.path} for target {target}"
    if (offer.sha256, offer.size_bytes) != (desired_model.sha256, desired_model.size_bytes):
        return (
            f"{desired_model.path}: the fleet offers sha256 {offer.sha256[:12]} of {offer.size_bytes}"
            f" bytes, desired is {desired_model.sha256[:12]} of {desired_model.size_bytes}"
        )
    return ""


def _check_needs(desired_model: DesiredModel, offer: Offer) -> StepResult | None:
    """Return the result of an execution whose package this device cannot run, by its metadata."""
    label = f"{desired_model.model} {desired_model.version}"
    engines = offer.custom.get("engines")
    if isinstance(engines, list) and engines:
        try:
            check_backends([str(engine) for engine in engines], label)
        except EngineMissingError as error:
            return StepResult(outcome="refused", code="engine", reason=str(error))
    needed_bytes = offer.custom.get("memory_bytes")
    if not isinstance(needed_bytes, int):
        return None
    if needed_bytes > machine_bytes():
        reason = f"{label} needs {needed_bytes} bytes of memory, here are {machine_bytes()}"
        return StepResult(outcome="refused", code="memory", reason=reason)
    free_bytes = available_bytes()
    if needed_bytes > free_bytes and desired_model.order == "new-first":  # beside the old version
        reason = f"{label} needs {needed_bytes} bytes of memory beside the old version, {free_bytes} are free"
        return StepResult(outcome="retry", code="memory", reason=reason, wait_s=_MEMORY_AGAIN_S)
    return None
