"""Raise the operator set to 17, below which quantization per channel and newer kernels are missing.

A model of a later operator set stays as it is: engines read all of them, and conversion downwards loses
operators.
"""

from typing import Final

import onnx
from onnx import version_converter

from edgekit_toolkit.onnx_graph.index import copy_model, opset

TARGET_OPSET: Final = 17


def run(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` in operator set 17, or as it is when that is its own or an older one.

    Raises:
        Exception: the converter has no way for an operator; its exceptions have no common base.
    """
    if opset(model) >= TARGET_OPSET:
        return copy_model(model)
    return version_converter.convert_version(model, TARGET_OPSET)
