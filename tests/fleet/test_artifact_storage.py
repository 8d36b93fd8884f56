"""The repository in an object store: what devices find there, whatever happens to the copying process."""

import contextlib
import functools
import os
import shutil
import subprocess
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fleet.test_repository import DAY_S, NOW, Device, list_names, new_target
from tests.free_port import free_port
from tests.waiting import wait_for

from edgekit_fleet.releases import artifact_storage
from edgekit_fleet.releases.artifact_storage import ArtifactStorage
from edgekit_fleet.releases.repository import TufRepository
from edgekit_fleet.store.fleet_folder import FleetSettings
from edgekit_runtime.errors import ConfigError, OutputError

pytest.importorskip("obstore", reason="obstore is not installed: edgekit[object-storage]")
MOTO = "moto[server]==5.2.5"


class StoredRepository:
    """A repository whose changes are copied to a folder."""

    def __init__(self, path: Path) -> None:
        self.copy = path / "copy"
        self.storage = ArtifactStorage(f"file://{self.copy}")
        self.made = TufRepository(path / "repository", path / "keys", storage=self.storage)
        self.made.create(NOW)

    def device(self, path: Path) -> Device:
        return Device(TufRepository(self.copy, self.copy), path)


@pytest.fixture
def stored(tmp_path: Path) -> StoredRepository:
    return StoredRepository(tmp_path)


def test_release_is_in_the_storage_when_it_is_made(stored: StoredRepository, tmp_path: Path) -> None:
    stored.made.publish([new_target(tmp_path, b"weights")], NOW)
    assert stored.device(tmp_path / "d").fetch("rpi5/digits-1.edgepkg") == b"weights"
    stored.made.withdraw(["rpi5/digits-1.edgepkg"], NOW + 1)
    assert stored.device(tmp_path / "e").fetch("rpi5/digits-1.edgepkg") is None


def test_withdrawn_package_is_deleted_from_the_storage(stored: StoredRepository, tmp_path: Path) -> None:
    some = [new_target(tmp_path, b"weights"), new_target(tmp_path, b"other", "other-1.edgepkg")]
    stored.made.publish(some, NOW)
    (stored.copy / "index.html").write_text("of somebody")
    stored.made.withdraw(["rpi5/digits-1.edgepkg"], NOW + 1)
    stored.made.remove_unused(NOW + 2 * DAY_S)
    stored.made.refresh(NOW + 2 * DAY_S)
    assert list_names(stored.copy) == list_names(stored.made.folder) | {"index.html"}
    assert stored.device(tmp_path / "d").fetch("rpi5/other-1.edgepkg", NOW + 2 * DAY_S) == b"other"
    assert not list(stored.copy.glob("targets/rpi5/*.digits-1.edgepkg"))


def test_file_that_is_lost_here_stays_in_the_storage(stored: StoredRepository, tmp_path: Path) -> None:
    stored.made.publish([new_target(tmp_path, b"weights")], NOW)
    for path in stored.made.folder.glob("targets/rpi5/*"):
        path.unlink()
    stored.made.remove_unused(NOW + 2 * DAY_S)
    stored.made.refresh(NOW + 2 * DAY_S)
    assert stored.device(tmp_path / "d").fetch("rpi5/digits-1.edgepkg", NOW + 2 * DAY_S) == b"weights"


