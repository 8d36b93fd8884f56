"""The wheels for a device: pinned wheels for its Python and platform, and the wheel of edgekit.

The host downloads the wheels or reuses earlier downloads. Host and device check the hashes, and the device
needs no network. pip is included, because Debian's Python has no pip.
"""

import base64
import hashlib
import io
import sys
import tarfile
import tempfile
import zipfile  # noqa: TID251  # wheels are archives of pip's, whose hashes pip checks
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import edgekit_runtime
from edgekit_hil.provisioning.device_facts import DevicePython, InstallFacts
from edgekit_host.pinned_packages import read_pinned
from edgekit_runtime import __version__
from edgekit_runtime.errors import OutputError, ProvisioningError
from edgekit_runtime.system.child_process import run_program
from edgekit_runtime.system.paths import find_cache_folder

_OLDEST_GLIBC: Final = (2, 17)
_DOWNLOAD_LIMIT_S: Final = 1800.0
_MAX_OUTPUT_BYTES: Final = 1 << 16
_BYTECODE: Final = 1.3  # size of the installation with bytecode, over the size of the packages
_SPARE_BYTES: Final = 64 << 20
_LICENSE: Final = "Apache-2.0"


@dataclass(frozen=True, slots=True)
class Wheelhouse:
    """The packages that a device installs.

    Attributes:
        release: A digest of the whole content, which identifies the release on the device.
        requirements: The pip requirements for the device with their hashes.
        own_wheel: The file name and content of edgekit's wheel.
        folder: The folder of all other wheels, which `download` fills.
        tags: The pip arguments that describe the device.
    """

    release: str
    requirements: str
    own_wheel: tuple[str, bytes]
    folder: Path
    tags: tuple[str, ...]

    @classmethod
    def plan(cls, facts: InstallFacts, python: DevicePython, engine: str) -> "Wheelhouse":
        """Return the packages for a device without downloading them.

        Raises:
            ProvisioningError: No wheel supports the device's C library, or this installation lacks a package
                list.
        """
        pinned = read_pinned(engine, facts.machine, python.version)
        name, content = make_own_wheel()
        own = f"edgekit=={__version__} --hash=sha256:{hashlib.sha256(content).hexdigest()}"
        platforms = [word for platform in _list_platforms(facts) for word in ("--platform", platform)]
        numbers = ".".join(python.version.split(".")[:2])
        tags = ("--implementation", "cp", "--python-version", numbers, *platforms)
        wheels = hashlib.sha256("\n".join((*pinned, *tags)).encode()).hexdigest()
        requirements = "\n".join((*pinned, own, ""))
        identity = f"{requirements}{python.path} {python.version} {python.has_tensorrt} {' '.join(tags)}"
        release = hashlib.sha256(identity.encode()).hexdigest()[:16]
        folder = find_cache_folder() / "wheelhouses" / wheels[:16]
        return cls(release, requirements, (name, content), folder, tags)

    def download(self) -> None:
        """Download the wheels into `folder`, unless it already exists.

        Raises:
            ProvisioningError: pip cannot download a wheel.
            OutputError: The wheels cannot be stored.
        """
        if self.folder.is_dir():
            return
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder.parent, prefix=".incomplete-") as temporary:
                fetched = Path(temporary) / "wheels"
                self._download_to(fetched)
                if not self.folder.is_dir():  # another run may have been faster
                    fetched.rename(self.folder)
        except OSError as cause:
            raise OutputError(f"cannot write {self.folder}: {cause.strerror}; set EDGEKIT_CACHE") from cause

    def _download_to(self, folder: Path) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.writelines(f"{line}\n" for line in self.requirements.splitlines()[:-1])
            file.flush()
            options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--disable-pip-version-check"]
            argv = [sys.executable, "-m", "pip", "download", *options, *self.tags]
            argv += ["--dest", str(folder), "--requirement", file.name]
            result = run_program(argv, (), _DOWNLOAD_LIMIT_S, _MAX_OUTPUT_BYTES)
        if result.exit_code != 0:  # None: it was stopped
            reason = result.last_line if result.exit_code else f"not done after {_DOWNLOAD_LIMIT_S:g} s"
            raise ProvisioningError(f"pip cannot download the packages of the device: {reason}")

    def measure(self) -> int:
        """Return the disk space in bytes that the installation needs. Call this after `download`."""
        wheels = [*self.folder.glob("*.whl")]
        unpacked = len(self.own_wheel[1])
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                unpacked += sum(member.file_size for member in archive.infolist())
        return int(unpacked * _BYTECODE) + sum(wheel.stat().st_size for wheel in wheels) + _SPARE_BYTES

    def list_content(self) -> list[tuple[str, Path | bytes]]:
        """Return each file that the device needs, as its name and its local path or content.

        Call this after `download`.
        """
        return [
            *((f"wheels/{wheel.name}", wheel) for wheel in sorted(self.folder.glob("*.whl"))),
            (f"wheels/{self.own_wheel[0]}", self.own_wheel[1]),
            ("requirements.txt", self.requirements.encode()),
            ("pip.zip", pack_pip()),
        ]


def pack(content: Iterable[tuple[str, Path | bytes]]) -> Iterator[bytes]:
    """Yield a tar archive in chunks. `content` lists the name and the local path or content of each file."""
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            for name, source in content:
                data = source if isinstance(source, bytes) else source.read_bytes()
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(data), 0o644
                archive.addfile(entry, io.BytesIO(data))
        file.seek(0)
        while part := file.read(1 << 20):
            yield part


def make_own_wheel() -> tuple[str, bytes]:
    """Return the file name and content of a reproducible wheel of this runtime.

    Source: "Binary distribution format", packaging.python.org.
    """
    root = Path(edgekit_runtime.__file__).parent
    paths = sorted(path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc")
    files = {str(path.relative_to(root.parent)): path.read_bytes() for path in paths}
    about = f"edgekit-{__version__}.dist-info"
    files[f"{about}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: edgekit\nVersion: {__version__}\nLicense: {_LICENSE}\n"
    ).encode()
    files[f"{about}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: edgekit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{about}/entry_points.txt"] = b"[console_scripts]\nedgekit-device = edgekit_runtime.cli:main\n"
    lines = [f"{name},sha256={_hash(content)},{len(content)}" for name, content in files.items()]
    files[f"{about}/RECORD"] = "\n".join((*lines, f"{about}/RECORD,,", "")).encode()
    return f"edgekit-{__version__}-py3-none-any.whl", make_zip(files)


def _hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def make_zip(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)  # dated 1980
    return buffer.getvalue()


def pack_pip() -> bytes:
    """Return the pip of this Python as a zip archive that Python can run directly.

    Raises:
        ProvisioningError: This Python has no pip.
    """
    spec = find_spec("pip")
    if spec is None or spec.origin is None:
        raise ProvisioningError("this Python has no pip, which the device needs too: python3 -m ensurepip")
    root = Path(spec.origin).parent
    paths = [path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return make_zip({str(path.relative_to(root.parent)): path.read_bytes() for path in paths})


def _list_platforms(facts: InstallFacts) -> list[str]:
    """Return the platform tags of wheels that the device supports, newest first."""
    major, minor = facts.glibc
    if (major, minor) < _OLDEST_GLIBC:
        raise ProvisioningError(f"the device has {facts.libc}, expected glibc 2.17 or newer")
    return [
        f"manylinux_2_{minor_version}_{facts.machine}"
        for minor_version in range(minor, _OLDEST_GLIBC[1] - 1, -1)
    ] + [f"manylinux2014_{facts.machine}"]
