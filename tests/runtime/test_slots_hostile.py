"""A state folder in which somebody, or a failing disk, has changed something."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.slot_cases import (
    MODEL,
    VERSIONS,
    Bench,
    make_bench,
    rewrite_state,
    start_fresh,
    write_keys,
)
from tests.waiting import bounded

from edgekit_runtime.errors import SlotError
from edgekit_runtime.system.child_process import child_environment


@pytest.fixture
def bench(maker: Any, tmp_path: Path) -> Bench:
    """1.0.0 and 2.0.0 proven, 0.9.0 as the factory package."""
    (tmp_path / "packages").mkdir()
    for version in VERSIONS:
        maker.write(tmp_path / "packages" / f"{version}.edgepkg", version=version)
    made = make_bench(tmp_path / "state", tmp_path / "packages", maker.trust)
    made.install("0.9.0", factory=True)
    made.prove("1.0.0")
    made.prove("2.0.0")
    return made


@pytest.fixture
def folder(bench: Bench) -> Path:
    return bench.slots.folder / "models" / MODEL


@pytest.fixture
def state(folder: Path) -> Path:
    return folder / "state.json"


def slot(folder: Path, version: str) -> Path:
    return next(folder.glob(f"*-{version}-*"))


def test_a_state_that_is_cut_off_or_changed_anywhere_starts_a_valid_version(
    bench: Bench, state: Path, maker: Any
) -> None:
    whole = state.read_bytes()
    for place in range(0, len(whole), 7):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        for damaged in (whole[:place], bytes(flipped), whole[:place] + bytes(len(whole) - place)):
            state.write_bytes(damaged)
            assert start_fresh(bench.slots.folder, maker.trust) == "2.0.0"


def test_a_damaged_state_is_made_anew_on_trial(bench: Bench, state: Path) -> None:
    state.write_bytes(b"")
    bench.begin()
    made = bench.slots.load(MODEL)
    assert made.problem is None
    assert [item.version for item in made.state.installed] == ["2.0.0", "1.0.0", "0.9.0"]
    assert made.state.active is not None
    assert (made.state.active.health, made.state.active.begun) == ("unproven", 1)


@pytest.mark.parametrize("wrong", ["missing", "link", "folder", "fifo", "huge"])
def test_what_is_no_state_file_counts_as_damaged(
    wrong: str, bench: Bench, state: Path, maker: Any, tmp_path: Path
) -> None:
    state.rename(tmp_path / "moved.json")
    if wrong == "link":
        state.symlink_to(tmp_path / "moved.json")
    elif wrong == "folder":
        state.mkdir()
    elif wrong == "fifo":
        os.mkfifo(state)
    elif wrong == "huge":
        with state.open("wb") as file:
            file.truncate(1 << 30)
    expected = "0.9.0" if wrong == "folder" else "2.0.0"  # a start cannot be counted instead of a folder
    assert start_fresh(bench.slots.folder, maker.trust) == expected
    assert (tmp_path / "moved.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_state_of_another_user_counts_as_damaged(bench: Bench, state: Path) -> None:
    os.chown(state, 12345, 12345)
    assert "belongs to another user" in str(bench.slots.load(MODEL).problem)
    bench.begin()
    assert bench.slots.load(MODEL).problem is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("whose", [".", "models", "models/linear"])
def test_a_folder_of_another_user_is_refused(whose: str, bench: Bench) -> None:
    os.chown(bench.slots.folder / whose, 12345, 12345)
    with pytest.raises(SlotError, match="belongs to user 12345"):
        bench.begin()


@pytest.mark.parametrize("whose", [".", "models", "models/linear"])
def test_a_folder_that_others_can_write_to_is_refused(whose: str, bench: Bench) -> None:
    (bench.slots.folder / whose).chmod(0o777)
    with pytest.raises(SlotError, match="other users can write there; chmod go-w"):
        bench.begin()


@pytest.mark.parametrize("whose", ["models", "models/linear"])
def test_a_linked_folder_is_refused(whose: str, bench: Bench, tmp_path: Path) -> None:
    path = bench.slots.folder / whose
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SlotError, match="is a link or no folder"):
        bench.begin()
    with pytest.raises(SlotError, match="is a link or no folder"):
        bench.install("3.0.0")
    assert len(list((tmp_path / "elsewhere").glob("**/*.edgepkg"))) == 3


def test_nothing_is_made_behind_a_link(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "fresh").mkdir()
    (tmp_path / "fresh/models").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SlotError, match="is a link or no folder"):
        make_bench(tmp_path / "fresh", bench.packages, bench.slots.trust).install("1.0.0")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_state_folder_itself_may_be_a_link(bench: Bench, maker: Any, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(bench.slots.folder)
    assert start_fresh(tmp_path / "link", maker.trust) == "2.0.0"


@pytest.mark.parametrize("version", ["1.0.0", "3.0.0"])
def test_another_signed_version_in_the_place_of_the_active_one_is_not_opened(
    version: str, bench: Bench, folder: Path, maker: Any
) -> None:
    shutil.copyfile(bench.packages / f"{version}.edgepkg", slot(folder, "2.0.0"))
    choice = bench.slots.begin_start(MODEL)
    choice.package.close()
    assert choice.version == "1.0.0"
    assert f"holds linear {version}, not the linear 2.0.0 that was installed" in choice.why


def test_a_signed_package_of_another_model_in_a_slot_is_not_opened(
    bench: Bench, folder: Path, maker: Any
) -> None:
    maker.write(slot(folder, "2.0.0"), name="other", version="2.0.0")
    assert start_fresh(bench.slots.folder, maker.trust) == "1.0.0"


def test_an_older_signed_version_with_a_state_that_names_it_is_still_a_valid_one(
    bench: Bench, state: Path, folder: Path, maker: Any
) -> None:
    """Who can write to the folder can go back to what was installed; no further, and to nothing unsigned."""
    shutil.copyfile(bench.packages / "3.0.0.edgepkg", folder / f"slot-3.0.0-{'0' * 16}.edgepkg")
    state.unlink()
    assert start_fresh(bench.slots.folder, maker.trust) == "2.0.0"


def test_a_link_in_the_place_of_a_package_is_not_followed(
    bench: Bench, folder: Path, maker: Any, tmp_path: Path
) -> None:
    path = slot(folder, "2.0.0")
    path.rename(tmp_path / "moved.edgepkg")
    path.symlink_to(tmp_path / "moved.edgepkg")
    assert start_fresh(bench.slots.folder, maker.trust) == "1.0.0"
    bench.install("2.0.0")
    assert start_fresh(bench.slots.folder, maker.trust) == "2.0.0"
    assert not path.is_symlink()


def test_the_state_of_another_model_counts_as_damaged(bench: Bench, folder: Path, maker: Any) -> None:
    shutil.copytree(folder, folder.parent / "other")
    assert "is of model 'linear'" in str(bench.slots.load("other").problem)
    with pytest.raises(SlotError, match="no version can be opened"):
        bench.slots.begin_start("other")


def test_the_state_of_a_newer_edgekit_is_left_alone(bench: Bench, state: Path, maker: Any) -> None:
    newer = {"format": 2, "model": MODEL, "places": []}
    rewrite_state(state, newer)
    before = state.read_bytes()
    # What cannot be counted is not put on trial: the factory package runs.
    assert start_fresh(bench.slots.folder, maker.trust) == "0.9.0"
    for change in (
        lambda: bench.install("3.0.0"),
        lambda: bench.slots.confirm(MODEL, "2.0.0"),
        lambda: bench.slots.rollback(MODEL),
    ):
        with pytest.raises(SlotError, match="format 2, this reader knows 1; update edgekit"):
            change()
    assert (state.read_bytes(), len(list(state.parent.glob("*.edgepkg")))) == (before, 3)


@pytest.mark.parametrize(
    "change",
    [
        {"active": {"version": "../../x", "sha256": "0" * 64, "health": "healthy", "begun": 0}},
        {"active": {"version": "2.0.0", "sha256": "../x", "health": "healthy", "begun": 0}},
        {"active": {"version": "2.0.0", "sha256": "0" * 64, "health": "fine", "begun": 0}},
        {"active": {"version": "2.0.0", "sha256": "0" * 64, "health": "unproven", "begun": -1}},
        {"active": {"version": "2.0.0", "sha256": "0" * 64, "health": "unproven", "begun": True}},
        {"active": []},
        {"format": 0},
        {"format": "2"},
        {"pinned": "../x"},
        {"rejected": [{"version": "1", "sha256": "0" * 64, "reason": 1}]},
        {"rejected": {}},
    ],
)
def test_a_state_with_impossible_values_counts_as_damaged(
    change: dict[str, Any], bench: Bench, state: Path, maker: Any
) -> None:
    body: dict[str, Any] = {
        "format": 1,
        "model": MODEL,
        "active": None,
        "spare": None,
        "factory": None,
        "pinned": None,
        "rejected": [],
    }
    rewrite_state(state, {**body, **change})
    assert start_fresh(bench.slots.folder, maker.trust) == "2.0.0"


@pytest.mark.parametrize("name", ["", "..", "../linear", "a/b", "/etc", ".hidden", "a\0b", "x" * 65, "Ä"])
def test_a_name_that_leads_elsewhere_is_refused(name: str, bench: Bench) -> None:
    for use in (bench.slots.choose, bench.slots.begin_start, bench.slots.load, bench.slots.rollback):
        with pytest.raises(SlotError, match="no model has such a name"):
            use(name)


def test_other_things_in_the_folder_are_no_models(bench: Bench, tmp_path: Path) -> None:
    models = bench.slots.folder / "models"
    (models / ".hidden").mkdir()
    (models / "file").write_bytes(b"")
    (models / "link").symlink_to(tmp_path)
    assert bench.slots.models() == (MODEL,)


def test_a_model_that_is_not_installed_is_named(bench: Bench) -> None:
    with pytest.raises(SlotError, match="other: is not installed in"):
        bench.slots.choose("other")


def test_two_installations_at_once_both_succeed(bench: Bench, maker: Any) -> None:
    for version in ("3.0.0", "3.0.1"):
        maker.write(bench.packages / f"{version}.edgepkg", version=version)
    code = (
        "import sys; from pathlib import Path; from edgekit_runtime.trust.trust_store import TrustStore;"
        "from edgekit_runtime.slots import Permissions, Slots;"
        "Slots(Path(sys.argv[1]), TrustStore.from_folder(Path(sys.argv[2])))"
        ".install(Path(sys.argv[3]), Permissions(downgrade=True))"
    )
    keys = write_keys(bench.packages.parent / "keys")
    with contextlib.ExitStack() as stack:
        children = []
        for version in ("3.0.0", "3.0.1"):
            path = bench.packages / f"{version}.edgepkg"
            command = [sys.executable, "-c", code, str(bench.slots.folder), str(keys), str(path)]
            started = subprocess.Popen(command, env=child_environment(), cwd=bench.packages)
            children.append(stack.enter_context(bounded(started)))
        assert [child.wait() for child in children] == [0, 0]
    active = bench.slots.load(MODEL).state.active
    assert active is not None
    assert active.version in ("3.0.0", "3.0.1")
    assert start_fresh(bench.slots.folder, maker.trust) == active.version
