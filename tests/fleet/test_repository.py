"""The TUF repository: what devices can fetch, at any moment, whatever happens to its writer."""

import contextlib
import functools
import shutil
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO

import pytest
from tests.toolkit.cases import cases
from tuf.api.exceptions import DownloadHTTPError, ExpiredMetadataError, RepositoryError
from tuf.api.metadata import Metadata
from tuf.ngclient import FetcherInterface, Updater

from edgekit_fleet.releases import repository as repository_module
from edgekit_fleet.releases.manager_key import ManagerKey, read_newest_root
from edgekit_fleet.releases.repository import Lifetimes, NewTarget, PublishedTarget, TufRepository
from edgekit_fleet.releases.repository_keys import RepositoryKeys, read_signer
from edgekit_fleet.store.fleet_folder import FleetFolder
from edgekit_runtime.agent.manager_keys import read_named
from edgekit_runtime.agent.signing import key_id
from edgekit_runtime.errors import PackageError, SignatureError
from edgekit_runtime.system.atomic_files import Disk

NOW = 1_800_000_000.0
DAY_S = 86_400.0


class Killed(BaseException):
    """The process ended here."""


class KilledDisk(Disk):
    """A disk whose process is killed at the n-th call that changes it."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def _count(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise Killed

    def create(self, path: Path, mode: int) -> BinaryIO:
        self._count()
        return super().create(path, mode)

    def sync(self, file: BinaryIO) -> None:
        self._count()
        super().sync(file)

    def replace(self, source: Path, target: Path) -> None:
        self._count()
        super().replace(source, target)

    def remove(self, path: Path) -> None:
        self._count()
        super().remove(path)

    def sync_folder(self, path: Path) -> None:
        self._count()
        super().sync_folder(path)


class FolderFetcher(FetcherInterface):
    """Fetches from a folder as if a web server served it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _fetch(self, url: str) -> list[bytes]:  # type: ignore[override]
        path = self.folder / url.removeprefix("http://fleet/")
        if not path.exists():
            raise DownloadHTTPError("no such file", 404)
        return [path.read_bytes()]


class Device:
    """A device with the metadata that it has seen, and a clock."""

    def __init__(self, repository: TufRepository, folder: Path) -> None:
        self.repository, self.folder = repository, folder
        (folder / "targets").mkdir(parents=True)
        self.root = repository.read_root(1)

    def fetch(self, path: str, now: float = NOW) -> bytes | None:
        updater = Updater(
            str(self.folder),
            "http://fleet/metadata/",
            str(self.folder / "targets"),
            "http://fleet/targets/",
            fetcher=FolderFetcher(self.repository.folder),
            bootstrap=self.root,
        )
        updater._trusted_set.reference_time = datetime.fromtimestamp(now, timezone.utc)
        updater.refresh()
        info = updater.get_targetinfo(path)
        return None if info is None else Path(updater.download_target(info)).read_bytes()


@pytest.fixture
def repository(tmp_path: Path) -> TufRepository:
    made = TufRepository(tmp_path / "repository", tmp_path / "keys")
    made.create(NOW)
    return made


def new_target(folder: Path, content: bytes, name: str = "digits-1.edgepkg", of: str = "rpi5") -> NewTarget:
    source = folder / f"{len(content)}.{name}"
    source.write_bytes(content)
    return NewTarget(device_class=of, name=name, source=source, custom={"manifest": "ab"})


def test_published_package_reaches_a_device(repository: TufRepository, tmp_path: Path) -> None:
    (published,) = repository.publish([new_target(tmp_path, b"weights")], NOW)
    assert Device(repository, tmp_path / "device").fetch("rpi5/digits-1.edgepkg") == b"weights"
    assert repository.list_targets() == {"rpi5/digits-1.edgepkg": published}
    assert isinstance(published, PublishedTarget) and published.custom == {"manifest": "ab"}


def test_withdrawn_package_is_not_found(repository: TufRepository, tmp_path: Path) -> None:
    repository.publish([new_target(tmp_path, b"weights")], NOW)
    repository.withdraw(["rpi5/digits-1.edgepkg"], NOW + 1)
    assert Device(repository, tmp_path / "device").fetch("rpi5/digits-1.edgepkg", NOW + 2) is None


