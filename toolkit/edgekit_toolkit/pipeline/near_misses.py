"""Distils pruned models whose drop is slightly over the limit.

A model within the limit needs no training, and training cannot repair a model far over the limit. The search
limit is in seconds of a nominal processor, and the training may use a share of it. The number of training
steps therefore does not depend on the load of this machine.
"""

import math
from collections.abc import Sequence
from typing import Final

import onnx

from edgekit_toolkit.compress.distillation import BATCH, SAMPLE_RUNS, WORK, distil
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.pipeline.compressed_forms import FAILURES, CompressionTask
from edgekit_toolkit.samples.generated import Feeds

# A drop of this multiple of the limit, or of this number of points, is a near miss. Training halves such a
# drop (docs/benchmarks/quantization.md).
_NEAR_LIMITS: Final = 3.0
_NEAR_POINTS: Final = 3.0
DISTILLED_SHARE: Final = 0.5
"""The share of the search's remaining work that all near misses may use together."""
# More steps change little, and fewer are a short search.
_MAX_STEPS: Final = 400
_MIN_STEPS: Final = 100


def improve_near_misses(
    pruned: Sequence[onnx.ModelProto], samples: Sequence[Feeds], task: CompressionTask
) -> tuple[list[onnx.ModelProto | None], list[str]]:
    """Train the pruned models whose drop is slightly over the limit.

    Returns:
        The trained model or None for each pruned model, and the reasons why models were not improved.
    """
    better: list[onnx.ModelProto | None] = [None] * len(pruned)
    reasons: list[str] = []
    if not pruned or not math.isfinite(task.max_drop):
        return better, reasons
    drops = task.measure_drops([OnnxModel(model) for model in pruned])
    reach = max(_NEAR_LIMITS * task.max_drop, _NEAR_POINTS)
    near = [index for index, drop in enumerate(drops) if task.max_drop < drop <= reach]
    share_s = DISTILLED_SHARE * (task.work.limit_s - task.work.spent_s) / max(len(near), 1)
    step_runs = share_s / task.work.inference_s - SAMPLE_RUNS * len(samples)
    steps = int(min(step_runs / (BATCH * WORK), _MAX_STEPS))
    for index in near:
        better[index], reason = _distil(pruned[index], samples, steps, task)
        if reason:
            reasons.append(f"distillation of a pruned form, drop {drops[index]:.1f} points: {reason}")
    return better, reasons


def _distil(
    model: onnx.ModelProto, samples: Sequence[Feeds], steps: int, task: CompressionTask
) -> tuple[onnx.ModelProto | None, str]:
    if steps < _MIN_STEPS:
        return None, f"too little of the search's work is left for {_MIN_STEPS} steps: raise --search-seconds"
    task.work.count(inferences=SAMPLE_RUNS * len(samples) + steps * BATCH * WORK)
    try:
        result = distil(
            task.floats,
            model,
            samples,
            steps=steps,
            progress=lambda done, total: task.progress("distilling", done, total),
        )
    except FAILURES as error:
        return None, str(error).splitlines()[0]
    if result.model is None:
        noises = f"{100 * result.noise_before:.1f} to {100 * result.noise_after:.1f} %"
        return None, f"no gain on held-back samples (noise {noises})"
    return result.model, ""
