"""The operators that can be written, one file a family."""

from edgekit_toolkit.tflite.ops import (
    activations,
    arithmetic,
    conv,
    conv_transpose,
    gather,
    indices,
    linear,
    norms,
    pad,
    pool,
    recurrent,
    reduce,
    reshape,
    resize,
    slicing,
    unary,
)
from edgekit_toolkit.tflite.registry import OPERATORS

__all__ = [
    "OPERATORS",
    "activations",
    "arithmetic",
    "conv",
    "conv_transpose",
    "gather",
    "indices",
    "linear",
    "norms",
    "pad",
    "pool",
    "recurrent",
    "reduce",
    "reshape",
    "resize",
    "slicing",
    "unary",
]
