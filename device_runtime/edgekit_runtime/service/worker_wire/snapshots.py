"""The reports of a worker on its versions: counts, drift, cache and rollout."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.records import dataclass
from edgekit_runtime.service.observability.metrics import Histogram, LaneMetrics, RunCount
from edgekit_runtime.service.serving.served_version import Served
from edgekit_runtime.service.worker_wire.channel import ChannelError

_COUNTS: Final = tuple("succeeded rows failed shed late refused cancelled cache_misses failed_s".split())
_HISTOGRAMS: Final = ("queue", "compute", "total", "cached")
_MAX_KINDS: Final = 4096  # of runs by their numbers of calls and rows
_DETAILS: Final = ("variant", "sessions", "drift", "cache", "governor", "rollout", "samples", "sequences")
_MAX_DETAIL_BYTES: Final = 16 << 10
_MAX_ANSWERS: Final = 1 << 53


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The report of a worker on one version.

    Attributes:
        counted: The counts since the start of the worker process.
        details: The result of `Served.to_json` in the worker, without the rollout.
        rollout: The `rollout` of `Served.to_json`, or None.
    """

    counted: LaneMetrics
    details: dict[str, JsonValue]
    rollout: dict[str, JsonValue] | None


def write_snapshots(versions: Iterable[Served]) -> bytes:
    """Return the reports on all `versions` as one message."""
    document = {version.version: [_write(version.metrics), version.to_json()] for version in versions}
    return json.dumps(document, separators=(",", ":")).encode("ascii")


def read_snapshots(payload: bytes) -> dict[str, Snapshot]:
    """Return the reports in a message from `write_snapshots`, by version.

    Raises:
        ChannelError: The message has another format.
    """
    try:
        document = json.loads(payload, parse_constant=_refuse_constant)
        return {
            version: Snapshot(_read(counted), *_check_details(details))
            for version, (counted, details) in document.items()
        }
    except (AttributeError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as cause:
        raise ChannelError(f"it sent metrics that cannot be read: {cause!r}"[:300]) from cause


def add_up(into: LaneMetrics, parts: Sequence[LaneMetrics]) -> None:
    """Set `into` to the sums of `parts`.

    `waiting` is set to the value of the last part, and `last_s` to the latest time of all parts.
    """
    for name in _COUNTS:
        setattr(into, name, sum(getattr(part, name) for part in parts))
    for name in _HISTOGRAMS:
        histograms: list[Histogram] = [getattr(part, name) for part in parts]
        sums: Histogram = getattr(into, name)
        sums.total = sum(histogram.total for histogram in histograms)
        sums.counts = [sum(counts) for counts in zip(*(source.counts for source in histograms), strict=True)]
    for run in into.runs.values():
        run.count, run.merge_s, run.infer_s, run.split_s = 0, 0.0, 0.0, 0.0
    for part in parts:
        for kind, run in part.runs.items():
            into.runs.setdefault(kind, RunCount()).add(run)
    into.waiting = parts[-1].waiting
    into.last_s = max((part.last_s for part in parts if part.last_s is not None), default=None)


def _write(metrics: LaneMetrics) -> dict[str, Any]:
    document: dict[str, Any] = {name: getattr(metrics, name) for name in (*_COUNTS, "waiting", "last_s")}
    for name in _HISTOGRAMS:
        histogram: Histogram = getattr(metrics, name)
        document[name] = [histogram.total, *histogram.counts]
    document["runs"] = [
        [*kind, run.count, run.merge_s, run.infer_s, run.split_s] for kind, run in metrics.runs.items()
    ]
    return document


def _read(document: dict[str, Any]) -> LaneMetrics:
    metrics = LaneMetrics("", "")
    for name in (*_COUNTS, "waiting"):
        setattr(metrics, name, _number(document[name]))
    metrics.last_s = None if document["last_s"] is None else _number(document["last_s"])
    for name in _HISTOGRAMS:
        histogram: Histogram = getattr(metrics, name)
        total, *counts = document[name]
        if len(counts) != len(histogram.counts):
            raise ValueError(f"{name} has {len(counts)} ranges, expected {len(histogram.counts)}")
        histogram.total, histogram.counts = _number(total), [int(_number(count)) for count in counts]
    if len(document["runs"]) > _MAX_KINDS:
        raise ValueError(f"{len(document['runs'])} kinds of runs")
    for calls, rows, *values in document["runs"]:
        run = metrics.runs.setdefault((int(_number(calls)), int(_number(rows))), RunCount())
        count, run.merge_s, run.infer_s, run.split_s = (_number(value) for value in values)
        run.count = int(count)
    return metrics


def _number(value: Any) -> Any:
    """Return `value` if it is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e300:
        raise ValueError(f"{str(value)[:40]} is no count")
    return value


def _check_details(details: dict[str, Any]) -> tuple[dict[str, JsonValue], dict[str, JsonValue] | None]:
    """Check the fields that the service uses, and return the details of a version and its rollout."""
    # Without `allow_nan=False`, 1e999 would pass: it is read as infinity, which no answer can be made of.
    size_bytes = len(json.dumps(details, allow_nan=False))
    if size_bytes > _MAX_DETAIL_BYTES or not set(details) <= set(_DETAILS):
        raise ValueError(f"it sends unknown or too many details: {sorted(details)}"[:200])
    if not isinstance(details["variant"], str):
        raise TypeError(f"the variant is {details['variant']!r}"[:200])
    sessions = details.get("sessions", 1)
    if type(sessions) is not int or sessions < 1:
        raise ValueError(f"it reports {sessions!r} sessions"[:100])
    governor = details.get("governor")
    if governor is not None:
        for name in ("batch", "threads", "admit", "changes"):
            _number(governor[name])
        if not isinstance(governor["variant"], str):
            raise TypeError("the governor's variant is no text")
    sequences = details.get("sequences")
    if sequences is not None:
        _number(sequences["active"])
    rollout = details.pop("rollout", None)
    if rollout is not None:
        for arm in ("current", "candidate"):
            answers, failed = _number(rollout[arm]["answers"]), _number(rollout[arm]["failed"])
            if failed > answers or answers > _MAX_ANSWERS:
                raise ValueError(f"{failed} of {answers} answers failed"[:100])
        if rollout["agreement"] is not None:
            _number(rollout["agreement"])
        if "comparison" in rollout or rollout["agreement"] is not None:
            _check_comparison(rollout["comparison"])
    return details, rollout


def _check_comparison(comparison: dict[str, Any]) -> None:
    if comparison["name"] not in ("agreement", "similarity") or not isinstance(comparison["reason"], str):
        raise ValueError("the comparison has another name, or its reason is no text")
    if not isinstance(comparison["guessed"], bool):
        raise TypeError("the field 'guessed' of the comparison is neither true nor false")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
