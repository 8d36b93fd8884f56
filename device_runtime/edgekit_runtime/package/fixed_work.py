"""Determines whether a model has fixed work, so that input values cannot change the time of a run.

For example, a loop whose trip count is an input may take 20 us for the golden input, but never end for 2**62.
Other examples are a `Range`, `Tile` or `Reshape` whose size is an input, and operators that process the rows
found by `NonZero`. A model without fixed work must not run on the event loop, and its calls are not batched.

Measurements cannot prove fixed work, and the manifest may make false claims, so the graph itself is analysed.
Operators that run a body (loops, branches) have no fixed work, except an `If` whose condition depends only on
sizes. Any other operator has fixed work, unless an input that can set a size depends on the values of a model
input. The output of `Shape` does not count as dependent, since the sizes of the inputs are limited.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Final

from edgekit_runtime.package.model_encodings import (
    DAMAGED,
    read_field,
    read_messages,
    read_numbers,
    read_tables,
    unpack,
)
from edgekit_runtime.records import dataclass

_NONE: Final = slice(0)
_ALL: Final = slice(None)
_AFTER_FIRST: Final = slice(1, None)
# By operator of ONNX or LiteRT, the inputs that may set how much it computes. By default, all after the
# first.
_SIZE_INPUTS: Final[Mapping[str, slice]] = {
    **dict.fromkeys(
        """
        Range ConstantOfShape HannWindow HammingWindow BlackmanWindow MelWeightMatrix NonZero Compress
        Unique NonMaxSuppression RANGE FILL WHERE UNIQUE NON_MAX_SUPPRESSION_V4 NON_MAX_SUPPRESSION_V5
        RANDOM_UNIFORM RANDOM_STANDARD_NORMAL
        """.split(),
        _ALL,
    ),
    **dict.fromkeys(("TRANSPOSE_CONV", "CONV_3D_TRANSPOSE", "SPLIT"), slice(1)),
    "SPARSE_TO_DENSE": slice(1, 2),
    "SCATTER_ND": slice(2, 3),
    **dict.fromkeys([f"UNSORTED_SEGMENT_{name}" for name in ("MAX", "MIN", "PROD", "SUM")], slice(2, 3)),
    # These compute as much whatever values their inputs have.
    **dict.fromkeys(
        """
        CastLike SwiGLU CumProd StringConcat MaxRoiPool ASSIGN_VARIABLE Add Sub Mul Div Mod Pow Min Max
        Mean Sum PRelu Where Clip And Or Xor Equal Greater Less GreaterOrEqual LessOrEqual BitShift
        BitwiseAnd BitwiseOr BitwiseXor MatMul Gemm Einsum Conv ConvTranspose DeformConv ConvInteger
        MatMulInteger Concat Gather GatherElements GatherND ScatterElements ScatterND Scatter
        TensorScatter GridSample CumSum Trilu BatchNormalization InstanceNormalization
        LayerNormalization GroupNormalization RMSNormalization Attention RotaryEmbedding LSTM GRU RNN
        Dropout Swish QuantizeLinear DequantizeLinear MatMulNBits SimplifiedLayerNormalization
        SkipLayerNormalization SkipSimplifiedLayerNormalization BiasGelu FastGelu MultiHeadAttention
        SequenceConstruct NegativeLogLikelihoodLoss DynamicQuantizeMatMul SoftmaxCrossEntropyLoss
        EmbedLayerNormalization MatMulIntegerToFloat Det NhwcConv ADD ADD_N SUB MUL DIV FLOOR_DIV
        FLOOR_MOD POW MINIMUM MAXIMUM SQUARED_DIFFERENCE ATAN2 PRELU EQUAL NOT_EQUAL GREATER
        GREATER_EQUAL LESS LESS_EQUAL LOGICAL_AND LOGICAL_OR SELECT SELECT_V2 BITWISE_XOR RIGHT_SHIFT
        FULLY_CONNECTED BATCH_MATMUL CONV_2D DEPTHWISE_CONV_2D CONV_3D CONCATENATION PACK GATHER
        GATHER_ND EMBEDDING_LOOKUP CUMSUM LSTM RNN UNIDIRECTIONAL_SEQUENCE_LSTM
        BIDIRECTIONAL_SEQUENCE_LSTM UNIDIRECTIONAL_SEQUENCE_RNN BIDIRECTIONAL_SEQUENCE_RNN SVDF
        DYNAMIC_UPDATE_SLICE REVERSE_SEQUENCE DELEGATE
        """.split(),
        _NONE,
    ),
}
_DATA_PREFIXES: Final = ("QLinear", "Fused", "STABLEHLO_")  # all of whose inputs are data
# Nothing bounds the sizes that these inputs state. The other inputs bound all other sizes.
_FREE_SIZES: Final = frozenset(
    """
    Range ConstantOfShape HannWindow HammingWindow BlackmanWindow MelWeightMatrix Expand Tile Resize
    Upsample Pad OneHot CenterCropPad AffineGrid MaxUnpool DFT STFT Col2Im RoiAlign CropAndResize RANGE
    FILL TILE BROADCAST_TO PAD RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR PADV2 MIRROR_PAD ONE_HOT RFFT2D
    RANDOM_UNIFORM RANDOM_STANDARD_NORMAL MULTINOMIAL SPARSE_TO_DENSE SCATTER_ND UNSORTED_SEGMENT_MAX
    UNSORTED_SEGMENT_MIN UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_SUM TRANSPOSE_CONV CONV_3D_TRANSPOSE
    """.split()
)
_SHAPES: Final = frozenset({"Shape", "Size", "SHAPE", "RANK"})
_BODIES: Final = frozenset({"WHILE", "IF", "CALL", "CALL_ONCE", "STABLEHLO_WHILE", "STABLEHLO_CASE"})
# Numbers in BuiltinOperator of LiteRT's schema.
_LITERT_NAMES: Final[Mapping[int, str]] = {
    22: "RESHAPE",
    23: "RESIZE_BILINEAR",
    34: "PAD",
    60: "PADV2",
    67: "TRANSPOSE_CONV",
    68: "SPARSE_TO_DENSE",
    69: "TILE",
    77: "SHAPE",
    85: "ONE_HOT",
    94: "FILL",
    96: "RANGE",
    97: "RESIZE_NEAREST_NEIGHBOR",
    100: "MIRROR_PAD",
    110: "RANK",
    112: "REVERSE_SEQUENCE",
    119: "WHILE",
    122: "SCATTER_ND",
    130: "BROADCAST_TO",
    131: "RFFT2D",
    141: "CONV_3D_TRANSPOSE",
    146: "RANDOM_STANDARD_NORMAL",
    148: "RANDOM_UNIFORM",
    149: "MULTINOMIAL",
    153: "UNSORTED_SEGMENT_PROD",
    154: "UNSORTED_SEGMENT_MAX",
    155: "UNSORTED_SEGMENT_SUM",
    157: "UNSORTED_SEGMENT_MIN",
    200: "STABLEHLO_WHILE",
    209: "STABLEHLO_CASE",
}
LOOPS: Final = frozenset({"Loop", "Scan", "WHILE", "STABLEHLO_WHILE"})
_MAX_DEPTH: Final = 20  # of nested bodies
_LITERT_MARK: Final = b"TFL3"


@dataclass(frozen=True, slots=True)
class Operation:
    """A node of a graph.

    Attributes:
        name: The operator type, as named in the file format.
        inputs, outputs: The tensors, by name or number.
        bodies: The graphs that the operation runs, such as the body of a loop or the branches of a condition.
        words: The attribute values that are strings.
    """

    name: str
    inputs: Sequence[Hashable]
    outputs: Sequence[Hashable]
    bodies: Sequence["Graph"] = ()
    words: Collection[bytes] = ()


@dataclass(frozen=True, slots=True)
class Graph:
    """Operations in execution order.

    Attributes:
        inputs: The tensors that the caller provides.
        outputs: The tensors that the caller receives.
    """

    operations: Sequence[Operation]
    inputs: Sequence[Hashable]
    outputs: Sequence[Hashable] = ()

    def follow_values(self, outer: Collection[Hashable] = ()) -> Iterator[tuple[Operation, Sequence[int]]]:
        """Yield each operation with the positions of its inputs that depend on the graph's input values.

        An operation is followed by the operations of its bodies. `outer` holds the tensors of the surrounding
        graph that depend on input values.
        """
        dependent = {*self.inputs, *outer}
        for operation in self.operations:
            positions = [index for index, name in enumerate(operation.inputs) if name in dependent]
            yield operation, positions
            for body in operation.bodies:
                yield from body.follow_values(dependent)
            if (positions or operation.bodies) and operation.name not in _SHAPES:
                dependent.update(output for output in operation.outputs if output != "")


def has_fixed_work(graph: Graph) -> bool:
    """Return whether the time of a run is independent of the input values."""
    return not any(
        _runs_by_values(operation, positions) or _sets_size(operation, positions)
        for operation, positions in graph.follow_values()
    )


def _runs_by_values(operation: Operation, positions: Sequence[int]) -> bool:
    """Return whether values of inputs may decide which bodies an operation runs, and how often."""
    if operation.name == "If" and 0 not in positions:
        return False
    return bool(operation.bodies) or operation.name in _BODIES


def has_free_sizes(graph: Graph) -> bool:
    """Return whether input values can make a tensor so large that memory runs out."""
    return any(
        operation.name in _FREE_SIZES and _sets_size(operation, positions)
        for operation, positions in graph.follow_values()
    )


def has_endless_loop(graph: Graph) -> bool:
    """Return whether input values can set the number of iterations of a loop.

    Such a loop may never end, and its tensors may grow with each iteration.
    """
    return any(
        operation.name in LOOPS and not _is_bounded(operation, positions)
        for operation, positions in graph.follow_values()
    )


def _is_bounded(loop: Operation, positions: Sequence[int]) -> bool:
    """Return whether a constant or the size of a tensor says how often a loop runs."""
    if loop.name == "Scan":
        return True
    if loop.name != "Loop" or not loop.inputs[0] or 0 in positions or len(loop.bodies) != 1:
        return False
    (body,) = loop.bodies  # exporters of `while` state the largest number, and a condition
    goes_on = body.outputs[0]
    source = next((operation for operation in body.operations if goes_on in operation.outputs), None)
    is_passed = source is not None and source.name == "Identity" and list(source.inputs) == [body.inputs[1]]
    return goes_on == body.inputs[1] or is_passed or (source is not None and not source.inputs)


def _sets_size(operation: Operation, positions: Sequence[int]) -> bool:
    """Return whether one of these inputs of an operation may set how much it computes."""
    default = _NONE if operation.name.startswith(_DATA_PREFIXES) else _AFTER_FIRST
    sizes = range(len(operation.inputs))[_SIZE_INPUTS.get(operation.name, default)]
    return any(position in sizes for position in positions)


def has_fixed_work_onnx(model: bytes | memoryview) -> bool:
    """Return `has_fixed_work` for the graph of an ONNX or `.tflite` file, or False if the file is damaged."""
    try:
        return has_fixed_work(read_graph(model))
    except DAMAGED:
        return False


def read_graph(model: bytes | memoryview) -> Graph:
    """Return the graph of an ONNX or `.tflite` file.

    Functions and additional graphs in the file become the `bodies` of an extra last operation, named "".

    Raises:
        ValueError, IndexError, struct.error: The file is damaged, or has another format.
    """
    data = memoryview(model)
    if bytes(data[4:8]) == _LITERT_MARK:
        first, *others = _read_litert(data)
    else:
        messages = list(read_messages(data))
        # A file may hold the graph in parts.
        fields = [field for number, part in messages if number == 7 for field in read_messages(part)]
        if not fields:
            raise ValueError("the file has no graph")
        first = _read_onnx(fields)
        others = [_read_function(part) for number, part in messages if number == 25]
    if not others:
        return first
    return Graph([*first.operations, Operation("", (), (), others)], first.inputs, first.outputs)


def _read_onnx(fields: Sequence[tuple[int, memoryview]], depth: int = 0) -> Graph:
    if depth > _MAX_DEPTH:
        raise ValueError("bodies are nested too deeply")
    operations = [_read_node(node, depth) for number, node in fields if number == 1]
    weights = set(_read_names(fields, 5, 8))
    inputs = [name for name in _read_names(fields, 11, 1) if name not in weights]
    return Graph(operations, inputs, _read_names(fields, 12, 1))


def _read_function(function: memoryview) -> Graph:
    fields = list(read_messages(function))
    inputs, outputs = ([str(value, "utf-8") for number, value in fields if number == kind] for kind in (4, 5))
    return Graph([_read_node(node, 0) for number, node in fields if number == 7], inputs, outputs)


def _read_node(node: memoryview, depth: int) -> Operation:
    inputs: list[str] = []
    outputs: list[str] = []
    bodies: list[Graph] = []
    words: list[bytes] = []
    name = ""
    for number, value in read_messages(node):
        if number == 1:
            inputs.append(str(value, "utf-8"))
        elif number == 2:
            outputs.append(str(value, "utf-8"))
        elif number == 4:
            name = str(value, "utf-8")
        elif number == 5:
            for field, content in read_messages(value):  # of an attribute: 4 is a text, 6 and 11 are graphs
                if field == 4:
                    words.append(bytes(content))
                elif field in (6, 11):
                    bodies.append(_read_onnx(list(read_messages(content)), depth + 1))
    return Operation(name, inputs, outputs, bodies, words)


def _read_names(graph: Sequence[tuple[int, memoryview]], kind: int, name: int) -> list[str]:
    """Return the names (field `name`) of the messages in the fields `kind` of a graph."""
    messages = [dict(read_messages(message)) for number, message in graph if number == kind]
    return [str(message.get(name, b""), "utf-8") for message in messages]


def _read_litert(data: memoryview) -> list[Graph]:
    """Return the graphs of a `.tflite` file; operators of no concern here go by their numbers."""
    root = unpack(data, "<I", 0)
    numbers = [_read_operator(data, table) for table in read_tables(data, read_field(data, root, 1))]
    names = [_LITERT_NAMES.get(number, str(number)) for number in numbers]
    graphs = []
    for number, graph in enumerate(read_tables(data, read_field(data, root, 2))):

        def read_tensors(table: int, field: int, number: int = number) -> list[Hashable]:
            return [(number, tensor) for tensor in read_numbers(data, read_field(data, table, field))]

        operations = []
        for table in read_tables(data, read_field(data, graph, 3)):
            index = read_field(data, table, 0)
            name = names[0 if index is None else unpack(data, "<I", index)]
            operations.append(Operation(name, read_tensors(table, 1), read_tensors(table, 2)))
        graphs.append(Graph(operations, read_tensors(graph, 1), read_tensors(graph, 2)))
    if not graphs:
        raise ValueError("the file has no graph")
    return graphs


def _read_operator(data: memoryview, table: int) -> int:
    old, new = read_field(data, table, 0), read_field(data, table, 3)
    return max(0 if old is None else data[old], 0 if new is None else unpack(data, "<i", new))
