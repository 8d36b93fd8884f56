"""The OpenVINO backend, which runs ONNX models on the CPU.

Importing this module does not import OpenVINO. OpenVINO runs without telemetry. Float models are computed in
float32, even if the processor supports bfloat16, unless the option `precision` allows bfloat16.
"""

import io
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Final, Literal

import numpy as np

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import BackendError, DataError, RefusedInputError
from edgekit_runtime.package.fixed_work import has_fixed_work_onnx
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.engines import MAX_THREADS, EngineMissingError
from edgekit_runtime.system.install_hint import install_command
from edgekit_runtime.system.mapped_file import parts
from edgekit_runtime.system.own_process import count_cores
from edgekit_runtime.system.resource_errors import check_lack
from edgekit_runtime.tensors import DTYPES, Array, TensorSpec

_TELEMETRY: Final = "openvino_telemetry"
_KINDS: Final = {"f": "float", "i": "int", "u": "uint"}
_ODD_DTYPES: Final = {"boolean": "bool"}
_RESULT_SUFFIX: Final = "/sink_port_0"


@dataclass(frozen=True, slots=True)
class OpenVinoOptions:
    """Options of OpenVINO for a model, in `backend.options` of a manifest.

    Attributes:
        threads: The number of threads per inference. None means one per core that the process may use.
        precision: The precision of float arithmetic. `bfloat16` only applies to processors with AVX-512 BF16
            or AMX. Other processors compute in float32, because emulation would be slow.
    """

    threads: Annotated[int | None, Range(1, MAX_THREADS)] = None
    precision: Literal["float32", "bfloat16"] = "float32"


class OpenVinoSession:
    """A model in OpenVINO. `run` may be called from several threads, but only one run is active at a time.

    Attributes:
        inputs: The specifications of the inputs. Free dimensions are named by input and axis, such as
            `image_0`.
        outputs: The specifications of the outputs.
        has_fixed_work: Whether the duration of a run does not depend on the input values, see `fixed_work`.
    """

    __slots__ = ("_checks", "_lock", "_make_tensor", "_request", "has_fixed_work", "inputs", "outputs")

    def __init__(self, model: bytes | memoryview | Path, options: OpenVinoOptions | None = None) -> None:
        """Load a model that contains its weights. `model` is the content or path of an ONNX model.

        Raises:
            BackendError: OpenVINO refused the model, or an input or output is not a plain tensor.
        """
        openvino = _import_engine()
        options = options or OpenVinoOptions()
        self._lock = threading.RLock()
        self._make_tensor = openvino.Tensor
        content = _read(model)
        try:
            in_bfloat16 = options.precision == "bfloat16" and computes_bfloat16()
            settings = {
                "INFERENCE_NUM_THREADS": options.threads or count_cores(),
                "NUM_STREAMS": 1,
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_PRECISION_HINT": "bf16" if in_bfloat16 else "f32",
                "ENABLE_CPU_PINNING": False,  # several models share the cores
            }
            core = openvino.Core()
            compiled = core.compile_model(core.read_model(io.BytesIO(content)), "CPU", settings)
            self._request: Any = compiled.create_infer_request()
        except Exception as cause:  # the bindings raise any error of the C++ side and pybind11
            check_lack(cause, "backend 'openvino': the model cannot be given to the engine")
            raise BackendError(f"backend 'openvino': OpenVINO refused the model: {cause}") from cause
        self.has_fixed_work = has_fixed_work_onnx(content)
        self.inputs: tuple[TensorSpec, ...] = tuple(map(_describe, compiled.inputs))
        self.outputs: tuple[TensorSpec, ...] = tuple(map(_describe, compiled.outputs))
        self._checks = {spec.name: spec.check for spec in self.inputs}

    @property
    def alone(self) -> AbstractContextManager[object]:
        """A context manager that blocks runs of other threads, so that a run inside it can be timed."""
        return self._lock

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model, see `Session.run`. The returned arrays belong to the caller."""
        if inputs.keys() != self._checks.keys():
            raise DataError(f"got inputs {sorted(inputs)}, expected {sorted(self._checks)}")
        for name, check in self._checks.items():
            check(inputs[name])
        with self._lock:
            if self._request is None:
                raise BackendError("backend 'openvino': the session is closed")
            try:
                for index, spec in enumerate(self.inputs):
                    # The engine reads the caller's array, or a copy if its strides or alignment are odd.
                    value = np.require(inputs[spec.name], requirements=("C", "A"))
                    self._request.set_input_tensor(index, self._make_tensor(value, shared_memory=True))
                self._request.infer()
                return {
                    spec.name: self._request.get_output_tensor(index).data.copy()
                    for index, spec in enumerate(self.outputs)
                }
            except (ValueError, RuntimeError) as cause:
                raise RefusedInputError(f"backend 'openvino': running the model failed: {cause}") from cause

    def close(self) -> None:
        """Free the model after the current run has ended. Further calls do nothing."""
        with self._lock:
            self._request = None


def computes_bfloat16() -> bool:
    """Return True if OpenVINO uses bfloat16 arithmetic on this processor."""
    capabilities: Sequence[str] = _import_engine().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return "BF16" in capabilities


def _import_engine() -> ModuleType:
    """Return OpenVINO without its telemetry, which would otherwise send an event when it is imported.

    Raises:
        EngineMissingError: OpenVINO is not installed, or its libraries cannot be loaded.
    """
    absent = _TELEMETRY not in sys.modules
    if absent:
        sys.modules[_TELEMETRY] = None  # type: ignore[assignment]  # so that its import fails
    try:
        import openvino
    except (
        Exception
    ) as cause:  # a broken installation fails in many ways, a mix of two releases by AttributeError
        raise EngineMissingError(
            f"backend 'openvino' needs openvino ({cause}): {install_command('openvino')}"
        ) from cause
    finally:
        if absent:
            with suppress(KeyError):
                del sys.modules[_TELEMETRY]
    engine: ModuleType = openvino
    return engine


def _read(model: bytes | memoryview | Path) -> bytes:
    if isinstance(model, Path):
        return model.read_bytes()
    return model if isinstance(model, bytes) else b"".join(parts(model))


def _describe(port: Any) -> TensorSpec:
    names, kind = port.get_names(), port.element_type.get_type_name()
    # A tensor may have several names; the node at the graph's end has the one of the model.
    name = port.get_node().get_friendly_name().removesuffix(_RESULT_SUFFIX)
    name = name if name in names else port.get_any_name()
    dtype = _ODD_DTYPES.get(kind) or f"{_KINDS.get(kind[0], kind[0])}{kind[1:]}"
    if dtype not in DTYPES:
        raise BackendError(f"backend 'openvino': '{name}' is a {kind}, which is no plain tensor")
    if port.partial_shape.rank.is_dynamic:
        raise BackendError(f"backend 'openvino': '{name}' has any number of dimensions")
    shape = (
        f"{name}_{axis}" if size.is_dynamic else size.get_length()
        for axis, size in enumerate(port.partial_shape)
    )
    return TensorSpec(name, dtype, tuple(shape))
