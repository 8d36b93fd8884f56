"""Codings for sending tensors. Heads end with nodes that encode, and tails start with nodes that decode.

Axis 0 of the codes is the batch, so that a server can batch requests of several devices. The nodes use only
operators that onnxruntime 1.20 supports on the CPU. Where possible, these operators are the same in all
opsets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.offload_plan import InputCodes
from edgekit_runtime.tensors import DTYPES, TensorSpec

LOSSY_SAMPLES: Final = 100
"""The number of samples to estimate the loss of a coding. If 0.15 % of answers change, most draws of 16
samples show no change."""
_INT8_SAMPLES: Final = 16
"""The number of samples to estimate the loss of int8, which was at most a fifth of the usual limit
(docs/benchmarks/offload.md)."""
# Logits and pooled features: near ties are frequent, no average over positions hides the rounding, and twice
# the bytes are still within three packets.
_SMALL_VALUES: Final = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class CutCoding:
    """A coding for tensors at cuts, as listed in `CUT_CODINGS`.

    The device determines the range of the codes for each request, so that any values can be sent.

    Attributes:
        bits: The number of bits per code, 1, 2, 4 or 8. With 32, tensors are sent unchanged.
        group: The number of neighbouring values that share a range, a multiple of 8.
        wide_values: Tensors with at most this number of values are coded in 16 bits, with a single range for
            the whole tensor.
        min_samples: The number of samples needed to estimate how the coding changes answers, or 0 if it is
            exact.
        max_cuts: The maximum number of cuts with this coding that are measured in addition to the best one.
            Codings with None share one limit.
    """

    bits: int
    group: int = 0
    wide_values: int = 0
    min_samples: int = 0
    max_cuts: int | None = None

    @property
    def is_exact(self) -> bool:
        return self.bits == FLOAT_BITS


FLOAT_BITS: Final = 32
CUT_CODINGS: Final[dict[str, CutCoding]] = {
    "raw": CutCoding(bits=FLOAT_BITS),
    # One range for a sample, or for each channel, changed up to 3 % of answers (benchmarks/offload_codec.py):
    # a few large values make the step too wide for others. With 8 bits, groups of 32 changed 6 answers of
    # 2,000 behind the first layer of ResNet8. Groups of 16 change 2, for 9 % more bytes after zstd. With 4
    # bits, the ends of the ranges of groups of 16 would be a third of all bytes.
    "int8": CutCoding(bits=8, group=16, wide_values=_SMALL_VALUES, min_samples=_INT8_SAMPLES),
    # Few cuts: mostly they lose too much, and would leave no room for better ones.
    "int4": CutCoding(bits=4, group=32, min_samples=LOSSY_SAMPLES, max_cuts=2),
}
REPLY_CODING: Final = "int8"
"""The coding of the server's replies if cuts are coded. It has 8 bits even if a cut has fewer."""
EXACT_UPLOADS: Final = frozenset({"raw", "uint8", "delta"})
"""The codings that restore uploaded samples exactly, unless the tensor states how it is rounded."""
_WIDE_LEVELS: Final = 65535
# Ends of a group's range in 255ths of the sample's span changed 5 answers of 128 where one channel spans 130
# and most span 9. In 65535ths they change 1. Least width of the range, in 65535ths: if another processor
# computes values that differ by a 4000th of the span, codes move by 16 and no further. Codes of 8 bits over
# 256 such steps are 16 bits of the sample's span, so nothing is lost.
_LEAST_WIDTH: Final = 256
_LEAST_STEP: Final = 1e-30  # a constant tensor has no range to divide by
_REDUCE_BY_INPUT: Final = 18  # from this opset on the axes of a reduction are an input
_SLICE_BY_INPUT: Final = 10
_CUMSUM: Final = 11
_IR: Final = 8  # IR version of opset 17 and below
_IMAGE_CHANNELS: Final = (1, 3)
_BYTE_BITS: Final = 8


