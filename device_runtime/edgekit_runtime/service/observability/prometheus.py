"""Metrics as Prometheus reads them: its text format, version 0.0.4, written when it is asked for.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final, Literal

from edgekit_runtime.service.observability.metrics import (
    Counter,
    Gauge,
    Histogram,
    LaneMetrics,
    ServiceMetrics,
)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_STATUS: Final = Path("/proc/self/smaps_rollup")
_LABEL_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric with all its labels.

    Attributes:
        name: with its unit, as Prometheus recommends; a counter's ends in `_total`.
        kind: of the metric.
        help: one line on what it says.
        series: labels and value of each.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    series: tuple[tuple[Labels, float | Histogram], ...]


def write_exposition(families: Iterable[MetricFamily]) -> str:
    """Return the text of all families that have a series."""
    lines = []
    for family in families:
        if not family.series:
            continue
        lines.append(f"# HELP {family.name} {family.help.translate(_HELP_ESCAPES)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for labels, value in family.series:
            if isinstance(value, Histogram):
                lines += _write_histogram(family.name, labels, value)
            else:
                lines.append(f"{family.name}{_write_labels(labels)} {_write_number(value)}")
    return "\n".join(lines) + "\n" if lines else ""


def _write_histogram(name: str, labels: Labels, histogram: Histogram) -> Iterable[str]:
    bounds = [*map(_write_number, histogram.bounds), "+Inf"]
    counts = list(accumulate(histogram.counts))
    for bound, count in zip(bounds, counts, strict=True):
        yield f"{name}_bucket{_write_labels({**labels, 'le': bound})} {count}"
    yield f"{name}_sum{_write_labels(labels)} {_write_number(histogram.total)}"
    yield f"{name}_count{_write_labels(labels)} {counts[-1]}"


def _write_labels(labels: Labels) -> str:
    if not labels:
        return ""
    return (
        "{" + ",".join(f'{name}="{value.translate(_LABEL_ESCAPES)}"' for name, value in labels.items()) + "}"
    )


def _write_number(value: float) -> str:
    return repr(value).replace("inf", "+Inf").replace("-+", "-").replace("nan", "NaN")


_DEVICE_HELP: Final[Mapping[str, str]] = {
    "edgekit_battery_charge_ratio": "Charge of the battery.",
    "edgekit_throttled": "1 while the device throttles itself.",
    "edgekit_clock_cap_ratio": "Lowest cap of a processor's clock, of its highest.",
}
# Outcome -> what counts it.
_OUTCOMES: Final = {
    "succeeded": "answered",
    **{name: name for name in ("failed", "shed", "late", "refused", "cancelled")},
}


def lane_families(lanes: Iterable[LaneMetrics]) -> list[MetricFamily]:
    """Return what is counted of versions of models."""
    labelled = [({"model": lane.model, "version": lane.version}, lane) for lane in lanes]

    def each(
        name: str,
        kind: Literal["counter", "gauge", "histogram"],
        help: str,  # noqa: A002  # Prometheus' word
        field: str,
    ) -> MetricFamily:
        return MetricFamily(
            name, kind, help, tuple((labels, getattr(lane, field)) for labels, lane in labelled)
        )

    requests = tuple(
        ({**labels, "outcome": outcome}, getattr(lane, field))
        for labels, lane in labelled
        for outcome, field in _OUTCOMES.items()
    )
    return [
        MetricFamily("edgekit_requests_total", "counter", "Calls by how they ended.", requests),
        each("edgekit_queue_seconds", "histogram", "From a call's arrival to its beginning.", "queue"),
        each("edgekit_compute_seconds", "histogram", "Time in the engine, for each call.", "compute"),
        MetricFamily(
            "edgekit_request_seconds",
            "histogram",
            "From a call's arrival to its answer.",
            tuple((labels, lane.answer_histogram()) for labels, lane in labelled),
        ),
        each("edgekit_queue_length", "gauge", "Calls that wait now.", "waiting"),
        MetricFamily(
            "edgekit_batch_calls",
            "histogram",
            "Calls that shared a run of the engine.",
            tuple((labels, lane.batch_histogram()) for labels, lane in labelled),
        ),
        each("edgekit_cache_hits_total", "counter", "Calls answered from the response cache.", "cache_hits"),
        each("edgekit_cache_misses_total", "counter", "Calls that the cache did not hold.", "cache_misses"),
    ]


def service_families(service: ServiceMetrics) -> list[MetricFamily]:
    """Return what is counted of the whole service, and the memory that it takes now."""

    def of(table: Mapping[tuple[str, ...], Counter | Gauge], *names: str) -> tuple[tuple[Labels, float], ...]:
        return tuple((dict(zip(names, key, strict=True)), metric.value) for key, metric in table.items())

    memory = tuple(({"kind": kind}, float(size)) for kind, size in read_memory().items())
    return [
        MetricFamily(
            "edgekit_swaps_total",
            "counter",
            "Changes of a model's version.",
            of(service.swaps, "model", "outcome"),
        ),
        MetricFamily("edgekit_memory_bytes", "gauge", "Memory of this process.", memory),
        MetricFamily(
            "edgekit_energy_joules_total", "counter", "Energy, by model.", of(service.energy_j, "model")
        ),
        MetricFamily(
            "edgekit_request_energy_joules",
            "gauge",
            "Measured mean energy of a request above idle.",
            of(service.request_energy_j, "model", "version"),
        ),
        *(
            MetricFamily(name, "gauge", _DEVICE_HELP[name], (({}, value),))
            for name, value in service.device.items()
        ),
        MetricFamily("edgekit_power_watts", "gauge", "Power now, by sensor.", of(service.power_w, "sensor")),
        MetricFamily(
            "edgekit_temperature_celsius", "gauge", "Temperature, by zone.", of(service.temperature_c, "zone")
        ),
    ]


def read_memory(path: Path = _STATUS) -> dict[str, int]:
    """Return the resident (`rss`) and the proportional (`pss`) memory in bytes; empty where unknown."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    fields = {line.split(":")[0]: line.split()[1] for line in lines[1:] if ":" in line}
    return {key.lower(): int(fields[key]) * 1024 for key in ("Rss", "Pss") if key in fields}
