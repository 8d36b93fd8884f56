"""Finds the branches of `If` nodes that the golden rows take. The self-test checks only these branches."""

from collections.abc import Callable, Iterable, Mapping

import onnx

from edgekit_runtime.package.golden import resample
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.index import with_outputs
from edgekit_toolkit.onnx_graph.traversal import nodes
from edgekit_toolkit.samples.generated import Feeds

# Takes the inputs of a row. Returns a dict from names of `If` nodes to whether they take the then branch.
Conditions = Callable[[Feeds], Mapping[str, bool]]


def open_conditions(model: Model) -> Conditions:
    """Return a function that runs a model and returns the branches that its `If` nodes take.

    The function returns a dict from the name of each `If` node of the top-level graph to whether it takes
    the then branch. For a `.tflite` model, the dict is empty.

    Raises:
        BackendError: The engine refuses the model.
    """
    graph = model.proto.graph if isinstance(model, OnnxModel) else onnx.GraphProto()
    tensors = {_name(node): node.input[0] for node in graph.node if node.op_type == "If"}
    if not isinstance(model, OnnxModel) or not tensors:
        return lambda _: {}
    names = list(dict.fromkeys(tensors.values()))
    run = OnnxModel(with_outputs(model.proto, names)).open(names, threads=1)

    def read(feeds: Feeds) -> Mapping[str, bool]:
        values = dict(zip(names, run(feeds), strict=True))
        return {name: bool(values[tensor].all()) for name, tensor in tensors.items()}

    return read


def find_untested(model: Model, first: Feeds, seeds: Iterable[int]) -> list[str]:
    """Return warnings about `If` branches that no golden row takes, and about nested `If` nodes.

    `first` contains the inputs of the first golden row. `seeds` are the seeds of the additional golden rows.
    """
    read = open_conditions(model)
    conditions = [read(first), *(read(resample(first, seed)) for seed in seeds)]
    untaken = [
        f"{branch} branch of If '{name}'"
        for name in conditions[0]
        for branch, condition in (("then", True), ("else", False))
        if all(row[name] != condition for row in conditions)
    ]
    inner = [
        f"'{_name(node)}'"
        for node in (nodes(model.proto) if isinstance(model, OnnxModel) else ())
        if node.op_type == "If" and _name(node) not in conditions[0]
    ]
    notes = []
    if untaken:
        notes.append(
            f"no golden input takes the {', nor the '.join(untaken)}: the self-test on a device does not"
            " check what is computed there"
        )
    if inner:
        notes.append(
            f"whether golden inputs take both branches of If {', '.join(inner)} is not known, since it lies"
            " inside another body: the self-test on a device may not check all that is computed there"
        )
    return notes


def _name(node: onnx.NodeProto) -> str:
    return node.name or node.output[0]
