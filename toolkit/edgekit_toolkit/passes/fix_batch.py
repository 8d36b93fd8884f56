"""Sets the batch size, or keeps it free, and records the shapes of all tensors.

With fixed shapes, later passes can fold shape computations and engines can plan their memory.
"""

from collections.abc import Iterable

import onnx
from onnx import shape_inference

from edgekit_toolkit.onnx_graph.index import copy_model
from edgekit_toolkit.onnx_graph.specs import batch_dims, free_dims, real_inputs, tensor_specs


def run(model: onnx.ModelProto, batch: int | None) -> onnx.ModelProto:
    """Return a copy of `model` with inferred shapes and with names for all free dimensions.

    `batch` is the size of the batch dimensions, or None to keep them free.
    """
    result = copy_model(model)
    inputs, outputs = tensor_specs(model)
    sizes: dict[int | str, int] = {} if batch is None else dict.fromkeys(batch_dims(inputs), batch)
    names = set(free_dims(inputs))
    for value, spec in zip(real_inputs(result.graph), inputs, strict=True):
        _write(value, (sizes.get(size, size) for size in spec.shape))
    for value, spec in zip(result.graph.output, outputs, strict=True):
        # A free dimension that no input has is only a name; without it, inference may find the size.
        stated = (size if isinstance(size, int) or size in names else None for size in spec.shape)
        _write(value, (None if size is None else sizes.get(size, size) for size in stated))
    del result.graph.value_info[:]
    result = shape_inference.infer_shapes(result, data_prop=True)
    _, inferred = tensor_specs(result)
    for value, inferred_shape, before in zip(result.graph.output, inferred, outputs, strict=True):
        pairs = zip(inferred_shape.shape, before.shape, strict=True)
        _write(value, (size if isinstance(size, int) or size in names else name for size, name in pairs))
    return result


def _write(value: onnx.ValueInfoProto, shape: Iterable[int | str | None]) -> None:
    """Write the shape of a tensor in place; None is a free dimension without a name."""
    for dim, size in zip(value.type.tensor_type.shape.dim, shape, strict=True):
        dim.Clear()
        if isinstance(size, int):
            dim.dim_value = size
        elif size is not None:
            dim.dim_param = size
