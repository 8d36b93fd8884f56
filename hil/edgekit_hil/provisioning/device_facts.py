"""The facts about a device that an installation needs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from edgekit_runtime.errors import ProvisioningError

MACHINES: Final = ("aarch64", "x86_64")
"""Architectures for which all packages have wheels."""

OLDEST_PYTHON: Final = (3, 10)
_NEWEST: Final = (3, 13)  # newest Python for which all packages have wheels
_TEXTS: Final = tuple("machine system model libc rights release previous service agent device models".split())
_KIB: Final = 1024
_PRIVATE: Final = tuple(f"/{name}/" for name in ("home", "root"))  # the service cannot read there


@dataclass(frozen=True, slots=True)
class DevicePython:
    """A Python on the device.

    Attributes:
        version: The version, such as `3.11.2`.
        implementation: The implementation, such as `CPython`.
        has_tensorrt: Whether it can import TensorRT, which comes with JetPack.
        bits: 64 or 32. A 32-bit Raspberry Pi OS has 32, although its 64-bit kernel reports `aarch64`.
    """

    path: str
    version: str
    implementation: str
    has_tensorrt: bool
    bits: int

    @property
    def is_supported(self) -> bool:
        """Whether edgekit has wheels for this Python, and the service may run this Python."""
        if self.path.startswith(_PRIVATE) or self.bits != 64:
            return False
        numbers = tuple(int(part) for part in re.findall(r"\d+", self.version)[:2])
        return self.implementation == "CPython" and OLDEST_PYTHON <= numbers <= _NEWEST


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallFacts:
    """The facts that the device reported. Missing facts are empty.

    Attributes:
        machine: The architecture, such as `aarch64`.
        system: The operating system, such as `Debian GNU/Linux 12 (bookworm)`.
        model: The model of the board.
        libc: The C library, such as `glibc 2.36`.
        pythons: The Python installations, with the default one first.
        free_bytes: The free space where edgekit is installed.
        rights: `root`, `sudo` (without a password) or `none`.
        release, previous: The installed release and the previous one.
        service, agent: The states of these systemd units, such as `active`.
        device: The name of the device in a fleet.
        keys: The SHA-256 of each trusted key file in hexadecimal, by the name of the key.
        models: The output of `edgekit-device status --json`.
    """

    machine: str
    system: str
    model: str
    libc: str
    pythons: tuple[DevicePython, ...]
    free_bytes: int
    rights: str
    release: str
    previous: str
    service: str
    agent: str
    device: str
    keys: dict[str, str]
    models: str

    @classmethod
    def parse(cls, lines: Sequence[str]) -> "InstallFacts":
        """Parse the facts from lines of `NAME=VALUE`.

        Raises:
            ProvisioningError: Required facts are missing.
        """
        pairs = [line.partition("=")[::2] for line in lines if "=" in line]
        fields = dict(pairs)
        pythons = {}
        for words in [value.split() for name, value in pairs if name == "python"]:
            if len(words) == 5 and words[4].isdecimal():
                path, version, implementation, has_tensorrt, bits = words
                pythons[path] = DevicePython(path, version, implementation, has_tensorrt == "1", int(bits))
        if "machine" not in fields or not fields.get("free_kb", "").isdecimal():
            raise ProvisioningError(f"the device does not describe itself: {' '.join(lines)[:200]!r}")
        return cls(
            **{name: fields.get(name, "") for name in _TEXTS},
            pythons=tuple(pythons.values()),
            free_bytes=int(fields["free_kb"]) * _KIB,
            keys=dict(value.partition(" ")[::2] for name, value in pairs if name == "key"),
        )

    @property
    def glibc(self) -> tuple[int, int]:
        """The version of glibc, such as (2, 36).

        Raises:
            ProvisioningError: The C library is not glibc, so there are no wheels for it.
        """
        match = re.fullmatch(r"glibc (\d+)\.(\d+)", self.libc)
        if match is None:
            raise ProvisioningError(
                f"the device has the C library {self.libc or 'unknown'!r}, expected glibc"
            )
        return int(match[1]), int(match[2])

    def choose_python(self) -> DevicePython:
        """Check that the device can run edgekit, and return the Python for the installation.

        Raises:
            ProvisioningError: The device cannot run edgekit, or its user is not root and may not use sudo.
        """
        if self.machine not in MACHINES:
            raise ProvisioningError(
                f"the device is a {self.machine}, expected one of {', '.join(MACHINES)}; for a Raspberry Pi"
                " install the 64-bit system"
            )
        if self.rights == "none":
            raise ProvisioningError(
                "the user of the device may not use sudo without a password; log in as root, or allow it"
            )
        supported = next((python for python in self.pythons if python.is_supported), None)
        if supported is None:
            names = (
                ", ".join(
                    f"{install.implementation} {install.version}, {install.bits} bits ({install.path})"
                    for install in self.pythons
                )
                or "none"
            )
            raise ProvisioningError(
                "the device has no 64-bit Python 3.10 to 3.13 with the module venv outside of /root and"
                f" /home, found: {names}"
            )
        return supported
