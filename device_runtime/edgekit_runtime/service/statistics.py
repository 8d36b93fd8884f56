"""What the statistics extension of the protocol says of a model, from what its lane counts.

Source: Triton's statistics extension.
"""

import time
from typing import Any

from edgekit_runtime.service.metrics import LaneMetrics


def describe(metrics: LaneMetrics) -> dict[str, Any]:
    """Return the JSON object of one version of a model."""
    count = sum(calls * run.count for calls, run in metrics.runs.items())
    merge_s = sum(calls * run.merge_s for calls, run in metrics.runs.items())
    infer_s = sum(calls * run.infer_s for calls, run in metrics.runs.items())
    split_s = sum(calls * run.split_s for calls, run in metrics.runs.items())
    return {
        "name": metrics.model,
        "version": metrics.version,
        "last_inference": _as_epoch_ms(metrics.last_s),
        "inference_count": count,
        "execution_count": sum(run.count for run in metrics.runs.values()),
        "inference_stats": {
            "success": _duration(metrics.succeeded, metrics.total.total),
            "fail": _duration(metrics.failed, metrics.failed_s),
            "queue": _duration(metrics.queue.count, metrics.queue.total),
            "compute_input": _duration(count, merge_s),
            "compute_infer": _duration(count, infer_s),
            "compute_output": _duration(count, split_s),
            "cache_hit": _duration(metrics.cache_hits, 0.0),
            "cache_miss": _duration(metrics.cache_misses, 0.0),
        },
        "batch_stats": [
            {
                "batch_size": calls,
                "compute_input": _duration(run.count, run.merge_s),
                "compute_infer": _duration(run.count, run.infer_s),
                "compute_output": _duration(run.count, run.split_s),
            }
            for calls, run in sorted(metrics.runs.items())
        ],
    }


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": round(seconds * 1e9)}


def _as_epoch_ms(monotonic_s: float | None) -> int:
    """Return milliseconds since 1970, as the protocol has it, or 0 for never."""
    if monotonic_s is None:
        return 0
    return round((time.time() - time.monotonic() + monotonic_s) * 1e3)
