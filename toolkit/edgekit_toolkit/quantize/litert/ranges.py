"""Reads the activations of a LiteRT model as additional outputs.

Tensors are read in groups, so that the memory does not depend on the number of samples.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from edgekit_runtime.sessions.litert.session import LiteRtOptions
from edgekit_toolkit.openings.sessions import open_litert
from edgekit_toolkit.quantize.ranges import GROUP_BYTES, ReadActivations, split_by_bytes
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.tflite.flatbuffer import pack, parse, parsed, schema, shape_of, tensor_name

_FLOAT_BYTES = 4


def activation_reader(
    prepared: bytes, names: Sequence[str], *, threads: int, group_bytes: int = GROUP_BYTES
) -> ReadActivations:
    """Return a function that runs a model on a sample and yields the names and values of activations.

    Args:
        prepared: A model from `prepare`.
        names: The names of activations or inputs.
        threads: The number of threads of one inference.
        group_bytes: The maximum size of the activations in one run. The function runs the model several times
            if necessary.
    """
    tensors = {tensor_name(tensor): tensor for tensor in parsed(prepared).subgraphs[0].tensors}
    sizes = {name: _FLOAT_BYTES * math.prod(shape_of(tensors[name])) for name in names}
    groups = split_by_bytes(sizes, group_bytes)
    options = LiteRtOptions(threads=threads, float_io=False)
    sessions = [open_litert(_with_outputs(prepared, group), options) for group in groups]

    def read(feeds: Feeds) -> Iterator[tuple[str, NDArray[Any]]]:
        for session in sessions:
            yield from session.run(feeds).items()

    return read


def _with_outputs(prepared: bytes, names: Sequence[str]) -> bytes:
    """Return the model with other outputs, named after the tensors, and without needless operators."""
    model = parse(prepared)
    graph = model.subgraphs[0]
    positions = {tensor_name(tensor): index for index, tensor in enumerate(graph.tensors)}
    graph.outputs = [positions[name] for name in names]
    if len(model.signatureDefs) != 1:  # then the session uses the names of tensors
        model.signatureDefs = []
    for signature in model.signatureDefs:
        signature.outputs = []
        for name in names:
            item = schema.TensorMapT()
            item.name, item.tensorIndex = name, positions[name]
            signature.outputs.append(item)
    return pack(model)
