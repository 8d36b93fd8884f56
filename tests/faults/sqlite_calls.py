"""SQLite's own writes, cuts, syncs and removals as steps of `DiskCalls`: functions around those of its VFS.

Source: SQLite, "The SQLite OS Interface or VFS" (vfs.html), and sqlite3.h of version 3.
"""

import contextlib
import ctypes
import os
import sqlite3
from collections.abc import Iterator
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

from tests.faults.disk_calls import DiskCalls

_OK, _FULL, _CANT_OPEN = 0, 13, 14
_IO_WRITE, _IO_FSYNC, _IO_TRUNCATE, _IO_DELETE = 778, 1034, 1546, 2570
_READ_ONLY = 0x1
_kept: list[object] = []

_Open = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int, c_void_p)
_Delete = CFUNCTYPE(c_int, c_void_p, c_char_p, c_int)
_Write = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
_Truncate = CFUNCTYPE(c_int, c_void_p, c_int64)
_Sync = CFUNCTYPE(c_int, c_void_p, c_int)


class _Methods(Structure):
    """The beginning of `sqlite3_io_methods`; the rest is copied as it is."""

    _fields_ = (
        ("version", c_int),
        ("close", c_void_p),
        ("read", c_void_p),
        ("write", c_void_p),
        ("truncate", c_void_p),
        ("sync", c_void_p),
        ("rest", c_void_p * 13),
    )


class _Vfs(Structure):
    """The beginning of `sqlite3_vfs`."""

    _fields_ = (
        ("version", c_int),
        ("file_bytes", c_int),
        ("path_bytes", c_int),
        ("next", c_void_p),
        ("name", c_char_p),
        ("data", c_void_p),
        ("open", c_void_p),
        ("delete", c_void_p),
    )


def find_vfs() -> Any:
    """Return the VFS that Python's SQLite uses.

    Raises:
        OSError: SQLite is a part of Python's own program here, and its functions cannot be found.
    """
    sqlite3.connect(":memory:").close()
    library = ctypes.CDLL("libsqlite3.so.0")
    library.sqlite3_libversion.restype = c_char_p
    if library.sqlite3_libversion().decode() != sqlite3.sqlite_version:
        raise OSError("libsqlite3.so.0 is not the SQLite that Python uses")
    library.sqlite3_vfs_find.restype = POINTER(_Vfs)
    return library.sqlite3_vfs_find(None).contents


class _SqliteCalls:
    """The functions around those of the VFS."""

    def __init__(self, calls: DiskCalls, vfs: Any) -> None:
        self._calls, self._vfs = calls, vfs
        self._paths: dict[int, str] = {}
        self._methods: dict[int, _Methods] = {}
        self._kept = (_Open(self._open), _Delete(self._delete))
        self._of_file = (_Write(self._write), _Truncate(self._truncate), _Sync(self._sync))
        self._real_open, self._real_delete = _Open(vfs.open), _Delete(vfs.delete)
        self._real: tuple[Any, Any, Any] | None = None
        self._new_journals: set[str] = set()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        before = self._vfs.open, self._vfs.delete
        self._vfs.open, self._vfs.delete = (ctypes.cast(each, c_void_p).value for each in self._kept)
        try:
            yield
        finally:
            self._vfs.open, self._vfs.delete = before

    def _open(self, vfs: int, name: int | None, file: int, flags: int, out: int) -> int:
        path = "" if name is None else ctypes.string_at(name).decode()
        is_ours = self._calls.has_path(path) and not flags & _READ_ONLY
        was_there = os.path.exists(path)
        try:
            if is_ours and not was_there:
                self._calls.step("db open")
        except OSError:
            return _CANT_OPEN
        if is_ours and was_there:
            self._calls.disk.see(Path(path))
        code = self._real_open(vfs, name, file, flags, out)
        if code != _OK or not is_ours:
            return int(code)
        if not was_there:
            self._calls.disk.create(Path(path))
            self._new_journals.add(path)
        at = c_void_p.from_address(file)
        methods = _Methods.from_address(at.value or 0)
        self._real = _Write(methods.write), _Truncate(methods.truncate), _Sync(methods.sync)
        own = _Methods.from_buffer_copy(methods)
        own.write, own.truncate, own.sync = (ctypes.cast(each, c_void_p).value for each in self._of_file)
        self._methods[file], self._paths[file] = own, path
        at.value = ctypes.addressof(own)
        return _OK

    def _delete(self, vfs: int, name: bytes, is_synced: int) -> int:
        path = name.decode()
        if not self._calls.has_path(path) or not os.path.exists(path):
            return int(self._real_delete(vfs, name, is_synced))
        try:
            self._calls.unlink(path)
        except OSError:
            return _IO_DELETE
        if is_synced:
            self._calls.disk.sync(Path(path).parent)
        return _OK

    def _write(self, file: int, data: int, size: int, offset: int) -> int:
        assert self._real is not None
        write, content = self._real[0], ctypes.string_at(data, size)
        try:
            self._calls.step("db write", lambda: write(file, data, size // 2, offset))
        except OSError as error:
            return _FULL if "space" in str(error) else _IO_WRITE
        self._calls.note_write(self._paths[file], offset, content)
        return int(write(file, data, size, offset))

    def _truncate(self, file: int, size: int) -> int:
        assert self._real is not None
        try:
            self._calls.step("db truncate")
        except OSError:
            return _IO_TRUNCATE
        self._calls.note_write(self._paths[file], size, None)
        return int(self._real[1](file, size))

    def _sync(self, file: int, flags: int) -> int:
        assert self._real is not None
        path = self._paths[file]
        try:
            self._calls.step("db fsync")
        except OSError:
            return _IO_FSYNC
        self._calls.disk.sync(Path(path))
        if path in self._new_journals and not path.endswith(".db"):  # SQLite syncs the folder of a new log
            self._new_journals.discard(path)
            self._calls.disk.sync(Path(path).parent)
        return int(self._real[2](file, flags))


@contextlib.contextmanager
def installed(calls: DiskCalls) -> Iterator[None]:
    """Let SQLite's changes be steps of `calls` until the block ends."""
    functions = _SqliteCalls(calls, find_vfs())
    _kept.append(functions)  # open databases call them until they are closed
    with functions.installed():
        yield