def test_file_that_is_deleted_during_a_copy_is_left_out(
    stored: StoredRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = artifact_storage.list_files
    monkeypatch.setattr(
        artifact_storage, "list_files", lambda folder: [folder / "targets" / "gone", *listed(folder)]
    )
    stored.made.publish([new_target(tmp_path, b"weights")], NOW)
    assert stored.device(tmp_path / "d").fetch("rpi5/digits-1.edgepkg") == b"weights"


def test_package_from_after_the_restored_backup_stays_in_the_storage(
    stored: StoredRepository, tmp_path: Path
) -> None:
    shutil.copytree(stored.made.folder, tmp_path / "backup")
    (newer,) = stored.made.publish([new_target(tmp_path, b"weights")], NOW)
    shutil.rmtree(stored.made.folder)
    shutil.copytree(tmp_path / "backup", stored.made.folder)
    stored.made.remove_unused(time.time() + 10 * DAY_S)
    assert (stored.copy / "targets" / "rpi5" / f"{newer.sha256}.digits-1.edgepkg").exists()


def test_storage_that_fails_at_a_clean_loses_the_rest_at_the_next_one(
    stored: StoredRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OutputError("no route")

    stored.made.publish([new_target(tmp_path, b"weights")], NOW)
    stored.made.withdraw(["rpi5/digits-1.edgepkg"], NOW + 1)
    with monkeypatch.context() as cut:
        cut.setattr(ArtifactStorage, "remove", fail)
        with pytest.raises(OutputError, match="no route"):
            stored.made.remove_unused(NOW + 2 * DAY_S)
    stored.made.remove_unused(NOW + 2 * DAY_S)
    stored.made.refresh(NOW + 2 * DAY_S)
    assert list_names(stored.copy) == list_names(stored.made.folder)


def test_copy_that_is_cut_off_anywhere_leaves_the_old_or_the_new_repository(
    stored: StoredRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.made.publish([new_target(tmp_path, b"old")], NOW)
    put, left = ArtifactStorage.put, 0

    def put_some(self: ArtifactStorage, *arguments: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError("cut off")
        put(self, *arguments)

    monkeypatch.setattr(ArtifactStorage, "put", put_some)
    new, seen = new_target(tmp_path, b"new version", "digits-2.edgepkg"), []
    for number in range(10):
        left = number
        with contextlib.suppress(OutputError):
            stored.made.publish([new], NOW + 1)
            stored.made.refresh(NOW + 1)  # publishing again signs nothing, and copies what was left
        device = stored.device(tmp_path / f"d{number}")
        assert device.fetch("rpi5/digits-1.edgepkg") == b"old"
        seen.append(device.fetch("rpi5/digits-2.edgepkg"))
        if left >= 0:
            break
    assert set(seen) == {None, b"new version"}
    assert seen[-1] == b"new version"


def test_storage_that_is_not_there_is_an_error_and_gets_all_later(tmp_path: Path) -> None:
    (tmp_path / "copy").write_text("a file where the folder should be")
    stored = TufRepository(tmp_path / "repository", tmp_path / "keys")
    stored.create(NOW)
    repository = TufRepository(
        stored.folder, tmp_path / "keys", storage=ArtifactStorage(f"file://{tmp_path}/folder")
    )
    (tmp_path / "folder").rmdir()
    (tmp_path / "folder").write_text("a file where the folder should be")
    with pytest.raises(OutputError, match="is signed here, but cannot be copied to file://"):
        repository.publish([new_target(tmp_path, b"weights")], NOW)
    (tmp_path / "folder").unlink()
    repository.refresh(NOW)
    device = Device(TufRepository(tmp_path / "folder", tmp_path), tmp_path / "d")
    assert device.fetch("rpi5/digits-1.edgepkg") == b"weights"


def test_key_is_not_exchanged_while_the_storage_cannot_be_reached(
    stored: StoredRepository, tmp_path: Path
) -> None:
    """Devices could not fetch the root that names it."""
    stored.copy.rename(tmp_path / "away")
    storage = ArtifactStorage(f"file://{stored.copy}")
    stored.copy.rmdir()
    stored.copy.write_text("a file where the folder should be")
    repository = TufRepository(stored.made.folder, tmp_path / "keys", storage=storage)
    before = list_names(stored.made.folder) | list_names(tmp_path / "keys")
    with pytest.raises(OutputError, match="cannot be copied to file://"):
        repository.rotate(NOW + 1, roles=["manager"])
    assert list_names(stored.made.folder) | list_names(tmp_path / "keys") == before
    stored.copy.unlink()
    repository.rotate(NOW + 1, roles=["manager"])
    assert (stored.copy / "metadata" / "2.root.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"artifacts_url": "http://cdn"}, "expected https://"),
        ({"artifacts_storage": "s3://bucket"}, "--artifacts-url"),
    ],
)
def test_settings_that_devices_could_not_use_are_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FleetSettings(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["ftp://host/folder", "bucket", "s3://"])
def test_storage_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="artifacts storage"):
        ArtifactStorage(url)


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the URL of an empty bucket of a server that speaks S3 (moto, in an environment of its own)."""
    if not os.environ.get("EDGEKIT_S3"):
        pytest.skip("set EDGEKIT_S3=1: installs moto (60 packages) into an environment of its own")
    venv.create(tmp_path / "moto", with_pip=True)
    python = tmp_path / "moto" / "bin" / "python"
    done = subprocess.run([python, "-m", "pip", "install", "-q", MOTO], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"{MOTO} cannot be installed: {done.stderr[-200:]!r}")
    port = free_port()
    command = [python, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            make = (
                "import boto3, os; boto3.client('s3', region_name='us-east-1').create_bucket(Bucket='fleet')"
            )
            run = functools.partial(subprocess.run, [python, "-c", make], capture_output=True, check=False)
            wait_for(lambda: run().returncode == 0, "the bucket")
            yield "s3://fleet/packages"
        finally:
            server.kill()


def test_bucket_gets_all_files_and_says_how_long_they_may_be_cached(s3: str, tmp_path: Path) -> None:
    import obstore
    from obstore.store import from_url

    repository = TufRepository(tmp_path / "repository", tmp_path / "keys", storage=ArtifactStorage(s3))
    repository.create(NOW)
    (target,) = repository.publish([new_target(tmp_path, bytes(6_000_000))], NOW)
    bucket = from_url(s3)
    names = {one["path"] for page in obstore.list(bucket) for one in page}
    there = {path.relative_to(repository.folder).as_posix() for path in repository.folder.rglob("*.*")}
    assert names == there
    path = f"targets/rpi5/{target.sha256}.digits-1.edgepkg"
    assert obstore.get(bucket, path).bytes().to_bytes() == bytes(6_000_000)
    assert "immutable" in obstore.get(bucket, path).attributes["Cache-Control"]
    assert obstore.get(bucket, "metadata/timestamp.json").attributes["Cache-Control"] == "no-cache"
    repository.withdraw(["rpi5/digits-1.edgepkg"], NOW + 1)
    repository.remove_unused(NOW + 2 * DAY_S)
    assert {one["path"] for page in obstore.list(bucket) for one in page} == list_names(repository.folder)
    assert path not in list_names(repository.folder)


def test_file_is_read_as_it_was_written_and_none_after_its_removal(tmp_path: Path) -> None:
    storage = ArtifactStorage(f"file://{tmp_path / 'copy'}")
    storage.write("samples/00/1", b"sealed", "no-store")
    assert storage.read("samples/00/1") == b"sealed"
    storage.remove("samples/00/1")
    assert storage.read("samples/00/1") is None