def list_names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_withdrawn_package_is_deleted_a_day_later(repository: TufRepository, tmp_path: Path) -> None:
    some = [new_target(tmp_path, b"weights"), new_target(tmp_path, b"other", "other-1.edgepkg")]
    gone, kept = repository.publish(some, NOW)
    repository.withdraw([gone.path], NOW + 10 * DAY_S)
    path = repository.folder / "targets" / "rpi5" / f"{gone.sha256}.digits-1.edgepkg"
    repository.remove_unused(NOW + 10.9 * DAY_S)
    assert path.exists()
    repository.remove_unused(NOW + 11.1 * DAY_S)
    assert not path.exists()
    repository.refresh(NOW + 12 * DAY_S)
    device = Device(repository, tmp_path / "device")
    assert device.fetch(kept.path, NOW + 12 * DAY_S) == b"other"
    repository.publish(some, NOW + 12 * DAY_S)
    assert device.fetch(gone.path, NOW + 12 * DAY_S) == b"weights"


def test_package_that_is_offered_again_is_not_deleted(repository: TufRepository, tmp_path: Path) -> None:
    some = [new_target(tmp_path, b"weights")]
    repository.publish(some, NOW)
    repository.withdraw([some[0].path], NOW + 1)
    repository.publish(some, NOW + 5 * DAY_S)
    assert repository.remove_unused(NOW + 9 * DAY_S)
    repository.refresh(NOW + 9 * DAY_S)
    assert Device(repository, tmp_path / "device").fetch(some[0].path, NOW + 9 * DAY_S) == b"weights"


def test_replaced_metadata_is_deleted_and_versions_of_the_root_stay(
    repository: TufRepository, tmp_path: Path
) -> None:
    device = Device(repository, tmp_path / "device")
    for number in range(20):
        repository.publish([new_target(tmp_path, b"weights", f"digits-{number}.edgepkg")], NOW + number)
        repository.rotate(NOW + number, roles=["root", "timestamp"])
    (repository.folder / "metadata" / "notes.txt").write_text("of somebody")
    repository.remove_unused(NOW + 2 * DAY_S)
    roots = {f"metadata/{version}.root.json" for version in range(1, 22)}
    names = {name for name in list_names(repository.folder) if name.startswith("metadata/")} - roots
    kinds = sorted(name.rpartition("/")[2].partition(".")[2] for name in names)
    assert kinds == ["class-rpi5.json", "json", "snapshot.json", "targets.json", "txt"]
    repository.refresh(NOW + 2 * DAY_S)
    assert device.fetch("rpi5/digits-19.edgepkg", NOW + 2 * DAY_S) == b"weights"


def test_same_name_with_other_content_is_refused(repository: TufRepository, tmp_path: Path) -> None:
    repository.publish([new_target(tmp_path, b"weights")], NOW)
    with pytest.raises(PackageError, match="give the new package another version"):
        repository.publish([new_target(tmp_path, b"other weights")], NOW + 1)
    assert Device(repository, tmp_path / "device").fetch("rpi5/digits-1.edgepkg") == b"weights"


def test_role_of_a_class_cannot_offer_a_file_of_another(repository: TufRepository, tmp_path: Path) -> None:
    """The delegation is by path: what `class-rpi5` lists outside `rpi5/` is not found."""
    repository.publish([new_target(tmp_path, b"a"), new_target(tmp_path, b"bc", of="x86-64")], NOW)
    _top, roles = repository._read_targets()
    stolen = roles["class-rpi5"].targets["rpi5/digits-1.edgepkg"]
    stolen.path = "x86-64/stolen.edgepkg"
    roles["class-rpi5"].targets = {stolen.path: stolen}
    repository._commit({"class-rpi5": roles["class-rpi5"]}, NOW + 1)
    assert Device(repository, tmp_path / "device").fetch("x86-64/stolen.edgepkg", NOW + 1) is None


@cases("name", ["", ".hidden", "a/b", "*", "a?", "[a]", "..", "a\\b"])
def test_malformed_name_is_refused(repository: TufRepository, tmp_path: Path, name: str) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"weights")
    with pytest.raises(PackageError, match="no name"):
        repository.publish([NewTarget(device_class="rpi5", name=name, source=source)], NOW)


