"""Embedding tables in int8."""

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.toolkit.small_models import Array, assert_valid, node, operators, run, snr_db

from edgekit_runtime.sessions.litert.session import LiteRtOptions, LiteRtSession
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
    assert int8_tables(text_model(np.ones((COLUMNS, ROWS)), axis=1)) is None


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
