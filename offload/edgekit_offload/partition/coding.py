"""How a tensor is sent: the nodes at the end of a head that code it, and those of the tail that undo it.

Codes keep axis 0, the batch, so that a server can put requests of several devices together. Only operators
are used that onnxruntime 1.20 has on the CPU, in forms that are the same in all opsets where possible.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgekit_runtime.errors import CutError
from edgekit_runtime.tensors import TensorSpec

CodingKind: TypeAlias = Literal["raw", "int8", "int4", "uint8", "delta", "pixels", "samples"]

_LEVELS: Final[Mapping[str, int]] = {"int8": 255, "int4": 15}
_LEAST_STEP: Final = 1e-30  # a constant tensor has no range to divide by
_REDUCE_BY_INPUT: Final = 18  # opset from which on the axes of a reduction are an input
_CUMSUM: Final = 11
_IMAGE_CHANNELS: Final = (1, 3)


@dataclass(frozen=True, slots=True)
class Lattice:
    """Values that stand for integer codes: `step[c] * code + offset[c]` in channel c, nearly.

    Attributes:
        step, offset: float64 [channels or 1].
        lowest, highest: range of the codes.
        axis: axis of the channels.
        table: float32 [channels or 1, codes]: the value of each code to the last bit, from `lowest` on; None
            where there are more than 256, then the line above is rounded to float32.
        time_axis: axis along which neighbours differ least.
        is_exact: whether coding restored every sample to the last bit.
    """

    step: NDArray[np.float64]
    offset: NDArray[np.float64]
    lowest: int
    highest: int
    axis: int = 0
    table: NDArray[np.float32] | None = None
    time_axis: int = 1
    is_exact: bool = True


@dataclass(frozen=True, slots=True)
class Coding:
    """How the float32 tensors of a cut are sent; tensors of other dtypes are sent as they are.

    Attributes:
        kind: `raw`; `int8` and `int4`: codes with a range for each sample, taken when it is sent; `uint8`:
            codes of 8-bit data behind a preprocessing; `pixels`: the same as [N, H, W, C] for image codecs;
            `delta`: int16 differences along time; `samples`: int16 [N, T] for audio codecs.
        lattices: tensor -> what its codes stand for; for the last four kinds.
        per_channel: whether `int8` and `int4` take a range for each channel (axis 1) of a sample; None does for
            `int4` alone, which loses many points with one range for a sample (benchmarks/offload_codec.py).
    """

    kind: CodingKind = "raw"
    lattices: Mapping[str, Lattice] = field(default_factory=dict)
    per_channel: bool | None = None


RAW: Final = Coding()


class Nodes:
    """Nodes and constants that are added to a graph, with names that start with the tensor's."""

    def __init__(self, prefix: str, opset: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.opset = opset
        self._prefix = prefix

    def add(self, op: str, inputs: Sequence[str], output: str | None = None, **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        name = output or f"{self._prefix}.{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(op, list(inputs), [name], name=f"{self._prefix}/{name}", **attributes)
        )
        return name

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        """Add a constant and return its name."""
        name = f"{self._prefix}.c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def reduce(self, op: str, tensor: str, axes: Sequence[int]) -> str:
        """Add a reduction that keeps its axes."""
        if self.opset < _REDUCE_BY_INPUT:
            return self.add(op, [tensor], axes=list(axes), keepdims=1)
        return self.add(op, [tensor, self.constant(axes, np.int64)], keepdims=1)

    def reshape(self, tensor: str, shape: Sequence[int], output: str | None = None) -> str:
        """Add a new shape; axis 0 stays as it is."""
        return self.add("Reshape", [tensor, self.constant([0, *shape], np.int64)], output)

    def cast(self, tensor: str, to: int, output: str | None = None) -> str:
        """Add a conversion."""
        return self.add("Cast", [tensor], output, to=to)

    def round(self, tensor: str) -> str:
        """Add rounding to the nearest integer; `Round` came with opset 11."""
        return self.add("Floor", [self.add("Add", [tensor, self.constant(0.5)])])


@dataclass(frozen=True, slots=True)
class CodedTensor:
    """A tensor as it is sent.

    Attributes:
        sent: what crosses the link.
        encode: nodes for the head; they read the tensor and write `sent`.
        decode: nodes for the tail; they read `sent` and write `restored`.
        restored: name of the tensor in the tail.
    """

    sent: tuple[TensorSpec, ...]
    encode: Nodes
    decode: Nodes
    restored: str


def code_tensor(spec: TensorSpec, coding: Coding, opset: int) -> CodedTensor | None:
    """Return how a tensor is sent, or None if it is sent as it is.

    Args:
        spec: the tensor.
        coding: the coding of the cut.
        opset: of the default domain in the model.

    Raises:
        CutError: the coding needs a newer opset, or was not calibrated for this tensor.
    """
    sizes = [size for size in spec.shape[1:] if isinstance(size, int)]
    is_coded = spec.dtype == "float32" and sizes and 0 not in sizes
    if coding.kind == "raw" or not is_coded:
        return None
    if coding.kind in _LEVELS:
        return _by_range(spec, coding, sizes, opset)
    lattice = coding.lattices.get(spec.name)
    if lattice is None:
        raise CutError(
            f"coding '{coding.kind}': tensor {spec.name!r} was not calibrated; its values are not known to be"
            " codes, so send it as raw or int8"
        )
    return _by_lattice(spec, coding, lattice, opset)


def _by_range(spec: TensorSpec, coding: Coding, sizes: Sequence[int], opset: int) -> CodedTensor:
    """Codes between the smallest and the largest value of each sample, or of each channel of a sample.

    The range is sent beside the codes as float32 [N, 2, channels]: the smallest value, and the step.
    """
    levels, rank = _LEVELS[coding.kind], len(sizes) + 1
    by_channel = (coding.kind == "int4" if coding.per_channel is None else coding.per_channel) and rank > 2
    channels, ones = (sizes[0], [1] * (rank - 2)) if by_channel else (1, [1] * (rank - 2))
    axes = range(2 if by_channel else 1, rank)
    count = int(np.prod(sizes))
    codes_name, range_name = f"{spec.name}.codes", f"{spec.name}.range"

    head = Nodes(f"{spec.name}.encode", opset)
    low = head.reduce("ReduceMin", spec.name, axes)
    span = head.add("Sub", [head.reduce("ReduceMax", spec.name, axes), low])
    step = head.add("Max", [head.add("Div", [span, head.constant(levels)]), head.constant(_LEAST_STEP)])
    codes = head.round(head.add("Div", [head.add("Sub", [spec.name, low]), step]))
    if coding.kind == "int4":
        codes = _pack(head, codes, count)
    head.cast(codes, TensorProto.UINT8, codes_name)
    head.add("Concat", [head.reshape(one, [1, channels]) for one in (low, step)], range_name, axis=1)

    tail = Nodes(f"{spec.name}.decode", opset)
    back = tail.cast(codes_name, TensorProto.FLOAT)
    if coding.kind == "int4":
        back = tail.reshape(_unpack(tail, back, count), sizes)
    parts = [tail.add("Gather", [range_name, tail.constant(i, np.int64)], axis=1) for i in (0, 1)]
    low, step = (tail.reshape(part, [channels, *ones]) for part in parts)
    restored = tail.add("Add", [tail.add("Mul", [back, step]), low], f"{spec.name}.restored")

    packed = (spec.shape[0], -(-count // 2)) if coding.kind == "int4" else spec.shape
    sent = (
        TensorSpec(codes_name, "uint8", packed),
        TensorSpec(range_name, "float32", (spec.shape[0], 2, channels)),
    )
    return CodedTensor(sent, head, tail, restored)


def _pack(nodes: Nodes, codes: str, count: int) -> str:
    """Two codes of 4 bits in one float: the first is the high one."""
    flat = nodes.reshape(codes, [count])
    if count % 2:
        flat = nodes.add("Gather", [flat, nodes.constant([*range(count), 0], np.int64)], axis=1)
    pairs = nodes.reshape(flat, [-(-count // 2), 2])
    # A product with [16, 1] is exact: all values are integers below 256.
    return nodes.reshape(nodes.add("MatMul", [pairs, nodes.constant([[16], [1]])]), [-(-count // 2)])


def _unpack(nodes: Nodes, packed: str, count: int) -> str:
    half = -(-count // 2)
    high = nodes.add("Floor", [nodes.add("Mul", [packed, nodes.constant(1 / 16)])])
    low = nodes.add("Sub", [packed, nodes.add("Mul", [high, nodes.constant(16)])])
    pairs = nodes.add("Concat", [nodes.reshape(one, [half, 1]) for one in (high, low)], axis=2)
    flat = nodes.reshape(pairs, [2 * half])
    if count % 2:
        flat = nodes.add("Gather", [flat, nodes.constant(range(count), np.int64)], axis=1)
    return flat


def _by_lattice(spec: TensorSpec, coding: Coding, lattice: Lattice, opset: int) -> CodedTensor:
    """Codes of data that were integers before a preprocessing; values beyond their range are clipped."""
    sizes = [size for size in spec.shape[1:] if isinstance(size, int)]
    if len(sizes) + 1 != len(spec.shape):
        raise CutError(f"coding '{coding.kind}': tensor {spec.name!r} has shape {list(spec.shape)}")
    code_type = "uint8" if coding.kind in ("uint8", "pixels") else "int16"
    name = f"{spec.name}.{coding.kind if coding.kind in ('pixels', 'samples') else 'codes'}"
    head, tail = Nodes(f"{spec.name}.encode", opset), Nodes(f"{spec.name}.decode", opset)
    per_axis = [1] * len(spec.shape)
    per_axis[lattice.axis] = len(lattice.step)
    offset, step = (np.reshape(one, per_axis) for one in (lattice.offset, lattice.step))
    codes = head.add("Div", [head.add("Sub", [spec.name, head.constant(offset)]), head.constant(step)])
    codes = head.round(codes)
    codes = head.add("Max", [codes, head.constant(lattice.lowest)])
    codes = head.add("Min", [codes, head.constant(lattice.highest)])
    shape = _layout_of(sizes, coding)
    if coding.kind == "delta":
        codes = _differences(head, head.cast(codes, TensorProto.INT32), lattice.time_axis, sizes)
    if shape.permutation:
        codes = head.add("Transpose", [codes], perm=shape.permutation)
    if shape.sizes != sizes and not shape.permutation:
        codes = head.reshape(codes, shape.sizes)
    head.cast(codes, TensorProto.UINT8 if code_type == "uint8" else TensorProto.INT16, name)

    back = name
    if shape.permutation:
        back = tail.add("Transpose", [back], perm=[int(one) for one in np.argsort(shape.permutation)])
    elif shape.sizes != sizes:
        back = tail.reshape(back, sizes)
    if coding.kind == "delta":
        if opset < _CUMSUM:
            raise CutError(f"coding 'delta' needs opset {_CUMSUM}, the model has {opset}; convert it")
        axis = tail.constant(lattice.time_axis, np.int64)
        back = tail.add("CumSum", [tail.cast(back, TensorProto.INT32), axis])
    restored = _values(tail, back, lattice, per_axis, f"{spec.name}.restored")
    sent = TensorSpec(name, code_type, (spec.shape[0], *shape.sizes))
    return CodedTensor((sent,), head, tail, restored)


@dataclass(frozen=True, slots=True)
class _Layout:
    sizes: list[int]
    permutation: list[int] | None = None


def _layout_of(sizes: list[int], coding: Coding) -> _Layout:
    """The layout that a codec takes: [N, H, W, C] of photographs, [N, T] of sound."""
    if coding.kind == "samples":
        return _Layout([int(np.prod(sizes))])
    if (
        coding.kind == "pixels"
        and len(sizes) == 3
        and sizes[0] in _IMAGE_CHANNELS
        and sizes[2] not in _IMAGE_CHANNELS
    ):
        return _Layout([*sizes[1:], sizes[0]], [0, 2, 3, 1])
    return _Layout(sizes)


def _differences(nodes: Nodes, codes: str, axis: int, sizes: Sequence[int]) -> str:
    """Each code without the one before it along an axis; the first stays."""
    length = sizes[axis - 1]
    if length < 2:
        return codes
    first = nodes.add("Gather", [codes, nodes.constant([0], np.int64)], axis=axis)
    left = nodes.add("Gather", [codes, nodes.constant(range(length - 1), np.int64)], axis=axis)
    right = nodes.add("Gather", [codes, nodes.constant(range(1, length), np.int64)], axis=axis)
    return nodes.add("Concat", [first, nodes.add("Sub", [right, left])], axis=axis)


def _values(nodes: Nodes, codes: str, lattice: Lattice, per_axis: Sequence[int], output: str) -> str:
    """What codes stand for: out of the table, or by the line."""
    if lattice.table is None:
        scaled = nodes.add(
            "Mul", [nodes.cast(codes, TensorProto.FLOAT), nodes.constant(np.reshape(lattice.step, per_axis))]
        )
        return nodes.add("Add", [scaled, nodes.constant(np.reshape(lattice.offset, per_axis))], output)
    channels, count = lattice.table.shape
    rows = np.reshape(np.arange(channels) * count - lattice.lowest, per_axis)
    places = nodes.add("Add", [nodes.cast(codes, TensorProto.INT32), nodes.constant(rows, np.int32)])
    return nodes.add("Gather", [nodes.constant(lattice.table.reshape(-1)), places], output, axis=0)
