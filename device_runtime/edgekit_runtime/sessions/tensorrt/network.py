"""Converts an ONNX model to a serialized engine with a given TensorRT module.

TensorRT 10 (`tensorrt`) takes the precision as a flag of the builder. TensorRT-RTX (`tensorrt_rtx_bindings`)
takes all types from the model, and can build without a GPU.

Source: NVIDIA TensorRT 10.3 and 10.16 Python API reference, chapters Builder, Network, OnnxParser.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

_MISSING_GPU: Final = "CUDA driver version is insufficient"  # logged on every machine without a GPU
_MAX_LOG_LINES: Final = 20
BATCH_RANGE: Final = (1, 1, 8)  # smallest, usual, largest

Ranges = Mapping[str, Sequence[Sequence[int]]]
"""A dict from input names to the smallest, usual and largest shape."""


class RefusedError(Exception):
    """TensorRT refused the model or its shapes. The messages are in `args`."""


class ParseError(RefusedError):
    """The parser of TensorRT does not support the model."""


def make_log(trt: Any) -> Any:
    """Return a TensorRT logger. `errors` contains the first 20 errors, and `text` joins them."""

    class BuildLog(trt.ILogger):  # type: ignore[misc]  # its type is not known here
        def __init__(self) -> None:
            trt.ILogger.__init__(self)  # the binding requires this very call
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            is_error = severity in {trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR}
            if is_error and _MISSING_GPU not in message and len(self.errors) < _MAX_LOG_LINES:
                self.errors.append(_one_line(message))

        @property
        def text(self) -> str:
            return "; ".join(self.errors) or "TensorRT gave no reason"

    return BuildLog()


def _one_line(message: str) -> str:
    return " ".join(line.strip() for line in message.splitlines() if _MISSING_GPU not in line)


def parse(trt: Any, log: Any, network: Any, model: bytes) -> None:
    """Parse an ONNX model into `network`.

    Raises:
        ParseError: The model is not supported. The messages state the operator, node name and reason.
    """
    parser = trt.OnnxParser(network, log)
    if not parser.parse(model):
        raise ParseError(*(_parser_error(parser.get_error(index)) for index in range(parser.num_errors)))


def _parser_error(error: Any) -> str:
    # For an unknown operator the parser's whole description is "false".
    code = str(error.code()).rpartition(".")[2]
    message = f"{code}: {_one_line(error.desc())}".removesuffix(": false")
    return f"{error.node_operator()} '{error.node_name()}': {message}" if error.node_operator() else message


def make_profile(builder: Any, network: Any, ranges: Ranges) -> Any:
    """Return the optimization profile, or None if no input has free dimensions.

    `ranges` is a dict from the names of inputs with free dimensions to their shapes. If only the first
    dimension of an input is free, the input may be missing. `BATCH_RANGE` is then used.

    Raises:
        RefusedError: `ranges` has an unknown input or lacks an input.
    """
    inputs = {tensor.name: tensor for tensor in map(network.get_input, range(network.num_inputs))}
    unknown = sorted(ranges.keys() - inputs.keys())
    if unknown:
        raise RefusedError(f"dims names {', '.join(unknown)}, but the inputs are {', '.join(inputs)}")
    profile = None
    for name, tensor in inputs.items():
        shape = tuple(tensor.shape)
        if -1 in shape:
            profile = profile or builder.create_optimization_profile()
            profile.set_shape(name, *(ranges[name] if name in ranges else _batches(name, shape)))
    return profile


def _batches(name: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    free = [axis for axis, size in enumerate(shape) if size == -1]
    if free != [0]:
        raise RefusedError(f"input '{name}' has free dimensions {free}: give its shapes in dims")
    return [(size, *shape[1:]) for size in BATCH_RANGE]


def is_quantized(trt: Any, network: Any) -> bool:
    """Return whether `network` has quantize or dequantize layers."""
    kinds = (trt.LayerType.QUANTIZE, trt.LayerType.DEQUANTIZE)
    return any(layer.type in kinds for layer in _layers(network))


def _layers(network: Any) -> Iterator[Any]:
    return map(network.get_layer, range(network.num_layers))


def remove_quantization(trt: Any, network: Any) -> list[Any]:
    """Convert a quantized network to float in place. Keep the returned constants until the engine is built.

    Pairs of quantize and dequantize layers are bypassed, and quantized weights become float constants.

    Raises:
        RefusedError: A layer dequantizes int4 values, or a tensor that is neither constant nor quantized.
    """
    producers = {
        layer.get_output(i).name: layer for layer in _layers(network) for i in range(layer.num_outputs)
    }
    marked = {network.get_output(index).name for index in range(network.num_outputs)}
    constants: list[Any] = []
    for layer in [layer for layer in _layers(network) if layer.type == trt.LayerType.DEQUANTIZE]:
        source = producers.get(layer.get_input(0).name)
        if source is not None and source.type == trt.LayerType.QUANTIZE:
            plain = source.get_input(0)
        elif source is not None and source.type == trt.LayerType.CONSTANT:
            plain = _add_values(trt, network, layer, producers, constants)
        else:
            raise RefusedError(f"'{layer.name}' dequantizes neither a quantized tensor nor a constant")
        _replace(network, layer.get_output(0), plain, marked)
    return constants


def _replace(network: Any, old: Any, new: Any, marked: set[str]) -> None:
    for layer in list(_layers(network)):
        for index in range(layer.num_inputs):
            tensor = layer.get_input(index)
            if tensor is not None and tensor.name == old.name:
                layer.set_input(index, new)
    if old.name in marked:
        name = old.name
        network.unmark_output(old)
        old.name = f"{name}.quantized"
        copy = network.add_identity(new).get_output(0)
        copy.name = name
        network.mark_output(copy)


def _add_values(
    trt: Any, network: Any, layer: Any, producers: Mapping[str, Any], constants: list[Any]
) -> Any:
    """Return a constant tensor with the output of a `DequantizeLinear` of stored codes."""
    codes, scale = (_stored(trt, producers.get(layer.get_input(index).name)) for index in (0, 1))
    zero_point = np.float32(0)
    if layer.num_inputs > 2 and layer.get_input(2) is not None:
        zero_point = _stored(trt, producers.get(layer.get_input(2).name)).reshape(-1)
    layer.__class__ = trt.IDequantizeLayer  # get_layer returns the base class, without `axis`
    along = [1] * codes.ndim
    if scale.size > 1:
        if scale.size != codes.shape[layer.axis]:
            raise RefusedError(f"'{layer.name}' has {scale.size} scales for codes {codes.shape}")
        along[layer.axis] = scale.size
        zero_point = np.broadcast_to(zero_point, scale.size).reshape(along)
    values = (codes.astype(np.float32) - zero_point) * scale.reshape(along if scale.size > 1 else ())
    values = np.ascontiguousarray(values, np.float32).reshape(codes.shape)
    constants.append(values)  # TensorRT keeps the address, not the values
    return network.add_constant(codes.shape, trt.Weights(values)).get_output(0)


def _stored(trt: Any, layer: Any) -> Any:
    if layer is None or layer.type != trt.LayerType.CONSTANT:
        raise RefusedError("a scale, zero point or weight is not a constant")
    layer.__class__ = trt.IConstantLayer
    try:
        return np.asarray(layer.weights).reshape(tuple(layer.shape))
    except (TypeError, ValueError) as cause:
        raise RefusedError(f"the constant '{layer.name}' has a type that numpy does not have") from cause
