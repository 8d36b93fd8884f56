"""Small ONNX models for tests of cuts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper


def branching_model() -> bytes:
    """A model that only runs whole: [1, 2, 32] to scores [1, 6], by one weight or another (control flow).

    Besides it gives the places that are above 1, whose number depends on the data.
    """
    rng = np.random.default_rng(8)
    branches = {}
    for name in ("then_branch", "else_branch"):
        weight = numpy_helper.from_array(rng.normal(size=(64, 6)).astype(np.float32), f"w_{name}")
        made = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        node = helper.make_node("MatMul", ["flat", weight.name], [name])
        branches[name] = (helper.make_graph([node], name, [], [made]), weight)
    weights = {one.name: numpy_helper.to_array(one) for _, one in branches.values()}
    nodes = [
        ("Flatten", ["x"], ["flat"]),
        ("ReduceMean", ["x"], ["mean"]),
        ("Less", ["mean", "zero"], ["is_low"]),
        ("If", ["is_low"], ["scores"]),
        ("Sub", ["x", "one"], ["rest"]),
        ("Relu", ["rest"], ["high"]),
        ("NonZero", ["high"], ["found"]),
        ("Cast", ["found"], ["places"]),
    ]
    return model_of(
        nodes, {"x": (1, 2, 32)}, ["scores", "places"],
        weights={"zero": np.float32(0), "one": np.float32(1), **weights},
        attributes={
            1: {"keepdims": 0},
            3: {name: graph for name, (graph, _) in branches.items()},
            7: {"to": TensorProto.FLOAT},
        },
    )  # fmt: skip


def model_of(
    nodes: Sequence[tuple[str, list[str], list[str]]],
    inputs: Mapping[str, Sequence[int | str]],
    outputs: Sequence[str],
    *,
    weights: Mapping[str, NDArray[Any]] | None = None,
    opset: int = 17,
    attributes: Mapping[int, Mapping[str, Any]] | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> bytes:
    """Return the content of a model of float32 tensors, unless `dtypes` says otherwise of an input or output.

    `attributes` are by the index of a node.
    """
    kinds = {name: helper.np_dtype_to_tensor_dtype(np.dtype(one)) for name, one in (dtypes or {}).items()}
    graph = helper.make_graph(
        [
            helper.make_node(op, read, made, **(attributes or {}).get(index, {}))
            for index, (op, read, made) in enumerate(nodes)
        ],
        "graph",
        [
            helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), list(shape))
            for name, shape in inputs.items()
        ],
        [helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (weights or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return bytes(model.SerializeToString())
