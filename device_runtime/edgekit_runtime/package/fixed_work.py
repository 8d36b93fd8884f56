"""Whether values of inputs can change how long a run takes; read from the graph, as no measurement shows it.

A loop whose trip count is an input took 20 us with the golden input and takes for ever with 2**62. Likewise
`Range`, `Tile` or `Resize` whose size an input states, and what follows the rows that `NonZero` finds. Such a
model must not run on the event loop, and shares no batch with other calls.

The graph is read from the package, whoever made it. Operators that run a body (loops, branches) never have
fixed work. Others have, unless a value that sets a size depends on a value of an input. `Shape` ends such a
dependency: the request bounds the sizes of its inputs.
"""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_ALL: Final = slice(None)
_AFTER_FIRST: Final = slice(1, None)
# Operator of ONNX or LiteRT -> the inputs that set how much it computes.
_SIZE_INPUTS: Final[Mapping[str, slice]] = {
    **dict.fromkeys(
        (
            *("Range", "ConstantOfShape", "HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix"),
            *("NonZero", "Compress", "Unique", "NonMaxSuppression", "RANGE", "FILL", "WHERE", "UNIQUE"),
            *("NON_MAX_SUPPRESSION_V4", "NON_MAX_SUPPRESSION_V5", "RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL"),
        ),
        _ALL,
    ),
    **dict.fromkeys(
        (
            *("Expand", "Tile", "Resize", "Upsample", "Pad", "OneHot", "CenterCropPad", "AffineGrid"),
            *("MaxUnpool", "DFT", "STFT", "Slice", "TopK", "Split", "SplitToSequence", "CropAndResize"),
            "RoiAlign",  # its samples follow the size of the regions
            *("TILE", "BROADCAST_TO", "RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR", "PAD", "PADV2"),
            *("MIRROR_PAD", "ONE_HOT", "SLICE", "STRIDED_SLICE", "TOPK_V2", "SPACE_TO_BATCH_ND", "RFFT2D"),
            *("SPARSE_TO_DENSE", "MULTINOMIAL", "UNSORTED_SEGMENT_MAX", "UNSORTED_SEGMENT_MIN"),
            *("SEGMENT_SUM", "UNSORTED_SEGMENT_PROD", "UNSORTED_SEGMENT_SUM"),
        ),
        _AFTER_FIRST,
    ),
    **dict.fromkeys(("TRANSPOSE_CONV", "CONV_3D_TRANSPOSE"), slice(1)),
}
_SHAPES: Final = frozenset({"Shape", "Size", "SHAPE", "RANK"})
_BODIES: Final = frozenset({"WHILE", "IF", "CALL", "CALL_ONCE", "STABLEHLO_WHILE", "STABLEHLO_CASE"})
_LITERT_LOOPS: Final = frozenset({119, 154})  # WHILE, STABLEHLO_WHILE in BuiltinOperator of its schema
_LITERT_MARK: Final = b"TFL3"
_MAX_VARINT_BITS: Final = 63


@dataclass(frozen=True, slots=True)
class Operation:
    """A node of a graph.

    Attributes:
        name: operator, in the words of its format.
        inputs, outputs: tensors, by name or number.
        has_body: whether it runs other graphs, any number of times or one of several.
    """

    name: str
    inputs: Sequence[Hashable]
    outputs: Sequence[Hashable]
    has_body: bool = False


def has_fixed_work(operations: Iterable[Operation], inputs: Iterable[Hashable]) -> bool:
    """Return whether a run takes the same time whatever values the inputs have.

    Args:
        operations: the graph, in the order in which it runs.
        inputs: its inputs.
    """
    dependent = set(inputs)
    for operation in operations:
        if operation.has_body or operation.name in _BODIES:
            return False
        sizes = operation.inputs[_SIZE_INPUTS.get(operation.name, slice(0))]
        if not dependent.isdisjoint(sizes):
            return False
        if operation.name not in _SHAPES and not dependent.isdisjoint(operation.inputs):
            dependent.update(operation.outputs)
    return True


