"""Programs of this machine that make an image."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from edgekit_runtime.errors import BenchError, BenchUnavailableError

# program -> the package of Debian that it is in
_PACKAGES: Final[Mapping[str, str]] = {
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
    "mke2fs": "e2fsprogs",
    "qemu-img": "qemu-utils",
    "qemu-system-aarch64": "qemu-system-arm",
    "qemu-aarch64-static": "qemu-user-static",
    "nsenter": "util-linux",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}


def require(*programs: str) -> None:
    """Do nothing if these programs are installed.

    Raises:
        BenchUnavailableError: one is missing; the message names its package.
    """
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        packages = sorted({_PACKAGES[name] for name in missing})
        raise BenchUnavailableError(f"{', '.join(missing)} is missing: apt-get install {' '.join(packages)}")


def run_program(command: Sequence[str | Path], limit_s: float = 900.0) -> str:
    """Return what a program prints.

    Raises:
        BenchError: it failed, or did not end within `limit_s`.
    """
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as cause:
        raise BenchError(f"{command[0]} did not end within {limit_s:g} s") from cause
    if done.returncode:
        said = done.stderr.strip()[-500:] or "no message"
        raise BenchError(f"{' '.join(map(str, command[:3]))} ended with {done.returncode}: {said}")
    return done.stdout
