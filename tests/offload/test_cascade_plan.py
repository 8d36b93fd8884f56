"""Cascades as candidates of a plan: refused with a sentence, or planned and extracted."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.offload.onnx_models import model_of
from tests.offload.test_planner import inputs_of

from edgekit_offload.partition.opened_model import OpenedModel
from edgekit_offload.partition.split import whole_upload
from edgekit_offload.planning.cascade import CascadeInputs, cascade_split, plan_cascade, refuse_cascade
from edgekit_offload.planning.coding_costs import AnswerChange
from edgekit_offload.planning.explain import describe_answers
from edgekit_offload.planning.plan_inputs import ExtractedPlan
from edgekit_offload.planning.planner import plan
from edgekit_offload.planning.result import Refusal
from edgekit_offload.planning.uploads import UploadCandidate
from edgekit_runtime.offload.latency_model import Conditions, LinkState, predict_s, reserved_server_s
from edgekit_runtime.offload.offload_plan import Escalation, OffloadPlan, PlanCosts


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


def with_softmax(content: bytes) -> bytes:
    """The same model, with probabilities."""
    model = onnx.load_from_string(content)
    model.graph.node[0].output[0] = "s"
    model.graph.node.append(helper.make_node("Softmax", ["s"], ["y"]))
    return bytes(model.SerializeToString())


def samples(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    return [{"x": rng.normal(size=(1, 8)).astype(np.float32)} for _ in range(count)]


def test_too_few_samples_refuse_a_cascade() -> None:
    large, feeds = linear_model(0.0), samples(20)
    made = inputs_of(large, [5.0], [0.001], feeds[:4])
    result = plan(
        replace(
            made,
            cascade=CascadeInputs(
                small=OpenedModel(linear_model(0.1)), agreement=0.95, feeds=feeds, classes={"y"}
            ),
        )
    )
    assert any(one.name == "cascade" and "cannot confirm" in one.reason for one in result.refusals)


def test_good_small_model_makes_a_cascade_that_runs() -> None:
    large, small, feeds = linear_model(0.0), linear_model(0.1), samples(400)
    made = inputs_of(large, [5.0], [2.0], feeds[:4])
    result = plan(
        replace(
            made, cascade=CascadeInputs(small=OpenedModel(small), agreement=0.9, feeds=feeds, classes={"y"})
        )
    )
    (candidate,) = [one for one in result.candidates if one.kind == "cascade"]
    assert candidate.in_table
    escalation = candidate.plan.escalation
    assert escalation is not None
    assert escalation.share < 0.5
    assert "of 200 other samples" in candidate.explanation.lower()
    assert "with a confidence of 95" in candidate.explanation
    split = cascade_split(small, "y", whole_upload(large))
    assert split.head is not None
    got = onnxruntime.InferenceSession(split.head.content).run(["y"], feeds[0])[0]
    np.testing.assert_array_equal(got, onnxruntime.InferenceSession(small).run(None, feeds[0])[0])


def forecast_model(scale: float) -> bytes:
    """24 values of 24, times a scale: the greatest stays where it is."""
    weight = np.float32(scale) * np.random.default_rng(0).normal(size=(8, 24)).astype(np.float32)
    return model_of([("MatMul", ["x", "w"], ["y"])], {"x": (1, 8)}, ["y"], weights={"w": weight})


@pytest.mark.parametrize(("classes", "is_planned"), [((), False), ({"y"}, True)])
def test_cascade_of_what_is_not_known_to_hold_classes_is_refused(
    classes: Collection[str], is_planned: bool
) -> None:
    large, small, feeds = forecast_model(1.0), forecast_model(0.3), samples(400)
    made = inputs_of(large, [5.0], [2.0], feeds[:4])
    result = plan(
        replace(
            made, cascade=CascadeInputs(small=OpenedModel(small), agreement=0.9, feeds=feeds, classes=classes)
        )
    )
    assert any(one.kind == "cascade" for one in result.candidates) == is_planned
    reasons = [one.reason for one in result.refusals if one.name == "cascade"]
    assert [("by the class alone" in one, "--classes y" in one) for one in reasons] == [
        (True, True) for _ in range(not is_planned)
    ]


def test_cascade_of_probabilities_needs_no_statement() -> None:
    large, small = (with_softmax(linear_model(error)) for error in (0.0, 0.1))
    feeds = samples(400)
    made = inputs_of(large, [5.0, 1e-6], [2.0, 1e-6], feeds[:4])
    result = plan(replace(made, cascade=CascadeInputs(small=OpenedModel(small), agreement=0.9, feeds=feeds)))
    assert any(one.kind == "cascade" for one in result.candidates), result.refusals


@pytest.mark.parametrize(("loss", "sent"), [(5e-4, "delta"), (5e-3, "raw")])
def test_cascade_is_offered_on_an_upload_that_keeps_the_limit_on_loss(loss: float, sent: str) -> None:
    feeds = samples(400)

    def realise(uploads: Sequence[UploadCandidate], _cuts: object) -> dict[str, ExtractedPlan | Refusal]:
        """The rounded differences take a thousandth of the values, and cost some accuracy."""
        upload_bytes = {"raw": 1e6, "delta": 1e3}
        return {
            one.plan.name: ExtractedPlan(
                replace(one.plan, costs=PlanCosts(0.0, 2.0, upload_bytes[one.plan.name], 100.0)),
                "measured",
                AnswerChange(0.0, loss if one.plan.name == "delta" else 0.0),
            )
            for one in uploads
        }

    made = inputs_of(linear_model(0.0), [50.0], [2.0], feeds[:100])
    cascade = CascadeInputs(small=OpenedModel(linear_model(0.1)), agreement=0.9, feeds=feeds, classes={"y"})
    result = plan(replace(made, cascade=cascade, measure=realise))
    (candidate,) = [one for one in result.candidates if one.kind == "cascade"]
    assert [one.coding for one in candidate.sent] == [sent]
    assert not candidate.is_over_loss
    assert candidate.expected_loss == (loss if sent == "delta" else 0.0)
    assert candidate.in_table, candidate.explanation
    assert "not offered" not in candidate.explanation
    assert ("0.05 % wrong by its upload" in describe_answers(candidate, 400)) == (sent == "delta")


def test_sure_answers_do_not_pay_for_a_request_that_is_not_sent() -> None:
    large = linear_model(0.0)
    inputs = CascadeInputs(
        small=OpenedModel(linear_model(0.5), run_s=0.001), agreement=0.95, feeds=samples(400), classes={"y"}
    )
    costs = PlanCosts(0.050, 0.01, 4e3, 100.0, request_s=0.020, compress_s=0.010, plain_bytes=9e3)
    jpeg = OffloadPlan("jpeg:90", costs, tail="whole", media={"x": "jpeg:90"}, compression="zstd")
    coded = OffloadPlan("uint8", costs, head="uint8.head", tail="whole", compression="zstd")
    for upload, head_s in ((jpeg, 0.0), (coded, 0.020)):
        found = plan_cascade(OpenedModel(large), inputs, upload, 2.0)
        assert not isinstance(found, Refusal)
        escalation = found[0].escalation
        assert escalation is not None
        share = escalation.share
        assert 0 < share < 0.5
        assert found[0].costs.device_s == pytest.approx(0.002 + head_s + share * (0.050 - head_s))
        assert found[0].costs.request_s == pytest.approx(share * 0.020)


def test_cascade_is_refused_by_what_is_minimised() -> None:
    link = LinkState(10e6, 10e6, 0.02)
    escalation = Escalation("y", 0.1, 0.2)
    planned = OffloadPlan("cascade", PlanCosts(0.3, 0.01, 4e3, 100.0), "h", "t", escalation=escalation)
    upload = OffloadPlan("raw", PlanCosts(0.0, 0.01, 4e3, 100.0), tail="t")
    slow = refuse_cascade(planned, [upload], [Conditions(link)], predict_s)
    assert slow is not None
    assert "20%" in slow.reason
    assert "as 'raw'" in slow.reason
    fewer = refuse_cascade(planned, [upload], [Conditions(link)], lambda *one: reserved_server_s(*one, 1.0))
    assert fewer is None  # slower, and asks the server for a fifth of the requests
    never = refuse_cascade(planned, [upload], [Conditions(link)], lambda *one: reserved_server_s(*one, 0.01))
    assert never is not None
    assert "limit on latency" in never.reason
