"""The files of one model: bounds of what is read, what is swept away, and what is found without a state."""

import dataclasses
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.slot_cases import MODEL, VERSIONS, Bench, make_bench

from edgekit_runtime.errors import SlotError
from edgekit_runtime.slots import Permissions, folder
from edgekit_runtime.slots.access import RecordError
from edgekit_runtime.slots.choice import NothingToOpenError
from edgekit_runtime.slots.folder import FoundState, ModelFolder
from edgekit_runtime.slots.state import ModelState, parse_state
from edgekit_runtime.system.atomic_files import Disk

STATE_LIMIT_BYTES = 65536


@pytest.fixture
def bench(maker: Any, tmp_path: Path) -> Bench:
    (tmp_path / "packages").mkdir()
    for version in VERSIONS:
        maker.write(tmp_path / "packages" / f"{version}.edgepkg", version=version)
    return make_bench(tmp_path / "state", tmp_path / "packages", maker.trust)


@pytest.fixture
def place(bench: Bench) -> Path:
    """The folder of the model, of which 1.0.0 is proven."""
    bench.prove("1.0.0")
    return bench.slots.folder / "models" / MODEL


def pad_state(path: Path, size_bytes: int) -> None:
    """Write the state again with a field of a later writer that fills it up."""
    state = parse_state(path.read_bytes(), "here")

    def write(fill: int) -> bytes:
        fields = {name: getattr(state, name) for name in ModelState.__slots__}
        return ModelState(**{**fields, "extra": {"later": "x" * fill}}).to_bytes()

    path.write_bytes(write(size_bytes - len(write(0))))
    assert path.stat().st_size == size_bytes


def test_state_at_its_limit_is_read(bench: Bench, place: Path) -> None:
    pad_state(place / "state.json", STATE_LIMIT_BYTES)
    loaded = bench.slots.load(MODEL)
    assert (loaded.problem, loaded.replaceable, "later" in loaded.state.extra) == (None, True, True)


def test_state_beyond_its_limit_counts_as_damaged(bench: Bench, place: Path) -> None:
    pad_state(place / "state.json", STATE_LIMIT_BYTES + 1)
    loaded = bench.slots.load(MODEL)
    assert (loaded.problem, loaded.replaceable) == (f"{place}/state.json: is over 65536 bytes", True)


