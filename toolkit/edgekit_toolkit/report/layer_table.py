"""The table of layers for the report, with the storage, work and noise of each layer."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from edgekit_toolkit.evaluation.judge import cost_of_nodes
from edgekit_toolkit.onnx_graph.traversal import StoredLayer
from edgekit_toolkit.pipeline.run import JudgedCandidate, Run


def stored(run: Run, candidate: JudgedCandidate) -> dict[str, StoredLayer]:
    """Return the storage of each layer of a candidate, by the layer's first output in the float model."""
    return run.quantizer.stored_layers(candidate.form, candidate.model)


def describe_layers(run: Run, candidate: JudgedCandidate) -> list[dict[str, Any]]:
    """Return the layers for the report in the order of the graph. `noise_share` is None if it is unknown."""
    stored_by_layer, quantizer = stored(run, candidate), run.quantizer
    layers = quantizer.float_layers()
    work = {cost.name: cost for cost in cost_of_nodes(quantizer.model, run.prepared.dims)}
    total = sum(item.noise for item in run.candidate_set.noises)
    shares = {item.block[0]: item.noise / total for item in run.candidate_set.noises} if total > 0 else {}
    labels = _short_names([layer.label for layer in layers.values()])
    return [
        {
            "name": labels.get(layer.label, layer.label),
            "op": layer.operator,
            "bytes_before": layer.weight_bytes,
            "bytes_after": stored_by_layer[name].weight_bytes,
            "precision": stored_by_layer[name].precision,
            "macs": work[layer.label].macs * work[layer.label].repeats if layer.label in work else 0,
            "noise_share": shares.get(name),
        }
        for name, layer in layers.items()
        if name in stored_by_layer
    ]


def _short_names(names: Sequence[str]) -> dict[str, str]:
    """Return names without the part after a semicolon, if they still tell layers apart.

    Converters join the names of all nodes behind an operator; ours adds the order of axes (`relu;0231`).
    """
    counts = Counter(name.partition(";")[0] for name in names)
    return {name: short for name in names if counts[short := name.partition(";")[0]] == 1 and short}