def test_metadata_past_half_of_its_life_is_signed_again(repository: TufRepository, tmp_path: Path) -> None:
    device = Device(repository, tmp_path / "device")
    repository.publish([new_target(tmp_path, b"weights")], NOW)
    assert not repository.refresh(NOW + 0.4 * DAY_S)
    with pytest.raises(ExpiredMetadataError):
        device.fetch("rpi5/digits-1.edgepkg", NOW + 2 * DAY_S)
    for day in (0.6, 10, 120, 200):
        assert repository.refresh(NOW + day * DAY_S)
        assert device.fetch("rpi5/digits-1.edgepkg", NOW + day * DAY_S) == b"weights"


def test_metadata_of_a_clock_that_was_a_year_ahead_is_signed_again(
    repository: TufRepository, tmp_path: Path
) -> None:
    ahead = NOW + 365 * 86_400.0
    repository.publish([new_target(tmp_path, b"a")], ahead)
    assert repository.refresh(NOW)
    assert not repository.refresh(NOW)
    folder = repository.folder / "metadata"
    timestamp = Metadata.from_bytes((folder / "timestamp.json").read_bytes()).signed
    assert timestamp.version > ahead and timestamp.expires.timestamp() < NOW + 2 * 86_400.0


def test_repository_restored_from_a_backup_is_newer_than_all_that_devices_saw(
    repository: TufRepository, tmp_path: Path
) -> None:
    device = Device(repository, tmp_path / "device")
    shutil.copytree(repository.folder, tmp_path / "backup")
    for second in range(5):
        repository.publish([new_target(tmp_path, b"lost", f"lost-{second}.edgepkg")], NOW + second)
    assert device.fetch("rpi5/lost-4.edgepkg", NOW + 5) == b"lost"
    shutil.rmtree(repository.folder)
    shutil.copytree(tmp_path / "backup", repository.folder)
    repository.publish([new_target(tmp_path, b"weights")], NOW + 60)
    assert device.fetch("rpi5/digits-1.edgepkg", NOW + 60) == b"weights"


def test_device_three_roots_behind_follows_the_chain(repository: TufRepository, tmp_path: Path) -> None:
    device = Device(repository, tmp_path / "device")
    repository.publish([new_target(tmp_path, b"weights")], NOW)
    every = ["root", "targets", "snapshot", "timestamp", "class-rpi5"]
    for number in range(3):
        repository.rotate(NOW + number, roles=every, root_keys=3, threshold=2)
    assert device.fetch("rpi5/digits-1.edgepkg", NOW + 3) == b"weights"
    assert b'"version":4' in (device.folder / "root.json").resolve().read_bytes()


def test_offline_root_key_signs_only_exchanges(tmp_path: Path) -> None:
    made = TufRepository(tmp_path / "repository", tmp_path / "keys")
    made.create(NOW, root_folder=tmp_path / "safe")
    (tmp_path / "safe").rename(tmp_path / "stick")
    made.publish([new_target(tmp_path, b"weights")], NOW)
    assert made.refresh(NOW + 400 * DAY_S)
    with pytest.raises(SignatureError, match="bring the folder with the offline keys"):
        made.rotate(NOW + 1, roles=["timestamp"])
    device = Device(made, tmp_path / "device")
    made.rotate(NOW + 401 * DAY_S, roles=["timestamp"], root_folder=tmp_path / "stick")
    assert device.fetch("rpi5/digits-1.edgepkg", NOW + 401 * DAY_S) == b"weights"


def test_metadata_by_an_exchanged_key_is_refused(repository: TufRepository, tmp_path: Path) -> None:
    """Who stole the old key of the timestamp can sign nothing that a device accepts after the exchange."""
    shutil.copytree(tmp_path / "keys", tmp_path / "stolen")
    device = Device(repository, tmp_path / "device")
    repository.rotate(NOW, roles=["timestamp", "snapshot"])
    assert device.fetch("rpi5/digits-1.edgepkg", NOW) is None
    thief = TufRepository(repository.folder, tmp_path / "stolen")
    thief.publish([new_target(tmp_path, b"malware", "evil-1.edgepkg")], NOW + 10)
    with pytest.raises(RepositoryError):
        device.fetch("rpi5/evil-1.edgepkg", NOW + 10)


