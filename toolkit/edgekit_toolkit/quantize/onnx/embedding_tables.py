"""Stores embedding tables as int8 with a scale for each row.

A `Gather` from a constant table becomes a `Gather` of int8 rows, a `Gather` of their scales and a `Mul`. The
table takes a quarter of the size in the package and in memory, because only the gathered rows are converted
to float. Tables that are sliced or added, such as position embeddings, take a quarter of the size only in the
package, because the engine converts them once when it loads the model. Tables that no matrix product follows
are not changed. They are usually coordinates, for which 8 bits are not enough.
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
    copy_node,
    fresh_name,
    remove_unused_initializers,
    set_items,
)
from edgekit_toolkit.quantize.onnx.emitter import Emitter
from edgekit_toolkit.quantize.plan import COMPUTE
from edgekit_toolkit.quantize.scheme import quantize_weight

# Smaller tables cost more in nodes than they save, and shorter rows more in scales.
_MIN_ELEMENTS: Final = 4096
_MIN_COLUMNS: Final = 16
_TABLE_READERS: Final = frozenset(
    {"Add", "Concat", "Expand", "Gather", "Mul", "Reshape", "Slice", "Sub", "Tile", "Transpose", "Unsqueeze"}
)


def is_table_lookup(index: GraphIndex, node: onnx.NodeProto) -> bool:
    """Return whether a node gathers rows of a large constant float32 table [rows, columns]."""
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


def added_table(index: GraphIndex, node: onnx.NodeProto) -> str | None:
    """Return the name of the large constant float32 table that a node such as Add or Slice reads.

    Return None if there is no such table, or if no matrix product follows.
    """
    if node.op_type not in _TABLE_READERS or node.domain or is_table_lookup(index, node):
        return None
    for name in node.input:
        tensor = index.initializers.get(name)
        if tensor is None or len(tensor.dims) < 2 or tensor.dims[-1] < _MIN_COLUMNS:
            continue
        table = index.constant(name)
        if table is None or table.dtype != np.float32 or table.size < _MIN_ELEMENTS:
            continue
        if name not in index.outputs and np.isfinite(table).all():
            return name if _leads_to_product(index, node) else None
    return None


def _leads_to_product(index: GraphIndex, node: onnx.NodeProto) -> bool:
    waiting, visited = list(node.output), set[str]()
    while waiting:
        name = waiting.pop()
        if name in visited:
            continue
        visited.add(name)
        for reader in index.consumers(name):
            if reader.op_type in COMPUTE:
                return True
            waiting.extend(reader.output)
    return False


def int8_tables(model: onnx.ModelProto, layers: Collection[str] | None = None) -> onnx.ModelProto | None:
    """Return `model` with embedding tables stored as int8, or None if it has no such table.

    Args:
        model: A float model.
        layers: The first outputs of the nodes whose tables are changed, or None for all.
    """
    result = copy_model(model)
    graph = result.graph
    index = GraphIndex(graph)
    emitter = Emitter(index)
    stored: dict[str, tuple[str, str]] = {}
    widened: dict[str, str] = {}
    for node in graph.node:
        chosen = layers is None or (bool(node.output) and node.output[0] in layers)
        is_lookup = chosen and is_table_lookup(index, node)
        table = node.input[0] if is_lookup else added_table(index, node) if chosen else None
        if table is None:
            emitter.nodes.append(node)
            continue
        if table not in stored:
            values = np.asarray(index.constant(table), np.float32)
            codes, params = quantize_weight(values.reshape(-1, values.shape[-1]), axis=0)
            scales = params.scale.reshape(*values.shape[:-1], 1)
            codes_name = emitter.store(f"{table}_codes", codes.reshape(values.shape))
            stored[table] = codes_name, emitter.store(f"{table}_scale", scales)
        if is_lookup:
            emitter.nodes.extend(_lookup(index, node, node.input[1], *stored[table]))
            continue
        if table not in widened:
            emitter.nodes.extend(_widened(index, table, *stored[table]))
            widened[table] = emitter.nodes[-1].output[0]
        copy = copy_node(node)
        copy.input[:] = [widened.get(name, name) for name in node.input]
        emitter.nodes.append(copy)
    if not stored:
        return None
    set_items(graph.node, emitter.nodes)
    remove_unused_initializers(graph)
    return result


def _widened(index: GraphIndex, table: str, codes: str, scales: str) -> list[onnx.NodeProto]:
    """The nodes that make the whole table; they read only constants, so the engine runs them once."""
    floats, values = (fresh_name(index, f"{table}_{part}") for part in ("widened", "values"))
    return [
        helper.make_node("Cast", [codes], [floats], name=floats, to=TensorProto.FLOAT),
        helper.make_node("Mul", [floats, scales], [values], name=values),
    ]


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
    """Return the int8 table and the scales that `int8_tables` stored for `output`, or an empty list."""
    product = index.producers.get(output)
    if product is None or product.op_type != "Mul":
        return []
    tables = []
    for name in product.input:
        behind = _behind_cast(index, name)
        lookup = index.producers.get(behind)
        if lookup is not None and lookup.op_type == "Gather":
            behind = _behind_cast(index, lookup.input[0])
        tables.append(behind)
    return [index.initializers[name] for name in tables if name in index.initializers]


def _behind_cast(index: GraphIndex, name: str) -> str:
    """Return the tensor that a Cast widens if `name` is its result; else `name`."""
    source = index.producers.get(name)
    return str(source.input[0]) if source is not None and source.op_type == "Cast" else name
