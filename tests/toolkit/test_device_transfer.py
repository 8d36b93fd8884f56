import dataclasses
from typing import Any, get_args

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.toolkit.cases import cases

from edgekit_runtime.errors import BackendError, TargetError
from edgekit_runtime.offload.measurement.job_runner import make_inputs
from edgekit_runtime.sessions.ort_products import saturates
from edgekit_toolkit.costs.device_transfer import (
    FittedRatios,
    HostRun,
    KernelKind,
    KernelTime,
    ThreadSharing,
    fit_ratios,
    sum_kinds,
)
from edgekit_toolkit.evaluation.judge import TargetCosts, model_on_target
from edgekit_toolkit.measurement import device_profile
from edgekit_toolkit.measurement.calibration_networks import (
    digest_calibration_models,
    digest_calibration_networks,
    digest_networks,
    make_calibration_models,
    make_calibration_networks,
)
from edgekit_toolkit.measurement.host_run import HostRuns, measure_host_runs, read_kernels
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.models.ort_session import run_session, session_for
from edgekit_toolkit.samples.generated import generate_feeds
from edgekit_toolkit.targets.figures import Figure, Source
from edgekit_toolkit.targets.loader import load_target, read_target
from edgekit_toolkit.targets.spec import DeviceTimes, Target
from edgekit_toolkit.targets.writer import write_target

DEVICE = FittedRatios({"conv": 6.0, "int8-conv": 9.0, "other": 4.0}, 2e-10, (0.0,))


def make_runs(count: int, seed: int = 0) -> list[HostRun]:
    values = np.random.default_rng(seed)
    return [
        HostRun(
            [KernelTime(kind, float(values.uniform(1e-5, 1e-2))) for kind in DEVICE.ratios],
            float(values.uniform(0, 1e8)),
        )
        for _ in range(count)
    ]


def test_exact_times_give_back_the_ratios_and_the_time_of_spilled_bytes() -> None:
    runs = make_runs(20)
    fitted = fit_ratios(runs, [DEVICE.predict_s(run) for run in runs])
    # The pulls are never 0.
    assert fitted.ratios == pytest.approx(DEVICE.ratios, rel=0.02)
    assert fitted.s_per_spilled_byte == pytest.approx(2e-10, rel=0.02)
    assert fitted.uncertainty == 1.05


def test_noisy_times_state_the_error_of_networks_that_were_left_out() -> None:
    runs, values = make_runs(20), np.random.default_rng(1)
    there = [DEVICE.predict_s(run) * float(values.uniform(0.8, 1.25)) for run in runs]
    fitted = fit_ratios(runs, there)
    assert 1.15 < fitted.uncertainty < 1.4
    errors = [fitted.predict_s(run) / DEVICE.predict_s(run) for run in make_runs(50, seed=2)]
    assert max(max(one, 1 / one) for one in errors) < fitted.uncertainty


def test_a_kind_that_no_network_shows_counts_with_the_largest_ratio() -> None:
    fitted = FittedRatios({"conv": 3.0, "other": 5.0}, 0.0, (0.0,))
    assert fitted.predict_s(HostRun([KernelTime("recurrent", 1.0)])) == 5.0


def test_kinds_that_cannot_be_told_apart_keep_a_common_ratio() -> None:
    times = (1e-3, 2e-3, 5e-3, 9e-3)
    runs = [HostRun([KernelTime("conv", each), KernelTime("matmul", each)]) for each in times]
    fitted = fit_ratios(runs, [8 * run.whole_s for run in runs])
    assert fitted.ratios == pytest.approx({"conv": 8.0, "matmul": 8.0})
    assert fitted.s_per_spilled_byte == 0


def make_threaded_runs(seed: int) -> list[HostRun]:
    """Return networks of many short kernels and of few long ones."""
    values = np.random.default_rng(seed)
    return [
        HostRun(
            [
                KernelTime(kind, float(np.exp(values.uniform(np.log(1e-6), np.log(1e-3)))), count)
                for kind in DEVICE.ratios
                for count in (1, 5)
            ]
        )
        for _ in range(30)
    ]


