"""Runs passes of onnxoptimizer and the basic optimisations of onnxruntime.

The passes of onnxoptimizer in `PASSES` emit standard operators and do not depend on the target. Passes that
rewrite inputs or split a model are not used. Equal initializers are shared by `leftovers` instead.
BatchNormalization is folded by `ort_basic` and `fold_affine` instead, because onnxoptimizer does not compute
the folded constants.

The basic optimisations of onnxruntime fold BatchNormalization, padding and constants. Higher levels are not
used, because they emit operators that only onnxruntime on a similar CPU can run.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import onnx
import onnxoptimizer
import onnxruntime

from edgekit_toolkit.onnx_graph.index import set_items
from edgekit_toolkit.onnx_graph.traversal import nodes
from edgekit_toolkit.openings.model_opening import check_opening

PASSES: Final = (
    "eliminate_nop_cast",
    "eliminate_nop_dropout",
    "eliminate_nop_flatten",
    "eliminate_nop_pad",
    "eliminate_nop_concat",
    "eliminate_nop_split",
    "eliminate_nop_expand",
    "eliminate_nop_transpose",
    "eliminate_nop_reshape",
    "eliminate_nop_with_unit",
    "eliminate_identity",
    "eliminate_consecutive_idempotent_ops",
    "eliminate_common_subexpression",
    "eliminate_slice_after_shape",
    "eliminate_shape_gather",
    "eliminate_deadend",
    "fuse_add_bias_into_conv",
    "fuse_consecutive_concats",
    "fuse_consecutive_squeezes",
    "fuse_consecutive_transposes",
    "fuse_consecutive_unsqueezes",
    "fuse_concat_into_reshape",
    "fuse_matmul_add_bias_into_gemm",
    "fuse_pad_into_conv",
    "fuse_pad_into_pool",
    "fuse_transpose_into_gemm",
    "eliminate_unused_initializer",
)


def simplify(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` simplified by the `PASSES` of onnxoptimizer.

    Raises:
        Exception: onnxoptimizer failed. Its exceptions have no common base class.
    """
    result: onnx.ModelProto = onnxoptimizer.optimize(model, list(PASSES), fixed_point=True)
    return result


class CastsAddedError(Exception):
    """onnxruntime added Cast nodes, because its CPU kernels do not support the types of the model."""


def ort_basic(
    model: onnx.ModelProto, fold_constants: bool = True, disabled: Sequence[str] = ()
) -> onnx.ModelProto:
    """Return a copy of `model` after the basic optimisations of onnxruntime.

    Args:
        model: The model.
        fold_constants: Whether to compute constant results and store them, which can make the model larger.
        disabled: The names of onnxruntime's optimisations to disable.

    Raises:
        CastsAddedError: onnxruntime added Cast nodes, which only its CPU kernels need.
        Exception: onnxruntime failed. Its exceptions have no common base class.
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
    set_items(model.opset_import, (item for item in model.opset_import if item.domain in used))
