"""Estimates the output noise of all quantized layers with one forward and one backward pass per sample.

If only one layer is quantized, its inputs, weights and output have rounding errors e, and the outputs of the
model change by J e to first order. Let v be a vector with random signs and the weights that `Fidelity` gives
to errors of the outputs. The backward pass computes J^T v, see `adjoint`. The noise of the layer is the mean
square, over all samples, of the product of J^T v and e.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgekit_runtime.errors import BackendError
from edgekit_toolkit.models.ort_session import measure_shapes, run_session, session_for
from edgekit_toolkit.onnx_graph.adjoint import Adjoint, Shapes, copy_for_adjoint
from edgekit_toolkit.onnx_graph.index import GraphIndex, float_tensors, set_items
from edgekit_toolkit.quantize.onnx.embedding_tables import added_table, is_table_lookup
from edgekit_toolkit.quantize.plan import COMPUTE, Plan, kernel_output, live_range, weight_axis
from edgekit_toolkit.quantize.precise import Block
from edgekit_toolkit.quantize.scheme import QuantizationParams, activation_params, quantize_weight
from edgekit_toolkit.quantize.sensitivity import Fidelity
from edgekit_toolkit.samples.generated import Feeds

ODD_GRAPH = (BackendError, LookupError, TypeError, ValueError, ArithmeticError)
"""The errors that occur here if no rule fits the nodes of a graph, or if the engine refuses it."""

_NOISES = "edgekit_noises"
# Backward passes in all. A noise is a mean of so many squares, and so is known within a fourth.
_MIN_PROBES = 32
# A backward pass reads the activations, so all of them are in memory.
_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Rounding:
    """A rounding error of one tensor of a float graph.

    Attributes:
        layer: The first output of the node to which the error belongs.
        position: The index of the rounded input of that node, or None if `tensor` is rounded for all readers.
        params: The scale and zero point of a rounded activation, or None for a weight.
        tensor: The name of the rounded activation.
        rounded: The values of a rounded weight.
        bias: The bias to use with `rounded`, or None for the bias of the layer.
        by_channel: Whether errors of different channels are independent, which makes the estimate more
            precise.
    """

    layer: str
    position: int | None
    params: QuantizationParams | None = None
    tensor: str = ""
    rounded: NDArray[np.float32] | None = None
    bias: NDArray[np.float32] | None = None
    by_channel: bool = False

    @property
    def size(self) -> int:
        """The number of values of the rounded weight, or 0 for an activation."""
        return 0 if self.rounded is None else self.rounded.size


def block_roundings(model: onnx.ModelProto, plan: Plan, block: Block) -> list[Rounding]:
    """Return the rounding errors of the model if only the layers of `block` are quantized by `plan`."""
    index = GraphIndex(model.graph)

    def params(name: str) -> QuantizationParams:
        return activation_params(*live_range(index, name, *plan.ranges[name]), plan.scheme)

    errors, inside = [], set()
    for layer in block:
        node = index.producers[layer]
        is_product = node.op_type in COMPUTE
        for position, name in enumerate(node.input[:2] if is_product else node.input):
            weight = index.constant(name) if name else None
            if weight is None and name in plan.ranges and name not in inside:
                errors.append(Rounding(layer, position, params(name)))
            elif weight is not None and is_product:
                axis = weight_axis(node) if plan.per_channel else None
                errors.append(_weight_rounding(node, position, weight, axis, plan.scheme.weight_peak))
        output = kernel_output(index, node)
        inside.add(output)
        if plan.scheme.quantizes_outputs:
            errors.append(Rounding(layer, None, params(output), output))
    return errors


def layer_rounding(model: onnx.ModelProto, layer: str) -> Rounding:
    """Return the rounding error of the weights of a layer in the form `int8-weights`.

    `layer` is the first output of the layer.
    """
    index = GraphIndex(model.graph)
    node = index.producers[layer]
    if node.op_type in COMPUTE:
        return _weight_rounding(node, 1, np.asarray(index.constant(node.input[1])), weight_axis(node))
    position = 0 if is_table_lookup(index, node) else list(node.input).index(added_table(index, node) or "")
    table = np.asarray(index.constant(node.input[position]))
    rows = _weight_rounding(node, position, table.reshape(-1, table.shape[-1]), 0)
    return replace(rows, rounded=None if rows.rounded is None else rows.rounded.reshape(table.shape))


def _weight_rounding(
    node: onnx.NodeProto, position: int, weight: NDArray[np.float32], axis: int | None, peak: int = 127
) -> Rounding:
    codes, params = quantize_weight(weight, axis, weight_peak=peak)
    scale = params.scale
    if axis is not None:
        scale = scale.reshape(
            [-1 if dimension == axis % weight.ndim else 1 for dimension in range(weight.ndim)]
        )
    return Rounding(node.output[0], position, rounded=codes * scale)


def propagate(
    model: onnx.ModelProto, layers: Sequence[Sequence[Rounding]], fidelity: Fidelity, *, threads: int
) -> list[float]:
    """Estimate the result of `Fidelity.noise` for the rounding errors of each layer alone.

    Args:
        model: The float model of `fidelity`, with inferred types.
        layers: The rounding errors of each layer.
        fidelity: The samples and the weights of output errors. Only samples with the shapes of the first one
            are used.
        threads: The number of threads of one inference.

    Raises:
        BackendError: onnxruntime fails on the backward pass, or there is not enough memory. Unusual graphs
            can raise any other error of `ODD_GRAPH`.
    """
    first = fidelity.samples[0]
    shapes = measure_shapes(model, first, threads=threads)
    program = copy_for_adjoint(model)
    activation_bytes = 4 * sum(math.prod(shapes[name]) for name in float_tensors(model))
    if activation_bytes > _MAX_BYTES:
        raise BackendError(f"activations of {activation_bytes} bytes are too many for a backward pass")
    adjoint = Adjoint(program.graph, shapes, float_tensors(model))
    adjoint.pass_back(_add_seeds(program, fidelity, shapes))
    index = GraphIndex(program.graph)
    zero = adjoint.constant(0.0)
    sums = []
    for errors in layers:
        parts = [part for error in errors if (part := _product(adjoint, index, shapes, error)) is not None]
        total = adjoint.add("Sum", parts) if parts else zero
        sums.append(adjoint.add("Reshape", [total, adjoint.constant([1])]))
    program.graph.node.append(helper.make_node("Concat", sums, [_NOISES], axis=0))
    set_items(program.graph.output, [helper.make_tensor_value_info(_NOISES, TensorProto.FLOAT, None)])
    growth = len(program.graph.node) / max(len(model.graph.node), 1)
    fidelity.count(inferences=growth * max(len(fidelity.samples), _MIN_PROBES), models=growth)
    session = session_for(program, threads=threads, optimise=False)
    power = np.zeros(len(layers))
    alike = [index for index, feeds in enumerate(fidelity.samples) if _same_shapes(feeds, first)]
    probes_each = math.ceil(_MIN_PROBES / len(alike))
    for sample, number in product(alike, range(probes_each)):
        probes = fidelity.probes(sample, number)
        feeds = {f"edgekit_probe_{number}": probe for number, probe in enumerate(probes)}
        (values,) = run_session(session, {**fidelity.samples[sample], **feeds}, [_NOISES])
        power += values.astype(np.float64) ** 2
    scaled = power * (len(fidelity.samples) / len(alike) / probes_each)
    return [float(noise) if np.isfinite(noise) else np.inf for noise in scaled]


def _product(adjoint: Adjoint, index: GraphIndex, shapes: Shapes, error: Rounding) -> str | None:
    """Add the product of an error and its adjoint; returns the sum's name, or None if no output sees it."""
    node = index.producers[error.layer]
    if error.rounded is not None:
        inputs = {error.position or 0: adjoint.constant(error.rounded)}
        if error.bias is not None:
            inputs[2] = adjoint.constant(error.bias)
        result = adjoint.again(node, inputs).output[0]
        layer, value = adjoint.tensors.get(error.layer), adjoint.add("Sub", [result, error.layer])
    else:
        name = node.input[error.position] if error.position is not None else error.tensor
        layer = (
            adjoint.tensors.get(name)
            if error.position is None
            else adjoint.edges.get((error.layer, error.position))
        )
        value = _rounding(adjoint, name, error.params)
    if layer is None:
        return None
    products = adjoint.add("Mul", [layer, value])
    if not error.by_channel:
        return adjoint.add("ReduceSum", [products], keepdims=0)
    rank = len(shapes[error.layer])
    channel = 1 if node.op_type == "Conv" else rank - 1
    others = adjoint.store(np.array([axis for axis in range(rank) if axis != channel], np.int64))
    return adjoint.add("ReduceL2", [adjoint.add("ReduceSum", [products, others])], keepdims=0)


