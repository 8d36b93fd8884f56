"""Stand-ins for what a machine without an NVIDIA GPU lacks: the driver, a loaded engine, a machine."""

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgekit_runtime.encryption.container import ContentKey
from edgekit_runtime.errors import BackendError
from edgekit_runtime.sessions.tensorrt import Machine, TensorRtOptions
from edgekit_runtime.sessions.tensorrt.build import BuiltEngines
from edgekit_runtime.sessions.tensorrt.cache import EngineCache
from edgekit_runtime.sessions.tensorrt.cuda import Gpu
from edgekit_runtime.tensors import TensorSpec

WEIGHT = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32)

# Memory of the host instead of the GPU's; copies and streams are done at once, and counted.
DRIVER = r"""
#include <stdlib.h>
#include <string.h>
#include <stdint.h>
int live_blocks, live_streams, fail_with;
static int context;
int cuInit(unsigned flags) { return fail_with; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "Fake Orin", size); return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 75 ? 8 : 7; return 0; }
int cuDevicePrimaryCtxRetain(void **made, int device) { *made = &context; return 0; }
static __thread void *current;
int cuCtxSetCurrent(void *given) { current = given; return given == &context ? 0 : 201; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = malloc(1); live_streams++; return 0; }
int cuStreamSynchronize(void *stream) { return current ? 0 : 201; }
int cuStreamDestroy_v2(void *stream) { free(stream); live_streams--; return 0; }
int cuMemAlloc_v2(uint64_t *made, size_t size) {
    if (!current) return 201;
    if (size > (1u << 20)) return 2;
    *made = (uint64_t)malloc(size); live_blocks++; return 0;
}
int cuMemFree_v2(uint64_t block) { free((void *)block); live_blocks--; return 0; }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, void *stream) {
    memcpy((void *)to, from, size); return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, void *stream) {
    memcpy(to, (void *)from, size); return 0;
}
int cuGetErrorName(int code, const char **name) {
    *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 100 ? "CUDA_ERROR_NO_DEVICE" : "OTHER";
    return 0;
}
"""


def compile_driver(folder: Path) -> Path:
    """Return the path of a library that stands for `libcuda.so.1`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in of the CUDA driver")
    (folder / "driver.c").write_text(DRIVER)
    path = folder / "libcuda_fake.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, folder / "driver.c"], check=True)
    return path


class FakeContext:
    """Computes y = x @ WEIGHT * factor at the addresses that it is given, as an execution context does."""

    def __init__(self, engine: "FakeEngine") -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return shape[0] <= self.engine.max_batch

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1, 2) if self.engine.unknown_output else (self.shapes["x"][0], 2)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        rows = self.shapes["x"][0]
        x = np.frombuffer((ctypes.c_float * (rows * 4)).from_address(self.addresses["x"]), np.float32)
        y = (ctypes.c_float * (rows * 2)).from_address(self.addresses["y"])
        np.frombuffer(y, np.float32)[:] = (x.reshape(rows, 4) @ WEIGHT * self.engine.factor).reshape(-1)
        return bool(self.engine.factor)


class FakeEngine:
    def __init__(self, plan: bytes) -> None:
        self.factor = float(plan)
        self.max_batch, self.unknown_output = 8, False
        self.num_io_tensors = 2

    def get_tensor_name(self, index: int) -> str:
        return "xy"[index]

    def get_tensor_mode(self, name: str) -> str:
        return "in" if name == "x" else "out"

    def get_tensor_dtype(self, name: str) -> str:
        return "DataType.FLOAT"

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1, 4) if name == "x" else (-1, 2)

    def get_tensor_profile_shape(self, name: str, profile: int) -> Any:
        return ((1, 4), (1, 4), (self.max_batch, 4))

    def create_execution_context(self) -> FakeContext:
        return FakeContext(self)


class FakeLogger:
    Severity = SimpleNamespace(ERROR=1, INTERNAL_ERROR=0, WARNING=2)


class FakeRuntime:
    """Loads plans that hold a number, and refuses others."""

    def __init__(self, log: Any) -> None:
        self.log = log

    def deserialize_cuda_engine(self, plan: bytes) -> FakeEngine | None:
        try:
            return FakeEngine(plan)
        except ValueError:
            self.log.log(1, "magicTag does not match")
            return None


FAKE_TENSORRT: Any = SimpleNamespace(
    __version__="10.3.0", ILogger=FakeLogger, Runtime=FakeRuntime, TensorIOMode=SimpleNamespace(INPUT="in")
)


class FakeExecutor:
    """An engine at the boundary of `Machine.load`: its plan is `FACTOR@SECONDS`, of result and clock."""

    inputs: tuple[TensorSpec, ...] = (TensorSpec("x", "float32", ("x_0", 4)),)
    outputs: tuple[TensorSpec, ...] = (TensorSpec("y", "float32", ("y_0", 2)),)

    def __init__(self, plan: bytes) -> None:
        factor, seconds = plan.decode().split("@")
        self.factor, self.seconds = np.float32(factor), float(seconds)
        self.closed = False

    def accepts(self, inputs: Mapping[str, Any]) -> bool:
        return len(inputs["x"]) <= 8

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        if self.closed:
            raise BackendError("closed")
        threading.Event().wait(self.seconds)
        return {"y": inputs["x"] @ WEIGHT * self.factor}

    def close(self) -> None:
        self.closed = True


class FixedExecutor(FakeExecutor):
    inputs = (TensorSpec("x", "float32", (1, 4)),)
    outputs = (TensorSpec("y", "float32", (1, 2)),)


class Bench:
    """A `Machine` whose builder gives what a test says, and which remembers what was asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plans: dict[str, bytes] = {"int8": b"1@0"}
        self.local_key: ContentKey | None = None  # of packages that are opened from now on
        self.refused: dict[str, str] = {}
        self.error: Exception | None = None
        self.executor: type[FakeExecutor] = FakeExecutor
        self.gate = threading.Event()  # building ends when it is set
        self.gate.set()
        self.builds: list[tuple[bytes, ...]] = []
        self.loaded: list[FakeExecutor] = []

    def _build(
        self, model: bytes, options: TensorRtOptions, *, timings: tuple[bytes, ...], stop: threading.Event
    ) -> BuiltEngines:
        from edgekit_runtime.sessions.tensorrt.cache import StoppedError

        self.builds.append(timings)
        while not self.gate.wait(0.01):
            if stop.is_set():
                raise StoppedError
        if self.error is not None:
            raise self.error
        return BuiltEngines(self.plans, self.refused, b"timing %d" % len(self.builds))

    def _load(self, plan: bytes) -> FakeExecutor:
        self.loaded.append(self.executor(plan))
        return self.loaded[-1]

    def machine(self, **changes: Any) -> Machine:
        build: Callable[..., BuiltEngines] = self._build
        fields: dict[str, Any] = {
            "version": "10.3.0",
            "gpu": Gpu("Orin", "8.7"),
            "power_mode": "NV Power Mode: MAXN 0",
            "cache": EngineCache(self.folder),
            "build": build,
            "load": self._load,
        }
        return Machine(**{**fields, **changes})
