"""The layers of a run for the report: how each is stored in a candidate, its work and its noise."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx

from edgekit_toolkit.evaluation.judge import cost_of_nodes
from edgekit_toolkit.onnx_graph.index import GraphIndex
from edgekit_toolkit.pipeline.state import Run
from edgekit_toolkit.quantize.forms import StoredLayer, stored_layers, weight_inputs

_FLOATS = {
    onnx.TensorProto.FLOAT16: "fp16",
    onnx.TensorProto.BFLOAT16: "bf16",
    onnx.TensorProto.DOUBLE: "fp64",
}


def stored(run: Run, place: int) -> dict[str, StoredLayer]:
    """Return how each layer of a candidate is stored, by the name of its first output in the float model.

    A layer that the form leaves alone has the float type of the source.
    """
    candidate = run.found.candidates[place]
    if isinstance(candidate.model, bytes):
        # The quantizer renames tensors; layers keep their order.
        names, made = _tflite_layers(_float_model(run)), _tflite_layers(candidate.model)
        return dict(zip(names, made.values(), strict=True))
    floats = run.prepared.floats
    if isinstance(floats, bytes):
        raise TypeError("a candidate of a .tflite model is one, too")
    index = GraphIndex(floats.graph)
    return {
        name: replace(layer, precision=_float_name(index, name)) if layer.precision == "fp32" else layer
        for name, layer in stored_layers(floats, candidate.form).items()
    }


def describe_layers(run: Run, place: int) -> list[dict[str, Any]]:
    """Return the layers of a candidate as the report lists them."""
    found = stored(run, place)
    work = {cost.name: cost for cost in cost_of_nodes(_float_model(run), run.prepared.dims)}
    total = sum(item.noise for item in run.found.noises)
    shares = {item.block[0]: item.noise / total for item in run.found.noises} if total > 0 else {}
    shown = _short_names([label for label, *_ in _float_layers(run).values()])
    layers = []
    for name, (label, op, held) in _float_layers(run).items():
        if name not in found:
            continue
        layers.append(
            {
                "name": shown.get(label, label),
                "op": op,
                "bytes_before": held,
                "bytes_after": found[name].weight_bytes,
                "precision": found[name].precision,
                "macs": work[label].macs * work[label].repeats if label in work else 0,
                "noise_share": shares.get(name),
            }
        )
    return layers


def _short_names(names: Sequence[str]) -> dict[str, str]:
    """Names without what stands behind a semicolon, where that tells layers apart.

    Converters join the names of all that an operator came from; ours adds the order of axes (`relu;0231`).
    """
    counts = Counter(name.partition(";")[0] for name in names)
    return {name: short for name in names if counts[short := name.partition(";")[0]] == 1 and short}


def _float_model(run: Run) -> Any:
    """The model that all forms were made of, in the kind that the package holds."""
    first = run.found.candidates[0].model
    return first if isinstance(first, bytes) else run.prepared.floats


def _float_layers(run: Run) -> dict[str, tuple[str, str, int]]:
    """Name for people, operator and bytes of the weights of each layer, by the name of its first output."""
    model = _float_model(run)
    if isinstance(model, bytes):
        from edgekit_toolkit.tflite.flatbuffer import operator_name, operators, parsed, tensor_name

        file = parsed(model)
        kinds = {
            tensor_name(graph.tensors[operator.outputs[0]]): operator_name(file, operator)
            for graph, _, operator in operators(file)
            if len(operator.outputs)
        }
        return {
            name: (name, kinds.get(name, ""), layer.weight_bytes)
            for name, layer in _tflite_layers(model).items()
        }
    index = GraphIndex(model.graph)
    return {
        node.output[0]: (node.name or node.output[0], node.op_type, _weight_bytes(index, node))
        for node in model.graph.node
        if node.output
    }


def tflite_counts(content: bytes) -> tuple[int, int]:
    """Return the number of operators and of stored parameters of a `.tflite` model."""
    from edgekit_toolkit.tflite.flatbuffer import operators, parsed, shape_of, stored_bytes

    model = parsed(content)
    held = [tensor for graph in model.subgraphs for tensor in graph.tensors if stored_bytes(model, tensor)]
    return sum(1 for _ in operators(model)), sum(math.prod(shape_of(tensor)) for tensor in held)


def _tflite_layers(content: bytes) -> Mapping[str, StoredLayer]:
    from edgekit_toolkit.tflite.flatbuffer import parsed
    from edgekit_toolkit.tflite.summary import summarise

    return summarise(parsed(content)).layers


def _float_name(index: GraphIndex, output: str) -> str:
    weight = index.initializers.get(weight_inputs(index.producers[output])[0])
    return "fp32" if weight is None else _FLOATS.get(weight.data_type, "fp32")


def _weight_bytes(index: GraphIndex, node: onnx.NodeProto) -> int:
    return sum(
        index.initializers[name].ByteSize() for name in weight_inputs(node) if name in index.initializers
    )
