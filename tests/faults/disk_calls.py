"""All calls of Python and SQLite that change files below a folder, counted, so that one of them fails.

`DiskCalls` takes the place of the functions of `os` and `io` in this process, and of those of SQLite (see
`sqlite_calls`), and keeps what is not synced yet. So a power cut can be played at any step: what was not
synced is lost, or a part of it is there, in any order. The model is that of POSIX: the content of a file is
safe once the file is synced, a name once its folder is. Memory that is shared (SQLite's index of its log) is
never safe.

Of paths only absolute ones are seen; the product uses no other below its folders.
"""

import builtins
import contextlib
import errno
import io
import os
import random
import signal
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["kill", "full disk", "error", "dropped", "torn", "agent killed"]
"""`dropped` and `torn` are power cuts: all that was not synced is lost, or a random part of it is there.

`agent killed` is for processes of an agent: see `step_faults`.
"""

KINDS: tuple[Kind, ...] = ("kill", "full disk", "error", "dropped", "torn")
_NEEDS_SPACE = ("open", "write", "mkdir", "rename")
_WRITABLE = set("wxa+")


@dataclass
class DirtyFile:
    """A file with unsynced content.

    Attributes:
        descriptor: our own, which follows the file to another name.
        synced: what is safe.
        writes: (offset, content), or (size, None) where it was cut.
    """

    descriptor: int
    synced: bytes
    writes: list[tuple[int, bytes | None]] = field(default_factory=list)

    def build(self, keep: Callable[[], float]) -> bytes:
        """Return the content if of each write the share that `keep` returns is there."""
        content = bytearray(self.synced)
        for offset, data in self.writes:
            share = keep()
            if data is None and share > 0:
                del content[offset:]
                content.extend(bytes(offset - len(content)))
            elif data is not None and (part := data[: int(len(data) * share)]):
                content.extend(bytes(max(0, offset - len(content))))
                content[offset : offset + len(part)] = part
        return bytes(content)


@dataclass(frozen=True)
class NameChange:
    """A change of names that is not synced: in which folders, and how it is undone."""

    folders: frozenset[str]
    undo: Callable[[], None]


