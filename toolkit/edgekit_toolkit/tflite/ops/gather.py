"""Gather and scatter operators, DepthToSpace and SpaceToDepth."""

import math

import numpy as np

from edgekit_toolkit.tflite.builder import Options, Tensor
from edgekit_toolkit.tflite.layout.rules import Rule, as_onnx, axiswise, removing, spatial
from edgekit_toolkit.tflite.refusal import RefusedError
from edgekit_toolkit.tflite.registry import writes
from edgekit_toolkit.tflite.step import Step
from edgekit_toolkit.tflite.view import Graph, Node


def _rule(node: Node, graph: Graph) -> Rule:
    rank = len(graph.shape(node.inputs[1]))
    if graph.is_constant(node.inputs[0]) or rank > 1:
        return as_onnx(node, graph)
    axis = node.attributes.get("axis", 0) % len(graph.shape(node.inputs[0]))
    return axiswise(node, graph) if rank == 1 else removing((axis,), node, graph)


@writes("Gather", rule=_rule)
def write_gather(step: Step) -> None:
    """Write GATHER, or EMBEDDING_LOOKUP for computed row indices into a constant float32 matrix.

    ONNX counts negative indices from the end of an axis. They are converted to non-negative ones.
    """
    if _is_table_lookup(step):
        _write_lookup(step)
        return
    axis = step.attribute("axis", 0) % len(step.shape(0))
    size = step.shape(0)[axis]
    stored_axis = step.axis(axis) if step.form else axis
    options = Options("GatherOptions", {"axis": stored_axis})
    step.give(step.emit("GATHER", [step.read(0), _from_begin(step, size)], step.held(), options, version=2))


def _is_table_lookup(step: Step) -> bool:
    """Whether rows of a constant matrix are read, by indices that are computed."""
    table = step.value(0)
    is_matrix = table is not None and table.ndim == 2 and table.dtype == np.float32
    return is_matrix and step.attribute("axis", 0) in {0, -2} and step.value(1) is None


def _write_lookup(step: Step) -> None:
    """Write EMBEDDING_LOOKUP, the only reader of rows that takes a table in int8."""
    rows, columns = step.shape(0)
    indices = _from_begin(step, rows)
    if indices.dtype != np.int32:
        indices = step.emit(
            "CAST", [indices], indices.shape, Options("CastOptions"), dtype=np.dtype(np.int32)
        )
    count = math.prod(indices.shape)
    flat = step.builder.reshape(indices, (count,))
    looked_up = step.emit(
        "EMBEDDING_LOOKUP", [flat, step.read(0)], (count, columns), dtype=np.dtype(np.float32)
    )
    step.give(step.builder.reshape(looked_up, step.held()))


def _from_begin(step: Step, size: int) -> Tensor:
    """Return the indices from the begin of the axis; negative indices are replaced."""
    indices = step.value(1)
    if indices is not None:
        return step.builder.constant(np.where(indices < 0, indices + size, indices).astype(np.int32))
    tensor = step.read(1, tuple(range(len(step.shape(1)))))
    options = Options("FloorModOptions")
    return step.emit("FLOOR_MOD", [tensor, step.number(size, tensor.dtype)], tensor.shape, options)


@writes("ScatterND", rule=as_onnx)
def write_scatter_nd(step: Step) -> None:
    """Write a SCATTER_ND of the updates into zeros, and combine the result with the data.

    For the reduction `add`, an ADD combines them. For `none`, a SELECT_V2 selects the updated elements.
    """
    reduction = step.attribute("reduction", "none")
    if reduction not in {"none", "add"}:
        raise RefusedError(f"reduction '{reduction}' is not covered, none and add are")
    step.require("float32", "int32", "int64")
    data, updates, indices = step.read(0), step.read(2), step.value(1)
    sizes = np.array(step.shape(0)[: step.shape(1)[-1]], np.int32)
    if indices is not None:
        positions = step.builder.constant(np.where(indices < 0, indices + sizes, indices).astype(np.int32))
    else:
        raw = step.emit(
            "CAST", [step.read(1)], step.shape(1), Options("CastOptions"), dtype=np.dtype(np.int32)
        )
        inputs = [raw, step.builder.constant(sizes)]
        positions = step.emit("FLOOR_MOD", inputs, step.shape(1), Options("FloorModOptions"))
    shape, options = step.numbers(step.shape(0)), Options("ScatterNdOptions")
    scattered = step.emit("SCATTER_ND", [positions, updates, shape], data.shape, options, dtype=data.dtype)
    if reduction == "add":
        step.give(step.binary("ADD", data, scattered))
        return
    units = step.builder.constant(np.ones(updates.shape, np.float32))
    counts = step.emit(
        "SCATTER_ND", [positions, units, shape], data.shape, options, dtype=np.dtype(np.float32)
    )
    is_new = step.emit(
        "GREATER", [counts, step.number(0)], data.shape, Options("GreaterOptions"), dtype=np.dtype(np.bool_)
    )
    choice = [is_new, scattered, data]
    step.give(step.emit("SELECT_V2", choice, data.shape, Options("SelectV2Options"), dtype=data.dtype))


@writes("DepthToSpace", rule=spatial)
def write_depth_to_space(step: Step) -> None:
    """Write DEPTH_TO_SPACE, which has the channel order of mode DCR. For CRD, reorder the channels first."""
    block, tensor = step.attribute("blocksize"), step.read(0)
    if step.attribute("mode", "DCR") == "CRD":
        channels = tensor.shape[-1]
        order = np.arange(channels).reshape(channels // block**2, block**2).T.reshape(-1)
        tensor = step.gathered(tensor, len(tensor.shape) - 1, order.tolist())
    options = Options("DepthToSpaceOptions", {"blockSize": block})
    step.give(step.emit("DEPTH_TO_SPACE", [tensor], step.held(), options))


@writes("SpaceToDepth", rule=spatial)
def write_space_to_depth(step: Step) -> None:
    options = Options("SpaceToDepthOptions", {"blockSize": step.attribute("blocksize")})
    step.give(step.emit("SPACE_TO_DEPTH", [step.read(0)], step.held(), options))
