"""Finds and creates images in the user's cache folder.

An image is a folder whose name contains a hash of the recipe and a hash of the package versions.

    root/          the system, to run programs in
    boot/          what qemu boots: kernel, initrd, disks and root's ssh key
    snapshot/      the disks and the memory of the booted system
    versions.txt   the versions of the Debian packages
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgekit_hil.images import recipe
from edgekit_hil.images.debian_archive import DebianArchive
from edgekit_hil.images.initial_disk import KernelModules, write_initrd
from edgekit_hil.images.programs import require, run_checked
from edgekit_hil.images.root_folder import (
    compile_modules,
    find_python,
    install_wheels,
    make_root,
    unpack,
)
from edgekit_host.pinned_packages import read_pinned
from edgekit_runtime.errors import BenchError, BenchUnavailableError
from edgekit_runtime.system.paths import find_cache_folder

LEAST_FREE_BYTES: Final = 5 << 29  # 1.2 GB stay, beside a second root, the kernel's package and wheels

_MOST_IMAGES: Final = 2
_VERSIONS: Final = "versions.txt"
_WHEELS: Final = "usr/local/lib/python{version}/dist-packages"
_PROGRAMS: Final = ("apt-get", "dpkg-deb", "mke2fs", "qemu-img", "qemu-system-aarch64", "ssh", "ssh-keygen")

Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Image:
    folder: Path

    @property
    def root(self) -> Path:
        """The folder of the system."""
        return self.folder / "root"

    @property
    def boot(self) -> Path:
        """The folder that qemu boots from."""
        return self.folder / "boot"

    @property
    def snapshot(self) -> Path:
        """The folder with the snapshot of the booted system."""
        return self.folder / "snapshot"

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Lock the image during the block, so that it is not removed."""
        with _lock(self.folder / _VERSIONS, fcntl.LOCK_SH):
            yield

    def remove(self) -> None:
        """Remove the image.

        Raises:
            BenchError: A bench is using the image.
        """
        if self.folder.exists():
            with _lock(self.folder / _VERSIONS, fcntl.LOCK_EX):
                shutil.rmtree(self.folder, ignore_errors=True)


def find_image(*, booted: bool) -> Image:
    """Return the newest image of this recipe.

    Args:
        booted: Whether the image must have a snapshot of the booted system.

    Raises:
        BenchUnavailableError: There is no such image. The message says how to create one.
    """
    images = [image for image in _list_images() if image.snapshot.exists() or not booted]
    if not images:
        fault = "no booted ARM64 image" if booted else "no ARM64 image"
        raise BenchUnavailableError(f"{fault} of this recipe in {_folder()}: run `edgekit hil image` first")
    return images[-1]


def make_image(show: Show, *, rebuild: bool = False) -> Image:
    """Return the image of this recipe with the current package versions. Create it if it is missing.

    A new image has no snapshot until `drivers.boot_strategy.save_snapshot` is called.

    Args:
        show: A function that shows the current step.
        rebuild: Whether to create the image again if it exists.

    Raises:
        BenchError: This machine cannot create the image: the process is not root, a program is missing, a
            package is unavailable, or the disk is too full.
    """
    if os.geteuid():
        raise BenchUnavailableError("an image needs root: its files belong to root and other users")
    require(*_PROGRAMS)
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / "lock", fcntl.LOCK_EX):
        show("reading the lists of Debian's packages")
        archive = DebianArchive(folder / "apt")
        archive.update()
        versions = archive.find([*recipe.PACKAGES, recipe.KERNEL])
        image = Image(folder / f"{recipe.hash_recipe()}-{recipe.hash_recipe(*versions)}")
        if rebuild:
            image.remove()
        if not image.boot.exists() and (free := shutil.disk_usage(folder).free) < LEAST_FREE_BYTES:
            raise BenchUnavailableError(
                f"{free >> 20} MiB are free in {folder}, and an image needs {LEAST_FREE_BYTES >> 20} MiB"
                " while it is made: free some space, or set EDGEKIT_CACHE"
            )
        if not image.root.exists():
            _make_root(image, archive, versions, show)
        if not image.boot.exists():
            _make_boot(image, archive, show)
        archive.remove_others(versions)
        os.utime(image.folder)
        _remove_old(keep=image)
    return image


