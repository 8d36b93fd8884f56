"""The states of the booted machine: off, booted from its disk, or restored from a snapshot."""

import contextlib
import enum
import io
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attr
from labgrid import Target
from labgrid.driver import SSHDriver
from labgrid.factory import target_factory
from labgrid.resource import NetworkService
from labgrid.strategy import Strategy, never_retry

import edgekit_runtime
from edgekit_hil.drivers.booted import DISKS, SNAPSHOT, BootedMachineDriver
from edgekit_hil.images.image_cache import Image, replacing
from edgekit_runtime.errors import BenchError

_CONNECT_S: Final = 600.0  # a boot under load
_TRY_S: Final = 20.0  # a machine may accept a connection, hang, and never answer on it
_UNPACK_S: Final = 300.0  # labgrid's own 30 s are too few on a machine under load
_READY: Final = "ready"
_MODULES: Final = "usr/lib/python3/dist-packages"
_PROGRAM: Final = "usr/bin/edgekit-device"
_STARTER: Final = b"#!/usr/bin/python3\nimport sys\nfrom edgekit_runtime.cli import main\nsys.exit(main())\n"
_ARCHIVE: Final = "/srv/runtime.tar"


class Status(enum.Enum):
    """The state of the machine."""

    unknown = 0
    off = 1
    booted = 2
    shell = 3


@target_factory.reg_driver
@attr.s(eq=False)
class BootedMachineStrategy(Strategy):  # labgrid has no types of it
    """Brings the machine into a `Status`. A running machine has a shell over ssh."""

    bindings = {"machine": "BootedMachineDriver", "ssh": "SSHDriver"}  # noqa: RUF012  # labgrid's

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.status = Status.unknown
        self._ready = ""

    @never_retry  # type: ignore[untyped-decorator]
    def transition(self, status: Any) -> None:
        """Bring the machine into a state.

        Args:
            status: A `Status` or its name. `booted` boots the machine from its disk. `shell` always restores
                the snapshot with the runtime installed, so all earlier changes are lost.
        """
        target_status = status if isinstance(status, Status) else Status[status]
        self.target.deactivate(self.ssh)
        if target_status is Status.off:
            self.target.deactivate(self.machine)
        else:
            self._start()
            if target_status is Status.shell:
                self.machine.restore(self._ready or SNAPSHOT)
            self.connect()
            if target_status is Status.shell and not self._ready:
                self._install_runtime()
                self._ready = _READY
                self.machine.save(_READY)
        self.status = target_status

    def restore(self, snapshot: str) -> None:
        """Restore a snapshot that was saved after the machine's driver was activated."""
        self.target.deactivate(self.ssh)
        self.machine.restore(snapshot)
        self.connect()

    def connect(self) -> None:
        """Connect to the machine's shell, also after a reboot, and set the machine's clock.

        Raises:
            BenchError: The machine does not answer within ten minutes.
        """
        self.target.deactivate(self.ssh)
        deadline = time.monotonic() + _CONNECT_S
        while True:
            try:
                self.target.activate(self.ssh)
                break
            except Exception as cause:  # labgrid has no exception class of its own
                if time.monotonic() > deadline:
                    raise BenchError(
                        f"the machine does not answer for {_CONNECT_S:.0f} s: {cause}"
                    ) from cause
        self.ssh.run_check(f"date -s @{time.time():.3f}")  # a snapshot's clock stands still

    def _start(self) -> None:
        self.target.activate(self.machine)
        if not self.machine.status:
            self._ready = ""  # it was on disks that are gone
            self.machine.on()
            self.ssh.networkservice.port = self.machine.forward_ssh()
            self.ssh.keyfile = str(self.machine.key)
            self.ssh.connection_timeout = _TRY_S

    def _install_runtime(self) -> None:
        """Copy this checkout's runtime to a folder from which the machine's Python imports."""
        package = Path(edgekit_runtime.__file__).parent
        with tempfile.NamedTemporaryFile(suffix=".tar") as file:
            with tarfile.open(fileobj=file, mode="w") as archive:
                archive.add(package, f"{_MODULES}/{package.name}")
                program = tarfile.TarInfo(_PROGRAM)
                program.mode, program.size = 0o755, len(_STARTER)
                archive.addfile(program, io.BytesIO(_STARTER))
            file.flush()
            self.ssh.put(file.name, _ARCHIVE)
        unpack = f"tar -x --no-same-owner -f {_ARCHIVE} -C / && rm {_ARCHIVE} && sync"
        self.ssh.run_check(unpack, timeout=_UNPACK_S)


def save_snapshot(image: Image, show: Callable[[str], None]) -> None:
    """Boot an image, and store a snapshot of the booted system in the image for later runs.

    Raises:
        BenchError: The image does not boot, or a systemd unit failed.
    """
    target = Target("image")
    NetworkService(target, "shell", address="127.0.0.1", username="root")
    machine = BootedMachineDriver(target, "machine", image=image)
    ssh = SSHDriver(target, "ssh")
    strategy = BootedMachineStrategy(target, "strategy")  # type: ignore[call-arg]
    with contextlib.ExitStack() as undo:
        undo.callback(target.deactivate_all_drivers)
        target.activate(strategy)
        show("booting")
        strategy.transition(Status.booted)
        show("waiting until systemd runs")
        output, _, _ = ssh.run(
            "systemctl is-system-running --wait; systemctl --failed --no-legend", timeout=300
        )
        if output != ["running"]:
            raise BenchError(f"the image does not boot: systemd says {'; '.join(output)}")
        ssh.run_check("sync")
        show("saving the snapshot")
        machine.save(SNAPSHOT)
        with replacing(image.snapshot) as folder:
            for name in DISKS:
                shutil.copy(machine.folder / f"{name}.qcow2", folder)
