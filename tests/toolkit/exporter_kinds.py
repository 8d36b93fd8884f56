"""Small models as exporters write them: a builder of each kind, with sizes and weights from a seed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[Any]
SAMPLES = 48
LOWEST = float(np.finfo(np.float32).min)


class Exported:
    """A graph in the making, with samples of its inputs."""

    def __init__(self, seed: int, opset: int = 17) -> None:
        self.rng = np.random.default_rng(seed)
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.stored: dict[str, Array] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.samples: dict[str, Array] = {}

    def size(self, *choices: int) -> int:
        return int(self.rng.choice(choices))

    def flag(self) -> bool:
        return bool(self.rng.random() < 0.5)

    def __call__(self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        names = [f"/{operator}_{len(self.nodes)}_output_{place}" for place in range(outputs)]
        self.nodes.append(helper.make_node(operator, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else names

    def store(self, value: Any, dtype: Any = None) -> str:
        name = f"onnx::Const_{len(self.stored)}"
        array = np.asarray(value)
        is_integer = array.dtype.kind == "i"
        self.stored[name] = array.astype(dtype or (np.int64 if is_integer else np.float32))
        return name

    def weight(self, *shape: int) -> str:
        fan = np.prod(shape[1:]) if len(shape) > 2 else shape[0]
        return self.store(self.rng.normal(size=shape) / np.sqrt(fan))

    def input(self, name: str, shape: Sequence[int | str], array: Array) -> str:
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        self.samples[name] = array
        return name

    def normal(self, name: str, shape: Sequence[int | str], *sample: int) -> str:
        return self.input(name, shape, self.rng.normal(size=(SAMPLES, *sample)).astype(np.float32))

    def output(self, tensor: str, shape: Sequence[int | str] | None, kind: int = TensorProto.FLOAT) -> None:
        name = f"output{len(self.outputs)}"
        self.nodes.append(helper.make_node("Identity", [tensor], [name]))
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def dense(self, tensor: str, width: int, made: int, activation: str = "") -> str:
        result = self("Add", self("MatMul", tensor, self.weight(width, made)), self.weight(made))
        return self(activation, result) if activation else result

    def conv(self, tensor: str, channels: int, made: int, size: int = 3, stride: int = 1) -> str:
        pads = [size // 2] * 4
        result = self(
            "Conv",
            tensor,
            self.weight(made, channels, size, size),
            self.weight(made),
            kernel_shape=[size] * 2,
            strides=[stride] * 2,
            pads=pads,
        )
        kind = self.rng.choice(["Relu", "HardSwish", "Silu", "LeakyRelu"])
        return self("Mul", result, self("Sigmoid", result)) if kind == "Silu" else self(kind, result)

    def norm(self, tensor: str, width: int) -> str:
        scale = self.store(self.rng.uniform(0.5, 1.5, width))
        return self("LayerNormalization", tensor, scale, self.weight(width), axis=-1)

    def attention(self, tensor: str, length: int, width: int, mask: str = "") -> str:
        heads = self.size(1, 2)

        def split(part: str) -> str:
            shape = self.store([1, length, heads, width // heads])
            return self("Transpose", self("Reshape", part, shape), perm=[0, 2, 1, 3])

        query, key, value = (split(self.dense(tensor, width, width)) for _ in range(3))
        scores = self("MatMul", query, self("Transpose", key, perm=[0, 1, 3, 2]))
        scores = self("Div", scores, self.store(np.sqrt(width / heads)))
        if mask:
            scores = self("Add", scores, mask)
        mixed = self("Transpose", self("MatMul", self("Softmax", scores, axis=-1), value), perm=[0, 2, 1, 3])
        return self(
            "Add", tensor, self.dense(self("Reshape", mixed, self.store([1, length, width])), width, width)
        )

    def proto(self) -> onnx.ModelProto:
        stored = [numpy_helper.from_array(array, name) for name, array in self.stored.items()]
        graph = helper.make_graph(self.nodes, "main_graph", self.inputs, self.outputs, stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)


def recurrent(g: Exported) -> None:
    """GRU, LSTM or RNN, either way, in either layout, of fixed or free length."""
    kind, width, hidden, steps = (
        g.rng.choice(["GRU", "LSTM", "RNN"]),
        g.size(4, 7),
        g.size(6, 8),
        g.size(5, 12),
    )
    direction = str(g.rng.choice(["forward", "reverse", "bidirectional"]))
    ways, gates = 1 + (direction == "bidirectional"), {"GRU": 3, "LSTM": 4, "RNN": 1}[kind]
    is_first, free = g.flag(), g.flag()
    if is_first:  # batch first, as `batch_first=True` is written
        x = g("Transpose", g.normal("x", [1, "T" if free else steps, width], steps, width), perm=[1, 0, 2])
    else:  # time major: samples lie in front of all axes
        x = g.normal("x", ["T" if free else steps, 1, width], steps, 1, width)
    attributes = {"linear_before_reset": 1} if kind == "GRU" else {}
    made = g(
        str(kind),
        x,
        g.weight(ways, gates * hidden, width),
        g.weight(ways, gates * hidden, hidden),
        g.weight(ways, 2 * gates * hidden),
        outputs=2,
        hidden_size=hidden,
        direction=direction,
        **attributes,
    )
    if g.flag():
        last = g("Reshape", g("Transpose", made[1], perm=[1, 0, 2]), g.store([1, ways * hidden]))
        g.output(g.dense(last, ways * hidden, 5), [1, 5])
    else:
        every = g("Reshape", g("Transpose", made[0], perm=[2, 0, 1, 3]), g.store([1, -1, ways * hidden]))
        g.output(g.dense(every, ways * hidden, 5), [1, "S", 5])


def tokens(g: Exported) -> None:
    """A patch embedding, attention, the mean over tokens."""
    width, side = g.size(16, 32), g.size(16, 24)
    x = g(
        "Conv",
        g.normal("pixels", [1, 3, side, side], 3, side, side),
        g.weight(width, 3, 8, 8),
        strides=[8, 8],
    )
    length = (side // 8) ** 2
    x = g("Transpose", g("Reshape", x, g.store([1, width, length])), perm=[0, 2, 1])
    x = g.attention(g("Add", x, g.weight(1, length, width)), length, width)
    g.output(g.dense(g("ReduceMean", g.norm(x, width), axes=[1], keepdims=0), width, 10), [1, 10])


def language(g: Exported) -> None:
    """Token ids, a mask as an input, tied weights, a causal mask of -inf or the smallest float."""
    length, width, words = g.size(6, 8), g.size(16, 32), g.size(40, 64)
    ids = g.input("input_ids", [1, length], g.rng.integers(0, words, (SAMPLES, length)))
    table = g.weight(words, width)
    x = g("Add", g("Gather", table, ids), g.weight(1, length, width))
    low = LOWEST if g.flag() else -np.inf
    distances = np.subtract.outer(np.arange(length), np.arange(length)) * g.size(0, -1) / 8
    mask = g.store(np.where(np.tril(np.ones((length, length))), distances, low)[None, None])
    if g.flag():
        given = np.ones((SAMPLES, length), np.int64)
        given[::3, length // 2 :] = 0
        wide = g("Unsqueeze", g.input("attention_mask", [1, length], given), g.store([1, 2]))
        dropped = g("Sub", g.store(1.0), g("Cast", wide, to=TensorProto.FLOAT))
        mask = g("Mul", dropped, g.store(LOWEST))
    x = g.norm(g.attention(x, length, width, mask), width)
    g.output(g("MatMul", x, g("Transpose", table, perm=[1, 0])), [1, length, words])


def masked(g: Exported) -> None:
    """Scores that a Where replaces by -inf or the smallest float, and a constant that no code stands for."""
    length, width = g.size(8, 16), g.size(8, 16)
    x = g.normal("x", [1, length, width], length, width)
    low = g.store(LOWEST if g.flag() else -np.inf)
    scores = g("MatMul", g.dense(x, width, width), g("Transpose", g.dense(x, width, width), perm=[0, 2, 1]))
    keep = g.store(np.tril(np.ones((length, length))), np.bool_)
    scores = (
        g("Where", keep, scores, low)
        if g.flag()
        else g("Max", g("Where", keep, scores, low), g.store(LOWEST))
    )
    g.output(g("MatMul", g("Softmax", scores, axis=-1), x), [1, length, width])


def grid(g: Exported, classes: int) -> tuple[str, int]:
    """Add a head of boxes and classes; return [1, N, 4 + classes] and N."""
    side = g.size(16, 24)
    x = g.conv(g.normal("images", [1, 3, side, side], 3, side, side), 3, 8, stride=2)
    cells = (side // 2) ** 2
    head = g("Conv", x, g.weight(4 + classes, 8, 1, 1), g.weight(4 + classes))
    return g("Transpose", g("Reshape", head, g.store([1, 4 + classes, cells])), perm=[0, 2, 1]), cells


def detector(g: Exported) -> None:
    """Boxes decoded in the graph beside scores, transposed or not."""
    classes = g.size(2, 5)
    rows, cells = grid(g, classes)
    boxes, scores = g("Split", rows, g.store([4, classes]), outputs=2, axis=2)
    boxes = g("Mul", g("Add", g("Tanh", boxes), g.weight(1, cells, 4)), g.store(32.0))
    result = g("Concat", boxes, g("Sigmoid", scores), axis=2)
    if g.flag():
        g.output(g("Transpose", result, perm=[0, 2, 1]), [1, 4 + classes, cells])
    else:
        g.output(result, [1, cells, 4 + classes])


def suppressed(g: Exported) -> None:
    """Non-maximum suppression inside, or the best rows: [K, 4], [K] and [K], or [1, K, 6]."""
    classes = g.size(2, 4)
    rows, cells = grid(g, classes)
    boxes, scores = g("Split", rows, g.store([4, classes]), outputs=2, axis=2)
    centre, extent = g("Split", boxes, g.store([2, 2]), outputs=2, axis=2)
    extent = g("Exp", extent)
    boxes = g("Mul", g("Concat", g("Sub", centre, extent), g("Add", centre, extent), axis=2), g.store(16.0))
    scores = g("Sigmoid", scores)
    if g.flag():
        limit = g.store(float(g.rng.choice([0.4, 0.6])))
        places = g(
            "NonMaxSuppression",
            boxes,
            g("Transpose", scores, perm=[0, 2, 1]),
            g.store(20),
            g.store(0.5),
            limit,
        )
        index = g("Squeeze", g("Gather", places, g.store([2]), axis=1), g.store([1]))
        g.output(g("Gather", g("Squeeze", boxes, g.store([0])), index, axis=0), ["K", 4])
        g.output(
            g("Squeeze", g("Gather", places, g.store([1]), axis=1), g.store([1])), ["K"], TensorProto.INT64
        )
        return
    best = g("ReduceMax", scores, axes=[2], keepdims=0)
    kinds = g("Cast", g("ArgMax", scores, axis=2, keepdims=1), to=TensorProto.FLOAT)
    every = g("Concat", boxes, g("Unsqueeze", best, g.store([2])), kinds, axis=2)
    _, places = g("TopK", best, g.store([min(20, cells)]), outputs=2, axis=1)
    index = g("Squeeze", places, g.store([0]))
    g.output(g("Gather", every, index, axis=1), [1, min(20, cells), 6])


def cached(g: Exported) -> None:
    """A cache that grows by a step: of length 0, of a free one, or fixed."""
    width, past = g.size(8, 16), int(g.rng.choice([0, 3]))
    old = g.normal("past", [1, "P", width] if past == 0 or g.flag() else [1, past, width], past, width)
    x = g.normal("x", [1, 1, width], 1, width)
    both = g("Concat", old, x, axis=1)
    weights = g("Softmax", g("MatMul", x, g("Transpose", both, perm=[0, 2, 1])), axis=-1)
    g.output(g.dense(g("MatMul", weights, both), width, 6), [1, 1, 6])
    g.output(both, [1, "Q", width])


def data_dependent(g: Exported) -> None:
    """Rows that the data choose: NonZero, Compress, a Slice or TopK with a computed end, or nothing found."""
    width = g.size(8, 12)
    x = g.dense(g.normal("x", [1, width], width), width, 16, "Relu")
    kind, limit = g.size(0, 1, 2, 3), g.store(float(g.rng.choice([0.5, 1e6])))
    row = g("Reshape", x, g.store([16]))
    found = g("Greater", row, limit)
    if kind == 0:
        result = g("GatherND", row, g("Transpose", g("NonZero", found), perm=[1, 0]))
    elif kind == 1:
        result = g("Compress", row, found)
    else:
        count = g("ReduceSum", g("Cast", found, to=TensorProto.INT64), g.store([0]), keepdims=1)
        if kind == 2:
            result = g("Slice", row, g.store([0]), count, g.store([0]))
        else:
            result = g("TopK", row, count, outputs=2, axis=0)[0]
    g.output(g("Mul", result, g.store(2.0)), ["K"])
    g.output(g.dense(g("Add", x, g("ReduceSum", result, keepdims=0)), 16, 4), [1, 4])


def odd_outputs(g: Exported) -> None:
    """Outputs that are stored, an input, computed twice, integers, truths, scalars."""
    width = g.size(8, 12)
    x = g.normal("x", ["N" if g.flag() else 1, width], width)
    hidden = g.dense(x, width, 6, "Relu")
    g.output(g("Softmax", hidden, axis=-1), [g.inputs[0].type.tensor_type.shape.dim[0].dim_param or 1, 6])
    kind = g.size(0, 1, 2, 3, 4)
    if kind == 0:
        name = g.weight(3, 4)
        g.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [3, 4]))
    elif kind == 1:
        value = numpy_helper.from_array(g.rng.normal(size=(5, 4)).astype(np.float32))
        g.output(g("Constant", value=value), [5, 4])
    elif kind == 2:
        g.outputs.append(g.inputs[0])
    elif kind == 3:
        g.output(g("ArgMax", hidden, axis=1, keepdims=0), None, TensorProto.INT64)
        g.output(g("Greater", hidden, g.store(0.5)), None, TensorProto.BOOL)
    else:
        g.output(g("ReduceMean", hidden, keepdims=0), [])
        g.output(hidden, None)


def free_axes(g: Exported) -> None:
    """Several free axes: images of any size, or two batches."""
    if g.flag():
        x = g.conv(g.conv(g.normal("x", ["N", 3, "H", "W"], 3, 16, 20), 3, 8), 8, 8, stride=2)
        g.output(g("Conv", x, g.weight(2, 8, 1, 1)), ["N", 2, "h", "w"])
        return
    left = g.dense(g.normal("left", ["N", 12], 12), 12, 8)
    right = g.dense(g.normal("right", ["M", 12], 12), 12, 8)
    g.output(g("MatMul", left, g("Transpose", right, perm=[1, 0])), ["N", "M"])


def images(g: Exported) -> None:
    """Pads with axes, modes of Resize, transposed convolutions, pools, normalizations of groups."""
    g.opset = g.size(18, 19)
    x = g.conv(g.normal("x", [1, 3, 16, 16], 3, 16, 16), 3, 8)
    if g.flag():
        x = g("Pad", x, g.store([1, 2, 1, 1]), g.store(0.5), g.store([2, 3]), mode="constant")
    else:
        x = g("Pad", x, g.store([0, 0, 1, 1, 0, 0, 1, 1]), mode=str(g.rng.choice(["reflect", "edge"])))
    if g.flag():
        x = g(
            "GroupNormalization" if g.opset < 21 and g.flag() else "InstanceNormalization",
            x,
            *((g.store(np.ones(8)), g.store(np.zeros(8)))),
        )
        if g.nodes[-1].op_type == "GroupNormalization":
            g.nodes[-1].attribute.append(helper.make_attribute("num_groups", 8))
    x = g.conv(g("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2], ceil_mode=int(g.flag())), 8, 8)
    if g.flag():
        mode = str(g.rng.choice(["nearest", "linear", "cubic"]))
        way = str(g.rng.choice(["asymmetric", "half_pixel", "align_corners", "pytorch_half_pixel"]))
        x = g("Resize", x, "", g.store([1.0, 1.0, 2.0, 2.0]), mode=mode, coordinate_transformation_mode=way)
    else:
        x = g("ConvTranspose", x, g.weight(8, 8, 2, 2), strides=[2, 2])
    g.output(g("Conv", x, g.weight(3, 8, 1, 1)), None)


def half(g: Exported) -> None:
    """float16 as torch exports it, with float16 or float32 at the ends."""
    width, wide = g.size(16, 32), g.flag()
    samples = g.rng.normal(size=(SAMPLES, width)) * g.rng.choice([1.0, 3e4])
    x = g.input("x", ["N", width], samples.clip(-6e4, 6e4).astype(np.float32 if wide else np.float16))
    x = g("Cast", x, to=TensorProto.FLOAT16) if wide else x
    weights = g.store(g.rng.normal(size=(width, 6)) * 1e-4, np.float16)
    x = g("Add", g("MatMul", x, weights), g.store(np.zeros(6), np.float16))
    x = g("Softmax", x, axis=-1)
    g.output(g("Cast", x, to=TensorProto.FLOAT) if wide else x, ["N", 6], 1 if wide else 10)


def quantized(g: Exported) -> None:
    """Codes as torch and TensorFlow export them: pairs around activations and weights."""
    x = g.normal("x", [1, 3, 12, 12], 3, 12, 12)
    signed, axis = g.flag(), g.flag()
    zero, dtype = (0, np.int8) if signed else (128, np.uint8)

    def pair(tensor: str, scale: float) -> str:
        stored = g.store(scale), g.store(zero, dtype)
        return g("DequantizeLinear", g("QuantizeLinear", tensor, *stored), *stored)

    weight = g.rng.normal(size=(8, 3, 3, 3)) / 5
    scale = np.abs(weight).max((1, 2, 3) if axis else None) / 127
    codes = np.rint(weight / (scale[:, None, None, None] if axis else scale))
    stored = g(
        "DequantizeLinear",
        g.store(codes, np.int8),
        g.store(scale),
        g.store(np.zeros_like(scale), np.int8),
        **({"axis": 0} if axis else {}),
    )
    x = g("Relu", g("Conv", pair(x, 0.03), stored, pads=[1] * 4))
    if g.flag():
        x = g("Pad", x, g.store([0, 0, 1, 1, 0, 0, 1, 1]))
    x = g("Flatten", g("GlobalAveragePool", pair(x, 0.05)))
    g.output(g.dense(x, 8, 4), [1, 4])


def branching(g: Exported) -> None:
    """An If on a value or a size, a Loop, or shapes that are computed as torch computes them."""
    width, kind = g.size(8, 12), g.size(0, 1, 2)
    x = g.normal("x", ["N" if kind == 2 else 1, 2, width], 2, width)
    if kind == 2:
        count = g("Gather", g("Shape", x), g.store(0))
        shape = g("Concat", g("Unsqueeze", count, g.store([0])), g.store([2 * width]), axis=0)
        g.output(g.dense(g("Reshape", x, shape), 2 * width, 4), ["N", 4])
        return
    row = g.dense(g("Reshape", x, g.store([1, 2 * width])), 2 * width, 8, "Relu")

    value = helper.make_tensor_value_info
    if kind == 0:
        asked = g("Greater", g("ReduceMean", row, keepdims=0), g.store(0.4))
        branches = {}
        for branch, operator in (("then_branch", "Neg"), ("else_branch", "Sigmoid")):
            node = helper.make_node(operator, [row], [operator])
            branches[branch] = helper.make_graph([node], branch, [], [value(operator, 1, [1, 8])])
        made = g("If", asked, **branches)
    else:
        nodes = [helper.make_node("Tanh", ["state"], ["next"]), helper.make_node("Identity", ["go"], ["on"])]
        inputs = [value("i", 7, []), value("go", 9, []), value("state", 1, [1, 8])]
        outputs = [value("on", 9, []), value("next", 1, [1, 8])]
        body = helper.make_graph(nodes, "body", inputs, outputs)
        made = g("Loop", g.store(3), g.store(True, np.bool_), row, body=body)
    g.output(g.dense(made, 8, 4), [1, 4])


def hostile_names(g: Exported) -> None:
    """Names that our own rewrites would give: sizes, codes, scales, signs of other languages."""
    x = g.normal("x", [1, 12], 12)
    for _ in range(3):
        x = g.dense(x, 12, 12, "Relu")
    g.output(x, [1, 12])
    made = [node.output[0] for node in g.nodes[:-1]]
    endings = ["_size", "__size", "_q", "_dq", "_scale", "_codes", "_zero_point", "_half", " ü/:0"]
    renames = {made[0]: "a"}
    for name in made[1:]:
        renames[name] = f"a{g.rng.choice(endings)}"
        while list(renames.values()).count(renames[name]) > 1:
            renames[name] += str(g.rng.choice(endings))
    for node in g.nodes:
        node.input[:] = [renames.get(name, name) for name in node.input]
        node.output[:] = [renames.get(name, name) for name in node.output]


def sound(g: Exported) -> None:
    """Convolutions over time with normalization by statistics, weights used twice, states as inputs."""
    length, width = g.size(24, 40), g.size(4, 8)
    x = g.normal("wave", [1, 1, length], 1, length)
    x = g("Conv", x, g.weight(width, 1, 5), strides=[2], pads=[2, 2])
    stored = [g.store(g.rng.uniform(0.5, 1.5, width)) for _ in range(4)]
    x = g("Relu", g("BatchNormalization", x, *stored))
    shared = g.weight(width, width, 3)
    for dilation in (1, 2):
        made = g("Conv", x, shared, dilations=[dilation], pads=[dilation] * 2)
        x = g("Add", x, g("PRelu", made, g.store(g.rng.uniform(0, 0.5, (width, 1)))))
    state = g.normal("state", [1, 1, width], 1, width)
    steps = g("Transpose", x, perm=[2, 0, 1])
    sizes = ((1, 3 * width, width), (1, 3 * width, width), (1, 6 * width))
    weights = [g.weight(*size) for size in sizes]
    made = g("GRU", steps, *weights, "", state, outputs=2, hidden_size=width)
    g.output(g.dense(g("Squeeze", made[1], g.store([0])), width, 4), [1, 4])
    g.output(made[1], [1, 1, width])


def converted(g: Exported) -> None:
    """As tf2onnx writes: bytes in NHWC, depthwise convolutions, Relu6, unlike tensors joined."""
    side = g.size(12, 16)
    images = g.rng.integers(0, 256, (SAMPLES, side, side, 3)).astype(np.uint8)
    x = g(
        "Cast", g.input("image:0", ["unk__1" if g.flag() else 1, side, side, 3], images), to=TensorProto.FLOAT
    )
    x = g("Transpose", g("Sub", g("Mul", x, g.store(1 / 127.5)), g.store(1.0)), perm=[0, 3, 1, 2])
    x = g("Conv", x, g.weight(8, 3, 3, 3), strides=[2, 2], auto_pad="SAME_UPPER")
    x = g("Clip", x, g.store(0.0), g.store(6.0))
    x = g("Conv", x, g.weight(8, 1, 3, 3), group=8, auto_pad="SAME_UPPER")
    x = g("Concat", g("Mul", x, g.store(200.0)), g("Sigmoid", x), axis=1)
    x = g("Squeeze", g("ReduceMean", x, axes=[2, 3], keepdims=1), g.store([2, 3]))
    g.output(g("Softmax", g("Gemm", x, g.weight(6, 16), g.weight(6), transB=1), axis=-1), None)


def scattered(g: Exported) -> None:
    """Einsum, ScatterND, CumSum, GatherElements, OneHot, Expand, Mod and Where, on floats and places."""
    width = g.size(6, 8)
    x = g.dense(g.normal("x", [1, 4, width], 4, width), width, width, "Tanh")
    y = g("Einsum", x, g.weight(width, width), equation="bij,jk->bik")
    places = g("ArgMax", y, axis=2, keepdims=1)
    best = g("GatherElements", y, places, axis=2)
    hot = g("OneHot", g("Squeeze", places, g.store([2])), g.store(width), g.store([0.0, 1.0]), axis=-1)
    total = g("CumSum", g("Mul", y, hot), g.store(1))
    update = g("ReduceMax", x, axes=[0, 1], keepdims=0)
    total = g("ScatterND", total, g.store([[0, 1]]), g("Unsqueeze", update, g.store([0])))
    even = g("Equal", g("Mod", places, g.store(2)), g.store(0))
    result = g("Where", even, total, g("Expand", best, g.store([1, 4, width])))
    g.output(g.dense(g("Flatten", result), 4 * width, 5), [1, 5])
    g.output(places, [1, 4, 1], TensorProto.INT64)


KINDS: Mapping[str, Callable[[Exported], None]] = {
    build.__name__: build
    for build in (
        *(recurrent, tokens, language, masked, detector, suppressed, cached, data_dependent, odd_outputs),
        *(free_axes, images, half, quantized, branching, hostile_names, sound, converted, scattered),
    )
}
UNORDERED_ROWS = frozenset({suppressed.__name__})
"""Kinds whose rows may change places: scores that nearly tie sort differently after rounding."""


def build(number: int) -> tuple[str, onnx.ModelProto, dict[str, Array]]:
    """Return kind, model and samples of a number; the samples lie along an axis of their own or the batch."""
    kind = [*KINDS][number % len(KINDS)]
    exported = Exported(number)
    KINDS[kind](exported)
    return kind, exported.proto(), exported.samples
