"""Compares operators that were replaced by their definitions with ONNX's reference implementation.

Operators are replaced if the engine fails on them. So the engine cannot compute the outputs of the original
model for a comparison. Instead, the reference implementation computes each replaced operator separately. The
inputs of the operator are taken from a run of the new model.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from edgekit_runtime.errors import BackendError, ModelError
from edgekit_runtime.sessions.ort import OrtOptions
from edgekit_toolkit.onnx_graph.functions import function_operators
from edgekit_toolkit.onnx_graph.index import GraphIndex, with_outputs
from edgekit_toolkit.openings.sessions import open_ort
from edgekit_toolkit.passes.parity import Tolerance, compare
from edgekit_toolkit.samples.generated import Feeds

# The reference computes in numpy, in another order.
_TOLERANCE: Final = Tolerance(range_fraction=1e-4, ulps=64)


def check_reference(original: onnx.ModelProto, written_out: onnx.ModelProto, feeds: Sequence[Feeds]) -> None:
    """Compare the operators that were replaced in `written_out` with ONNX's reference implementation.

    `written_out` is a copy of `original` in which some operators are replaced by their definitions. Operators
    inside control flow are not compared.

    Raises:
        ModelError: A replaced operator differs from the reference, or cannot be compared.
    """
    remaining = {node.op_type for node in written_out.graph.node}
    chosen = function_operators(original).keys() - remaining
    nodes = [node for node in original.graph.node if node.op_type in chosen]
    versions = {item.domain: int(item.version) for item in original.opset_import}
    names = {name for node in nodes for name in (*node.input, *node.output)}
    try:
        for feed in feeds if nodes else ():
            values = _values(written_out, names, feed)
            for node in nodes:
                _check(node, values, versions)
    except BackendError as error:
        listed = ", ".join(sorted(chosen))
        raise ModelError(f"operators {listed} do not run written out: {error}") from error


def _check(node: onnx.NodeProto, values: Feeds, versions: dict[str, int]) -> None:
    inputs = {name: values[name] for name in node.input if name}
    outputs = [name for name in node.output if name]
    try:
        evaluator = ReferenceEvaluator(node, opsets=versions)
        results: Any = evaluator.run(outputs, inputs)
    except Exception as error:  # the reference lacks cases, and raises anything
        raise ModelError(
            f"onnxruntime fails on operator '{node.op_type}', and so does ONNX's reference, to which its"
            f" written-out form is compared: {error}; export the model with opset_version=17"
        ) from error
    expected = {name: np.asarray(value) for name, value in zip(outputs, results, strict=True)}
    parity = compare(expected, {name: values[name] for name in outputs}, _TOLERANCE)
    if not parity.ok:
        raise ModelError(
            f"onnxruntime fails on operator '{node.op_type}', and written out it computes something else than"
            f" ONNX's reference ({parity.reason}); export the model with opset_version=17"
        )


def _values(model: onnx.ModelProto, names: set[str], feed: Feeds) -> dict[str, NDArray[Any]]:
    index = GraphIndex(model.graph)
    values = {name: value for name in names if (value := index.constant(name)) is not None}
    values |= {name: feed[name] for name in names & feed.keys()}
    computed = sorted(name for name in names - values.keys() if name)
    probe = with_outputs(model, computed)
    session = open_ort(probe.SerializeToString(), OrtOptions(optimise=False))
    return values | dict(session.run(feed))
