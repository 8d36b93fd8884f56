"""Makes ONNX files smaller, with short names and without default values and redundant constants.

In a model of 50 kB, names take a quarter of the file. In an int8 detector of 1.1 MB, the scales of biases
take 3 % of the file, and zero points and the upper halves of biases take 2 %.
"""

import itertools
import string
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from edgekit_toolkit.onnx_graph.index import (
    GraphIndex,
    add_constant,
    attribute,
    copy_model,
    fresh_name,
    opset,
    remove_unused_initializers,
    set_items,
)
from edgekit_toolkit.onnx_graph.ort_options import notes_of
from edgekit_toolkit.onnx_graph.traversal import bodies

_DIGITS = string.ascii_lowercase
_DEFAULTS: Final = {"strides": 1, "dilations": 1, "pads": 0}
_INT16: Final = np.iinfo(np.int16)
_DERIVING: Final = frozenset({"ConstantOfShape", "Mul", "Split"})


def shorten_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with short tensor names, and without node names, doc strings and recorded shapes.

    Equal scales and zero points of activations are stored once. Attributes of convolutions are removed if
    they have default values or follow from the shape of the weights.

    Inputs and outputs keep their names. A model with control flow keeps all names, because sub-graphs refer
    to outer tensors by name.
    """
    result = copy_model(model)
    graph = result.graph
    del graph.value_info[:]
    del graph.quantization_annotation[:]
    for item in (result, graph, *graph.node, *graph.initializer):
        item.ClearField("metadata_props")
        item.ClearField("doc_string")
    result.metadata_props.extend(notes_of(model))
    if any(map(bodies, graph.node)):
        return result
    _drop_defaults(graph)
    stable_names = {value.name for value in (*graph.input, *graph.output)}
    fresh = (name for name in _names() if name not in stable_names)
    renamed: dict[str, str] = {"": "", **{name: name for name in stable_names}}
    for node in graph.node:
        for names in (node.input, node.output):
            for position, name in enumerate(names):
                if name not in renamed:
                    renamed[name] = next(fresh)
                names[position] = renamed[name]
        node.ClearField("name")
    for tensor in graph.initializer:
        if tensor.name not in renamed:
            renamed[tensor.name] = next(fresh)
        tensor.name = renamed[tensor.name]
    _share_parameters(graph)
    # An import costs only a line of metadata, but an engine may refuse an unknown domain.
    standard = opset(result)
    used = {node.domain for node in graph.node} - {"", "ai.onnx"}
    foreign = [item for item in result.opset_import if item.domain in used]
    set_items(result.opset_import, [onnx.helper.make_opsetid("", standard), *foreign])
    return result


def _drop_defaults(graph: onnx.GraphProto) -> None:
    """Remove attributes of convolutions that state a default, or that the weights' shape implies."""
    for node in graph.node:
        if node.op_type != "Conv":
            continue
        attributes = [item for item in node.attribute if item.name != "kernel_shape"]
        stated = [item for item in attributes if {*item.ints} - {_DEFAULTS.get(item.name)} or not item.ints]
        set_items(node.attribute, (item for item in stated if (item.name, item.i) != ("group", 1)))


def _share_parameters(graph: onnx.GraphProto) -> None:
    """Store equal scales and zero points of activations once; names stay, so that versions correspond.

    Parameters of weights stay separate: the next version may change those of one layer, and onnxruntime's
    exact products (docs/adr/0018-exact-products.md) refuse int8 zero points that layers share.
    """
    readers: dict[str, set[bool]] = {}
    for node in graph.node:
        for position, name in enumerate(node.input):
            is_parameter = position > 0 and node.op_type in ("QuantizeLinear", "DequantizeLinear")
            readers.setdefault(name, set()).add(is_parameter)
    first: dict[tuple[int, bytes], str] = {}
    shared: dict[str, str] = {}
    for tensor in graph.initializer:
        if readers.get(tensor.name) != {True} or tensor.dims or tensor.data_type == TensorProto.INT8:
            continue
        key = (tensor.data_type, numpy_helper.to_array(tensor).tobytes())
        shared[tensor.name] = first.setdefault(key, tensor.name)
    for node in graph.node:
        node.input[:] = [shared.get(name, name) for name in node.input]
    remove_unused_initializers(graph)