def test_threads_that_help_with_long_kernels_are_found() -> None:
    device = FittedRatios(DEVICE.ratios, 0.0, (0.0,), ThreadSharing(40e-6, 0.3))
    runs = make_threaded_runs(0)
    fitted = fit_ratios(runs, [device.predict_s(run) for run in runs])
    assert fitted.sharing == device.sharing
    assert fitted.ratios == pytest.approx(device.ratios, rel=0.02)
    for run in make_threaded_runs(1):
        assert fitted.predict_s(run) == pytest.approx(device.predict_s(run), rel=0.02)


def test_threads_take_no_part_in_what_the_engine_does_beside_kernels_and_in_recurrent_ones() -> None:
    fitted = FittedRatios({"conv": 1.0, "call": 1.0, "recurrent": 1.0}, 0.0, (0.0,), ThreadSharing(1e-5, 0.2))
    times = {kind: fitted.predict_s(HostRun([KernelTime(kind, 1.0)])) for kind in fitted.ratios}
    assert times == {"conv": pytest.approx(0.2, rel=1e-3), "call": 1.0, "recurrent": 1.0}


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_device_of_one_thread_has_no_threads_that_help(noise: float) -> None:
    for seed in range(8):
        runs, values = make_threaded_runs(seed), np.random.default_rng(seed)
        there = [DEVICE.predict_s(run) * float(values.uniform(1 - noise, 1 + noise)) for run in runs]
        assert fit_ratios(runs, there).sharing.share == 1


def test_engine_that_takes_one_thread_is_asked_for_none_that_help() -> None:
    device = FittedRatios(DEVICE.ratios, 0.0, (0.0,), ThreadSharing(40e-6, 0.3))
    runs = make_threaded_runs(0)
    there = [device.predict_s(run) for run in runs]
    assert fit_ratios(runs, there, may_share=False).sharing.share == 1


def test_spilled_bytes_never_make_a_device_faster() -> None:
    runs = make_runs(20)
    quick = FittedRatios(DEVICE.ratios, -2e-11, (0.0,))
    assert fit_ratios(runs, [quick.predict_s(run) for run in runs]).s_per_spilled_byte == 0


