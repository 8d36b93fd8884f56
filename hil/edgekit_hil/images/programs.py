"""Programs on this machine that create an image."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from edgekit_runtime.errors import BenchError, BenchUnavailableError
from edgekit_runtime.system.child_process import describe_end, run_program

_MAX_OUTPUT_BYTES: Final = 64 << 20
_LIMIT_S: Final = 900.0

# The Debian package of each program.
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
    """Check that programs are installed.

    Raises:
        BenchUnavailableError: A program is missing. The message names its package.
    """
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        packages = sorted({_PACKAGES[name] for name in missing})
        raise BenchUnavailableError(f"{', '.join(missing)} is missing: apt-get install {' '.join(packages)}")


def run_checked(command: Sequence[str | Path]) -> str:
    """Run a program, and return its output.

    Raises:
        BenchError: The program failed, or did not end in time.
    """
    words = [str(word) for word in command]
    result = run_program(words, (), _LIMIT_S, _MAX_OUTPUT_BYTES)
    if result.exit_code is None:
        raise BenchError(f"{words[0]} did not end within {_LIMIT_S:g} s")
    if result.exit_code:
        message = result.last_line or "no message"
        raise BenchError(f"{' '.join(words[:3])} ended {describe_end(result.exit_code)}: {message}")
    return result.output.decode(errors="replace")