def _rounding(adjoint: Adjoint, name: str, params: QuantizationParams | None) -> str:
    if params is None:
        raise ValueError(f"rounding of {name!r} without a scale")
    stored = adjoint.store(params.scale), adjoint.store(params.zero_point)
    codes = adjoint.add("QuantizeLinear", [name, *stored])
    return adjoint.add("Sub", [adjoint.add("DequantizeLinear", [codes, *stored]), name])


def _add_seeds(program: onnx.ModelProto, fidelity: Fidelity, shapes: Shapes) -> dict[str, str]:
    """Add an input `edgekit_probe_N` for each float output; returns the weights of each tensor."""
    index = GraphIndex(program.graph)
    seeds: dict[str, str] = {}
    for number, output in enumerate(fidelity.float_outputs):
        name = program.graph.output[output].name
        if fidelity.softmax_axes[output] is not None:  # weights are those of its logits
            name = index.producers[name].input[0]
        probe = f"edgekit_probe_{number}"
        info = helper.make_tensor_value_info(probe, TensorProto.FLOAT, list(shapes[name]))
        program.graph.input.append(info)
        if name in seeds:  # logits may be an output beside their softmax
            total = f"edgekit_probes_{number}"
            program.graph.node.append(helper.make_node("Add", [seeds[name], probe], [total]))
            probe = total
        seeds[name] = probe
    return seeds


def _same_shapes(feeds: Feeds, first: Mapping[str, NDArray[np.generic]]) -> bool:
    return all(feeds[name].shape == value.shape for name, value in first.items())