@cases("there", [[1.0, 2.0], [1.0, 2.0, 0.0], [1.0, 2.0, float("nan")], [1.0, 2.0, 3.0, 4.0]])
def test_times_that_cannot_be_fitted_are_refused(there: list[float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        fit_ratios(make_runs(min(len(there), 3)), there)


def test_calibration_networks_cover_every_kind_and_run() -> None:
    networks = make_calibration_networks()
    for network in networks.values():
        onnx.checker.check_model(network, full_check=True)
        session = session_for(network, threads=1)
        assert all(np.isfinite(output).all() for output in run_session(session, make_inputs(session)))
    runs = measure_host_runs((), "ort", 0).networks
    assert set(runs) == set(networks)
    assert all(run.whole_s > 0 for run in runs.values())
    call_shares = {name: sum_kinds(run)["call"] / run.whole_s for name, run in runs.items()}
    assert call_shares["call"] == 1
    assert call_shares["conv-large"] < 0.1  # four large convolutions beside microseconds
    # Without VNNI the engine runs these two in float, so that their sums are exact.
    in_float = {"int8-depthwise", "int8-matmul"} if saturates() else set()
    kinds = {kernel.kind for run in runs.values() for kernel in run.kernels}
    assert kinds == set(get_args(KernelKind)) - in_float


def test_bytes_beyond_the_caches_of_a_small_board_are_counted_in_each_kernel() -> None:
    runs = measure_host_runs((), "ort", 0).networks
    # Each kernel reads and writes maps of 32 x 64 x 64 values, 512 KiB, once or twice: one or two maps of
    # three are beyond the caches. Four kernels in each of two blocks.
    map_bytes = 32 * 64 * 64 * 4
    assert runs["maps"].spilled_bytes == 2 * (1 + 2 + 1 + 2) * map_bytes
    assert runs["dense-small"].spilled_bytes == 0


def event(us: int, *, read: int = 0, weights: int = 0, written: int = 0) -> dict[str, Any]:
    sizes = {"activation_size": str(read), "parameter_size": str(weights), "output_size": str(written)}
    return {"dur": us, "args": sizes}


def test_kernel_that_lost_the_processor_once_keeps_its_share() -> None:
    events = {
        ("a", "Conv"): [event(90), event(10), event(10), event(4000)],
        ("b", "Softmax"): [event(90), event(10), event(10), event(10)],
    }
    kernels, _ = read_kernels(events, (), 2, 4)
    assert kernels == [
        KernelTime("conv", pytest.approx(10.5e-6)),
        KernelTime("other", pytest.approx(10.5e-6)),
    ]


def test_kernel_as_short_as_one_that_does_nothing_is_a_part_of_the_engine() -> None:
    events = {("a", "Conv"): [event(2)] * 4, ("b", "Conv"): [event(3)] * 4}
    kernels, _ = read_kernels(events, (), 2, 4)
    assert [kernel.kind for kernel in kernels] == ["call", "conv"]


def test_body_of_a_loop_counts_once_and_as_often_as_it_runs() -> None:
    events = {
        ("loop", "Loop"): [event(60)] * 2,
        ("body", "MatMul"): [event(10)] * 10,
        ("after", "Conv"): [event(20)] * 2,
    }
    kernels, _ = read_kernels(events, {"after"}, 2, 2)
    body = KernelTime("matmul", pytest.approx(10.5e-6), 5)
    assert kernels == [body, KernelTime("depthwise", pytest.approx(20.5e-6))]


def test_views_and_tables_count_no_bytes_that_no_kernel_touches() -> None:
    mib, kept = 1 << 20, 512 << 10
    of = {
        "Conv": event(10, read=mib, weights=mib, written=mib),
        "Reshape": event(10, read=mib, written=mib),
        "Gather": event(10, read=100, weights=30 * mib, written=mib),
    }
    counted = {op: read_kernels({(op, op): [each, each]}, (), 2, 2)[1] for op, each in of.items()}
    assert counted == {"Conv": 3 * mib - kept, "Reshape": 0, "Gather": 2 * mib - kept}


def test_networks_of_litert_cover_every_kind_that_it_has() -> None:
    runs = measure_host_runs((), "litert", 0).networks
    assert set(runs) == set(make_calibration_networks())
    assert all(run.whole_s > 0 for run in runs.values())
    kinds = {kernel.kind for run in runs.values() for kernel in run.kernels}
    assert kinds == set(get_args(KernelKind)) - {"recurrent"}  # the converter writes the steps of an LSTM out


def test_calibration_networks_are_always_the_same() -> None:
    first, second = make_calibration_networks(), make_calibration_networks()
    assert [net.SerializeToString(deterministic=True) for net in first.values()] == [
        net.SerializeToString(deterministic=True) for net in second.values()
    ]


def test_digest_of_networks_covers_weights_but_not_inferred_shapes() -> None:
    digest, networks = digest_calibration_networks(), make_calibration_networks()
    networks["dense"].graph.value_info.clear()
    networks["dense"].graph.output[0].type.Clear()
    assert digest_networks(networks) == digest

    networks["dense"].graph.initializer[0].raw_data = bytes(512 * 512 * 4)
    assert digest_networks(networks) != digest


def test_a_model_that_onnxruntime_refuses_is_a_clear_error() -> None:
    graph = helper.make_graph(
        [helper.make_node("NoSuchOperator", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
    )
    with pytest.raises(BackendError, match="cannot run the model"):
        measure_host_runs([(OnnxModel(helper.make_model(graph)), {"x": np.zeros(1, np.float32)})], "ort", 0)


def make_profiled(base: str = "rpi5", networks: str | None = None) -> Target:
    target = load_target(base)
    second = Figure(1.0, "s", "measured", "profile")
    times = DeviceTimes(
        'a "quoted" \\ board\n',
        "onnxruntime 1" if base == "rpi5" else "ai-edge-litert 2",
        digest_calibration_models("ort" if base == "rpi5" else "litert") if networks is None else networks,
        dict.fromkeys(make_calibration_networks(), second),
    )
    source = Source("profile", "a profile", "2026-11-23", derivation="a test")
    return dataclasses.replace(
        target, name=f"{base}-profiled", device_times=times, sources=(*target.sources, source)
    )


def predict(target: Target, engine: str = "ort") -> TargetCosts:
    model = make_calibration_models(engine)["conv-small-int8"]
    (feeds,) = generate_feeds(model.specs()[0], 1, 0)
    (found,) = model_on_target([model], target, {}, feeds)
    return found


@pytest.mark.parametrize(("base", "engine"), [("rpi5", "ort"), ("android-arm64", "litert")])
def test_times_of_a_device_predict_latency_on_it(base: str, engine: str) -> None:
    found = predict(make_profiled(base), engine)
    assert (found.source, found.latency_label) == ("a profile, 2026-11-23", "calibrated")


def test_prediction_is_the_fit_of_the_networks_applied_to_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    networks = make_calibration_models("ort")
    runs = dict(zip(networks, make_runs(len(networks)), strict=True))
    small, large = make_runs(2, seed=5)
    here = HostRuns(runs, [large, small])
    monkeypatch.setattr(device_profile, "measure_host_runs", lambda *_: here)
    target = make_profiled()
    assert target.device_times is not None
    times = {name: Figure(DEVICE.predict_s(run), "s", "measured", "profile") for name, run in runs.items()}
    target = dataclasses.replace(target, device_times=dataclasses.replace(target.device_times, seconds=times))

    found = model_on_target([networks["dense"], networks["dense-small"]], target, {}, {})

    expected = [1e3 * DEVICE.predict_s(run) for run in (large, small)]
    assert [each.latency_ms for each in found] == pytest.approx(expected, rel=0.02)
    watts = target.power.mode(target.power.default_mode).active.value
    assert [each.energy_mj for each in found] == pytest.approx([watts * each for each in expected], rel=0.02)
    assert {each.uncertainty for each in found} == {1.05}


def test_model_of_another_engine_than_the_one_that_was_measured_is_modelled() -> None:
    assert predict(make_profiled(), "litert").source == "coefficients of rpi5-profiled"


@pytest.mark.parametrize("networks", ["", "other"])
def test_times_of_other_networks_are_not_used(networks: str) -> None:
    found, expected = predict(make_profiled(networks=networks)), predict(load_target("rpi5"))
    assert found == dataclasses.replace(expected, source="coefficients of rpi5-profiled")


def test_times_that_lack_a_network_are_not_used() -> None:
    profiled = make_profiled()
    assert profiled.device_times is not None
    few = dict(list(profiled.device_times.seconds.items())[1:])
    times = dataclasses.replace(profiled.device_times, seconds=few)
    found = predict(dataclasses.replace(profiled, device_times=times))
    assert found.source == "coefficients of rpi5-profiled"


def test_target_that_prefers_another_engine_than_the_one_that_was_measured_is_modelled() -> None:
    assert predict(make_profiled("jetson-orin-nano")).source == "coefficients of jetson-orin-nano-profiled"


def test_another_power_mode_drops_the_profile() -> None:
    profiled = make_profiled("jetson-orin-nano")
    default = profiled.power.default_mode
    other = next(mode.name for mode in profiled.power.modes if mode.name != default)
    assert profiled.in_mode(default).device_times is not None
    assert profiled.in_mode(other).device_times is None


@pytest.mark.parametrize("name", ["rpi5", "jetson-orin-nano", "x86-64"])
def test_a_written_target_reads_back_the_same(name: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    target = load_target(name)
    write_target(tmp_path / f"{name}.toml", target)
    assert read_target(tmp_path / f"{name}.toml") == target


def test_a_written_profile_reads_back_the_same(tmp_path) -> None:  # type: ignore[no-untyped-def]
    target = make_profiled()
    write_target(tmp_path / "rpi5-profiled.toml", target)
    assert read_target(tmp_path / "rpi5-profiled.toml") == target


@cases(
    ("seconds", "uncertainty", "message"),
    [
        ({}, 1.1, "one network at least"),
        ({"dense": Figure(0, "s", "measured", "profile")}, 1.1, "seconds.dense: expected 1e-07 to 10000"),
        ({"dense": Figure(1e-320, "s", "measured", "profile")}, 1.1, "expected 1e-07"),
        ({"dense": Figure(1e18, "s", "measured", "profile")}, 1.1, "expected 1e-07"),
        ({"dense": Figure(1, "1", "measured", "profile")}, 1.1, "unit"),
        ({"dense": Figure(1, "s", "measured", "profile")}, 0.9, "at least 1"),
    ],
)
def test_wrong_times_are_refused(seconds: dict[str, Figure], uncertainty: float, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        DeviceTimes(
            *("a board", "onnxruntime 1", "0a", seconds), Figure(uncertainty, "1", "measured", "profile")
        )
