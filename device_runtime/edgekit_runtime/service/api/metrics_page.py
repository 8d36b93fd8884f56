"""The metrics page for Prometheus, computed for each request."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from edgekit_runtime.service.observability.metrics import ServiceMetrics
from edgekit_runtime.service.observability.prometheus import (
    Kind,
    MetricFamily,
    lane_families,
    service_families,
    write_exposition,
)
from edgekit_runtime.service.serving.load_deadline import count_hung
from edgekit_runtime.service.serving.served_version import Served, Trial

_DISTANCES: Final = ("psi", "confidence_psi", "classes_psi")  # as drift statistics name them


def write_metrics(
    served: Sequence[Served],
    service: ServiceMetrics,
    connections: int,
    errors: Mapping[int, int],
    further: Sequence[MetricFamily],
) -> str:
    """Return all metrics in the Prometheus text format.

    Args:
        served: All versions that accept calls.
        service: The metrics of the whole service.
        connections: The number of open connections to the service or to its workers.
        errors: A dict from HTTP status to the number of error responses of this process.
        further: Further metric families, such as restarts of workers.
    """
    trials = [
        version.trial
        for version in served
        if version.trial is not None and version is version.trial.candidate
    ]
    return write_exposition(
        [
            *lane_families(version.metrics for version in served),
            *service_families(service),
            MetricFamily(
                "edgekit_connections", "gauge", "Connections that are open now.", (({}, connections),)
            ),
            MetricFamily(
                "edgekit_hung_loads",
                "gauge",
                "Loads that were given up and still run; each keeps a thread and memory until a restart.",
                (({}, count_hung()),),
            ),
            MetricFamily(
                "edgekit_error_answers_total",
                "counter",
                "Answers of this process that were errors, by status.",
                tuple(({"status": str(status)}, count) for status, count in sorted(errors.items())),
            ),
            *further,
            *_trial_families(trials),
            *_version_families(served),
        ]
    )


def _trial_families(trials: Iterable[Trial]) -> list[MetricFamily]:
    answers, failed, agreement = [], [], []
    for trial in trials:
        report: Mapping[str, Any] = trial.to_json()
        model = trial.candidate.loaded.manifest.name
        for served, arm in ((trial.current, report["current"]), (trial.candidate, report["candidate"])):
            labels = {"model": model, "version": served.version}
            answers.append((labels, float(arm["answers"])))
            failed.append((labels, float(arm["failed"])))
        if report["agreement"] is not None:
            how = report["comparison"]  # nothing else counts agreement
            labels = {"model": model, "version": trial.candidate.version, "comparison": how["name"]}
            labels["guessed"] = str(how["guessed"]).lower()
            agreement.append((labels, report["agreement"]))
    return [
        MetricFamily(
            "edgekit_rollout_answers", "gauge", "Answers that a rollout has judged.", tuple(answers)
        ),
        MetricFamily("edgekit_rollout_failed_answers", "gauge", "Of them, those that failed.", tuple(failed)),
        MetricFamily(
            "edgekit_rollout_agreement_ratio",
            "gauge",
            "Mean agreement with the version in use.",
            tuple(agreement),
        ),
    ]


def _find_distance(report: Mapping[str, Any]) -> float | None:
    """Return the largest distance of inputs and outputs from the reference of the package."""
    drift: Any = report.get("drift") or {}
    watched = [*drift.get("inputs", {}).values(), *drift.get("outputs", {}).values()]
    distances = [stated.get(name) for stated in watched for name in _DISTANCES]
    return max((distance for distance in distances if distance is not None), default=None)


def _read(part: str, name: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda report: (report.get(part) or {}).get(name)


# Read from `Served.to_json`. A version without the value has no series.
_VERSION_METRICS: Final[tuple[tuple[str, Kind, str, Callable[[Mapping[str, Any]], float | None]], ...]] = (
    (
        "edgekit_drift_psi",
        "gauge",
        "Population stability index of inputs or outputs, the larger.",
        _find_distance,
    ),
    (
        "edgekit_looked_at_answers_total",
        "counter",
        "Answers that the drift statistics looked at.",
        _read("drift", "looks"),
    ),
    (
        "edgekit_not_finite_answers_total",
        "counter",
        "Sampled answers with NaN or infinity to finite inputs.",
        _read("drift", "not_finite"),
    ),
    ("edgekit_governor_changes_total", "counter", "Changes of the setting.", _read("governor", "changes")),
    (
        "edgekit_governor_admitted_ratio",
        "gauge",
        "Share of the calls that are taken.",
        _read("governor", "admit"),
    ),
    (
        "edgekit_active_sequences",
        "gauge",
        "Sequences whose states are kept now.",
        _read("sequences", "active"),
    ),
)


def _version_families(served: Iterable[Served]) -> Iterator[MetricFamily]:
    reports = [
        ({"model": version.loaded.manifest.name, "version": version.version}, version.to_json())
        for version in served
    ]
    settings = []
    for labels, report in reports:
        governor: Any = report.get("governor")
        if governor is not None:
            names = ("variant", "batch", "threads")
            settings.append(({**labels, **{name: str(governor[name]) for name in names}}, 1.0))
    yield MetricFamily("edgekit_governor_setting", "gauge", "1 for the setting in force.", tuple(settings))
    for name, kind, text, read in _VERSION_METRICS:
        series = tuple(
            (labels, float(value)) for labels, report in reports if (value := read(report)) is not None
        )
        yield MetricFamily(name, kind, text, series)
