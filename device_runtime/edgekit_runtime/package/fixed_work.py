"""Whether values of inputs can change how long a run takes; read from the graph, as no measurement shows it.

A loop whose trip count is an input took 20 us with the golden input and takes for ever with 2**62. Likewise
`Range`, `Tile` or `Resize` whose size an input states, and what follows the rows that `NonZero` finds. Such a
model must not run on the event loop, and shares no batch with other calls.

The graph is read from the package, whoever made it. Operators that run a body (loops, branches) never have
fixed work. Others have, unless a value that sets a size depends on a value of an input. `Shape` ends such a
dependency: the request bounds the sizes of its inputs.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from edgekit_runtime.package.model_encodings import DAMAGED, read_field, read_messages, read_tables, unpack

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
        if any(number == 25 for number, _ in read_messages(memoryview(model))):  # functions
            return False
        graph = _read_graph(memoryview(model))
        return has_fixed_work(_read_nodes(graph), _read_names(graph, 11, 1) - _read_names(graph, 5, 8))
    except DAMAGED:
        return False


def has_loop(model: bytes | memoryview) -> bool:
    """Return whether a model may run without end: a `.tflite` file with a loop, or an ONNX model with a body.

    A file that cannot be read may.
    """
    data = memoryview(model)
    try:
        if bytes(data[4:8]) == _LITERT_MARK:
            return not _LITERT_LOOPS.isdisjoint(_read_litert_operators(data))
        nodes = list(_read_nodes(_read_graph(data)))
        return not nodes or any(node.has_body for node in nodes)
    except DAMAGED:
        return True


def _read_litert_operators(data: memoryview) -> Iterator[int]:
    """Yield the numbers of all operators in a `.tflite` file: field 1 of its root table."""
    for table in read_tables(data, read_field(data, unpack(data, "<I", 0), 1)):
        old, new = read_field(data, table, 0), read_field(data, table, 3)
        yield max(0 if old is None else data[old], 0 if new is None else unpack(data, "<i", new))


def _read_graph(model: memoryview) -> list[tuple[int, memoryview]]:
    """Return the fields of the graph; a file may hold it in parts."""
    return [field for number, graph in read_messages(model) if number == 7 for field in read_messages(graph)]


def _read_nodes(graph: list[tuple[int, memoryview]]) -> Iterator[Operation]:
    return (_read_node(node) for number, node in graph if number == 1)


def _read_node(node: memoryview) -> Operation:
    inputs, outputs, name, has_body = [], [], "", False
    for number, value in read_messages(node):
        if number == 1:
            inputs.append(str(value, "utf-8"))
        elif number == 2:
            outputs.append(str(value, "utf-8"))
        elif number == 4:
            name = str(value, "utf-8")
        elif number == 5:  # an attribute, whose fields 6 and 11 are graphs
            has_body |= any(field in (6, 11) for field, _ in read_messages(value))
    return Operation(name, inputs, outputs, has_body)


def _read_names(graph: list[tuple[int, memoryview]], kind: int, name: int) -> set[str]:
    """Return the names, in field `name`, of what the fields `kind` of a graph hold."""
    messages = [dict(read_messages(message)) for number, message in graph if number == kind]
    return {str(message.get(name, b""), "utf-8") for message in messages}
