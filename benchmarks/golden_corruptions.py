"""Corruptions of a packaged model's constants: those of a faulty build, a wrong file, a damaged tool."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from edgekit_toolkit.tflite.flatbuffer import TYPES, pack, parse

_FOUR_BITS: Final = (TensorProto.INT4, TensorProto.UINT4)
_WHOLE_NUMBERS: Final = (TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING)
_TFLITE_TYPES: Final = {"FLOAT32": "<f4", "FLOAT16": "<f2", "INT8": "i1", "INT32": "<i4"}

Array = NDArray[Any]


class OnnxConstants:
    """Those of an ONNX model; the other class has the same methods.

    Attributes:
        weights: constants of several axes, in the order of the layers.
        biases: constants of one axis.
        zero_points: zero points of activations.
    """

    def __init__(self, content: bytes) -> None:
        self._model = onnx.load_from_string(content)
        graph = self._model.graph
        self._tensors = {tensor.name: tensor for tensor in graph.initializer}
        self._scales: dict[str, str] = {}
        parameters: set[str] = set()
        zero_points: set[str] = set()
        for node in graph.node:
            if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
                parameters.update(node.input[1:])
                if node.input[0] in self._tensors:
                    self._scales[node.input[0]] = node.input[1]
                else:
                    zero_points.update(name for name in node.input[2:] if name in self._tensors)
        order = {name: place for place, node in reversed(list(enumerate(graph.node))) for name in node.input}
        names = sorted(self._tensors, key=lambda name: order.get(name, 0))
        kept = [name for name in names if name not in parameters and self._is_numbers(name)]
        self.weights = [name for name in kept if _axes(self._tensors[name].dims) > 1]
        self.biases = [name for name in kept if _axes(self._tensors[name].dims) == 1]
        self.zero_points = sorted(zero_points)

    def _is_numbers(self, name: str) -> bool:
        return self._tensors[name].data_type not in _WHOLE_NUMBERS

    def get(self, key: str) -> Array:
        return numpy_helper.to_array(self._tensors[key]).copy()

    def put(self, key: str, value: Array) -> None:
        tensor = self._tensors[key]
        if tensor.data_type in _FOUR_BITS:
            values = value.astype(np.int8).reshape(-1).tolist()
            tensor.CopyFrom(onnx.helper.make_tensor(key, tensor.data_type, tensor.dims, values))
        else:
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(value), key))

    def scale(self, key: str, factor: float) -> None:
        name = self._scales.get(key, key)
        value = self.get(name)
        self.put(name, (value * factor).astype(value.dtype))

    def shift_zero_point(self, key: str, step: int) -> None:
        value = self.get(key)
        limits = np.iinfo(value.dtype)
        self.put(key, np.clip(value.astype(int) + step, limits.min, limits.max).astype(value.dtype))

    def swap_scales(self, key: str, first: int, second: int) -> None:
        name = self._scales.get(key)
        if name is not None and self.get(name).size > max(first, second):
            self.put(name, _swapped(self.get(name), 0, first, second))

    def content(self) -> bytes:
        return bytes(self._model.SerializeToString())


class TfliteConstants:
    def __init__(self, content: bytes) -> None:
        self._model = parse(content)
        self._tensors = self._model.subgraphs[0].tensors
        operators = self._model.subgraphs[0].operators
        order = {
            int(key): place
            for place, operator in reversed(list(enumerate(operators)))
            for key in operator.inputs
        }
        stored = sorted((key for key in order if key >= 0 and self._is_stored(key)), key=order.__getitem__)
        self.weights = [key for key in stored if _axes(self._tensors[key].shape) > 1]
        self.biases = [key for key in stored if _axes(self._tensors[key].shape) == 1]
        self.zero_points = [
            key
            for key, tensor in enumerate(self._tensors)
            if not self._data(key).size and TYPES[tensor.type] == "INT8" and len(self._parameters(key)) == 1
        ]

    def _data(self, key: int) -> Array:
        data = self._model.buffers[self._tensors[key].buffer].data
        return np.zeros(0, np.uint8) if data is None else np.asarray(data, np.uint8)

    def _parameters(self, key: int) -> Array:
        quantization = self._tensors[key].quantization
        scale = None if quantization is None else quantization.scale
        return np.zeros(0) if scale is None else np.asarray(scale)

    def _is_stored(self, key: int) -> bool:
        kind = TYPES[self._tensors[key].type]
        is_shape = kind == "INT32" and not len(self._parameters(key))
        return bool(self._data(key).size) and kind in _TFLITE_TYPES and not is_shape

    def get(self, key: int) -> Array:
        tensor = self._tensors[key]
        values = np.frombuffer(self._data(key).tobytes(), _TFLITE_TYPES[TYPES[tensor.type]])
        return values.reshape(tensor.shape).copy()

    def put(self, key: int, value: Array) -> None:
        tensor = self._tensors[key]
        data = np.ascontiguousarray(value).astype(_TFLITE_TYPES[TYPES[tensor.type]]).tobytes()
        self._model.buffers[tensor.buffer].data = np.frombuffer(data, np.uint8)

    def scale(self, key: int, factor: float) -> None:
        scales = self._parameters(key)
        if len(scales) and not TYPES[self._tensors[key].type].startswith("FLOAT"):
            self._tensors[key].quantization.scale = (scales * factor).astype(np.float32)
        else:
            self.put(key, self.get(key) * factor)

    def shift_zero_point(self, key: int, step: int) -> None:
        quantization = self._tensors[key].quantization
        quantization.zeroPoint = np.clip(np.asarray(quantization.zeroPoint) + step, -128, 127)

    def swap_scales(self, key: int, first: int, second: int) -> None:
        scales = self._parameters(key)
        if len(scales) > max(first, second):
            self._tensors[key].quantization.scale = _swapped(scales, 0, first, second)

    def content(self) -> bytes:
        return bytes(pack(self._model))


Constants = OnnxConstants | TfliteConstants


def _axes(shape: Sequence[int]) -> int:
    return sum(int(size) > 1 for size in shape)


def _swapped(value: Array, axis: int, first: int, second: int) -> Array:
    order = np.arange(value.shape[axis])
    order[[first, second]] = order[[second, first]]
    return value.take(order, axis)


def corruptions(
    content: bytes, engine: str, classes: int, generator: np.random.Generator
) -> Iterator[tuple[str, bytes]]:
    """Yield about thirty corruptions of a model: kind and file.

    Args:
        content: the model's file.
        engine: `ort` or `litert`.
        classes: number of classes, the size of the last axis of the output.
        generator: chooses layers, channels and classes.
    """

    def fresh() -> Constants:
        return OnnxConstants(content) if engine == "ort" else TfliteConstants(content)

    def choose(keys: Sequence[Any], count: int) -> list[Any]:
        return [keys[place] for place in generator.permutation(len(keys))[:count]]

    def changed(change: Callable[[Constants], None]) -> bytes:
        constants = fresh()
        change(constants)
        return constants.content()

    def edited(key: Any, edit: Callable[[Array], Array]) -> bytes:
        return changed(lambda constants: constants.put(key, edit(constants.get(key))))

    sound = fresh()
    weights, biases, zero_points = sound.weights, sound.biases, sound.zero_points
    for factor, count in ((1.05, 3), (1.25, 1), (0.5, 1)):
        for key in choose(weights, count):
            yield (
                f"layer scaled by {factor}",
                changed(lambda one, key=key, factor=factor: one.scale(key, factor)),
            )
    for key in choose(weights, 4):
        yield "channel zeroed", edited(key, lambda value: _without_channel(value, generator))
    for key in choose(zero_points, 4):
        step = int(generator.choice((-1, 1)))
        yield (
            "zero point off by one",
            changed(lambda one, key=key, step=step: one.shift_zero_point(key, step)),
        )
    if zero_points:
        yield (
            "all zero points off by one",
            changed(lambda one: [one.shift_zero_point(key, 1) for key in zero_points] and None),
        )
    for _ in range(3):
        first, second = generator.permutation(classes)[:2]
        swap = _swap_classes(sound, classes, int(first), int(second))
        if swap is not None:
            yield "two classes swapped", changed(swap)
    for key in choose([key for key in weights + biases if sound.get(key).dtype.itemsize > 1], 2):
        yield "byte order", edited(key, _other_byte_order)
    for share in (0.05, 0.1, 0.2, 0.4):
        yield (
            f"version before, {share:.0%} off",
            changed(lambda one, share=share: _shift_weights(one, share, generator)),
        )
    for key in choose(biases, 2):
        yield "bias zeroed", edited(key, np.zeros_like)
    for key in choose([key for key in weights if sound.get(key).ndim == 4], 2):
        yield (
            "kernels flipped",
            edited(key, lambda value: np.flip(value, (1, 2) if engine == "litert" else (2, 3))),
        )
    for key in choose(weights, 2):
        yield "two channels swapped", edited(key, lambda value: _swap_channels(value, generator))
    for key in choose(weights, 2):
        yield (
            "weights shifted by one",
            edited(key, lambda value: np.roll(value.reshape(-1), 1).reshape(value.shape)),
        )
    for key in choose([key for key in weights if sound.get(key).dtype == np.int8], 1):
        yield "codes halved", edited(key, lambda value: value // 2)


def _without_channel(value: Array, generator: np.random.Generator) -> Array:
    axis = int(np.argmax(value.shape)) if generator.random() < 0.5 else 0
    np.moveaxis(value, axis, 0)[generator.integers(value.shape[axis])] = 0
    return value


def _swap_channels(value: Array, generator: np.random.Generator) -> Array:
    axis = 0 if value.shape[0] > 1 else value.ndim - 1
    return _swapped(value, axis, *generator.permutation(value.shape[axis])[:2])


def _other_byte_order(value: Array) -> Array:
    swapped = value.byteswap()
    return np.nan_to_num(swapped, posinf=0, neginf=0) if swapped.dtype.kind == "f" else swapped


def _shift_weights(constants: Constants, share: float, generator: np.random.Generator) -> None:
    """Move each weight by a share of its layer's deviation, like some more training."""
    for key in constants.weights:
        value = constants.get(key)
        if value.dtype.kind not in "fi" or (value.dtype.itemsize == 1 and value.dtype != np.int8):
            continue
        moved = value.astype(np.float64)
        moved += share * moved.std() * generator.standard_normal(value.shape)
        if value.dtype.kind == "i":
            moved = np.clip(np.rint(moved), np.iinfo(value.dtype).min, np.iinfo(value.dtype).max)
        constants.put(key, moved.astype(value.dtype))


def _swap_classes(
    sound: Constants, classes: int, first: int, second: int
) -> Callable[[Constants], None] | None:
    """Return what swaps two classes in the last layer; None if no weights have as many channels."""
    last = [key for key in sound.weights if classes in sound.get(key).shape][-1:]
    keys = last + [key for key in sound.biases if sound.get(key).shape[-1:] == (classes,)][-1:]
    if not last:
        return None

    def swap(constants: Constants) -> None:
        for key in keys:
            value = constants.get(key)
            axis = 0 if value.shape[0] == classes else max(np.flatnonzero(np.array(value.shape) == classes))
            constants.put(key, _swapped(value, int(axis), first, second))
            constants.swap_scales(key, first, second)

    return swap
