"""The result of a compression, which a recipe stores: the remaining channels and the coded weights.

Channels are removed first. Then each remaining weight is replaced by the product of its code and its step, so
that the code can be computed from the weight when a quantized model is written.
"""

import base64
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from edgekit_toolkit.onnx_graph.channels import Channels, check_channels, slice_channels
from edgekit_toolkit.onnx_graph.index import GraphIndex, copy_model
from edgekit_toolkit.onnx_graph.layers import find_layers

_MAX_CODES: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight that is stored as integer codes.

    Attributes:
        codes: The codes, int8 in the shape of the weight.
        scale: The step between two codes, float32 [output channels].
    """

    codes: NDArray[np.int8]
    scale: NDArray[np.float32]

    @property
    def bits(self) -> int:
        """The number of bits for each code, see `count_bits`."""
        return count_bits(self.codes)

    def floats(self, channel_axis: int) -> NDArray[np.float32]:
        """Return the codes times the scale, float32 in the shape of the weight."""
        along = [1] * self.codes.ndim
        along[channel_axis] = -1
        return np.asarray(self.codes * self.scale.reshape(along), np.float32)


@dataclass(frozen=True, slots=True)
class Compression:
    """Coded weights and removed channels of a float model, from which quantized models are made.

    Attributes:
        weights: A dict from initializer name to coded weight.
        biases: A dict from initializer name to bias, float32 [channels].
        channels: A dict from the name of a channel group to its remaining channels. Groups that keep all
            channels are not included. Weights and biases have only the remaining channels.
        is_distilled: Whether the weights were trained on the float model's outputs before rounding.
    """

    weights: Mapping[str, CodedWeight] = field(default_factory=dict)
    biases: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    channels: Channels = field(default_factory=dict)
    is_distilled: bool = False

    def slice(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Return the model with only the remaining channels, or the model itself if none were removed.

        Raises:
            ValueError: The model does not have these groups or channels.
        """
        return slice_channels(model, self.channels) if self.channels else model

    def apply(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Return a copy of a model that `slice` returned, with the decoded weights and biases.

        Raises:
            ValueError: The model lacks a weight or bias, or it has another shape.
        """
        result = copy_model(model)
        axes = {layer.weight: layer.channel_axis for layer in find_layers(model)}
        index = GraphIndex(result.graph)
        values = {name: weight.floats(axes[name]) for name, weight in self.weights.items() if name in axes}
        values |= self.biases
        for name in [*self.weights, *self.biases]:
            tensor = index.initializers.get(name)
            if tensor is None or name not in values or values[name].shape != tuple(tensor.dims):
                raise ValueError(f"no weight {name!r} of the shape of its codes")
            tensor.CopyFrom(numpy_helper.from_array(values[name], name))
        return result

    @property
    def mean_bits(self) -> float:
        """The mean number of bits per code, if an ideal entropy coder encodes each layer separately."""
        return 8 * self.code_bytes / max(sum(weight.codes.size for weight in self.weights.values()), 1)

    @property
    def code_bytes(self) -> float:
        """The size of all codes in bytes in the ideal coder of `mean_bits`."""
        return sum(entropy_bits(weight.codes) for weight in self.weights.values()) / 8

    def scales(self) -> dict[str, NDArray[np.float32]]:
        """Return a dict from the initializer name of a weight to its scale, float32 [channels]."""
        return {name: weight.scale for name, weight in self.weights.items()}

    def scales_of_outputs(self, model: onnx.ModelProto) -> dict[str, NDArray[np.float32]]:
        """Return a dict from the output name of a layer to the scale of its weight, float32 [channels].

        If a Relu or Clip follows a layer, the output of that node is also a key, because converted models
        may use this name for the layer.
        """
        index = GraphIndex(model.graph)
        scales = {}
        for layer in find_layers(model):
            if layer.weight in self.weights:
                readers = [node for node in index.consumers(layer.name) if node.op_type in {"Relu", "Clip"}]
                for name in (layer.name, *(node.output[0] for node in readers)):
                    scales[name] = self.weights[layer.weight].scale
        return scales

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `from_json` reads."""
        return {
            "weights": {
                name: {
                    "shape": list(weight.codes.shape),
                    "codes": _encode(zlib.compress(weight.codes.tobytes(), 9)),
                    "scale": _encode_floats(weight.scale),
                }
                for name, weight in sorted(self.weights.items())
            },
            "biases": {name: _encode_floats(value) for name, value in sorted(self.biases.items())},
            **({"channels": _sorted_lists(self.channels)} if self.channels else {}),
            **({"distilled": True} if self.is_distilled else {}),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Compression":
        """Parse a JSON object that `to_json` returned.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: The object is malformed.
        """
        return cls(
            {name: _read_weight(name, item) for name, item in value["weights"].items()},
            {name: _read_floats(name, text) for name, text in value["biases"].items()},
            _read_channels(value.get("channels", {})),
            value.get("distilled", False) is True,
        )


def count_bits(codes: NDArray[np.int8]) -> int:
    """Return the number of bits of each code in two's complement, at least 2."""
    low, high = int(codes.min(initial=0)), int(codes.max(initial=0))
    return max(max(high, -low - 1).bit_length() + 1, 2)


def entropy_bits(codes: NDArray[Any]) -> float:
    """Return the total number of bits of `codes` in an ideal entropy coder.

    `codes` are one or more whole numbers.
    """
    values = codes.astype(np.int64).reshape(-1)
    counts = np.bincount(values - values.min())
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def _sorted_lists(channels: Channels) -> dict[str, list[int]]:
    return {name: list(indices) for name, indices in sorted(channels.items())}


def _read_channels(value: Mapping[str, Any]) -> Channels:
    channels = {name: tuple(indices) for name, indices in value.items()}
    if not all(type(index) is int for indices in channels.values() for index in indices):
        raise TypeError("channels are not lists of whole numbers")
    check_channels(channels)
    return channels


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _encode_floats(values: NDArray[np.float32]) -> str:
    return _encode(values.astype("<f4").tobytes())


def _read_floats(name: str, text: str) -> NDArray[np.float32]:
    values = np.frombuffer(base64.b64decode(text, validate=True), "<f4").astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError(f"floats of {name!r} are not all finite")
    return values


def _read_weight(name: str, value: Mapping[str, Any]) -> CodedWeight:
    shape = tuple(int(size) for size in value["shape"])
    count = math.prod(shape)
    if min(shape, default=0) < 1 or count > _MAX_CODES:
        raise ValueError(f"codes of {name!r} have shape {list(shape)}")
    unpacker = zlib.decompressobj()
    try:
        codes = unpacker.decompress(base64.b64decode(value["codes"], validate=True), count + 1)
    except zlib.error as error:
        raise ValueError(f"codes of {name!r} are damaged: {error}") from error
    if len(codes) != count:
        raise ValueError(
            f"codes of {name!r}: expected {count}, got {'more' if len(codes) > count else len(codes)}"
        )
    scale = _read_floats(name, value["scale"])
    if scale.size not in shape or not (scale > 0).all():
        raise ValueError(f"scales of {name!r} are not one positive number a channel")
    return CodedWeight(np.frombuffer(codes, np.int8).reshape(shape), scale)
