"""The planner on real models, with profiles whose times are made up, so that no timing decides a test."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.offload.machine_here import MACHINE_HERE
from tests.offload.onnx_models import branching_model, model_of

from edgekit_offload.partition.opened_model import OpenedModel
from edgekit_offload.planning import planner
from edgekit_offload.planning.coding_costs import AnswerChange, measure_codings
from edgekit_offload.planning.costs import CodedTensors, DeviceLimits, PowerModel
from edgekit_offload.planning.cut_candidates import CutCandidate
from edgekit_offload.planning.envelope import Grid
from edgekit_offload.planning.explain import describe_certificate
from edgekit_offload.planning.leakage import Leakage
from edgekit_offload.planning.measurement import CutMeasurement, leakage_of
from edgekit_offload.planning.plan_inputs import MAX_LOSS, ExtractedPlan, PlanInputs
from edgekit_offload.planning.planner import plan
from edgekit_offload.planning.result import Candidate, PlanningResult, Refusal, SentTensor
from edgekit_offload.planning.uploads import UploadCandidate
from edgekit_offload.profiling.model_profile import KernelTime, ModelProfile, digest_model
from edgekit_runtime.dataclass_json import from_plain, to_plain
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.choose import choose
from edgekit_runtime.offload.latency_model import Conditions, LinkState, predict_s
from edgekit_runtime.offload.measurement.machine_facts import MachineFacts
from edgekit_runtime.offload.measurement.request_cost import RequestCost
from edgekit_runtime.offload.offload_plan import OffloadPlan, PlanCosts

TINY = Path(__file__).parents[2] / "models" / "tiny"
GRID = Grid((0.1, 1.0, 10.0, 100.0), (20.0,))
NEAR = replace(GRID, rtts_ms=(5.0,))
MEASURED_S = 0.01  # least rounds


@pytest.fixture(autouse=True)
def _coding_as_fast_as_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times of the profiles are made up, so what coding takes here does not count."""

    def measure(*arguments: Any, **_slowdowns: float) -> dict[str, CodedTensors]:
        return measure_codings(*arguments, device_slowdown=0.0, server_slowdown=0.0)

    monkeypatch.setattr(planner, "measure_codings", measure)


def machine_facts() -> MachineFacts:
    return MachineFacts(
        cpu="a processor",
        system="Linux",
        cores=1,
        quota=None,
        load=0.0,
        engine="onnxruntime",
        date="2026-01-01T00:00:00Z",
    )


def profile_of(content: bytes, seconds: list[float], name: str) -> ModelProfile:
    """A profile in which each node of the model is a kernel that takes what it is told to."""
    model = onnx.load_from_string(content)
    weights = {one.name for one in model.graph.initializer}
    inputs = tuple(one.name for one in model.graph.input if one.name not in weights)
    shapes = onnx.shape_inference.infer_shapes(model).graph
    sizes = {
        one.name: 4 * int(np.prod([d.dim_value or 1 for d in one.type.tensor_type.shape.dim]))
        for one in (*shapes.input, *shapes.value_info, *shapes.output)
    }
    kernels = tuple(
        KernelTime(
            f"k{number}",
            node.op_type,
            tuple(t for t in node.input if t not in weights),
            tuple(node.output),
            s,
        )
        for number, (node, s) in enumerate(zip(model.graph.node, seconds, strict=True))
    )
    return ModelProfile(
        model="model",
        model_sha256=digest_model(content),
        measured_on=name,
        machine=machine_facts(),
        label="measured",
        whole_s=sum(seconds),
        whole_spread=0.0,
        scale=1.0,
        inputs=inputs,
        outputs=tuple(one.name for one in model.graph.output),
        tensors=sizes,
        kernels=kernels,
    )


