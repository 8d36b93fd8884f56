"""Fix the batch to a number, or keep it free, and write down every shape that follows.

Fixed shapes let later passes compute reshapes once, and engines plan their memory.
"""

import onnx
from onnx import shape_inference

from edgekit_toolkit.feeds import batch_dims
from edgekit_toolkit.specs import dimension, tensor_specs


def run(model: onnx.ModelProto, batch: int | None) -> onnx.ModelProto:
    """Return a copy of `model` with inferred shapes, in which every free dimension has a name of its own.

    Args:
        model: an imported model.
        batch: the size of the batch dimensions; None keeps them free.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    inputs, _ = tensor_specs(model)
    sizes = {} if batch is None else dict.fromkeys(batch_dims(inputs), batch)
    named = {size for spec in inputs for size in spec.shape}
    for value in result.graph.input:
        _write(value, sizes)
    # A free dimension of an output that no input has is only a name; without it inference may find the size.
    for value in result.graph.output:
        _write(value, sizes, named)
    del result.graph.value_info[:]
    result = shape_inference.infer_shapes(result, data_prop=True)
    for value in result.graph.output:
        _write(value, sizes)
    return result


def _write(value: onnx.ValueInfoProto, sizes: dict[str, int], kept: set[int | str] | None = None) -> None:
    """Write the dimensions of a tensor in place; free ones that are not in `kept` lose their names."""
    for axis, size in enumerate(value.type.tensor_type.shape.dim):
        known = dimension(value.name, axis, size)
        known = sizes.get(known, known) if isinstance(known, str) else known
        size.Clear()
        if isinstance(known, int):
            size.dim_value = known
        elif kept is None or known in kept:
            size.dim_param = known
