"""The passes that rewrite arithmetic: equal outputs, and graphs left alone where they must not apply."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import NodeProto, TensorProto, helper
from tests.toolkit.cases import cases
from tests.toolkit.small_models import (
    Array,
    assert_valid,
    model_of,
    node,
    operators,
    random_feeds,
    random_weight,
    run,
)

from edgekit_toolkit.passes import (
    conv_transpose_to_depth,
    defer_depth_to_space,
    distribute_gate,
    fold_affine,
    fold_slices,
    fuse_hardswish,
    merge_linear_convs,
    write_hardswish,
)
from edgekit_toolkit.passes.leftovers import drop_unused

Pass = Callable[[onnx.ModelProto], onnx.ModelProto]
PASSES = [
    fold_affine.run,
    fuse_hardswish.run,
    merge_linear_convs.run,
    distribute_gate.run,
    conv_transpose_to_depth.run,
    defer_depth_to_space.run,
    fold_slices.run,
]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def rewritten(rewrite: Pass, before: onnx.ModelProto, seed: int = 0) -> onnx.ModelProto:
    """The result of a pass, after checks of what each pass promises."""
    given_bytes = before.SerializeToString()
    after = rewrite(before)
    assert before.SerializeToString() == given_bytes
    assert_valid(after)
    assert [value.name for value in after.graph.output] == [value.name for value in before.graph.output]
    feeds = random_feeds(before, np.random.default_rng(seed))
    want, got = run(before, feeds), run(after, feeds)
    for name, value in want.items():
        assert got[name].dtype == value.dtype
        assert got[name].shape == value.shape
        # Rewrites round differently: some units in the last place of the largest value.
        np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=2e-5 * max(1.0, np.abs(value).max()))
    return after


def left_alone(rewrite: Pass, before: onnx.ModelProto) -> bool:
    return rewritten(rewrite, before).SerializeToString() == before.SerializeToString()


# Scalings and shifts.


def conv_then(
    rng: np.random.Generator, after: Sequence[NodeProto], constants: Mapping[str, Array], **attributes: Any
) -> onnx.ModelProto:
    """x [N, 4, 8, 8] -> Conv -> c [N, 8, ...] -> `after` -> y."""
    group = attributes.get("group", 1)
    weights = {"w": random_weight(rng, 8, 4 // group, 3, 3), "b": random_weight(rng, 8)}
    conv = node("Conv", ["x", "w", "b"], ["c"], **attributes)
    return model_of([conv, *after], {**weights, **constants}, {"x": ("N", 4, 8, 8)})


CHANNELS = np.array([-2, -0.5, 0, 0.25, 1, 3, 0.1, -1], np.float32).reshape(8, 1, 1)


@cases(
    "attributes",
    [{}, {"pads": [1] * 4}, {"group": 4}, {"strides": [2, 2]}],
    ids=["unpadded", "padded", "depthwise", "strided"],
)
@cases(
    "constant",
    [np.float32(-1.5), np.zeros(1, np.float32), CHANNELS, CHANNELS[np.newaxis]],
    ids=["negative", "zero", "channels", "batched channels"],
)
@cases("operator", ["Mul", "Add", "Sub"])
def test_scaling_or_shift_after_a_convolution_becomes_part_of_it(
    operator: str, constant: Array, attributes: dict[str, Any], rng: np.random.Generator
) -> None:
    before = conv_then(rng, [node(operator, ["c", "k"], ["y"])], {"k": constant}, **attributes)
    assert operators(rewritten(fold_affine.run, before)) == ["Conv"]


def test_division_after_a_convolution_becomes_part_of_it_unless_it_divides_by_zero(
    rng: np.random.Generator,
) -> None:
    division = [node("Div", ["c", "k"], ["y"])]
    before = conv_then(rng, division, {"k": CHANNELS + np.float32(4)})
    assert operators(rewritten(fold_affine.run, before)) == ["Conv"]
    by_zero = conv_then(rng, division, {"k": CHANNELS})
    assert operators(fold_affine.run(by_zero)) == ["Conv", "Div"]


def test_constant_on_the_left_of_a_subtraction_is_left_alone(rng: np.random.Generator) -> None:
    assert left_alone(fold_affine.run, conv_then(rng, [node("Sub", ["k", "c"], ["y"])], {"k": CHANNELS}))


def test_chain_of_scalings_and_shifts_becomes_one_convolution(rng: np.random.Generator) -> None:
    chain = [
        node("Mul", ["c", "k"], ["c1"]),
        node("Add", ["k", "c1"], ["c2"]),
        node("Div", ["c2", "two"], ["c3"]),
        node("Sub", ["c3", "two"], ["y"]),
    ]
    before = conv_then(rng, chain, {"k": CHANNELS, "two": np.float32(2)})
    assert operators(rewritten(fold_affine.run, before)) == ["Conv"]


@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose"])
def test_batch_normalization_becomes_part_of_the_convolution_before(
    operator: str, rng: np.random.Generator
) -> None:
    shape = (6, 4, 3, 3) if operator == "Conv" else (4, 6, 3, 3)
    weights = {"w": random_weight(rng, *shape)} | {
        name: (rng.random(6) + 0.5).astype(np.float32) for name in ("gamma", "beta", "mean", "var")
    }
    nodes = [
        node(operator, ["x", "w"], ["c"], strides=[2, 2]),
        node("BatchNormalization", ["c", "gamma", "beta", "mean", "var"], ["y"], epsilon=1e-3),
    ]
    before = model_of(nodes, weights, {"x": (1, 4, 8, 8)})
    assert operators(rewritten(fold_affine.run, before)) == [operator]


def test_output_of_the_convolution_that_is_an_output_too_is_left_alone(rng: np.random.Generator) -> None:
    before = conv_then(rng, [node("Mul", ["c", "k"], ["y"])], {"k": CHANNELS})
    before.graph.output.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, ("N", 8, 6, 6)))
    assert left_alone(fold_affine.run, before)


def test_output_of_the_convolution_with_two_readers_is_left_alone(rng: np.random.Generator) -> None:
    after = [node("Mul", ["c", "k"], ["s"]), node("Relu", ["c"], ["r"]), node("Add", ["s", "r"], ["y"])]
    assert left_alone(fold_affine.run, conv_then(rng, after, {"k": CHANNELS}))


def test_weight_of_two_convolutions_is_left_alone(rng: np.random.Generator) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"]),
        node("Conv", ["x", "w"], ["b"]),
        node("Mul", ["a", "k"], ["s"]),
        node("Add", ["s", "b"], ["y"]),
    ]
    weights = {"w": random_weight(rng, 4, 4, 3, 3), "k": np.float32(3)}
    assert left_alone(fold_affine.run, model_of(nodes, weights, {"x": (1, 4, 8, 8)}))


def test_constant_shared_by_two_scalings_folds_into_both(rng: np.random.Generator) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"]),
        node("Mul", ["a", "k"], ["s"]),
        node("Relu", ["s"], ["r"]),
        node("Conv", ["r", "v"], ["b"]),
        node("Mul", ["b", "k"], ["y"]),
    ]
    weights = {
        "w": random_weight(rng, 8, 4, 3, 3),
        "v": random_weight(rng, 8, 8, 3, 3),
        "k": np.abs(CHANNELS),
    }
    after = rewritten(fold_affine.run, model_of(nodes, weights, {"x": (1, 4, 8, 8)}))
    assert operators(after) == ["Conv", "Relu", "Conv"]


def test_weight_that_a_caller_may_replace_is_left_alone(rng: np.random.Generator) -> None:
    before = conv_then(rng, [node("Mul", ["c", "k"], ["y"])], {"k": CHANNELS})
    before.graph.input.append(helper.make_tensor_value_info("k", TensorProto.FLOAT, (8, 1, 1)))
    assert left_alone(fold_affine.run, before)


def affine_then_convs(
    rng: np.random.Generator,
    constants: Mapping[str, Array],
    *,
    pads: int = 0,
    readers: int = 2,
    shape: Sequence[int | str] = ("N", 8, 8, 8),
) -> onnx.ModelProto:
    """x -> Mul by k -> Add t -> convolutions (one of them depthwise) -> sum y."""
    weights = {"w0": random_weight(rng, 8, 8, 3, 3), "w1": random_weight(rng, 8, 1, 3, 3)}
    nodes = [node("Mul", ["x", "k"], ["s"]), node("Add", ["s", "t"], ["u"])]
    for number in range(readers):
        inputs = ["u", f"w{number}"]
        nodes.append(node("Conv", inputs, [f"c{number}"], group=8 if number else 1, pads=[pads] * 4))
    nodes.append(node("Add", ["c0", "c1"] if readers == 2 else ["c0", "c0"], ["y"]))
    return model_of(nodes, {**weights, **constants}, {"x": shape})


@pytest.mark.parametrize("scale", [np.float32(-0.5), CHANNELS], ids=["scalar", "channels"])
@pytest.mark.parametrize("readers", [1, 2])
def test_scaling_and_shift_before_unpadded_convolutions_become_part_of_each(
    readers: int, scale: Array, rng: np.random.Generator
) -> None:
    before = affine_then_convs(rng, {"k": scale, "t": CHANNELS * 2}, readers=readers)
    after = rewritten(fold_affine.run, before)
    assert operators(after) == ["Conv"] * readers + ["Add"]


def test_shift_before_a_padded_convolution_stays_but_the_scaling_folds(rng: np.random.Generator) -> None:
    before = affine_then_convs(rng, {"k": np.float32(-0.5), "t": CHANNELS}, pads=1)
    assert operators(rewritten(fold_affine.run, before)) == ["Add", "Conv", "Conv", "Add"]


def test_scaling_a_channel_before_a_shift_and_padding_is_left_alone(rng: np.random.Generator) -> None:
    assert left_alone(fold_affine.run, affine_then_convs(rng, {"k": CHANNELS, "t": CHANNELS}, pads=1))


def test_scaling_by_zero_before_a_shift_and_padding_is_left_alone(rng: np.random.Generator) -> None:
    assert left_alone(fold_affine.run, affine_then_convs(rng, {"k": np.float32(0), "t": CHANNELS}, pads=1))


def test_shift_before_a_convolution_padded_automatically_is_left_alone(rng: np.random.Generator) -> None:
    nodes = [
        node("Add", ["x", "t"], ["u"]),
        node("Conv", ["u", "w"], ["y"], auto_pad="SAME_UPPER"),
    ]
    weights = {"w": random_weight(rng, 4, 8, 3, 3), "t": CHANNELS}
    assert left_alone(fold_affine.run, model_of(nodes, weights, {"x": (1, 8, 8, 8)}))


def test_scaling_that_something_else_reads_too_is_left_alone(rng: np.random.Generator) -> None:
    nodes = [
        node("Mul", ["x", "k"], ["s"]),
        node("Conv", ["s", "w"], ["c"], pads=[1] * 4),
        node("Add", ["c", "s"], ["y"]),
    ]
    weights = {"w": random_weight(rng, 8, 8, 3, 3), "k": CHANNELS}
    assert left_alone(fold_affine.run, model_of(nodes, weights, {"x": (1, 8, 8, 8)}))


def test_constant_that_widens_one_channel_to_many_is_left_alone(rng: np.random.Generator) -> None:
    before = affine_then_convs(rng, {"k": CHANNELS, "t": np.float32(0)}, shape=("N", 1, 8, 8))
    after = rewritten(fold_affine.run, before)
    assert operators(after)[0] == "Mul"


def test_constant_that_makes_an_image_of_a_matrix_is_left_alone(rng: np.random.Generator) -> None:
    nodes = [node("Mul", ["x", "k"], ["s"]), node("Conv", ["s", "w"], ["y"])]
    weights = {"w": random_weight(rng, 4, 1, 3, 3), "k": np.full((1, 1, 1, 1), 2, np.float32)}
    assert left_alone(fold_affine.run, model_of(nodes, weights, {"x": (8, 8)}))


def test_constant_that_scales_columns_is_left_alone(rng: np.random.Generator) -> None:
    columns = np.arange(1, 7, dtype=np.float32)
    assert left_alone(fold_affine.run, conv_then(rng, [node("Mul", ["c", "k"], ["y"])], {"k": columns}))


def test_shift_after_a_gemm_is_left_alone(rng: np.random.Generator) -> None:
    nodes = [node("Gemm", ["x", "w", "b"], ["g"]), node("Mul", ["g", "k"], ["y"])]
    weights = {"w": random_weight(rng, 8, 4), "b": random_weight(rng, 4), "k": np.float32(3)}
    assert left_alone(fold_affine.run, model_of(nodes, weights, {"x": ("N", 8)}))


def test_tensor_that_a_branch_reads_is_left_alone(rng: np.random.Generator) -> None:
    def branch(name: str, operator: str) -> onnx.GraphProto:
        out = f"{name}_out"
        value = helper.make_tensor_value_info(out, TensorProto.FLOAT, None)
        return helper.make_graph([node(operator, ["c"], [out])], name, [], [value])

    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Mul", ["c", "k"], ["s"]),
        node("ReduceMax", ["x"], ["top"], keepdims=0),
        node("Greater", ["top", "zero"], ["positive"]),
        node("If", ["positive"], ["i"], then_branch=branch("t", "Relu"), else_branch=branch("e", "Neg")),
        node("Add", ["s", "i"], ["y"]),
    ]
    weights = {"w": random_weight(rng, 8, 4, 3, 3), "k": CHANNELS, "zero": np.float32(0)}
    assert left_alone(fold_affine.run, model_of(nodes, weights, {"x": (1, 4, 8, 8)}))


def test_name_inside_a_branch_is_not_used_again(rng: np.random.Generator) -> None:
    def branch(name: str) -> onnx.GraphProto:
        inner = onnx.numpy_helper.from_array(np.ones((1, 8, 1, 1), np.float32), name)
        out = helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None)
        return helper.make_graph([node("Add", ["y", name], [out.name])], name, [], [out], [inner])

    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Mul", ["c", "k"], ["y"]),
        node("ReduceMax", ["x"], ["top"], keepdims=0),
        node("Greater", ["top", "zero"], ["positive"]),
        node("If", ["positive"], ["z"], then_branch=branch("w_1"), else_branch=branch("w_2")),
    ]
    weights = {"w": random_weight(rng, 8, 4, 3, 3), "k": CHANNELS, "zero": np.float32(0)}
    before = model_of(nodes, weights, {"x": (1, 4, 8, 8)}, ["z"])
    after = rewritten(fold_affine.run, before)
    assert operators(after)[0] == "Conv"
    assert "Mul" not in operators(after)
    assert not {"w_1", "w_2"} & {tensor.name for tensor in after.graph.initializer}


@st.composite
def conv_chains(draw: st.DrawFn) -> onnx.ModelProto:
    """Random chains of convolutions, scalings, shifts and activations on 4 channels."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    nodes: list[NodeProto] = []
    weights: dict[str, Array] = {}
    name = "x"
    kinds = st.sampled_from(
        ["Conv", "pointwise", "depthwise", "padded", "Mul", "Add", "Sub", "Relu", "hardswish"]
    )
    made = []
    for number, kind in enumerate(draw(st.lists(kinds, min_size=2, max_size=6))):
        out = f"t{number}"
        if kind == "Relu":
            nodes.append(node("Relu", [name], [out]))
        elif kind == "hardswish":
            weights |= {"three": np.float32(3), "zero": np.float32(0), "six": np.float32(6)}
            nodes += [
                node("Add", [name, "three"], [f"{out}a"]),
                node("Clip", [f"{out}a", "zero", "six"], [f"{out}b"]),
                node("Mul", [name, f"{out}b"], [f"{out}c"]),
                node("Div", [f"{out}c", "six"], [out]),
            ]
        elif kind in {"Mul", "Add", "Sub"}:
            shape = draw(st.sampled_from([(), (1,), (4, 1, 1), (1, 4, 1, 1), (1, 1, 1, 1)]))
            weights[f"k{number}"] = rng.choice([-1.5, 0, 0.5, 2], size=shape).astype(np.float32)
            nodes.append(node(kind, [name, f"k{number}"], [out]))
        else:
            group, size = (4, 3) if kind == "depthwise" else (1, 1 if kind == "pointwise" else 3)
            weights[f"w{number}"] = random_weight(rng, 4, 4 // group, size, size)
            inputs = [name, f"w{number}"]
            if draw(st.booleans()):
                weights[f"b{number}"] = random_weight(rng, 4)
                inputs.append(f"b{number}")
            pads = [1 if kind == "padded" else 0] * 4
            nodes.append(node("Conv", inputs, [out], group=group, pads=pads))
        name = out
        made.append(out)
    extra = draw(st.lists(st.sampled_from(made), max_size=1))
    return model_of(nodes, weights, {"x": ("N", 4, 16, 16)}, sorted({made[-1], *extra}))


@given(conv_chains())
@settings(max_examples=40, derandomize=True)
def test_any_small_chain_keeps_its_outputs_through_all_passes(before: onnx.ModelProto) -> None:
    for rewrite in PASSES:
        before = rewritten(rewrite, before)


# Hard-swish.


def hardswish(
    after: Sequence[NodeProto], outputs: Sequence[str] = ("y",), dtype: Any = np.float32, **constants: Any
) -> onnx.ModelProto:
    """x -> Add three -> Clip zero..six -> h, then `after`."""
    values = {"three": 3, "zero": 0, "six": 6} | constants
    weights = {name: np.asarray(value, dtype) for name, value in values.items()}
    nodes = [node("Add", ["x", "three"], ["a"]), node("Clip", ["a", "zero", "six"], ["h"]), *after]
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return model_of(nodes, weights, {"x": ("N", 4, 5)}, outputs, dtype=element)


FULL = [node("Mul", ["x", "h"], ["m"]), node("Div", ["m", "six"], ["y"])]


@pytest.mark.parametrize(
    "end",
    [FULL, [node("Mul", ["h", "x"], ["m"]), node("Mul", ["sixth", "m"], ["y"])]],
    ids=["division", "product"],
)
def test_hard_swish_becomes_two_nodes(end: list[NodeProto]) -> None:
    after = rewritten(fuse_hardswish.run, hardswish(end, sixth=1 / 6))
    assert operators(after) == ["HardSigmoid", "Mul"]


def test_hard_swish_becomes_one_node_where_its_product_alone_reads_the_gate() -> None:
    gate = node("HardSigmoid", ["x"], ["h"], alpha=1 / 6, beta=0.5)
    swish = [gate, node("Mul", ["h", "x"], ["y"])]
    sizes = {"x": ("N", 4, 8, 8)}
    assert operators(rewritten(write_hardswish.run, model_of(swish, {}, sizes))) == ["HardSwish"]
    others = [
        model_of(swish, {}, sizes, outputs=("y", "h")),
        model_of([*swish[:1], node("Mul", ["h", "h"], ["y"])], {}, sizes),
        model_of([node("HardSigmoid", ["x"], ["h"], alpha=0.2, beta=0.5), swish[1]], {}, sizes),
    ]
    assert all(left_alone(write_hardswish.run, other) for other in others)


def test_hard_swish_without_its_division_keeps_its_factor() -> None:
    after = rewritten(fuse_hardswish.run, hardswish([node("Mul", ["x", "h"], ["y"])]))
    assert operators(after) == ["HardSigmoid", "Mul", "Mul"]


def test_clip_that_is_an_output_too_keeps_its_name_and_value() -> None:
    after = rewritten(fuse_hardswish.run, hardswish(FULL, ("y", "h")))
    assert operators(after) == ["HardSigmoid", "Mul", "Mul", "Div"]


def test_product_that_is_an_output_too_keeps_its_name_and_value() -> None:
    rewritten(fuse_hardswish.run, hardswish(FULL, ("y", "m")))


def test_two_hard_swishes_in_a_row_both_become_two_nodes() -> None:
    again = [
        node("Add", ["y", "three"], ["a2"]),
        node("Clip", ["a2", "zero", "six"], ["h2"]),
        node("Mul", ["y", "h2"], ["m2"]),
        node("Div", ["m2", "six"], ["z"]),
    ]
    after = rewritten(fuse_hardswish.run, hardswish([*FULL, *again], ("z",)))
    assert operators(after) == ["HardSigmoid", "Mul"] * 2


def test_name_of_the_gate_that_is_taken_is_not_used_twice() -> None:
    end = [*FULL, node("Relu", ["x"], ["h_gate"])]
    rewritten(fuse_hardswish.run, hardswish(end, ("y", "h_gate")))


@pytest.mark.parametrize(
    "constants",
    [{"six": 5}, {"zero": 0.5}, {"three": 2}, {"three": [[3, 3, 3, 3, 3]]}, {"three": [[[[3]]]]}],
    ids=["other top", "other bottom", "other shift", "shift a column", "shift that widens"],
)
def test_what_is_nearly_hard_swish_is_left_alone(constants: dict[str, Any]) -> None:
    assert left_alone(fuse_hardswish.run, hardswish([node("Mul", ["x", "h"], ["y"])], **constants))


def test_sum_with_a_second_reader_is_left_alone() -> None:
    assert left_alone(fuse_hardswish.run, hardswish([*FULL, node("Relu", ["a"], ["r"])], ("y", "r")))


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_hard_swish_of_another_type_is_left_alone(dtype: Any) -> None:
    assert left_alone(fuse_hardswish.run, hardswish(FULL, dtype=dtype))


# Consecutive 1x1 convolutions.


def pointwise_pair(
    rng: np.random.Generator,
    sizes: tuple[int, int, int],
    *,
    biases: tuple[bool, bool] = (True, True),
    first: Mapping[str, Any] | None = None,
    second: Mapping[str, Any] | None = None,
    outputs: Sequence[str] = ("y",),
) -> onnx.ModelProto:
    weights: dict[str, Array] = {}
    nodes = []
    for number, (source, out) in enumerate((("x", "m"), ("m", "y"))):
        attributes = (first, second)[number] or {}
        group = attributes.get("group", 1)
        weights[f"w{number}"] = random_weight(rng, sizes[number + 1], sizes[number] // group, 1, 1)
        inputs = [source, f"w{number}"]
        if biases[number]:
            weights[f"b{number}"] = random_weight(rng, sizes[number + 1])
            inputs.append(f"b{number}")
        nodes.append(node("Conv", inputs, [out], **attributes))
    return model_of(nodes, weights, {"x": ("N", sizes[0], 5, 5)}, outputs)


@pytest.mark.parametrize("biases", [(True, True), (True, False), (False, True), (False, False)])
def test_two_pointwise_convolutions_become_one(biases: tuple[bool, bool], rng: np.random.Generator) -> None:
    after = rewritten(merge_linear_convs.run, pointwise_pair(rng, (6, 8, 4), biases=biases))
    assert operators(after) == ["Conv"]


def test_bottleneck_is_left_alone(rng: np.random.Generator) -> None:
    assert left_alone(merge_linear_convs.run, pointwise_pair(rng, (16, 2, 16)))


@pytest.mark.parametrize(
    "options",
    [
        {"first": {"strides": [2, 2]}},
        {"second": {"pads": [1] * 4}},
        {"second": {"group": 2}},
        {"first": {"auto_pad": "SAME_UPPER"}},
        {"outputs": ("y", "m")},
    ],
    ids=["strided", "padded", "grouped", "padded automatically", "middle is an output"],
)
def test_pointwise_convolutions_that_are_no_plain_product_are_left_alone(
    options: dict[str, Any], rng: np.random.Generator
) -> None:
    assert left_alone(merge_linear_convs.run, pointwise_pair(rng, (6, 8, 4), **options))


def test_pointwise_convolution_before_a_larger_kernel_is_left_alone(rng: np.random.Generator) -> None:
    nodes = [node("Conv", ["x", "w"], ["m"]), node("Conv", ["m", "v"], ["y"])]
    weights = {"w": random_weight(rng, 8, 6, 1, 1), "v": random_weight(rng, 4, 8, 3, 3)}
    assert left_alone(merge_linear_convs.run, model_of(nodes, weights, {"x": (1, 6, 5, 5)}))


# Gated residuals.


def gated(gate: Sequence[NodeProto], weights: Mapping[str, Array], **options: Any) -> onnx.ModelProto:
    """x + x * g, with nodes that make g of x."""
    nodes = [*gate, node("Mul", ["x", "g"], ["m"]), node("Add", ["x", "m"], ["y"])]
    return model_of(nodes, weights, {"x": (2, 4, 6, 6)}, **options)


SQUEEZE = [
    node("GlobalAveragePool", ["x"], ["p"]),
    node("Conv", ["p", "w"], ["q"]),
    node("HardSigmoid", ["q"], ["g"]),
]


def test_gated_residual_becomes_one_product(rng: np.random.Generator) -> None:
    after = rewritten(distribute_gate.run, gated(SQUEEZE, {"w": random_weight(rng, 4, 4, 1, 1)}))
    assert operators(after) == ["GlobalAveragePool", "Conv", "HardSigmoid", "Add", "Mul"]


def test_gate_of_the_size_of_its_tensor_is_left_alone(rng: np.random.Generator) -> None:
    full = [node("Conv", ["x", "w"], ["q"]), node("Sigmoid", ["q"], ["g"])]
    assert left_alone(distribute_gate.run, gated(full, {"w": random_weight(rng, 4, 4, 1, 1)}))


def test_gate_to_which_a_large_tensor_is_added_is_left_alone(rng: np.random.Generator) -> None:
    large = [*SQUEEZE[:2], node("Add", ["q", "x"], ["g"])]
    assert left_alone(distribute_gate.run, gated(large, {"w": random_weight(rng, 4, 4, 1, 1)}))


def test_product_with_a_second_reader_is_left_alone(rng: np.random.Generator) -> None:
    weights = {"w": random_weight(rng, 4, 4, 1, 1)}
    assert left_alone(distribute_gate.run, gated(SQUEEZE, weights, outputs=("y", "m")))


def test_gate_of_another_type_is_left_alone() -> None:
    gate = [node("GlobalAveragePool", ["x"], ["g"])]
    assert left_alone(distribute_gate.run, gated(gate, {}, dtype=TensorProto.FLOAT16))


# Transposed convolutions.


def transposed(
    rng: np.random.Generator, shape: tuple[int, ...] = (3, 5, 2, 2), opset: int = 17, **attributes: Any
) -> onnx.ModelProto:
    weights = {
        "w": random_weight(rng, *shape),
        "b": random_weight(rng, shape[1] * attributes.get("group", 1)),
    }
    nodes = [node("ConvTranspose", ["x", "w", "b"], ["y"], **{"strides": [2, 2], **attributes})]
    return model_of(nodes, weights, {"x": ("N", shape[0], 4, 6)}, opset=opset)


@pytest.mark.parametrize("block", [2, 3])
def test_transposed_convolution_without_overlap_becomes_pointwise(
    block: int, rng: np.random.Generator
) -> None:
    before = transposed(rng, (3, 5, block, block), strides=[block, block])
    after = rewritten(conv_transpose_to_depth.run, before)
    assert operators(after) == ["Conv", "DepthToSpace"]


def test_transposed_convolution_without_bias_becomes_pointwise(rng: np.random.Generator) -> None:
    before = transposed(rng)
    del before.graph.node[0].input[2:]
    assert operators(rewritten(conv_transpose_to_depth.run, before)) == ["Conv", "DepthToSpace"]


@cases(
    "options",
    [
        {"shape": (3, 5, 3, 3)},
        {"shape": (3, 5, 2, 3)},
        {"shape": (4, 2, 2, 2), "group": 2},
        {"pads": [1, 1, 0, 0]},
        {"output_padding": [1, 1]},
        {"shape": (3, 5, 1, 1), "strides": [1, 1]},
        {"dilations": [2, 2]},
        {"output_shape": [8, 12]},
        {"opset": 10},
    ],
)
def test_transposed_convolution_of_another_kind_is_left_alone(
    options: dict[str, Any], rng: np.random.Generator
) -> None:
    assert left_alone(conv_transpose_to_depth.run, transposed(rng, **options))


def test_batch_normalization_and_transposed_convolution_become_pointwise(rng: np.random.Generator) -> None:
    before = transposed(rng)
    before.graph.node[0].output[0] = "c"
    before.graph.node.append(node("BatchNormalization", ["c", "gamma", "beta", "mean", "var"], ["y"]))
    for name in ("gamma", "beta", "mean", "var"):
        value = (rng.random(5) + 0.5).astype(np.float32)
        before.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    after = rewritten(conv_transpose_to_depth.run, rewritten(fold_affine.run, before))
    assert operators(after) == ["Conv", "DepthToSpace"]


# Slices of every second row and column.


def focused(
    rng: np.random.Generator, parts: Sequence[tuple[int, int]], *, end: int = 1 << 40, **attributes: Any
) -> onnx.ModelProto:
    """Return x [N, 3, 12, 16] -> a Slice for row and column of each part -> Concat -> Conv 3x3 -> y."""
    weights: dict[str, Array] = {
        "w": random_weight(rng, 5, 3 * len(parts), 3, 3),
        "b": random_weight(rng, 5),
        "end": np.array([end]),
        "two": np.array([2]),
        "three": np.array([3]),
    }
    nodes = []
    for number, (row, column) in enumerate(parts):
        weights |= {f"row{number}": np.array([row]), f"column{number}": np.array([column])}
        nodes += [
            node("Slice", ["x", f"row{number}", "end", "two", "two"], [f"rows{number}"]),
            node("Slice", [f"rows{number}", f"column{number}", "end", "three", "two"], [f"part{number}"]),
        ]
    nodes.append(node("Concat", [f"part{number}" for number in range(len(parts))], ["deep"], axis=1))
    nodes.append(node("Conv", ["deep", "w", "b"], ["y"], **attributes))
    return model_of(nodes, weights, {"x": ("N", 3, 12, 16)})


QUARTERS = [(0, 0), (1, 0), (0, 1), (1, 1)]


@cases("attributes", [{}, {"pads": [1, 1, 1, 1]}, {"pads": [1, 0, 0, 1]}])
@cases("parts", [QUARTERS, QUARTERS[1:3], [(1, 1), (1, 1)]])
def test_every_second_row_and_column_is_read_by_a_convolution_of_stride_2(
    parts: list[tuple[int, int]], attributes: dict[str, Any], rng: np.random.Generator
) -> None:
    after = drop_unused(rewritten(fold_slices.run, focused(rng, parts, **attributes)))
    assert operators(after) == ["Conv"]


@pytest.mark.parametrize(
    "options", [{"strides": [2, 2]}, {"dilations": [2, 2]}, {"end": 6}, {"auto_pad": "SAME_UPPER"}], ids=str
)
def test_slices_before_another_convolution_or_of_a_part_are_left_alone(
    options: dict[str, Any], rng: np.random.Generator
) -> None:
    assert left_alone(fold_slices.run, focused(rng, QUARTERS, **options))


def test_first_rows_alone_are_left_alone(rng: np.random.Generator) -> None:
    """Of an odd number of rows they are one more than a convolution of stride 2 gives."""
    assert left_alone(fold_slices.run, focused(rng, QUARTERS[::2]))


# DepthToSpace.


def upscaled(
    rng: np.random.Generator,
    after: Sequence[NodeProto],
    outs: int = 4,
    *,
    mode: str = "CRD",
    block: int = 2,
    outputs: Sequence[str] = ("y",),
) -> onnx.ModelProto:
    """x [N, 3, 4, 6] -> Conv -> DepthToSpace -> s [N, 16, ...] -> `after`, with weights v, c to `outs`."""
    nodes = [
        node("Conv", ["x", "w", "b"], ["d"]),
        node("DepthToSpace", ["d"], ["s"], blocksize=block, mode=mode),
        *after,
    ]
    channels = 16 * block * block
    weights = {
        "w": random_weight(rng, channels, 3, 1, 1),
        "b": random_weight(rng, channels),
        "v": random_weight(rng, outs, 16, 1, 1),
        "c": random_weight(rng, outs),
    }
    read = {name for item in nodes for name in item.input}
    kept = {name: value for name, value in weights.items() if name in read}
    return model_of(nodes, kept, {"x": ("N", 3, 4, 6)}, outputs)


def decoder(second_block: int) -> list[NodeProto]:
    return [
        node("Relu", ["s"], ["r"]),
        node("Conv", ["r", "v", "c"], ["e"]),
        node("DepthToSpace", ["e"], ["t"], blocksize=second_block, mode="CRD"),
        node("Sigmoid", ["t"], ["y"]),
    ]


@pytest.mark.parametrize(("first", "second", "outs"), [(2, 2, 4), (3, 1, 1), (2, 1, 3), (2, 1, 4)])
def test_decoder_of_two_steps_ends_with_one_depth_to_space(
    first: int, second: int, outs: int, rng: np.random.Generator
) -> None:
    before = upscaled(rng, decoder(second), outs, block=first)
    after = rewritten(defer_depth_to_space.run, before)
    assert operators(after) == ["Conv", "Relu", "Conv", "Sigmoid", "DepthToSpace"]


def test_steps_of_different_blocks_become_one_in_the_right_order(rng: np.random.Generator) -> None:
    nodes = [node("DepthToSpace", ["s"], ["y"], blocksize=4, mode="CRD")]
    after = rewritten(defer_depth_to_space.run, upscaled(rng, nodes, block=3))
    assert operators(after) == ["Conv", "DepthToSpace"]


def test_transposed_convolutions_in_a_row_end_with_one_depth_to_space(rng: np.random.Generator) -> None:
    nodes = [
        node("ConvTranspose", ["x", "w", "b"], ["d"], strides=[2, 2]),
        node("Relu", ["d"], ["r"]),
        node("ConvTranspose", ["r", "v"], ["y"], strides=[2, 2]),
    ]
    weights = {
        "w": random_weight(rng, 5, 16, 2, 2),
        "b": random_weight(rng, 16),
        "v": random_weight(rng, 16, 1, 2, 2),
    }
    before = model_of(nodes, weights, {"x": ("N", 5, 4, 6)})
    deep = rewritten(conv_transpose_to_depth.run, before)
    assert operators(rewritten(defer_depth_to_space.run, deep)) == ["Conv", "Relu", "Conv", "DepthToSpace"]


def test_wide_convolution_after_depth_to_space_stays_there(rng: np.random.Generator) -> None:
    nodes = [node("Conv", ["s", "v", "c"], ["y"])]
    assert left_alone(defer_depth_to_space.run, upscaled(rng, nodes, 5))


@cases(
    ("nodes", "options"),
    [
        ([node("Relu", ["s"], ["y"])], {"mode": "DCR"}),
        ([node("Relu", ["s"], ["y"])], {"outputs": ("y", "s")}),
        ([node("HardSigmoid", ["s"], ["g"]), node("Mul", ["s", "g"], ["y"])], {}),
        ([node("Conv", ["s", "v", "c"], ["y"], pads=[1, 1, 1, 1])], {}),
        ([node("Conv", ["s", "v", "c"], ["y"], strides=[2, 2])], {}),
        ([node("Softmax", ["s"], ["y"], axis=3)], {}),
        ([node("DepthToSpace", ["s"], ["y"], blocksize=2, mode="DCR")], {}),
    ],
    ids=["other order", "an output", "two readers", "padded", "strided", "along a row", "then other order"],
)
def test_depth_to_space_stays_where_it_cannot_come_later(
    nodes: Sequence[NodeProto], options: dict[str, Any], rng: np.random.Generator
) -> None:
    assert left_alone(defer_depth_to_space.run, upscaled(rng, nodes, **options))


def test_depth_to_space_of_what_others_read_too_is_not_merged(rng: np.random.Generator) -> None:
    nodes = [node("DepthToSpace", ["s"], ["y"], blocksize=2, mode="CRD")]
    assert left_alone(defer_depth_to_space.run, upscaled(rng, nodes, outputs=("y", "d")))


def test_hard_swishes_without_names_get_no_equal_names(rng: np.random.Generator) -> None:
    nodes = []
    for source, result in (("x", "a"), ("a", "y")):
        nodes += [
            node("Add", [source, "three"], [f"{result}1"]),
            node("Clip", [f"{result}1", "zero", "six"], [result]),
        ]
    weights = {name: np.float32(value) for name, value in (("zero", 0), ("three", 3), ("six", 6))}
    after = rewritten(fuse_hardswish.run, model_of(nodes, weights, {"x": ("N", 4)}))
    assert operators(after) == ["HardSigmoid", "Mul", "HardSigmoid", "Mul"]