def _withdraw_and_delete(made: TufRepository, _: Path) -> None:
    made.withdraw(["rpi5/other-1.edgepkg"], NOW + 10)
    made.remove_unused(NOW + 5 * DAY_S)


def _publish_second(made: TufRepository, folder: Path) -> None:
    second = [new_target(folder, b"new", "digits-2.edgepkg", of) for of in ("rpi5", "x86-64")]
    made.publish(second, NOW + 10)


ROTATED = ("root", "targets", "snapshot", "timestamp", "class-rpi5")
CHANGES: dict[str, Callable[[TufRepository, Path], object]] = {
    "publish": _publish_second,
    "withdraw": lambda made, _: made.withdraw(["rpi5/other-1.edgepkg"], NOW + 10),
    "delete": _withdraw_and_delete,
    "refresh": lambda made, _: made.refresh(NOW + 150 * DAY_S),
    "rotate": lambda made, _: made.rotate(NOW + 10, roles=ROTATED, root_keys=2, threshold=2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_kill_at_any_step_leaves_a_repository_that_devices_accept(
    tmp_path: Path, change: str, is_long: bool
) -> None:
    """Old devices and new ones fetch what was there before; the change made again then comes to its end."""
    at = NOW + (150 * DAY_S if change == "refresh" else 10)
    lifetimes = Lifetimes(timestamp_s=200 * DAY_S, snapshot_s=200 * DAY_S)
    for calls in range(0, 10_000, 1 if is_long else 3):
        folder = tmp_path / str(calls)
        make = functools.partial(TufRepository, folder / "repository", folder / "keys", lifetimes=lifetimes)
        made = make()
        made.create(NOW)
        first = [new_target(tmp_path, b"weights"), new_target(tmp_path, b"other", "other-1.edgepkg")]
        made.publish(first, NOW)
        device = Device(made, folder / "device")
        assert device.fetch("rpi5/digits-1.edgepkg", at) == b"weights"
        try:
            CHANGES[change](make(disk=KilledDisk(calls)), tmp_path)
        except Killed:
            is_killed = True
        else:
            is_killed = False
        assert device.fetch("rpi5/digits-1.edgepkg", at) == b"weights"
        assert Device(made, folder / "newcomer").fetch("rpi5/digits-1.edgepkg", at) == b"weights"
        CHANGES[change](made, tmp_path)
        made.publish([new_target(tmp_path, b"third", "digits-3.edgepkg")], at + 1)
        assert device.fetch("rpi5/digits-3.edgepkg", at + 1) == b"third"
        if change == "publish":
            assert device.fetch("x86-64/digits-2.edgepkg", at + 1) == b"new"
        if not is_killed:
            assert calls > 5
            return


def test_kill_while_the_repository_is_made_is_made_good(tmp_path: Path) -> None:
    for calls in range(10_000):
        folder = tmp_path / str(calls)
        make = functools.partial(TufRepository, folder / "repository", folder / "keys")
        try:
            make(disk=KilledDisk(calls)).create(NOW, root_keys=3, threshold=2)
        except Killed:
            is_killed = True
        else:
            is_killed = False
        made = make()
        made.create(NOW, root_keys=3, threshold=2)
        made.publish([new_target(tmp_path, b"weights")], NOW)
        assert Device(made, folder / "device").fetch("rpi5/digits-1.edgepkg") == b"weights"
        if not is_killed:
            assert calls > 20
            return


def test_kill_at_any_step_of_its_exchange_leaves_the_manager_a_key_that_devices_obey(
    tmp_path: Path, is_long: bool
) -> None:
    for calls in range(0, 10_000, 1 if is_long else 3):
        folder = FleetFolder(tmp_path / str(calls))
        make = functools.partial(TufRepository, folder.repository, folder.repository_keys)
        make().create(NOW)
        running, device = ManagerKey(folder), Device(make(), folder.path / "device")
        old = key_id(running.read().public_key())
        device.fetch("rpi5/digits-1.edgepkg")
        try:
            make(disk=KilledDisk(calls)).rotate(NOW + 10, roles=["manager"])
        except Killed:
            is_killed = True
        else:
            is_killed = False
        between = key_id(running.read().public_key())
        assert read_named(read_newest_root(folder.repository)).keys() == {between}
        assert key_id(ManagerKey(folder).read().public_key()) == between
        make().refresh(NOW + 11)
        assert key_id(ManagerKey(folder).read().public_key()) == between
        make().rotate(NOW + 20, roles=["manager"])
        device.fetch("rpi5/digits-1.edgepkg")
        after = read_named((device.folder / "root.json").read_text()).keys()
        assert after == {key_id(running.read().public_key())}
        assert after.isdisjoint({old, between})
        if not is_killed:
            assert calls > 5
            return


def test_exchange_that_is_killed_after_its_root_and_again_leaves_the_manager_a_key(tmp_path: Path) -> None:
    """The key that the root names may still have the file of the next one."""

    def make(folder: FleetFolder, calls: int | None = None) -> TufRepository:
        disk = Disk() if calls is None else KilledDisk(calls)
        return TufRepository(folder.repository, folder.repository_keys, disk=disk)

    def is_named_next(folder: FleetFolder) -> bool:
        path = folder.repository_keys / "manager.next.pem"
        return path.exists() and read_signer(path).public_key.keyid in read_newest_root(folder.repository)

    killed = FleetFolder(tmp_path / "killed")
    make(killed).create(NOW)
    for calls in range(10_000):
        with contextlib.suppress(Killed):
            make(killed, calls).rotate(NOW + 10, roles=["manager"])
        if is_named_next(killed):
            break
    for calls in range(10_000):
        folder = FleetFolder(shutil.copytree(killed.path, tmp_path / str(calls)))
        try:
            make(folder, calls).rotate(NOW + 20, roles=["manager"])
        except Killed:
            assert ManagerKey(folder).read()
        else:
            assert calls > 5
            return


@pytest.mark.parametrize("role", ["manager", "timestamp", "targets", "class-rpi5"])
def test_key_that_a_killed_exchange_left_is_not_used_by_the_next_one(tmp_path: Path, role: str) -> None:
    """A thief may have copied the folder in the meantime."""
    folder = FleetFolder(tmp_path)
    made = TufRepository(folder.repository, folder.repository_keys)
    made.create(NOW)
    made.publish([new_target(tmp_path, b"weights")], NOW)
    left = RepositoryKeys(folder.repository_keys).next(role).public_key.keyid
    made.rotate(NOW + 10, roles=[role])
    newest = max((folder.repository / "metadata").glob("*.targets.json")).read_text()
    assert left not in read_newest_root(folder.repository) + newest
    device = Device(made, tmp_path / "device")
    assert device.fetch("rpi5/digits-1.edgepkg", NOW + 10) == b"weights"


def test_repository_whose_root_names_no_manager_gets_a_key_by_an_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = FleetFolder(tmp_path)
    made = TufRepository(folder.repository, folder.repository_keys)
    with monkeypatch.context() as before:
        before.setattr(repository_module, "name_manager", lambda *_: None)
        made.create(NOW)
    with pytest.raises(SignatureError, match="keys rotate manager"):
        ManagerKey(folder).read()
    made.rotate(NOW + 10, roles=["manager"])
    assert key_id(ManagerKey(folder).read().public_key()) in read_named(read_newest_root(folder.repository))


def test_exchange_of_the_managers_key_needs_the_keys_of_the_root(tmp_path: Path) -> None:
    folder = FleetFolder(tmp_path)
    made = TufRepository(folder.repository, folder.repository_keys)
    made.create(NOW, root_folder=tmp_path / "safe")
    before = ManagerKey(folder).read()
    with pytest.raises(SignatureError, match="offline keys"):
        made.rotate(NOW + 10, roles=["manager"])
    assert ManagerKey(folder).read().private_bytes_raw() == before.private_bytes_raw()
    made.rotate(NOW + 10, roles=["manager"], root_folder=tmp_path / "safe")
    assert ManagerKey(folder).read().private_bytes_raw() != before.private_bytes_raw()
