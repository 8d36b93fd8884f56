"""Work inside loops and branches: counted as often as it runs, or refused with the reason."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.toolkit.cases import cases
from tests.toolkit.control_flow_models import BOOL, FLOAT, INT64, graph, keras_lstm, model, node, value
from tests.toolkit.package_run import isolated_home, package, saved
from tests.toolkit.small_models import run

from edgekit_runtime.errors import ModelError
from edgekit_toolkit.costs.onnx_operators import node_costs
from edgekit_toolkit.costs.target_model import model_cost
from edgekit_toolkit.onnx_graph.control_flow import (
    body_model,
    captured,
    check_steady,
    find_steps,
    output_types,
)
from edgekit_toolkit.onnx_graph.ort_graph import optimise_as_engine
from edgekit_toolkit.onnx_graph.shapes import with_shapes
from edgekit_toolkit.passes import fold_constants
from edgekit_toolkit.quantize.onnx.storage import half_weights
from edgekit_toolkit.targets.loader import load_target


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
    kernels = node_costs(keras_lstm(250))
    assert sum(kernel.repeats for kernel in kernels) >= 250 * 10
    assert model_cost(kernels, target).latency_s >= 250 * 10 * target.costs.kernel_overhead.value


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


# How often a body runs, from the node alone.


def scan(axes: list[int] | None = None, sequences: int = 1) -> onnx.NodeProto:
    """A Scan of `s` and the sequences x0, x1, ..., of which a step adds up all."""
    read = [f"x{place}" for place in range(sequences)]
    body = graph(
        [node("Sum", ["h", *(f"{name}_t" for name in read)], ["h_next"]), node("Identity", ["h"], ["out"])],
        [value("h", [4]), *(value(f"{name}_t", [4]) for name in read)],
        [value("h_next", [4]), value("out", [4])],
    )
    given = {} if axes is None else {"scan_input_axes": axes}
    return node("Scan", ["s", *read], ["last", "all"], body=body, num_scan_inputs=sequences, **given)


def types(**shapes: list[int | str]) -> dict[str, onnx.TypeProto]:
    return {name: value(name, shape).type for name, shape in shapes.items()}


def empty_body(version: int) -> onnx.ModelProto:
    whole = model([], [], [], {})
    whole.opset_import[0].version = version
    return whole


@pytest.mark.parametrize("version", [9, 17])
def test_scan_runs_its_body_for_each_step_of_its_sequence(version):
    assert find_steps(scan(), empty_body(version), types(x0=[6, 4]), {}) == 6


def test_scan_of_an_operator_set_with_a_batch_is_refused():
    with pytest.raises(ModelError, match="how often Scan runs its body depends on the data"):
        find_steps(scan(), empty_body(8), types(x0=[6, 4]), {})


@cases(("axis", "steps"), [(0, 6), (1, 4), (-1, 4), (-2, 6)], ids=["first", "second", "last", "last but one"])
def test_scan_goes_along_its_axis(axis, steps):
    assert find_steps(scan([axis]), empty_body(17), types(x0=[6, 4]), {}) == steps


@pytest.mark.parametrize("axis", [1, 2])
def test_scan_along_an_axis_that_is_not_there_is_refused(axis):
    with pytest.raises(ModelError, match="depends on the data"):
        find_steps(scan([axis]), empty_body(17), types(x0=[6]), {})


def test_scan_of_two_sequences_takes_the_length_of_the_first():
    assert find_steps(scan([0, 0], sequences=2), empty_body(17), types(x0=[6, 4]), {}) == 6
    assert find_steps(scan([1, 0], sequences=2), empty_body(17), types(x0=[4, 6], x1=[6, 4]), {}) == 6


@pytest.mark.parametrize("known", [{}, {"x0": ["T", 4]}], ids=["untyped", "free"])
def test_scan_of_an_unknown_length_is_refused(known):
    with pytest.raises(ModelError, match="depends on the data"):
        find_steps(scan(), empty_body(17), types(**known), {})


@cases(("axis", "sizes"), [(None, [6, 4]), (0, [6, 4]), (1, [4, 6]), (-1, [4, 6]), (-2, [6, 4])])
def test_output_that_a_scan_gathers_has_its_steps_at_its_axis(axis, sizes):
    one, known = scan(), types(s=[4], x0=[6, 4])
    if axis is not None:
        one.attribute.append(onnx.helper.make_attribute("scan_output_axes", [axis]))
    whole = model([one], [], [], {})
    body = body_model(whole, one, one.attribute[0].g, known, {})
    found = output_types(one, [body], known, {})
    assert {name: [dim.dim_value for dim in kind.tensor_type.shape.dim] for name, kind in found.items()} == {
        "last": [4],
        "all": sizes,
    }


def test_step_of_a_sequence_has_its_shape_without_the_axis():
    one, known = scan([1]), types(s=[4], x0=[4, 6])
    body = body_model(model([one], [], [], {}), one, one.attribute[0].g, known, {})
    assert [[dim.dim_value for dim in item.type.tensor_type.shape.dim] for item in body.graph.input] == [
        [4],
        [4],
    ]


def test_body_that_reads_what_has_no_type_is_refused():
    one = scan()
    with pytest.raises(ModelError, match="'last': expected known types of all that Scan reads"):
        body_model(model([one], [], [], {}), one, one.attribute[0].g, types(s=[4]), {})


def steps_of(inputs: list[str], body: onnx.GraphProto, **values) -> int:
    """How often a Loop with these inputs, of which `values` are constants, runs its body."""
    loop = node("Loop", inputs, ["y"], name="count", body=body)
    stored = {name: onnx.numpy_helper.from_array(np.asarray(one), name) for name, one in values.items()}
    whole = empty_body(17)
    whole.graph.CopyFrom(body)
    return find_steps(loop, whole, {}, stored)


def counting(nodes: list[onnx.NodeProto], *outputs: str, **constants) -> onnx.GraphProto:
    """A body that goes on while `on`; its state is the counter `n`."""
    inputs = [value("t", [], INT64), value("go", [], BOOL), *([value("n", [], INT64)] if outputs else [])]
    body = graph(nodes, inputs, [value("on", [], BOOL), *(value(name, [], INT64) for name in outputs)])
    body.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(one), name) for name, one in constants.items()
    )
    return body


def below(limit: int) -> onnx.GraphProto:
    """Goes on while the number of the next step is below a limit."""
    nodes = [node("Add", ["t", "one"], ["next"]), node("Less", ["next", "most"], ["on"])]
    return counting(nodes, one=np.int64(1), most=np.int64(limit))


ALWAYS = counting([node("Identity", ["go"], ["same"]), node("Identity", ["same"], ["on"])])


@pytest.mark.parametrize("inputs", [["trips"], ["trips", ""], ["trips", "start"]])
def test_loop_without_an_own_condition_runs_its_trip_count(inputs):
    assert steps_of(inputs, ALWAYS, trips=np.int64(7), start=np.array(True)) == 7


def test_loop_whose_condition_is_false_at_the_start_does_not_run():
    assert steps_of(["trips", "start"], ALWAYS, trips=np.int64(7), start=np.array(False)) == 0


@pytest.mark.parametrize("known", [{"trips": np.int64(7)}, {"start": np.array(True)}])
def test_loop_whose_start_is_not_constant_is_refused(known):
    with pytest.raises(ModelError, match="'count': how often Loop runs its body depends on the data"):
        steps_of(["trips", "start"], ALWAYS, **known)


@cases(("trips", "steps"), [(3, 3), (5, 5), (6, 5), (100, 5), (1, 1), (0, 0)])
def test_loop_ends_by_its_trip_count_or_by_its_condition(trips, steps):
    assert steps_of(["trips", ""], below(5), trips=np.int64(trips)) == steps


def test_loop_without_a_trip_count_ends_by_its_condition():
    assert steps_of(["", ""], below(5)) == 5


@pytest.mark.parametrize(("goes_on", "steps"), [(True, 7), (False, 1)])
def test_loop_whose_condition_is_a_constant_of_the_body_runs_once_or_its_trip_count(goes_on, steps):
    body = counting([], on=np.array(goes_on))
    assert steps_of(["trips", ""], body, trips=np.int64(7)) == steps


@cases(("start", "steps"), [(0, 7), (5, 5), (19, 1), (20, 1)])
def test_loop_follows_a_counter_of_its_own(start, steps):
    nodes = [node("Add", ["n", "three"], ["more"]), node("Less", ["more", "twenty"], ["on"])]
    body = counting(nodes, "more", three=np.int64(3), twenty=np.int64(20))
    assert steps_of(["", "", "start"], body, start=np.int64(start)) == steps


def test_loop_whose_counter_starts_with_the_data_is_refused():
    nodes = [node("Add", ["n", "three"], ["more"]), node("Less", ["more", "twenty"], ["on"])]
    body = counting(nodes, "more", three=np.int64(3), twenty=np.int64(20))
    with pytest.raises(ModelError, match="depends on the data"):
        steps_of(["", "", "start"], body)


def test_loop_follows_a_counter_that_another_one_moves():
    """`far` grows by `n`, which grows by 1: 0, 1, 3, 6, 10 after each step."""
    nodes = [
        node("Add", ["far", "n"], ["farther"]),
        node("Add", ["n", "one"], ["more"]),
        node("Less", ["farther", "ten"], ["on"]),
    ]
    body = counting(nodes, "more", "farther", one=np.int64(1), ten=np.int64(10))
    body.input.append(value("far", [], INT64))
    assert steps_of(["", "", "zero", "zero"], body, zero=np.int64(0)) == 5


@pytest.mark.parametrize("is_long", [False, True])
def test_loop_is_followed_for_twenty_thousand_steps(is_long):
    if is_long:
        with pytest.raises(ModelError, match="depends on the data"):
            steps_of(["", ""], below(20_001))
    else:
        assert steps_of(["", ""], below(20_000)) == 20_000


def test_names_that_a_body_reads_from_outside_are_captured():
    inner = graph([node("Add", ["a", "outer"], ["i"])], [], [value("i", None)])
    body = graph(
        [
            node("Add", ["x", "w"], ["a"]),
            node("If", ["flag"], ["b"], then_branch=inner, else_branch=inner),
            node("Clip", ["b", "", "high"], ["c"]),
        ],
        [value("x", [4])],
        [value("c", None), value("given", None)],
    )
    assert captured(body) == {"w", "flag", "outer", "high", "given"}


@pytest.mark.parametrize("size", [5, "n"])
def test_state_of_a_scan_that_changes_its_size_is_refused(size):
    one = scan()
    body = model([], [value("h", [4]), value("x_t", [4])], [value("h_next", [size]), value("out", [4])], {})
    with pytest.raises(ModelError, match="'last': state 'h' of Scan has no size that stays"):
        check_steady(one, body)


def test_state_of_a_loop_is_held_against_what_follows_its_condition():
    loop = node("Loop", ["trips", "", "a", "b"], ["x", "y"], body=ALWAYS)
    before = [value("t", [], INT64), value("go", [], BOOL), value("a", [2]), value("b", [3])]
    steady = model([], before, [value("on", [], BOOL), value("p", [2]), value("q", [3])], {})
    check_steady(loop, steady)
    other = model([], before, [value("on", [], BOOL), value("p", [2]), value("q", [4])], {})
    with pytest.raises(ModelError, match="'x': state 'b' of Loop"):
        check_steady(loop, other)


def test_rank_that_a_branch_decides_is_not_taken_for_a_scalar():
    branches = {
        "then_branch": graph([node("Squeeze", ["x"], ["flat"])], [], [value("flat", [4])]),
        "else_branch": graph([node("Identity", ["x"], ["same"])], [], [value("same", [1, 4])]),
    }
    nodes = [
        node("If", ["flag"], ["z"], **branches),
        node("Shape", ["z"], ["sizes"]),
        node("Size", ["sizes"], ["rank"]),
    ]
    inputs = [value("x", [1, 4]), value("flag", [], BOOL)]
    whole = model(nodes, inputs, [value("rank", [], INT64)], {})
    shaped = with_shapes(whole, {})
    assert [item.op_type for item in shaped.graph.node] == ["If", "Shape", "Size"]
