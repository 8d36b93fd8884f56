"""Whatever stops a write, the folder then holds the old package or the new one, and nothing else."""

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgekit_runtime.errors import EdgekitError, OutputError
from edgekit_runtime.package import canonical_zip
from edgekit_runtime.package.archive import write_package
from edgekit_runtime.system.atomic_files import hash_file, write_atomically

FAULTS: dict[str, tuple[BaseException, type[BaseException]]] = {
    "full disk": (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), OutputError),
    "failing disk": (OSError(errno.EIO, os.strerror(errno.EIO)), OutputError),
    "interrupt": (KeyboardInterrupt(), KeyboardInterrupt),
    "no memory": (MemoryError(), MemoryError),
}


def raise_from(monkeypatch: pytest.MonkeyPatch, place: str, fault: BaseException) -> None:
    """Let `fault` happen at a step of the write: the third member, the sync of the file, or the rename."""
    real_header = canonical_zip.build_local_header
    calls: list[object] = []

    def fail(*_: object, **__: object) -> None:
        raise fault

    def fail_third(member: canonical_zip.Member) -> bytes:
        calls.append(member)
        if len(calls) == 3:
            raise fault
        return real_header(member)

    if place == "third member":
        monkeypatch.setattr(canonical_zip, "build_local_header", fail_third)
    elif place == "sync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)


@pytest.mark.parametrize("place", ["third member", "sync", "rename"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_mid_write_leaves_no_file(
    name: str, place: str, maker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, expected = FAULTS[name]
    raise_from(monkeypatch, place, fault)
    with pytest.raises(expected):
        maker.write(tmp_path / "x.edgepkg")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["third member", "sync", "rename"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_mid_write_keeps_the_package_that_was_there(
    name: str, place: str, maker: Any, package_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = package_path.read_bytes()
    fault, expected = FAULTS[name]
    raise_from(monkeypatch, place, fault)
    with pytest.raises(expected):
        maker.write(package_path, version="2.0.0")
    assert (package_path.read_bytes(), len(list(package_path.parent.iterdir()))) == (before, 1)


def test_a_new_package_replaces_the_old_one(maker: Any, package_path: Path) -> None:
    before = package_path.read_bytes()
    assert maker.write(package_path, version="2.0.0") != before


def mount_tmpfs(folder: Path, options: str) -> None:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a file system needs root and mount")
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.skip(f"mounting a file system is not permitted here: {result.stderr.strip()}")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    folder = tmp_path / "mounted"
    folder.mkdir()

    def mounted(options: str) -> Path:
        mount_tmpfs(folder, options)
        return folder

    yield mounted
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full_keeps_what_was_there(maker: Any, mount: Callable[[str], Path]) -> None:
    folder = mount("size=256k")
    before = maker.write(folder / "x.edgepkg")
    artifacts = {**maker.artifacts, "model.onnx": bytes(1 << 20)}
    with pytest.raises(OutputError, match="No space left"):
        write_package(folder / "x.edgepkg", maker.manifest(artifacts), artifacts, maker.signer)
    assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [("x.edgepkg", before)]


def test_a_read_only_file_system_is_an_output_error(maker: Any, mount: Callable[[str], Path]) -> None:
    folder = mount("size=64k,ro")
    with pytest.raises(OutputError, match="Read-only file system"):
        maker.write(folder / "x.edgepkg")
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every folder")
def test_a_folder_without_write_permission_is_an_output_error(maker: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        maker.write(tmp_path / "x.edgepkg")


@pytest.mark.parametrize("parent", ["missing", "file"])
def test_a_folder_that_is_none_is_an_output_error(parent: str, maker: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match=r"cannot write .*x\.edgepkg"):
        maker.write(tmp_path / parent / "x.edgepkg")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_in_the_place_of_the_file_is_an_output_error(maker: Any, tmp_path: Path) -> None:
    (tmp_path / "x.edgepkg").mkdir()
    with pytest.raises(OutputError):
        maker.write(tmp_path / "x.edgepkg")
    assert [path.name for path in tmp_path.iterdir()] == ["x.edgepkg"]


def test_an_output_error_has_the_exit_code_of_output() -> None:
    assert (OutputError.exit_code, issubclass(OutputError, EdgekitError)) == (10, True)


def test_the_file_obeys_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with write_atomically(tmp_path / "x") as file:
            file.write(b"content")
    finally:
        os.umask(before)
    assert ((tmp_path / "x").stat().st_mode & 0o777, (tmp_path / "x").read_bytes()) == (0o640, b"content")


def test_the_digest_of_a_file_over_one_chunk_is_that_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"a" * 1_000_000 + b"b" * 1_000_000)
    expected = subprocess.run(["sha256sum", str(tmp_path / "x")], capture_output=True, text=True, check=True)
    assert expected.stdout.startswith(hash_file(tmp_path / "x"))