@dataclass(frozen=True, slots=True)
class Lattice:
    """The values of integer codes, which are approximately `step[c] * code + offset[c]` in channel c.

    Attributes:
        step, offset: The factors and offsets, float64 [channels or 1].
        lowest, highest: The first and the last code.
        axis: The channel axis.
        table: The exact values of the codes from `lowest`, float32 [channels or 1, codes]. If there are more
            than 256 codes, it is None, and the values are computed from `step` and `offset`.
        time_axis: The axis along which neighbouring values differ least.
        is_grid: Whether the values of the samples were on a grid with this step. Otherwise they were rounded.
        is_exact: Whether all samples were restored exactly.
        accepted: The lowest and highest code that a device sends, int64 [2, channels or 1]. None means
            `lowest` and `highest`.
    """

    step: NDArray[np.float64]
    offset: NDArray[np.float64]
    lowest: int
    highest: int
    axis: int = 0
    table: NDArray[np.float32] | None = None
    time_axis: int = 1
    is_grid: bool = True
    is_exact: bool = True
    accepted: NDArray[np.int64] | None = None

    @property
    def codes(self) -> InputCodes:
        """The range and step of the values, which a device checks before it encodes a request."""
        ends = np.array([[self.lowest], [self.highest]]) if self.accepted is None else self.accepted
        lowest, highest = self.offset + self.step * ends
        return InputCodes(
            tuple(lowest.tolist()),
            tuple(highest.tolist()),
            tuple(self.step.tolist()),
            self.axis,
            self.is_grid,
        )


INTEGERS: Final = Lattice(np.array([1.0]), np.array([0.0]), 0, 0)
"""The lattice of integer tensors. The values are the codes, and any value is allowed. Differences and their
sums wrap around."""
INTEGER_TYPES: Final = ("int8", "uint8", "int16", "uint16", "int32", "int64")


@dataclass(frozen=True, slots=True)
class Coding:
    """A coding of tensors.

    All codings can code float32. `delta` and `samples` can code integers too. Tensors of other dtypes are
    sent raw.

    Attributes:
        kind: A coding of `CUT_CODINGS`, or a coding of inputs. The coding `uint8` sends 8-bit codes of values
            that were scaled by preprocessing, and `pixels` sends the same codes as [N, H, W, C] for image
            codecs. The coding `delta` sends differences along the time axis, as int16 for float32 tensors,
            and in the tensor's own dtype for integers. The coding `samples` sends int16 [N, T] for audio
            codecs.
        lattices: A dict from a tensor to the values of its codes. It is not used with `CUT_CODINGS`. Tensors
            without a lattice are sent raw. The lattice of an integer tensor is `INTEGERS` with its time axis.
    """

    kind: str = "raw"
    lattices: Mapping[str, Lattice] = field(default_factory=dict)

    def codes_of(self, specs: Sequence[TensorSpec]) -> dict[str, InputCodes]:
        """Return a dict from each tensor to the values that the head can code.

        If the head can code all values of a tensor, the tensor is not in the dict.
        """
        floats = [spec.name for spec in specs if spec.dtype == "float32" and spec.name in self.lattices]
        return {name: self.lattices[name].codes for name in floats}


RAW: Final = Coding()


class Nodes:
    """Nodes and constants to add to a graph. Their names start with the name of the coded tensor."""

    def __init__(self, prefix: str, opset: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.opset = opset
        self._prefix = prefix

    def add(self, op: str, inputs: Sequence[str], output: str | None = None, **attributes: Any) -> str:
        name = output or f"{self._prefix}.{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(op, list(inputs), [name], name=f"{self._prefix}/{name}", **attributes)
        )
        return name

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        name = f"{self._prefix}.c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def reduce(self, op: str, tensor: str, axes: Sequence[int]) -> str:
        if self.opset < _REDUCE_BY_INPUT:
            return self.add(op, [tensor], axes=list(axes), keepdims=1)
        return self.add(op, [tensor, self.constant(axes, np.int64)], keepdims=1)

    def slice(self, tensor: str, start: int, end: int) -> str:
        if self.opset < _SLICE_BY_INPUT:
            return self.add("Slice", [tensor], axes=[1], starts=[start], ends=[end])
        return self.add("Slice", [tensor, *(self.constant([value], np.int64) for value in (start, end, 1))])

    def reshape(self, tensor: str, shape: Sequence[int], output: str | None = None) -> str:
        """Add a reshape to `shape` that keeps axis 0, and return the name of its output."""
        return self.add("Reshape", [tensor, self.constant([0, *shape], np.int64)], output)

    def cast(self, tensor: str, to: int, output: str | None = None) -> str:
        return self.add("Cast", [tensor], output, to=to)

    def round(self, tensor: str) -> str:
        """Add nodes that round to the nearest integer, with halves rounded up."""
        # `Round` needs opset 11.
        return self.add("Floor", [self.add("Add", [tensor, self.constant(0.5)])])


