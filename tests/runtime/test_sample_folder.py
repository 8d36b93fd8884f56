"""Where samples wait: names, limits and power cuts."""

import contextlib
import os
from pathlib import Path

import pytest

from edgekit_runtime.errors import OutputError
from edgekit_runtime.samples.folder import SampleFolder
from edgekit_runtime.system.atomic_files import Disk

RANDOM, UNCERTAIN = ("o-1", "random"), ("o-1", "uncertain")


def fill(folder: SampleFolder, *samples: tuple[tuple[str, str], int], size_bytes: int = 100) -> None:
    """Write samples of (order, kind), each with the second of its storage."""
    for share, at in samples:
        sample_id = f"{at:032x}"
        folder.write("m", share, sample_id, b"x" * size_bytes)
        os.utime(folder.path / "m" / ".".join((*share, sample_id)), (at, at))


def list_times(folder: SampleFolder) -> list[tuple[str, int]]:
    return [(sample.kind, int(sample.stored_at)) for sample in folder.list_samples()]


def test_samples_are_listed_by_age_and_deleted(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path / "samples")
    assert folder.list_samples() == []
    fill(folder, (UNCERTAIN, 20), (RANDOM, 10))

    first, second = folder.list_samples()

    assert (first.model, first.order, first.kind, first.id, first.size_bytes) == (
        "m",
        "o-1",
        "random",
        f"{10:032x}",
        100,
    )
    assert second.share == UNCERTAIN
    assert first.path.stat().st_mode & 0o777 == 0o600
    folder.remove(first)
    assert list_times(folder) == [("uncertain", 20)]
    assert folder.clear() == 1
    assert folder.list_samples() == []


def test_what_is_no_sample_is_not_listed(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path / "samples")
    fill(folder, (RANDOM, 1))
    model = folder.path / "m"
    for name in (
        "random",
        f"o-1.random.{'0' * 31}",
        f"o-1.random.{'0' * 32}.tmp",
        f"o-1.odd.{'0' * 32}",
        f".-1.random.{'0' * 32}",
    ):
        (model / name).write_bytes(b"x")
    (model / f"o-1.random.{'a' * 32}").symlink_to("/etc/passwd")
    (model / f"o-1.random.{'b' * 32}").mkdir()
    (model / f"o-1.random.{'c' * 32}").write_bytes(b"")
    (folder.path / f"o-1.random.{'d' * 32}").write_bytes(b"x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / f"o-1.random.{'e' * 32}").write_bytes(b"x")
    (folder.path / "linked").symlink_to(tmp_path / "elsewhere")

    assert list_times(folder) == [("random", 1)]


def test_each_share_loses_its_oldest_and_none_that_of_another(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path / "samples")
    fill(folder, (RANDOM, 1), *((UNCERTAIN, at) for at in range(2, 8)))

    folder.trim(oldest_at=0, max_bytes=10_000, shares={RANDOM: 300, UNCERTAIN: 300})

    assert list_times(folder) == [("random", 1), ("uncertain", 5), ("uncertain", 6), ("uncertain", 7)]


@pytest.mark.parametrize("shares", [{RANDOM: 250}, {}])
def test_small_samples_do_not_outlive_later_ones_that_are_large(
    tmp_path: Path, shares: dict[tuple[str, str], int]
) -> None:
    folder = SampleFolder(tmp_path / "samples")
    fill(folder, (RANDOM, 1), size_bytes=10)
    fill(folder, (RANDOM, 2), size_bytes=200)
    fill(folder, (RANDOM, 3), size_bytes=100)

    folder.trim(oldest_at=0, max_bytes=250, shares=shares)

    assert list_times(folder) == [("random", 3)]


def test_beyond_the_limit_of_all_chosen_samples_go_before_random_ones(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path / "samples")
    fill(folder, (RANDOM, 1), (UNCERTAIN, 2), (UNCERTAIN, 3), (("o-2", "kept"), 4))

    folder.trim(oldest_at=0, max_bytes=300, shares={})

    assert list_times(folder) == [("random", 1), ("uncertain", 3), ("kept", 4)]
    folder.trim(oldest_at=2, max_bytes=300, shares={})
    assert list_times(folder) == [("uncertain", 3), ("kept", 4)]


def test_a_power_cut_at_each_step_leaves_a_whole_sample_or_none(tmp_path: Path) -> None:
    class Cut(Exception):  # noqa: N818  # not an error of the folder
        pass

    class CutDisk(Disk):
        __slots__ = ("steps",)

        def __init__(self, steps: int) -> None:
            self.steps = steps

        def _count(self) -> None:
            self.steps -= 1
            if self.steps < 0:
                raise Cut

        def sync(self, file):  # type: ignore[no-untyped-def]
            self._count()
            super().sync(file)

        def replace(self, source: Path, target: Path) -> None:
            self._count()
            super().replace(source, target)

        def sync_folder(self, path: Path) -> None:
            self._count()
            super().sync_folder(path)

        def remove(self, path: Path) -> None:
            """Do nothing: the power is off."""

    sizes = []
    for steps in range(8):
        folder = SampleFolder(tmp_path / str(steps), CutDisk(steps))
        with contextlib.suppress(Cut):
            folder.write("m", RANDOM, "0" * 32, b"x" * 1000)
        sizes.append([sample.size_bytes for sample in SampleFolder(folder.path).list_samples()])

    assert sizes[0] == []
    assert sizes[-1] == [1000]
    assert all(size in ([], [1000]) for size in sizes)
    leftover = next((tmp_path).glob("*/m/.*.tmp"))
    os.utime(leftover, (1, 1))
    SampleFolder(leftover.parent.parent).list_samples()


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    class FullDisk(Disk):
        def sync(self, file):  # type: ignore[no-untyped-def]
            raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match="No space left"):
        SampleFolder(tmp_path, FullDisk()).write("m", RANDOM, "0" * 32, b"x")
    assert SampleFolder(tmp_path).list_samples() == []
