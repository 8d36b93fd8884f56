"""Ranges of the activations of a LiteRT model, in memory that does not grow with the number of samples.

Tensors are fetched in groups, as extra outputs of the model; only their extremes are kept.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from edgekit_runtime.errors import DataError
from edgekit_runtime.sessions.litert import LiteRtOptions, LiteRtSession
from edgekit_toolkit.feeds import Feeds
from edgekit_toolkit.quantize.ranges import Limits, Range
from edgekit_toolkit.tflite_file import SubGraph, pack, parse, parsed, schema, shape_of, tensor_name

_FLOAT_BYTES = 4


def collect(
    prepared: bytes,
    names: Sequence[str],
    samples: Callable[[], Iterable[Feeds]],
    *,
    threads: int,
    limits: Limits | None = None,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Range]:
    """Return the extremes of the activations `names`, of the tensor as a whole.

    Args:
        prepared: float model with a name of its own for each tensor.
        names: activations; inputs may be among them.
        samples: makes a fresh stream of samples.
        threads: of the engine.
        limits: bounds on memory.
        progress: called once a sample.

    Raises:
        DataError: there are no samples, or a value is not finite.
        BackendError: the model does not run on a sample.
    """
    graph = parsed(prepared).subgraphs[0]
    groups = _groups(graph, names, (limits or Limits()).group_bytes)
    options = LiteRtOptions(threads=threads, float_io=False)
    sessions = [LiteRtSession(_with_outputs(prepared, group), options) for group in groups]
    found: dict[str, tuple[float, float]] = {}
    for feeds in samples():
        for session in sessions:
            for name, value in session.run(feeds).items():
                low, high = float(value.min(initial=np.inf)), float(value.max(initial=-np.inf))
                if not (np.isfinite(low) and np.isfinite(high)) and value.size:
                    raise DataError(
                        f"calibration: activation '{name}' is not finite; check the samples and the model's"
                        " weights"
                    )
                known = found.get(name, (np.inf, -np.inf))
                found[name] = min(low, known[0]), max(high, known[1])
        progress()
    if not found:
        raise DataError("calibration: there are no samples; give at least one")
    return {name: Range(np.asarray([low]), np.asarray([high])) for name, (low, high) in found.items()}


def _groups(graph: SubGraph, names: Sequence[str], group_bytes: int) -> list[list[str]]:
    """Split the activations so that each group's values fit the limit."""
    tensors = {tensor_name(tensor): tensor for tensor in graph.tensors}
    groups: list[list[str]] = [[]]
    held = 0
    for name in names:
        size = _FLOAT_BYTES * math.prod(shape_of(tensors[name]))
        if groups[-1] and held + size > group_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return [group for group in groups if group]


def _with_outputs(prepared: bytes, names: Sequence[str]) -> bytes:
    """The model with other outputs, named after the tensors; what makes none of them is left out."""
    model = parse(prepared)
    graph = model.subgraphs[0]
    places = {tensor_name(tensor): place for place, tensor in enumerate(graph.tensors)}
    graph.outputs = [places[name] for name in names]
    if len(model.signatureDefs) != 1:  # then the session takes the names of tensors
        model.signatureDefs = []
    for signature in model.signatureDefs:
        signature.outputs = []
        for name in names:
            item = schema.TensorMapT()
            item.name, item.tensorIndex = name, places[name]
            signature.outputs.append(item)
    return pack(model)
