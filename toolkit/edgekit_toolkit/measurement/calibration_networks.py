"""Small networks with random weights, whose times show how a device runs each kind of kernel.

They resemble networks that run on devices: stacks of convolutions, separable convolutions, dense layers,
attention, recurrent and temporal layers. Most of them also exist with 8-bit codes. Their outputs have no
meaning.
"""

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.models.model import Model

_OPSET: Final = 17
_IR_VERSION: Final = 8  # read by every supported release of onnxruntime
_SCALE: Final = 0.05  # of all codes. The values do not matter
INT8_SUFFIX: Final = "-int8"
"""The suffix of the name of a network with 8-bit codes. The name without it is that of the float network."""


def make_calibration_networks() -> dict[str, onnx.ModelProto]:
    """Return the calibration networks by name. The networks and their weights are the same in every call."""
    plans: dict[str, Callable[[_Builder], None]] = {
        "conv-large": lambda net: _stack(net, channels=32, size=56, layers=4),
        "conv-middle": lambda net: _stack(net, channels=64, size=28, layers=4),
        "conv-small": lambda net: _stack(net, channels=16, size=12, layers=4),
        "separable-large": lambda net: _separable(net, channels=32, size=56, blocks=4),
        "separable-middle": lambda net: _separable(net, channels=128, size=14, blocks=4),
        "separable-small": lambda net: _separable(net, channels=16, size=16, blocks=4),
        "separable-wide": lambda net: _separable(net, channels=8, size=112, blocks=2),
        "mobile-large": lambda net: _mobile(net, size=192, widths=(8, 16, 32, 32, 64)),
        "mobile-middle": lambda net: _mobile(net, size=128, widths=(16, 16, 32, 32, 64)),
        "mobile-small": lambda net: _mobile(net, size=96, widths=(8, 16, 32, 32, 64)),
        "pointwise": lambda net: _stack(net, channels=128, size=28, layers=3, kernel=1),
        "first-layer": lambda net: _stack(net, channels=3, size=96, layers=1, to=16),
        "dense": lambda net: _dense(net, width=512, layers=3),
        "dense-small": lambda net: _dense(net, width=48, layers=3),
    }
    networks: dict[str, onnx.ModelProto] = {}
    for name, plan in plans.items():
        for codes in (False, True):
            net = _Builder(codes=codes)
            plan(net)
            networks[f"{name}{INT8_SUFFIX}" if codes else name] = net.build()
    for name, plan in (("temporal", _temporal), ("attention", _attention), ("lstm", _lstm), ("maps", _maps)):
        net = _Builder(codes=False)
        plan(net)
        networks[name] = net.build()
    call = _Builder(codes=False)
    call.start(1)
    call.add("Relu")
    # Of one value: nearly all of its time is what the engine takes beside kernels.
    networks["call"] = call.build()
    return networks


@functools.cache
def calibration_names() -> frozenset[str]:
    return frozenset(make_calibration_networks())


def digest_networks(networks: Mapping[str, onnx.ModelProto]) -> str:
    """Return a digest that identifies the networks, as 16 hexadecimal digits.

    It is used to avoid comparing times of different networks. It does not include inferred shapes, which may
    differ between releases of onnx.
    """
    digest = hashlib.sha256()
    for name in sorted(networks):
        graph = networks[name].graph
        digest.update(name.encode())
        for part in (*graph.input, *graph.node, *graph.initializer):
            digest.update(part.SerializeToString(deterministic=True))
    return digest.hexdigest()[:16]


@functools.cache
def digest_calibration_networks() -> str:
    return digest_networks(make_calibration_networks())


@dataclass(kw_only=True)
class _Builder:
    """A network under construction: a chain of nodes.

    Attributes:
        codes: whether convolutions and dense layers compute with 8-bit codes.
    """

    codes: bool
    last: str = "input"
    shape: tuple[int, ...] = ()
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[TensorProto] = field(default_factory=list)
    values: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def start(self, *shape: int) -> None:
        """Give the input its shape."""
        self.shape = shape
        if self.codes:
            self.last = self._through_codes(self.last)

    def add(self, op: str, *others: str, **attributes: Any) -> str:
        """Add a node that reads the last tensor, then `others`; returns its output."""
        output = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, [self.last, *others], [output], name=output, **attributes))
        self.last = output
        return output

    def weight(self, *shape: int) -> str:
        """Add random weights; returns their name."""
        name = f"weight_{len(self.weights)}"
        values = self.values.standard_normal(shape).astype(np.float32)
        if not self.codes:
            self.weights.append(numpy_helper.from_array(values, name))
            return name
        codes = np.clip(values * 40, -127, 127).astype(np.int8)
        self.weights.append(numpy_helper.from_array(codes, f"{name}_codes"))
        scale, zero = self._scale(np.int8)
        self.nodes.append(helper.make_node("DequantizeLinear", [f"{name}_codes", scale, zero], [name]))
        return name

    def layer(self, op: str, *shape: int, **attributes: Any) -> None:
        """Add a convolution or dense layer with weights of this shape, and a Relu."""
        self.add(op, self.weight(*shape), **attributes)
        self.add("Relu")
        if self.codes:
            self.last = self._through_codes(self.last)

    def build(self) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "calibration",
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, self.shape)],
            [helper.make_tensor_value_info(self.last, TensorProto.FLOAT, None)],
            self.weights,
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION
        )
        return onnx.shape_inference.infer_shapes(model, strict_mode=True)  # of the output

    def _through_codes(self, tensor: str) -> str:
        scale, zero = self._scale(np.uint8)
        self.nodes.append(helper.make_node("QuantizeLinear", [tensor, scale, zero], [f"{tensor}_codes"]))
        self.nodes.append(
            helper.make_node("DequantizeLinear", [f"{tensor}_codes", scale, zero], [f"{tensor}_values"])
        )
        return f"{tensor}_values"

    def _scale(self, kind: type[np.integer[Any]]) -> tuple[str, str]:
        scale, zero = "scale", f"zero_{kind.__name__}"
        for name, value in ((scale, np.float32(_SCALE)), (zero, kind(0))):
            if all(weight.name != name for weight in self.weights):
                self.weights.append(numpy_helper.from_array(np.array(value), name))
        return scale, zero


