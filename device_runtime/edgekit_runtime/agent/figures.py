"""Converts the metrics of the service into the figures that the gates of a rollout use."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from edgekit_runtime.agent.documents import ModelFigures

_LINE: Final = re.compile(r"^(edgekit_[a-z_]+)(?:\{([^}]*)\})? ([0-9.eE+-]+|NaN|\+Inf)$", re.MULTILINE)
_LABEL: Final = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')

_Key = tuple[str, str]
_GAUGES: Final = {"edgekit_battery_charge_ratio": "battery"}
"""A dict from metrics of the device to their names in `ModelFigures.gauges`, for gates."""


def read_figures(metrics: str, before: Iterable[ModelFigures] = ()) -> tuple[ModelFigures, ...]:
    """Return the figures of each version in the service's metrics.

    `metrics` is in Prometheus' text format. `before` contains the previous figures. They supply the agreement
    of a version whose trial has ended.
    """
    counts: dict[str, dict[_Key, float]] = defaultdict(lambda: defaultdict(float))
    buckets: dict[_Key, list[tuple[float, float]]] = defaultdict(list)
    gauges: dict[str, float] = {}
    for name, labels_text, value_text in _LINE.findall(metrics):
        labels, value = dict(_LABEL.findall(labels_text)), float(value_text)
        if name in _GAUGES and math.isfinite(value):
            gauges[_GAUGES[name]] = value
        key = labels.get("model", ""), labels.get("version", "")
        if not all(key) or not math.isfinite(value):
            continue
        if name == "edgekit_request_seconds_bucket":
            buckets[key].append((float(labels["le"]), value))
        elif name == "edgekit_requests_total":
            if labels.get("outcome") in ("succeeded", "failed"):
                counts["requests"][key] += value
            if labels.get("outcome") == "failed":
                counts["failed"][key] += value
        else:
            counts[name][key] += value
    tried = {(last.model, last.version): last for last in before if last.agreement is not None}
    all_figures = []
    for key in sorted(counts["requests"]):
        figures = replace(_make(key, counts, sorted(buckets[key])), gauges=gauges)
        if figures.agreement is None and key in tried:
            last = tried[key]
            figures = replace(figures, agreement=last.agreement, compared=last.compared)
        all_figures.append(figures)
    return tuple(all_figures)


def _make(
    key: _Key, counts: dict[str, dict[_Key, float]], buckets: list[tuple[float, float]]
) -> ModelFigures:
    energy_j = counts["edgekit_request_energy_joules"].get(key)
    return ModelFigures(
        model=key[0],
        version=key[1],
        requests=int(counts["requests"][key]),
        failed=int(counts["failed"].get(key, 0)),
        restarts=int(counts["edgekit_worker_restarts_total"].get(key, 0)),
        answer_s=counts["edgekit_request_seconds_sum"].get(key, 0.0),
        p50_ms=_find_quantile(buckets, 0.5),
        p99_ms=_find_quantile(buckets, 0.99),
        energy_mj=None if energy_j is None else energy_j * 1e3,
        agreement=counts["edgekit_rollout_agreement_ratio"].get(key),
        drift=counts["edgekit_drift_psi"].get(key),
        looked_at=int(counts["edgekit_looked_at_answers_total"].get(key, 0)),
        not_finite=int(counts["edgekit_not_finite_answers_total"].get(key, 0)),
        compared=int(counts["edgekit_rollout_answers"].get(key, 0)),
    )


def _find_quantile(buckets: list[tuple[float, float]], share: float) -> float | None:
    """Return a quantile in milliseconds, interpolated within its bucket; None without calls."""
    total = buckets[-1][1] if buckets else 0.0
    below_s = below = 0.0
    for bound_s, count in buckets:
        if total and count >= share * total:
            if math.isinf(bound_s):
                return below_s * 1e3
            within = (share * total - below) / max(1e-12, count - below)
            return (below_s + within * (bound_s - below_s)) * 1e3
        below_s, below = bound_s, count
    return None
