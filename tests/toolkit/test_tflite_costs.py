"""Work of `.tflite` operators: what cannot be counted is refused and not free."""

import numpy as np
import pytest
from tests.toolkit.small_tflite import Lite

from edgekit_runtime.errors import ModelError
from edgekit_toolkit.costs.tflite_operators import tflite_costs


@pytest.mark.parametrize("kind", ["WHILE", "IF", "UNIDIRECTIONAL_SEQUENCE_LSTM", "SVDF"])
def test_work_of_loops_branches_and_recurrent_layers_is_refused(kind: str) -> None:
    lite = Lite()
    for name in "ac":
        lite.tensor(name, [1, 4])
    lite.operator(kind, ["a"], ["c"])
    lite.ends(["a"], ["c"])
    with pytest.raises(ModelError, match=f"operator {kind} that makes 'c': its work cannot be counted"):
        tflite_costs(lite.model)


def test_convolution_in_three_dimensions_is_counted() -> None:
    """Each of 2 x 3 x 4 x 6 outputs meets a window of 2 x 3 x 1 x 5."""
    lite = Lite()
    lite.tensor("a", [1, 3, 5, 4, 5])
    lite.constant("w", np.zeros((2, 3, 1, 5, 6), np.float32))
    lite.tensor("c", [1, 2, 3, 4, 6])
    lite.operator("CONV_3D", ["a", "w"], ["c"], "Conv3DOptions", strideD=1, strideH=1, strideW=1)
    lite.ends(["a"], ["c"])
    (cost,) = tflite_costs(lite.model)
    assert cost.macs == 2 * 3 * 4 * 6 * 2 * 3 * 1 * 5