def _make_root(image: Image, archive: DebianArchive, versions: list[str], show: Show) -> None:
    show("downloading packages")
    packages = archive.fetch(recipe.PACKAGES)
    image.folder.mkdir(exist_ok=True)
    (image.folder / _VERSIONS).write_text("\n".join(versions) + "\n")
    with replacing(image.root) as root:
        make_root(root, packages, show)
        show("installing wheels")
        python = find_python(root)
        wheels = root / _WHEELS.format(version=python)
        pinned = [line for engine in recipe.ENGINES for line in read_pinned(engine, recipe.MACHINE, python)]
        install_wheels([*dict.fromkeys(pinned)], python, wheels, are_pinned=True)
        install_wheels(recipe.TEST_WHEELS, python, wheels)
        show("compiling Python modules")
        compile_modules(root, python)


def _make_boot(image: Image, archive: DebianArchive, show: Show) -> None:
    show("downloading the kernel")
    packages = [path for path in archive.fetch([recipe.KERNEL]) if path.name.startswith("linux-image-")]
    with replacing(image.boot) as boot, tempfile.TemporaryDirectory(dir=image.folder) as work:
        kernel, root = Path(work, "kernel"), Path(work, "root")
        kernel.mkdir()
        show("unpacking the kernel")
        for package in packages:
            unpack(package, kernel)
        modules = KernelModules(kernel)
        shutil.copy(kernel / "boot" / f"vmlinuz-{modules.release}", boot / "vmlinuz")
        boot_modules = modules.close_over(recipe.BOOT_MODULES)
        write_initrd(boot / "initrd", image.root / "usr/bin/busybox", boot_modules)
        show("writing the disk")
        run_checked(["cp", "--archive", image.root, root])
        modules.install(modules.close_over((*recipe.BOOT_MODULES, *recipe.TEST_MODULES)), root)
        _make_keys(boot, root)
        _make_disk(boot / "root.raw", recipe.DISK_BYTES, root)
        _make_disk(boot / "data.raw", recipe.DATA_DISK_BYTES, None)


def _make_keys(boot: Path, root: Path) -> None:
    """Create the machine's host key, and a key for logging in as root."""
    for path in (root / "etc/ssh/ssh_host_ed25519_key", boot / "id_ed25519"):
        run_checked(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "edgekit", "-f", path])
    shutil.copy(boot / "id_ed25519.pub", root / "root/.ssh/authorized_keys")


def _make_disk(path: Path, size_bytes: int, root: Path | None) -> None:
    with path.open("wb") as file:
        file.truncate(size_bytes)
    content = ["-d", str(root)] if root else []
    run_checked(["mke2fs", "-q", "-t", "ext4", "-E", "lazy_itable_init=1", *content, str(path)])


def _folder() -> Path:
    return find_cache_folder() / "hil-images"


def _list_images() -> list[Image]:
    """Return the images of this recipe, oldest first."""
    images = [path for path in _folder().glob(f"{recipe.hash_recipe()}-*") if (path / "root").exists()]
    return [Image(path) for path in sorted(images, key=lambda path: path.stat().st_mtime)]


def _remove_old(keep: Image) -> None:
    old_images = [path for path in _folder().iterdir() if "-" in path.name and path != keep.folder]
    old_images.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in old_images[_MOST_IMAGES - 1 :]:
        with contextlib.suppress(BenchError):  # in use: the next call removes it
            Image(path).remove()


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder. At the end it is renamed to `folder`, or deleted after an error."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as new_folder:
        inner = Path(new_folder, folder.name)
        inner.mkdir()
        yield inner
        inner.rename(folder)


@contextlib.contextmanager
def _lock(path: Path, kind: int) -> Iterator[None]:
    """Lock a file during the block.

    Args:
        path: The path of the file, which is created if it is missing.
        kind: `fcntl.LOCK_SH` or `LOCK_EX`.

    Raises:
        BenchError: Another process holds the lock.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            raise BenchError(
                f"another process makes or uses an image in {path.parent}; try again when it has ended"
            ) from cause
        yield
