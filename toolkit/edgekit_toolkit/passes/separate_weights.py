"""Take weights out of the graph's inputs, and raise the file version to one that allows that.

Before IR 4 every initializer had to be an input too. Since then such an input is a default that a caller may
replace, and passes and engines optimise only weights that nobody can replace.
"""

from typing import Final

import onnx

from edgekit_toolkit.onnx_graph.index import copy_model
from edgekit_toolkit.onnx_graph.specs import real_inputs

IR_VERSION: Final = 8  # of opset 17; every onnxruntime that we support reads it


def run(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` whose only inputs are those that a caller must pass."""
    result = copy_model(model)
    inputs = list(real_inputs(result.graph))
    if len(inputs) != len(result.graph.input):
        del result.graph.input[:]
        result.graph.input.extend(inputs)
    result.ir_version = max(result.ir_version, IR_VERSION)
    return result
