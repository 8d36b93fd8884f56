"""The response body of a model's statistics endpoint, in the format of Triton's statistics extension.

If the first dimension of a model is free, inferences and batch sizes are counted in rows. Everything else is
counted in calls, so a call with several rows is one success. Answers from the response cache count as
successes with a queue time of 0 s. They do not count as inferences and have no compute time.

Source: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_statistics.md
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from edgekit_runtime.service.observability.metrics import LaneMetrics, RunCount


def describe_statistics(
    lanes: Iterable[LaneMetrics],
    *,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> dict[str, Any]:
    """Return the body of `GET v2/models/MODEL/versions/VERSION/stats`, with the list `model_stats`.

    Args:
        lanes: The metrics of the versions to describe.
        clock: The clock of the schedulers.
        wall_clock: Returns the seconds since 1970.
    """
    offset_s = wall_clock() - clock()
    return {"model_stats": [_describe(lane, offset_s) for lane in lanes]}


def _describe(lane: LaneMetrics, offset_s: float) -> dict[str, Any]:
    runs = lane.runs.items()
    merge_s = sum(calls * run.merge_s for (calls, _), run in runs)
    split_s = sum(calls * run.split_s for (calls, _), run in runs)
    sizes: defaultdict[int, RunCount] = defaultdict(RunCount)
    for (_, rows), run in runs:
        sizes[rows].add(run)
    succeeded, cached = lane.succeeded, lane.cached
    return {
        "name": lane.model,
        "version": lane.version,
        "last_inference": 0 if lane.last_s is None else int((lane.last_s + offset_s) * 1e3),
        "inference_count": lane.rows,
        "execution_count": sum(run.count for _, run in runs),
        "inference_stats": {
            "success": _duration(lane.answered, lane.total.total + cached.total),
            "fail": _duration(lane.failed + lane.shed + lane.late + lane.refused, lane.failed_s),
            "queue": _duration(lane.answered, lane.queue.total),
            "compute_input": _duration(succeeded, merge_s),
            "compute_infer": _duration(succeeded, lane.compute.total),
            "compute_output": _duration(succeeded, split_s),
            "cache_hit": _duration(cached.count, cached.total),
            "cache_miss": _duration(lane.cache_misses, 0.0),
            "cancel": _duration(lane.cancelled, 0.0),
        },
        "batch_stats": [_describe_run(rows, run) for rows, run in sorted(sizes.items()) if run.count],
    }


def _describe_run(rows: int, run: RunCount) -> Mapping[str, Any]:
    return {
        "batch_size": rows,
        "compute_input": _duration(run.count, run.merge_s),
        "compute_infer": _duration(run.count, run.infer_s),
        "compute_output": _duration(run.count, run.split_s),
    }


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": round(seconds * 1e9)}
