"""Who may use a state folder, who holds it, and with which modes its files are made."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.descriptor_parts import count_descriptors

from edgekit_runtime.errors import SlotError
from edgekit_runtime.slots import Slots, access
from edgekit_runtime.slots.access import (
    ForeignFileError,
    RecordError,
    belongs_to_us,
    check_private,
    hold,
    hold_for_service,
    make_folder,
    read_own_file,
)
from edgekit_runtime.system.atomic_files import DISK


@pytest.fixture
def open_umask() -> Iterator[None]:
    """No bits are taken from the modes that files are made with."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.usefixtures("open_umask")
def test_state_folder_of_a_service_is_readable_for_all(tmp_path: Path) -> None:
    with hold_for_service(tmp_path / "a/state"):
        assert [mode_of(tmp_path / name) for name in ("a", "a/state")] == [0o755, 0o755]


@pytest.mark.usefixtures("open_umask")
def test_installation_makes_files_for_its_user_alone(maker: Any, tmp_path: Path) -> None:
    slots = Slots(tmp_path / "state", maker.trust)
    for version, factory in (("1.0.0", False), ("0.9.0", True)):
        maker.write(tmp_path / "given.edgepkg", version=version)
        slots.install(tmp_path / "given.edgepkg", factory=factory)
    folder = tmp_path / "state/models/linear"
    made = {path.name.partition("-")[0]: mode_of(path) for path in folder.iterdir()}
    assert made == {"slot": 0o600, "factory": 0o400, "state.json": 0o600}
    assert [mode_of(path) for path in (tmp_path / "state", folder.parent, folder)] == [0o755, 0o700, 0o700]


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o775, 0o777])
def test_folder_that_others_can_write_to_is_refused(mode: int, tmp_path: Path) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(SlotError, match="other users can write there; chmod go-w"):
        check_private(tmp_path)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o500, 0o1755])
def test_folder_that_others_can_only_read_is_accepted(mode: int, tmp_path: Path) -> None:
    tmp_path.chmod(mode)
    check_private(tmp_path)
    tmp_path.chmod(0o700)


def test_folder_behind_a_link_is_refused_unless_it_may_be_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    check_private(tmp_path / "link", may_be_link=True)
    with pytest.raises(SlotError, match="link: is a link or no folder; remove it and install again"):
        check_private(tmp_path / "link")


def test_folder_that_is_missing_cannot_be_private(tmp_path: Path) -> None:
    with pytest.raises(SlotError, match="gone: cannot be read: No such file or directory"):
        check_private(tmp_path / "gone")


@pytest.mark.parametrize(
    ("owner", "user", "is_ours"), [(1000, 1000, True), (0, 1000, True), (1001, 1000, False), (1000, 0, False)]
)
def test_file_of_this_user_or_root_is_ours(
    owner: int, user: int, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    status = os.stat_result((0o100600, 1, 1, 1, owner, owner, 0, 0, 0, 0))
    assert belongs_to_us(status) is is_ours


def test_folder_below_a_file_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(
        SlotError, match=r"cannot make the folder .*/file/a: Not a directory; set EDGEKIT_STATE"
    ):
        make_folder(tmp_path / "file/a/b", 0o700, DISK)


def test_second_service_is_refused_by_the_process_of_the_first(tmp_path: Path) -> None:
    with hold_for_service(tmp_path):
        reason = rf"another service \(process {os.getpid()}\) uses the state folder {tmp_path}; stop it, or"
        with pytest.raises(SlotError, match=reason), hold_for_service(tmp_path):
            pass


@pytest.mark.parametrize("take", [hold, hold_for_service])
def test_folder_that_was_held_is_free_again_with_its_descriptor(take: Any, tmp_path: Path) -> None:
    before = count_descriptors()
    for _ in range(2):
        with take(tmp_path):
            assert count_descriptors() == before + 1
    assert count_descriptors() == before


def refuse_locks(_descriptor: int, _how: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_service_starts_where_the_file_system_has_no_locks_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse_locks)
    with hold_for_service(tmp_path):
        assert "has no locks: No locks available; make sure yourself that no other service" in caplog.text


def test_model_is_not_held_where_the_file_system_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse_locks)
    before = count_descriptors()
    with pytest.raises(RecordError, match="this file system has no locks"), hold(tmp_path):
        pass
    assert count_descriptors() == before


@pytest.mark.parametrize("kind", ["missing", "file", "link"])
def test_what_is_no_folder_of_a_model_is_not_held(kind: str, tmp_path: Path) -> None:
    path = tmp_path / kind
    if kind == "file":
        path.write_bytes(b"")
    elif kind == "link":
        (tmp_path / "real").mkdir()
        path.symlink_to(tmp_path / "real")
    with pytest.raises(RecordError, match=r"; is the model installed\?"), hold(path):
        pass


class Clock:
    """A clock that only sleeping moves, and which counts the sleeps."""

    def __init__(self) -> None:
        self.now_s, self.sleeps = 1000.0, 0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.sleeps += 1


def test_folder_that_is_held_by_another_is_waited_for_half_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(access, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    before = count_descriptors()
    with contextlib.ExitStack() as stack:
        stack.enter_context(hold(tmp_path))
        with pytest.raises(RecordError, match="another process holds it for over 30 s"):
            stack.enter_context(hold(tmp_path))
        assert (clock.now_s, clock.sleeps) == (pytest.approx(1030, abs=0.03), pytest.approx(1500, abs=2))
        assert count_descriptors() == before + 1


def test_file_at_its_limit_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert read_own_file(tmp_path / "file", 3) == b"abc"


def test_file_beyond_its_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abcd")
    with pytest.raises(ForeignFileError, match="file: is over 3 bytes"):
        read_own_file(tmp_path / "file", 3)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("link", "is a link"), ("fifo", "is not a regular file"), ("folder", "is not a regular file")],
)
def test_what_is_no_regular_file_is_not_read(kind: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / kind
    if kind == "link":
        path.symlink_to(tmp_path / "target")
        (tmp_path / "target").write_bytes(b"")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    before = count_descriptors()
    with pytest.raises(ForeignFileError, match=reason):
        read_own_file(path, 3)
    assert count_descriptors() == before


def test_file_that_is_missing_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_own_file(tmp_path / "gone", 3)