def test_state_that_the_disk_does_not_give_out_is_left_alone(
    bench: Bench, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_path: Path, _max_bytes: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(folder, "read_own_file", fail)
    loaded = bench.slots.load(MODEL)
    said = f"{place}/state.json: cannot be read: Input/output error"
    assert (loaded.problem, loaded.replaceable) == (said, False)
    with pytest.raises(RecordError, match="; until then nothing can be installed or recorded"):
        bench.slots.confirm(MODEL, "1.0.0")


def test_missing_state_is_made_of_the_newest_two_packages_and_the_factory_one(
    bench: Bench, place: Path, tmp_path: Path
) -> None:
    bench.install("0.9.0", factory=True)
    for version in ("2.0.0", "3.0.0"):
        made = make_bench(tmp_path / version, bench.packages, bench.slots.trust)
        made.install(version)
        (found,) = (made.slots.folder / "models" / MODEL).glob("slot-*")
        found.rename(place / found.name)
    (place / "state.json").unlink()
    loaded = bench.slots.load(MODEL)
    assert loaded.problem == f"{place}/state.json: is missing"
    assert [(item.version, item.health) for item in loaded.state.installed] == [
        ("3.0.0", "unproven"),
        ("2.0.0", "unproven"),
        ("0.9.0", "healthy"),
    ]


def test_folder_without_a_package_has_a_state_without_a_problem(bench: Bench, place: Path) -> None:
    for path in place.iterdir():
        path.unlink()
    assert bench.slots.load(MODEL) == FoundState(ModelState(model=MODEL))
    assert bench.slots.models() == ()


@pytest.mark.parametrize("name", ["state.json", "x.edgepkg"])
def test_folder_with_a_state_or_a_package_is_a_model(name: str, bench: Bench, place: Path) -> None:
    for path in place.iterdir():
        path.unlink()
    (place / name).write_bytes(b"")
    assert bench.slots.models() == (MODEL,)


@pytest.mark.parametrize(("strangers", "is_found"), [(15, True), (16, False)])
def test_packages_are_looked_through_up_to_a_bound(
    strangers: int, is_found: bool, bench: Bench, place: Path
) -> None:
    (place / "state.json").unlink()
    for number in range(strangers):
        (place / f"slot-0.{number:02}.edgepkg").write_bytes(b"")
    assert (bench.slots.load(MODEL).state.active is not None) is is_found


LEFT_OVER = ("slot-9.0.0-x.edgepkg", "factory-9.0.0-x.edgepkg", ".a.tmp", ".tmp")
STRANGE = ("a.tmp", ".a", "slot-9.0.0", "factory-9", "x.edgepkg", "notes.txt", "my-slot-1.edgepkg")


def test_installation_removes_what_an_interrupted_one_left_and_nothing_else(
    bench: Bench, place: Path
) -> None:
    kept = {path.name for path in place.iterdir()}
    for name in (*LEFT_OVER, *STRANGE):
        (place / name).write_bytes(b"")
    bench.install("1.0.0")
    assert {path.name for path in place.iterdir()} == kept | set(STRANGE)


class RecordingDisk(Disk):
    """Notes the changes in their order."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def sync_folder(self, path: Path) -> None:
        self.steps.append("sync")
        super().sync_folder(path)

    def remove(self, path: Path) -> None:
        self.steps.append("remove")
        super().remove(path)


@pytest.mark.parametrize(("left_over", "steps"), [(("slot-9.0.0-x.edgepkg",), ["sync", "remove"]), ((), [])])
def test_names_are_on_the_disk_before_what_is_left_over_is_removed(
    left_over: tuple[str, ...], steps: list[str], bench: Bench, place: Path
) -> None:
    for name in left_over:
        (place / name).write_bytes(b"")
    disk = RecordingDisk()
    dataclasses.replace(bench.slots, disk=disk).install(bench.packages / "1.0.0.edgepkg")
    assert disk.steps == steps


def test_package_that_lies_there_whole_is_not_written_again(bench: Bench, place: Path) -> None:
    (stored,) = place.glob("slot-*")
    before = stored.stat().st_ino
    bench.install("1.0.0")
    assert stored.stat().st_ino == before


def test_package_lies_under_its_version_and_sixteen_digits_of_its_digest(bench: Bench, place: Path) -> None:
    active = bench.slots.load(MODEL).state.active
    assert active is not None
    assert [path.name for path in place.glob("slot-*")] == [f"slot-1.0.0-{active.sha256[:16]}.edgepkg"]


def test_state_that_does_not_change_is_not_written(bench: Bench, place: Path) -> None:
    before = (place / "state.json").stat().st_ino
    bench.slots.confirm(MODEL, "1.0.0")
    bench.slots.pin(MODEL, False)
    assert (place / "state.json").stat().st_ino == before


@pytest.mark.parametrize(
    ("version", "factory", "is_active"), [("2.0.0", False, True), ("0.9.0", True, False)]
)
def test_receipt_says_whether_the_version_is_opened_next(
    version: str, factory: bool, is_active: bool, bench: Bench, place: Path
) -> None:
    receipt = bench.slots.install(bench.packages / f"{version}.edgepkg", factory=factory)
    assert (receipt.model, receipt.version, receipt.active) == (MODEL, version, is_active)
    assert receipt.state == bench.slots.load(MODEL).state


def test_package_that_this_device_cannot_run_is_not_written(bench: Bench) -> None:
    def refuse(_manifest: object) -> None:
        raise SlotError("no engine")

    with pytest.raises(SlotError, match="no engine"):
        bench.slots.install(bench.packages / "1.0.0.edgepkg", check=refuse)
    assert not bench.slots.folder.exists()


def test_places_are_examined_in_order_with_what_is_wrong(bench: Bench, place: Path) -> None:
    bench.prove("2.0.0")
    bench.install("0.9.0", factory=True)
    next(place.glob("slot-1.0.0-*")).unlink()
    found, places = bench.slots.examine(MODEL)
    assert [(one.name, one.installed.version, one.problem is None) for one in places] == [
        ("active", "2.0.0", True),
        ("spare", "1.0.0", False),
        ("factory", "0.9.0", True),
    ]
    assert [one.path.name.partition("-")[0] for one in places] == ["slot", "slot", "factory"]
    assert found.problem is None


def test_state_that_changes_all_the_time_is_read_three_times(
    bench: Bench, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[FoundState] = []

    def load(_: ModelFolder) -> FoundState:
        loads.append(FoundState(ModelState(model=MODEL, extra={"change": len(loads)})))
        return loads[-1]

    monkeypatch.setattr(ModelFolder, "load", load)
    with pytest.raises(SlotError, match=f"{place}: changes all the time; try again"):
        bench.slots.choose(MODEL)
    assert len(loads) == 2 * 3


def test_version_that_cannot_be_opened_is_not_read_again_where_nothing_changes(
    bench: Bench, place: Path
) -> None:
    next(place.glob("slot-*")).unlink()
    with pytest.raises(NothingToOpenError, match=r"linear: no version can be opened: 1\.0\.0: .*; install a"):
        bench.slots.choose(MODEL)


WHYS: dict[str, tuple[Callable[[Bench], object], str]] = {
    "active": (lambda _: None, "active"),
    "pinned": (lambda bench: bench.slots.pin(MODEL, True), "active, pinned"),
    "trial": (lambda bench: bench.install("2.0.0"), "active, on trial"),
    "pinned trial": (
        lambda bench: bench.slots.install(bench.packages / "2.0.0.edgepkg", Permissions(pin=True)),
        "active, pinned, on trial",
    ),
    "rejected": (
        lambda bench: bench.slots.reject(MODEL, "1.0.0", "wrong"),
        "active, rejected but there is nothing else",
    ),
}


@pytest.mark.parametrize("case", WHYS)
def test_choice_says_why_it_is_this_one(case: str, bench: Bench, place: Path) -> None:
    act, why = WHYS[case]
    act(bench)
    choice = bench.slots.choose(MODEL)
    choice.package.close()
    assert (choice.why, choice.package.path.parent) == (why, place)


def count_starts(bench: Bench) -> int:
    active = bench.slots.load(MODEL).state.active
    assert active is not None
    return active.begun


def test_start_that_is_counted_is_taken_back_once(bench: Bench, place: Path) -> None:
    bench.install("2.0.0")
    choice = bench.slots.begin_start(MODEL)
    choice.package.close()
    assert (choice.begun, choice.is_counted, count_starts(bench)) == (1, True, 1)
    bench.slots.undo_start(MODEL, choice.version)
    assert count_starts(bench) == 0


def test_start_in_one_process_is_counted_once(bench: Bench, place: Path) -> None:
    bench.install("2.0.0")
    first = bench.slots.begin_start(MODEL)
    second = bench.slots.begin_start(MODEL, counted=(first.sha256,))
    for choice in (first, second):
        choice.package.close()
    assert [(one.begun, one.is_counted) for one in (first, second)] == [(1, True), (1, False)]


def test_version_that_this_device_cannot_open_is_passed_by(bench: Bench, place: Path) -> None:
    bench.prove("2.0.0")
    active = bench.slots.load(MODEL).state.active
    assert active is not None
    choice = bench.slots.begin_start(MODEL, without=(active.sha256,))
    choice.package.close()
    assert (choice.version, bench.slots.load(MODEL).state.active) == ("1.0.0", active)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_package_of_another_user_is_not_opened(bench: Bench, place: Path) -> None:
    os.chown(next(place.glob("slot-*")), 12345, 12345)
    with pytest.raises(SlotError, match="is a link, no file, or of another user; install the package again"):
        bench.slots.choose(MODEL)
