"""The LiteRT backend, which runs `.tflite` models on the CPU.

The engine is ai-edge-litert. If it is not installed, tflite-runtime is used, which needs numpy < 2. The
engine is imported only when a session is opened. If a model has several signatures, only its first subgraph
runs, as with `Interpreter.invoke`.

The interpreter checks the structure of a file, but not the references of its operators. Some damaged files
can crash the process (docs/explanation/litert.md). Run files that you do not trust in a separate process.
"""

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import BackendError, DataError, RefusedInputError
from edgekit_runtime.package.fixed_work import Graph, Operation, has_fixed_work
from edgekit_runtime.records import dataclass
from edgekit_runtime.sessions.litert.engine import load_interpreter
from edgekit_runtime.sessions.litert.tensors import ModelTensor, read_tensors
from edgekit_runtime.system.engines import MAX_THREADS
from edgekit_runtime.tensors import Array, TensorSpec


@dataclass(frozen=True, slots=True)
class LiteRtOptions:
    """Options of LiteRT for a model, in `backend.options` of a manifest.

    Attributes:
        threads: The number of threads per inference. By default, the engine chooses one thread.
        xnnpack: Whether to use XNNPACK for the operators that it supports, instead of the engine's kernels.
        float_io: Whether quantized inputs and outputs are converted to float32, see `LiteRtSession`.
    """

    threads: Annotated[int | None, Range(1, MAX_THREADS)] = None
    xnnpack: bool = True
    float_io: bool = True


class LiteRtSession:
    """A model in LiteRT. `run` may be called from several threads, but only one run is active at a time.

    If the file has exactly one signature, and it covers all inputs and outputs, the names come from the
    signature. Otherwise they are the tensor names of the file, such as `serving_default_x:0`.

    With `options.float_io`, quantized inputs and outputs are float32 for the caller, and `run` converts them.
    This is supported for int8, uint8 and int16 tensors with a single scale. Without this option, the dtypes
    are those of the file. Integer tensors without a scale are never converted.

    Attributes:
        inputs: The specifications of the inputs. Free dimensions are named by input and axis, such as
            `image_0`.
        outputs: The specifications of the outputs.
        has_fixed_work: Whether the duration of a run does not depend on the input values, see `fixed_work`.
    """

    __slots__ = (
        "_checks",
        "_inputs",
        "_interpreter",
        "_lock",
        "_outputs",
        "_shapes",
        "has_fixed_work",
        "inputs",
        "outputs",
    )

    def __init__(self, model: bytes | memoryview | Path, options: LiteRtOptions | None = None) -> None:
        """Load a model. `model` is the content or path of a `.tflite` file.

        Raises:
            EngineMissingError: Neither ai-edge-litert nor tflite-runtime can be imported.
            BackendError: The engine refused the model, or an input or output is not a plain tensor.
        """
        options = options or LiteRtOptions()
        self._lock = threading.RLock()
        self._interpreter: Any = load_interpreter(model, threads=options.threads, xnnpack=options.xnnpack)
        self._inputs, self._outputs = read_tensors(self._interpreter, float_io=options.float_io)
        self.has_fixed_work = _has_fixed_work(self._interpreter)
        self.inputs: tuple[TensorSpec, ...] = tuple(tensor.spec for tensor in self._inputs)
        self.outputs: tuple[TensorSpec, ...] = tuple(tensor.spec for tensor in self._outputs)
        self._checks = {tensor.spec.name: tensor.spec.check for tensor in self._inputs}
        # Shapes of the inputs as allocated; empty after a failure, so that the next run allocates again.
        self._shapes = [tensor.shape for tensor in self._inputs]

    @property
    def alone(self) -> AbstractContextManager[object]:
        """A context manager that blocks runs of other threads, so that a run inside it can be timed."""
        return self._lock

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model, see `Session.run`. The returned arrays belong to the caller.

        If the shapes differ from the last run, the memory of the model is allocated again. This takes about
        as long as a first run. Empty arrays, and NaN in quantized inputs, raise `DataError`.
        """
        if inputs.keys() != self._checks.keys():
            raise DataError(f"got inputs {sorted(inputs)}, expected {sorted(self._checks)}")
        values = [_to_engine(tensor, inputs[tensor.spec.name]) for tensor in self._inputs]
        shapes = [value.shape for value in values]
        with self._lock:
            interpreter = self._interpreter
            if interpreter is None:
                raise BackendError("backend 'litert': the session is closed")
            try:
                if shapes != self._shapes:
                    self._fit(shapes)
                for tensor, value in zip(self._inputs, values, strict=True):
                    interpreter.set_tensor(tensor.index, value)
                interpreter.invoke()
                results = [interpreter.get_tensor(tensor.index) for tensor in self._outputs]  # copies
            except (ValueError, RuntimeError) as cause:
                self._shapes = []
                raise RefusedInputError(f"backend 'litert': running the model failed: {cause}") from cause
        return {
            tensor.spec.name: value if tensor.codes is None else tensor.codes.decode(value)
            for tensor, value in zip(self._outputs, results, strict=True)
        }

    def _fit(self, shapes: list[tuple[int, ...]]) -> None:
        for tensor, shape in zip(self._inputs, shapes, strict=True):
            self._interpreter.resize_tensor_input(tensor.index, shape, strict=True)
        self._interpreter.allocate_tensors()
        self._shapes = shapes

    def close(self) -> None:
        """Free the model after the current run has ended. Further calls do nothing."""
        with self._lock:
            self._interpreter = None


def _has_fixed_work(interpreter: Any) -> bool:
    try:
        nodes = interpreter._get_ops_details()
    except AttributeError:  # the engine does not state its operators
        return False
    operations = [
        Operation(node["op_name"], tuple(map(int, node["inputs"])), tuple(map(int, node["outputs"])))
        for node in nodes
    ]
    return has_fixed_work(Graph(operations, [detail["index"] for detail in interpreter.get_input_details()]))


def _to_engine(tensor: ModelTensor, value: Array) -> Array:
    tensor.spec.check(value)
    if 0 in value.shape:
        # Kernels divide by sizes; the engine does not promise to refuse an empty array.
        raise DataError(
            f"tensor '{tensor.spec.name}': got shape {list(value.shape)}, expected sizes of at least 1"
        )
    return value if tensor.codes is None else tensor.codes.encode(value)
