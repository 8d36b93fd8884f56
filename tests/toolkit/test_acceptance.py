"""The choice for an engine: of forms that the model cannot tell apart, what this machine decides."""

import numpy as np
import onnx
import pytest

from edgekit_toolkit.measurement.peak_memory import trivial_model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.pipeline.tensorrt_acceptance import choose_accepted
from edgekit_toolkit.selection.budget import Budget
from edgekit_toolkit.selection.choice import Measured


def alike_on_target(name: str, *, size: float, host: float) -> Measured:
    figures = {"size": size, "latency": 10.0, "memory": 1e6, "energy": 1.0, "drop": 0.0}
    return Measured(name, name, figures, latency_uncertainty=1.4, host_ratio=host)


@pytest.mark.parametrize(("backend", "chosen"), [("tensorrt", "small"), ("ort", "fast"), ("litert", "fast")])
def test_order_of_this_machine_decides_for_engines_on_a_processor_only(backend: str, chosen: str) -> None:
    some = [
        alike_on_target("float", size=4e6, host=1.0),
        alike_on_target("fast", size=2e6, host=0.4),
        alike_on_target("small", size=1e6, host=1.0),
    ]
    model = OnnxModel(onnx.load_from_string(trivial_model("ort")))
    feeds = {"x": np.zeros(1, np.float32)}
    found = choose_accepted(backend, Budget({}), some, {one.id: model for one in some}, feeds)
    assert found.choice.chosen == chosen
