"""Small models for the tests of rewrites and of quantization."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper, shape_inference

from edgekit_toolkit.models.ort_session import run_session, session_for

Array = NDArray[Any]
node = helper.make_node


def model_of(
    nodes: Sequence[NodeProto],
    weights: Mapping[str, Array],
    shapes: Mapping[str, Sequence[int | str]],
    outputs: Sequence[str] = ("y",),
    *,
    opset: int = 17,
    ir: int = 8,
    dtype: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    """A checked model with inferred shapes; `shapes` are those of its inputs."""
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    inputs = [helper.make_tensor_value_info(name, dtype, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(
        list(nodes),
        "small",
        inputs,
        [helper.make_tensor_value_info(name, dtype, None) for name in outputs],
        stored,
    )
    imports = [helper.make_opsetid("", opset)]
    made = helper.make_model(graph, opset_imports=imports, ir_version=ir)
    made = shape_inference.infer_shapes(made, strict_mode=True)
    onnx.checker.check_model(made, full_check=True)
    return made


def random_weight(rng: np.random.Generator, *shape: int) -> Array:
    """A float32 weight whose product keeps the size of its input."""
    fan_in = max(1, int(np.prod(shape[1:])))
    return (rng.normal(size=shape) / np.sqrt(fan_in)).astype(np.float32)


def run(model: onnx.ModelProto, feeds: Mapping[str, Array], *, optimise: bool = False) -> dict[str, Array]:
    """Outputs by name; without onnxruntime's own optimisations unless they are asked for."""
    session = session_for(model, threads=1, optimise=optimise)
    names = [value.name for value in model.graph.output]
    return dict(zip(names, run_session(session, dict(feeds), names), strict=True))


def random_feeds(model: onnx.ModelProto, rng: np.random.Generator, *, free: int = 2) -> dict[str, Array]:
    """Normal float32 values for each input; free dimensions get the size `free`."""
    stored = {tensor.name for tensor in model.graph.initializer}
    feeds = {}
    for value in model.graph.input:
        if value.name not in stored:
            dims = [dim.dim_value or free for dim in value.type.tensor_type.shape.dim]
            dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            feeds[value.name] = rng.normal(size=dims).astype(dtype)
    return feeds


def operators(model: onnx.ModelProto) -> list[str]:
    """Operators of the top-level graph in order."""
    return [item.op_type for item in model.graph.node]


def assert_valid(model: onnx.ModelProto) -> None:
    """Fail where the checker finds a fault, for instance a name that is made twice."""
    onnx.checker.check_model(model, full_check=True)


def snr_db(want: Array, got: Array) -> float:
    """Signal to noise ratio of `got` in dB."""
    error = float(((got.astype(np.float64) - want) ** 2).sum())
    return 10 * float(np.log10(float((want.astype(np.float64) ** 2).sum()) / max(error, 1e-300)))
