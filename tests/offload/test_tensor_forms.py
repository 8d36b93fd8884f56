"""What counts as another form of a tensor, and what does not."""

import numpy as np
import onnx
from tests.offload.onnx_models import model_of

from edgekit_offload.partition.tensor_forms import find_forms


def test_forms_go_on_through_constants_and_end_where_values_are_mixed() -> None:
    nodes = [
        ("Shape", ["x"], ["sizes"]),
        ("Reshape", ["x", "sizes"], ["reshaped"]),  # by a shape that the graph makes
        ("Sqrt", ["four"], ["two"]),
        ("Div", ["reshaped", "two"], ["scaled"]),  # by a constant that the graph makes
        ("Add", ["scaled", "scaled"], ["doubled"]),
        ("MatMul", ["x", "w"], ["mixed"]),
        ("Add", ["x", "mixed"], ["sum"]),
        ("Relu", ["x"], ["positive"]),
        ("Transpose", ["mixed"], ["turned"]),
        ("Concat", ["mixed", "doubled"], ["joined"]),
    ]
    content = model_of(
        nodes, {"x": (4, 4)}, ["sum", "positive", "turned", "joined"],
        weights={"w": np.ones((4, 4), np.float32), "four": np.float32(4)},
        attributes={9: {"axis": 0}},
    )  # fmt: skip
    assert find_forms(onnx.load_from_string(content).graph, ["x"]) == {
        "x",
        "reshaped",
        "scaled",
        "doubled",
        "joined",
    }
    assert find_forms(onnx.load_from_string(content).graph, ["mixed"]) == {"mixed", "turned", "joined"}
    assert find_forms(onnx.load_from_string(content).graph, []) == frozenset()
