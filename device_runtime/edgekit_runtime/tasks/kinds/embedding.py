"""Embedding: a vector that is close to the vectors of similar inputs."""

import numpy as np

from edgekit_runtime.errors import DataError
from edgekit_runtime.records import dataclass
from edgekit_runtime.tasks.outputs import MAX_ENTRIES, read_output
from edgekit_runtime.tasks.task import Context, Decoded, Outputs, register


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOptions:
    """Options of `embedding`.

    Attributes:
        output: The output with the vector. Empty for the first output.
        normalize: Whether to divide the vector by its length, so that dot products are cosines.
    """

    output: str = ""
    normalize: bool = True


@register("embedding", EmbeddingOptions, "A vector, of length 1 unless `normalize` is off.")
def _decode(outputs: Outputs, options: EmbeddingOptions, _context: Context) -> Decoded:
    expected = f"[1, values] with at most {MAX_ENTRIES} values"
    values = read_output(outputs, options.output, expected, (1, 2, 3), is_finite=True)
    if values.size > MAX_ENTRIES or values.size != max(values.shape):
        raise DataError(f"the output is {list(values.shape)}, expected {expected}")
    vector = values.ravel().astype(np.float64)
    length = float(np.linalg.norm(vector))
    if options.normalize and length:
        vector /= length
    return {"embedding": [float(f"{value:.7g}") for value in vector.tolist()]}