class DiskCalls:
    """The calls below a folder; `installed` puts them in place.

    Attributes:
        count: steps so far.
        names: of the calls, in their order.
        was_hit, on_hit: whether the fault came, and what is called when it does.
    """

    def __init__(self, root: Path, grave: Path) -> None:
        """Count the calls below `root`; `grave`, an empty folder beside it, keeps files that vanish."""
        self.count = 0
        self.names: list[str] = []
        self.was_hit, self.on_hit = False, lambda: None
        self._root, self._grave, self._buried = f"{root}/", grave, 0
        self._files: dict[tuple[int, int], DirtyFile] = {}
        self._changes: list[NameChange] = []
        self._fault: tuple[int, Kind] | None = None
        self._is_counting = False
        self.real = _Real()

    def arm(self, at: int | None = None, kind: Kind = "kill") -> None:
        """Count from here on, and let step `at`, from 0, fail."""
        self.count, self.names, self._is_counting = 0, [], True
        self._fault = None if at is None else (at, kind)

    def disarm(self) -> None:
        """Let all work again."""
        self._fault, self._is_counting = None, False

    def has_path(self, path: object) -> bool:
        """Return whether a path is the folder or below it."""
        return isinstance(path, (str, os.PathLike)) and f"{os.fspath(path)}/".startswith(self._root)

    def step(self, name: str, half: Callable[[], object] = lambda: None) -> None:
        """Take note of a call before it happens.

        Args:
            name: of the call.
            half: does half of it.

        Raises:
            OSError: as ordered.
        """
        if not self._is_counting:
            return
        number, self.count = self.count, self.count + 1
        self.names.append(name)
        if self._fault is None or number < self._fault[0]:
            return
        if not self.was_hit:
            self.was_hit = True
            self.on_hit()
        at, kind = self._fault
        if kind == "full disk" and name.split()[-1] in _NEEDS_SPACE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if number == at and kind != "full disk":
            self.strike(at, kind, half)

    def strike(self, at: int, kind: Kind, half: Callable[[], object]) -> None:
        """Let step `at` fail."""
        if kind == "error":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if kind == "kill":
            half()
        else:
            self.cut_power(None if kind == "dropped" else random.Random(at))  # no secret
        os.kill(os.getpid(), signal.SIGKILL)

    def cut_power(self, draw: random.Random | None) -> None:
        """Leave on the disk what a power cut may leave: nothing that is not synced, or a random part."""
        for change in reversed(self._changes):
            if draw is None or draw.random() < 0.5:
                with contextlib.suppress(OSError):
                    change.undo()
        for file in self._files.values():
            content = file.build(lambda: 0.0 if draw is None else draw.choice((0.0, 0.5, 1.0)))
            self.real.ftruncate(file.descriptor, 0)
            os.pwrite(file.descriptor, content, 0)
        for folder, _, names in os.walk(self._root):
            for name in names:
                if name.endswith("-shm"):
                    self.real.unlink(f"{folder}/{name}")

    # What is not safe

    def note_write(self, path: str, offset: int, data: bytes | None) -> None:
        """Take note that content is about to be written at `offset`, or cut there."""
        try:
            status = os.stat(path)
        except FileNotFoundError:  # a temporary file without a name
            return
        key = status.st_dev, status.st_ino
        if key not in self._files:
            descriptor = self.real.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._files[key] = DirtyFile(descriptor, os.pread(descriptor, status.st_size, 0))
        self._files[key].writes.append((offset, data))

    def note_created(self, path: str) -> None:
        """Take note of a new file."""
        self._changes.append(NameChange(frozenset({os.path.dirname(path)}), lambda: self.real.unlink(path)))

    def note_synced(self, path: str) -> None:
        """Take note that a file or folder is safe."""
        if os.path.isdir(path):
            self._changes = [change for change in self._changes if path not in change.folders]
            return
        status = os.stat(path)
        file = self._files.pop((status.st_dev, status.st_ino), None)
        if file is not None:
            os.close(file.descriptor)

    def bury(self, path: str) -> str | None:
        """Return another name of a file that is about to vanish, or None where there is none."""
        if not os.path.isfile(path):
            return None
        self._buried += 1
        kept = f"{self._grave}/{self._buried}"
        os.link(path, kept)
        return kept

    # In place of the functions of os and io

    @contextlib.contextmanager
    def installed(self) -> Iterator["DiskCalls"]:
        """Take the place of the functions until the block ends."""
        from tests.faults import sqlite_calls

        places = [(os, name) for name in ("open", "replace", "rename", "unlink", "remove", "mkdir", "fsync")]
        places += [(os, "ftruncate"), (os, "sync"), (io, "open"), (builtins, "open"), (tarfile, "bltn_open")]
        ours = {"remove": self.unlink, "rename": self.replace, "bltn_open": self.open_file}
        with contextlib.ExitStack() as undo, sqlite_calls.installed(self):
            for module, name in places:
                undo.callback(setattr, module, name, getattr(module, name))
                own = self.open_file if (module, name) in ((io, "open"), (builtins, "open")) else None
                setattr(module, name, own or ours.get(name) or getattr(self, name))
            yield self

    def open(self, path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        if not self.has_path(path) or not flags & (os.O_WRONLY | os.O_RDWR):
            return self.real.open(path, flags, mode, **options)
        where, was_there = os.fspath(path), os.path.exists(path)
        self.step("open")
        descriptor = self.real.open(path, flags, mode, **options)
        if not was_there:
            self.note_created(where)
        elif flags & os.O_TRUNC:
            self.note_write(where, 0, None)
        return descriptor

    def open_file(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else file
        if not _WRITABLE & set(mode) or not self.has_path(path):
            return self.real.open_file(file, mode, *args, **options)
        where = os.fspath(path)
        if options.get("opener"):  # of a temporary file, by `open`
            file = options["opener"](path, os.O_RDWR)
        elif not isinstance(file, int):
            flags = os.O_TRUNC if "w" in mode else os.O_EXCL if "x" in mode else 0
            access = os.O_RDWR if "+" in mode else os.O_WRONLY
            created = 0 if "r" in mode else os.O_CREAT
            file = self.open(where, flags | access | created | os.O_CLOEXEC, 0o666)
        raw = _SteppedFile(file, mode.replace("b", "").replace("t", ""))
        raw.calls, raw.where = self, where
        if "a" in mode:
            raw.seek(0, os.SEEK_END)
        buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw, 2048)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding=options.get("encoding"))

    def replace(self, source: Any, target: Any) -> None:
        if not self.has_path(target):
            self.real.replace(source, target)
            return
        old, new = os.fspath(source), os.fspath(target)
        self.step("rename")
        kept = self.bury(new)
        self.real.replace(source, target)

        def undo() -> None:
            self.real.replace(new, old)
            if kept is not None:
                os.link(kept, new)

        self._changes.append(NameChange(frozenset({os.path.dirname(old), os.path.dirname(new)}), undo))

    def unlink(self, path: Any, **options: Any) -> None:
        if not self.has_path(path) or not os.path.exists(path):
            self.real.unlink(path, **options)
            return
        where = os.fspath(path)
        self.step("unlink")
        kept = self.bury(where)
        self.real.unlink(path, **options)
        if kept is not None:
            self._changes.append(
                NameChange(frozenset({os.path.dirname(where)}), lambda: os.link(kept, where))
            )

    def mkdir(self, path: Any, mode: int = 0o777, **options: Any) -> None:
        if not self.has_path(path) or os.path.exists(path):
            self.real.mkdir(path, mode, **options)
            return
        where = os.fspath(path)
        self.step("mkdir")
        self.real.mkdir(path, mode, **options)

        def undo() -> None:
            import shutil

            shutil.rmtree(where)

        self._changes.append(NameChange(frozenset({os.path.dirname(where)}), undo))

    def fsync(self, file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if not self.has_path(path):
            self.real.fsync(file)
            return
        self.step("fsync")
        self.note_synced(path)

    def sync(self) -> None:
        self.step("sync")
        self._changes.clear()
        for file in self._files.values():
            os.close(file.descriptor)
        self._files.clear()

    def ftruncate(self, descriptor: int, size: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if self.has_path(path) and os.fstat(descriptor).st_size != size:
            self.step("truncate")
            self.note_write(path, size, None)
        self.real.ftruncate(descriptor, size)


class _SteppedFile(io.FileIO):
    """A file of which each write is two steps.

    Attributes:
        calls, where: see `DiskCalls`.
    """

    calls: DiskCalls
    where: str

    def write(self, data: Any) -> int:
        content = bytes(data)
        middle = (len(content) + 1) // 2
        for piece in filter(None, (content[:middle], content[middle:])):
            self.calls.step("write")
            self.calls.note_write(self._find_path(), self.tell(), piece)
            super().write(piece)
        return len(content)

    def _find_path(self) -> str:
        """Return where the file is now: it may have another name."""
        return os.readlink(f"/proc/self/fd/{self.fileno()}")


class _Real:
    """The functions themselves."""

    def __init__(self) -> None:
        self.open, self.open_file = os.open, io.open
        self.replace, self.unlink, self.mkdir = os.replace, os.unlink, os.mkdir
        self.fsync, self.ftruncate = os.fsync, os.ftruncate
