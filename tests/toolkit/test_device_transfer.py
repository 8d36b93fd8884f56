import dataclasses
from typing import get_args

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edgekit_runtime.errors import BackendError, TargetError
from edgekit_runtime.remote.measurement.job_runner import make_inputs
from edgekit_runtime.sessions.ort_products import saturates
from edgekit_runtime.system.processor_speed import find_cpu
from edgekit_toolkit.costs.device_transfer import HostRun, fit_ratios, predict_latency_s
from edgekit_toolkit.evaluation.judge import model_on_target
from edgekit_toolkit.measurement.calibration_networks import (
    digest_calibration_networks,
    digest_networks,
    make_calibration_networks,
)
from edgekit_toolkit.measurement.host_run import engine_name, find_foreign_profile, measure_host_run
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.models.ort_session import run_session, session_for
from edgekit_toolkit.targets.figures import Figure, Source
from edgekit_toolkit.targets.loader import load_target, read_target
from edgekit_toolkit.targets.spec import KernelKind, Target, Transfer
from edgekit_toolkit.targets.writer import write_target

RATIOS = {"conv": 6.0, "int8-conv": 9.0, "other": 4.0}
WORK_S = 1e-4


def make_runs(count: int, seed: int = 0) -> list[HostRun]:
    values = np.random.default_rng(seed)
    return [HostRun({kind: float(values.uniform(1e-5, 1e-2)) for kind in RATIOS}) for _ in range(count)]


def test_exact_times_give_back_the_ratios() -> None:
    runs = make_runs(20)
    fitted = fit_ratios(runs, [predict_latency_s(run, RATIOS) for run in runs])
    # The pull towards one ratio is never 0.
    assert fitted.ratios == pytest.approx(RATIOS, rel=0.02)
    assert fitted.uncertainty == 1.05


def test_noisy_times_state_the_error_of_networks_that_were_left_out() -> None:
    runs, values = make_runs(20), np.random.default_rng(1)
    there = [predict_latency_s(run, RATIOS) * float(values.uniform(0.8, 1.25)) for run in runs]
    fitted = fit_ratios(runs, there)
    assert 1.15 < fitted.uncertainty < 1.4
    fresh = make_runs(50, seed=2)
    errors = [predict_latency_s(run, fitted.ratios) / predict_latency_s(run, RATIOS) for run in fresh]
    assert max(max(one, 1 / one) for one in errors) < fitted.uncertainty


def test_a_kind_that_no_network_shows_counts_with_the_largest_ratio() -> None:
    assert predict_latency_s(HostRun({"recurrent": 1.0}), {"conv": 3.0, "other": 5.0}) == 5.0


def test_kinds_that_cannot_be_told_apart_keep_a_common_ratio() -> None:
    runs = [HostRun({"conv": seconds, "matmul": seconds}) for seconds in (1e-3, 2e-3, 5e-3, 9e-3)]
    fitted = fit_ratios(runs, [8 * run.whole_s for run in runs])
    assert fitted.ratios == pytest.approx({"conv": 8.0, "matmul": 8.0})