def narrowing_model(channels: int, side: int) -> bytes:
    """A photo in, a small tensor after the first of three convolutions."""
    rng, nodes, weights = np.random.default_rng(0), [], []
    sizes = (channels, 4, 4, 4)
    for number, (before, after) in enumerate(pairwise(sizes)):
        stride = 8 if number == 0 else 1
        value = rng.normal(size=(after, before, stride, stride)).astype(np.float32)
        weights.append(numpy_helper.from_array(value, f"w{number}"))
        nodes.append(
            helper.make_node(
                "Conv", [f"t{number}", f"w{number}"], [f"t{number + 1}"], strides=[stride, stride]
            )
        )
    given = helper.make_tensor_value_info("t0", TensorProto.FLOAT, [1, channels, side, side])
    made = helper.make_tensor_value_info("t3", TensorProto.FLOAT, [1, 4, side // 8, side // 8])
    graph = helper.make_graph(nodes, "g", [given], [made], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return model.SerializeToString()


def noise(channels: int, side: int, count: int = 3) -> list[dict[str, np.ndarray]]:
    """Values that no codec of photographs can carry."""
    rng = np.random.default_rng(1)
    return [{"t0": rng.normal(size=(1, channels, side, side)).astype(np.float32)} for _ in range(count)]


def photos(side: int, count: int = 3) -> list[dict[str, np.ndarray]]:
    """Smooth pictures of 8-bit pixels, scaled to -1..1."""
    rng, feeds = np.random.default_rng(2), []
    rows = np.linspace(0, 3, side)
    for _ in range(count):
        waves = [np.sin(rng.uniform(1, 2) * rows + rng.uniform(0, 6)) for _ in range(6)]
        image = np.stack([np.add.outer(waves[2 * c], waves[2 * c + 1]) for c in range(3)])
        pixels = np.rint((image + 2) / 4 * 255).astype(np.uint8)
        feeds.append({"t0": (pixels.astype(np.float32) / 127.5 - 1)[np.newaxis]})
    return feeds


def inputs_of(
    content: bytes, device: list[float], server: list[float], feeds: list[dict[str, np.ndarray]]
) -> PlanInputs:
    profiles = profile_of(content, device, "device"), profile_of(content, server, "server")
    return PlanInputs(
        name="model",
        model=OpenedModel(content, run_s=1.0),
        device=profiles[0],
        server=profiles[1],
        grid=GRID,
        feeds=feeds,
    )


def best_at(result: PlanningResult, mbit_s: float, rtt_ms: float = 20.0) -> str:
    return result.best(mbit_s, rtt_ms).kind


def test_narrow_tensor_after_a_cheap_kernel_is_cut_at() -> None:
    content = narrowing_model(16, 64)
    inputs = inputs_of(content, [0.005, 0.5, 0.5], [0.001, 0.002, 0.002], noise(16, 64))
    result = plan(replace(inputs, grid=replace(GRID, rtts_ms=(5.0, 20.0))))
    assert best_at(result, 1.0) == "cut"
    candidate = result.best(1.0, 20.0)
    assert [one.name for one in candidate.sent] == ["t1"]
    assert candidate.certificate is not None
    assert (candidate.certificate.gap, candidate.certificate.proof) == (0.0, "enumerated")
    assert candidate.certificate.placements == 4
    assert "pays at" in " ".join(result.sentences)
    names = {one.name for one in result.table.plans}
    assert {"local", candidate.name} <= names
    assert names == {one.name for one in result.candidates if one.in_table}
    assert from_plain(PlanningResult, to_plain(result)) == result
    assert [one for one in result.refusals if "8-bit pixels" in one.reason]


def test_whole_model_is_uploaded_where_the_device_is_slow_and_the_link_fast() -> None:
    content = narrowing_model(3, 64)
    result = plan(inputs_of(content, [1.0, 0.5, 0.5], [0.001, 0.001, 0.001], noise(3, 64)))
    assert best_at(result, 100.0) == "upload"


def test_request_that_takes_long_on_the_device_makes_it_run_alone() -> None:
    content = narrowing_model(16, 64)
    inputs = inputs_of(content, [0.005, 0.5, 0.5], [0.001, 0.002, 0.002], noise(16, 64))
    plain = plan(inputs)
    slow = replace(inputs.device, request=RequestCost(fixed_s=2.0, byte_s=1e-6))
    result = plan(replace(inputs, device=slow))
    assert (best_at(plain, 1.0), best_at(result, 1.0)) == ("cut", "local")
    before = {candidate.name: candidate.plan.costs for candidate in plain.candidates}
    for candidate in result.candidates:
        added_s = 0.0 if candidate.kind == "local" else 2.0 + 1e-6 * candidate.plan.costs.upload_bytes
        # Coding is timed again by each plan: microseconds.
        assert candidate.plan.costs.device_s - before[candidate.name].device_s == pytest.approx(
            added_s, abs=1e-4
        )
        assert candidate.plan.costs.request_s == pytest.approx(added_s)


def test_request_costs_the_server_too() -> None:
    content = narrowing_model(16, 64)
    inputs = inputs_of(content, [0.005, 0.5, 0.5], [0.001, 0.002, 0.002], noise(16, 64))
    before = {candidate.name: candidate.plan.costs.server_s for candidate in plan(inputs).candidates}
    busy = replace(inputs.server, request=RequestCost(fixed_s=0.01, byte_s=1e-8))
    for candidate in plan(replace(inputs, server=busy)).candidates:
        added_s = 0.0 if candidate.kind == "local" else 0.01 + 1e-8 * candidate.plan.costs.upload_bytes
        # Decoding is timed again by each plan: microseconds.
        assert candidate.plan.costs.server_s - before[candidate.name] == pytest.approx(added_s, abs=1e-4)


def test_photo_is_sent_as_jpeg_rather_than_split() -> None:
    pytest.importorskip("PIL", reason="needs Pillow")
    content = narrowing_model(3, 256)
    # The first kernel costs more on the device than to encode the photo: the usual case.
    made = inputs_of(content, [1.0, 1.0, 1.0], [0.001, 0.001, 0.001], photos(256))
    result = plan(replace(made, max_loss=1.0))  # nothing is run, so what JPEG changes is unknown
    cuts = [candidate for candidate in result.candidates if candidate.kind == "cut"]
    jpeg = next(candidate for candidate in result.candidates if candidate.name == "jpeg:90")
    assert cuts
    assert not any(candidate.wins for candidate in cuts)
    assert all(min(candidate.score[0]) > min(jpeg.score[0]) for candidate in cuts)
    assert "No cut pays" in " ".join(result.sentences)
    assert {one.coding for one in jpeg.sent} == {"jpeg:90"}
    uint8 = next(candidate for candidate in result.candidates if candidate.name == "uint8")
    assert jpeg.plan.costs.upload_bytes < uint8.plan.costs.upload_bytes


def test_input_that_must_stay_leaves_no_way_to_upload_it() -> None:
    content = narrowing_model(3, 64)
    made = inputs_of(content, [0.01, 1.0, 1.0], [0.001, 0.001, 0.001], noise(3, 64))
    result = plan(replace(made, keep_on_device=("input",)))
    assert {candidate.kind for candidate in result.candidates} == {"local", "cut"}
    assert all(one.name != "t0" for candidate in result.candidates for one in candidate.sent)
    with pytest.raises(CutError, match="--keep-on-device nothing"):
        plan(replace(made, keep_on_device=("nothing",)))


PREPROCESSING: dict[str, list[tuple[str, list[str], list[str]]]] = {
    "transpose": [("Transpose", ["x"], ["a"])],
    "reshape": [("Reshape", ["x", "sizes"], ["a"]), ("Flatten", ["a"], ["b"])],
    "cast": [("Cast", ["x"], ["a"]), ("CastLike", ["a", "one"], ["b"])],
    "8 bits": [("QuantizeLinear", ["x", "step"], ["a"]), ("DequantizeLinear", ["a", "step"], ["b"])],
    "affine": [("Sub", ["x", "one"], ["a"]), ("Div", ["a", "step"], ["b"]), ("Neg", ["b"], ["c"])],
    "batch norm": [("BatchNormalization", ["x", "row", "row", "row", "row"], ["a"])],
    "parts": [("Split", ["x", "halves"], ["a", "b"]), ("Concat", ["b", "a"], ["c"])],
}


@pytest.mark.parametrize("kind", PREPROCESSING)
def test_input_that_must_stay_is_not_sent_in_another_form_either(kind: str) -> None:
    before = PREPROCESSING[kind]
    forms = {tensor for _, _, written in before for tensor in written}
    attributes: dict[str, dict[str, Any]] = {
        "Transpose": {"perm": [0, 1]},
        "Split": {"axis": 1},
        "Concat": {"axis": 1},
        "Cast": {"to": TensorProto.FLOAT16},
    }
    nodes = [*before, ("MatMul", [before[-1][2][-1], "w"], ["m"]), ("Tanh", ["m"], ["p"]),
             ("MatMul", ["p", "v"], ["y"])]  # fmt: skip
    weights = {
        "w": np.eye(640, 64, dtype=np.float32), "v": np.eye(64, 8, dtype=np.float32),
        "sizes": np.array([1, 640]), "halves": np.array([320, 320]), "one": np.float32(1),
        "step": np.float32(0.05), "row": np.ones(640, np.float32),
    }  # fmt: skip
    used = {tensor for _, read, _ in nodes for tensor in read}
    content = model_of(
        nodes, {"x": (1, 640)}, ["y"],
        weights={name: one for name, one in weights.items() if name in used},
        attributes={place: attributes.get(op, {}) for place, (op, _, _) in enumerate(nodes)},
    )  # fmt: skip
    feeds = [{"x": np.random.default_rng(n).normal(size=(1, 640)).astype(np.float32)} for n in range(4)]
    device_s = [1e-5] * len(before) + [1.0, 1e-5, 1.0]
    made = replace(inputs_of(content, device_s, [1e-5] * len(nodes), feeds), leakage=lambda _sent: leak(10.0))
    free, kept = plan(made), plan(replace(made, keep_on_device=("input",)))
    sent = {candidate.name: {one.name for one in candidate.sent} for candidate in free.candidates}
    assert any(sent[candidate.name] & forms for candidate in free.candidates if candidate.kind == "cut")
    for candidate in free.candidates:
        assert candidate.sends_input == bool(sent[candidate.name] & {"x", *forms})
        assert candidate.plan.leakage_db is None or not candidate.sends_input
    found = {one.name for candidate in kept.candidates for one in candidate.sent}
    assert found
    assert found <= {"m", "p"}


def test_tensor_that_must_stay_is_made_on_no_server() -> None:
    content = narrowing_model(3, 64)
    made = inputs_of(content, [0.01, 1.0, 1.0], [0.001, 0.001, 0.001], noise(3, 64))
    assert any(candidate.kind == "upload" for candidate in plan(made).candidates)
    edge = profile_of(content, [0.01, 0.01, 0.01], "edge")
    tiered = replace(made, edge=edge, edge_link=LinkState(50e6, 50e6, 0.03))
    for inputs in (made, tiered):
        result = plan(replace(inputs, keep_on_device=("t1",)))
        assert {candidate.kind for candidate in result.candidates} == {"local", "cut"}
        # Its reader stays too, so a cut is behind that one.
        assert {
            candidate.kernels_on_device for candidate in result.candidates if candidate.kind == "cut"
        } == {2}
        (reason,) = [one.reason for one in result.refusals if one.name == "upload"]
        assert "'t1' must stay on the device" in reason
        assert all(one.kernels[0] >= 2 for one in result.tiers)


def test_limit_on_weights_holds_on_three_tiers() -> None:
    content = narrowing_model(16, 64)
    made = inputs_of(content, [0.005, 0.05, 0.5], [0.001, 0.002, 0.002], noise(16, 64))
    edge = profile_of(content, [0.002, 0.04, 0.1], "edge")
    tiered = replace(made, edge=edge, edge_link=LinkState(50e6, 50e6, 0.001))
    assert any(candidate.name.startswith("tier") for candidate in plan(tiered).candidates)
    for limits in (DeviceLimits(weights_bytes=1000.0), DeviceLimits(memory_bytes=100_000.0)):
        result = plan(replace(tiered, limits=limits))
        assert {candidate.kind for candidate in result.candidates} == {"upload"}
        assert all(one.kernels[0] == 0 for one in result.tiers)
        assert len(result.tiers) == len(GRID.links())


def test_head_that_shares_a_large_weight_with_its_tail_is_not_planned() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[1,64] x) => (float[1,64] y, float[1,64] z)'
        " { y = MatMul(x, w) s = Relu(x) z = MatMul(s, w) }"
    )
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    content = model.SerializeToString()
    feeds = [{"x": np.ones((1, 64), np.float32)}] * 2
    made = inputs_of(content, [1.0, 0.001, 0.001], [0.001, 1.0, 1.0], feeds)
    assert any(candidate.kind == "cut" for candidate in plan(made).candidates)
    result = plan(replace(made, limits=DeviceLimits(weights_bytes=10_000.0)))
    assert {candidate.kernels_on_device for candidate in result.candidates} <= {0, 1}  # the activation
    looser = plan(replace(made, limits=DeviceLimits(weights_bytes=17_000.0)))
    assert max(candidate.kernels_on_device for candidate in looser.candidates) == 2


def test_model_too_large_for_the_device_is_never_planned_as_local() -> None:
    content = narrowing_model(3, 64)
    made = inputs_of(content, [0.001, 0.001, 0.001], [0.001, 0.001, 0.001], noise(3, 64))
    result = plan(replace(made, limits=DeviceLimits(memory_bytes=1000.0)))
    assert all(candidate.kind != "local" for candidate in result.candidates)
    assert result.table.local is None
    assert any(one.name == "local" and "limit" in one.reason for one in result.refusals)


def test_limit_on_weights_counts_no_activations() -> None:
    content = narrowing_model(3, 64)
    made = inputs_of(content, [0.001, 0.001, 0.001], [0.001, 0.001, 0.001], noise(3, 64))
    first, each = 4.0 * 3 * 4 * 64, 4.0 * 4 * 4  # weights of the first kernel, and of the other two
    fits = plan(replace(made, limits=DeviceLimits(weights_bytes=first + 2 * each)))
    assert fits.table.local is not None
    result = plan(replace(made, limits=DeviceLimits(weights_bytes=first + each)))
    assert result.table.local is None
    (reason,) = [one.reason for one in result.refusals if one.name == "local"]
    assert "kB of weights, the limit is" in reason
    cuts = [candidate for candidate in result.candidates if candidate.kind == "cut"]
    assert {candidate.kernels_on_device for candidate in cuts} <= {1, 2}
    assert any(candidate.kernels_on_device == 2 for candidate in cuts)
    none = plan(replace(made, limits=DeviceLimits(weights_bytes=first - 1)))
    assert {candidate.kind for candidate in none.candidates} == {"upload"}


def test_leakage_above_the_limit_refuses_a_way() -> None:
    content = narrowing_model(16, 64)
    made = inputs_of(content, [0.005, 0.5, 0.5], [0.001, 0.002, 0.002], noise(16, 64))
    result = plan_with_leaks(made, {"t0": 60.0, "t1": 25.0})
    assert all(one.name not in ("t0", "t1") for candidate in result.candidates for one in candidate.sent)
    assert "the input itself" in next(one.reason for one in result.refusals if one.name == "raw")
    unlimited = plan(replace(made, leakage=lambda _sent: leak(10.0)))
    for candidate in unlimited.candidates:
        is_upload = candidate.kind == "upload"
        assert candidate.sends_input == is_upload
        assert candidate.plan.leakage_db == (10.0 if candidate.kind == "cut" else None)
        assert candidate.known_inputs == (800 if candidate.kind == "cut" else 0)
    refused = "Its leakage is at least 25.0 dB to an attacker who knows 800 inputs; the limit is 20 dB."
    assert any(one.reason == refused for one in result.refusals)


def leak(*bounds_db: float) -> Leakage:
    """What an attacker found who knew 800 inputs."""
    return Leakage(lower_bound_db=max(bounds_db), mean_db=5.0, known_samples=800, held_out_samples=200)


def plan_with_leaks(
    inputs: PlanInputs, leaks_db: dict[str, float], *, others_db: float = 10.0
) -> PlanningResult:
    """Return the plan with a limit of 20 dB, where tensors leak as stated."""

    def attack(sent: Sequence[SentTensor]) -> Leakage:
        return leak(*(leaks_db.get(one.name, others_db) for one in sent))

    return plan(replace(inputs, leakage=attack, most_leakage_db=20.0))


@functools.cache
def tiny_with_leakage() -> PlanInputs:
    """A real classifier whose latency is best at `max_pool2d` (21.5 dB); what comes later leaks 18.4 dB."""
    content = (TINY / "digits_cnn.onnx").read_bytes()
    images = np.load(TINY / "digits_cnn.eval.npz")["image"].astype(np.float32)
    feeds = [{"image": one[np.newaxis]} for one in images]
    device_s = [1e-4] * 5 + [0.5, 1e-4, 1e-4, 0.5]
    made = inputs_of(content, device_s, [1e-5] * 9, feeds[:8])
    attack = leakage_of(OpenedModel(content), feeds)
    leakages = functools.cache(attack)
    return replace(made, leakage=lambda sent: leakages(tuple(sent)))


def test_limit_on_leakage_that_the_fastest_cut_breaks_finds_a_deeper_one() -> None:
    inputs = tiny_with_leakage()
    free = plan(inputs)
    fastest = min(
        (candidate for candidate in free.candidates if candidate.kind == "cut"),
        key=lambda candidate: candidate.latency_ms[0][-1],
    )
    assert (fastest.plan.leakage_db or 0.0) > 20
    result = plan(replace(inputs, most_leakage_db=20.0))
    cuts = [candidate for candidate in result.candidates if candidate.kind == "cut"]
    assert cuts
    assert {candidate.name for candidate in cuts} & {one.name for one in result.table.plans}
    for candidate in cuts:
        assert candidate.plan.leakage_db is not None
        assert candidate.plan.leakage_db <= 20
        assert candidate.kernels_on_device > fastest.kernels_on_device
        assert candidate.certificate is not None
        assert candidate.certificate.has_pins
    assert {candidate.kind for candidate in result.candidates} == {"local", "cut"}
    over = [one for one in result.refusals if "the limit is 20 dB" in one.reason]
    assert over
    attacked = len(over) + len(cuts)
    text = f"{attacked} cuts were attacked: {len(cuts)} keep --max-leak 20 dB, {len(over)} refused."
    assert text in result.sentences
    names = [one.name for one in (*over, *(candidate.plan for candidate in cuts))]
    assert len(set(names)) == len(names)


def test_limit_on_leakage_that_no_cut_keeps_names_the_least_that_was_seen() -> None:
    result = plan(replace(tiny_with_leakage(), most_leakage_db=10.0))
    assert {candidate.kind for candidate in result.candidates} == {"local"}
    (text,) = (one for one in result.sentences if "--max-leak" in one)
    seen = [float(one.reason.split()[5]) for one in result.refusals if "the limit is 10 dB" in one.reason]
    assert text == (
        f"No cut keeps --max-leak 10 dB: {len(seen)} cuts were attacked and refused, and the least that one"
        f" of them leaks is at least {min(seen):.1f} dB to an attacker who knows 288 inputs."
    )
    assert min(seen) < 19  # the last cuts were tried too


def test_tensor_that_leaks_is_no_reason_to_keep_the_one_beside_it() -> None:
    # Two heads, a and b; the cut {a, b} leaks by a alone, so b may go where a's head stays.
    nodes = [
        ("MatMul", ["x", "w"], ["a"]), ("Relu", ["a"], ["p"]),
        ("Tanh", ["x"], ["u"]), ("MatMul", ["u", "w"], ["b"]), ("Relu", ["b"], ["q"]),
    ]  # fmt: skip
    content = model_of(nodes, {"x": (1, 640)}, ["p", "q"], weights={"w": np.eye(640, 8, dtype=np.float32)})
    feeds = [{"x": np.random.default_rng(n).normal(size=(1, 640)).astype(np.float32)} for n in range(4)]
    made = inputs_of(content, [1e-4, 1.0, 1e-4, 1e-4, 1.0], [1e-5] * 5, feeds)
    result = plan_with_leaks(made, {"a": 30.0, "u": 30.0, "b": 5.0}, others_db=1.0)
    assert {
        tuple(one.name for one in candidate.sent)
        for candidate in result.candidates
        if candidate.kind == "cut"
    } == {("b",)}
    assert "leak too much left out" in describe_certificate(result.best(100.0, 20.0).certificate)  # type: ignore[arg-type]


@pytest.mark.parametrize("tiers", [2, 3])
def test_limit_on_leakage_holds_for_placements_on_three_tiers(tiers: int) -> None:
    content = narrowing_model(16, 64)
    made = inputs_of(content, [0.005, 0.05, 0.5], [0.001, 0.002, 0.002], noise(16, 64))
    if tiers == 3:
        edge = profile_of(content, [0.002, 0.04, 0.1], "edge")
        made = replace(made, edge=edge, edge_link=LinkState(50e6, 50e6, 0.001))
    result = plan_with_leaks(made, {"t0": 60.0, "t1": 25.0})
    assert {one.name for candidate in result.candidates for one in candidate.sent} == {"t2"}
    assert {one.name for tier in result.tiers for one in tier.sent[0]} <= {"t2"}
    assert bool(result.tiers) == (tiers == 3)


def test_energy_prefers_to_send_where_the_radio_is_cheap() -> None:
    content = narrowing_model(16, 64)
    made = inputs_of(content, [0.005, 0.5, 0.5], [0.001, 0.002, 0.002], noise(16, 64))
    cheap = plan(replace(made, objective="energy", power=PowerModel(5.0, 0.1)))
    dear = plan(replace(made, objective="energy", power=PowerModel(0.1, 50.0)))
    assert cheap.unit == "mJ"
    assert best_at(cheap, 10.0) != "local"
    assert best_at(dear, 10.0) == "local"
    with pytest.raises(CutError, match="power of the device"):
        plan(replace(made, objective="energy"))


def test_plan_for_capacity_is_the_one_of_which_a_server_carries_most_devices() -> None:
    content = narrowing_model(16, 64)
    made = inputs_of(content, [0.005, 0.1, 0.1], [0.01, 0.02, 0.02], noise(16, 64))
    result = plan(replace(made, objective="capacity", latency_limit_s=0.15, grid=NEAR))
    served = {
        candidate.name: candidate.devices_per_server
        for candidate in result.candidates
        if candidate.devices_per_server is not None
    }
    assert len(served) == len(result.candidates) - 1  # all but `local`, which is too slow
    middle = result.best(10.0, 5.0).name
    assert served[middle] == max(served.values())
    assert 5 < served[middle] < 1 / 0.02
    assert not any("e+" in one for one in result.sentences)
    assert result.table.latency_limit_s == 0.15


def test_devices_are_counted_before_server_time_where_the_limit_is_tight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = narrowing_model(16, 64)
    made = inputs_of(content, [0.005, 0.5, 0.5], [0.001, 0.002, 0.002], noise(16, 64))
    lean, quick = PlanCosts(0.094, 0.0005, 100.0, 100.0), PlanCosts(0.04, 0.0008, 100.0, 100.0)

    def realise(uploads: Any, cuts: Any) -> dict[str, ExtractedPlan | Refusal]:
        """One candidate that takes least of the server with no time to wait, one that takes a little more."""
        names = [one.plan.name for one in (*uploads, *cuts)]
        found: dict[str, ExtractedPlan | Refusal] = {one: Refusal(one, "no.") for one in names[2:]}
        for name, costs in zip(names, (lean, quick), strict=False):
            found[name] = ExtractedPlan(OffloadPlan(name, costs, tail="t"), "measured")
        return found

    result = plan(replace(made, objective="capacity", latency_limit_s=0.1, measure=realise, grid=NEAR))
    counts = {
        candidate.plan.costs.server_s: candidate.devices_per_server
        for candidate in result.candidates
        if candidate.kind != "local"
    }
    assert counts[0.0005] < 0.3 * counts[0.0008]
    assert counts[0.0008] == pytest.approx(1090, rel=0.05)  # of 1,250 that saturate the server
    assert result.best(10.0, 5.0).plan.costs.server_s == 0.0008
    link = Conditions(LinkState(10e6, 10e6, 0.005))
    assert choose(result.table, link).plan.costs.server_s == 0.0008


def test_device_chooses_what_the_plan_for_an_objective_chose() -> None:
    content = narrowing_model(16, 64)
    made = inputs_of(content, [0.005, 0.1, 0.1], [0.01, 0.02, 0.02], noise(16, 64))
    made = replace(made, max_loss=1.0)  # with int8 and 4-bit cuts, so that there is a choice
    power = PowerModel(0.5, 1.0)
    objectives: tuple[str, ...] = ("latency", "energy", "throughput", "capacity")
    chosen: set[tuple[str, str]] = set()
    for objective in objectives:
        result = plan(replace(made, objective=objective, power=power, latency_limit_s=0.15))
        for mbit_s in GRID.bandwidths_mbit_s:
            row, column = GRID.rtts_ms.index(20.0), GRID.bandwidths_mbit_s.index(mbit_s)
            least = min(candidate.score[row][column] for candidate in result.candidates)
            found = choose(result.table, Conditions(LinkState(mbit_s * 1e6, mbit_s * 1e6, 0.02)))
            own = next(candidate for candidate in result.candidates if candidate.name == found.plan.name)
            assert own.score[row][column] <= least * 1.011, (objective, mbit_s)
            chosen.add((objective, found.plan.name))
    assert len({name for _, name in chosen}) > 2


def test_energy_of_the_device_is_in_the_table() -> None:
    content = narrowing_model(16, 64)
    made = inputs_of(content, [0.005, 0.5, 0.5], [0.001, 0.002, 0.002], noise(16, 64))
    table = plan(replace(made, objective="energy", power=PowerModel(4.0, 0.7))).table
    assert table.radio_w == 0.7
    assert [one.costs.device_j for one in table.plans] == [4.0 * one.costs.device_s for one in table.plans]


def test_model_that_cannot_be_split_gets_whole_model_ways_and_the_reason() -> None:
    content = narrowing_model(3, 64)
    made = inputs_of(content, [0.1, 0.1, 0.1], [0.001] * 3, noise(3, 64))
    device = replace(made.device, kernels=(), obstacle="it has control flow ('If')")
    result = plan(replace(made, device=device))
    assert {candidate.kind for candidate in result.candidates} == {"local", "upload"}
    assert any(one.name == "cuts" and "control flow" in one.reason for one in result.refusals)


def test_profile_of_another_model_is_refused() -> None:
    content = narrowing_model(3, 64)
    made = inputs_of(content, [0.1, 0.1, 0.1], [0.001] * 3, noise(3, 64))
    with pytest.raises(CutError, match="sha256"):
        plan(replace(made, device=replace(made.device, model_sha256="00" * 32)))


def test_three_tiers_are_placed_with_their_proof() -> None:
    content = narrowing_model(16, 64)
    made = inputs_of(content, [0.005, 0.5, 0.5], [0.001, 0.002, 0.002], noise(16, 64))
    edge = profile_of(content, [0.002, 0.01, 0.01], "edge")
    result = plan(replace(made, edge=edge, edge_link=LinkState(50e6, 50e6, 0.03)))
    assert len(result.tiers) == len(GRID.links())
    assert all(sum(one.kernels) == 3 and len(one.sent) == 2 for one in result.tiers)
    assert all(one.certificate.proof == "enumerated" for one in result.tiers)
    assert from_plain(PlanningResult, to_plain(result)) == result


def test_refusal_of_a_way_that_cannot_be_extracted_takes_it_out() -> None:
    content = narrowing_model(16, 64)
    made = inputs_of(content, [0.005, 0.5, 0.5], [0.001, 0.002, 0.002], noise(16, 64))
    result = plan(
        replace(
            made, measure=lambda uploads, cuts: {one.plan.name: Refusal(one.plan.name, "no.") for one in cuts}
        )
    )
    assert all(candidate.kind != "cut" for candidate in result.candidates)
    assert any(one.reason == "no." for one in result.refusals)


@pytest.mark.parametrize("name", ["digits_cnn", "mnist5k_dscnn", "japanese_vowels_tcn", "italy_power_mlp"])
def test_real_model_stays_on_a_device_that_is_fast_enough(name: str) -> None:
    content = (TINY / f"{name}.onnx").read_bytes()
    nodes = len(onnx.load_from_string(content).graph.node)
    samples = np.load(TINY / f"{name}.calib.npz")
    given = onnx.load_from_string(content).graph.input[0].name
    feeds = [{given: samples[samples.files[0]][n : n + 1]} for n in range(4)]
    made = inputs_of(content, [1e-5] * nodes, [1e-6] * nodes, feeds)
    result = plan(made)
    assert {result.best(b, r).name for b in GRID.bandwidths_mbit_s for r in GRID.rtts_ms} == {"local"}
    assert "does not pay" in result.sentences[0]


def test_cuts_are_extracted_and_measured_as_they_are() -> None:
    content = narrowing_model(16, 64)
    feeds = noise(16, 64)
    machine = MACHINE_HERE
    made = inputs_of(content, [0.005, 0.5, 0.5], [0.001, 0.002, 0.002], feeds)
    measured = CutMeasurement(
        model=OpenedModel(content), feeds=feeds, device=machine, server=machine, seconds=MEASURED_S
    )
    result = plan(replace(made, measure=measured))
    cuts = [candidate for candidate in result.candidates if candidate.kind == "cut"]
    assert cuts
    assert {candidate.label for candidate in cuts} == {"measured"}
    assert set(measured.splits) == {"raw", *(candidate.name for candidate in cuts)}
    for candidate in cuts:
        assert candidate.plan.costs.is_measured
        split = measured.splits[candidate.name]
        assert split.head is not None
        assert {one.name for one in split.sent} <= {one.name for one in split.head.outputs}
        if candidate.name.endswith("raw"):
            assert candidate.plan.answers_changed == 0.0
            sent_bytes = sum(one.size_bytes or 0 for one in split.sent)
            assert candidate.plan.costs.upload_bytes <= sent_bytes + 600  # and what describes it


def test_split_that_answers_one_output_on_the_device_is_compared_output_by_output() -> None:
    proto = onnx.load_from_string(narrowing_model(16, 64))
    proto.graph.node[2].input[0] = "t1"  # two heads on what the first kernel makes
    proto.graph.output.insert(0, helper.make_tensor_value_info("t2", TensorProto.FLOAT, [1, 4, 8, 8]))
    content, feeds = proto.SerializeToString(), noise(16, 64)
    machine = MACHINE_HERE
    measured = CutMeasurement(
        model=OpenedModel(content),
        feeds=feeds,
        device=machine,
        server=machine,
        seconds=MEASURED_S,
        classes=("t2", "t3"),
    )
    made = inputs_of(content, [0.005, 0.0001, 0.5], [0.001, 0.002, 0.002], feeds)
    result = plan(replace(made, measure=measured))
    mixed = [
        candidate
        for candidate in result.candidates
        if candidate.name in measured.splits
        and [one.name for one in measured.splits[candidate.name].tail.outputs] == ["t3"]
    ]
    assert [candidate.plan.answers_changed for candidate in mixed if candidate.name.endswith("raw")] == [0.0]


def test_leakage_of_a_cut_is_measured() -> None:
    content = narrowing_model(16, 64)
    cut = leakage_of(OpenedModel(content), noise(16, 64, count=30))(
        [SentTensor(name="t1", coding="int8", raw_bytes=1.0, sent_bytes=1.0)]
    )
    assert cut is not None
    assert cut.lower_bound_db < 30.0  # noise of 65,536 values cannot be rebuilt from 256
    few = leakage_of(OpenedModel(content), noise(16, 64, count=60), limit_s=60.0)(
        [SentTensor(name="t1", coding="int8", raw_bytes=1.0, sent_bytes=1.0)]
    )
    assert few is not None
    assert 0 < few.lower_bound_db < 30.0
    assert (cut.known_samples, few.known_samples) == (24, 48)
    over = leakage_of(OpenedModel(content), noise(16, 64, count=40), limit_s=-1.0)
    assert over([SentTensor(name="t1", coding="int8", raw_bytes=1.0, sent_bytes=1.0)]) is None
    with pytest.raises(CutError, match="at least 20"):
        leakage_of(OpenedModel(content), noise(16, 64, count=3))(
            [SentTensor(name="t1", coding="int8", raw_bytes=1.0, sent_bytes=1.0)]
        )


def hidden_by_a_pattern(amplitude: float) -> PlanInputs:
    """A pattern that the tail cancels spreads the range, so that codes hide what decides."""
    rng = np.random.default_rng(7)
    pattern = rng.normal(size=4096)
    weights = rng.normal(size=(4096, 10)) / 64
    weights -= np.outer(pattern, pattern @ weights) / (pattern @ pattern)
    nodes = [("LeakyRelu", ["x"], ["m"]), ("MatMul", ["m", "w"], ["y"])]  # which leaves values as they are
    content = model_of(
        nodes, {"x": (1, 4096)}, ["y"], weights={"w": weights.astype(np.float32)},
        attributes={0: {"alpha": 1.0}},
    )  # fmt: skip
    x = amplitude * pattern + rng.normal(size=(128, 1, 4096))
    feeds = [{"x": one.astype(np.float32)} for one in x]
    machine = MACHINE_HERE
    return replace(
        inputs_of(content, [1e-5, 10.0], [1e-5, 1e-5], feeds),
        keep_on_device=("input",),
        limits=DeviceLimits(weights_bytes=50_000.0),
        measure=CutMeasurement(
            model=OpenedModel(content),
            feeds=feeds,
            device=machine,
            server=machine,
            seconds=MEASURED_S,
            classes="y",
        ),
    )


@functools.cache
def measured_once(amplitude: float) -> PlanInputs:
    """`hidden_by_a_pattern` whose uploads and cuts are measured once for plans of several limits."""
    inputs = hidden_by_a_pattern(amplitude)
    measure = inputs.measure
    assert measure is not None
    results: dict[tuple[str, ...], Mapping[str, ExtractedPlan | Refusal]] = {}

    def remember(
        uploads: Sequence[UploadCandidate], cuts: Sequence[CutCandidate]
    ) -> Mapping[str, ExtractedPlan | Refusal]:
        names = tuple(candidate.plan.name for candidate in (*uploads, *cuts))
        if names not in results:
            results[names] = measure(uploads, cuts)
        return results[names]

    return replace(inputs, measure=remember)


@pytest.mark.parametrize(
    ("amplitude", "max_loss", "offered"),
    [
        (0.0, MAX_LOSS, {"int8"}),
        (0.0, 0.05, {"int8", "int4"}),
        (25.0, MAX_LOSS, set()),
        (25.0, 1.0, {"int8", "int4"}),
    ],
)
def test_cut_that_loses_more_accuracy_than_allowed_is_shown_and_not_offered(
    amplitude: float, max_loss: float, offered: set[str]
) -> None:
    result = plan(replace(measured_once(amplitude), max_loss=max_loss))
    lossy = {
        candidate.name.rpartition("-")[2]: candidate
        for candidate in result.candidates
        if candidate.name.endswith(("int8", "int4"))
    }
    assert set(lossy) == {"int8", "int4"}
    assert {kind for kind, candidate in lossy.items() if not candidate.is_over_loss} == offered
    for kind, candidate in lossy.items():
        assert candidate.expected_loss is not None
        assert candidate.is_over_loss == (candidate.expected_loss + candidate.loss_error > max_loss)
        if kind not in offered:
            assert candidate.name not in {one.name for one in result.table.plans}
            assert not candidate.wins
            admitted = float(candidate.explanation.partition("--max-loss ")[2].partition("%")[0]) / 100
            assert 0 <= admitted - candidate.expected_loss - candidate.loss_error <= 2e-4
            if kind == "int4":  # which sends least, so it would be the best
                assert any(candidate.name in one and "--max-loss" in one for one in result.sentences)
    assert {one.plan.name for one in map(result.best, GRID.bandwidths_mbit_s, [20.0] * 4)} <= {
        one.name for one in result.table.plans
    }


@pytest.mark.parametrize(("samples", "offered"), [(15, set()), (16, {"int8"}), (99, {"int8"})])
def test_lossy_cut_is_not_offered_on_few_samples_and_says_how_many_would_do(
    samples: int, offered: set[str]
) -> None:
    inputs = hidden_by_a_pattern(0.0)
    assert isinstance(inputs.measure, CutMeasurement)
    few = inputs.feeds[:samples]
    result = plan(replace(inputs, feeds=few, measure=replace(inputs.measure, feeds=few), max_loss=0.05))
    lossy = {
        candidate.name.rpartition("-")[2]: candidate
        for candidate in result.candidates
        if candidate.name.endswith(("int8", "int4"))
    }
    assert {kind for kind, candidate in lossy.items() if not candidate.is_over_loss} == offered
    for kind, candidate in lossy.items():
        needed = 0 if kind in offered else 16 if kind == "int8" else 100
        assert candidate.samples_needed == needed
        assert candidate.expected_loss is not None
        if needed:
            assert f"at least {needed} samples" in candidate.explanation
            assert candidate.plan.name not in {one.name for one in result.table.plans}
            (warning,) = (one for one in result.warnings if candidate.name in one)
            assert f"at least {needed} samples, there are {samples}" in warning


def test_golden_and_made_up_inputs_are_no_evidence_of_what_a_coding_changes() -> None:
    inputs = hidden_by_a_pattern(0.0)
    assert isinstance(inputs.measure, CutMeasurement)
    few = inputs.feeds[:8]
    measure = replace(inputs.measure, feeds=few)
    result = plan(replace(inputs, feeds=few, measure=measure, has_samples=False, max_loss=0.5))
    for candidate in result.candidates:
        assert candidate.expected_loss is None
        assert candidate.plan.answers_changed is None
        assert candidate.is_over_loss == candidate.name.endswith(("int8", "int4"))
    assert any("golden and made-up inputs are no evidence" in one for one in result.warnings)


@pytest.mark.parametrize(("error", "is_offered"), [(5e-5, True), (2e-4, False)])
def test_loss_is_held_against_the_limit_with_its_standard_error(error: float, *, is_offered: bool) -> None:
    cuts = plan_cuts(AnswerChange(0.01, 0.9 * MAX_LOSS, error), 100, MAX_LOSS)
    assert {candidate.is_over_loss for candidate in cuts} == {not is_offered}
    assert all(
        f"0.09 ± {100 * error:.2g} %" in candidate.explanation for candidate in cuts if candidate.is_over_loss
    )


def test_lossy_cut_is_offered_on_few_samples_where_all_is_admitted() -> None:
    assert {candidate.is_over_loss for candidate in plan_cuts(AnswerChange(0.5, 0.5, 0.1), 3, 1.0)} == {False}
    assert {candidate.is_over_loss for candidate in plan_cuts(AnswerChange(0.0, 0.0), 3, 0.99)} == {
        False,
        True,
    }


def plan_cuts(change: AnswerChange, samples: int, max_loss: float) -> list[Candidate]:
    """Return the cuts of a plan in which each of them changes the answers so."""
    content = narrowing_model(3, 64)
    made = inputs_of(content, [0.005, 0.5, 0.5], [0.001, 0.002, 0.002], noise(3, 64, samples))

    def measure(_uploads: object, cuts: Sequence[CutCandidate]) -> dict[str, ExtractedPlan | Refusal]:
        return {one.plan.name: ExtractedPlan(one.plan, "measured", change) for one in cuts}

    cuts = [
        candidate
        for candidate in plan(replace(made, measure=measure, max_loss=max_loss)).candidates
        if candidate.kind == "cut"
    ]
    assert {candidate.name.rpartition("-")[2] for candidate in cuts} == {"raw", "int8", "int4"}
    return cuts


@pytest.mark.parametrize("max_loss", [0.0, 0.99, 1.0])
def test_rounded_ways_of_what_is_no_classifier_are_offered_on_request_only(max_loss: float) -> None:
    content, feeds, machine = narrowing_model(16, 64), noise(16, 64), MACHINE_HERE
    measured = CutMeasurement(
        model=OpenedModel(content), feeds=feeds, device=machine, server=machine, seconds=MEASURED_S
    )
    made = inputs_of(content, [0.005, 0.5, 0.5], [0.001, 0.002, 0.002], feeds)
    result = plan(replace(made, measure=measured, max_loss=max_loss))
    (warning,) = (one for one in result.warnings if "unknown" in one)
    assert ("not offered" in warning) == (max_loss < 1)
    lossy = [
        candidate for candidate in result.candidates if candidate.name.endswith(("int8", "int4", "delta"))
    ]
    assert lossy
    for candidate in result.candidates:
        assert (candidate.name in warning) == (candidate in lossy)
        assert candidate.is_over_loss == (candidate in lossy and max_loss < 1)
        assert candidate.plan.answers_changed is None or candidate not in lossy
        if candidate.is_over_loss:
            assert "--classes; --max-loss 100% admits it" in candidate.explanation
            assert candidate.name not in {one.name for one in result.table.plans}


@pytest.mark.parametrize(("step", "what"), [(0.125, ""), (0.0, "not exact: rounded to steps of")])
def test_series_that_is_rounded_is_named_so(step: float, what: str) -> None:
    content = model_of([("Abs", ["x"], ["y"])], {"x": (1, 3, 64)}, ["y"])
    series = np.random.default_rng(6).normal(size=(20, 1, 3, 64)).cumsum(3)
    values = np.rint(series / step) * step if step else series
    feeds = [{"x": one.astype(np.float32)} for one in values]
    result = plan(inputs_of(content, [1.0], [0.001], feeds))
    (candidate,) = (one for one in result.candidates if one.name == "delta")
    assert candidate.sent[0].rounding.startswith(what)
    assert bool(candidate.sent[0].rounding) == ("not exact" in candidate.explanation) == bool(what)


def test_sound_of_16_bits_without_a_batch_axis_is_run_and_measured_as_opus() -> None:
    pytest.importorskip("soundfile", reason="soundfile is not installed")
    content = model_of(
        [("Cast", ["x"], ["y"])], {"x": (8000,)}, ["y"],
        attributes={0: {"to": TensorProto.FLOAT}}, dtypes={"x": "int16"},
    )  # fmt: skip
    t = np.arange(8000) / 8000
    tones = [np.rint(9000 * np.sin(2 * np.pi * (200 + 10 * n) * t)).astype(np.int16) for n in range(4)]
    feeds = [{"x": one} for one in tones]
    machine = MACHINE_HERE
    measured = CutMeasurement(
        model=OpenedModel(content), feeds=feeds, device=machine, server=machine, seconds=MEASURED_S
    )
    made = inputs_of(content, [1.0], [0.001], feeds)
    result = plan(replace(made, measure=measured, sample_rate_hz=8000.0))
    candidates = {candidate.name: candidate for candidate in result.candidates}
    assert {name: candidates[name].label for name in ("raw", "delta", "opus:24")} == dict.fromkeys(
        ("raw", "delta", "opus:24"), "measured"
    )
    assert candidates["opus:24"].plan.media == {"x.samples": "opus:24@8000"}
    assert "at 8 kHz" in candidates["opus:24"].explanation
    assert candidates["delta"].plan.answers_changed == 0.0
    assert any(one.name == "jpeg" and "not compared" in one.reason for one in result.refusals)


def test_input_that_leaks_most_counts_and_all_samples_are_used() -> None:
    nodes = [("MatMul", ["a", "w"], ["m"]), ("Add", ["m", "b"], ["s"]), ("Abs", ["s"], ["y"])]
    weights = {"w": np.full((8, 8), 1e-3, np.float32)}
    content = model_of(nodes, {"a": (1, 8), "b": (1, 8)}, ["y"], weights=weights)
    rng = np.random.default_rng(3)
    feeds = [{name: rng.normal(size=(1, 8)).astype(np.float32) for name in "ab"} for _ in range(600)]
    only_first = [{"a": one["a"], "b": feeds[0]["b"]} for one in feeds]
    sent = [SentTensor(name="s", coding="raw", raw_bytes=32.0, sent_bytes=32.0)]
    first, both = (leakage_of(OpenedModel(content), one)(sent) for one in (only_first, feeds))
    assert first is not None
    assert both is not None
    # Of `a` a thousandth of its sum gets through, of `b` all.
    assert first.lower_bound_db < 25.0 < both.lower_bound_db


def test_tensors_too_large_for_the_attack_are_thinned_rather_than_its_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(4)
    weights = {"w": rng.normal(size=(48, 32)).astype(np.float32)}
    content = model_of([("MatMul", ["x", "w"], ["m"]), ("Tanh", ["m"], ["y"])], {"x": (1, 48)}, ["y"],
                       weights=weights)  # fmt: skip
    feeds = [{"x": rng.normal(size=(1, 48)).astype(np.float32)} for _ in range(1200)]
    sent = [SentTensor(name="m", coding="raw", raw_bytes=128.0, sent_bytes=128.0)]
    whole = leakage_of(OpenedModel(content), feeds)(sent)
    thinned = leakage_of(OpenedModel(content), feeds, max_bytes=100_000)(sent)
    assert whole is not None
    assert thinned is not None
    assert (whole.known_samples + whole.held_out_samples, whole.known_samples) == (1200, 960)
    assert (thinned.known_samples + thinned.held_out_samples, thinned.known_samples) == (1000, 800)
    assert thinned.mean_db < thinned.lower_bound_db < whole.lower_bound_db


def test_model_that_only_runs_whole_is_uploaded_and_measured_as_it_is() -> None:
    content, machine = branching_model(), MACHINE_HERE
    rng = np.random.default_rng(3)
    feeds = [{"x": rng.normal(size=(1, 2, 32)).astype(np.float32)} for _ in range(20)]
    measured = CutMeasurement(
        model=OpenedModel(content), feeds=feeds, device=machine, server=machine, seconds=MEASURED_S
    )
    made = inputs_of(content, [1.0] * 8, [0.1] * 8, feeds)
    result = plan(replace(made, measure=measured, limits=DeviceLimits(weights_bytes=1000.0)))
    assert {candidate.name: candidate.label for candidate in result.candidates} == {
        "raw": "measured",
        "delta": "measured",
    }
    assert set(measured.splits) == {"raw", "delta"}
    assert measured.splits["raw"].tail.reads_weights  # of the whole model's file
    assert len(measured.splits["raw"].tail.content) < len(content)
    assert any("control flow" in one.reason for one in result.refusals)


def series_on_steps() -> tuple[bytes, list[dict[str, np.ndarray]]]:
    """A model of a series, and samples whose codes are exact."""
    content = model_of([("Abs", ["x"], ["y"])], {"x": (1, 3, 640)}, ["y"])
    steps = np.random.default_rng(6).integers(-2, 3, size=(20, 1, 3, 640)).cumsum(3)
    return content, [{"x": one.astype(np.float32)} for one in steps]


@pytest.mark.parametrize("memory_bytes", [None, 10.0])
def test_table_always_has_a_way_for_inputs_beyond_the_samples(memory_bytes: float | None) -> None:
    content, feeds = series_on_steps()
    result = plan(
        replace(inputs_of(content, [100.0], [0.001], feeds), limits=DeviceLimits(memory_bytes=memory_bytes))
    )
    names = {one.name for one in result.table.plans}
    coded = {"uint8", "delta"}
    assert names & coded
    assert names - coded == ({"local", "raw"} if memory_bytes is None else {"raw"})
    (raw,) = (candidate for candidate in result.candidates if candidate.name == "raw")
    assert not raw.wins
    assert "beyond the values of the samples" in raw.explanation


@pytest.mark.parametrize(("device_s", "has_raw"), [(100.0, True), (2.0, True), (0.04, True), (0.001, False)])
def test_input_beyond_the_samples_is_not_slower_than_the_better_end(device_s: float, has_raw: bool) -> None:
    content, feeds = series_on_steps()
    result = plan(inputs_of(content, [device_s], [0.001], feeds))
    table, coded = result.table, {"uint8", "delta"}
    assert any(one.name in coded for one in table.plans) == has_raw
    assert any(one.name == "raw" for one in table.plans) == has_raw
    ends = [candidate.plan for candidate in result.candidates if candidate.name in ("local", "raw")]
    left = replace(table, plans=tuple(one for one in table.plans if one.name not in coded))
    for conditions in GRID.conditions():
        best_s = min(predict_s(one, conditions) for one in ends)
        assert choose(left, conditions).predicted_s <= max(1.05 * best_s, best_s + 2e-3)


def test_integers_need_no_other_way_since_all_values_have_codes() -> None:
    content = model_of(
        [("Cast", ["x"], ["y"])], {"x": (1, 3, 640)}, ["y"],
        attributes={0: {"to": TensorProto.FLOAT}}, dtypes={"x": "int16"},
    )  # fmt: skip
    feeds = [{"x": one["x"].astype(np.int16)} for one in series_on_steps()[1]]
    slow = Grid((0.1,), (20.0,))  # the differences are the best everywhere
    result = plan(replace(inputs_of(content, [100.0], [0.001], feeds), grid=slow))
    assert {one.name for one in result.table.plans} == {"local", "delta"}
