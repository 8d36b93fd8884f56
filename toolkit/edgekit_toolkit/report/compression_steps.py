"""The sizes of a compressed model after each step of compression."""

from typing import Any

from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.pipeline.run import JudgedCandidate, Run


def describe_compression(run: Run, candidate: JudgedCandidate) -> list[dict[str, Any]]:
    """Return a dict for each step. `step` is a description, and `bytes` is the size after the step.

    The list is empty if the candidate is not compressed.
    """
    compression = candidate.form.compression
    if compression is None:
        return []
    largest = max((weight.bits for weight in compression.weights.values()), default=8)
    steps = [("float32", run.prepared.floats.size_bytes)]
    if compression.channels and isinstance(run.prepared.floats, OnnxModel):
        sliced = compression.slice(run.prepared.floats.proto)
        steps.append(("channels pruned, float32", OnnxModel(sliced).size_bytes))
        if compression.is_distilled:
            steps.append(("distilled, float32", OnnxModel(sliced).size_bytes))
    steps.append((f"weights as codes of {largest} bits", candidate.model.size_bytes))
    if "transport" in candidate.measured.figures:
        transport = int(candidate.measured.figures["transport"])
        steps.append((f"package on its way, {compression.mean_bits:.1f} bits a weight", transport))
    return [{"step": step, "bytes": size} for step, size in steps]
