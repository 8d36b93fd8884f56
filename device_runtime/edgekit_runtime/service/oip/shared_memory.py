"""Memory that clients share with the service. Clients register a region once and then name it in requests.

A memfd is mapped into memory. It must be sealed against shrinking, because an access beyond the end of a
mapped file crashes the process. It must not have huge pages, because an access also crashes the process when
no huge page is free. POSIX segments cannot be sealed, so they are not mapped. They are read and written with
system calls, which report an error if the segment was shrunk.
"""

import fcntl
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from edgekit_runtime.errors import RequestError
from edgekit_runtime.service.options.resources import RegionLimits
from edgekit_runtime.system.resource_errors import check_lack
from edgekit_runtime.tensors import Array

_POSIX_FOLDER: Final = Path("/dev/shm")  # noqa: S108  # where POSIX has its segments
_POSIX_KEY: Final = re.compile(r"/?([A-Za-z0-9_.+-]{1,200})", re.ASCII)


class Region:
    """A registered region of shared memory.

    Attributes:
        key: The name of the POSIX segment. For a memfd, any text that the client chose.
        offset_bytes: The start of the region in its file.
        descriptor: The open file descriptor of the region, or -1 after the region was unregistered.
        owner: The id of the process that sent the memfd, or None.
    """

    __slots__ = ("_mapping", "descriptor", "is_mapped", "key", "name", "offset_bytes", "owner", "size_bytes")

    def __init__(self, name: str, key: str, descriptor: int, *, offset_bytes: int, size_bytes: int) -> None:
        self.name = name
        self.key = key
        self.descriptor = descriptor
        self.offset_bytes = offset_bytes
        self.size_bytes = size_bytes
        self.is_mapped = False
        self.owner: int | None = None
        self._mapping: mmap.mmap | None = None

    def map(self) -> None:
        """Map the file into memory.

        Raises:
            RequestError: The file cannot be mapped for reading and writing.
            UnavailableError: The system is out of memory or file descriptors.
        """
        try:
            self._mapping = mmap.mmap(self.descriptor, self.offset_bytes + self.size_bytes)
        except (OSError, ValueError) as cause:
            check_lack(cause, f"region '{self.name}': cannot be mapped")
            raise _refusal(self.name, f"cannot be mapped to read and write: {cause}") from cause
        self.is_mapped = True

    def read(self, dtype: "np.dtype[Any]", shape: tuple[int, ...], offset_bytes: int) -> Array:
        """Return the array at `offset_bytes`. It is a view if the memory is mapped and aligned, else a copy.

        Raises:
            RequestError: The array does not lie within the region, or the segment was shrunk.
        """
        size_bytes = dtype.itemsize
        for size in shape:
            size_bytes *= size
        self.check_place(offset_bytes, size_bytes)
        start = self.offset_bytes + offset_bytes
        if self._mapping is not None:
            array: Array = np.ndarray(shape, dtype, self._mapping, start)
            return array if array.flags.aligned else array.copy()
        array = np.empty(shape, dtype)
        if size_bytes and os.preadv(self.descriptor, [_view(array)], start) != size_bytes:
            raise _refusal(self.name, f"its segment '{self.key}' has become smaller")
        return array

    def write(self, array: Array, offset_bytes: int) -> None:
        """Copy a C-contiguous array to `offset_bytes`.

        Raises:
            RequestError: The array does not fit, the region was unregistered, or the segment was shrunk.
        """
        self.check_place(offset_bytes, array.nbytes)
        start = self.offset_bytes + offset_bytes
        if self.descriptor < 0:  # its client may use the memory for another call already
            raise _refusal(self.name, "it was unregistered before the answer came")
        if self._mapping is not None:
            np.ndarray(array.shape, array.dtype, self._mapping, start)[...] = array
            return
        if os.fstat(self.descriptor).st_size < start + array.nbytes:  # writing would make it longer
            raise _refusal(self.name, f"its segment '{self.key}' has become smaller")
        try:
            written_bytes = os.pwritev(self.descriptor, [_view(array)], start) if array.size else 0
        except OSError as cause:  # a segment with holes, and no memory left to fill them
            raise _refusal(self.name, f"cannot be written: {cause.strerror}") from cause
        if written_bytes != array.nbytes:
            raise _refusal(self.name, f"its segment '{self.key}' has become smaller")

    def fileno(self) -> int:
        """Return the file descriptor, or -1 if the file is closed."""
        return self.descriptor

    def close(self) -> None:
        """Close the file. Running requests can still use the mapped memory."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def check_place(self, offset_bytes: int, size_bytes: int) -> None:
        """Check that the `size_bytes` bytes at `offset_bytes` lie within the region.

        Raises:
            RequestError: They do not lie within the region.
        """
        if offset_bytes < 0 or offset_bytes + size_bytes > self.size_bytes:
            raise _refusal(
                self.name, f"has {self.size_bytes} bytes, expected {size_bytes} from offset {offset_bytes}"
            )


class Regions:
    """All registered regions by name.

    Attributes:
        on_add: Called with each added region, or None.
        on_remove: Called with the name of each removed region, or None.
    """

    __slots__ = ("_limits", "_regions", "on_add", "on_remove")

    def __init__(self, limits: RegionLimits) -> None:
        self._limits = limits
        self._regions: dict[str, Region] = {}
        self.on_add: Callable[[Region], None] | None = None
        self.on_remove: Callable[[str], None] | None = None

    @property
    def allows_posix(self) -> bool:
        """Whether clients may register POSIX segments."""
        return self._limits.allows_posix

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions.values())

    def find(self, name: str, *, is_local: bool) -> Region:
        """Return the region `name`.

        Args:
            name: The name of the region.
            is_local: Whether the client uses the Unix socket. Other clients cannot use memfd regions.

        Raises:
            RequestError: There is no such region for this client.
        """
        region = self._regions.get(name)
        if region is None or (region.is_mapped and not is_local):
            raise RequestError(400, f"shared memory region '{name}' is not registered")
        return region

    def add_memfd(
        self, name: str, key: str, descriptor: int, *, offset_bytes: int, size_bytes: int, owner: int
    ) -> Region:
        """Register the memfd `descriptor`. On success, the region owns the descriptor.

        A client that reconnects can register the same memfd again under the same name.

        Args:
            name: The name of the region.
            key: Any text that the client chose.
            descriptor: The file descriptor of the memfd.
            offset_bytes: The start of the region in the memfd.
            size_bytes: The size of the region.
            owner: The id of the process that sent the memfd.

        Raises:
            RequestError: The name is in use, a limit is exceeded, or the memfd is invalid. A memfd must be
                sealed against shrinking, must not have huge pages, and must contain the region.
            UnavailableError: The system is out of memory or file descriptors.
        """
        previous = self._regions.get(name)
        if previous is not None and os.path.sameopenfile(previous.descriptor, descriptor):
            self.remove(previous)
        self._check_new(name, offset_bytes, size_bytes, owner)
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as cause:
            raise _refusal(name, "the descriptor is no memfd that can be sealed") from cause
        if not seals & fcntl.F_SEAL_SHRINK:
            raise _refusal(name, "the memfd can be shrunk; seal it with F_SEAL_SHRINK before registering")
        if os.fstatvfs(descriptor).f_bsize > mmap.PAGESIZE:
            raise _refusal(
                name,
                "the memfd has huge pages, which punched holes remove; make it without MFD_HUGETLB",
            )
        _check_size(name, descriptor, offset_bytes + size_bytes)
        region = Region(name, key, descriptor, offset_bytes=offset_bytes, size_bytes=size_bytes)
        region.owner = owner
        region.map()
        self.put(region)
        return region

    def add_posix(self, name: str, key: str, *, offset_bytes: int, size_bytes: int) -> Region:
        """Register the POSIX segment `key`.

        Raises:
            RequestError: POSIX segments are not allowed, the segment is missing or too small, the name is in
                use, or a limit is exceeded.
            UnavailableError: The system is out of memory or file descriptors.
        """
        if not self._limits.allows_posix:
            raise _refusal(
                name,
                "no descriptor came with the request, and segments by key are not allowed"
                " here; pass a memfd over the Unix socket, or set allows_posix",
            )
        self._check_new(name, offset_bytes, size_bytes)
        match = _POSIX_KEY.fullmatch(key)
        if match is None or match[1] in (".", ".."):
            raise _refusal(name, f"{key!r} is no key of a segment")
        try:
            descriptor = os.open(
                _POSIX_FOLDER / match[1], os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            )
        except OSError as cause:
            check_lack(cause, f"region '{name}': cannot open segment '{key}'")
            raise _refusal(name, f"cannot open segment '{key}': {cause.strerror}") from cause
        try:
            _check_size(name, descriptor, offset_bytes + size_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        region = Region(name, key, descriptor, offset_bytes=offset_bytes, size_bytes=size_bytes)
        self.put(region)
        return region

    def put(self, region: Region) -> None:
        """Register a region without checks. No other region may have its name."""
        self._regions[region.name] = region
        if self.on_add is not None:
            self.on_add(region)

    def of(self, *, is_local: bool) -> list[Region]:
        """Return the regions that a client may use: all if `is_local` (Unix socket), else no memfds."""
        return [region for region in self if is_local or not region.is_mapped]

    def remove(self, region: Region) -> None:
        """Unregister `region` if it is registered. Running requests can still use its mapped memory."""
        region.close()
        if self._regions.get(region.name) is region:
            del self._regions[region.name]
            if self.on_remove is not None:
                self.on_remove(region.name)

    def remove_all(self) -> None:
        for region in list(self):
            self.remove(region)

    def _check_new(self, name: str, offset_bytes: int, size_bytes: int, owner: int | None = None) -> None:
        """Check the name, sizes and limits.

        A quarter of the limits is reserved for memfds of other processes.
        """
        if name in self._regions:
            raise _refusal(name, "it is registered already; unregister it first")
        if offset_bytes < 0 or size_bytes < 1:
            raise _refusal(name, f"offset {offset_bytes}, byte_size {size_bytes}, expected at least 0 and 1")
        most, most_bytes = self._limits.max_regions, self._limits.max_region_bytes
        needed_bytes = offset_bytes + size_bytes
        _check_limits(name, needed_bytes, list(self), most, most_bytes)
        if owner is not None:
            own = [region for region in self if region.owner == owner]
            _check_limits(name, needed_bytes, own, most - most // 4, most_bytes - most_bytes // 4)


def _check_limits(name: str, needed_bytes: int, regions: list[Region], most: int, most_bytes: int) -> None:
    used_bytes = sum(region.offset_bytes + region.size_bytes for region in regions)
    if len(regions) >= most or used_bytes + needed_bytes > most_bytes:
        raise _refusal(
            name,
            f"needs {needed_bytes} bytes beside {len(regions)} regions of {used_bytes} bytes; the limit is"
            f" {most} regions of {most_bytes} bytes; one process may use three quarters of all",
        )


def _refusal(name: str, reason: str) -> RequestError:
    return RequestError(400, f"region '{name}': {reason}")


def _view(array: Array) -> memoryview:
    return memoryview(array)  # type: ignore[arg-type]  # it has the buffer protocol


def _check_size(name: str, descriptor: int, needed_bytes: int) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise _refusal(name, "not a file of memory")
    if status.st_size < needed_bytes:
        raise _refusal(name, f"its memory has {status.st_size} bytes, expected {needed_bytes} at least")
