"""A POSIX disk: what readers see, what of it is safe, and every state that a power cut may leave.

The content of a file is safe once the file is synced, a name once its folder is synced; file systems promise
more, which does not count here. What is not safe may be lost, in any order, and of a write a part may be
there. A rename is a new name and the loss of the old one; a power cut may leave both names, but not neither.

    disk = PosixDisk.read(root)         # all that is there is safe
    disk.create(root / "a.tmp")
    disk.write(root / "a.tmp", 0, b"new")
    disk.rename(root / "a.tmp", root / "a")
    list(disk.states())                 # with no file, with an empty "a", with half of it, ...

Nothing here touches a file but `read` and `lay_out`; `disk_calls` tells a disk what a program does.
"""

import itertools
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

MAX_SUBSETS = 256  # of changes that are not safe, at one instant

Node: TypeAlias = "int | None"
"""Number of a file, or None for a folder."""
State: TypeAlias = "dict[Path, bytes | None]"
"""Path -> content, None for a folder."""
Outcome: TypeAlias = "tuple[tuple[Path, Node | Literal['gone']], ...]"


@dataclass
class File:
    """The content of a file.

    Attributes:
        synced: what is safe.
        data: what a reader sees.
        mode: its permissions.
        writes: since the last sync: offset and content, or size and None where the file was cut.
    """

    synced: bytes
    data: bytearray
    mode: int
    writes: list[tuple[int, bytes | None]] = field(default_factory=list)

    def write(self, offset: int, data: bytes | None) -> None:
        self.writes.append((offset, data))
        _write(self.data, offset, data)

    def sync(self) -> None:
        self.synced, self.writes = bytes(self.data), []

    def list_contents(self) -> list[bytes]:
        """Return what may be there after a power cut; the last is what a reader sees now."""
        data = bytes(self.data)
        if self.synced == data and not self.writes:
            return [data]
        return list(dict.fromkeys([self.synced, data[: len(data) // 2], bytes(len(data)), data]))

    def draw_content(self, chance: random.Random) -> bytes:
        """Return the content where each write was lost, torn or kept."""
        content = bytearray(self.synced)
        for offset, data in self.writes:
            share = chance.choice((0.0, 0.5, 1.0))
            if data is None and share > 0:
                _write(content, offset, None)
            elif data is not None and (part := data[: int(len(data) * share)]):
                _write(content, offset, part)
        return bytes(content)


def _write(content: bytearray, offset: int, data: bytes | None) -> None:
    """Write at an offset, or cut the content there; a hole holds zeros."""
    if data is None:
        del content[offset:]
    content.extend(bytes(max(0, offset - len(content))))
    if data is not None:
        content[offset : offset + len(data)] = data


@dataclass(frozen=True)
class Change:
    """A change of names that is not safe.

    Attributes:
        folders: a sync of any of them makes it safe.
        outcomes: what a power cut may leave of it; the first is nothing, the last is all.
    """

    folders: frozenset[Path]
    outcomes: tuple[Outcome, ...]


class PosixDisk:
    """The content of a folder. `forgets_syncs` makes it take no sync into account."""

    def __init__(self, root: Path, *, forgets_syncs: bool = False) -> None:
        self._root, self._forgets_syncs = root, forgets_syncs
        self._files: dict[int, File] = {}
        self._names: dict[Path, Node] = {}
        self._safe: dict[Path, Node] = {}
        self._changes: list[Change] = []

    @classmethod
    def read(cls, root: Path, *, forgets_syncs: bool = False) -> "PosixDisk":
        """Return a disk with what lies in `root`, all of it safe."""
        disk = cls(root, forgets_syncs=forgets_syncs)
        for path in (root, *root.rglob("*")):
            if not path.is_symlink():
                disk.see(path)
        return disk

    def see(self, path: Path) -> Node:
        """Return the node at a path; what came there unseen is safe, and so are its folders."""
        if path not in self._names:
            if path != self._root:
                assert path.is_relative_to(self._root), f"{path} is not below {self._root}"
                self.see(path.parent)
            self._names[path] = self._safe[path] = self._add(path)
        return self._names[path]

    def _add(self, path: Path) -> Node:
        if path.is_dir():
            return None
        number, content = len(self._files), path.read_bytes()
        self._files[number] = File(content, bytearray(content), path.stat().st_mode & 0o7777)
        return number

    # What a program does. What it changes must have been seen before.

    def create(self, path: Path) -> None:
        """Add an empty file or folder, which has just been made."""
        self.see(path.parent)
        self._change({path.parent}, (), ((path, self._add(path)),))

    def write(self, path: Path, offset: int, data: bytes | None) -> None:
        """Write to a file at `offset`, or cut it there."""
        number = self._names[path]
        assert number is not None
        self._files[number].write(offset, data)

    def rename(self, source: Path, target: Path) -> None:
        self.see(target.parent)
        moved = [(source, self._names[source])]
        if moved[0][1] is None:
            moved = [(path, node) for path, node in self._names.items() if path.is_relative_to(source)]
        new = tuple((target / path.relative_to(source), node) for path, node in moved)
        old = tuple((path, "gone") for path, _ in moved)
        self._change({source.parent, target.parent}, (), new, (*new, *old))

    def remove(self, path: Path) -> None:
        self._change({path.parent}, (), ((path, "gone"),))

    def _change(self, folders: set[Path], *outcomes: Outcome) -> None:
        _apply(self._names, outcomes[-1])
        self._changes.append(Change(frozenset(folders), outcomes))

    def sync(self, path: Path) -> None:
        """Make the content of a file safe, or the names in a folder."""
        if self._forgets_syncs:
            return
        number = self.see(path)
        if number is not None:
            self._files[number].sync()
            return
        for change in self._changes:
            if path in change.folders:
                _apply(self._safe, change.outcomes[-1])
        self._changes = [change for change in self._changes if path not in change.folders]

    def sync_all(self) -> None:
        self._safe, self._changes = dict(self._names), []
        for file in self._files.values():
            file.sync()

    # What a power cut may leave

    def states(self) -> Iterator[State]:
        """Yield what the disk may hold if the power fails now."""
        outcomes = itertools.product(*(change.outcomes for change in self._changes))
        for applied in itertools.islice(outcomes, MAX_SUBSETS):
            names = self._list_names(applied)
            numbers = sorted({number for number in names.values() if number is not None})
            for contents in itertools.product(*(self._files[number].list_contents() for number in numbers)):
                by_number = dict(zip(numbers, contents, strict=True))
                yield {p: None if n is None else by_number[n] for p, n in names.items()}

    def lay_out(self, chance: random.Random | None) -> None:
        """Make the folder what a power cut may leave: nothing that is not safe, or a random part of it.

        Only what was lost is touched: other programs may have changed the rest.
        """
        names = self._list_names(
            [
                change.outcomes[0] if chance is None else chance.choice(change.outcomes)
                for change in self._changes
            ]
        )
        contents = {
            number: file.synced if chance is None else file.draw_content(chance)
            for number, file in self._files.items()
            if file.writes
        }
        for path in sorted(self._names.keys() - names.keys(), reverse=True):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for path, number in sorted(names.items()):
            is_same = path in self._names and self._names[path] == number
            if number is None and not is_same:
                path.mkdir(exist_ok=True)
            elif number is not None and (number in contents or not is_same):
                file = self._files[number]
                path.unlink(missing_ok=True)
                path.write_bytes(contents.get(number, file.synced))
                path.chmod(file.mode)

    def _list_names(self, applied: "tuple[Outcome, ...] | list[Outcome]") -> dict[Path, Node]:
        """Return the names after some changes; what lies in a folder that was lost is lost too."""
        names = dict(self._safe)
        for outcome in applied:
            _apply(names, outcome)
        kept: dict[Path, Node] = {}
        for path in sorted(names):
            if path == self._root or path.parent in kept:
                kept[path] = names[path]
        return kept


def _apply(names: dict[Path, Node], outcome: Outcome) -> None:
    for path, node in outcome:
        if node == "gone":
            names.pop(path, None)
        else:
            names[path] = node


def write_state(state: State, root: Path, folder: Path) -> None:
    """Make `folder` what a state of `root` holds."""
    shutil.rmtree(folder, ignore_errors=True)
    for path, content in sorted(state.items()):
        target = folder / path.relative_to(root)
        if content is None:
            target.mkdir(mode=0o700, parents=True)
        else:
            target.write_bytes(content)
