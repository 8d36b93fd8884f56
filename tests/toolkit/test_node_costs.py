"""Work of kernels against counts by hand and against totals that the literature gives."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from tests.toolkit.cases import cases

from edgekit_runtime.errors import ModelError
from edgekit_toolkit.costs.onnx_operators import node_costs
from edgekit_toolkit.costs.target_model import NodeCost
from edgekit_toolkit.onnx_graph.specs import free_dims, tensor_specs

SHARED = Path(__file__).parents[3] / "shared" / "models" / "models"
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
Shape = Sequence[int | str | None]


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, Shape],
    constants: dict[str, Any] | None = None,
    outputs: Sequence[str] = ("y",),
    dtype: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(name, dtype, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, dtype, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def node(op: str, inputs: Sequence[str], output: str = "y", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), [output], name=f"{op}_{output}", **attributes)


def weights(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def only(costs: Sequence[NodeCost]) -> NodeCost:
    assert len(costs) == 1, costs
    return costs[0]


def quantized(name: str, *, static: bool = False) -> list[onnx.NodeProto]:
    """Nodes that turn `name` (float, or int8 where static) into `name`_d."""
    dequantize = node("DequantizeLinear", [name if static else f"{name}_q", "s", "z"], f"{name}_d")
    return [dequantize] if static else [node("QuantizeLinear", [name, "s", "z"], f"{name}_q"), dequantize]


SCALES = {"s": np.float32(0.1), "z": np.int8(0)}


def test_conv_counts_output_elements_times_kernel_and_input_channels() -> None:
    graph = model(
        [node("Conv", ["x", "w"], pads=[1, 1, 1, 1])], {"x": [1, 3, 8, 8]}, {"w": weights(16, 3, 3, 3)}
    )
    cost = only(node_costs(graph))
    assert cost.macs == 16 * 8 * 8 * 3 * 3 * 3
    assert (cost.bytes_read, cost.bytes_written) == (3 * 8 * 8 * 4, 16 * 8 * 8 * 4)
    assert cost.weight_bytes == 16 * 3 * 3 * 3 * 4
    assert cost.precision == "fp32"


@pytest.mark.parametrize(
    ("attributes", "x", "w", "macs"),
    [
        ({"strides": [2, 2], "pads": [1, 1, 1, 1]}, [1, 3, 8, 8], (16, 3, 3, 3), 16 * 4 * 4 * 27),
        ({"group": 8}, [1, 8, 10, 10], (8, 1, 3, 3), 8 * 8 * 8 * 9),
        ({}, [1, 4, 20], (6, 4, 5), 6 * 16 * 4 * 5),
    ],
    ids=["strided", "depthwise", "one-dimensional"],
)
def test_conv_counts_outputs_times_the_inputs_of_each(
    attributes: dict[str, Any], x: list[int | str], w: tuple[int, ...], macs: int
) -> None:
    graph = model([node("Conv", ["x", "w"], **attributes)], {"x": x}, {"w": weights(*w)})
    assert only(node_costs(graph)).macs == macs


def test_transposed_conv_counts_input_elements_times_kernel_and_output_channels() -> None:
    graph = model(
        [node("ConvTranspose", ["x", "w"], strides=[2, 2])], {"x": [1, 4, 5, 5]}, {"w": weights(4, 6, 2, 2)}
    )
    cost = only(node_costs(graph))
    assert cost.macs == 4 * 5 * 5 * 6 * 2 * 2
    assert cost.bytes_written == 6 * 10 * 10 * 4


@pytest.mark.parametrize(("trans_a", "shape"), [(0, (2, 30)), (1, (30, 2))])
def test_gemm_counts_rows_by_columns_by_shared_axis(trans_a: int, shape: tuple[int, int]) -> None:
    graph = model(
        [node("Gemm", ["x", "w", "b"], transA=trans_a, transB=1)],
        {"x": shape},
        {"w": weights(10, 30), "b": weights(10)},
    )
    cost = only(node_costs(graph))
    assert cost.macs == 2 * 10 * 30
    assert cost.weight_bytes == (10 * 30 + 10) * 4


@settings(max_examples=30, derandomize=True)
@given(st.lists(st.integers(1, 4), max_size=2), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_batched_matmul_counts_batch_by_rows_by_columns_by_shared_axis(
    batch: list[int], rows: int, shared: int, columns: int
) -> None:
    graph = model([node("MatMul", ["a", "b"])], {"a": [*batch, rows, shared], "b": [*batch, shared, columns]})
    cost = only(node_costs(graph))
    assert cost.macs == int(np.prod(batch)) * rows * shared * columns
    assert cost.weight_bytes == 0


def test_matmul_that_broadcasts_a_weight_counts_the_batch() -> None:
    graph = model([node("MatMul", ["x", "w"])], {"x": [5, 7, 30]}, {"w": weights(30, 2)})
    assert only(node_costs(graph)).macs == 5 * 7 * 30 * 2


def test_lstm_counts_gates_at_each_step() -> None:
    graph = model(
        [node("LSTM", ["x", "w", "r"], hidden_size=4)],
        {"x": [10, 1, 3]},
        {"w": weights(1, 16, 3), "r": weights(1, 16, 4)},
    )
    assert only(node_costs(graph)).macs == 10 * 4 * 4 * (3 + 4)


def test_elementwise_counts_bytes_and_no_macs() -> None:
    cost = only(node_costs(model([node("Add", ["a", "b"])], {"a": [2, 8], "b": [2, 8]})))
    assert (cost.macs, cost.bytes_read, cost.bytes_written) == (0, 2 * 64, 64)


def test_gather_reads_what_it_writes() -> None:
    graph = model([node("Gather", ["table", "i"])], {}, {"table": weights(1000, 8)})
    graph.graph.input.append(helper.make_tensor_value_info("i", TensorProto.INT64, [3]))
    cost = only(node_costs(graph))
    assert (cost.bytes_read, cost.weight_bytes, cost.bytes_written) == (0, 3 * 8 * 4, 3 * 8 * 4)


def test_half_precision_halves_the_bytes() -> None:
    graph = model(
        [node("Conv", ["x", "w"])],
        {"x": [1, 4, 4, 4]},
        {"w": weights(4, 4, 1, 1).astype(np.float16)},
        dtype=TensorProto.FLOAT16,
    )
    cost = only(node_costs(graph))
    assert (cost.precision, cost.bytes_read, cost.weight_bytes) == ("fp16", 128, 32)


@cases(
    "tail",
    [
        [node("Relu", ["c"])],
        [node("Clip", ["c", "low", "high"])],
        [node("BatchNormalization", ["c", "k", "k", "k", "k"], "n"), node("LeakyRelu", ["n"])],
        [node("Add", ["c", "k4"], "n"), node("Sigmoid", ["n"])],
    ],
    ids=["relu", "relu6", "batch-norm", "bias"],
)
def test_what_engines_fuse_behind_a_conv_is_no_kernel(tail: list[onnx.NodeProto]) -> None:
    constants = {
        "w": weights(4, 3, 1, 1),
        "k": weights(4),
        "k4": weights(4, 1, 1),
        "low": np.float32(0),
        "high": np.float32(6),
    }
    graph = model([node("Conv", ["x", "w"], "c"), *tail], {"x": [1, 3, 8, 8]}, constants)
    cost = only(node_costs(graph))
    assert (cost.op, cost.bytes_written) == ("Conv", 4 * 8 * 8 * 4)


def test_activation_of_a_conv_that_others_read_is_a_kernel() -> None:
    graph = model(
        [node("Conv", ["x", "w"], "c"), node("Relu", ["c"], "r"), node("Add", ["c", "r"])],
        {"x": [1, 3, 8, 8]},
        {"w": weights(3, 3, 1, 1)},
    )
    assert [cost.op for cost in node_costs(graph)] == ["Conv", "Relu", "Add"]


def test_sum_of_two_convs_is_a_kernel() -> None:
    graph = model(
        [node("Conv", ["x", "w"], "a"), node("Conv", ["x", "w"], "b"), node("Add", ["a", "b"])],
        {"x": [1, 3, 8, 8]},
        {"w": weights(3, 3, 1, 1)},
    )
    assert [cost.op for cost in node_costs(graph)] == ["Conv", "Conv", "Add"]


def test_views_and_what_depends_on_constants_only_are_no_kernels() -> None:
    graph = model(
        [
            node("Transpose", ["w0"], "w", perm=[1, 0]),
            node("Shape", ["x"], "shape"),
            node("Gather", ["shape", "first"], "n"),
            node("Concat", ["n", "rest"], "to", axis=0),
            node("Reshape", ["x", "to"], "flat"),
            node("MatMul", ["flat", "w"]),
        ],
        {"x": [2, 3, 4]},
        {"w0": weights(5, 12), "first": np.array([0]), "rest": np.array([12])},
    )
    cost = only(node_costs(graph))
    assert (cost.op, cost.macs, cost.weight_bytes) == ("MatMul", 2 * 12 * 5, 5 * 12 * 4)


def test_padding_that_the_graph_computes_is_known() -> None:
    graph = model(
        [
            node(
                "ConstantOfShape", ["four"], "zeros", value=numpy_helper.from_array(np.array([0], np.int64))
            ),
            node("Concat", ["zeros", "two"], "begin_end", axis=0),
            node("Pad", ["x", "begin_end"], "p"),
            node("Conv", ["p", "w"]),
        ],
        {"x": [1, 2, 6, 6]},
        {"four": np.array([4]), "two": np.array([0, 0, 2, 2]), "w": weights(1, 2, 3, 3)},
    )
    assert [(cost.op, cost.macs) for cost in node_costs(graph)] == [("Pad", 0), ("Conv", 6 * 6 * 2 * 9)]


def qdq_conv(tail: Sequence[onnx.NodeProto], bias: Any = None) -> onnx.ModelProto:
    constants = SCALES | {"w": np.ones((4, 3, 1, 1), np.int8)}
    names = ["x_d", "w_d"]
    if bias is not None:
        constants["b"], names = bias, [*names, "b"]
    nodes = [*quantized("x"), *quantized("w", static=True), node("Conv", names, "c"), *tail]
    return model(nodes, {"x": [1, 3, 8, 8]}, constants)


def test_conv_between_dequantize_and_quantize_is_int8() -> None:
    graph = qdq_conv([*quantized("c"), node("Identity", ["c_d"])])
    costs = node_costs(graph)
    conv = next(cost for cost in costs if cost.op == "Conv")
    assert conv.precision == "int8"
    assert conv.macs == 4 * 8 * 8 * 3
    assert (conv.bytes_read, conv.weight_bytes, conv.bytes_written) == (3 * 64, 4 * 3, 4 * 64)


def test_quantize_at_the_input_and_dequantize_at_the_output_are_what_is_left() -> None:
    costs = node_costs(qdq_conv([*quantized("c"), node("Identity", ["c_d"])]))
    assert [cost.op for cost in costs] == ["QuantizeLinear", "Conv", "DequantizeLinear"]


def test_fused_activation_between_conv_and_quantize_keeps_int8() -> None:
    graph = qdq_conv([node("Relu", ["c"], "r"), *quantized("r"), node("Identity", ["r_d"])])
    assert {cost.op: cost.precision for cost in node_costs(graph)}["Conv"] == "int8"


def test_float_bias_keeps_int8() -> None:
    graph = qdq_conv([*quantized("c"), node("Identity", ["c_d"])], bias=weights(4))
    conv = next(cost for cost in node_costs(graph) if cost.op == "Conv")
    assert (conv.precision, conv.weight_bytes) == ("int8", 4 * 3 + 4 * 4)


def test_conv_whose_output_stays_float_is_not_int8() -> None:
    costs = node_costs(qdq_conv([node("Softmax", ["c"])]))
    assert {cost.op: cost.precision for cost in costs}["Conv"] == "fp32"


def test_conv_whose_output_stays_float_is_int8_where_the_engine_writes_float() -> None:
    costs = node_costs(qdq_conv([node("Softmax", ["c"])]), float_outputs=True)
    assert {cost.op: cost.precision for cost in costs}["Conv"] == "int8"


def test_sum_of_dequantized_tensors_is_int8_only_when_both_are() -> None:
    def add(second: str) -> NodeCost:
        nodes = [*quantized("a"), *quantized("b"), node("Add", ["a_d", second], "t"), *quantized("t")]
        graph = model([*nodes, node("Identity", ["t_d"])], {"a": [1, 8], "b": [1, 8]}, SCALES)
        return next(cost for cost in node_costs(graph) if cost.op == "Add")

    assert add("b_d").precision == "int8"
    assert add("b").precision == "fp32"


def test_quantized_operator_is_int8() -> None:
    graph = model(
        [
            node("QuantizeLinear", ["x", "s", "z"], "q"),
            node("QLinearConv", ["q", "s", "z", "w", "s", "z", "s", "z"], "c"),
            node("DequantizeLinear", ["c", "s", "z"]),
        ],
        {"x": [1, 3, 4, 4]},
        SCALES | {"w": np.ones((2, 3, 1, 1), np.int8)},
    )
    conv = next(cost for cost in node_costs(graph) if cost.op == "QLinearConv")
    assert (conv.precision, conv.macs) == ("int8", 2 * 16 * 3)


def test_product_whose_output_stays_float_is_int8_where_the_engine_can_write_float() -> None:
    graph = qdq_conv([node("Softmax", ["c"])])
    assert [(cost.op, cost.precision) for cost in node_costs(graph, float_outputs=True)] == [
        ("QuantizeLinear", "fp32"),
        ("Conv", "int8"),
        ("Softmax", "fp32"),
    ]


def test_sum_whose_output_stays_float_is_float_though_products_can_write_float() -> None:
    nodes = [*quantized("a"), *quantized("b"), node("Add", ["a_d", "b_d"])]
    graph = model(nodes, {"a": [1, 8], "b": [1, 8]}, SCALES)
    costs = {cost.op: cost.precision for cost in node_costs(graph, float_outputs=True)}
    assert costs["Add"] == "fp32"


def integer_model(nodes: Sequence[onnx.NodeProto], shape: Shape, weight: np.ndarray) -> onnx.ModelProto:
    """Of int8 data `q` [shape] and the constant `w`."""
    graph = model(nodes, {}, SCALES | {"w": weight})
    made = {"ConvInteger": TensorProto.INT32, "MatMulInteger": TensorProto.INT32}
    made |= {"QLinearConv": TensorProto.INT8, "QLinearMatMul": TensorProto.INT8}
    graph.graph.output[0].type.tensor_type.elem_type = made.get(nodes[-1].op_type, TensorProto.FLOAT)
    graph.graph.input.append(helper.make_tensor_value_info("q", TensorProto.INT8, shape))
    return graph


# By hand: elements of the output times the products of each. Bytes as they are stored: 4 of each scale, 1 of
# each zero point.
@pytest.mark.parametrize(
    ("operator", "shape", "weight", "macs", "moved"),
    [
        (node("ConvInteger", ["q", "w"]), [1, 3, 5, 5], (2, 3, 2, 2), 2 * 16 * 12, (75, 24, 32 * 4)),
        (node("MatMulInteger", ["q", "w"]), [4, 6], (6, 5), 4 * 5 * 6, (24, 30, 20 * 4)),
        (
            node("QLinearConv", ["q", "s", "z", "w", "s", "z", "s", "z"]),
            [1, 3, 5, 5],
            (2, 3, 2, 2),
            2 * 16 * 12,
            (75, 24 + 15, 32),
        ),
        (
            node("QLinearMatMul", ["q", "s", "z", "w", "s", "z", "s", "z"]),
            [4, 6],
            (6, 5),
            4 * 5 * 6,
            (24, 30 + 15, 20),
        ),
    ],
    ids=lambda value: value.op_type if isinstance(value, onnx.NodeProto) else None,
)
def test_product_of_integers_counts_its_work_and_its_bytes_as_int8(
    operator: onnx.NodeProto, shape: Shape, weight: tuple[int, ...], macs: int, moved: tuple[int, ...]
) -> None:
    cost = only(node_costs(integer_model([operator], shape, np.ones(weight, np.int8))))
    assert (cost.op, cost.macs, cost.precision) == (operator.op_type, macs, "int8")
    assert (cost.bytes_read, cost.weight_bytes, cost.bytes_written) == moved


def test_float_around_an_integer_product_is_taken_in() -> None:
    """The QuantizeLinear before reads float; the DequantizeLinear behind has a reader in float."""
    nodes = [
        node("DequantizeLinear", ["q", "s", "z"], "d"),
        node("QuantizeLinear", ["d", "s", "z"], "again"),
        node("QLinearMatMul", ["again", "s", "z", "w", "s", "z", "s", "z"], "p"),
        node("DequantizeLinear", ["p", "s", "z"]),
    ]
    costs = node_costs(integer_model(nodes, [4, 6], np.ones((6, 5), np.int8)))
    assert [cost.op for cost in costs] == ["QLinearMatMul", "DequantizeLinear"]


@cases("op", ["Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout"])
def test_view_is_no_kernel(op: str) -> None:
    constants = {"Reshape": {"to": np.array([1, 8])}, "Unsqueeze": {"to": np.array([0])}}.get(op, {})
    graph = model([node(op, ["x", *constants], "v"), node("Exp", ["v"])], {"x": [8, 1]}, constants)
    assert [cost.op for cost in node_costs(graph)] == ["Exp"]


ACTIVATIONS = ["Relu", "Clip", "LeakyRelu", "Sigmoid", "Tanh", "HardSigmoid"]


@cases("op", ACTIVATIONS)
def test_activation_is_a_kernel_unless_it_stands_behind_a_product(op: str) -> None:
    behind = model([node("MatMul", ["x", "w"], "p"), node(op, ["p"])], {"x": [2, 8]}, {"w": weights(8, 4)})
    assert [cost.op for cost in node_costs(behind)] == ["MatMul"]
    alone = model([node("Exp", ["x"], "e"), node(op, ["e"])], {"x": [2, 8]})
    assert [cost.op for cost in node_costs(alone)] == ["Exp", op]


@pytest.mark.parametrize(
    ("operator", "read"),
    [
        (node("Slice", ["x", "zero", "two", "zero"]), 2 * 8 * 4),
        (node("Gather", ["x", "zero"]), 8 * 4),
        (node("GatherND", ["x", "zero"]), 8 * 4),
        (node("GatherElements", ["x", "places"]), 2 * 4),
    ],
    ids=lambda value: value.op_type if isinstance(value, onnx.NodeProto) else None,
)
def test_operator_that_picks_reads_what_it_writes(operator: onnx.NodeProto, read: int) -> None:
    constants = {"zero": np.array([0]), "two": np.array([2]), "places": np.array([[0, 1]])}
    cost = only(node_costs(model([operator], {"x": [10, 8]}, constants)))
    assert (cost.bytes_read, cost.bytes_written, cost.weight_bytes) == (read, read, 0)


@cases(("op", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
@cases(("layout", "shape"), [(0, [10, 2, 3]), (1, [2, 10, 3])])
@cases(("direction", "sides"), [("forward", 1), ("bidirectional", 2)])
def test_recurrent_layer_counts_gates_and_steps_of_both_directions(
    op: str, gates: int, layout: int, shape: Shape, direction: str, sides: int
) -> None:
    operator = node(op, ["x", "w", "r"], hidden_size=5, layout=layout, direction=direction)
    constants = {"w": weights(sides, 5 * gates, 3), "r": weights(sides, 5 * gates, 5)}
    cost = only(node_costs(model([operator], {"x": shape}, constants)))
    assert cost.macs == 2 * 10 * sides * gates * 5 * (3 + 5)
    assert cost.steps == 10 * sides


def test_operator_that_is_not_recurrent_takes_one_step() -> None:
    assert only(node_costs(model([node("Exp", ["x"])], {"x": [10, 2, 3]}))).steps == 1


@pytest.mark.parametrize("bias", [[], ["b"]])
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_grouped_conv_counts_the_channels_of_a_group(op: str, bias: list[str]) -> None:
    """Kernels of 2 by 2, two groups of two channels; one output pixel of a Conv, four of its transpose."""
    graph = model(
        [node(op, ["x", "w", *bias], group=2, strides=[2, 2])],
        {"x": [1, 4, 2, 2] if op == "Conv" else [1, 4, 1, 1]},
        {"w": weights(4, 2, 2, 2)} | {name: weights(4) for name in bias},
    )
    assert only(node_costs(graph)).macs == 4 * 2 * 2 * 2


def test_free_dimensions_are_named() -> None:
    graph = model([node("Relu", ["x"])], {"x": ["N", 3, None, "W"]})
    graph.graph.output[0].type.CopyFrom(graph.graph.input[0].type)
    assert free_dims(tensor_specs(graph)[0]) == ("N", "x_2", "W")


def test_bound_batch_scales_the_work() -> None:
    graph = model([node("MatMul", ["x", "w"])], {"x": ["N", 8]}, {"w": weights(8, 2)})
    assert only(node_costs(graph, {"N": 1})).macs * 5 == only(node_costs(graph, {"N": 5})).macs


def test_unbound_dimension_is_refused_with_its_name() -> None:
    graph = model([node("Relu", ["x"])], {"x": ["N", 3, None]})
    with pytest.raises(ModelError, match=r"input 'x': axis 2: .* 'x_2', got none; bind it"):
        node_costs(graph, {"N": 1})


def test_dimension_bound_to_nothing_is_refused() -> None:
    graph = model([node("Relu", ["x"])], {"x": ["N"]})
    with pytest.raises(ModelError, match="size of at least 1"):
        node_costs(graph, {"N": 0})


def test_model_is_left_as_it_is() -> None:
    graph = model([node("Relu", ["x"])], {"x": ["N", 3]})
    before = graph.SerializeToString(deterministic=True)
    node_costs(graph, {"N": 2})
    assert graph.SerializeToString(deterministic=True) == before


def test_shape_that_depends_on_data_is_refused() -> None:
    graph = model([node("NonZero", ["x"], "n"), node("Cast", ["n"], to=TensorProto.FLOAT)], {"x": [4]})
    with pytest.raises(ModelError, match="size that depends on the data; measure"):
        node_costs(graph)


def test_shapes_that_contradict_are_refused() -> None:
    graph = model([node("MatMul", ["a", "b"])], {"a": [2, 3], "b": [4, 5]})
    with pytest.raises(ModelError, match="shapes cannot be inferred"):
        node_costs(graph)


def test_operator_whose_work_cannot_be_counted_is_refused() -> None:
    graph = model([node("Einsum", ["a", "b"], equation="ij,jk->ik")], {"a": [2, 3], "b": [3, 5]})
    with pytest.raises(
        ModelError, match=r"'Einsum_y': the work of operator ai\.onnx::Einsum cannot be counted"
    ):
        node_costs(graph)


def test_mobilenet_like_network_counts_each_layer() -> None:
    nodes, constants = [], {}
    last, ins, expected = "x", 3, 0
    # kind, output channels, stride; 32x32 input, "same" padding.
    size = 32
    for index, (kind, outs, stride) in enumerate(
        [("full", 8, 2), ("depth", 8, 1), ("point", 16, 1), ("depth", 16, 2), ("point", 32, 1)]
    ):
        kernel, group = (1, 1) if kind == "point" else (3, ins if kind == "depth" else 1)
        size //= stride
        constants[f"w{index}"] = weights(outs, ins // group, kernel, kernel)
        pads = [kernel // 2] * 4
        nodes += [
            node("Conv", [last, f"w{index}"], f"c{index}", group=group, strides=[stride] * 2, pads=pads),
            node("Relu", [f"c{index}"], f"r{index}"),
        ]
        expected += size * size * outs * (ins // group) * kernel * kernel
        last, ins = f"r{index}", outs
    nodes += [
        node("GlobalAveragePool", [last], "p"),
        node("Flatten", ["p"], "f"),
        node("Gemm", ["f", "fc"]),
    ]
    costs = node_costs(model(nodes, {"x": [1, 3, 32, 32]}, constants | {"fc": weights(32, 10)}))
    assert sum(cost.macs for cost in costs) == expected + 320
    assert [cost.op for cost in costs] == ["Conv"] * 5 + ["GlobalAveragePool", "Gemm"]


# Millions of multiply-accumulates as torchvision's documentation gives them ("GFLOPS" of the weights), which
# rounds to 0.01 G.
@pytest.mark.parametrize(
    ("name", "macs_m"),
    [
        ("resnet50", 4089),
        ("vgg19", 19632),
        ("squeezenet", 349),
        ("densenet121", 2834),
        ("inception_v1", 1432),
    ],
)
def test_known_network_has_its_published_work(name: str, macs_m: int) -> None:
    path = LIGHT / f"light_{name}.onnx"
    if not path.is_file():
        pytest.skip(f"this onnx release does not carry {path.name}")
    graph = onnx.load(path)
    costs = node_costs(graph, dict.fromkeys(free_dims(tensor_specs(graph)[0]), 1))
    assert sum(cost.macs for cost in costs) / 1e6 == pytest.approx(macs_m, rel=0.01)


@cases(
    ("name", "macs_m"),
    [
        # MobileNets, table 7: 41 million for 0.25 at 224.
        ("mobilenet_v1_025_224_fp32", 41),
        # MLPerf Tiny, table 1 (the models' own counts): 12.5, 7.5 and 2.7 million.
        ("resnet8_cifar10_fp32", 12.5),
        ("mobilenetv1_025_vww_fp32", 7.5),
        ("dscnn_kws_fp32", 2.7),
    ],
)
def test_shared_model_has_its_published_work(name: str, macs_m: float) -> None:
    path = SHARED / f"{name}.onnx"
    if not path.is_file():
        pytest.skip(f"{path.name} is not beside the project (../shared/models)")
    graph = onnx.load(path)
    costs = node_costs(graph, dict.fromkeys(free_dims(tensor_specs(graph)[0]), 1))
    assert sum(cost.macs for cost in costs) / 1e6 == pytest.approx(macs_m, rel=0.02)
