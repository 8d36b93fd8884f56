"""Computes a lower bound on the sizes of all forms of a model, without building any form."""

import math
from collections.abc import Mapping
from typing import Final

from edgekit_runtime.errors import BudgetError, ModelError
from edgekit_toolkit.compress.pruning import MAX_MULTIPLE, PRUNED_SHARES, count_macs, find_least_channels
from edgekit_toolkit.models.model import StoredTensor
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.channels import find_groups
from edgekit_toolkit.onnx_graph.layers import find_layers
from edgekit_toolkit.quantize.quantizer import Quantizer

_MIN_INT4_ELEMENTS: Final = 4096  # of a matrix, as both writers have it. All other weights take at least int8


def check_smallest_form(
    quantizer: Quantizer, max_bytes: float, *, prunable: OnnxModel | None, dims: Mapping[str, int]
) -> None:
    """Check that some form of the model may meet the limit on the size of the package.

    `max_bytes` is the limit. `prunable` is the float model whose channels may be pruned, or None.

    Raises:
        BudgetError: In all forms, the weights alone exceed the limit.
    """
    least_bytes = find_least_bytes(quantizer)
    if least_bytes > max_bytes and prunable is not None:
        least_bytes -= find_pruned_bytes(prunable, dims, multiple=MAX_MULTIPLE)
    if least_bytes > max_bytes:
        needed = f"size={math.ceil(least_bytes / 1e3)}kB or more, or a smaller model"
        raise BudgetError(
            f"no form of the model keeps size={max_bytes / 1e6:g}MB: in the smallest (int8, int4 in large"
            " matrices, without channels that can be pruned, if it can be quantized) it has at least"
            f" {least_bytes:,} bytes, so nothing was searched. To package: {needed}",
            binding=("size",),
            needed=needed,
        )


def find_least_bytes(quantizer: Quantizer) -> int:
    """Return a lower bound on the size in bytes of all forms without pruning.

    This is the minimum size of the weights, or the size of the model if it has only one form.
    """
    if quantizer.why_no_forms() is not None:
        return quantizer.source_form()[1].size_bytes
    return sum(map(_least_bytes, quantizer.model.stored_tensors()))


def find_pruned_bytes(model: OnnxModel, dims: Mapping[str, int], *, multiple: int) -> int:
    """Return an upper bound on the bytes of int8 weights and biases that pruning can save.

    Pruning removes at most 40 % of the multiply-accumulates (MACs), see `PRUNED_SHARES`. The last removed
    channels may exceed this share, so their MACs are added. A layer loses the same share of its weights as of
    its MACs. So most bytes are saved if the layers with the most weights per MAC are pruned first.

    Args:
        model: The float model.
        dims: The sizes of the free dimensions.
        multiple: The number of remaining channels in each `ChannelGroup` must be a multiple of this number.
    """
    proto = model.proto
    try:
        macs = count_macs(proto, dims)
    except ModelError:
        return 0  # such a model is not pruned
    step_macs = 0.0
    remaining: dict[str, float] = {}  # the least share of each layer's weights
    for group in find_groups(proto):
        prunable = max(group.size - find_least_channels(group), 0) if group.consumers else 0
        layers = (*group.producers, *group.depthwise, *group.consumers)
        for layer in layers:
            remaining[layer.name] = remaining.get(layer.name, 1.0) * (1 - prunable / group.size)
        group_macs = sum(macs[layer.name] for layer in layers)
        step_macs = max(step_macs, min(multiple, prunable) / group.size * group_macs)
    allowed_macs = max(PRUNED_SHARES) * sum(macs.values()) + step_macs
    saved_bytes = 0.0
    for layer in sorted(find_layers(proto), key=lambda layer: macs[layer.name] / math.prod(layer.shape)):
        share = 1 - remaining.get(layer.name, 1.0)
        if macs[layer.name]:
            share = min(share, allowed_macs / macs[layer.name])
        allowed_macs -= share * macs[layer.name]
        saved_bytes += share * (math.prod(layer.shape) + (layer.channels if layer.bias else 0))
    return math.ceil(saved_bytes)


def _least_bytes(tensor: StoredTensor) -> int:
    if tensor.dtype != "float32":
        return tensor.size_bytes
    elements = math.prod(tensor.shape)
    return elements // 2 if len(tensor.shape) == 2 and elements >= _MIN_INT4_ELEMENTS else elements
