"""The choice for an engine: of forms that the model cannot tell apart, what this machine decides."""

import pytest

from edgekit_toolkit.pipeline.acceptance import Acceptance, choose_accepted
from edgekit_toolkit.selection.budget import Budget
from edgekit_toolkit.selection.choice import CandidateFigures


def alike_on_target(name: str, *, size: float, host: float) -> CandidateFigures:
    figures = {"size": size, "latency": 10.0, "memory": 1e6, "energy": 1.0, "drop": 0.0}
    return CandidateFigures(name, name, figures, latency_uncertainty=1.4, host_ratio=host)


@pytest.mark.parametrize(("backend", "chosen"), [("tensorrt", "small"), ("ort", "fast"), ("litert", "fast")])
def test_order_of_this_machine_decides_for_engines_on_a_processor_only(backend: str, chosen: str) -> None:
    some = [
        alike_on_target("float", size=4e6, host=1.0),
        alike_on_target("fast", size=2e6, host=0.4),
        alike_on_target("small", size=1e6, host=1.0),
    ]
    found = choose_accepted(Budget({}), some, lambda _: Acceptance(), on_gpu=backend == "tensorrt")
    assert found.choice.chosen == chosen


def test_candidate_that_the_engine_refuses_gives_way_to_the_next_one_with_the_reason() -> None:
    some = [
        alike_on_target("float", size=4e6, host=1.0),
        alike_on_target("fast", size=2e6, host=0.4),
    ]
    refusals = {"fast": Acceptance("onnxruntime 1.24.4", "it aborted")}
    found = choose_accepted(Budget({}), some, lambda name: refusals.get(name, Acceptance()), on_gpu=False)
    assert (found.choice.chosen, found.notes) == ("float", ["onnxruntime 1.24.4 refuses fast: it aborted"])


def test_candidates_that_the_engine_refuses_all_leave_none_and_every_reason() -> None:
    some = [alike_on_target("float", size=4e6, host=1.0)]
    found = choose_accepted(
        Budget({}), some, lambda _: Acceptance("onnxruntime 1.24.4", "it aborted"), on_gpu=False
    )
    assert (found.choice.chosen, "refuses float: it aborted" in found.choice.reason) == (None, True)
