"""The functions of the CUDA driver that are needed to run an engine, called by ctypes.

The library `libcuda.so.1` is part of every NVIDIA driver and of JetPack, see
docs/adr/0009-tensorrt-on-device.md.

Source: CUDA Driver API reference, sections 6.2 (initialization), 6.5 (devices), 6.7 (primary context), 6.13
(memory) and 6.20 (streams).
"""

import ctypes
from typing import Any, Final

import numpy as np

from edgekit_runtime.errors import BackendError
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.engines import EngineMissingError
from edgekit_runtime.tensors import Array

_LIBRARY: Final = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_pointer = ctypes.c_uint64  # CUdeviceptr
_handle = ctypes.c_void_p
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDeviceGetName": (ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
    "cuDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_handle), ctypes.c_int),
    "cuCtxSetCurrent": (_handle,),
    "cuStreamCreate": (ctypes.POINTER(_handle), ctypes.c_uint),
    "cuStreamSynchronize": (_handle,),
    "cuStreamDestroy_v2": (_handle,),
    "cuMemAlloc_v2": (ctypes.POINTER(_pointer), ctypes.c_size_t),
    "cuMemFree_v2": (_pointer,),
    "cuMemcpyHtoDAsync_v2": (_pointer, ctypes.c_void_p, ctypes.c_size_t, _handle),
    "cuMemcpyDtoHAsync_v2": (ctypes.c_void_p, _pointer, ctypes.c_size_t, _handle),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU for which an engine is built.

    Attributes:
        compute_capability: The compute capability, such as `8.7`.
    """

    name: str
    compute_capability: str


class Cuda:
    """The first GPU of this machine and its primary context, which TensorRT also uses.

    The methods raise `BackendError` if the driver reports an error.
    """

    __slots__ = ("_context", "_library", "gpu")

    def __init__(self, library: str = _LIBRARY) -> None:
        """Open the driver.

        Args:
            library: name or path of the driver's library.

        Raises:
            EngineMissingError: there is no driver, or no GPU.
        """
        try:
            self._library = ctypes.CDLL(library)
            for name, types in _SIGNATURES.items():
                getattr(self._library, name).argtypes = types
            self._call("cuInit", 0)
            device = ctypes.c_int()
            self._call("cuDeviceGet", ctypes.byref(device), 0)
            self.gpu = self._describe(device)
            self._context = _handle()
            # Never released: the process keeps one context for all sessions.
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        except (OSError, AttributeError, BackendError) as cause:
            raise EngineMissingError(
                f"backend 'tensorrt' needs an NVIDIA GPU with its driver: {cause}"
            ) from cause

    def _describe(self, device: ctypes.c_int) -> Gpu:
        name = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", name, len(name), device)
        numbers = []
        for attribute in (_MAJOR, _MINOR):
            value = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
            numbers.append(value.value)
        return Gpu(name.value.decode("utf-8", "replace"), "{}.{}".format(*numbers))

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(name))
            text = (name.value or b"unknown error").decode("ascii", "replace")
            raise BackendError(f"backend 'tensorrt': {function} failed with {code} ({text})")

    def enter(self) -> None:
        """Make the context of this GPU current. Each thread must call this before other methods."""
        self._call("cuCtxSetCurrent", self._context)

    def create_stream(self) -> int:
        stream = _handle()
        self._call("cuStreamCreate", ctypes.byref(stream), 1)  # CU_STREAM_NON_BLOCKING
        return int(stream.value or 0)

    def wait(self, stream: int) -> None:
        """Wait until all work queued on `stream` is done."""
        self._call("cuStreamSynchronize", stream)

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def allocate(self, size_bytes: int) -> int:
        """Return the address of new GPU memory of at least `size_bytes`."""
        address = _pointer()
        self._call("cuMemAlloc_v2", ctypes.byref(address), max(size_bytes, 1))  # 0 is refused
        return int(address.value)

    def free(self, address: int) -> None:
        """Free memory from `allocate`."""
        self._call("cuMemFree_v2", address)

    def copy_in(self, address: int, array: Array, stream: int) -> None:
        """Queue a copy of a C-contiguous array to the GPU. Keep the array until `wait` returns."""
        self._call("cuMemcpyHtoDAsync_v2", address, array.ctypes.data, array.nbytes, stream)

    def copy_out(self, array: Array, address: int, stream: int) -> None:
        """Queue a copy from the GPU into a C-contiguous array. The array is complete after `wait`."""
        self._call("cuMemcpyDtoHAsync_v2", array.ctypes.data, address, array.nbytes, stream)


def contiguous(array: Array) -> Array:
    """Return the array in C order, and copy it only if necessary."""
    packed: Array = np.ascontiguousarray(array).reshape(array.shape)  # it gives an array without axes one
    return packed
