"""The graph that onnxruntime runs after its optimisations, with the size of every tensor.

The memory of a model depends on onnxruntime's fusions, constant folding and tensor layouts. This module
therefore lets onnxruntime optimise the model, without running it. In the blocked layout, channels are padded
to a multiple of this machine's vector width, which may differ from that of other CPUs.
"""

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx
import onnxruntime
from onnx import helper

from edgekit_runtime.errors import ModelError
from edgekit_runtime.sessions.ort import WRONG_REWRITES
from edgekit_runtime.tensors import DTYPES
from edgekit_toolkit.onnx_graph.index import copy_model
from edgekit_toolkit.onnx_graph.ort_options import ort_options, stated_options
from edgekit_toolkit.onnx_graph.specs import bound_shape, real_inputs, tensor_specs
from edgekit_toolkit.onnx_graph.traversal import bodies, stored_tensors
from edgekit_toolkit.openings.model_opening import check_opening

BLOCKED_DOMAIN: Final = "com.microsoft.nchwc"
_SIZES: Final = {"float": 4, "double": 8, "float16": 2, "bfloat16": 2, "bool": 1} | {
    f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)
}
_LOG_FATAL_ONLY: Final = 4


@dataclass(frozen=True, slots=True)
class EngineTensor:
    """A tensor of the optimised graph.

    Attributes:
        shape: The shape, or None if it depends on the input data.
        item_bytes: The size of one element, or 0 for strings, sequences and maps.
    """

    shape: tuple[int, ...] | None
    item_bytes: int

    @property
    def size_bytes(self) -> int:
        """The size in bytes, or 0 if the shape is unknown."""
        return 0 if self.shape is None else math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGraph:
    """The graph of a model after onnxruntime's optimisations.

    Attributes:
        nodes: The nodes in execution order.
        tensors: The inputs, outputs and intermediate tensors by name.
        nested_bytes: The size of the constants inside control flow. The other attributes ignore control flow.
    """

    nodes: tuple[onnx.NodeProto, ...]
    tensors: Mapping[str, EngineTensor]
    weights: Mapping[str, EngineTensor]
    inputs: frozenset[str]
    outputs: frozenset[str]
    nested_bytes: int


def optimise_as_engine(
    model: onnx.ModelProto, dims: Mapping[str, int] | None = None, *, blocked_layout: bool = True
) -> EngineGraph:
    """Return the graph of `model` after onnxruntime's optimisations for the CPU.

    Args:
        model: An ONNX model without external data. It is not changed.
        dims: The sizes of the free dimensions by name, see `bound_shape`.
        blocked_layout: Whether convolutions use a layout in blocks of channels, as on x86-64 but not on Arm.

    Raises:
        ModelError: onnxruntime refuses the model.
        DataError: A free dimension has no size.
    """
    bound = _bind(model, dims or {})
    try:
        try:
            optimised = _optimise(bound, blocked_layout)
        except Exception:
            # Bound sizes can contradict a branch of If that is never taken with them; free ones do not.
            optimised = _optimise(model, blocked_layout)
        values = _infer(optimised)
    except Exception as error:  # onnxruntime's exceptions have no common base but this
        raise ModelError(f"onnxruntime refused the model: {error}") from error
    branched = {name for node in optimised.graph.node if bodies(node) for name in node.output}
    return EngineGraph(
        nodes=tuple(optimised.graph.node),
        tensors={value.name: _tensor(value, value.name in branched) for value in values} | _inputs(bound),
        weights={
            tensor.name: EngineTensor(
                tuple(tensor.dims), helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
            )
            for tensor in optimised.graph.initializer
        },
        inputs=frozenset(value.name for value in real_inputs(optimised.graph)),
        outputs=frozenset(value.name for value in optimised.graph.output),
        nested_bytes=_nested_bytes(optimised),
    )


def _bind(model: onnx.ModelProto, dims: Mapping[str, int]) -> onnx.ModelProto:
    shapes = {spec.name: bound_shape(spec, dims) for spec in tensor_specs(model)[0]}
    bound = copy_model(model)
    for value in real_inputs(bound.graph):
        for dim, size in zip(value.type.tensor_type.shape.dim, shapes[value.name], strict=True):
            dim.dim_value = size
    return bound


def _optimise(model: onnx.ModelProto, blocked_layout: bool) -> onnx.ModelProto:
    with tempfile.TemporaryDirectory(prefix="edgekit-graph-") as folder:
        path = Path(folder) / "optimised.onnx"
        settings = _settings()
        settings.optimized_model_filepath = str(path)
        own = ort_options(model)
        if own.fold_weights:
            settings.add_session_config_entry("session.disable_quant_qdq", "1")
        if not own.optimise:
            settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        layout = [] if blocked_layout else ["NchwcTransformer"]
        disabled = [*WRONG_REWRITES, *own.disabled_optimizers, *layout]
        content = model.SerializeToString()
        check_opening("ort", content, stated_options(model))
        onnxruntime.InferenceSession(
            content,
            settings,
            providers=["CPUExecutionProvider"],
            enable_fallback=0,
            disabled_optimizers=disabled,
        )
        return onnx.load(path)


def _infer(optimised: onnx.ModelProto) -> list[onnxruntime.NodeArg]:
    """Return inputs and all nodes' outputs, with the shapes that onnxruntime infers for its own operators."""
    open_model = copy_model(optimised)
    output_names = {value.name for value in optimised.graph.output}
    for node in optimised.graph.node:
        for name in node.output:
            if name and name not in output_names:
                open_model.graph.output.add(name=name)
    settings = _settings()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    # No child first: the engine has just opened and written this graph, in another session of this process.
    session = onnxruntime.InferenceSession(
        open_model.SerializeToString(), settings, providers=["CPUExecutionProvider"], enable_fallback=0
    )
    return [*session.get_inputs(), *session.get_outputs()]


def _inputs(bound: onnx.ModelProto) -> dict[str, EngineTensor]:
    return {
        spec.name: EngineTensor(bound_shape(spec, {}), DTYPES[spec.dtype].itemsize)
        for spec in tensor_specs(bound)[0]
    }


def _nested_bytes(optimised: onnx.ModelProto) -> int:
    outer: int = sum(tensor.ByteSize() for tensor in optimised.graph.initializer)
    everything: int = sum(tensor.ByteSize() for _, tensor in stored_tensors(optimised))
    return everything - outer


def _settings() -> onnxruntime.SessionOptions:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = _LOG_FATAL_ONLY
    settings.intra_op_num_threads = 1
    settings.add_session_config_entry("session.disable_prepacking", "1")
    return settings


def _tensor(value: onnxruntime.NodeArg, branched: bool) -> EngineTensor:
    # onnxruntime shows an unknown rank, as of branches with different ranks, like a scalar.
    is_known = all(isinstance(size, int) for size in value.shape) and not (branched and not value.shape)
    element = value.type.removeprefix("tensor(").removesuffix(")")
    return EngineTensor(tuple(value.shape) if is_known else None, _SIZES.get(element, 0))
