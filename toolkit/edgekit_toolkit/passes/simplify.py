"""Remove operations without effect and join those that one operator can do, with onnxoptimizer.

Only passes that keep to the standard domain and need no knowledge of the target are chosen. Left out: sharing
of equal initializers (`share_weights` leaves biases apart, because a quantizer gives each its own scale), the
folding of BatchNormalization (it leaves its arithmetic as nodes; `ort_basic` and `fold_affine` compute it),
and passes that rewrite inputs or split a model.
"""

from typing import Final

import onnx
import onnxoptimizer

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


def run(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a simplified copy of `model`.

    Raises:
        Exception: onnxoptimizer failed; its exceptions have no common base.
    """
    result: onnx.ModelProto = onnxoptimizer.optimize(model, list(PASSES), fixed_point=True)
    return result
