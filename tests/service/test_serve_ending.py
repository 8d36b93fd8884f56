"""How `edgekit-device serve` ends: by which signals, and whatever its engines and disks are doing."""

import contextlib
import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from tests.runtime.backend_parts import install_backend
from tests.runtime.conftest import WEIGHT, PackageMaker
from tests.service.serve_parts import Served
from tests.service.service_parts import Replies, X, make_config, post_bytes, running
from tests.service.wiring_parts import write
from tests.waiting import bounded, wait_for

from edgekit_runtime import Client
from edgekit_runtime.errors import TransportError
from edgekit_runtime.package.manifest_entries import BackendChoice
from edgekit_runtime.service.models.slot_source import InstalledModels
from edgekit_runtime.slots import HEALTHY, UNPROVEN, Slots
from edgekit_runtime.system.atomic_files import Disk

THIRD = BackendChoice("third", "model.onnx", {})
# As an engine that is called and does not come back.
HANGING = "import time\ndef open_third(package, choice, threads):\n    time.sleep(3600)\n"


@pytest.mark.parametrize("is_isolated", [False, True], ids=["own", "isolated"])
def test_service_that_is_ended_while_a_model_loads_does_not_wait_for_that(
    maker: PackageMaker, folder: Path, monkeypatch: pytest.MonkeyPatch, is_isolated: bool
) -> None:
    install_backend(folder, monkeypatch, HANGING)
    slow = write(maker, folder, "1.0.0", name="slow", backend=THIRD)
    service = Served(folder, "--package", str(slow), *(["--isolate", "slow"] if is_isolated else []))
    with bounded(service.process), Client(str(service.socket_path)) as client:

        def is_ready() -> bool:
            with contextlib.suppress(TransportError):  # the socket's file is there before the service listens
                return client.ready("linear")
            return False

        wait_for(is_ready, "the model that is well")
        code, printed = service.end()
        assert (code, "stopped" in printed) == (0, True), printed
        assert not service.socket_path.exists()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.long)]
)
def test_signal_ends_the_service_in_order(folder: Path, number: int) -> None:
    def allow() -> None:  # whoever runs the tests may ignore SIGHUP
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)

    service = Served(folder, "--isolate", "linear", is_copy=False, preexec_fn=allow)
    with bounded(service.process):
        service.wait_ready()
        code, printed = service.end(number)
        assert (code, printed.strip()) == (0, "stopped")
        assert not service.socket_path.exists()


def test_service_under_nohup_outlives_sighup(folder: Path) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    service = Served(folder, is_copy=False, preexec_fn=ignore)
    with bounded(service.process), Client(str(service.socket_path)) as client:
        service.wait_ready()
        service.process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert np.array_equal(client.infer("linear", {"x": X})["y"], X @ WEIGHT)


class FullDisk(Disk):
    """One on which nothing new fits while `is_full`."""

    is_full = False

    def create(self, path: Path, mode: int) -> BinaryIO:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(path, mode)


def test_version_that_could_not_be_recorded_as_good_is_when_the_service_ends_in_order(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk()
    slots = Slots(tmp_path / "state", maker.trust, disk=disk)
    slots.install(write(maker, tmp_path, "1.0.0"))
    tried: list[Any] = []
    confirm = InstalledModels.confirm

    def count(self: InstalledModels, name: str, version: str) -> None:
        disk.is_full = not tried
        tried.append(version)
        confirm(self, name, version)

    monkeypatch.setattr(InstalledModels, "confirm", count)
    with running(make_config(tmp_path), InstalledModels(slots, confirm_after_s=0.5)):
        wait_for(lambda: "cannot be recorded yet" in caplog.text, "a try to record it")
    current = slots.load("linear").state.current
    assert current is not None
    assert (current.health, len(tried)) == (HEALTHY, 2)


def test_version_is_recorded_as_good_while_another_model_hangs_in_its_load(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = Slots(tmp_path / "state", maker.trust)
    slots.install(write(maker, tmp_path, "1.0.0"))
    is_opening, may_open = threading.Event(), threading.Event()
    opened = InstalledModels.open

    def open_slowly(self: InstalledModels, name: str, *rest: Any) -> Any:
        if name == "slow":
            is_opening.set()
            assert may_open.wait(60)
        return opened(self, name, *rest)

    def health() -> str | None:
        current = slots.load("linear").state.current
        return None if current is None else current.health

    monkeypatch.setattr(InstalledModels, "open", open_slowly)
    source = InstalledModels(slots, confirm_after_s=4.0)
    with running(make_config(tmp_path), source) as service, service.connect() as client:
        slots.install(write(maker, tmp_path, "1.0.0", name="slow"))
        client.sendall(post_bytes("/v2/repository/models/slow/load", b""))
        assert is_opening.wait(60)
        try:
            assert health() == UNPROVEN
            wait_for(lambda: health() == HEALTHY, "the record")
        finally:
            may_open.set()
        assert Replies(client).next().status == 200
