"""Small ONNX models for tests of cuts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper


def model_of(
    nodes: Sequence[tuple[str, list[str], list[str]]],
    inputs: Mapping[str, Sequence[int | str]],
    outputs: Sequence[str],
    *,
    weights: Mapping[str, NDArray[Any]] | None = None,
    opset: int = 17,
    attributes: Mapping[int, Mapping[str, Any]] | None = None,
) -> bytes:
    """Return the content of a model of float32 tensors; `attributes` are by the index of a node."""
    graph = helper.make_graph(
        [
            helper.make_node(op, read, made, **(attributes or {}).get(index, {}))
            for index, (op, read, made) in enumerate(nodes)
        ],
        "graph",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))
            for name, shape in inputs.items()
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (weights or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return bytes(model.SerializeToString())
