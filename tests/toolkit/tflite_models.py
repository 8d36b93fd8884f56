"""Conversions for the tests of the TFLite writer, and what is inside the files."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto
from tests.toolkit.small_models import Array, model_of, random_feeds

from edgekit_toolkit.tflite.check import convert_checked


def operators(content: bytes) -> Counter[str]:
    """How often each operator occurs in a TFLite file."""
    from ai_edge_litert import schema_py_generated as schema

    names = {code: name for name, code in vars(schema.BuiltinOperator).items() if isinstance(code, int)}
    model = schema.Model.GetRootAs(content, 0)  # whose tables are read where they lie
    codes = [names[model.OperatorCodes(index).BuiltinCode()] for index in range(model.OperatorCodesLength())]
    graph = model.Subgraphs(0)
    return Counter(codes[graph.Operators(index).OpcodeIndex()] for index in range(graph.OperatorsLength()))


def converted(
    nodes: Sequence[NodeProto],
    weights: Mapping[str, Array],
    shapes: Mapping[str, Sequence[int | str]],
    **options: Any,
) -> Counter[str]:
    """Operators of the TFLite file of a small model, whose outputs have been compared with onnxruntime's."""
    return checked(model_of(nodes, weights, shapes, **options))


def checked(
    model: onnx.ModelProto,
    dims: Mapping[str, int] | None = None,
    feeds: Sequence[Mapping[str, Array]] | None = None,
) -> Counter[str]:
    """Operators of a model's TFLite file, whose outputs have been compared on normal values."""
    if feeds is None:
        rng = np.random.default_rng(5)
        feeds = [random_feeds(model, rng) for _ in range(2)]
    return operators(convert_checked(model, dims or {}, [dict(feed) for feed in feeds]))
