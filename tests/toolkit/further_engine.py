"""The runtime's module of an engine that the project does not have: onnx's reference evaluator."""

from edgekit_runtime.system.engines import Engine, register


class ReferenceSession:
    """A session of an ONNX model; see `Session`."""

    def __init__(self, model, inputs, outputs):
        from onnx import load_model_from_string, version_converter
        from onnx.reference import ReferenceEvaluator

        current = version_converter.convert_version(load_model_from_string(bytes(model)), 21)
        self._evaluator = ReferenceEvaluator(current)
        self.inputs, self.outputs = inputs, outputs

    def run(self, inputs):
        return dict(zip(self._evaluator.output_names, self._evaluator.run(None, dict(inputs)), strict=True))

    def close(self):
        self._evaluator = None


def _open(package, choice, threads):
    return ReferenceSession(package.read(choice.artifact), package.manifest.inputs, package.manifest.outputs)


REFERENCE = register(
    Engine(
        name="reference",
        title="the reference evaluator",
        modules=("onnx",),
        distributions=("onnx",),
        open=_open,
        platform="onnx_reference",
        advice="python -m pip install onnx",
        file_format="onnx",
    )
)
