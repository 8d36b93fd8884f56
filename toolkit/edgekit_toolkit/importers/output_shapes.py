"""Infers the shapes of outputs for which the model states none, and corrects them with test runs.

The shape inference of ONNX is wrong for some operators. For example, a `Slice` of opset 10 keeps the name of
the axis that it cuts, and a `ConvTranspose` with `output_shape` loses the axes of the image.
"""

from collections.abc import Iterator, Mapping, Sequence

import onnx
from onnx import helper, shape_inference

from edgekit_runtime.errors import BackendError, ModelError
from edgekit_runtime.sessions.ort import OrtOptions
from edgekit_toolkit.onnx_graph.specs import input_specs, tensor_specs
from edgekit_toolkit.openings.sessions import open_ort
from edgekit_toolkit.samples.generated import bind_dims, generate_feeds

Shape = tuple[int | str, ...]


def infer_outputs(model: onnx.ModelProto) -> list[str]:
    """Infer the shapes of outputs without a shape in place, and return the names of these outputs.

    Raises:
        ModelError: Shapes contradict each other.
    """
    graph = model.graph
    unstated = [value.name for value in graph.output if not value.type.tensor_type.HasField("shape")]
    if not unstated:
        return []
    stored = {tensor.name: tensor for tensor in graph.initializer}
    for value in graph.output:  # a stored output without a shape spoils the inference of all others
        if value.name in unstated and value.name in stored:
            tensor = stored[value.name]
            value.CopyFrom(helper.make_tensor_value_info(value.name, tensor.data_type, list(tensor.dims)))
    try:
        inferred = shape_inference.infer_shapes(model)
    except Exception as err:  # InferenceError, RuntimeError and ValueError, by the cause
        raise ModelError(f"outputs have no shape, and none can be inferred: {err}") from err
    for value, settled in zip(graph.output, inferred.graph.output, strict=True):
        value.CopyFrom(settled)
    return unstated


def correct_outputs(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Run the model. If an axis of an output does not have the stated size, make the axis free in place.

    `names` are the outputs to correct. The engine must be able to load the model.
    """
    if not names:
        return
    shapes = {spec.name: spec.shape for spec in tensor_specs(model)[1]}
    for sizes, measured in _runs(model):
        shapes |= {name: _confirmed(name, shapes[name], measured[name], sizes) for name in names}
    for value in model.graph.output:
        if value.name in names:
            kind = value.type.tensor_type.elem_type
            value.CopyFrom(helper.make_tensor_value_info(value.name, kind, shapes[value.name]))


def _confirmed(name: str, shape: Shape, measured: Shape, sizes: Mapping[str, int]) -> Shape:
    """Return the stated shape of an output; an axis gets a new name if runs gave it another size.

    Args:
        name: name of the output.
        shape: sizes, or names of free dimensions.
        measured: sizes in the run.
        sizes: sizes of the inputs' free dimensions in the run.
    """
    if len(shape) != len(measured):
        return tuple(f"{name}_{axis}" for axis in range(len(measured)))
    # A name that no input has may stand for any size.
    return tuple(
        stated
        if (sizes.get(stated, size) if isinstance(stated, str) else stated) == size
        else f"{name}_{axis}"
        for axis, (stated, size) in enumerate(zip(shape, measured, strict=True))
    )


def _runs(model: onnx.ModelProto) -> Iterator[tuple[Mapping[str, int], Mapping[str, Shape]]]:
    """Yield sizes of the free dimensions with which the model runs, and the shapes of its outputs then."""
    inputs = input_specs(model)
    try:
        sizes = bind_dims(model)
        content = model.SerializeToString()
        # The second run tells an axis that follows the batch from one that has always 1 element.
        for larger in (0, 1):
            run_sizes = {name: size + larger * index for index, (name, size) in enumerate(sizes.items(), 1)}
            feeds = generate_feeds(inputs, 1, 0, run_sizes)[0]
            outputs = open_ort(content, OrtOptions(threads=1, optimise=False), feeds).run(feeds)
            yield run_sizes, {name: array.shape for name, array in outputs.items()}
    except (BackendError, ModelError):
        return
