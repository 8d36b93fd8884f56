"""Writes metrics in the Prometheus text format, version 0.0.4.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Final, Literal, TypeAlias

from edgekit_runtime.records import dataclass
from edgekit_runtime.service.observability.metrics import Histogram, LaneMetrics, ServiceMetrics

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_STATUS: Final = Path("/proc/self/smaps_rollup")
_LABEL_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})

Labels = Mapping[str, str]
Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric with the values of all its label sets.

    Attributes:
        name: The name with its unit, as Prometheus recommends. The name of a counter ends in `_total`.
        help: A one-line description of the metric.
        series: Pairs of a label set and its value.
    """

    name: str
    kind: Kind
    help: str
    series: tuple[tuple[Labels, float | Histogram], ...]


def write_exposition(families: Iterable[MetricFamily]) -> str:
    """Return the metrics in the Prometheus text format. Families without values are omitted."""
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
# By outcome, the field of `LaneMetrics` that counts it.
_OUTCOMES: Final = {
    "succeeded": "answered",
    **{name: name for name in ("failed", "shed", "late", "refused", "cancelled")},
}
_LANE_METRICS: Final[tuple[tuple[str, Kind, str, Callable[[LaneMetrics], float | Histogram]], ...]] = (
    ("queue_seconds", "histogram", "From a call's arrival to its beginning.", lambda lane: lane.queue),
    ("compute_seconds", "histogram", "Time in the engine, for each call.", lambda lane: lane.compute),
    ("request_seconds", "histogram", "From a call's arrival to its answer.", LaneMetrics.answer_histogram),
    ("queue_length", "gauge", "Calls that wait now.", lambda lane: lane.waiting),
    ("batch_calls", "histogram", "Calls that shared a run of the engine.", LaneMetrics.batch_histogram),
    ("cache_hits_total", "counter", "Calls answered from the response cache.", lambda lane: lane.cache_hits),
    ("cache_misses_total", "counter", "Calls that the cache did not hold.", lambda lane: lane.cache_misses),
)
# Name, kind and help of a metric; the field of `ServiceMetrics`; the names of its labels.
_SERVICE_METRICS: Final[tuple[tuple[str, Kind, str, str, tuple[str, ...]], ...]] = (
    ("swaps_total", "counter", "Changes of a model's version.", "swaps", ("model", "outcome")),
    ("energy_joules_total", "counter", "Energy, by model.", "energy_j", ("model",)),
    (
        "request_energy_joules",
        "gauge",
        "Measured mean energy of a request above idle.",
        "request_energy_j",
        ("model", "version"),
    ),
    ("power_watts", "gauge", "Power now, by sensor.", "power_w", ("sensor",)),
    ("temperature_celsius", "gauge", "Temperature, by zone.", "temperature_c", ("zone",)),
)


def lane_families(lanes: Iterable[LaneMetrics]) -> list[MetricFamily]:
    """Return the metrics of all served versions, with the labels `model` and `version`."""
    labelled = [({"model": lane.model, "version": lane.version}, lane) for lane in lanes]
    requests = tuple(
        ({**labels, "outcome": outcome}, getattr(lane, field))
        for labels, lane in labelled
        for outcome, field in _OUTCOMES.items()
    )
    return [
        MetricFamily("edgekit_requests_total", "counter", "Calls by how they ended.", requests),
        *(
            MetricFamily(
                f"edgekit_{name}", kind, text, tuple((labels, read(lane)) for labels, lane in labelled)
            )
            for name, kind, text, read in _LANE_METRICS
        ),
    ]


def service_families(service: ServiceMetrics) -> list[MetricFamily]:
    """Return the metrics of the whole service, including its current memory."""
    families = []
    for name, kind, text, field, labels in _SERVICE_METRICS:
        values: Mapping[tuple[str, ...], float] = getattr(service, field)
        series = tuple((dict(zip(labels, key, strict=True)), value) for key, value in values.items())
        families.append(MetricFamily(f"edgekit_{name}", kind, text, series))
    memory = tuple(({"kind": kind}, float(size)) for kind, size in read_memory().items())
    families.append(MetricFamily("edgekit_memory_bytes", "gauge", "Memory of this process.", memory))
    for name, value in service.device.items():
        families.append(MetricFamily(name, "gauge", _DEVICE_HELP[name], (({}, value),)))
    return families


def read_memory(path: Path = _STATUS) -> dict[str, int]:
    """Return the resident (`rss`) and proportional (`pss`) memory of this process in bytes.

    The result is empty if they are unknown.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    fields = {line.split(":")[0]: line.split()[1] for line in lines[1:] if ":" in line}
    return {key.lower(): int(fields[key]) * 1024 for key in ("Rss", "Pss") if key in fields}