def has_fixed_work_onnx(model: bytes | memoryview) -> bool:
    """Return `has_fixed_work` of an ONNX model; False if it cannot be read, or has functions of its own."""
    try:
        fields = list(_fields(memoryview(model)))
        if any(number == 25 for number, _ in fields):  # functions
            return False
        graph = [field for number, value in fields if number == 7 for field in _fields(_as_bytes(value))]
        stored = {_name(value, 8) for number, value in graph if number == 5}
        inputs = {_name(value, 1) for number, value in graph if number == 11}
        return has_fixed_work(
            (_read_node(_as_bytes(value)) for number, value in graph if number == 1), inputs - stored
        )
    except (ValueError, IndexError):
        return False


def has_loop(model: bytes | memoryview) -> bool:
    """Return whether a model may run without end: a `.tflite` file with a loop, or an ONNX model with a body.

    A file that cannot be read may.
    """
    data = memoryview(model)
    try:
        if bytes(data[4:8]) == _LITERT_MARK:
            return not _LITERT_LOOPS.isdisjoint(_litert_operators(data))
        nodes = [
            _read_node(_as_bytes(value))
            for number, graph in _fields(data)
            if number == 7
            for node, value in _fields(_as_bytes(graph))
            if node == 1
        ]
        return not nodes or any(node.has_body for node in nodes)
    except (ValueError, IndexError):
        return True


def _litert_operators(data: memoryview) -> Collection[int]:
    """Return the numbers of all operators in a `.tflite` file: field 1 of its root table."""

    def integer(position: int, size: int = 4, *, signed: bool = False) -> int:
        if not 0 <= position <= len(data) - size:
            raise ValueError("a reference leads out of the file")
        return int.from_bytes(data[position : position + size], "little", signed=signed)

    def find(table: int, field: int) -> int:
        """Return the position of a field, 0 if it is absent."""
        layout = table - integer(table, signed=True)
        entry = 4 + 2 * field
        offset = integer(layout + entry, 2) if entry < integer(layout, 2) else 0
        return table + offset if offset else 0

    vector = find(integer(0), 1)
    vector += integer(vector)
    numbers = []
    for index in range(integer(vector)):
        entry = vector + 4 + 4 * index
        table = entry + integer(entry)
        old, new = find(table, 0), find(table, 3)
        numbers.append(max(integer(old, 1) if old else 0, integer(new) if new else 0))
    return numbers


def _read_node(node: memoryview) -> Operation:
    inputs, outputs, name, has_body = [], [], "", False
    for number, value in _fields(node):
        if number == 1:
            inputs.append(_text(value))
        elif number == 2:
            outputs.append(_text(value))
        elif number == 4:
            name = _text(value)
        elif number == 5:  # an attribute, whose fields 6 and 11 are graphs
            has_body |= any(field in (6, 11) for field, _ in _fields(_as_bytes(value)))
    return Operation(name, inputs, outputs, has_body)


def _name(message: "memoryview | int", field: int) -> str:
    return next((_text(value) for number, value in _fields(_as_bytes(message)) if number == field), "")


def _text(value: "memoryview | int") -> str:
    return str(_as_bytes(value), "utf-8")


def _as_bytes(value: "memoryview | int") -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number where the model's format has bytes")  # noqa: TRY004  # of the file, no fault here
    return value


def _fields(message: memoryview) -> "Iterator[tuple[int, memoryview | int]]":
    """Yield number and value of the fields of a protobuf message.

    Raises:
        ValueError, IndexError: it is none.
    """
    position, end = 0, len(message)
    while position < end:
        key, position = _varint(message, position)
        kind = key & 7
        if kind == 0:
            value, position = _varint(message, position)
            yield key >> 3, value
            continue
        if kind == 2:
            size, position = _varint(message, position)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"no field of protobuf is of kind {kind}")
        if size > end - position:
            raise ValueError("a field is cut off")
        yield key >> 3, message[position : position + size]
        position += size


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > _MAX_VARINT_BITS:
            raise ValueError("a number has more than 10 bytes")
