"""Regression: named numbers, in the unit of the user."""

from typing import Annotated

import numpy as np

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import DataError
from edgekit_runtime.records import dataclass
from edgekit_runtime.tasks.outputs import MAX_ENTRIES, read_output
from edgekit_runtime.tasks.task import Context, Decoded, Outputs, register


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressionOptions:
    """Options of `regression`.

    Attributes:
        output: The output with the values. Empty for the first output.
        scale: The factors of the values. A single number applies to all values.
        offset: The numbers to add to the scaled values. A single number applies to all values.
    """

    output: str = ""
    scale: tuple[Annotated[float, Range(-1e12, 1e12)], ...] = (1.0,)
    offset: tuple[Annotated[float, Range(-1e12, 1e12)], ...] = (0.0,)


@register("regression", RegressionOptions, "Named values, scaled to the unit of the user.")
def _decode(outputs: Outputs, options: RegressionOptions, context: Context) -> Decoded:
    expected = f"[1, values] with at most {MAX_ENTRIES} values"
    values = read_output(outputs, options.output, expected, (0, 1, 2, 3), is_finite=True)
    if values.size > MAX_ENTRIES:
        raise DataError(f"the output is {list(values.shape)}, expected {expected}")
    for name, factors in (("scale", options.scale), ("offset", options.offset)):
        if len(factors) not in (1, values.size):
            raise DataError(f"{name} has {len(factors)} numbers, expected 1 or {values.size}, one a value")
    scaled = (values.ravel().astype(np.float64) * options.scale + options.offset).tolist()
    return {
        "values": [
            {"label": context.name_class(index), "index": index, "value": float(f"{value:.7g}")}
            for index, value in enumerate(scaled)
        ]
    }
