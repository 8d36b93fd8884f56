"""Work inside loops and branches: counted as often as it runs, or refused with the reason."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.toolkit.control_flow_models import BOOL, FLOAT, INT64, graph, keras_lstm, model, node, value
from tests.toolkit.package_run import isolated_home, package, saved
from tests.toolkit.small_models import run

from edgekit_runtime.errors import ModelError
from edgekit_toolkit.energy import model_cost
from edgekit_toolkit.engine_graph import optimise_as_engine
from edgekit_toolkit.node_costs import node_costs
from edgekit_toolkit.passes import fold_constants
from edgekit_toolkit.quantize.storage import half_weights
from edgekit_toolkit.targets import load_target


def macs(whole: onnx.ModelProto, dims: dict[str, int] | None = None) -> int:
    return sum(cost.repeats * cost.macs for cost in node_costs(whole, dims))


@pytest.mark.parametrize("form", ["loop", "while", "scan"])
def test_body_of_a_loop_counts_as_often_as_it_runs(form):
    # Each step: x_t [1, 16] by [16, 128] and h [1, 32] by [32, 128]; then one product with [32, 1].
    assert macs(keras_lstm(25, inputs=16, hidden=32, form=form)) == 25 * (16 + 32) * 128 + 32


@pytest.mark.parametrize("form", ["while", "scan"])
def test_steps_follow_from_the_size_of_a_free_dimension(form):
    whole = keras_lstm("T", form=form)
    one_step = 48 * 128
    assert macs(whole, {"T": 40}) - macs(whole, {"T": 10}) == 30 * one_step


def test_weights_that_a_body_captures_are_weights_and_what_it_reads_is_not_constant():
    costs = {cost.op: cost for cost in node_costs(keras_lstm(25, inputs=16, hidden=32)) if cost.repeats == 25}
    assert costs["MatMul"].weight_bytes in {16 * 128 * 4, 32 * 128 * 4}
    assert costs["Gather"].bytes_read == 16 * 4


def test_loop_whose_condition_depends_on_the_data_is_refused():
    with pytest.raises(
        ModelError, match=r"'lstm': how often Loop runs its body depends on the data.*measure"
    ):
        node_costs(keras_lstm(25, form="until"))


def test_loop_whose_trip_count_is_an_input_is_refused():
    whole = keras_lstm(25)
    kept = [tensor for tensor in whole.graph.initializer if tensor.name != "trips"]
    del whole.graph.initializer[:]
    whole.graph.initializer.extend(kept)
    whole.graph.input.append(value("trips", [], INT64))
    with pytest.raises(ModelError, match="depends on the data"):
        node_costs(whole)


def growing(trips: int) -> onnx.ModelProto:
    """A list that becomes one row longer in each step."""
    body = graph(
        [node("Concat", ["list", "x"], ["longer"], axis=0), node("Identity", ["go"], ["on"])],
        [value("t", [], INT64), value("go", [], BOOL), value("list", ["n", 4])],
        [value("on", [], BOOL), value("longer", ["m", 4])],
    )
    nodes = [node("Loop", ["trips", "", "x"], ["y"], name="grow", body=body)]
    return model(nodes, [value("x", [1, 4])], [value("y", ["k", 4])], {"trips": np.int64(trips)})


def test_state_that_grows_is_refused():
    with pytest.raises(ModelError, match="'grow': state 'list' of Loop has no size that stays"):
        node_costs(growing(3))


def test_loop_that_gathers_outputs_gives_them_a_size():
    body = graph(
        [
            node("MatMul", ["s", "w"], ["n"]),
            node("Identity", ["n"], ["out"]),
            node("Identity", ["go"], ["on"]),
        ],
        [value("t", [], INT64), value("go", [], BOOL), value("s", None)],
        [value("on", [], BOOL), value("n", None), value("out", None)],
    )
    nodes = [
        node("Loop", ["trips", "", "x"], ["last", "all"], body=body),
        node("MatMul", ["all", "w"], ["y"]),
    ]
    weights = {"trips": np.int64(6), "w": np.eye(4, dtype=np.float32)}
    whole = model(nodes, [value("x", [1, 4])], [value("y", None)], weights)
    # Six steps of [1, 4] by [4, 4], then [6, 1, 4] by [4, 4].
    assert macs(whole) == 6 * 16 + 6 * 16


def branching(is_same: bool = True) -> onnx.ModelProto:
    """y of x [1, 8] by one of two weights that both branches capture; `flag` decides."""
    small = graph([node("MatMul", ["x", "a"], ["s"])], [], [value("s", None)])
    large = graph(
        [node("MatMul", ["x", "b"], ["l0"]), node("MatMul", ["l0", "c"], ["l"])], [], [value("l", None)]
    )
    nodes = [node("If", ["flag"], ["z"], then_branch=small, else_branch=large), node("Relu", ["z"], ["y"])]
    weights = {
        "a": np.ones((8, 4), np.float32),
        "b": np.ones((8, 100), np.float32),
        "c": np.ones((100, 4 if is_same else 5), np.float32),
    }
    return model(nodes, [value("flag", [], BOOL), value("x", [1, 8], FLOAT)], [value("y", None)], weights)


def test_branch_counts_as_the_dearer_of_both():
    assert macs(branching()) == 8 * 100 + 100 * 4


def test_branches_of_other_shapes_are_refused_where_the_shape_is_needed():
    with pytest.raises(ModelError, match="expected a known shape"):
        node_costs(branching(is_same=False))


def recurrent(steps: int, direction: str = "forward") -> onnx.ModelProto:
    sides = 2 if direction == "bidirectional" else 1
    weights = {"w": np.ones((sides, 32, 4), np.float32), "r": np.ones((sides, 32, 8), np.float32)}
    nodes = [node("LSTM", ["x", "w", "r"], ["y"], hidden_size=8, direction=direction)]
    return model(nodes, [value("x", [steps, 1, 4])], [value("y", None)], weights)


@pytest.mark.parametrize(("direction", "sides"), [("forward", 1), ("bidirectional", 2)])
def test_recurrent_layer_on_a_gpu_takes_at_least_the_start_of_each_step(direction, sides):
    jetson = load_target("jetson")
    start_s = jetson.costs.kernel_overhead.value
    modelled_s = model_cost(node_costs(recurrent(250, direction)), jetson).latency_s
    assert modelled_s >= 250 * sides * start_s
    # On a CPU the steps are a loop inside one kernel.
    assert model_cost(node_costs(recurrent(250)), load_target("rpi5")).latency_s < 250 * 1e-6


def test_loop_takes_at_least_the_start_of_each_kernel_of_each_step():
    target = load_target("rpi5")
    cost = model_cost(node_costs(keras_lstm(250)), target)
    assert cost.kernels >= 250 * 10
    assert cost.latency_s >= 250 * 10 * target.costs.kernel_overhead.value


def test_package_of_a_loop_that_cannot_be_counted_has_no_modelled_latency(tmp_path: Path):
    whole = saved(keras_lstm(25, form="until"), tmp_path / "model.onnx")
    with isolated_home(tmp_path / "home"):
        plain = package(whole, tmp_path / "out", "--json", target="rpi5").json
        limited = package(whole, tmp_path / "limited", "--budget", "latency=1s", target="rpi5")
    assert all(one["figures"]["latency"]["value"] is None for one in plain["candidates"])
    reason = plain["outcome"]["reason"]
    assert "on this machine" in reason
    assert reason.endswith("since latency on the target cannot be modelled")
    assert limited.code != 0
    assert "latency" in limited.stdout


def with_weights_inside(kind: str) -> onnx.ModelProto:
    """A loop whose body captures its weights, or holds them as initializers or as Constant nodes."""
    whole = keras_lstm(12, inputs=32, hidden=64, vocabulary=40)
    if kind == "captured":
        return whole
    body = next(item for item in whole.graph.node if item.op_type == "Loop").attribute[0].g
    weights = [tensor for tensor in whole.graph.initializer if tensor.name in {"w", "r", "b"}]
    others = [tensor for tensor in whole.graph.initializer if tensor.name not in {"w", "r", "b"}]
    del whole.graph.initializer[:]
    whole.graph.initializer.extend(others)
    if kind == "initializers":
        body.initializer.extend(weights)
        return whole
    nodes = [node("Constant", [], [tensor.name], value=tensor) for tensor in weights]
    nodes += list(body.node)
    del body.node[:]
    body.node.extend(nodes)
    return whole


@pytest.mark.parametrize("kind", ["captured", "initializers", "constants"])
def test_weights_of_a_body_are_stored_as_float16_and_widened_at_loading(kind):
    floats = fold_constants.run(with_weights_inside(kind))
    halves = half_weights(floats)
    assert halves is not None
    onnx.checker.check_model(halves, full_check=True)
    assert halves.ByteSize() < 0.6 * floats.ByteSize()
    ids = {"ids": np.arange(12, dtype=np.int64)[None]}
    # Eleven bits of each weight, through twelve steps of a bounded state.
    np.testing.assert_allclose(run(halves, ids)["y"], run(floats, ids)["y"], atol=2e-3)
    engine = optimise_as_engine(halves)
    loop = next(item for item in engine.nodes if item.op_type == "Loop")
    inner = next(item.g for item in loop.attribute if item.name == "body")
    assert "Cast" not in {item.op_type for item in (*engine.nodes, *inner.node)}


def test_weight_that_a_body_hands_out_stays_as_it_is():
    then = graph([node("Relu", ["w"], ["t"])], [], [value("t", None)])
    other = graph([], [], [value("w", None)])
    nodes = [
        node("If", ["flag"], ["z"], then_branch=then, else_branch=other),
        node("MatMul", ["x", "z"], ["y"]),
    ]
    weights = {"w": np.ones((16, 16), np.float32)}
    whole = model(nodes, [value("flag", [], BOOL), value("x", [1, 16])], [value("y", None)], weights)
    assert half_weights(whole) is None


def test_package_of_a_loop_is_smaller_than_its_source(tmp_path: Path):
    source = saved(with_weights_inside("captured"), tmp_path / "model.onnx")
    with isolated_home(tmp_path / "home"):
        report = package(source, tmp_path / "out", "--json", target="rpi5").json
    assert report["package"]["bytes"] < 0.8 * source.stat().st_size
