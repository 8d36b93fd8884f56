"""Stores embedding tables as int8: only the rows that are looked up are widened, never the whole table.

A `Gather` from a constant table becomes a `Gather` of codes, a `Gather` of the rows' scales, and their
product. The table takes a quarter of its size both in the package and in memory. Other constants stay
unchanged.
"""

from collections.abc import Collection
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgekit_toolkit.onnx_graph.index import (
    GraphIndex,
    attribute,
    copy_model,
    fresh_name,
    remove_unused_initializers,
)
from edgekit_toolkit.quantize.onnx.emitter import Emitter
from edgekit_toolkit.quantize.scheme import quantize_weight

# Smaller tables cost more in nodes than they save.
_MIN_ELEMENTS: Final = 4096


def is_table_lookup(index: GraphIndex, node: onnx.NodeProto) -> bool:
    """Return whether a node looks up rows of a constant float32 table [rows, columns] that is worth it."""
    if node.op_type != "Gather" or attribute(node, "axis", 0) != 0:
        return False
    table = index.constant(node.input[0])
    return (
        table is not None
        and table.ndim == 2
        and table.dtype == np.float32
        and table.size >= _MIN_ELEMENTS
        and node.input[0] not in index.outputs
        and bool(np.isfinite(table).all())
    )


def int8_tables(model: onnx.ModelProto, layers: Collection[str] | None = None) -> onnx.ModelProto | None:
    """Return `model` with its embedding tables stored as int8, with a scale for each row.

    Args:
        model: float model.
        layers: first outputs of the lookups to change; None for all.

    Returns:
        None if the model has no such table.
    """
    result = copy_model(model)
    graph = result.graph
    index = GraphIndex(graph)
    emitter = Emitter(index)
    stored: dict[str, tuple[str, str]] = {}
    for node in graph.node:
        chosen = layers is None or (bool(node.output) and node.output[0] in layers)
        if not chosen or not is_table_lookup(index, node):
            emitter.nodes.append(node)
            continue
        table, indices = node.input
        if table not in stored:
            values = np.asarray(index.constant(table), np.float32)
            codes, params = quantize_weight(values, axis=0)
            scales = params.scale.reshape(-1, 1)
            stored[table] = emitter.store(f"{table}_codes", codes), emitter.store(f"{table}_scale", scales)
        emitter.nodes.extend(_lookup(index, node, indices, *stored[table]))
    if not stored:
        return None
    nodes = list(emitter.nodes)
    del graph.node[:]
    graph.node.extend(nodes)
    remove_unused_initializers(graph)
    return result


def _lookup(
    index: GraphIndex, node: onnx.NodeProto, indices: str, codes: str, scales: str
) -> list[onnx.NodeProto]:
    """The nodes that replace one lookup; the last one makes its output."""
    stem = node.name or node.output[0]
    rows, floats, row_scales = (
        fresh_name(index, f"{stem}_{part}") for part in ("codes", "widened", "scales")
    )
    return [
        helper.make_node("Gather", [codes, indices], [rows], name=node.name),
        helper.make_node("Cast", [rows], [floats], name=floats, to=TensorProto.FLOAT),
        helper.make_node("Gather", [scales, indices], [row_scales], name=row_scales),
        helper.make_node("Mul", [floats, row_scales], [node.output[0]], name=f"{stem}_rows"),
    ]


def stored_table(index: GraphIndex, output: str) -> list[onnx.TensorProto]:
    """Return codes and scales of the table of a lookup that `int8_tables` wrote; else nothing."""
    product = index.producers.get(output)
    if product is None or product.op_type != "Mul":
        return []
    lookups = [_behind_cast(index, name) for name in product.input]
    tables = [
        _behind_cast(index, lookup.input[0])
        for name in lookups
        if (lookup := index.producers.get(name)) is not None and lookup.op_type == "Gather"
    ]
    return [index.initializers[name] for name in tables if name in index.initializers]


def _behind_cast(index: GraphIndex, name: str) -> str:
    """Return the tensor that a Cast widens if `name` is its result; else `name`."""
    source = index.producers.get(name)
    return str(source.input[0]) if source is not None and source.op_type == "Cast" else name
