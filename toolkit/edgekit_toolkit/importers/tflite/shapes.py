"""Output shapes of a `.tflite` as the model really makes them.

A shape that an operator computes is not known before a run, and converters then often record 1. Only outputs
are looked at, not the tensors between.
"""

from collections.abc import Sequence
from typing import TypedDict

from edgekit_toolkit.tflite.flatbuffer import Model, Tensor, shape_of


class MadeOutput(TypedDict):
    """What two runs with different values made of one output.

    Attributes:
        index: of the tensor in the first subgraph.
        first, second: its shape after each run.
    """

    index: int
    first: list[int]
    second: list[int]


def mend_output_shapes(model: Model, made: Sequence[MadeOutput]) -> bool:
    """Record the shapes that the outputs really have, in place; return whether any was different.

    A size that the runs disagree about depends on the data, and becomes free. So is one that the file leaves
    free already.
    """
    changed = False
    for output in made:
        tensor: Tensor = model.subgraphs[0].tensors[output["index"]]
        recorded = shape_of(tensor)
        signature = (
            () if tensor.shapeSignature is None else tuple(int(size) for size in tensor.shapeSignature)
        )
        free = signature or recorded
        first, second = output["first"], output["second"]
        same_rank = len(free) == len(first)
        sizes = [
            -1 if one != other or (same_rank and own < 0) else one
            for one, other, own in zip(first, second, free if same_rank else first, strict=True)
        ]
        if sizes == list(free):
            continue
        tensor.shape = first
        tensor.shapeSignature = sizes if -1 in sizes else None
        changed = True
    return changed
