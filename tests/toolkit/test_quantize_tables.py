"""Embedding tables in int8."""

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.toolkit.small_models import Array, assert_valid, node, operators, run, snr_db

from edgekit_runtime.sessions.litert.session import LiteRtOptions, LiteRtSession
from edgekit_toolkit.onnx_graph.ort_graph import optimise_as_engine
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import Form, build, stored_layers
from edgekit_toolkit.quantize.litert.quantizer import LiteRtQuantizer
from edgekit_toolkit.quantize.onnx.embedding_tables import int8_tables
from edgekit_toolkit.tflite.check import convert_checked

ROWS, COLUMNS = 500, 32


def text_model(
    table: Array | None = None, *, axis: int = 0, shape: Sequence[int | str] = (2, 7)
) -> onnx.ModelProto:
    """Ids [2, 7] -> rows of a table -> their mean -> a product."""
    rng = np.random.default_rng(1)
    if table is None:
        # Rows of very different sizes, as frequent and rare words have.
        table = rng.normal(size=(ROWS, COLUMNS)) * rng.lognormal(0, 2, size=(ROWS, 1))
    stored = {
        "table": table.astype(np.float32),
        "w": (rng.normal(size=(COLUMNS, 12)) / 6).astype(np.float32),
    }
    nodes = [
        node("Gather", ["table", "ids"], ["rows"], name="embedding", axis=axis),
        node("ReduceMean", ["rows"], ["mean"], axes=[1], keepdims=0, name="pool"),
        node("MatMul", ["mean", "w"], ["y"], name="head"),
    ]
    graph = helper.make_graph(
        nodes, "text", [helper.make_tensor_value_info("ids", TensorProto.INT64, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in stored.items()],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.shape_inference.infer_shapes(made)


IDS = {"ids": np.array([[0, 1, 2, 3, -1, -ROWS, ROWS - 1], [5, 5, 5, 100, 200, 300, 400]], np.int64)}


def test_table_becomes_int8_with_a_scale_a_row() -> None:
    model = text_model()
    made = int8_tables(model)
    assert made is not None
    assert_valid(made)
    sizes = {
        tensor.data_type: list(tensor.dims) for tensor in made.graph.initializer if "table" in tensor.name
    }
    assert sizes == {TensorProto.INT8: [ROWS, COLUMNS], TensorProto.FLOAT: [ROWS, 1]}
    assert operators(made)[:4] == ["Gather", "Cast", "Gather", "Mul"]
    table = numpy_helper.to_array(model.graph.initializer[0])
    for row in (0, 17, ROWS - 1):  # each row on its own, however small
        feeds = {"ids": np.full((2, 7), row, np.int64)}
        assert snr_db(run(model, feeds)["y"], run(made, feeds)["y"]) > 30, table[row]


@pytest.mark.int8_products  # sums are exact where the engine may optimise
@pytest.mark.parametrize("kind", [forms.INT8_WEIGHTS, forms.DYNAMIC_INT8], ids=["int8 weights", "dynamic"])
def test_forms_of_a_text_model_are_a_quarter_of_it(kind: str) -> None:
    model = text_model()
    made = build(model, Form(kind))
    assert made is not None
    assert made.ByteSize() < 0.32 * model.ByteSize()
    assert snr_db(run(model, IDS)["y"], run(made, IDS, optimise=True)["y"]) > 30


def test_report_lists_the_table_as_int8() -> None:
    model = text_model()
    whole, halves = (
        stored_layers(model, Form(forms.INT8_WEIGHTS)),
        stored_layers(model, Form(forms.FLOAT16_WEIGHTS)),
    )
    assert whole["rows"].precision == "int8 weights"
    assert whole["rows"].weight_bytes == pytest.approx(ROWS * (COLUMNS + 2), rel=0.01)  # scales in half
    assert halves["rows"].precision == "fp16 weights"
    assert halves["rows"].weight_bytes == pytest.approx(2 * ROWS * COLUMNS, rel=0.01)
    assert stored_layers(model, Form(forms.FLOAT32))["rows"].precision == "fp32"


def test_table_that_int8_does_not_suit_is_left() -> None:
    assert int8_tables(text_model(np.ones((20, COLUMNS)))) is None  # small
    assert int8_tables(text_model(np.full((ROWS, COLUMNS), np.inf))) is None


def test_litert_looks_up_rows_of_an_int8_table() -> None:
    pytest.importorskip("ai_edge_quantizer")
    converted = convert_checked(text_model(), {}, [IDS])
    quantizer = LiteRtQuantizer(converted, threads=1)
    made = quantizer.build(Form(forms.INT8_WEIGHTS))
    assert made is not None
    assert len(made.content) < 0.45 * len(converted)
    want, got = (_run(content)["y"] for content in (converted, made.content))
    assert snr_db(want, got) > 30


def _run(content: bytes) -> dict[str, Array]:
    session = LiteRtSession(content, LiteRtOptions(threads=1))
    try:
        return {name: value.copy() for name, value in session.run(IDS).items()}
    finally:
        session.close()


POSITIONS, WIDTH = 256, 64


def position_model(reader: str) -> onnx.ModelProto:
    """x [1, 128, 64] plus the first rows of a table of positions, then a product."""
    rng = np.random.default_rng(5)
    rows = POSITIONS if reader == "slice" else 128
    stored: dict[str, Array] = {
        "table": rng.normal(size=(1, rows, WIDTH)).astype(np.float32),
        "w": (rng.normal(size=(WIDTH, 16)) / 8).astype(np.float32),
    }
    nodes = []
    if reader == "slice":  # as exporters write positions[:, :length], with a length that sizes set
        stored |= {"one": np.array([1]), "zero": np.array([0])}
        nodes += [
            node("Shape", ["x"], ["length"], start=1, end=2, name="length"),
            node("Slice", ["table", "zero", "length", "one"], ["positions"], name="cut"),
        ]
    nodes += [
        node("Add", ["x", "positions" if reader == "slice" else "table"], ["h"], name="add"),
        node("MatMul", ["h", "w"], ["y"], name="head"),
    ]
    if reader == "coordinates":  # what follows the last product, as a detector adds its grid
        nodes = [
            node("MatMul", ["x", "v"], ["z"], name="head"),
            node("Add", ["z", "table"], ["y"], name="add"),
        ]
        stored["v"] = (rng.normal(size=(WIDTH, WIDTH)) / 8).astype(np.float32)
    made = helper.make_model(
        helper.make_graph(
            nodes,
            "positions",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "T", WIDTH])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(value, name) for name, value in stored.items()],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    return onnx.shape_inference.infer_shapes(made)


@pytest.mark.parametrize(("reader", "layer"), [("add", "h"), ("slice", "positions")])
def test_table_that_is_added_or_sliced_becomes_int8_of_about_the_same_values(reader: str, layer: str) -> None:
    model = position_model(reader)
    made = build(model, Form(forms.INT8_WEIGHTS))
    assert made is not None
    assert_valid(made)
    assert made.ByteSize() < 0.35 * model.ByteSize()
    x = {"x": np.random.default_rng(6).normal(size=(1, 128, WIDTH)).astype(np.float32)}
    assert snr_db(run(model, x)["y"], run(made, x)["y"]) > 38
    stored = stored_layers(model, Form(forms.INT8_WEIGHTS))[layer]
    assert stored.precision == "int8 weights"
    assert stored.weight_bytes < 0.35 * model.graph.initializer[0].ByteSize()


@pytest.mark.parametrize("reader", ["add", "slice"])
def test_engine_widens_an_added_table_once(reader: str) -> None:
    made = build(position_model(reader), Form(forms.INT8_WEIGHTS))
    assert made is not None
    kinds = {item.op_type for item in optimise_as_engine(made, {"T": 128}).nodes}
    assert not kinds & {"Cast", "Mul"}


def test_table_that_the_mix_leaves_out_has_float16_values() -> None:
    model = position_model("slice")
    form = Form(forms.INT8_WEIGHTS, layers=frozenset({"y"}))
    made = build(model, form)
    assert made is not None
    assert stored_layers(model, form)["positions"].precision == "fp16 weights"


def test_coordinates_behind_the_last_product_are_not_int8() -> None:
    made = build(position_model("coordinates"), Form(forms.INT8_WEIGHTS))
    assert made is not None
    types = [tensor.data_type for tensor in made.graph.initializer if len(tensor.dims) == 3]
    assert types == [TensorProto.FLOAT16]


def test_table_whose_columns_are_looked_up_becomes_int8_as_a_whole() -> None:
    rng = np.random.default_rng(7)
    model = text_model(rng.normal(size=(COLUMNS, ROWS)), axis=1, shape=(2,))
    made = int8_tables(model)
    assert made is not None
    assert operators(made)[:3] == ["Cast", "Mul", "Gather"]
