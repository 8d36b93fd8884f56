"""Downloads the engine release that devices run, and tests packages with it.

Devices run older releases than this host, see `requirements/device*.txt`. An older release may refuse a model
or crash on it. So each package is opened and self-tested with the older release, in a child process.
"""

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from edgekit_host.pinned_packages import read_pinned
from edgekit_runtime.errors import BackendError, ProvisioningError, SlowOpeningError, UnavailableError
from edgekit_runtime.package.archive import read_package, write_package
from edgekit_runtime.sessions.opening.package_opening import test_in_child
from edgekit_runtime.system.child_process import run_program
from edgekit_runtime.system.engines import find_engine
from edgekit_runtime.system.paths import find_cache_folder
from edgekit_runtime.trust.dsse import KnownDigest
from edgekit_toolkit.packaging.assemble import PackageDraft
from edgekit_toolkit.packaging.signing_keys import StatementSigner


@dataclass(frozen=True, slots=True)
class EngineProof:
    """The result of a self-test of a package with a release of its engine.

    Attributes:
        engine: The name and release of the engine that ran the self-test, such as `onnxruntime 1.24.4`.
        device_engine: The name and release of the engine on devices.
        problem: Why the self-test failed with the engine release on devices, or an empty string.
        note: Why the self-test only ran with the engine release of this host, or an empty string.
    """

    engine: str
    device_engine: str
    problem: str = ""
    note: str = ""


FETCH_VARIABLE: Final = "EDGEKIT_DEVICE_ENGINES"
"""An environment variable. With `off`, nothing is fetched, and the host's own engine tests packages."""

_FETCH_LIMIT_S: Final = 300.0
_RETRY_AFTER_S: Final = 600.0  # without a network each try takes its time
_TEST_LIMIT_S: Final = 300.0
_PIP: Final = (
    "-m",
    "pip",
    "install",
    "--quiet",
    "--no-deps",
    "--require-hashes",
    "--only-binary=:all:",
    "--disable-pip-version-check",
    "--no-input",
    "--retries",
    "0",
    "--timeout",
    "15",
)


@dataclass(frozen=True, slots=True)
class DeviceEngine:
    """The release of an engine that devices run.

    Attributes:
        name: The name of the Python distribution, such as `onnxruntime`.
        release: The version of the distribution, such as `1.24.4`.
        folder: The folder to import the engine from, or None if this host has the same release or
            `problem` is set.
        problem: Why the release is not available here, or an empty string.
    """

    name: str
    release: str
    folder: Path | None = None
    problem: str = ""


def prove(
    package: PackageDraft, engine: str, signer: StatementSigner, show: Callable[[str], None]
) -> EngineProof:
    """Self-test `package` in a child process with the engine release that devices run.

    `show` is called with a message before a download.
    """
    pinned_engine = find_device_engine(engine, show)
    device = f"{pinned_engine.name} {pinned_engine.release}"
    own = f"{pinned_engine.name} {_find_own_release(pinned_engine.name)}"
    if pinned_engine.problem:
        note = f"Opened and self-tested with {own} of this machine only; devices run {device}:"
        note += f" {pinned_engine.problem}"
        return EngineProof(own, device, note=note)
    with tempfile.TemporaryDirectory(prefix="edgekit-proof-") as folder:
        path = Path(folder) / package.manifest.file_name
        write_package(path, package.manifest, package.artifacts, signer)
        with read_package(path, KnownDigest(package.manifest.sha256)) as opened:
            test = partial(
                test_in_child, opened, limit_s=_TEST_LIMIT_S, engines=pinned_engine.folder, is_kept=False
            )
            try:
                try:
                    problem = test()
                except SlowOpeningError:  # a busy machine
                    problem = test()
            except BackendError as error:
                return EngineProof(device, device, problem=str(error))
            except UnavailableError as error:  # says nothing about the package
                return EngineProof(own, device, note=f"Not opened with {device}, which devices run: {error}")
    return EngineProof(device, device, problem=problem)


def find_device_engine(engine: str, show: Callable[[str], None]) -> DeviceEngine:
    """Return the engine release that devices run, and download it if necessary.

    `show` is called with a message before a download.
    """
    name = find_engine(engine).installation.distributions[0]
    try:
        pinned = read_pinned(engine, platform.machine(), platform.python_version())
    except ProvisioningError as error:
        return DeviceEngine(name, "of another release", problem=str(error))
    line = next(line for line in pinned if line.startswith(f"{name}=="))
    pinned_engine = DeviceEngine(name, line.partition("==")[2].split()[0])
    if pinned_engine.release == _find_own_release(name):
        return pinned_engine
    if os.environ.get(FETCH_VARIABLE) == "off":
        return DeviceEngine(name, pinned_engine.release, problem=f"{FETCH_VARIABLE} is off")
    tag = f"{name}-{pinned_engine.release}-{sys.implementation.cache_tag}-{platform.machine()}"
    folder = find_cache_folder() / "engines" / tag
    problem = "" if folder.is_dir() else _fetch(line, folder, show)
    return DeviceEngine(name, pinned_engine.release, None if problem else folder, problem)


def _fetch(requirement: str, folder: Path, show: Callable[[str], None]) -> str:
    """Install one pinned distribution, unless that failed a moment ago; return why, or an empty text."""
    failure = folder.with_name(f"{folder.name}.failed")
    with suppress(OSError):
        if abs(time.time() - failure.stat().st_mtime) < _RETRY_AFTER_S:
            return failure.read_text()
    show(f"fetching {requirement.split()[0]}, which devices run")
    problem = _install(requirement, folder)
    with suppress(OSError):
        failure.unlink(missing_ok=True)
        if problem:
            problem += f"; next try after {_RETRY_AFTER_S / 60:g} minutes"
            failure.write_text(problem)
    return problem


def _install(requirement: str, folder: Path) -> str:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".incomplete-") as temporary:
            (Path(temporary) / "list.txt").write_text(f"{requirement}\n")
            argv = [sys.executable, *_PIP, "--target", f"{temporary}/engine", "-r", f"{temporary}/list.txt"]
            result = run_program(argv, (), _FETCH_LIMIT_S, 1 << 16)
            if result.exit_code:
                return f"pip cannot fetch it: {result.last_line}"
            if result.exit_code is None:
                return f"pip did not fetch it within {_FETCH_LIMIT_S:g} s"
            if not folder.is_dir():  # another run may have been faster
                (Path(temporary) / "engine").rename(folder)
    except OSError as cause:
        return f"{folder} cannot be written: {cause.strerror}"
    return ""


def _find_own_release(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