def derive_bias_scales(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` in which nodes compute the bias scales, so that they need not be stored.

    A bias scale is computed if it equals input scale x weight scale. Engines compute it when they load the
    model. `store_parameters` reverts this.
    """
    result = copy_model(model)
    graph = result.graph
    index = GraphIndex(graph)
    products: dict[str, onnx.NodeProto] = {}  # by the scale, which layers may share
    for node in graph.node:
        sources = [index.producers.get(name) for name in node.input]
        if len(sources) != 3 or any(item is None or item.op_type != "DequantizeLinear" for item in sources):
            continue
        scales = [source.input[1] for source in sources if source is not None]
        data, weight, bias = (index.constant(name) for name in scales)
        if data is None or weight is None or bias is None or len(index.consumers(scales[2])) > 1:
            continue
        if bias.ndim and np.array_equal(np.multiply(data, weight), bias):
            products[scales[2]] = helper.make_node("Mul", scales[:2], scales[2:])
    set_items(graph.node, [*products.values(), *graph.node])
    set_items(graph.initializer, (tensor for tensor in graph.initializer if tensor.name not in products))
    return result


def split_parameters(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return `model` with small parameters packed into two tensors, if this makes the model smaller.

    Zero points of weights become slices of one tensor of zeros, which engines compute when they load the
    model. Biases that fit into 16 bits become slices of an int16 tensor. `store_parameters` reverts both.
    """
    result = copy_model(model)
    graph = result.graph
    index = GraphIndex(graph)
    zeros: dict[str, NDArray[Any]] = {}
    biases: dict[str, NDArray[Any]] = {}
    for node in graph.node:
        if node.op_type != "DequantizeLinear":
            continue
        for name in (node.input[0], *node.input[2:]):
            value = index.constant(name)
            if value is None or value.ndim != 1 or len(index.consumers(name)) > 1:
                continue
            if value.dtype == np.int8 and name != node.input[0] and not value.any():
                zeros[name] = value
            elif (
                value.dtype == np.int32
                and _INT16.min <= value.min(initial=0) <= value.max(initial=0) <= _INT16.max
            ):
                biases[name] = value
    nodes = []
    if zeros:
        total = add_constant(index, "total", np.asarray([sum(map(len, zeros.values()))]))
        value = helper.make_tensor("", TensorProto.INT8, [1], [0])
        source = fresh_name(index, "zeros")
        nodes += [
            helper.make_node("ConstantOfShape", [total], [source], value=value),
            _part(index, source, zeros),
        ]
    if biases:
        stored = add_constant(index, "biases", np.concatenate([*biases.values()]).astype(np.int16))
        source = fresh_name(index, "wide")
        nodes += [
            helper.make_node("Cast", [stored], [source], to=TensorProto.INT32),
            _part(index, source, biases),
        ]
    packed = zeros.keys() | biases.keys()
    set_items(graph.initializer, (tensor for tensor in graph.initializer if tensor.name not in packed))
    set_items(graph.node, [*nodes, *graph.node])
    return min(model, result, key=onnx.ModelProto.ByteSize)


def _part(index: GraphIndex, source: str, parts: Mapping[str, NDArray[Any]]) -> onnx.NodeProto:
    """Return the node that splits a tensor into these parts."""
    lengths = fresh_name(index, "lengths")
    # Numbers take fewer bytes in this field than in `raw_data`.
    index.graph.initializer.append(
        helper.make_tensor(lengths, TensorProto.INT64, [len(parts)], [len(part) for part in parts.values()])
    )
    return helper.make_node("Split", [source, lengths], [*parts])


def store_parameters(model: onnx.ModelProto) -> onnx.ModelProto:
    """Revert `derive_bias_scales` and `split_parameters`, so that all parameters are constants."""
    result = copy_model(model)
    graph = result.graph
    index = GraphIndex(graph)
    constants = set(index.initializers)
    deriving = []
    for node in graph.node:
        # Other casts of constants are weights in half precision.
        is_cast = node.op_type == "Cast" and attribute(node, "to", 0) == TensorProto.INT32
        if (is_cast or node.op_type in _DERIVING) and constants.issuperset(node.input):
            deriving.append(node)
            constants.update(node.output)
    if not deriving:
        return result
    names = [name for node in deriving for name in node.output]
    outputs = [helper.make_empty_tensor_value_info(name) for name in names]
    sources = {name for node in deriving for name in node.input}
    tensors = [tensor for tensor in graph.initializer if tensor.name in sources]
    part = helper.make_model(
        helper.make_graph(deriving, "parameters", [], outputs, tensors), opset_imports=result.opset_import
    )
    values = zip(names, ReferenceEvaluator(part).run(None, {}), strict=True)
    graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in values)
    for node in deriving:
        graph.node.remove(node)
    remove_unused_initializers(graph)
    return result


def _names() -> Iterator[str]:
    for length in itertools.count(1):
        yield from ("".join(letters) for letters in itertools.product(_DIGITS, repeat=length))
