"""Runs a built engine on the GPU.

Engines whose output shapes depend on values (such as NonZero) are not supported, because their outputs cannot
be allocated before a run.
"""

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np

from edgekit_runtime.errors import BackendError, DataError
from edgekit_runtime.sessions.tensorrt.cuda import Cuda, contiguous
from edgekit_runtime.sessions.tensorrt.network import make_log
from edgekit_runtime.tensors import DTYPES, Array, TensorSpec

_DTYPES: Final = {
    "FLOAT": "float32",
    "HALF": "float16",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}


class EngineExecutor:
    """A `Session` of one engine. Several threads may call `run`, but only one run is executed at a time.

    Attributes:
        inputs: The inputs of `run`. A free dimension is named after its input and axis, such as `image_0`.
    """

    __slots__ = (
        "_buffers",
        "_context",
        "_cuda",
        "_engine",
        "_lock",
        "_log",
        "_ranges",
        "_runtime",
        "_stream",
        "inputs",
        "outputs",
    )

    def __init__(self, trt: Any, cuda: Cuda, plan: bytes) -> None:
        """Load the serialized engine `plan`, built for the GPU `cuda`; `trt` is the module `tensorrt`.

        Raises:
            BackendError: TensorRT refused the engine, or it has inputs or outputs that are not supported.
        """
        self._cuda, self._lock = cuda, threading.RLock()
        cuda.enter()
        self._log = make_log(trt)  # must live as long as the engine
        self._runtime: Any = trt.Runtime(self._log)  # so must this
        self._engine: Any = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise BackendError(f"backend 'tensorrt': the engine cannot be loaded: {self._log.text}")
        self._context: Any = self._engine.create_execution_context()
        if self._context is None:
            raise BackendError(f"backend 'tensorrt': no memory for the engine: {self._log.text}")
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        is_input = {name: self._engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT for name in names}
        self.inputs = tuple(self._spec(name) for name in names if is_input[name])
        self.outputs = tuple(self._spec(name) for name in names if not is_input[name])
        self._ranges = {
            spec.name: self._engine.get_tensor_profile_shape(spec.name, 0)
            for spec in self.inputs
            if spec.size_bytes is None
        }
        self._stream = cuda.create_stream()
        self._buffers: dict[str, tuple[int, int]] = {}  # name -> address and size in bytes

    def _spec(self, name: str) -> TensorSpec:
        dtype = str(self._engine.get_tensor_dtype(name)).rpartition(".")[2]
        if dtype not in _DTYPES:
            raise BackendError(f"backend 'tensorrt': '{name}' has type {dtype}, which numpy does not have")
        sizes = enumerate(self._engine.get_tensor_shape(name))
        return TensorSpec(
            name, _DTYPES[dtype], tuple(f"{name}_{a}" if size < 0 else int(size) for a, size in sizes)
        )

    def accepts(self, inputs: Mapping[str, Array]) -> bool:
        """Return whether each free dimension of the inputs is within the optimization profile."""
        for name, (low, _, high) in self._ranges.items():
            shape = np.shape(inputs.get(name, ()))
            if len(shape) == len(low):  # otherwise every engine refuses it
                sizes = zip(low, shape, high, strict=True)
                if not all(small <= size <= large for small, size, large in sizes):
                    return False
        return True

    @property
    def alone(self) -> AbstractContextManager[object]:
        """A context manager that makes the runs of other threads wait, so that a run can be timed."""
        return self._lock

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if inputs.keys() != {spec.name for spec in self.inputs}:
            raise DataError(f"got inputs {sorted(inputs)}, expected {sorted(s.name for s in self.inputs)}")
        for spec in self.inputs:
            spec.check(inputs[spec.name])
        with self._lock:
            if self._context is None:
                raise BackendError("backend 'tensorrt': the session is closed")
            self._cuda.enter()
            feeds = {name: contiguous(array) for name, array in inputs.items()}
            for name, array in feeds.items():
                self._set("set_input_shape", name, tuple(array.shape))
                self._cuda.copy_in(self._reserve(name, array.nbytes), array, self._stream)
            outputs = {spec.name: self._empty(spec) for spec in self.outputs}
            for name, array in outputs.items():
                self._reserve(name, array.nbytes)
            if not self._context.execute_async_v3(self._stream):
                raise BackendError(f"backend 'tensorrt': running the engine failed: {self._log.text}")
            for name, array in outputs.items():
                self._cuda.copy_out(array, self._buffers[name][0], self._stream)
            self._cuda.wait(self._stream)
            return outputs

    def _empty(self, spec: TensorSpec) -> Array:
        shape = tuple(self._context.get_tensor_shape(spec.name))
        if any(size < 0 for size in shape):
            raise BackendError(f"backend 'tensorrt': the shape of '{spec.name}' depends on values: {shape}")
        return np.empty(shape, DTYPES[spec.dtype])

    def _reserve(self, name: str, size_bytes: int) -> int:
        """Return the address of the tensor's buffer, after making it larger if it is too small."""
        address, reserved_bytes = self._buffers.get(name, (0, -1))
        if reserved_bytes < size_bytes:
            if address:
                self._cuda.free(self._buffers.pop(name)[0])
            address = self._cuda.allocate(size_bytes)
            self._buffers[name] = (address, size_bytes)
            self._set("set_tensor_address", name, address)
        return address

    def _set(self, method: str, name: str, value: object) -> None:
        if not getattr(self._context, method)(name, value):
            raise BackendError(
                f"backend 'tensorrt': {method} of '{name}' to {value} failed: {self._log.text}"
            )

    def close(self) -> None:
        """Wait for the current run, and free the engine and its memory. A second call does nothing."""
        with self._lock:
            if self._context is None:
                return
            self._cuda.enter()
            self._context = self._engine = self._runtime = None
            for address, _ in self._buffers.values():
                self._cuda.free(address)
            self._buffers.clear()
            self._cuda.destroy_stream(self._stream)
