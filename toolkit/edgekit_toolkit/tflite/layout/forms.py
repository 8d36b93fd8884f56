"""Forms, which describe the order of axes in which a tensor is stored.

A form lists the ONNX axis for each axis of the stored tensor, or `NEW` for an added axis of size 1. The form
(0, 2, 3, 1) stores [N, C, H, W] as [N, H, W, C], and (0, NEW, 2, 1) stores [N, C, W] as [N, 1, W, C]. Axes of
size 1 may be left out.
"""

import math
from collections.abc import Sequence
from typing import Final, TypeAlias

Form: TypeAlias = tuple[int, ...]
Shape: TypeAlias = tuple[int, ...]

NEW: Final = -1

# Estimated costs in bytes moved: a transposition touches every element out of order and is one more operator;
# a reshape is at most a copy. Only their order matters to `layout`.
OPERATOR_COST: Final = 64
RESHAPE_SHARE: Final = 1 / 16


def plain(rank: int) -> Form:
    """Return the form that keeps the order of axes of ONNX, for a tensor of `rank`."""
    return tuple(range(rank))


def channels_last(rank: int) -> Form:
    """Return the form for convolutions in TFLite: [N, spatial..., C], or [N, 1, W, C] for rank 3."""
    if rank == 3:
        return (0, NEW, 2, 1)
    return (0, *range(2, rank), 1)


def held_shape(form: Form, shape: Shape) -> Shape:
    """Return the shape in which a tensor with the ONNX shape `shape` is stored."""
    return tuple(1 if axis == NEW else shape[axis] for axis in form)


def core(form: Form, shape: Shape) -> Form:
    """Return the stored axes that are longer than 1. Forms with equal results store the same bytes."""
    return tuple(axis for axis in form if axis != NEW and shape[axis] != 1)


def complete(partial: Sequence[int], rank: int) -> Form:
    """Add the axes of 0..rank-1 that `partial` lacks. Axis n is inserted after axis n - 1."""
    form = list(partial)
    for axis in range(rank):
        if axis not in form:
            form.insert(form.index(axis - 1) + 1 if axis else 0, axis)
    return tuple(form)


def conversion_cost(source: Form, target: Form, shape: Shape) -> float:
    """Return the cost of converting a tensor from one form to another, or 0 if no bytes are moved.

    The cost is a constant plus a term that is proportional to the size of the tensor.
    """
    size_bytes = 4 * math.prod(shape)
    if core(source, shape) != core(target, shape):
        return OPERATOR_COST + size_bytes
    if held_shape(source, shape) != held_shape(target, shape):
        return OPERATOR_COST / 4 + size_bytes * RESHAPE_SHARE
    return 0.0


def broadcast_form(form: Form, rank: int) -> Form:
    """Return the form of an operand of `rank` that is broadcast to a result in `form`.

    Axes that exist only in the result get size 1. If they are leading axes, they are left out, because TFLite
    aligns shapes at the end like ONNX.
    """
    missing = sum(1 for axis in form if axis != NEW) - rank
    aligned = [axis - missing if axis >= missing else NEW for axis in form]
    while missing and aligned and aligned[0] == NEW:
        del aligned[0]
    return tuple(aligned)


def without_axes(form: Form, axes: Sequence[int]) -> Form:
    """Return the form of a tensor after `axes` are removed and the remaining axes are renumbered."""
    return tuple(
        axis if axis == NEW else axis - sum(1 for gone in axes if gone < axis)
        for axis in form
        if axis not in axes
    )


def reshaped(form: Form, before: Shape, after: Shape) -> Form | None:
    """Return a form in which a reshaped tensor has the same bytes, or None if there is none.

    The axes are matched in the smallest possible groups. For example, a reshape from [2, 6, 5] to [2, 3, 2,
    5] splits one axis. The axes of a group must be adjacent and in order.
    """
    groups = reshape_groups(before, after)
    if groups is None:
        return None
    first = {old[0]: (old, new) for old, new in groups if old}
    order = core(form, before)
    result: list[int] = []
    position = 0
    while position < len(order):
        if order[position] not in first:
            return None
        old, new = first[order[position]]
        if order[position : position + len(old)] != old:
            return None
        result.extend(new)
        position += len(old)
    return complete(result, len(after))


def reshape_groups(before: Shape, after: Shape) -> list[tuple[Form, Form]] | None:
    """Return the groups of axes that correspond to each other before and after a reshape.

    Each group contains its axes before and its axes after the reshape. The groups are as small as possible
    and contain no axes of size 1. Return None if a shape has no elements, or if the numbers of elements
    differ.
    """
    if math.prod(before) == 0 or math.prod(before) != math.prod(after):
        return None
    old = [axis for axis, size in enumerate(before) if size != 1]
    new = [axis for axis, size in enumerate(after) if size != 1]
    groups: list[tuple[Form, Form]] = []
    i = j = 0
    while i < len(old):
        start_i, start_j = i, j
        before_size, right = before[old[i]], after[new[j]]
        i, j = i + 1, j + 1
        while before_size != right:
            if before_size < right:
                before_size, i = before_size * before[old[i]], i + 1
            else:
                right, j = right * after[new[j]], j + 1
        groups.append((tuple(old[start_i:i]), tuple(new[start_j:j])))
    return groups
