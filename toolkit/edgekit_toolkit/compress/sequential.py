"""Rounds the weights of a model layer by layer. Each layer is fitted to its inputs in the rounded model."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from edgekit_toolkit.compress.compression import CodedWeight, Compression
from edgekit_toolkit.compress.moments import Moments
from edgekit_toolkit.compress.rounding import (
    Spread,
    choose_scale,
    fit_scale,
    is_coarse,
    measure_errors,
    round_rows,
)
from edgekit_toolkit.compress.twin_run import Quantize, TwinRun
from edgekit_toolkit.onnx_graph.layers import Floats, Layer, find_layers
from edgekit_toolkit.samples.generated import Feeds

MAX_COLUMNS: Final = 4096
"""The maximum number of inputs per channel of a layer that is rounded. The second moment of so many inputs
takes 128 MB. Wider layers are not rounded."""
_LEAST_NOISE: Final = 1e-12  # float32 has no finer steps of a bias
_REFITS: Final = 2  # fits of a step to its codes. Further fits change nothing

# Takes a layer and its rows. Returns the step of each row, float64 [G, R, 1], or None for the step of least
# error.
ChooseStep = Callable[[Layer, Floats], Floats | None]


def least_error(_layer: Layer, _rows: Floats) -> None:
    """Return None, so that `round_weights` chooses the step of least error for each row."""


def find_roundable_layers(model: onnx.ModelProto) -> list[Layer]:
    """Return the layers that can be rounded: those with up to `MAX_COLUMNS` columns and finite weights."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    return [
        layer
        for layer in find_layers(model)
        if layer.columns <= MAX_COLUMNS and np.isfinite(numpy_helper.to_array(tensors[layer.weight])).all()
    ]


def round_weights(
    model: onnx.ModelProto,
    samples: Sequence[Feeds],
    *,
    peak: int,
    fine_peak: int = 127,
    choose_step: ChooseStep = least_error,
    threads: int,
    quantize: Quantize = lambda _name, values: values,
    alone: bool = False,
    coarse_biases: bool = False,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Compression:
    """Return the weights of layers as codes, and biases that keep the means of the layers' outputs.

    Layers that `find_roundable_layers` does not return, or that no sample reaches, are not changed.

    Args:
        model: The float model.
        samples: The inputs for measuring the moments.
        peak: The largest code, 1 to 127.
        fine_peak: The largest code of grouped layers.
        choose_step: Takes a layer and its weights, [G, R, K], with G groups and R rows in each group. Returns
            the step of each row, [G, R, 1], or None for the steps with the least error.
        threads: The number of threads of one inference.
        quantize: Takes the name and the float values of a layer's input. Returns the values after
            quantization, as floats.
        alone: Whether to round each layer as if all other layers and the activations were float.
        coarse_biases: Whether to round biases to the precision of weights, so that they compress better.
        progress: Called with the number of the current layer and the number of layers.

    Raises:
        BackendError: onnxruntime cannot run a part of the model.
    """
    layers = find_roundable_layers(model)
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    readers = Counter(name for node in model.graph.node for name in node.input)
    run = TwinRun(model, layers, samples, threads=threads, quantize=quantize, is_single=alone)
    weights: dict[str, CodedWeight] = {}
    values: dict[str, NDArray[Any]] = {} if alone else run.weights
    for number, (layer, float_inputs, inputs) in enumerate(run):
        progress(number + 1, len(layers))
        rows, patches = layer.to_rows(constants[layer.weight]), layer.gather(inputs)
        if not len(patches):  # no sample reaches the layer
            continue
        float_patches = patches if alone else layer.gather(float_inputs)
        moments = Moments.measure(patches, float_patches, centred=bool(layer.bias))
        if not np.isfinite(moments.cross).all():
            continue
        if layer.weight not in weights:
            own_peak = fine_peak if layer.groups > 1 else peak
            weights[layer.weight] = _round(layer, rows, moments, own_peak, choose_step)
            values[layer.weight] = weights[layer.weight].floats(layer.channel_axis)
        if layer.bias and readers[layer.bias] == 1:
            rounded = layer.to_rows(values[layer.weight])
            bias = constants[layer.bias] + moments.bias_change(rows, rounded)
            if coarse_biases:
                bias = _coarsen_to_noise(bias, rounded - moments.fit(rows), moments.damped)
            values[layer.bias] = bias.astype(np.float32)
    biases = {name: np.asarray(value, np.float32) for name, value in values.items() if name not in weights}
    return Compression(weights, biases)


def _round(layer: Layer, rows: Floats, moments: Moments, peak: int, choose_step: ChooseStep) -> CodedWeight:
    """Return the codes of a layer's rows."""
    fitted, moment = moments.fit(rows), moments.damped
    spread = Spread(moment)
    step = choose_step(layer, fitted)
    scale = (_own_step(fitted, moment, peak, spread) if step is None else step).astype(np.float32)
    codes = round_rows(fitted, moment, scale.astype(np.float64), peak, spread)
    return CodedWeight(layer.from_rows(codes).astype(np.int8), scale.reshape(layer.channels))


def _coarsen_to_noise(bias: Floats, errors: Floats, moment: Floats) -> Floats:
    """Return a bias in multiples of the power of two whose rounding leaves about the noise of a weight."""
    noise = float(measure_errors(errors, moment).mean()) / errors.shape[2]
    step = 2.0 ** np.floor(np.log2(12 * max(noise, _LEAST_NOISE)) / 2)
    coarse: Floats = np.rint(bias / step) * step
    return coarse


def _own_step(rows: Floats, moment: Floats, peak: int, spread: Spread) -> Floats:
    """Return the step of each row that suits its weights."""
    if not is_coarse(peak):
        step: Floats = np.maximum(np.abs(rows).max(axis=2, keepdims=True), 1e-30) / peak
        return step
    step = choose_scale(rows, moment, peak)
    for _ in range(_REFITS):
        step = fit_scale(round_rows(rows, moment, step, peak, spread), rows, moment, step)
    return step
