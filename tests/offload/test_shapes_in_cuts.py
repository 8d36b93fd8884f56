"""A cut sends no tensor for its shape alone, and the batch stays free."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from tests.offload.machine_here import MACHINE_HERE
from tests.offload.onnx_models import model_of
from tests.offload.test_split import Feeds, run_split

from edgekit_offload.partition.source_model import SourceModel
from edgekit_offload.partition.split import split_model
from edgekit_offload.profiling.machine import RunnableGraph, profile_kernels
from edgekit_offload.profiling.planning_graph import join_profiles

SHARED = Path(__file__).resolve().parents[3] / "shared" / "models" / "models"
NODES = [
    ("Relu", ["x"], ["a"]),
    ("Shape", ["x"], ["shape"]),
    ("Gather", ["shape", "zero"], ["batch"]),
    ("Shape", ["weights"], ["of_weights"]),
    ("Concat", ["batch", "minus_one"], ["flat"]),
    ("Tanh", ["a"], ["b"]),
    ("Reshape", ["b", "flat"], ["c"]),
    ("Concat", ["batch", "four"], ["state_shape"]),
    ("ConstantOfShape", ["state_shape"], ["state"]),
    ("Sigmoid", ["c"], ["d"]),
    ("Concat", ["d", "state"], ["e"]),
    ("Relu", ["e"], ["y"]),
]
WEIGHTS = {
    "zero": np.zeros(1, np.int64),
    "minus_one": np.array([-1], np.int64),
    "four": np.array([4], np.int64),
    "weights": np.zeros((2, 2), np.float32),
}
MOVING = [0, 5, 6, 9, 10, 11]


def reshaping_model(batch: int | str) -> bytes:
    attributes = {4: {"axis": 0}, 7: {"axis": 0}, 10: {"axis": 1}}
    return model_of(NODES, {"x": (batch, 3, 2)}, ["y"], weights=WEIGHTS, attributes=attributes)


@pytest.mark.parametrize("count", range(1, len(MOVING)))
def test_shape_of_the_input_behind_a_cut_is_made_from_what_is_sent(count: int) -> None:
    content = reshaping_model("N")
    split = split_model(content, MOVING[:count])
    assert [len(split.sent), "x" in {spec.name for spec in split.sent}] == [1, False]
    for batch in (1, 3):
        feeds: Feeds = {"x": np.random.default_rng(batch).normal(size=(batch, 3, 2)).astype(np.float32)}
        expected = onnxruntime.InferenceSession(content).run(["y"], feeds)[0]
        np.testing.assert_array_equal(run_split(split, content, feeds, optimise=False)["y"], expected)


def test_shape_of_a_fixed_batch_is_a_constant_of_the_tail() -> None:
    content = reshaping_model(2)
    split = split_model(content, MOVING[:2])
    assert [spec.name for spec in split.sent] == ["b"]
    assert b"Shape" not in split.tail.content.replace(b"ConstantOfShape", b"").replace(b"Reshape", b"")
    feeds: Feeds = {"x": np.random.default_rng(0).normal(size=(2, 3, 2)).astype(np.float32)}
    expected = onnxruntime.InferenceSession(content).run(["y"], feeds)[0]
    np.testing.assert_array_equal(run_split(split, content, feeds, optimise=False)["y"], expected)


def test_shape_that_is_an_output_is_still_one() -> None:
    nodes = [("Relu", ["x"], ["a"]), ("Shape", ["a"], ["shape"]), ("Tanh", ["a"], ["y"])]
    content = model_of(nodes, {"x": ("N", 3)}, ["y"])
    model = SourceModel(content).proto
    model.graph.output.add(name="shape").type.tensor_type.elem_type = 7
    split = split_model(model.SerializeToString(), [0])
    assert [spec.name for spec in split.sent] == ["a"]
    feeds: Feeds = {"x": np.ones((2, 3), np.float32)}
    assert run_split(split, model.SerializeToString(), feeds)["shape"].tolist() == [2, 3]


@pytest.mark.long  # the cuts of each of its kernels
def test_no_cut_of_efficientnet_sends_the_input_beside_a_tensor() -> None:
    path = SHARED / "efficientnet_lite0_fp32.onnx"
    if not path.exists():
        pytest.skip("needs ../shared/models")
    content = path.read_bytes()
    profile = profile_kernels(MACHINE_HERE, RunnableGraph(content, {"threads": 1}), seconds=0.2)
    joined, source = join_profiles(content, [profile]), SourceModel(content)
    assert len(joined.nodes) > 40
    for count in range(1, len(joined.nodes)):
        device = [node for group in joined.nodes[:count] for node in group]
        assert "input" not in {spec.name for spec in split_model(source, device).sent}
