"""A child process that creates namespaces, in which ARM64 programs run under qemu-user.

    python -m edgekit_hil.drivers.emulated_processes QEMU ROOT UPPER WORK READ_ONLY...

The process has its own user namespace, with the same users as the system. qemu-aarch64 is registered in the
binfmt_misc of this namespace and not for the whole machine. In the mount namespace, `/` is ROOT, changes go
to UPPER, and the READ_ONLY folders have the same paths as outside. When the process ends, all programs in its
process namespace end too. The process prints `ready PID` and sleeps. `nsenter --target PID` then runs
programs in the namespaces.

Source: Linux 6.7, "binfmt_misc: enable sandboxed mounts", and Documentation/admin-guide/binfmt-misc.rst.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from edgekit_runtime.system.child_process import end_with_parent

_NEW_USER, _NEW_MOUNTS, _NEW_PROCESSES = 0x10000000, 0x00020000, 0x20000000
_PRIVATE, _RECURSIVE, _BIND, _REMOUNT = 0x40000, 0x4000, 0x1000, 0x20
_READ_ONLY, _NO_SUID, _NO_DEVICES = 0x1, 0x2, 0x4
_MOUNT_SETATTR, _NO_FOLDER, _BELOW, _ATTRIBUTE_READ_ONLY = 442, -100, 0x8000, 0x1
_ALL_USERS: Final = "0 0 4294967295\n"
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS: Final = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
# In /proc. Container runtimes make the same ones read-only.
_KERNEL_SETTINGS: Final = ("sys", "sysrq-trigger", "irq", "bus", "fs")
_BINFMT: Final = Path("/proc/sys/fs/binfmt_misc")
# The first bytes of a program: ELF, 64 bits, little-endian, executable or shared, machine 183 (aarch64).
_MAGIC: Final = rb"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
_MASK: Final = rb"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
# P: argv[0] stays. O: by an open descriptor. C: with the program's rights. F: the emulator is opened now.
_FLAGS: Final = b"POCF"

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library.

    Raises:
        OSError: The call failed.
    """
    if getattr(_libc, name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _mount(source: str, to: Path, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, str(to), kind, data)]
    try:
        _call("mount", texts[0], texts[1], texts[2], flags, texts[3])
    except OSError as cause:
        raise OSError(cause.errno, f"{cause.strerror}: {source} at {to}") from cause


def _make_read_only(folder: Path) -> None:
    """Make a mount and all mounts below it read-only, see mount_setattr(2)."""
    attributes = (ctypes.c_uint64 * 4)(_ATTRIBUTE_READ_ONLY, 0, 0, 0)
    _call(
        "syscall",
        _MOUNT_SETATTR,
        _NO_FOLDER,
        str(folder).encode(),
        _BELOW,
        attributes,
        ctypes.sizeof(attributes),
    )


def _enter_user_namespace() -> None:
    """Enter new namespaces. A child outside of them maps the users of the system into them."""
    reading, writing = os.pipe()
    inside = os.getpid()
    outside = os.fork()
    if not outside:
        os.close(writing)
        os.read(reading, 1)
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{inside}/{name}").write_text(_ALL_USERS)
        os._exit(0)
    os.close(reading)
    _call("unshare", _NEW_USER | _NEW_MOUNTS | _NEW_PROCESSES)
    os.write(writing, b"x")
    os.close(writing)
    if os.waitpid(outside, 0)[1]:
        raise PermissionError("the users of the system cannot be mapped into a user namespace; be root")
    os.setgid(0)
    os.setuid(0)


def _register(qemu: str) -> None:
    """Register the emulator in the binfmt_misc of this namespace."""
    _mount("none", Path("/"), None, _PRIVATE | _RECURSIVE)
    _mount("binfmt_misc", _BINFMT, "binfmt_misc")
    (_BINFMT / "register").write_bytes(b":edgekit:M::%b:%b:%b:%b" % (_MAGIC, _MASK, qemu.encode(), _FLAGS))


def _mount_root(root: str, upper: str, work: Path, read_only: Sequence[str]) -> Path:
    """Mount the root, and return its folder."""
    merged = work / "merged"
    (work / "work").mkdir()
    merged.mkdir()
    _mount("overlay", merged, "overlay", 0, f"lowerdir={root},upperdir={upper},workdir={work / 'work'}")
    _mount("/sys", merged / "sys", None, _BIND | _RECURSIVE)
    _make_read_only(merged / "sys")  # its files check only the user, and root here is root outside
    _mount("tmpfs", merged / "tmp", "tmpfs", _NO_SUID | _NO_DEVICES, "mode=1777")
    _mount("tmpfs", merged / "run", "tmpfs", _NO_SUID | _NO_DEVICES, "mode=755")
    for folder in read_only:
        to = merged / folder.lstrip("/")
        to.mkdir(parents=True, exist_ok=True)
        _mount(folder, to, None, _BIND)
        _mount(folder, to, None, _BIND | _REMOUNT | _READ_ONLY)
    devices = merged / "dev"
    _mount("tmpfs", devices, "tmpfs", _NO_SUID, "mode=755")
    for name in _DEVICES:
        (devices / name).touch()
        _mount(f"/dev/{name}", devices / name, None, _BIND)
    for name, target in _DEVICE_LINKS.items():
        (devices / name).symlink_to(target)
    for name, kind, data in (("pts", "devpts", "newinstance,ptmxmode=0666"), ("shm", "tmpfs", "mode=1777")):
        (devices / name).mkdir()
        _mount(kind, devices / name, kind, _NO_SUID, data)
    (devices / "ptmx").symlink_to("pts/ptmx")
    return merged


def _mount_processes(folder: Path) -> None:
    """Mount procfs. Its files that change settings of the machine's kernel are read-only."""
    _mount("proc", folder, "proc")
    for path in (folder / name for name in _KERNEL_SETTINGS):
        if path.exists():
            _mount(str(path), path, None, _BIND | _RECURSIVE)
            _make_read_only(path)


def main() -> None:
    """Create the namespaces, print `ready` and the id of their first process, and wait."""
    end_with_parent()
    qemu, root, upper, work, *read_only = sys.argv[1:]
    _enter_user_namespace()
    _register(qemu)
    merged = _mount_root(root, upper, Path(work), read_only)
    reading, writing = os.pipe()
    first = os.fork()
    if first:
        os.close(writing)
        if os.read(reading, 1):  # not earlier: until then its root is the machine's root
            print(f"ready {first}", flush=True)
        os.waitpid(first, 0)
        return
    _libc.prctl(1, signal.SIGKILL)  # ends with the process above
    _mount_processes(merged / "proc")
    os.chroot(merged)
    os.chdir("/")
    os.write(writing, b"x")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody else reaps here
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
