"""Describes models as JSON: their metadata and statistics."""

from collections.abc import Sequence
from typing import Any

from edgekit_runtime.protocol.datatypes import DATATYPE_OF_DTYPE
from edgekit_runtime.service.observability.triton_statistics import describe_statistics
from edgekit_runtime.service.serving.served_version import Served
from edgekit_runtime.tensors import TensorSpec


def describe_model(served: Served) -> dict[str, Any]:
    """Return `platform`, `inputs`, `outputs` and, if the model has any, `states` for its metadata."""
    return {
        "platform": served.loaded.platform,
        "inputs": [_describe_tensor(spec) for spec in served.codec.inputs],
        "outputs": [_describe_tensor(spec) for spec in served.codec.outputs],
        **({"states": served.codec.states} if served.codec.states else {}),
    }


def describe_versions(served: Sequence[Served]) -> dict[str, Any]:
    """Return the statistics of Triton's API with additional fields, as a list under `model_stats`."""
    document = describe_statistics(version.metrics for version in served)
    for entry, version in zip(document["model_stats"], served, strict=True):
        entry.update(version.to_json())
    return document


def _describe_tensor(spec: TensorSpec) -> dict[str, Any]:
    shape = [size if isinstance(size, int) else -1 for size in spec.shape]
    return {"name": spec.name, "datatype": DATATYPE_OF_DTYPE[spec.dtype], "shape": shape}