def _stack(
    net: _Builder, *, channels: int, size: int, layers: int, kernel: int = 3, to: int | None = None
) -> None:
    net.start(1, channels, size, size)
    for _ in range(layers):
        net.layer("Conv", to or channels, channels, kernel, kernel, pads=[kernel // 2] * 4)
    net.add("GlobalAveragePool")


def _separable(net: _Builder, *, channels: int, size: int, blocks: int) -> None:
    net.start(1, channels, size, size)
    for _ in range(blocks):
        net.layer("Conv", channels, 1, 3, 3, pads=[1] * 4, group=channels)
        net.layer("Conv", channels, channels, 1, 1)
    net.add("GlobalAveragePool")


def _mobile(net: _Builder, *, size: int, widths: tuple[int, ...]) -> None:
    """First layers of a network for images: a convolution, then separable ones, every second one shrinks."""
    net.start(1, 3, size, size)
    net.layer("Conv", widths[0], 3, 3, 3, pads=[1] * 4, strides=[2, 2])
    for number, (channels, to) in enumerate(itertools.pairwise(widths)):
        strides = [1 + number % 2] * 2
        net.layer("Conv", channels, 1, 3, 3, pads=[1] * 4, group=channels, strides=strides)
        net.layer("Conv", to, channels, 1, 1)
    net.add("GlobalAveragePool")


def _dense(net: _Builder, *, width: int, layers: int) -> None:
    net.start(1, width)
    for _ in range(layers):
        net.layer("Gemm", width, width)


def _temporal(net: _Builder) -> None:
    net.start(1, 32, 256)
    for dilation in (1, 2, 4, 8):
        net.layer("Conv", 32, 32, 3, pads=[dilation] * 2, dilations=[dilation])
    net.add("GlobalAveragePool")


def _attention(net: _Builder) -> None:
    net.start(1, 64, 96)
    for _ in range(2):
        source = net.last
        keys = net.add("MatMul", net.weight(96, 96))
        net.last = source
        turned = net.add("Transpose", perm=[0, 2, 1])
        net.last = keys
        net.add("MatMul", turned)
        net.add("Softmax", axis=-1)
        net.add("MatMul", source)
        net.add("Add", source)


def _lstm(net: _Builder) -> None:
    net.start(20, 1, 64)
    net.add("LSTM", net.weight(1, 512, 64), net.weight(1, 512, 128), hidden_size=128)


def _maps(net: _Builder) -> None:
    net.start(1, 32, 64, 64)
    for _ in range(2):
        source = net.last
        net.add("Sigmoid")
        net.add("Mul", source)
        net.add("MaxPool", kernel_shape=[3, 3], pads=[1] * 4)
        net.add("Add", source)


@functools.cache
def make_calibration_models(engine: str) -> Mapping[str, Model]:
    """Return the calibration networks in the format of an engine, by name.

    Raises:
        EngineMissingError: `engine` is LiteRT, and LiteRT or ai-edge-quantizer is not installed.
    """
    networks, maker = make_calibration_networks(), find_support(engine).maker
    return {
        name: maker.convert_codes(network, networks[name.removesuffix(INT8_SUFFIX)])
        if name.endswith(INT8_SUFFIX)
        else maker.convert(network)
        for name, network in networks.items()
    }


def digest_calibration_models(engine: str) -> str:
    """Return the digest of the calibration networks of this release for an engine.

    For LiteRT, it also contains the release of ai-edge-quantizer, which determines the files.
    """
    digest, tool = digest_calibration_networks(), find_support(engine).maker.codes_tool
    if not tool:
        return digest
    with contextlib.suppress(metadata.PackageNotFoundError):
        return f"{digest} by {tool} {metadata.version(tool)}"
    return f"{digest} by nothing"
