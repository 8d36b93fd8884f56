"""Unpacks mosquitto from Debian's package into the cache, without root, if it is not installed.

Libraries that are missing on this machine are unpacked too. apt verifies the signatures.
"""

import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from edgekit_runtime.errors import ConfigError
from edgekit_runtime.system.atomic_files import write_atomically
from edgekit_runtime.system.child_process import run_program
from edgekit_runtime.system.paths import find_cache_folder

SYSTEM_FOLDERS: Final = ("/usr/sbin", "/usr/local/sbin")  # often not on a user's PATH

_LIMIT_S: Final = 300.0
_MAX_OUTPUT_BYTES: Final = 1 << 16


def provide_mosquitto(show: Callable[[str], None]) -> None:
    """Put mosquitto on the PATH of this process, unless it is installed.

    Args:
        show: Called with a message before Debian's package is unpacked.

    Raises:
        ConfigError: mosquitto is not installed, and Debian's package cannot be unpacked.
    """
    path = ":".join((os.environ.get("PATH", os.defpath), *SYSTEM_FOLDERS))
    if shutil.which("mosquitto", path=path) is not None:
        return
    folder = find_cache_folder() / "mosquitto"
    program = folder / "bin" / "mosquitto"
    if not program.exists():
        show(f"mosquitto, the broker, is not installed: unpacking Debian's package into {folder}")
        try:
            _unpack(folder)
        except OSError as error:
            raise ConfigError(
                f"mosquitto, the broker of a fleet, is not installed, and Debian's package cannot be unpacked"
                f" here ({error}): install it, on Debian by `apt install mosquitto`"
            ) from error
    os.environ["PATH"] = f"{program.parent}:{path}"


def _unpack(folder: Path) -> None:
    """Unpack the package and its dependencies, and write a wrapper program that finds its libraries.

    Raises:
        OSError: apt or dpkg is missing or fails, or the folder cannot be written.
    """
    archives, root = folder / "cache" / "archives", folder / "root"
    for path in (folder / "state/lists/partial", archives / "partial", root, folder / "bin"):
        path.mkdir(parents=True, exist_ok=True)
    settings = {
        "Dir::State": folder / "state",
        "Dir::State::status": "/var/lib/dpkg/status",  # what is installed need not be downloaded
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "",
        "APT::Install-Recommends": "false",
        "Acquire::Languages": "none",
        "Debug::NoLocking": "true",
    }
    apt = ["apt-get", "-qq", *(f"--option={name}={value}" for name, value in settings.items())]
    _run(*apt, "update")
    _run(*apt, "install", "--yes", "--download-only", "mosquitto")
    for package in sorted(archives.glob("*.deb")):
        _run("dpkg-deb", "--extract", str(package), str(root))
    libraries = ":".join(str(path) for path in root.glob("**/lib/*-linux-*") if path.is_dir())
    shutil.rmtree(folder / "cache")
    real = shlex.quote(str(root / "usr/sbin/mosquitto"))
    text = f'#!/bin/sh\nLD_LIBRARY_PATH={shlex.quote(libraries)} exec {real} "$@"\n'
    with write_atomically(
        folder / "bin" / "mosquitto", mode=0o755
    ) as file:  # last: it says that all is there
        file.write(text.encode())


def _run(*words: str) -> None:
    result = run_program(words, (), _LIMIT_S, _MAX_OUTPUT_BYTES)
    if result.exit_code != 0:
        raise OSError(f"{words[0]}: {result.last_line or 'it did not end in time'}")
