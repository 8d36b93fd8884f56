"""A model with states, and requests of its sequences."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from tests.runtime.conftest import PackageMaker
from tests.service.service_parts import Manifest_, Reply, Running, ask, post_bytes, write_signed

from edgekit_runtime.package.states import RecurrentState

STATES = (RecurrentState("total_out", "total"), RecurrentState("count_out", "count"))


def write_sums(
    maker: PackageMaker, path: Path, *, version: str = "1.0.0", factor: float = 1.0, has_states: bool = True
) -> None:
    """Write `sums`: y = total_out = total + factor * x, count_out = count + 1."""
    helper, float32, int64 = onnx.helper, onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
    factors = onnx.numpy_helper.from_array(np.array(factor, np.float32), "factor")
    ones = onnx.numpy_helper.from_array(np.array(1, np.int64), "one")
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["x", "factor"], ["scaled"]),
            helper.make_node("Add", ["total", "scaled"], ["total_out"]),
            helper.make_node("Add", ["total", "scaled"], ["y"]),
            helper.make_node("Add", ["count", "one"], ["count_out"]),
        ],
        "sums",
        [
            helper.make_tensor_value_info("x", float32, ["N", 2]),
            helper.make_tensor_value_info("total", float32, ["N", 2]),
            helper.make_tensor_value_info("count", int64, ["N", 1]),
        ],
        [
            helper.make_tensor_value_info("y", float32, ["N", 2]),
            helper.make_tensor_value_info("total_out", float32, ["N", 2]),
            helper.make_tensor_value_info("count_out", int64, ["N", 1]),
        ],
        [factors, ones],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    x: Any = np.array([[1, 2]], np.float32)
    golden = {"x": x, "total": x, "count": np.array([[4]])}
    expected = {"y": x + factor * x, "total_out": x + factor * x, "count_out": np.array([[5]])}
    sketch, states = Manifest_("sums", version, {}, golden), STATES if has_states else ()
    write_signed(maker, path, sketch, expected, model.SerializeToString(), states=states)


def make_step(
    rows: Any, sequence_id: object = None, *, start: bool = False, end: bool = False, **more: Any
) -> bytes:
    """Return a request to `sums` as JSON."""
    x = np.array(rows, np.float32)
    stated = {"sequence_id": sequence_id, "sequence_start": start, "sequence_end": end}
    entry = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.reshape(-1).tolist()}
    document = {
        "inputs": [entry, *more.pop("inputs", [])],
        "parameters": {key: value for key, value in stated.items() if value},
        **more,
    }
    return post_bytes(more.pop("path", "/v2/models/sums/infer"), json.dumps(document).encode())


def step(service: Running, rows: Any, sequence_id: object = None, **more: Any) -> Reply:
    return ask(service, make_step(rows, sequence_id, **more))


def values(reply: Reply, name: str = "y") -> list[float]:
    """Return an output of an answer."""
    assert reply.status == 200, reply.body
    (found,) = [output for output in reply.json["outputs"] if output["name"] == name]
    return list(found["data"])
