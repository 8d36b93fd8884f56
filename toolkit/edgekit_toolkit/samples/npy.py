"""Reads arrays from `.npy` and `.npz` files row by row, so that large arrays need little memory.

Arrays of Python objects are rejected, so nothing is unpickled.
"""

import contextlib
import lzma
import math
import zipfile  # noqa: TID251 - an .npz is data that the user brings, not a package; nothing is extracted
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError

CHUNK_BYTES: Final = 1 << 20  # rows are read in chunks of about this size. A larger row is read alone
NUMERIC_KINDS: Final = "biuf"


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a file, which is read row by row along its first axis.

    Attributes:
        member: The name of the array in the `.npz`, or None for a `.npy`.
        dtype: The dtype in the file, in any byte order.
        shape: The shape, [rows, ...].
    """

    path: Path
    member: str | None
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def where(self) -> str:
        """The path of the file, and the name of the array in an `.npz`, for messages."""
        return f"{self.path}" if self.member is None else f"{self.path}: array '{self.member}'"

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def rows(self, keep: NDArray[np.bool_] | None = None) -> Iterator[NDArray[Any]]:
        """Yield rows in native byte order. The whole file is read in any case.

        A row is a view of a block of about 1 MB, which stays in memory as long as the row. Copy rows that you
        keep.

        `keep` is a mask of the rows to yield, bool [rows]. By default all are yielded.

        Raises:
            DataError: The file is truncated, corrupt or missing.
        """
        total = self.shape[0]
        chunk_rows = max(1, CHUNK_BYTES // max(1, self.row_bytes))
        with _opened(self.path, self.member) as stream:
            _read_header(stream, self.where)
            for start in range(0, total, chunk_rows):
                count = min(chunk_rows, total - start)
                raw = np.empty(count * self.row_bytes, np.uint8)
                _fill(stream, raw, self.where)
                if start + count == total and stream.read(1):  # zipfile compares the checksum at the very end
                    raise DataError(f"{self.where}: goes on after its last row; the file is corrupt")
                chunk = raw.view(self.dtype).reshape(count, *self.shape[1:])
                chunk = chunk.astype(self.dtype.newbyteorder("="), copy=False)
                for row in range(count):
                    if keep is None or keep[start + row]:
                        yield chunk[row, ...]  # `...` keeps a scalar an array


def read_npy(path: Path) -> StoredArray:
    """Read the header of a `.npy` file. `StoredArray.rows` reads the values.

    Raises:
        DataError: The file is missing, truncated or not a `.npy` file, or the array is an object array, a
            structured array or in Fortran order.
    """
    with _opened(path, None) as stream:
        array = _described(stream, path, None)
        data_bytes = path.stat().st_size - stream.tell()
    _check_size(array, data_bytes)
    return array


def read_npz(path: Path, needed: frozenset[str]) -> tuple[dict[str, StoredArray], tuple[str, ...]]:
    """Read the headers of arrays in an `.npz` file.

    Args:
        path: The file.
        needed: The names of the arrays to read, if they exist.

    Returns:
        A dict from names to the arrays that were read, and the names of all arrays in the file.

    Raises:
        DataError: The file is missing, truncated, corrupt or not an `.npz` file, contains a name twice, or
            has an array in `needed` that `read_npy` would refuse.
    """
    with _translated(str(path)), zipfile.ZipFile(path) as archive:
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
        if len(sizes) != len(archive.infolist()):
            raise DataError(f"{path}: two members have the same name; write the file again with numpy.savez")
    names = tuple(name.removesuffix(".npy") for name in sizes if name.endswith(".npy"))
    arrays = {}
    for name in names:
        if name not in needed:
            continue
        with _opened(path, name) as stream:
            array = _described(stream, path, name)
            data_bytes = sizes[f"{name}.npy"] - stream.tell()
        _check_size(array, data_bytes)
        arrays[name] = array
    return arrays, names


@contextlib.contextmanager
def _translated(where: str) -> Iterator[None]:
    """Turn errors of zipfile, zlib and numpy about a damaged file into a DataError."""
    try:
        yield
    except FileNotFoundError as err:
        raise DataError(f"{where}: no such file") from err
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError) as err:
        raise DataError(f"{where}: truncated or corrupt ({err}); copy or write the file again") from err
    except (NotImplementedError, RuntimeError) as err:  # unknown compression, encryption
        raise DataError(f"{where}: {err}; write the file with numpy.savez") from err
    except OSError as err:
        raise DataError(f"{where}: cannot be read: {err.strerror or err}") from err


@contextlib.contextmanager
def _opened(path: Path, member: str | None) -> Iterator[IO[bytes]]:
    where = str(path) if member is None else f"{path}: array '{member}'"
    with _translated(where), contextlib.ExitStack() as stack:
        if member is None:
            yield stack.enter_context(path.open("rb"))
        else:
            archive = stack.enter_context(zipfile.ZipFile(path))
            yield stack.enter_context(archive.open(f"{member}.npy"))


def _read_header(stream: IO[bytes], where: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        version = npy_format.read_magic(stream)
        if version == (1, 0):
            return npy_format.read_array_header_1_0(stream)
        if version == (2, 0):
            return npy_format.read_array_header_2_0(stream)
    except ValueError as err:
        raise DataError(f"{where}: not an array in the .npy format ({err})") from err
    # Version 3 exists only for structured arrays with field names beyond latin-1.
    raise DataError(f"{where}: .npy format version {version} is not supported; save a plain numeric array")


def _described(stream: IO[bytes], path: Path, member: str | None) -> StoredArray:
    where = str(path) if member is None else f"{path}: array '{member}'"
    shape, fortran_order, dtype = _read_header(stream, where)
    if dtype.hasobject:
        raise DataError(f"{where}: holds Python objects, which run code when they load; save a numeric array")
    if dtype.kind not in NUMERIC_KINDS:
        raise DataError(f"{where}: has dtype {dtype}, expected numbers or booleans")
    if any(size < 0 for size in shape):
        raise DataError(f"{where}: has a negative size in shape {list(shape)}")
    if fortran_order and sum(size > 1 for size in shape) > 1:
        raise DataError(
            f"{where}: is stored in Fortran order, so its rows are not contiguous;"
            " save numpy.ascontiguousarray of it"
        )
    return StoredArray(path, member, dtype, shape)


def _check_size(array: StoredArray, data_bytes: int) -> None:
    expected = math.prod(array.shape) * array.dtype.itemsize
    if data_bytes != expected:
        raise DataError(
            f"{array.where}: holds {data_bytes} bytes of values, expected {expected} for {array.dtype}"
            f" {list(array.shape)}; the file is truncated or corrupt, write it again"
        )


def _fill(stream: IO[bytes], raw: NDArray[np.uint8], where: str) -> None:
    view = raw.data
    while view:
        count = stream.readinto(view)  # type: ignore[attr-defined]  # both kinds of stream have it
        if not count:
            raise DataError(f"{where}: ends early; the file is truncated, copy or write it again")
        view = view[count:]