@pytest.mark.parametrize(
    "there", [[1.0, 2.0], [1.0, 2.0, 0.0], [1.0, 2.0, float("nan")], [1.0, 2.0, 3.0, 4.0]]
)
def test_times_that_cannot_be_fitted_are_refused(there: list[float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        fit_ratios(make_runs(min(len(there), 3)), there)


@pytest.mark.int8_products
def test_calibration_networks_cover_every_kind_and_run() -> None:
    kinds, call_shares = set(), {}
    for name, network in make_calibration_networks().items():
        onnx.checker.check_model(network, full_check=True)
        session = session_for(network, threads=1)
        feeds = make_inputs(session)
        assert all(np.isfinite(output).all() for output in run_session(session, feeds))
        run = measure_host_run(network, feeds, work_s=WORK_S, seconds=0)
        assert run.whole_s > 0
        call_shares[name] = run.seconds["call"] / run.whole_s
        kinds |= set(run.seconds)
    assert call_shares["call"] > 0.5
    assert call_shares["conv-large"] < 0.1  # four large convolutions beside microseconds
    # Without VNNI the engine runs these two in float, so that their sums are exact.
    in_float = {"int8-depthwise", "int8-matmul"} if saturates() else set()
    assert kinds == set(get_args(KernelKind)) - in_float


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
        measure_host_run(helper.make_model(graph), {"x": np.zeros(1, np.float32)}, work_s=WORK_S)


def make_profiled(host: str, engine: str, networks: str | None = None) -> Target:
    target = load_target("rpi5")
    transfer = Transfer(
        host=host,
        engine=engine,
        work=Figure(WORK_S, "s", "measured", "profile"),
        ratios={"conv": Figure(1000.0, "1", "measured", "profile")},
        uncertainty=Figure(1.1, "1", "measured", "profile"),
        networks=digest_calibration_networks() if networks is None else networks,
    )
    source = Source("profile", "a profile", "2026-11-23", derivation="a test")
    return dataclasses.replace(
        target, name="rpi5-profiled", transfer=transfer, sources=(*target.sources, source)
    )


def predict(target: Target) -> tuple[float, float]:
    network = make_calibration_networks()["conv-small"]
    feeds = make_inputs(session_for(network, threads=1))
    found = model_on_target(OnnxModel(network), target, {}, feeds)
    assert found.latency_ms is not None
    return found.latency_ms, found.uncertainty


def test_a_profile_of_this_machine_predicts_latency() -> None:
    latency_ms, uncertainty = predict(make_profiled(find_cpu(), engine_name()))
    roofline_ms, _ = predict(load_target("rpi5"))
    assert uncertainty == 1.1
    assert latency_ms > 5 * roofline_ms  # the ratio of 1000 shows


def test_a_profile_of_another_host_or_engine_or_other_networks_is_not_used() -> None:
    expected = predict(load_target("rpi5"))
    assert predict(make_profiled("another processor", engine_name())) == expected
    assert predict(make_profiled(find_cpu(), "onnxruntime 0.1")) == expected
    for networks in ("", "other"):
        profiled = make_profiled(find_cpu(), engine_name(), networks)
        assert predict(profiled) == expected
        assert profiled.transfer is not None
        assert find_foreign_profile(profiled.transfer) == "with other networks"


def test_a_target_that_prefers_another_engine_has_no_use_for_a_profile() -> None:
    jetson = load_target("jetson-orin-nano")
    profiled = make_profiled(find_cpu(), engine_name())
    target = dataclasses.replace(
        jetson, transfer=profiled.transfer, sources=(*jetson.sources, profiled.sources[-1])
    )
    assert predict(target) == predict(jetson)


def test_another_power_mode_drops_the_profile() -> None:
    target = load_target("jetson-orin-nano")
    profiled = dataclasses.replace(
        target,
        transfer=make_profiled("a", "b").transfer,
        sources=(*target.sources, Source("profile", "a profile", "2026-11-23", derivation="a test")),
    )
    other = next(mode.name for mode in target.power.modes if mode.name != target.power.default_mode)
    assert profiled.in_mode(target.power.default_mode).transfer is not None
    assert profiled.in_mode(other).transfer is None


@pytest.mark.parametrize("name", ["rpi5", "jetson-orin-nano", "x86-64"])
def test_a_written_target_reads_back_the_same(name: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    target = load_target(name)
    write_target(tmp_path / f"{name}.toml", target)
    assert read_target(tmp_path / f"{name}.toml") == target


def test_a_written_profile_reads_back_the_same(tmp_path) -> None:  # type: ignore[no-untyped-def]
    target = make_profiled('a "quoted" \\ host\n', "onnxruntime 1")
    write_target(tmp_path / "rpi5-profiled.toml", target)
    assert read_target(tmp_path / "rpi5-profiled.toml") == target


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("ratios", {}, "at least one kind"),
        ("ratios", {"nonsense": Figure(1, "1", "measured", "profile")}, "nonsense"),
        ("ratios", {"conv": Figure(0, "1", "measured", "profile")}, "above 0"),
        ("uncertainty", Figure(0.5, "1", "measured", "profile"), "at least 1"),
        ("work", Figure(1, "1", "measured", "profile"), "unit"),
        ("times", {"dense": Figure(0, "s", "measured", "profile")}, "above 0"),
        ("times", {"dense": Figure(1, "1", "measured", "profile")}, "unit"),
    ],
)
def test_a_wrong_profile_is_refused(field: str, value: object, message: str) -> None:
    transfer = make_profiled("a", "b").transfer
    assert transfer is not None
    with pytest.raises(TargetError, match=message):
        dataclasses.replace(transfer, **{field: value})  # type: ignore[arg-type]
