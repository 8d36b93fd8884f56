"""Apply onnxruntime's basic graph optimisations: they fold BatchNormalization, padding and constants.

Only the basic level is used: it keeps to standard operators and does not depend on this machine's
instructions. The higher levels write fused and blocked operators that only onnxruntime on the same kind of
CPU can run.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import onnx
import onnxruntime

from edgekit_toolkit.onnx_graph.traversal import nodes
from edgekit_toolkit.openings.model_opening import check_opening


class CastsAddedError(Exception):
    """onnxruntime wrote conversions into the graph, as the CPU has no kernels for the model's types."""


def run(model: onnx.ModelProto, fold_constants: bool = True, disabled: Sequence[str] = ()) -> onnx.ModelProto:
    """Return a copy of `model` as onnxruntime would run it after its basic optimisations.

    Args:
        model: any model.
        fold_constants: whether constants are computed; off if the results take more space.
        disabled: rewrites that are left out, by onnxruntime's names.

    Raises:
        CastsAddedError: the model would be slower on a target that has kernels for its types.
        Exception: onnxruntime failed; its exceptions have no common base.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimised.onnx"
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 4
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        settings.optimized_model_filepath = str(path)
        content = model.SerializeToString()
        check_opening("ort", content, {"disabled_optimizers": [*disabled]})
        onnxruntime.InferenceSession(
            content,
            settings,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=[*disabled, *([] if fold_constants else ["ConstantFolding"])],
        )
        result = onnx.load(path)
    if _casts(result) > _casts(model):
        raise CastsAddedError("onnxruntime's CPU kernels would need conversions that other targets do not")
    _keep_used_domains(result)
    return result


def _casts(model: onnx.ModelProto) -> int:
    return sum(node.op_type == "Cast" for node in nodes(model))


def _keep_used_domains(model: onnx.ModelProto) -> None:
    """Drop the operator sets that onnxruntime lists without need."""
    used = {node.domain for node in nodes(model)} | {""}
    imports = [item for item in model.opset_import if item.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(imports)
