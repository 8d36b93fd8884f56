"""A labgrid driver for the booted ARM64 machine, which runs in qemu on copies of an image's disks."""

import contextlib
import shutil
import socket
from typing import Final

import attr
from labgrid.driver import QEMUDriver
from labgrid.factory import target_factory

from edgekit_hil.drivers.own_folder import make_folder
from edgekit_hil.images import recipe
from edgekit_hil.images.image_cache import Image, find_image
from edgekit_hil.images.programs import require, run_checked
from edgekit_runtime.errors import BenchError

SNAPSHOT: Final = "booted"
DISKS: Final = ("root", "data")
_SSH: Final = 22


@target_factory.reg_driver
@attr.s(eq=False)
class BootedMachineDriver(QEMUDriver):
    """A machine that boots an image or continues from its snapshot.

    Attributes:
        image: The image to boot, or None for the newest snapshot.
        status: 1 while qemu runs.
        key: The path of root's ssh private key.
        folder: The folder of the disks while the driver is active.
        host_address: The address by which the machine reaches servers on the loopback interface of its host.
    """

    host_address = "10.0.2.2"  # in qemu's user network

    qemu_bin: str = attr.ib(default="qemu-system-aarch64")
    machine: str = attr.ib(default="virt")
    cpu: str = attr.ib(default=recipe.CPU)
    memory: str = attr.ib(default=recipe.MEMORY)
    image: Image | None = attr.ib(default=None)
    status: int

    def on_activate(self) -> None:
        """Copy the disks of the image into `folder`.

        Raises:
            BenchError: qemu or the image is missing.
        """
        require("qemu-system-aarch64", "qemu-img", "ssh")
        image = self.image or find_image(booted=True)
        self.key, self._boot = image.boot / "id_ed25519", image.boot
        with contextlib.ExitStack() as undo:
            undo.enter_context(image.hold())
            self.folder = make_folder("machine")
            undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
            for name in DISKS:
                if self.image is None:
                    shutil.copy(image.snapshot / f"{name}.qcow2", self.folder)
                else:
                    create = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw"]
                    run_checked([*create, "-b", image.boot / f"{name}.raw", self.folder / f"{name}.qcow2"])
            super().on_activate()
            self._open = undo.pop_all()

    def on_deactivate(self) -> None:
        """Cut the power and delete the disks."""
        with self._open:
            super().on_deactivate()

    def get_qemu_base_args(self) -> list[str]:
        """Return the qemu command line, to which labgrid adds the monitor and a second console.

        The first console writes to a file, because qemu waits while nobody reads from labgrid's console.
        """
        words = ["setpriv", "--pdeathsig", "KILL"]  # it ends with this process, however that ends
        words += [self.qemu_bin, "-machine", self.machine, "-cpu", self.cpu, "-m", self.memory, "-smp", "2"]
        words += ["-accel", "tcg,thread=multi,tb-size=256", "-nographic", "-nodefaults"]
        words += ["-kernel", f"{self._boot}/vmlinuz", "-initrd", f"{self._boot}/initrd"]
        words += ["-append", recipe.KERNEL_ARGUMENTS, "-serial", f"file:{self.folder}/console.log"]
        for name in DISKS:
            disk = f"file={self.folder}/{name}.qcow2,format=qcow2,if=none,id={name},cache=unsafe"
            words += ["-drive", disk, "-device", f"virtio-blk-pci,drive={name}"]
        words += ["-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile="]
        words += ["-device", "virtio-rng-pci", "-device", "i6300esb", "-action", "watchdog=reset"]
        return words

    def monitor(self, command: str) -> str:
        """Run a command in qemu's human monitor, and return its output.

        Raises:
            BenchError: The command printed an error.
        """
        reply: str = self.monitor_command("human-monitor-command", {"command-line": command}).strip()
        if reply.startswith("Error"):
            raise BenchError(f"qemu refuses `{command}`: {reply}")
        return reply

    def save(self, snapshot: str) -> None:
        """Save the memory and disks of the machine as a snapshot with this name."""
        self.monitor(f"savevm {snapshot}")

    def restore(self, snapshot: str) -> None:
        """Restore a snapshot. Later changes on the disks are lost."""
        self.monitor(f"loadvm {snapshot}")

    @QEMUDriver.check_active  # type: ignore[untyped-decorator]
    def cycle(self) -> None:
        """Reset the machine as a power cut does. It loses unwritten data and boots from its disks."""
        self.monitor_command("system_reset")

    def forward_ssh(self) -> int:
        """Forward a free local port to the machine's ssh port, and return the local port."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port: int = free.getsockname()[1]
        self.add_port_forward("tcp", "127.0.0.1", port, "", _SSH)
        return port
