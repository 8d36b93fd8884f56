"""The sequence of optimisation passes, which can be repeated from a recipe."""

from collections.abc import Callable, Sequence
from functools import partial

import onnx

from edgekit_runtime.errors import RecipeError
from edgekit_runtime.sessions.ort import WRONG_REWRITES
from edgekit_toolkit.onnx_graph.functions import write_out_opaque
from edgekit_toolkit.passes import (
    conv_transpose_to_depth,
    dead_channels,
    defer_depth_to_space,
    distribute_gate,
    fix_batch,
    fold_affine,
    fold_constants,
    fold_slices,
    fuse_hardswish,
    merge_linear_convs,
    resolve_conditions,
)
from edgekit_toolkit.passes.file_form import convert_opset, separate_weights, state_zero_points
from edgekit_toolkit.passes.foreign import ort_basic, simplify
from edgekit_toolkit.passes.leftovers import drop_unused, share_weights

Pass = Callable[[onnx.ModelProto], onnx.ModelProto]


def chain(batch: int | None) -> list[tuple[str, Sequence[Pass]]]:
    """Return the name and the alternative forms of each pass, in order. Later forms make fewer changes.

    `batch` is the batch size to fix, or None to keep the batch.
    """
    return [
        ("separate_weights", [separate_weights]),
        ("write_out_opaque", [write_out_opaque]),
        ("state_zero_points", [state_zero_points]),
        ("fold_constants", [fold_constants.run, partial(fold_constants.run, max_grown_bytes=0)]),
        ("convert_opset", [convert_opset]),
        ("fix_batch", [partial(fix_batch.run, batch=batch)]),
        ("resolve_conditions", [resolve_conditions.run]),
        ("simplify", [simplify]),
        (
            "ort_basic",
            [
                ort_basic,
                partial(ort_basic, fold_constants=False),
                partial(ort_basic, disabled=WRONG_REWRITES),
                partial(ort_basic, fold_constants=False, disabled=WRONG_REWRITES),
            ],
        ),
        ("fold_slices", [fold_slices.run]),
        # Before the division by 6 in a hard-swish folds into the next convolution, where it would not be
        # found.
        ("fuse_hardswish", [fuse_hardswish.run]),
        ("fold_affine", [fold_affine.run]),
        ("merge_linear_convs", [merge_linear_convs.run]),
        ("distribute_gate", [distribute_gate.run]),
        ("conv_transpose_to_depth", [conv_transpose_to_depth.run]),
        (
            "defer_depth_to_space",
            [defer_depth_to_space.run, partial(defer_depth_to_space.run, may_widen=False)],
        ),
        ("remove_dead_channels", [dead_channels.run]),
        ("share_weights", [share_weights]),
        ("drop_unused", [drop_unused]),
    ]


def replay(
    source: onnx.ModelProto, *, batch: int | None, applied: Sequence[tuple[str, int]]
) -> onnx.ModelProto:
    """Repeat the passes of `optimise` without comparing outputs, and return the model.

    `applied` contains the name and form of each pass that `optimise` applied, in order.

    Raises:
        RecipeError: There is no such pass or form, or a pass fails.
    """
    passes = dict(chain(batch))
    model = source
    for name, form in applied:
        if name not in passes or not 0 <= form < len(passes[name]):
            raise RecipeError(
                f"there is no pass {name!r} with form {form}; this recipe is of another edgekit"
            )
        try:
            model = passes[name][form](model)
        except Exception as error:  # foreign passes raise anything
            raise RecipeError(
                f"pass {name!r} fails: {error}; the recipe is of other tool versions"
            ) from error
    return model
