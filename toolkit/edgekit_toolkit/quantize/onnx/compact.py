"""Short names for tensors inside the graph: in a 50 kB model, names are a quarter of the file."""

import itertools
import string
from collections.abc import Iterator

import onnx

from edgekit_toolkit.onnx_graph.index import copy_model, opset
from edgekit_toolkit.onnx_graph.ort_options import disable_optimizers, disabled_optimizers

_DIGITS = string.ascii_lowercase


def shorten_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return `model` with short tensor names, and without node names, documentation and recorded shapes.

    Inputs and outputs keep their names. A model with control flow keeps all names: its sub-graphs read
    tensors of the outer graph by name.
    """
    disabled = disabled_optimizers(model)
    result = copy_model(model)
    graph = result.graph
    del graph.value_info[:]
    del graph.quantization_annotation[:]
    graph.doc_string = result.doc_string = ""
    for item in (result, graph, *graph.node, *graph.initializer):
        del item.metadata_props[:]
    result = disable_optimizers(result, disabled)
    graph = result.graph
    attributes = itertools.chain.from_iterable(node.attribute for node in graph.node)
    if any(item.type in {onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS} for item in attributes):
        return result
    stable_names = {value.name for value in (*graph.input, *graph.output)}
    fresh = (name for name in _names() if name not in stable_names)
    renamed: dict[str, str] = {"": "", **{name: name for name in stable_names}}
    for node in graph.node:
        for names in (node.input, node.output):
            for position, name in enumerate(names):
                if name not in renamed:
                    renamed[name] = next(fresh)
                names[position] = renamed[name]
        node.name = node.doc_string = ""
    for tensor in graph.initializer:
        if tensor.name not in renamed:
            renamed[tensor.name] = next(fresh)
        tensor.name = renamed[tensor.name]
        tensor.doc_string = ""
    # An import costs only a line of metadata, but an engine may refuse an unknown domain.
    standard = opset(result)
    used = {node.domain for node in graph.node} - {"", "ai.onnx"}
    foreign = [item for item in result.opset_import if item.domain in used]
    del result.opset_import[:]
    result.opset_import.extend([onnx.helper.make_opsetid("", standard), *foreign])
    return result


def _names() -> Iterator[str]:
    for length in itertools.count(1):
        yield from ("".join(letters) for letters in itertools.product(_DIGITS, repeat=length))
