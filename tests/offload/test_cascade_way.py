"""Cascades as ways of a plan: refused with a sentence, or planned and extracted."""

from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.offload.test_planner import inputs_of

from edgekit_offload.partition.split import whole_upload
from edgekit_offload.planning import planner
from edgekit_offload.planning.cascade import CascadeInputs, cascade_split
from edgekit_offload.planning.planner import plan


def linear_model(error: float) -> bytes:
    """Two classes; the smaller `error`, the nearer it is to the true one."""
    rng = np.random.default_rng(0)
    true = rng.normal(size=(8, 2))
    weight = (true + error * np.random.default_rng(1).normal(size=true.shape)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return model.SerializeToString()


def samples(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    return [{"x": rng.normal(size=(1, 8)).astype(np.float32)} for _ in range(count)]


def test_too_few_samples_refuse_a_cascade() -> None:
    large, feeds = linear_model(0.0), samples(20)
    made = inputs_of(large, [5.0], [0.001], feeds[:4])
    result = plan(replace(made, cascade=CascadeInputs(linear_model(0.1), 0.95, feeds)))
    assert any(one.name == "cascade" and "cannot confirm" in one.reason for one in result.refusals)


def test_good_small_model_makes_a_cascade_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "run_seconds", lambda *_: 1.0)  # the large model here; the profile says 5 s
    large, small, feeds = linear_model(0.0), linear_model(0.1), samples(400)
    made = inputs_of(large, [5.0], [2.0], feeds[:4])
    result = plan(replace(made, cascade=CascadeInputs(small, 0.9, feeds)))
    (way,) = [one for one in result.ways if one.kind == "cascade"]
    assert way.in_table
    escalation = way.plan.escalation
    assert escalation is not None
    assert escalation.share < 0.5
    split = cascade_split(small, "y", whole_upload(large))
    assert split.head is not None
    got = onnxruntime.InferenceSession(split.head.content).run(["y"], feeds[0])[0]
    np.testing.assert_array_equal(got, onnxruntime.InferenceSession(small).run(None, feeds[0])[0])
