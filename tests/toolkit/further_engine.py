"""The runtime's module of two engines that the project does not have: OpenVINO, and onnx's own evaluator.

The evaluator stands in where OpenVINO is not installed (`python -m pip install openvino`).
"""

from functools import partial

import numpy as np

from edgekit_runtime.errors import BackendError
from edgekit_runtime.system.engines import Engine, Installation
from edgekit_runtime.tensors import TensorSpec

OPENVINO_DTYPES = {"f32": "float32", "f16": "float16", "i8": "int8", "u8": "uint8", "i64": "int64"}


class ReferenceSession:
    """A session of an ONNX model; see `Session`."""

    def __init__(self, model, _options=None, _threads=None):
        from onnx import load_model_from_string, version_converter
        from onnx.reference import ReferenceEvaluator

        current = version_converter.convert_version(load_model_from_string(bytes(model)), 21)
        self._evaluator = ReferenceEvaluator(current)
        self.inputs, self.outputs = (
            tuple(
                TensorSpec(
                    value.name,
                    "float32",
                    tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim),
                )
                for value in values
            )
            for values in (current.graph.input, current.graph.output)
        )

    def run(self, inputs):
        return dict(zip(self._evaluator.output_names, self._evaluator.run(None, dict(inputs)), strict=True))

    def close(self):
        self._evaluator = None


class OpenVinoSession:
    """A session of an ONNX model; see `Session`."""

    def __init__(self, model, _options=None, threads=None):
        import openvino

        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads or 1}
        core = openvino.Core()
        try:
            compiled = core.compile_model(core.read_model(bytes(model), b""), "CPU", settings)
        except RuntimeError as cause:
            raise BackendError(f"OpenVINO refused the model: {cause}") from cause
        self._request, self._make_tensor = (
            compiled.create_infer_request(),
            partial(openvino.Tensor, shared_memory=True),
        )
        self.inputs, self.outputs = (
            tuple(map(_describe, ports)) for ports in (compiled.inputs, compiled.outputs)
        )

    def run(self, inputs):
        for row, spec in enumerate(self.inputs):
            self._request.set_input_tensor(row, self._make_tensor(np.ascontiguousarray(inputs[spec.name])))
        self._request.infer()
        return {
            spec.name: self._request.get_output_tensor(row).data.copy()
            for row, spec in enumerate(self.outputs)
        }

    def close(self):
        self._request = None


def _describe(port):
    name, dims = port.get_any_name(), enumerate(port.partial_shape)
    shape = tuple(f"{name}_{axis}" if dim.is_dynamic else dim.get_length() for axis, dim in dims)
    return TensorSpec(name, OPENVINO_DTYPES[port.element_type.get_type_name()], shape)


# Not registered here: every process of the tests imports this module, and few tests know a further engine.
REFERENCE = Engine(
    name="reference",
    title="the reference evaluator",
    installation=Installation(
        modules=("onnx",), distributions=("onnx",), advice="python -m pip install onnx"
    ),
    open_model=ReferenceSession,
    platform="onnx_reference",
    file_format="onnx",
)
OPENVINO = Engine(
    name="openvino",
    title="OpenVINO",
    installation=Installation(
        modules=("openvino",), distributions=("openvino",), advice="python -m pip install openvino"
    ),
    open_model=OpenVinoSession,
    platform="onnx_openvino",
    file_format="onnx",
)
