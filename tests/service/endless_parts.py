"""Models that run as long as an input says: `x` is that of `linear`, its largest value counts the rounds."""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import onnx
from ai_edge_litert import schema_py_generated as schema
from tests.runtime.conftest import WEIGHT, PackageMaker

from edgekit_runtime.package.manifest_entries import BackendChoice
from edgekit_runtime.tensors import TensorSpec

ROUNDS = np.float32(2**62)
HOSTILE = np.array([[ROUNDS, 0, 0, 0]], np.float32)
"""Rounds that no machine ends."""


def make_loop_model(*, is_counted: bool = True) -> bytes:
    """y = x @ WEIGHT, after as many rounds as the largest value says, or endless ones if that is above 1."""
    helper, kinds = onnx.helper, onnx.TensorProto
    make_info = helper.make_tensor_value_info
    go_on = helper.make_node("Identity", ["go"], ["go_on"])
    body = helper.make_graph(
        [go_on, helper.make_node("Abs", ["last"], ["next"])],
        "body",
        [
            make_info("round", kinds.INT64, []),
            make_info("go", kinds.BOOL, []),
            make_info("last", kinds.FLOAT, None),
        ],
        [make_info("go_on", kinds.BOOL, []), make_info("next", kinds.FLOAT, None)],
    )
    count, condition = ("count", "") if is_counted else ("", "is_large")
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMax", ["x"], ["largest"], keepdims=0),
            helper.make_node("Cast", ["largest"], ["count"], to=kinds.INT64),
            helper.make_node("Greater", ["largest", "one"], ["is_large"]),
            helper.make_node("Loop", [count, condition, "x"], ["last_x"], body=body),
            helper.make_node("MatMul", ["last_x", "w"], ["y"]),
        ],
        "loop",
        [make_info("x", kinds.FLOAT, ["N", 4])],
        [make_info("y", kinds.FLOAT, ["N", 2])],
        [
            onnx.numpy_helper.from_array(np.array(1, np.float32), "one"),
            onnx.numpy_helper.from_array(WEIGHT, "w"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model)
    data: bytes = model.SerializeToString()
    return data


def make_while_model() -> bytes:
    """y[1, 2] = the first two columns of x[1, 4], after endless rounds if a value of x is above 1."""
    import flatbuffers

    types, operators = schema.TensorType, schema.BuiltinOperator
    constants = [np.array([0.0], np.float32), np.array([1.0], np.float32), np.zeros(1, np.int32)]
    constants += [np.array([0, 0], np.int32), np.array([1, 2], np.int32)]
    model = schema.ModelT()
    model.version, model.description = 3, b""
    model.buffers = [schema.BufferT() for _ in range(1 + len(constants))]
    for buffer, constant in zip(model.buffers[1:], constants, strict=True):
        buffer.data = np.frombuffer(constant.tobytes(), np.uint8)
    model.operatorCodes = []
    for code in (operators.WHILE, operators.REDUCE_MAX, operators.GREATER, operators.SUB, operators.SLICE):
        entry = schema.OperatorCodeT()
        entry.deprecatedBuiltinCode = entry.builtinCode = code
        entry.version = 1
        model.operatorCodes.append(entry)

    def tensor(name: str, shape: list[int], kind: int, buffer: int = 0) -> "schema.TensorT":
        made = schema.TensorT()
        made.name, made.shape, made.type, made.buffer = name.encode(), np.array(shape, np.int32), kind, buffer
        return made

    def operator(
        code: int, inputs: list[int], outputs: list[int], options: object, kind: int
    ) -> "schema.OperatorT":
        made = schema.OperatorT()
        made.opcodeIndex = code
        made.inputs, made.outputs = np.array(inputs, np.int32), np.array(outputs, np.int32)
        made.builtinOptions, made.builtinOptionsType = options, kind
        return made

    def graph(
        tensors: "list[schema.TensorT]",
        inputs: list[int],
        outputs: list[int],
        nodes: "list[schema.OperatorT]",
    ) -> "schema.SubGraphT":
        made = schema.SubGraphT()
        made.tensors, made.operators, made.name = tensors, nodes, b"graph"
        made.inputs, made.outputs = np.array(inputs, np.int32), np.array(outputs, np.int32)
        return made

    floats, options = types.FLOAT32, schema.BuiltinOptions
    loop = schema.WhileOptionsT()
    loop.condSubgraphIndex, loop.bodySubgraphIndex = 1, 2
    row = functools.partial(tensor, shape=[1, 4], kind=floats)
    reduce = schema.ReducerOptionsT()
    reduce.keepDims = False
    corners = [tensor("from", [2], types.INT32, 4), tensor("size", [2], types.INT32, 5)]
    main = graph(
        [row("x"), row("end"), tensor("y", [1, 2], floats), *corners],
        [0],
        [2],
        [
            operator(0, [0], [1], loop, options.WhileOptions),
            operator(4, [1, 3, 4], [2], schema.SliceOptionsT(), options.SliceOptions),
        ],
    )
    one, go = tensor("one", [1], floats, 2), tensor("go", [1], types.BOOL)
    axes = tensor("axes", [1], types.INT32, 3)
    condition = graph(
        [row("in"), axes, tensor("column", [4], floats), tensor("largest", [], floats), one, go],
        [0],
        [5],
        [
            operator(1, [0, 1], [2], reduce, options.ReducerOptions),
            operator(1, [2, 1], [3], reduce, options.ReducerOptions),
            operator(2, [3, 4], [5], schema.GreaterOptionsT(), options.GreaterOptions),
        ],
    )
    body = graph(
        [row("in"), tensor("zero", [1], floats, 1), row("out")],
        [0],
        [2],
        [operator(3, [0, 1], [2], schema.SubOptionsT(), options.SubOptions)],
    )
    model.subgraphs = [main, condition, body]
    builder = flatbuffers.Builder(4096)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def with_loop(maker: PackageMaker, *, is_counted: bool = True) -> PackageMaker:
    """Return a maker of packages of the loop in onnxruntime, whose golden input asks for no round."""
    model = make_loop_model(is_counted=is_counted)
    return dataclasses.replace(maker, artifacts={**maker.artifacts, "model.onnx": model})


def write_while(maker: PackageMaker, path: Path, name: str) -> None:
    """Write a package of the loop in LiteRT, whose golden input asks for no round."""
    golden_y = np.array([[-1, -0.5]], np.float32)
    artifacts = {
        **{path: data for path, data in maker.artifacts.items() if path != "model.onnx"},
        "golden/y.bin": golden_y.tobytes(),
        "model.tflite": make_while_model(),
    }
    roles = {**maker.roles, "model.tflite": "model"}
    dataclasses.replace(maker, artifacts=artifacts, roles=roles).write(
        path,
        name=name,
        backend=BackendChoice("litert", "model.tflite", {"threads": 1}),
        inputs=(TensorSpec("x", "float32", (1, 4)),),
        outputs=(TensorSpec("y", "float32", (1, 2)),),
    )
