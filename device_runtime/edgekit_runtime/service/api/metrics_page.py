"""The metrics page for Prometheus, computed for each request."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from edgekit_runtime.service.observability.metrics import ServiceMetrics
from edgekit_runtime.service.observability.prometheus import (
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
            _drift_family(served),
            *_looks_families(served),
            *_governor_families(served),
            _sequence_family(served),
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


def _drift_family(served: Iterable[Served]) -> MetricFamily:
    """Return the largest distance of each version's inputs and outputs from the reference of its package."""
    series = []
    for version in served:
        drift: Any = version.to_json().get("drift") or {}
        watched = [*drift.get("inputs", {}).values(), *drift.get("outputs", {}).values()]
        distances = [stated.get(name) for stated in watched for name in _DISTANCES]
        distances_known = [distance for distance in distances if distance is not None]
        if distances_known:
            series.append(
                (
                    {"model": version.loaded.manifest.name, "version": version.version},
                    float(max(distances_known)),
                )
            )
    text = "Population stability index of inputs or outputs, the larger."
    return MetricFamily("edgekit_drift_psi", "gauge", text, tuple(series))


def _looks_families(served: Iterable[Served]) -> Iterator[MetricFamily]:
    loads: list[tuple[dict[str, str], Any]] = [
        ({"model": version.loaded.manifest.name, "version": version.version}, drift)
        for version in served
        if (drift := version.to_json().get("drift"))
    ]
    for name, key, text in (
        ("edgekit_looked_at_answers_total", "looks", "Answers that the drift statistics looked at."),
        (
            "edgekit_not_finite_answers_total",
            "not_finite",
            "Sampled answers with NaN or infinity to finite inputs.",
        ),
    ):
        series = tuple((labels, float(drift[key])) for labels, drift in loads if key in drift)
        yield MetricFamily(name, "counter", text, series)


def _sequence_family(served: Iterable[Served]) -> MetricFamily:
    series = []
    for version in served:
        sequences: Any = version.to_json().get("sequences")
        if sequences is not None:
            labels = {"model": version.loaded.manifest.name, "version": version.version}
            series.append((labels, float(sequences["active"])))
    text = "Sequences whose states are kept now."
    return MetricFamily("edgekit_active_sequences", "gauge", text, tuple(series))


def _governor_families(served: Iterable[Served]) -> list[MetricFamily]:
    governed = [
        ({"model": version.loaded.manifest.name, "version": version.version}, report)
        for version in served
        if (report := version.governor_to_json()) is not None
    ]
    names = ("variant", "batch", "threads")
    return [
        MetricFamily(
            "edgekit_governor_setting",
            "gauge",
            "1 for the setting in force.",
            tuple(
                ({**labels, **{name: str(report[name]) for name in names}}, 1.0)
                for labels, report in governed
            ),
        ),
        MetricFamily(
            "edgekit_governor_changes_total",
            "counter",
            "Changes of the setting.",
            tuple((labels, float(report["changes"])) for labels, report in governed),
        ),
        MetricFamily(
            "edgekit_governor_admitted_ratio",
            "gauge",
            "Share of the calls that are taken.",
            tuple((labels, report["admit"]) for labels, report in governed),
        ),
    ]
