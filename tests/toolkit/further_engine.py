"""The runtime's module of an engine that the project does not have: onnx's own evaluator."""

from edgekit_runtime.system.engines import Engine, Installation
from edgekit_runtime.tensors import TensorSpec


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
