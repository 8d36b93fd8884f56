"""A lower bound on the size of every form of a model, before any form is made."""

import math
from typing import Final

from edgekit_runtime.errors import BudgetError
from edgekit_toolkit.models.model import StoredTensor
from edgekit_toolkit.quantize.quantizer import Quantizer

_MIN_INT4_ELEMENTS: Final = 4096  # of a matrix, as both writers have it; all other weights take at least int8


def check_smallest_form(quantizer: Quantizer, max_bytes: float) -> None:
    """Check that the weights of some form may keep a limit on the size of the package.

    Raises:
        BudgetError: they keep it in no form, so that a search would be in vain.
    """
    least_bytes = find_least_bytes(quantizer)
    if least_bytes > max_bytes:
        needed = f"size={math.ceil(least_bytes / 1e3)}kB or more, or a smaller model"
        raise BudgetError(
            f"no form of the model keeps size={max_bytes / 1e6:g}MB: in the smallest (int8, int4 in large"
            f" matrices, if it can be quantized) it has at least {least_bytes:,} bytes, so nothing was"
            f" searched. To package: {needed}",
            binding=("size",),
            needed=needed,
        )


def find_least_bytes(quantizer: Quantizer) -> int:
    """Return a lower bound on the size of every form, in bytes: that of its weights."""
    if quantizer.why_no_forms() is not None:
        return quantizer.source_form()[1].size_bytes
    return sum(map(_least_bytes, quantizer.model.stored_tensors()))


def _least_bytes(tensor: StoredTensor) -> int:
    if tensor.dtype != "float32":
        return tensor.size_bytes
    elements = math.prod(tensor.shape)
    return elements // 2 if len(tensor.shape) == 2 and elements >= _MIN_INT4_ELEMENTS else elements
