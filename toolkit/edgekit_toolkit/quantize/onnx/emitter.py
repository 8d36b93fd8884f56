"""Adds QuantizeLinear and DequantizeLinear nodes and their constants to a graph."""

from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from edgekit_toolkit.onnx_graph.index import GraphIndex, add_constant, fresh_name
from edgekit_toolkit.quantize.scheme import QuantizationParams


class Codes(NamedTuple):
    """The names of the tensors of codes, scale and zero point. A missing zero point is an empty string."""

    codes: str
    scale: str
    zero_point: str


class Emitter:
    """Collects the nodes of a rewritten graph. Constants are added to the graph immediately.

    Attributes:
        nodes: The nodes in order. Callers append their own nodes too.
    """

    def __init__(self, index: GraphIndex) -> None:
        self._index = index
        self._constants: dict[tuple[object, ...], str] = {}
        self.nodes: list[onnx.NodeProto] = []

    def store(self, stem: str, value: NDArray[Any]) -> str:
        """Add a constant to the graph and return its name, which starts with `stem`."""
        return add_constant(self._index, stem, value)

    def params(self, stem: str, params: QuantizationParams) -> tuple[str, str]:
        """Add a scale and a zero point to the graph and return their names, which start with `stem`."""
        return self.store(f"{stem}_scale", params.scale), self.store(f"{stem}_zero_point", params.zero_point)

    def quantize(self, source: str, stem: str, params: QuantizationParams) -> Codes:
        """Add a QuantizeLinear node for `source` and return the names of its output and parameters."""
        scale, zero_point = self.params(stem, params)
        codes = fresh_name(self._index, f"{stem}_q")
        self.nodes.append(
            helper.make_node("QuantizeLinear", [source, scale, zero_point], [codes], name=codes)
        )
        return Codes(codes, scale, zero_point)

    def dequantize(
        self, codes: Codes, stem: str, *, axis: int | None = None, output: str | None = None
    ) -> str:
        """Add a DequantizeLinear node and return the name of its output.

        `stem` is the start of new names. `axis` is the axis of the channels, or None for a single scale.
        """
        name = fresh_name(self._index, f"{stem}_dq")
        node = helper.make_node(
            "DequantizeLinear", [part for part in codes if part], [output or name], name=name
        )
        if axis is not None:
            node.attribute.append(helper.make_attribute("axis", axis))
        self.nodes.append(node)
        return output or name

    def clip(self, codes: str, stem: str, low: int | None, high: int | None) -> str:
        """Add a Clip of uint8 codes and return the name of its output, or `codes` if both limits are None.

        `low` and `high` are codes, or None for no limit.
        """
        if low is None and high is None:
            return codes
        limits = ["" if value is None else self._code(value) for value in (low, high)]
        name = fresh_name(self._index, f"{stem}_clipped")
        self.nodes.append(helper.make_node("Clip", [codes, *limits], [name], name=name))
        return name

    def _code(self, value: int) -> str:
        """Return the name of a uint8 scalar, stored once."""
        key = ("code", value)
        if key not in self._constants:
            self._constants[key] = self.store(f"code_{value}", np.asarray(value, np.uint8))
        return self._constants[key]

    def constant(
        self,
        name: str,
        values: NDArray[Any],
        params: QuantizationParams,
        *,
        axis: int | None = None,
    ) -> str:
        """Store the codes of a constant with a DequantizeLinear node, and return the name of its output.

        Each constant is stored once. 8-bit codes always get a zero point. onnxruntime's integer Gemm requires
        it, and releases up to 1.24 crash without it in the exact mode for x86 without VNNI (ADR 0018).

        `name` is the name of the constant in the float model. `axis` is the axis of the channels, or None for
        one scale.
        """
        key = (name, axis, values.dtype.str, params.scale.tobytes())
        if key not in self._constants:
            scale = self.store(f"{name}_scale", params.scale)
            zero = self.store(f"{name}_zero_point", params.zero_point) if values.itemsize == 1 else ""
            codes = Codes(self.store(f"{name}_codes", values), scale, zero)
            self._constants[key] = self.dequantize(codes, name, axis=axis)
        return self._constants[key]
