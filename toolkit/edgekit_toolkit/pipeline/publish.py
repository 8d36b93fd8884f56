"""Writes the package, the evidence and the recipe of a run atomically."""

import contextlib
import datetime
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgekit_runtime import __version__
from edgekit_runtime.encryption.container import encrypt_file, is_encrypted, make_content_key
from edgekit_runtime.encryption.device_key import read_public_device_key, wrap_for
from edgekit_runtime.errors import OutputError
from edgekit_runtime.package.archive import read_unverified_manifest, write_package
from edgekit_runtime.system.atomic_files import hash_file
from edgekit_runtime.system.processor_speed import find_cpu
from edgekit_toolkit.measurement.arithmetic import arithmetic_facts
from edgekit_toolkit.packaging.assemble import PackageDraft
from edgekit_toolkit.packaging.evidence import evidence_path, write_evidence
from edgekit_toolkit.packaging.recipe import Recipe
from edgekit_toolkit.packaging.signing_keys import StatementSigner


@dataclass(frozen=True, slots=True)
class PublishedFiles:
    """The names of the files, the size and SHA-256 of the package, and the id of the signing key."""

    package: str
    evidence: str
    recipe: str
    size_bytes: int
    sha256: str
    key_id: str


@contextlib.contextmanager
def output_folder(folder: Path) -> Iterator[None]:
    """Create the output folder for a `with` block that writes to it.

    If the block fails, created folders are removed again if they are empty.

    Raises:
        OutputError: The folder cannot be created or written.
    """
    created: list[Path] = []
    try:
        try:
            created.extend(path for path in (folder, *folder.parents) if not path.exists())
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"the output folder {folder} cannot be made: {error.strerror}; choose another by -o"
            ) from error
        _check_writable(folder)
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # not empty, or never made
            for path in created:
                path.rmdir()
        raise


def _check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"the output folder {folder} is not writable; choose another by -o")


@contextlib.contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """Yield an empty folder in `folder`. If the block succeeds, move its files to `folder`.

    After a full disk or an interrupt, `folder` contains either all old or all new files. The temporary folder
    `.edgekit-*` is only left behind after SIGKILL or a power failure.

    Raises:
        OutputError: `folder` cannot be written.
    """
    try:
        stage = Path(tempfile.mkdtemp(prefix=".edgekit-", dir=folder))
        try:
            yield stage
            _check_places(stage, folder)
            try:
                _move_files(stage, folder)
            except KeyboardInterrupt:
                _move_files(stage, folder)  # the rest of it: files of two runs would not fit together
                raise
        except OutputError as error:
            raise OutputError(str(error).replace(str(stage), str(folder))) from error
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    except OSError as error:
        raise OutputError(
            f"cannot write into {folder}: {error.strerror or error}; free space, or choose another by -o"
        ) from error


def _check_places(stage: Path, folder: Path) -> None:
    """Check all places before the first file moves, so that no later file fails."""
    for path in sorted(stage.iterdir()):
        destination = folder / path.name
        if destination.is_dir() and not destination.is_symlink():
            raise OutputError(
                f"cannot write into {folder}: a folder lies at {path.name}, the place of a result; move it"
                " away, or choose another output folder by -o"
            )


def _move_files(stage: Path, folder: Path) -> None:
    # The package last: once it is there, so is the rest.
    for path in sorted(stage.iterdir(), key=lambda path: (path.suffix == ".edgepkg", path.name)):
        path.replace(folder / path.name)


def publish(
    assembled: PackageDraft,
    recipe: Recipe,
    evidence: Mapping[str, Any],
    folder: Path,
    signer: StatementSigner,
) -> PublishedFiles:
    """Write a package, its evidence and its recipe to an existing folder.

    Raises:
        OutputError: A file cannot be written.
    """
    path = folder / assembled.manifest.file_name
    write_package(path, assembled.manifest, assembled.artifacts, signer)
    recipe_path = path.with_name(path.name.removesuffix(".edgepkg") + ".recipe.json")
    recipe.write(recipe_path)
    write_evidence(evidence_path(path), path, evidence, signer)
    return PublishedFiles(
        path.name,
        evidence_path(path).name,
        recipe_path.name,
        path.stat().st_size,
        hash_file(path),
        signer.key_id,
    )


def publish_encrypted(package: Path, folder: Path, device_keys: Sequence[Path]) -> Path:
    """Encrypt a package for devices, write it as `NAME.encrypted.edgepkg` and return the path.

    Args:
        package: The path of the package.
        folder: The output folder. It is created if necessary.
        device_keys: The paths of the public keys of the devices.

    Raises:
        EncryptionError: A file is not a public key of a device, or the package is already encrypted.
        PackageError: The file is not a package.
        OutputError: The result cannot be written.
    """
    points = [read_public_device_key(path) for path in device_keys]
    content_key = make_content_key()
    with output_folder(folder):
        target = folder / f"{package.stem}.encrypted.edgepkg"
        if not is_encrypted(package):  # what is, cannot be read here, and is refused below
            read_unverified_manifest(package)
        encrypt_file(package, target, content_key, wrap_for(content_key, points))
    return target


def host_facts() -> dict[str, Any]:
    """Return facts about this machine for evidence, such as `cpu`, `cores`, `os` and `python`."""
    return {
        "cpu": find_cpu(),
        **arithmetic_facts(),
        "cores": os.cpu_count() or 1,
        "os": platform.platform(),
        "python": platform.python_version(),
    }


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def evidence_of(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the predicate for evidence: `figures`, the time, this machine and the edgekit version."""
    return {"edgekit": __version__, "created": now(), "host": host_facts(), **figures}
