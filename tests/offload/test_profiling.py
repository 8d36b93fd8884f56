"""Profiles of models: measured on this machine, joined for the planner."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from edgekit_offload.partition.split import split_model
from edgekit_offload.profiling.machine import (
    Machine,
    RunnableGraph,
    find_overhead,
    profile_kernels,
    time_batches,
    time_models,
)
from edgekit_offload.profiling.model_profile import ModelProfile, read_profile, write_profile
from edgekit_offload.profiling.planning_graph import join_profiles
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.measurement.machine_facts import describe_engine
from edgekit_runtime.offload.measurement.request_cost import is_precise
from edgekit_runtime.system import processor_speed
from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.measurement.calibration_networks import make_calibration_networks

MODELS = Path(__file__).resolve().parents[2] / "models" / "tiny"
LOCAL = Machine.parse("local")


@pytest.fixture(scope="module")
def content() -> bytes:
    return (MODELS / "mnist5k_dscnn.onnx").read_bytes()


@pytest.fixture(scope="module")
def profile(content: bytes) -> ModelProfile:
    return profile_kernels(LOCAL, RunnableGraph(content, {"threads": 1}), name="dscnn", seconds=0.2)


def test_real_model_has_kernels_that_sum_up_to_the_whole_run(profile: ModelProfile) -> None:
    assert len(profile.kernels) > 5
    assert sum(kernel.seconds for kernel in profile.kernels) == pytest.approx(profile.whole_s)


def test_profile_says_what_a_request_takes_beside_the_model(profile: ModelProfile) -> None:
    assert 0 < profile.request.fixed_s < 1
    assert profile.request.seconds(1e6) >= profile.request.fixed_s


def test_joined_graph_has_a_cut_behind_every_convolution(content: bytes, profile: ModelProfile) -> None:
    joined = join_profiles(content, [profile, profile])
    assert len(joined.graph.kernels) >= len(profile.kernels) - 1
    assert joined.seconds.sum(axis=0) == pytest.approx([profile.whole_s] * 2)
    nodes = sorted(number for group in joined.nodes for number in group)
    assert nodes == list(range(len(onnx.load_from_string(content).graph.node)))


def test_written_profile_is_read_unchanged(tmp_path: Path, profile: ModelProfile) -> None:
    write_profile(tmp_path / "one.profile.json", profile)
    assert read_profile(tmp_path / "one.profile.json") == profile


def test_profile_of_another_model_is_refused(content: bytes, profile: ModelProfile) -> None:
    other = (MODELS / "digits_cnn.onnx").read_bytes()
    with pytest.raises(CutError, match="of the model 'dscnn'"):
        join_profiles(other, [profile])


def test_tensor_that_one_machine_lacks_is_no_cut(content: bytes, profile: ModelProfile) -> None:
    joined = join_profiles(content, [profile, profile])
    lost = joined.graph.kernels[3].writes[0]
    kernels = tuple(
        replace(kernel, writes=("fused",)) if lost in kernel.writes else kernel for kernel in profile.kernels
    )
    fewer = join_profiles(content, [profile, replace(profile, kernels=kernels)])
    assert set(joined.graph.tensors) - set(fewer.graph.tensors) == {lost}
    assert fewer.seconds.sum(axis=0) == pytest.approx([profile.whole_s] * 2)


def test_graphs_with_weights_outside_are_timed_in_turn() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[2, 64] x) => (float[2, 64] y) { y = MatMul(x, w) }'
    )
    weight = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[64, 64], data_location=1)
    for key, value in (("location", "model.onnx"), ("offset", "16"), ("length", str(64 * 64 * 4))):
        weight.external_data.add(key=key, value=value)
    model.graph.initializer.append(weight)
    file = bytes(16) + np.eye(64, dtype=np.float32).tobytes()
    graph = RunnableGraph(
        model.SerializeToString(),
        weights={"model.onnx": file},
        inputs={"x": np.ones((2, 64), np.float32)},
    )
    first, second = time_models(LOCAL, [graph, graph], seconds=0.1)
    assert min(first.rounds, second.rounds) >= 5
    assert first.seconds > 0


def test_machine_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(CutError, match="expected 'local'"):
        Machine.parse("ssh:-oProxyCommand=true")


def test_quantized_model_is_cut_at_its_8_bit_tensors() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y)'
        " <float s = {0.02}, uint8 z = {0}>"
        " { xq = QuantizeLinear(x, s, z) xf = DequantizeLinear(xq, s, z) wf = DequantizeLinear(w, s, wz)"
        " a = Conv <pads = [1, 1, 1, 1]> (xf, wf) r = Relu(a) rq = QuantizeLinear(r, s, z)"
        " rf = DequantizeLinear(rq, s, z) b = Conv <pads = [1, 1, 1, 1]> (rf, wf)"
        " bq = QuantizeLinear(b, s, z) y = DequantizeLinear(bq, s, z) }"
    )
    for index, op in enumerate(("xq", "xf", "wf", "conv", "relu", "rq", "rf", "conv2", "bq", "y")):
        model.graph.node[index].name = f"node_{op}"
    weights = np.random.default_rng(0).integers(-50, 50, (4, 4, 3, 3)).astype(np.int8)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((), np.int8), "wz"))
    content = model.SerializeToString()
    profile = profile_kernels(LOCAL, RunnableGraph(content, {"threads": 1}), seconds=0.1)
    joined = join_profiles(content, [profile])
    assert "rq" in joined.graph.tensors
    assert not {"r", "rf", "a"} & set(joined.graph.tensors)
    assert joined.tensor_bytes["rq"] == 4 * 8 * 8


def test_split_over_an_8_bit_skip_sends_what_the_joined_graph_says() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (float[4] y)'
        " <float s = {0.5}, int8 z = {0}>"
        " { q = QuantizeLinear(x, s, z) f = DequantizeLinear(q, s, z) a = Sigmoid(f) y = Add(a, f) }"
    )
    split = split_model(model.SerializeToString(), {0, 1, 2})
    assert {spec.name: spec.dtype for spec in split.sent} == {"q": "int8", "a": "float32"}


@pytest.mark.parametrize(
    ("seconds", "whole_s", "overhead_s"),
    [
        ([1.0, 2.0, 3.0], 5.7, 0.1),
        ([0.05, 2.0, 3.0], 4.75, 0.05),  # no kernel took less than what profiling adds
        ([1.0, 2.0, 3.0], 6.6, 0.0),
        ([], 1.0, 0.0),
        ([0.0, 0.0], 1.0, 0.0),
    ],
)
def test_kernels_without_what_profiling_adds_sum_up_to_a_run(
    seconds: list[float], whole_s: float, overhead_s: float
) -> None:
    found_s, scale = find_overhead(seconds, whole_s)
    assert found_s == pytest.approx(overhead_s)
    if sum(seconds):
        assert sum((one - found_s) * scale for one in seconds) == pytest.approx(whole_s)


def test_only_the_usual_speed_of_a_processor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 2.0, 1.05, 1.1, 2.1] * 12 + [1.0, 1.1, 2.0, 1.1, 1.0])
    monkeypatch.setattr(processor_speed, "time_fixed_work", lambda: next(times))
    gate = processor_speed.SpeedGate()
    assert gate.usual_s == pytest.approx(1.05, abs=0.06)  # the most frequent one
    # Work counts between two looks at that speed.
    assert [gate.check() for _ in range(5)] == [False, True, False, False, True]


def test_speed_that_became_rare_is_replaced_by_the_most_frequent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter([2.0] * 60 + [1.0, 1.05] * 10)  # a neighbour was busy while the gate looked, and left
    monkeypatch.setattr(processor_speed, "time_fixed_work", lambda: next(speeds))
    gate = processor_speed.SpeedGate()
    followed = []
    for _ in range(20):
        gate.check()
        followed.append(gate.follow())
    assert followed == [False] * 19 + [True]  # by 20 checks
    assert gate.usual_s == pytest.approx(1.0, abs=0.06)
    assert not gate.follow()


def test_speeds_of_which_none_is_frequent_are_followed_once_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter([1.0] * 60 + [float(2 ** (number % 6)) for number in range(60)])
    monkeypatch.setattr(processor_speed, "time_fixed_work", lambda: next(speeds))
    gate = processor_speed.SpeedGate()
    followed = 0
    for _ in range(60):
        gate.check()
        followed += gate.follow()
    assert followed <= 1


@pytest.mark.parametrize(
    ("count", "spread", "expected"), [(19, 0.0, False), (20, 0.01, True), (20, 0.2, False)]
)
def test_times_are_precise_when_their_middle_is_known_within_a_percent(
    count: int, spread: float, expected: bool
) -> None:
    values = 1 + spread * np.linspace(-1, 1, count)
    assert is_precise(values.tolist()) is expected


def test_rounds_at_another_speed_do_not_keep_a_measurement_from_ending() -> None:
    machine = replace(LOCAL, usual_s=1e-9)  # faster than any processor
    graph = RunnableGraph((MODELS / "digits_cnn.onnx").read_bytes(), {"threads": 1})
    (timing,) = time_models(machine, [graph], seconds=0.1)
    assert timing.rounds >= 5
    assert timing.seconds > 0


def test_batches_time_each_graph() -> None:
    graph = RunnableGraph((MODELS / "digits_cnn.onnx").read_bytes())
    measured = time_batches(LOCAL, [graph, graph], seconds=0.1)
    assert all(timing.rounds >= 5 and timing.seconds > 0 for timing in measured.timings)


def test_batches_of_tflite_models_run_in_litert() -> None:
    networks, maker = make_calibration_networks(), find_support("litert").maker
    content = maker.convert_codes(networks["dense-small-int8"], networks["dense-small"]).content
    measured = time_batches(LOCAL, [RunnableGraph(content)], seconds=0.1, engine="litert")
    assert measured.machine.engine == describe_engine("litert")
    assert measured.timings[0].seconds > 0


def test_all_parts_count_at_one_speed_that_the_processor_has() -> None:
    machine = replace(LOCAL, usual_s=1e-9)
    graph = RunnableGraph((MODELS / "digits_cnn.onnx").read_bytes(), {"threads": 1})
    first, second = time_models(machine, [graph, graph], seconds=0.1)
    assert first.usual_s == second.usual_s
    assert first.usual_s is not None
    assert first.usual_s > 1e-6


def test_a_process_with_slices_begins_anywhere_in_one_and_any_other_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads = iter(np.arange(0, 1, 1e-5))
    monkeypatch.setattr(processor_speed.time, "thread_time", lambda: next(reads))
    draws, same, works = random.Random(1), random.Random(1), []

    for _ in range(20):
        began_s = next(reads)
        processor_speed.begin_anywhere(draws, 0.2)
        works.append(next(reads) - began_s)
    began_s = next(reads)
    processor_speed.begin_anywhere(draws, 1.0)

    assert next(reads) - began_s == pytest.approx(1e-5)
    assert works == pytest.approx([same.uniform(0, 0.5e-3) for _ in range(20)], abs=4e-5)