@dataclass(frozen=True, slots=True)
class CodedTensor:
    """The coded form of a tensor.

    Attributes:
        sent: The tensors that are sent.
        encode: The nodes of the head, which read the tensor and write `sent`.
        decode: The nodes of the tail, which read `sent` and write `restored`.
    """

    sent: tuple[TensorSpec, ...]
    encode: Nodes
    decode: Nodes
    restored: str


def build_model(parts: Sequence[Nodes], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> bytes:
    """Return an ONNX model that consists of `parts`, for example only of the nodes that encode tensors."""
    graph = helper.make_graph(
        [node for part in parts for node in part.nodes],
        "coding",
        [describe(spec) for spec in inputs],
        [describe(spec) for spec in outputs],
        [constant for part in parts for constant in part.constants],
    )
    opset = helper.make_opsetid("", parts[0].opset)
    return bytes(helper.make_model(graph, opset_imports=[opset], ir_version=_IR).SerializeToString())


def describe(spec: TensorSpec) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(
        spec.name, helper.np_dtype_to_tensor_dtype(DTYPES[spec.dtype]), list(spec.shape)
    )


def code_tensor(spec: TensorSpec, coding: Coding, opset: int) -> CodedTensor | None:
    """Return the nodes that encode and decode a tensor, or None if it is sent unchanged.

    `opset` is the opset of the model's default domain.

    Raises:
        CutError: The coding needs a newer opset, or was not calibrated for this tensor.
    """
    lattice = coding.lattices.get(spec.name)
    if lattice is not None and (spec.dtype == "float32" or _codes_integers(spec.dtype, coding)):
        return _by_lattice(spec, coding, lattice, opset)
    sizes = [size for size in spec.shape[1:] if isinstance(size, int)]
    is_coded = spec.dtype == "float32" and sizes and 0 not in sizes
    rule = CUT_CODINGS.get(coding.kind)
    if coding.lattices or not is_coded or (rule is not None and rule.is_exact):
        return None
    if rule is not None and np.prod(sizes) <= rule.wide_values:
        return _by_range(spec, sizes, opset)
    if rule is not None:
        return _by_groups(spec, rule, sizes, opset)
    raise CutError(
        f"coding '{coding.kind}': tensor {spec.name!r} was not calibrated; its values are not known to be"
        " codes, so send it as raw or int8"
    )


def code_reply(spec: TensorSpec, coding: Coding, opset: int) -> CodedTensor | None:
    """Return the nodes that encode and decode an output in a reply, or None if it is sent unchanged.

    An output is coded in 8 bits if the cut is coded in `int8` or `int4`, and the output is float32 with a
    fixed size of more than 2,048 values per sample. Smaller outputs, such as class scores, need only a few
    packets in any case.

    Args:
        spec: The output.
        coding: The coding of the tensors at the cut.
        opset: The opset of the model's default domain.
    """
    return code_tensor(spec, Coding(REPLY_CODING), opset) if codes_reply(spec, coding) else None


def codes_reply(spec: TensorSpec, coding: Coding) -> bool:
    sizes = [size for size in spec.shape[1:] if isinstance(size, int)]
    is_large = len(sizes) + 1 == len(spec.shape) and np.prod(sizes) > _SMALL_VALUES
    return coding.kind in CUT_CODINGS and not CUT_CODINGS[coding.kind].is_exact and bool(is_large)


def _codes_integers(dtype: str, coding: Coding) -> bool:
    return dtype in {"delta": INTEGER_TYPES, "samples": ("int16",)}.get(coding.kind, ())


def _by_range(spec: TensorSpec, sizes: Sequence[int], opset: int) -> CodedTensor:
    """16-bit codes between the smallest and the largest value of each sample, for small tensors.

    The range is sent beside the codes as float32 [N, 2]: the smallest value, and the step.
    """
    codes_name, range_name = f"{spec.name}.codes", f"{spec.name}.range"
    head = Nodes(f"{spec.name}.encode", opset)
    flat = head.reshape(spec.name, [int(np.prod(sizes))])
    low, step = _range_of(head, flat, [1], _WIDE_LEVELS)
    head.cast(head.round(_scale(head, flat, low, step)), TensorProto.UINT16, codes_name)
    head.add("Concat", [low, step], range_name, axis=1)

    tail = Nodes(f"{spec.name}.decode", opset)
    low, step = (tail.slice(range_name, part, part + 1) for part in (0, 1))
    values = tail.add("Add", [tail.add("Mul", [tail.cast(codes_name, TensorProto.FLOAT), step]), low])
    tail.reshape(values, sizes, f"{spec.name}.restored")
    sent = (
        TensorSpec(codes_name, "uint16", (spec.shape[0], int(np.prod(sizes)))),
        TensorSpec(range_name, "float32", (spec.shape[0], 2)),
    )
    return CodedTensor(sent, head, tail, f"{spec.name}.restored")


def _by_groups(spec: TensorSpec, rule: CutCoding, sizes: Sequence[int], opset: int) -> CodedTensor:
    """Codes between the smallest and the largest value of each group of neighbours.

    The range of a sample is sent as float32 [N, 2]: the smallest value, and a 65535th of the span. The ends
    of its groups are sent in such steps as uint16 [N, 2 * groups]: each smallest value, then each largest.
    """
    codes_name, ends_name, range_name = (f"{spec.name}.{part}" for part in ("codes", "ends", "range"))
    levels, count, bits = 2**rule.bits - 1, int(np.prod(sizes)), rule.bits
    in_byte = _BYTE_BITS // bits
    size = min(rule.group, count + -count % in_byte)
    groups = -(-count // size)
    length = groups * size
    body = length // in_byte

    head = Nodes(f"{spec.name}.encode", opset)
    values = head.reshape(spec.name, [count])
    low, step = _range_of(head, values, [1], _WIDE_LEVELS)
    head.add("Concat", [low, step], range_name, axis=1)
    if length > count:
        values = head.add("Concat", [values, head.slice(values, 2 * count - length, count)], axis=1)
    values = head.reshape(values, [groups, size])
    low, step = (head.reshape(tensor, [1, 1]) for tensor in (low, step))
    ends = [_scale(head, head.reduce(op, values, [2]), low, step) for op in ("ReduceMin", "ReduceMax")]
    first, last = head.add("Floor", [ends[0]]), head.add("Ceil", [ends[1]])
    last = head.add("Min", [last, head.constant(_WIDE_LEVELS)])
    codes = head.round(_scale(head, values, *_group_range(head, (first, last), (low, step), levels)))
    codes = head.add("Max", [head.add("Min", [codes, head.constant(levels)]), head.constant(0)])
    if in_byte > 1:
        codes = _pack(head, codes, length, bits)
    head.cast(head.reshape(codes, [body]), TensorProto.UINT8, codes_name)
    both = head.add("Concat", [head.reshape(tensor, [groups]) for tensor in (first, last)], axis=1)
    head.cast(both, TensorProto.UINT16, ends_name)

    tail = Nodes(f"{spec.name}.decode", opset)
    codes = tail.cast(codes_name, TensorProto.FLOAT)
    if in_byte > 1:
        codes = _unpack(tail, codes, length, bits)
    both = tail.cast(ends_name, TensorProto.FLOAT)
    first, last = (tail.reshape(tail.slice(both, at, at + groups), [groups, 1]) for at in (0, groups))
    low, step = (tail.reshape(tail.slice(range_name, part, part + 1), [1, 1]) for part in (0, 1))
    low, step = _group_range(tail, (first, last), (low, step), levels)
    values = tail.add("Add", [tail.add("Mul", [tail.reshape(codes, [groups, size]), step]), low])
    if length > count:
        values = tail.slice(tail.reshape(values, [length]), 0, count)
    tail.reshape(values, sizes, f"{spec.name}.restored")
    sent = (
        TensorSpec(codes_name, "uint8", (spec.shape[0], body)),
        TensorSpec(ends_name, "uint16", (spec.shape[0], 2 * groups)),
        TensorSpec(range_name, "float32", (spec.shape[0], 2)),
    )
    return CodedTensor(sent, head, tail, f"{spec.name}.restored")


def _range_of(nodes: Nodes, tensor: str, axes: Sequence[int], levels: int) -> tuple[str, str]:
    """Smallest value along axes, and the step that reaches the largest one in `levels` steps.

    Both are NaN if a value is not finite, so that the device notices it in the few bytes of the range.
    """
    low = nodes.reduce("ReduceMin", tensor, axes)
    # onnxruntime's ReduceMin and ReduceMax skip NaN. A mean does not, so NaN and infinity reach the range.
    zero = nodes.add("Mul", [nodes.reduce("ReduceMean", tensor, axes), nodes.constant(0)])
    low = nodes.add("Add", [low, zero])
    span = nodes.add("Sub", [nodes.reduce("ReduceMax", tensor, axes), low])
    step = nodes.add("Div", [span, nodes.constant(levels)])
    return low, nodes.add("Max", [step, nodes.constant(_LEAST_STEP)])


def _group_range(
    nodes: Nodes, ends: tuple[str, str], sample: tuple[str, str], levels: int
) -> tuple[str, str]:
    """Smallest value and step of each group, from its ends in steps of the sample."""
    (first, last), (low, step) = ends, sample
    start = nodes.add("Add", [nodes.add("Mul", [first, step]), low])
    width = nodes.add("Max", [nodes.add("Sub", [last, first]), nodes.constant(_LEAST_WIDTH)])
    span = nodes.add("Mul", [width, step])
    group = nodes.add("Div", [span, nodes.constant(levels)])
    return start, nodes.add("Max", [group, nodes.constant(_LEAST_STEP)])


def _scale(nodes: Nodes, tensor: str, low: str, step: str) -> str:
    return nodes.add("Div", [nodes.add("Sub", [tensor, low]), step])


def _pack(nodes: Nodes, codes: str, count: int, bits: int) -> str:
    """The codes of a byte in one float: the first is in the high bits; `count` fills whole bytes."""
    in_byte = _BYTE_BITS // bits
    rows = nodes.reshape(codes, [count // in_byte, in_byte])
    # A product with [16, 1] is exact: all values are integers below 256.
    return nodes.add("MatMul", [rows, nodes.constant([[scale] for scale in _scales(bits)])])


def _unpack(nodes: Nodes, packed: str, count: int, bits: int) -> str:
    codes, remainder = [], packed
    for scale in _scales(bits)[:-1]:
        codes.append(nodes.add("Floor", [nodes.add("Mul", [remainder, nodes.constant(1 / scale)])]))
        remainder = nodes.add("Sub", [remainder, nodes.add("Mul", [codes[-1], nodes.constant(scale)])])
    columns = [nodes.reshape(code, [count // len(_scales(bits)), 1]) for code in (*codes, remainder)]
    return nodes.add("Concat", columns, axis=2)


def _scales(bits: int) -> list[int]:
    """Return the value of the lowest bit of each code in a byte, from the highest code on."""
    return [2**shift for shift in range(_BYTE_BITS - bits, -1, -bits)]


def _by_lattice(spec: TensorSpec, coding: Coding, lattice: Lattice, opset: int) -> CodedTensor:
    """Codes of data that are integers, or were integers before a preprocessing.

    Values beyond the codes' range are clipped, so the device sends no such input this way (`Lattice.codes`).
    A tensor without a batch axis is sent as one row.
    """
    is_row, is_integer = len(spec.shape) == 1, spec.dtype != "float32"
    shape = (1, *spec.shape) if is_row else spec.shape
    sizes = [size for size in shape[1:] if isinstance(size, int)]
    if len(sizes) + 1 != len(shape) or 0 in sizes:
        raise CutError(
            f"coding '{coding.kind}' needs fixed sizes beside the batch, tensor {spec.name!r} has shape"
            f" {list(spec.shape)}"
        )
    code_type = "uint8" if coding.kind in ("uint8", "pixels") else spec.dtype if is_integer else "int16"
    wide = TensorProto.INT64 if code_type == "int64" else TensorProto.INT32
    name = f"{spec.name}.{coding.kind if coding.kind in ('pixels', 'samples') else 'codes'}"
    head, tail = Nodes(f"{spec.name}.encode", opset), Nodes(f"{spec.name}.decode", opset)
    per_axis = [1] * len(shape)
    per_axis[lattice.axis] = len(lattice.step)
    codes = head.add("Reshape", [spec.name, head.constant([1, *sizes], np.int64)]) if is_row else spec.name
    if not is_integer:
        codes = _quantise(head, codes, lattice, per_axis)
    layout = _layout_of(sizes, coding)
    if coding.kind == "delta":
        codes = _differences(head, head.cast(codes, wide), lattice.time_axis, sizes)
    if layout.permutation:
        codes = head.add("Transpose", [codes], perm=layout.permutation)
    if layout.sizes != sizes and not layout.permutation:
        codes = head.reshape(codes, layout.sizes)
    head.cast(codes, helper.np_dtype_to_tensor_dtype(DTYPES[code_type]), name)

    back = name
    if layout.permutation:
        back = tail.add("Transpose", [back], perm=[int(axis) for axis in np.argsort(layout.permutation)])
    elif layout.sizes != sizes:
        back = tail.reshape(back, sizes)
    if coding.kind == "delta":
        if opset < _CUMSUM:
            raise CutError(f"coding 'delta' needs opset {_CUMSUM}, the model has {opset}; convert it")
        axis = tail.constant(lattice.time_axis, np.int64)
        back = tail.add("CumSum", [tail.cast(back, wide), axis])
    output = f"{spec.name}.restored"
    restored = f"{spec.name}.row" if is_row else output
    if is_integer:
        tail.cast(back, helper.np_dtype_to_tensor_dtype(DTYPES[spec.dtype]), restored)
    else:
        _values(tail, back, lattice, per_axis, restored)
    if is_row:
        tail.add("Reshape", [restored, tail.constant(sizes, np.int64)], output)
    sent = TensorSpec(name, code_type, (shape[0], *layout.sizes))
    return CodedTensor((sent,), head, tail, output)


def _quantise(nodes: Nodes, values: str, lattice: Lattice, per_axis: Sequence[int]) -> str:
    """Codes of values, clipped to their range."""
    offset, step = (np.reshape(values, per_axis) for values in (lattice.offset, lattice.step))
    codes = nodes.add("Div", [nodes.add("Sub", [values, nodes.constant(offset)]), nodes.constant(step)])
    codes = nodes.add("Max", [nodes.round(codes), nodes.constant(lattice.lowest)])
    return nodes.add("Min", [codes, nodes.constant(lattice.highest)])


@dataclass(frozen=True, slots=True)
class _Layout:
    sizes: list[int]
    permutation: list[int] | None = None


def _layout_of(sizes: list[int], coding: Coding) -> _Layout:
    """The layout that a codec takes: [N, H, W, C] for photographs, [N, T] for sound."""
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
    """Each code minus the one before it along an axis; the first stays."""
    length = sizes[axis - 1]
    if length < 2:
        return codes
    first = nodes.add("Gather", [codes, nodes.constant([0], np.int64)], axis=axis)
    earlier = nodes.add("Gather", [codes, nodes.constant(range(length - 1), np.int64)], axis=axis)
    right = nodes.add("Gather", [codes, nodes.constant(range(1, length), np.int64)], axis=axis)
    return nodes.add("Concat", [first, nodes.add("Sub", [right, earlier])], axis=axis)


def _values(nodes: Nodes, codes: str, lattice: Lattice, per_axis: Sequence[int], output: str) -> str:
    """The values of codes: from the table, or on the line."""
    if lattice.table is None:
        scaled = nodes.add(
            "Mul", [nodes.cast(codes, TensorProto.FLOAT), nodes.constant(np.reshape(lattice.step, per_axis))]
        )
        return nodes.add("Add", [scaled, nodes.constant(np.reshape(lattice.offset, per_axis))], output)
    channels, count = lattice.table.shape
    rows = np.reshape(np.arange(channels) * count - lattice.lowest, per_axis)
    indices = nodes.add("Add", [nodes.cast(codes, TensorProto.INT32), nodes.constant(rows, np.int32)])
    return nodes.add("Gather", [nodes.constant(lattice.table.reshape(-1)), indices], output, axis=0)
