"""What a disk may hold after a power cut: a recording of all changes, and every state that it allows.

The model is that of POSIX, without what file systems promise beyond it: the content of a file is safe once
the file is synced, a name once its folder is synced, and what is not safe may be lost in any order. A rename
is a new name and the loss of the old one; a power cut may leave both names, but not neither.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import BufferedWriter
from pathlib import Path
from typing import BinaryIO, TypeAlias, cast

from tests.runtime.slot_disks import SteppedDisk, SteppedFile

MAX_SUBSETS = 256  # of changes that are not synced, at one point

Names: TypeAlias = "dict[Path, int | None]"
"""Path -> number of the file, or None for a folder."""


@dataclass
class File:
    """The content of one file.

    Attributes:
        synced: what is safe.
        data: what a reader sees.
    """

    synced: bytes = b""
    data: bytes = b""

    def variants(self) -> list[bytes]:
        """What may be there after a power cut."""
        if self.synced == self.data:
            return [self.data]
        half = self.data[: len(self.data) // 2]
        return list(dict.fromkeys([self.synced, half, bytes(len(self.data)), self.data]))


@dataclass(frozen=True)
class Change:
    """A change of names in a folder that may be lost: any one of `outcomes` may be what is left of it."""

    folders: tuple[Path, ...]
    outcomes: tuple[tuple[tuple[Path, int | str | None], ...], ...]


GONE = "gone"


@dataclass
class Recording:
    """The disk as a reader sees it, what of it is safe, and the changes between the two."""

    root: Path
    files: dict[int, File] = field(default_factory=dict)
    names: Names = field(default_factory=dict)
    safe: Names = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    @classmethod
    def of(cls, root: Path) -> "Recording":
        """Return a recording that starts with what lies in `root`, all of it safe."""
        made = cls(root)
        for path in [root, *root.rglob("*")] if root.exists() else []:
            if path.is_dir():
                made.names[path] = None
            else:
                content = path.read_bytes()
                made.files[len(made.files)] = File(content, content)
                made.names[path] = len(made.files) - 1
        made.safe = dict(made.names)
        return made

    def change(self, *outcomes: tuple[tuple[Path, int | str | None], ...]) -> None:
        """Add a change; the last outcome is the whole of it, the first is none of it."""
        _apply(self.names, outcomes[-1])
        self.pending.append(Change(tuple(path.parent for path, _ in outcomes[-1]), outcomes))

    def sync_folder(self, folder: Path) -> None:
        for change in self.pending:
            if folder in change.folders:
                _apply(self.safe, change.outcomes[-1])
        self.pending = [change for change in self.pending if folder not in change.folders]

    def states(self) -> Iterator[dict[Path, bytes | None]]:
        """Yield what the disk may hold if the power fails now: path -> content, None for a folder."""
        for outcomes in itertools.islice(
            itertools.product(*(change.outcomes for change in self.pending)), MAX_SUBSETS
        ):
            names = dict(self.safe)
            for outcome in outcomes:
                _apply(names, outcome)
            # What lies in a folder that was lost is lost too.
            names = {p: n for p, n in names.items() if p == self.root or _has_parents(p, names, self.root)}
            numbers = sorted({number for number in names.values() if number is not None})
            for contents in itertools.product(*(self.files[number].variants() for number in numbers)):
                by_number = dict(zip(numbers, contents, strict=True))
                yield {p: None if n is None else by_number[n] for p, n in names.items()}


def _apply(names: Names, outcome: Iterable[tuple[Path, int | str | None]]) -> None:
    for path, what in outcome:
        if isinstance(what, str):
            names.pop(path, None)
        else:
            names[path] = what


def _has_parents(path: Path, names: Names, root: Path) -> bool:
    return all(parent in names for parent in path.parents if parent == root or root in parent.parents)


class RecordingDisk(SteppedDisk):
    """Does what it should, and keeps a recording of it.

    Attributes:
        recording: up to now.
    """

    def __init__(self, root: Path, *, records_syncs: bool = True) -> None:
        self.points: list[list[dict[Path, bytes | None]]] = []
        super().__init__(self._note)
        self.recording = Recording.of(root)
        self._records_syncs = records_syncs

    def _note(self, _: int, __: str) -> None:
        self.note()

    def note(self) -> None:
        """Keep every state that a power cut at this point may leave."""
        self.points.append(list(self.recording.states()))

    def create(self, path: Path, mode: int) -> BinaryIO:
        file = super().create(path, mode)
        number = len(self.recording.files)
        self.recording.files[number] = File()
        self.recording.change((), ((path, number),))
        return file

    def written(self, path: Path, data: bytes) -> None:
        number = self.recording.names[path]
        assert isinstance(number, int)
        self.recording.files[number].data += data

    def sync(self, file: BinaryIO) -> None:
        super().sync(file)
        if self._records_syncs:
            number = self.recording.names[cast("SteppedFile", cast("BufferedWriter", file).raw).path]
            assert number is not None
            self.recording.files[number].synced = self.recording.files[number].data

    def replace(self, source: Path, target: Path) -> None:
        super().replace(source, target)
        number = self.recording.names[source]
        new, old = (target, number), (source, GONE)
        self.recording.change((), (new,), (new, old))

    def remove(self, path: Path) -> None:
        was_there = path.exists()
        super().remove(path)
        if was_there:
            self.recording.change((), ((path, GONE),))

    def make_folder(self, path: Path, mode: int) -> None:
        super().make_folder(path, mode)
        self.recording.change((), ((path, None),))

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        if self._records_syncs:
            self.recording.sync_folder(path)
