"""The passes of others: onnxoptimizer's, and onnxruntime's basic level.

Of onnxoptimizer only passes that keep to the standard domain and need no knowledge of the target are chosen.
Left out: sharing of equal initializers (`leftovers` leaves biases apart, because a quantizer gives each its
own scale), the folding of BatchNormalization (it leaves its arithmetic as nodes; `ort_basic` and
`fold_affine` compute it), and passes that rewrite inputs or split a model.

Of onnxruntime only the basic level is used, which folds BatchNormalization, padding and constants: it keeps
to standard operators and does not depend on this machine's instructions. The higher levels write fused and
blocked operators that only onnxruntime on the same kind of CPU can run.
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
        Exception: onnxoptimizer failed; its exceptions have no common base.
    """
    result: onnx.ModelProto = onnxoptimizer.optimize(model, list(PASSES), fixed_point=True)
    return result


class CastsAddedError(Exception):
    """onnxruntime added conversions to the graph, because the CPU has no kernels for the model's types."""


def ort_basic(
    model: onnx.ModelProto, fold_constants: bool = True, disabled: Sequence[str] = ()
) -> onnx.ModelProto:
    """Return a copy of `model` as onnxruntime would run it after its basic optimisations.

    `fold_constants`: whether constant results are stored; turn it off where they take too much space.
    `disabled`: names of onnxruntime's rewrites to leave out.

    Raises:
        CastsAddedError: onnxruntime added conversions of types, which the CPU needs and other targets do not.
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
    set_items(model.opset_import, (item for item in model.opset_import if item.domain in used))
