"""All calls of Python and SQLite that change files below a folder, counted, so that one of them fails.

`DiskCalls` takes the place of the functions of `os` and `io` in this process, and on request of those of
SQLite (see `sqlite_calls`), and tells a `PosixDisk` what they do: so a power cut can be played at any step,
and code that forgets a sync or writes in place is seen, whichever functions it uses. Memory that is shared
(SQLite's index of its log) is never safe.

    calls = DiskCalls(folder, end=end_here)
    with calls.installed():
        calls.arm(3, "torn")            # the power fails at the fourth step
        program(folder)                 # raises Killed

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
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tests.faults.posix_disk import PosixDisk

Kind: TypeAlias = Literal["kill", "full disk", "error", "dropped", "torn", "agent killed"]
"""`dropped` and `torn` are power cuts: all that was not synced is lost, or a random part of it is there.

`agent killed` is for processes of an agent: see `step_faults`.
"""

KINDS: tuple[Kind, ...] = ("kill", "full disk", "error", "dropped", "torn")
_NEEDS_SPACE = ("open", "write", "mkdir", "rename")
_WRITABLE = set("wxa+")
_BUFFER_BYTES = 2048

AtStep: TypeAlias = Callable[[int, str], None]
"""Takes the number of a step, from 0, and the name of its call, before it happens; may raise OSError."""


class Killed(BaseException):
    """In place of a killed process, in one that goes on."""


def end_here() -> None:
    """End what runs, but not this process.

    Raises:
        Killed: always.
    """
    raise Killed


def _end_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DiskCalls:
    """The calls below a folder; `installed` puts them in place.

    Attributes:
        disk: what they do, from `installed` on.
        count: steps so far.
        names: of the calls, in their order.
        was_hit, on_hit: whether the fault came, and what is called when it does.
    """

    def __init__(
        self,
        root: Path,
        at_step: AtStep | None = None,
        *,
        end: Callable[[], None] = _end_process,
        piece_bytes: int | None = None,
        forgets_syncs: bool = False,
    ) -> None:
        """Count the calls below `root`.

        Args:
            root: folder, made if it is missing.
            at_step: called before each step, once they are counted.
            end: ends what runs, where a fault does.
            piece_bytes: of a write that is a step, half of it if None.
            forgets_syncs: take no sync into account.
        """
        root.mkdir(exist_ok=True)
        self.count = 0
        self.names: list[str] = []
        self.was_hit, self.on_hit = False, lambda: None
        self.piece_bytes = piece_bytes
        self.disk = PosixDisk(root, forgets_syncs=forgets_syncs)
        self._root, self._at_step, self._end = root, at_step, end
        self._prefix, self._forgets_syncs = f"{root}/", forgets_syncs
        self._fault: tuple[int, Kind] | None = None
        self._is_counting = self.has_ended = False
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
        return isinstance(path, (str, os.PathLike)) and f"{os.fspath(path)}/".startswith(self._prefix)

    def step(self, name: str, half: Callable[[], object] = lambda: None) -> None:
        """Take note of a call before it happens.

        Args:
            name: of the call.
            half: does half of it.

        Raises:
            OSError: as ordered.
        """
        if self.has_ended:
            raise Killed
        if not self._is_counting:
            return
        number, self.count = self.count, self.count + 1
        self.names.append(name)
        if self._at_step is not None:
            self._at_step(number, name)
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
        self.has_ended = True
        self._end()

    def cut_power(self, chance: random.Random | None) -> None:
        """Leave on the disk what a power cut may leave: nothing that is not synced, or a random part."""
        with self._real_calls():
            self.disk.lay_out(chance)
            for path in self._root.rglob("*-shm"):
                path.unlink()

    def note_write(self, path: str, offset: int, data: bytes | None) -> None:
        """Take note that content is about to be written at `offset`, or cut there."""
        if os.path.exists(path):  # else a temporary file without a name
            self.disk.see(Path(path))
            self.disk.write(Path(path), offset, data)

    # In place of the functions of os and io

    @contextlib.contextmanager
    def installed(self, *, sqlite: bool = False) -> Iterator["DiskCalls"]:
        """Take the place of the functions until the block ends; what is below the folder now is safe."""
        from tests.faults import sqlite_calls

        self.disk = PosixDisk.read(self._root, forgets_syncs=self._forgets_syncs)
        functions = {
            (os, "open"): self.open,
            (os, "replace"): self.replace,
            (os, "rename"): self.replace,
            (os, "unlink"): self.unlink,
            (os, "remove"): self.unlink,
            (os, "mkdir"): self.mkdir,
            (os, "fsync"): self.fsync,
            (os, "ftruncate"): self.ftruncate,
            (os, "sync"): self.sync,
            (io, "open"): self.open_file,
            (builtins, "open"): self.open_file,
            (tarfile, "bltn_open"): self.open_file,
        }
        with (
            sqlite_calls.installed(self) if sqlite else contextlib.nullcontext(),
            _in_place(functions),
        ):
            yield self

    def _real_calls(self) -> contextlib.AbstractContextManager[None]:
        """Let all calls through until the block ends."""
        real = self.real
        return _in_place(
            {
                (os, "open"): real.open,
                (os, "unlink"): real.unlink,
                (os, "mkdir"): real.mkdir,
                (io, "open"): real.open_file,
            }
        )

    def open(self, path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        if not self.has_path(path) or not flags & (os.O_WRONLY | os.O_RDWR):
            return self.real.open(path, flags, mode, **options)
        where, was_there = Path(path), os.path.exists(path)
        self.step("open")
        if was_there:
            self.disk.see(where)
        descriptor = self.real.open(path, flags, mode, **options)
        if not was_there:
            self.disk.create(where)
        elif flags & os.O_TRUNC:
            self.disk.write(where, 0, None)
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
        raw.calls = self
        if "a" in mode:
            raw.seek(0, os.SEEK_END)
        buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw, _BUFFER_BYTES)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding=options.get("encoding"))

    def replace(self, source: Any, target: Any) -> None:
        if not self.has_path(target):
            self.real.replace(source, target)
            return
        self.step("rename")
        old, new = Path(source), Path(target)
        for path in (old, new):
            if path.exists():
                self.disk.see(path)
        self.real.replace(source, target)
        self.disk.rename(old, new)

    def unlink(self, path: Any, **options: Any) -> None:
        if not self.has_path(path) or not os.path.exists(path):
            self.real.unlink(path, **options)
            return
        self.step("unlink")
        self.disk.see(Path(path))
        self.real.unlink(path, **options)
        self.disk.remove(Path(path))

    def mkdir(self, path: Any, mode: int = 0o777, **options: Any) -> None:
        if not self.has_path(path) or os.path.exists(path):
            self.real.mkdir(path, mode, **options)
            return
        self.step("mkdir")
        self.real.mkdir(path, mode, **options)
        self.disk.create(Path(path))

    def fsync(self, file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if not self.has_path(path):
            self.real.fsync(file)
            return
        self.step("fsync")
        if os.path.exists(path):
            self.disk.sync(Path(path))

    def sync(self) -> None:
        self.step("sync")
        self.disk.sync_all()

    def ftruncate(self, descriptor: int, size: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if self.has_path(path) and os.fstat(descriptor).st_size != size:
            self.step("truncate")
            self.note_write(path, size, None)
        self.real.ftruncate(descriptor, size)


@contextlib.contextmanager
def _in_place(functions: dict[tuple[Any, str], Callable[..., Any]]) -> Iterator[None]:
    """Replace functions of modules until the block ends."""
    with contextlib.ExitStack() as undo:
        for (module, name), function in functions.items():
            undo.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, function)
        yield


class _SteppedFile(io.FileIO):
    """A file of which each piece of a write is a step.

    Attributes:
        calls: see `DiskCalls`.
    """

    calls: DiskCalls

    def write(self, data: Any) -> int:
        content = bytes(data)
        if self.calls.has_ended:  # what a buffer still holds is lost
            return len(content)
        piece_bytes = self.calls.piece_bytes or (len(content) + 1) // 2
        for begin in range(0, len(content), piece_bytes):
            piece = content[begin : begin + piece_bytes]
            self.calls.step("write")
            path = os.readlink(f"/proc/self/fd/{self.fileno()}")  # it may have another name by now
            self.calls.note_write(path, self.tell(), piece)
            super().write(piece)
        return len(content)


class _Real:
    """The functions themselves."""

    def __init__(self) -> None:
        self.open, self.open_file = os.open, io.open
        self.replace, self.unlink, self.mkdir = os.replace, os.unlink, os.mkdir
        self.fsync, self.ftruncate = os.fsync, os.ftruncate
