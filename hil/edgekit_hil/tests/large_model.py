"""A model that needs as much memory as the engine; the models of models/tiny need hardly any."""

from pathlib import Path
from typing import Final

import numpy as np

NAME: Final = "large"
_SIDE: Final = 224
_CHANNELS: Final = 32
_UNITS: Final = 2048


def write_large_model(path: Path) -> None:
    """Write an ONNX model with 16 MB of invented weights, and activations of 6 MB each."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    numbers = np.random.default_rng(0)
    shapes = {
        "first": (_CHANNELS, 3, 3, 3),
        "second": (_CHANNELS, _CHANNELS, 3, 3),
        "wide": (_UNITS, _CHANNELS),
        "square": (_UNITS, _UNITS),
    }
    weights = [
        numpy_helper.from_array(
            (numbers.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32), name
        )
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("Conv", ["image", "first"], ["a"], pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "second"], ["c"], pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("GlobalAveragePool", ["d"], ["e"]),
        helper.make_node("Flatten", ["e"], ["f"]),
        helper.make_node("Gemm", ["f", "wide"], ["g"], transB=1),
        helper.make_node("Relu", ["g"], ["h"]),
        helper.make_node("Gemm", ["h", "square"], ["scores"], transB=1),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, _SIDE, _SIDE])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, [1, _UNITS])
    graph = helper.make_graph(nodes, NAME, [image], [scores], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(path))
