from dataclasses import replace

import pytest
from tests.toolkit.cases import cases

from edgekit_runtime.errors import TargetError
from edgekit_toolkit.costs.target_model import NodeCost, kernel_latency_s, model_cost
from edgekit_toolkit.targets.loader import load_target
from edgekit_toolkit.targets.spec import Target


@pytest.fixture
def target() -> Target:
    """rpi5 with round coefficients: 10 G MAC/s fp32, 40 G int8, 1 GB/s, 1 ms a kernel, 2 W to 5 W."""
    base = load_target("rpi5")
    costs = base.costs
    costs = replace(
        costs,
        fp32=replace(costs.fp32, value=10e9),
        int8=replace(costs.int8, value=40e9),
        memory=replace(costs.memory, value=1e9),
        kernel_overhead=replace(costs.kernel_overhead, value=1e-3),
    )
    mode = base.power.modes[0]
    slow = replace(
        mode,
        name="slow",
        active=replace(mode.active, value=3),
        compute_scale=replace(mode.compute_scale, value=0.5),
        bandwidth_scale=replace(mode.bandwidth_scale, value=0.25),
    )
    power = replace(
        base.power,
        idle=replace(base.power.idle, value=2),
        modes=(replace(mode, active=replace(mode.active, value=5)), slow),
    )
    return replace(base, costs=costs, power=power)


COMPUTE = NodeCost(
    name="conv",
    op="Conv",
    macs=10**9,
    bytes_read=10**6,
    bytes_written=10**6,
    weight_bytes=10**6,
    precision="fp32",
)
TRANSFER = NodeCost(
    name="add", op="Add", macs=0, bytes_read=10**8, bytes_written=10**8, weight_bytes=0, precision="fp32"
)


def test_kernel_bound_by_arithmetic_takes_its_macs(target: Target) -> None:
    assert kernel_latency_s(COMPUTE, target, target.power.modes[0]) == pytest.approx(0.1 + 1e-3)


def test_kernel_bound_by_memory_takes_its_bytes(target: Target) -> None:
    assert kernel_latency_s(TRANSFER, target, target.power.modes[0]) == pytest.approx(0.2 + 1e-3)


def test_weights_are_traffic_too(target: Target) -> None:
    node = replace(TRANSFER, weight_bytes=10**8)
    assert kernel_latency_s(node, target, target.power.modes[0]) == pytest.approx(0.3 + 1e-3)


def test_int8_kernel_runs_at_int8_speed(target: Target) -> None:
    node = replace(COMPUTE, precision="int8")
    assert kernel_latency_s(node, target, target.power.modes[0]) == pytest.approx(0.025 + 1e-3)


def test_network_takes_the_sum_of_its_kernels(target: Target) -> None:
    cost = model_cost([COMPUTE, TRANSFER], target)
    assert cost.latency_s == pytest.approx(0.3 + 2e-3)


def test_energy_is_draw_times_latency(target: Target) -> None:
    cost = model_cost([COMPUTE, TRANSFER], target)
    assert cost.energy_j == pytest.approx(5 * cost.latency_s)


def test_slower_mode_scales_arithmetic_and_bandwidth_apart(target: Target) -> None:
    cost = model_cost([COMPUTE, TRANSFER], target, "slow")
    assert cost.latency_s == pytest.approx(0.2 + 0.8 + 2e-3)
    assert cost.energy_j == pytest.approx(3 * cost.latency_s)


def test_empty_network_costs_nothing(target: Target) -> None:
    cost = model_cost([], target)
    assert (cost.latency_s, cost.energy_j) == (0, 0)


def test_unknown_power_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TargetError, match="expected one of MAXN_SUPER, 25W, 15W, 7W, got '10W'"):
        model_cost([], load_target("jetson"), "10W")


@cases("field", ["macs", "bytes_read", "bytes_written", "weight_bytes"])
def test_negative_work_cannot_be_made(field: str) -> None:
    with pytest.raises(ValueError, match=f"conv: {field}: expected at least 0, got -1"):
        replace(COMPUTE, **{field: -1})


@cases("field", ["macs", "bytes_read", "bytes_written", "weight_bytes"])
def test_work_of_nothing_can_be_made(field: str) -> None:
    assert getattr(replace(COMPUTE, **{field: 0}), field) == 0


def test_traffic_is_what_is_read_and_written_and_the_weights() -> None:
    assert (
        NodeCost(
            name="n", op="Conv", macs=0, bytes_read=1, bytes_written=20, weight_bytes=300, precision="fp32"
        ).traffic_bytes
        == 321
    )


def test_kernel_in_a_loop_takes_its_time_as_often_as_it_runs(target: Target) -> None:
    mode = target.power.modes[0]
    assert kernel_latency_s(replace(COMPUTE, repeats=7), target, mode) == pytest.approx(7 * (0.1 + 1e-3))


def test_recurrent_layer_starts_once_on_a_processor_and_each_step_on_a_gpu(target: Target) -> None:
    mode = target.power.modes[0]
    layer = replace(COMPUTE, steps=5)
    assert kernel_latency_s(layer, target, mode) == pytest.approx(0.1 + 1e-3)
    gpu = replace(target, backend=load_target("jetson").backend)
    assert kernel_latency_s(layer, gpu, mode) == pytest.approx(0.1 + 5e-3)
    assert kernel_latency_s(COMPUTE, gpu, mode) == pytest.approx(0.1 + 1e-3)


@cases("name", ["jetson-orin-nano", "jetson-agx-orin", "rpi5", "rpi4", "rpi-zero-2w"])
def test_shipped_int8_and_power_modes_order_as_they_should(name: str) -> None:
    target = load_target(name)
    int8 = replace(COMPUTE, precision="int8")
    assert model_cost([int8], target).latency_s < model_cost([COMPUTE], target).latency_s
    by_mode = {mode.name: model_cost([COMPUTE], target, mode.name).latency_s for mode in target.power.modes}
    draws = [target.power.mode(mode).active.value for mode in sorted(by_mode, key=by_mode.__getitem__)]
    assert draws == sorted(draws, reverse=True)
