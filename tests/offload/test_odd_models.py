"""Ordinary models with something odd: each gets a plan or a sentence, and what its cuts answer is right."""

from collections.abc import Mapping

import numpy as np
import onnxruntime
import pytest
from tests.offload.machine_here import MACHINE_HERE
from tests.offload.odd_models import KINDS, Feeds, make_feeds, odd_models

from edgekit_offload.partition.opened_model import OpenedModel
from edgekit_offload.partition.split import WEIGHTS_PATH, Part, SplitModels
from edgekit_offload.planning import planner
from edgekit_offload.planning.envelope import Grid
from edgekit_offload.planning.measurement import CutMeasurement
from edgekit_offload.planning.plan_inputs import PlanInputs
from edgekit_offload.planning.planner import plan
from edgekit_offload.planning.result import PlanningResult
from edgekit_offload.profiling.machine import RunnableGraph, profile_kernels
from edgekit_runtime.errors import CutError

SECONDS = 0.02
MODELS = dict(odd_models(0, 3 * len(KINDS)))
GRID = Grid((0.5, 20.0), (20.0,))


def plan_model(name: str, content: bytes) -> tuple[PlanningResult, dict[str, SplitModels]]:
    draws = np.random.default_rng(3)
    feeds = [make_feeds(content, draws) for _ in range(3)]
    machine = MACHINE_HERE
    graph = RunnableGraph(content, inputs=feeds[0])
    profile = profile_kernels(machine, graph, name=name, seconds=SECONDS)
    measured = CutMeasurement(
        model=OpenedModel(content), feeds=feeds, device=machine, server=machine, seconds=SECONDS
    )
    inputs = PlanInputs(
        name=name,
        model=measured.model,
        device=profile,
        server=profile,
        grid=GRID,
        feeds=feeds,
        measure=measured,
        max_loss=1.0,
    )
    return plan(inputs), measured.splits


def run_model(content: bytes, feeds: Mapping[str, object], weights: bytes = b"") -> Feeds:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    if weights:
        settings.add_external_initializers_from_files_in_memory([WEIGHTS_PATH], [weights], [len(weights)])
    session = onnxruntime.InferenceSession(content, settings)
    names = [one.name for one in session.get_outputs()]
    taken = {one.name: feeds[one.name] for one in session.get_inputs()}
    return dict(zip(names, session.run(names, taken), strict=True))


def run_part(part: Part | None, feeds: Mapping[str, object], content: bytes) -> Feeds:
    return {} if part is None else run_model(part.content, feeds, content if part.reads_weights else b"")


def check_answers(name: str, content: bytes, splits: Mapping[str, SplitModels]) -> int:
    """Compare what exact candidates answer with the whole model, on a request that planning has not seen."""
    feeds, count = make_feeds(content, np.random.default_rng(99)), 0
    if "_random" in name:
        return 0
    expected = run_model(content, feeds)
    for candidate, split in splits.items():
        if not candidate.endswith("raw"):
            continue
        head = {**feeds, **run_part(split.head, feeds, content)}
        outputs = {**head, **run_part(split.tail, head, content)}
        for output, right in expected.items():
            if isinstance(right, np.ndarray) and right.dtype.kind in "fiub":
                np.testing.assert_allclose(
                    outputs[output], right, rtol=1e-4, atol=1e-5, err_msg=f"{name} {candidate}"
                )
        count += 1
    return count


@pytest.mark.parametrize("name", list(MODELS)[: len(KINDS)])
def test_odd_model_gets_a_plan_whose_answers_are_right_or_a_sentence(name: str) -> None:
    content = MODELS[name]
    result, splits = plan_model(name, content)
    assert {"local", "raw"} <= {candidate.name for candidate in result.candidates}
    assert check_answers(name, content, splits) >= ("_random" not in name)
    if not any(candidate.kind == "cut" for candidate in result.candidates):
        reasons = [one.reason for one in result.refusals]
        assert any("cannot be split" in reason or "cannot be extracted" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("name", "message"), [("28_sequence", "'parts' is a seq"), ("35_odd_input", "'word' is no plain")]
)
def test_model_with_an_input_or_output_that_cannot_be_sent_is_refused_by_name(
    name: str, message: str
) -> None:
    with pytest.raises(CutError, match=message):
        plan_model(name, MODELS[name])


def test_error_while_cuts_are_tried_leaves_the_ways_with_the_whole_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("an engine's own error")

    monkeypatch.setattr(planner, "search_cuts", fail)
    result, _ = plan_model("0_recurrent", MODELS["0_recurrent"])
    assert {candidate.kind for candidate in result.candidates} == {"local", "upload"}
    assert any("RuntimeError: an engine's own error" in one.reason for one in result.refusals)
