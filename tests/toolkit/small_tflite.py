"""Small `.tflite` models, made with the schema that LiteRT ships."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from edgekit_toolkit.tflite.flatbuffer import pack

Array = np.ndarray[Any, Any]
TYPES = {"float32": 0, "int32": 2, "uint8": 3, "int64": 4, "bool": 6, "int8": 9}


class Lite:
    """A model under construction; tensors are referred to by name."""

    def __init__(self, *, old: bool = False) -> None:
        """Begin a model; an `old` one names operators as converters did before 2020."""
        self._old = old
        self.model = schema.ModelT()
        self.model.version = 3
        self.model.buffers = [schema.BufferT()]
        self.model.operatorCodes = []
        self.graph = schema.SubGraphT()
        self.graph.tensors, self.graph.operators, self.graph.inputs, self.graph.outputs = [], [], [], []
        self.model.subgraphs = [self.graph]

    def place(self, name: str) -> int:
        return [tensor.name for tensor in self.graph.tensors].index(name)

    def tensor(
        self, name: str, shape: Sequence[int], dtype: str = "float32", data: Array | None = None
    ) -> Any:
        made = schema.TensorT()
        made.name, made.shape, made.type = name, list(shape), TYPES[dtype]
        if data is not None:
            buffer = schema.BufferT()
            buffer.data = np.frombuffer(np.ascontiguousarray(data, dtype).tobytes(), np.uint8)
            made.buffer = len(self.model.buffers)
            self.model.buffers.append(buffer)
        self.graph.tensors.append(made)
        return made

    def constant(self, name: str, value: Array) -> str:
        self.tensor(name, value.shape, value.dtype.name, value)
        return name

    def quantize(
        self, name: str, scale: Sequence[float], zero_point: Sequence[int] = (0,), axis: int = 0
    ) -> None:
        found = schema.QuantizationParametersT()
        found.scale, found.zeroPoint, found.quantizedDimension = list(scale), list(zero_point), axis
        self.graph.tensors[self.place(name)].quantization = found

    def operator(
        self,
        kind: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        options: str | None = None,
        **fields: Any,
    ) -> Any:
        code = schema.OperatorCodeT()
        code.deprecatedBuiltinCode = getattr(schema.BuiltinOperator, kind)
        code.builtinCode = 0 if self._old else code.deprecatedBuiltinCode
        self.model.operatorCodes.append(code)
        made = schema.OperatorT()
        made.opcodeIndex = len(self.model.operatorCodes) - 1
        made.inputs = [-1 if not name else self.place(name) for name in inputs]
        made.outputs = [self.place(name) for name in outputs]
        if options is not None:
            made.builtinOptionsType = getattr(schema.BuiltinOptions, options)
            made.builtinOptions = getattr(schema, f"{options}T")()
            for field, value in fields.items():
                setattr(made.builtinOptions, field, value)
        self.graph.operators.append(made)
        return made

    def ends(self, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.graph.inputs = [self.place(name) for name in inputs]
        self.graph.outputs = [self.place(name) for name in outputs]

    def content(self) -> bytes:
        return pack(self.model)


def _conv(lite: Lite, name: str, source: str, weight: Array, bias: Array, out: str, **fields: Any) -> None:
    depthwise = weight.shape[0] == 1 and fields.pop("depthwise", False)
    names = [source, lite.constant(f"{name}_w", weight), lite.constant(f"{name}_b", bias)]
    kind = "DEPTHWISE_CONV_2D" if depthwise else "CONV_2D"
    options = "DepthwiseConv2DOptions" if depthwise else "Conv2DOptions"
    if depthwise:
        fields["depthMultiplier"] = 1
    lite.operator(
        kind, names, [out], options, strideH=1, strideW=1, padding=0, fusedActivationFunction=1, **fields
    )


def small_cnn(*, old: bool = False, squeeze: bool = False, dead_bias: float | None = None) -> Lite:
    """Input x [1, 8, 8, 3], convolutions with a residual, pooling, a dense layer, softmax y [1, 4].

    Args:
        old: see `Lite`.
        squeeze: whether SQUEEZE takes the place of RESHAPE.
        dead_bias: of a channel whose weights are all but 0; its reader passes it on.
    """
    rng = np.random.default_rng(5)
    lite = Lite(old=old)

    def weight(*shape: int) -> Array:
        return rng.normal(size=shape).astype(np.float32) / np.float32(np.sqrt(np.prod(shape[1:])))

    first, bias = weight(6, 3, 3, 3), weight(6)
    if dead_bias is not None:
        first[2], bias[2] = 1e-30, dead_bias
    lite.tensor("x", (1, 8, 8, 3))
    for name in ("a", "d", "s"):
        lite.tensor(name, (1, 8, 8, 6))
    lite.tensor("p", (1, 1, 1, 6))
    lite.tensor("f", (1, 6))
    lite.tensor("z", (1, 4))
    lite.tensor("y", (1, 4))
    _conv(lite, "conv", "x", first, bias, "a")
    _conv(lite, "dw", "a", weight(1, 3, 3, 6), weight(6), "d", depthwise=True)
    lite.operator("ADD", ["a", "d"], ["s"], "AddOptions")
    pool = {"padding": 1, "strideH": 8, "strideW": 8, "filterHeight": 8, "filterWidth": 8}
    lite.operator("AVERAGE_POOL_2D", ["s"], ["p"], "Pool2DOptions", **pool)
    if squeeze:
        lite.operator("SQUEEZE", ["p"], ["f"], "SqueezeOptions", squeezeDims=[1, 2])
    else:
        shape = lite.constant("shape", np.array([1, 6], np.int32))
        lite.operator("RESHAPE", ["p", shape], ["f"], "ReshapeOptions", newShape=[1, 6])
    dense = ["f", lite.constant("dense_w", 3 * weight(4, 6)), lite.constant("dense_b", weight(4))]
    lite.operator("FULLY_CONNECTED", dense, ["z"], "FullyConnectedOptions")
    lite.operator("SOFTMAX", ["z"], ["y"], "SoftmaxOptions", beta=1.0)
    lite.ends(["x"], ["y"])
    return lite


def computed_shape(recorded: Sequence[int], *, by_value: bool = False) -> Lite:
    """Input x [1, 8, 8, 3], a convolution, output y [1, 64, 4] whose shape the model computes.

    Args:
        recorded: shape of y in the file.
        by_value: whether y is [n, 4], a row for each value of x that is at least 0.
    """
    rng = np.random.default_rng(0)
    lite = Lite()
    lite.tensor("x", (1, 8, 8, 3))
    lite.tensor("y", recorded, "int64" if by_value else "float32")
    if by_value:
        lite.tensor("positive", (1, 8, 8, 3), "bool")
        lite.operator("GREATER_EQUAL", ["x", lite.constant("zero", np.zeros((), np.float32))], ["positive"])
        lite.operator("WHERE", ["positive"], ["y"], "WhereOptions")
    else:
        lite.tensor("conv", (1, 8, 8, 4))
        lite.tensor("shape", (3,), "int32")
        weight = rng.normal(size=(4, 3, 3, 3)).astype(np.float32)
        _conv(lite, "conv", "x", weight, np.zeros(4, np.float32), "conv")
        parts = (np.array(sizes, np.int32) for sizes in ((1, 60, 4), (0, 4, 0)))
        names = [lite.constant(f"part{place}", part) for place, part in enumerate(parts)]
        lite.operator("ADD", names, ["shape"], "AddOptions")
        lite.operator("RESHAPE", ["conv", "shape"], ["y"], "ReshapeOptions")
    lite.ends(["x"], ["y"])
    return lite


def images(count: int, seed: int = 0) -> list[dict[str, Array]]:
    rng = np.random.default_rng(seed)
    return [{"x": rng.uniform(-1, 1, (1, 8, 8, 3)).astype(np.float32)} for _ in range(count)]
