"""States of a model: outputs that are inputs of the next run, as stated by the user.

In recurrent operators of ONNX, the batch is the second axis of a state, as in [layers, batch, hidden]. This
module moves it to the front, so that states of several sequences are batched like other inputs.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import onnx
from onnx import helper

from edgekit_runtime.errors import ModelError
from edgekit_runtime.package.states import RecurrentState, find_states_problem
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.importers.model_file import SourceModel, errors_with_path
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.index import copy_model
from edgekit_toolkit.onnx_graph.specs import UNNAMED_DIMENSIONS, real_inputs, tensor_specs
from edgekit_toolkit.onnx_graph.traversal import nodes

_BATCH: Final = "batch"
# Prefixes and suffixes around the word that both names of a state share, as in h0 and hn, or state and
# stateN.
_BEFORE: Final = (
    re.compile(r"^(past|prev(ious)?|old|init(ial)?|in(put)?)[._-]?"),
    re.compile(r"[._-]?(in(put|it)?|prev(ious)?|old|past|0)$"),
)
_AFTER: Final = (
    re.compile(r"^(present|next|new|out(put)?)[._-]?"),
    re.compile(r"[._-]?(out(put)?|next|new|n|1)$"),
)


def name_states(source: SourceModel[Model], states: Mapping[str, str]) -> SourceModel[Model]:
    """Return the model with these states. If a state has a free batch, the batch becomes its first axis.

    `states` is a dict from the name of an output to the name of the input that gets its value in the next
    run.

    Raises:
        ModelError: An output or input does not exist, or they differ in dtype or shape.
    """
    if not states:
        return source
    named = tuple(RecurrentState(output, target) for output, target in sorted(states.items()))
    with errors_with_path(source.path):
        if isinstance(source.model, OnnxModel):
            proto = copy_model(source.model.proto)
            for state in named:
                _move_batch(proto, state, set(states.values()))
            inputs, outputs = tensor_specs(proto)
            source = replace(source, model=OnnxModel(proto), inputs=inputs, outputs=outputs)
        problem = find_states_problem(named, source.inputs, source.outputs)
        if problem is not None:
            raise ModelError(f"--state: {problem}")
    return replace(source, states=named)


def propose_states(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], states: Sequence[RecurrentState]
) -> list[RecurrentState]:
    """Return pairs of output and input that look like states by dtype, shape and name.

    Outputs and inputs that are already in `states` are omitted.
    """
    named = {name for state in states for name in (state.output, state.input)}
    return [
        proposal
        for output in outputs
        for target in inputs
        for proposal in [RecurrentState(output.name, target.name)]
        if named.isdisjoint((output.name, target.name))
        and len(target.shape) > 1
        and not _stems(output.name, _AFTER).isdisjoint(_stems(target.name, _BEFORE))
        and find_states_problem([proposal], inputs, outputs) is None
    ]


def _stems(name: str, affixes: Sequence[re.Pattern[str]]) -> set[str]:
    """Return a name, and the name without its affix."""
    return {name.lower(), *(affix.sub("", name.lower()) for affix in affixes)} - {""}


def _move_batch(proto: onnx.ModelProto, state: RecurrentState, states: set[str]) -> None:
    """Make the batch of a state its first axis, if it is another one; `proto` is changed in place."""
    inputs = {value.name: value for value in real_inputs(proto.graph)}
    outputs = {value.name: value for value in proto.graph.output}
    first = next((_sizes(value) for name, value in inputs.items() if name not in states), ())
    if (
        state.input not in inputs
        or state.output not in outputs
        or not first
        or first[0].HasField("dim_value")
    ):
        return
    target = _sizes(inputs[state.input])
    free = [axis for axis, size in enumerate(target) if _is_free(size)]
    names = {target[axis].dim_param for axis in free}
    if len(free) != 1 or not names <= {*UNNAMED_DIMENSIONS, first[0].dim_param}:
        return
    if first[0].dim_param in UNNAMED_DIMENSIONS:
        first[0].dim_param = _BATCH
    target[free[0]].dim_param = first[0].dim_param
    if free[0] > 0 and len(_sizes(outputs[state.output])) == len(target):
        _transpose(proto, (inputs[state.input], outputs[state.output]), free[0])


def _sizes(value: onnx.ValueInfoProto) -> Sequence[onnx.TensorShapeProto.Dimension]:
    sizes: Sequence[onnx.TensorShapeProto.Dimension] = value.type.tensor_type.shape.dim
    return sizes


def _is_free(size: onnx.TensorShapeProto.Dimension) -> bool:
    return not size.HasField("dim_value") or size.dim_value < 0  # some exporters' word for free is -1


def _transpose(
    proto: onnx.ModelProto, tensors: tuple[onnx.ValueInfoProto, onnx.ValueInfoProto], axis: int
) -> None:
    """Move an axis of an input and of an output to the front, and back inside the graph."""
    rank = len(_sizes(tensors[0]))
    forward = [axis, *(other for other in range(rank) if other != axis)]
    backward = [forward.index(other) for other in range(rank)]
    for value in tensors:
        sizes = copy.deepcopy([_sizes(value)[other] for other in forward])
        del value.type.tensor_type.shape.dim[:]
        value.type.tensor_type.shape.dim.extend(sizes)
    target, output = (value.name for value in tensors)
    inside = {target: f"{target}/model_axes", output: f"{output}/model_axes"}
    for node in nodes(proto):
        for names in (node.input, node.output):
            names[:] = [inside.get(name, name) for name in names]
    first = helper.make_node("Transpose", [target], [inside[target]], f"{target}/batch", perm=backward)
    last = helper.make_node("Transpose", [inside[output]], [output], f"{output}/batch", perm=forward)
    proto.graph.node.insert(0, first)
    proto.graph.node.append(last)
