import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.service.scheduling_parts import Bench

from edgekit_runtime.service.observability.json_log import JsonLines
from edgekit_runtime.service.observability.metrics import MAX_KINDS, Histogram, LaneMetrics, ServiceMetrics
from edgekit_runtime.service.observability.prometheus import (
    MetricFamily,
    lane_families,
    read_memory,
    service_families,
    write_exposition,
)
from edgekit_runtime.service.observability.triton_statistics import describe_statistics
from edgekit_runtime.service.options.model import MAX_BATCH


def parse(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample name -> labels -> value, as Prometheus' own client reads them."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in found.setdefault(sample.name, {})
            found[sample.name][labels] = sample.value
    return found


def busy_bench() -> Bench:
    bench = Bench(max_batch=4, seconds=0.5, max_waiting=4)
    for value in (1, 2, 3, -1, 4, 5):
        bench.submit(value)
    bench.finish()
    bench.submit(6, deadline_s=0.0)
    return bench


def test_lanes_are_read_by_prometheus_as_they_were_counted() -> None:
    bench = busy_bench()
    samples = parse(write_exposition(lane_families([bench.metrics, LaneMetrics("other", "2")])))
    lane = (("model", "model"), ("version", "1"))
    requests = {dict(labels)["outcome"]: v for labels, v in samples["edgekit_requests_total"].items()
                if dict(labels)["model"] == "model"}  # fmt: skip
    assert requests == {"succeeded": 4, "failed": 1, "shed": 1, "late": 1, "refused": 0, "cancelled": 0}
    assert samples["edgekit_compute_seconds_count"][lane] == 4
    assert samples["edgekit_compute_seconds_sum"][lane] == pytest.approx(bench.metrics.compute.total)
    buckets = {dict(k)["le"]: v for k, v in samples["edgekit_compute_seconds_bucket"].items()
               if dict(k)["model"] == "model"}  # fmt: skip
    assert buckets["0.25"] == 0
    assert buckets["0.5"] == 1  # bounds are included
    assert buckets["+Inf"] == 4
    assert list(buckets.values()) == sorted(buckets.values())
    assert samples["edgekit_queue_length"][(("model", "other"), ("version", "2"))] == 0


@given(st.text(), st.text(st.characters(exclude_categories=["Cs"])))
def test_any_label_survives(name: str, value: str) -> None:
    value = value.replace("\r", "")  # Prometheus' parser takes it for an end of line
    family = MetricFamily("x", "gauge", "A \\ and\na line.", (({"label": value}, 1.5),))
    text = write_exposition([family])
    assert len(text.splitlines()) >= 3
    (parsed,) = text_string_to_metric_families(text)
    assert parsed.documentation == "A \\ and\na line."
    assert parsed.samples[0].labels == {"label": value}
    assert parsed.samples[0].value == 1.5


@pytest.mark.parametrize("value", [0, 3, 1e-7, math.inf, -math.inf, 1e300])
def test_any_number_survives(value: float) -> None:
    assert parse(write_exposition([MetricFamily("x", "gauge", "X.", (({}, value),))])) == {"x": {(): value}}
    nan = parse(write_exposition([MetricFamily("x", "gauge", "X.", (({}, math.nan),))]))
    assert math.isnan(nan["x"][()])


def test_without_series_there_is_no_text() -> None:
    assert write_exposition([MetricFamily("x", "gauge", "X.", ())]) == ""


@given(st.lists(st.floats(-1, 20, allow_nan=False)))
def test_a_histogram_counts_each_value_once(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    assert histogram.count == len(values)
    assert histogram.total == pytest.approx(sum(values))
    for index, bound in enumerate(histogram.bounds):
        assert sum(histogram.counts[: index + 1]) == sum(value <= bound for value in values)


def test_the_service_tells_swaps_power_and_its_memory() -> None:
    service = ServiceMetrics()
    service.swaps["m", "done"] += 2
    service.energy_j["m",] += 1.5
    service.temperature_c["cpu",] = 48.5
    service.power_w["rail",] = 3.0
    samples = parse(write_exposition(service_families(service)))
    assert samples["edgekit_swaps_total"] == {(("model", "m"), ("outcome", "done")): 2}
    assert samples["edgekit_energy_joules_total"] == {(("model", "m"),): 1.5}
    assert samples["edgekit_temperature_celsius"] == {(("zone", "cpu"),): 48.5}
    assert samples["edgekit_power_watts"] == {(("sensor", "rail"),): 3.0}
    memory = {dict(labels)["kind"]: value for labels, value in samples["edgekit_memory_bytes"].items()}
    assert 1 << 20 < memory["pss"] <= memory["rss"]


def test_memory_that_the_system_does_not_state_is_left_out(tmp_path: Path) -> None:
    assert read_memory(tmp_path / "absent") == {}
    (tmp_path / "odd").write_text("header\nRss: 3 kB\nnonsense\n")
    assert read_memory(tmp_path / "odd") == {"rss": 3072}


def test_statistics_are_those_of_triton() -> None:
    bench = busy_bench()
    body = describe_statistics([bench.metrics], clock=bench.loop.clock, wall_clock=lambda: 2e9)
    assert json.loads(json.dumps(body)) == body
    (stats,) = body["model_stats"]
    assert (stats["name"], stats["version"]) == ("model", "1")
    assert stats["last_inference"] == 2_000_000_000_000
    assert stats["inference_count"] == 4
    assert stats["execution_count"] == sum(entry["compute_infer"]["count"] for entry in stats["batch_stats"])
    assert stats["inference_stats"]["success"]["count"] == 4
    assert stats["inference_stats"]["success"]["ns"] == round(bench.metrics.total.total * 1e9)
    assert stats["inference_stats"]["fail"]["count"] == 3
    assert set(stats["inference_stats"]) == {
        *("success", "fail", "queue", "compute_input", "compute_infer", "compute_output"),
        *("cache_hit", "cache_miss", "cancel"),
    }


def test_statistics_count_the_rows_of_calls() -> None:
    bench = Bench(max_batch=8, seconds=0.5)
    for value, rows in ((1, 3), (2, 2), (3, 1)):
        bench.submit(value, rows)
    bench.finish()
    (stats,) = describe_statistics([bench.metrics])["model_stats"]
    assert (stats["inference_count"], stats["execution_count"]) == (6, 2)
    assert stats["inference_stats"]["success"]["count"] == 3
    assert [(entry["batch_size"], entry["compute_infer"]["count"]) for entry in stats["batch_stats"]] == [
        (3, 2)  # the first call alone, then two calls of three rows together
    ]


def test_sizes_that_clients_choose_do_not_fill_the_memory() -> None:
    metrics = LaneMetrics("model", "1")
    for rows in range(1, 10 * MAX_KINDS):
        metrics.note_run(1, rows, 0.0, 1e-3, 0.0)
    assert len(metrics.runs) <= MAX_KINDS + 20
    assert sum(run.count for run in metrics.runs.values()) == 10 * MAX_KINDS - 1


def test_batches_of_all_sizes_are_few_enough_for_a_process_to_tell_of_them() -> None:
    metrics = LaneMetrics("model", "1")
    for calls in range(1, MAX_BATCH + 1):
        for rows in (calls, 2 * calls, MAX_BATCH):
            metrics.note_run(calls, rows, 0.0, 1e-3, 0.0)
    assert len(metrics.runs) <= MAX_KINDS + 14 * 14
    assert sum(run.count for run in metrics.runs.values()) == 3 * MAX_BATCH


def test_a_call_on_the_loop_counts_as_one_that_waited_for_nothing() -> None:
    bench = Bench(seconds=2e-5, short_s=200e-6)
    for _ in range(3):
        bench.lane.learn(((1, 2),), 2e-5)
    bench.submit(1)
    metrics = bench.metrics
    assert (metrics.queue.total, metrics.queue.count) == (0, 1)
    assert metrics.total.total == metrics.compute.total == pytest.approx(2e-5)
    assert metrics.runs[1, 1].count == 1


def record(**fields: Any) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "a.b", "levelno": 30, "levelname": "WARNING", "created": 0.25})
    made.__dict__.update(fields)
    return made


def test_a_log_record_is_one_line_of_json() -> None:
    line = JsonLines().format(record(msg="model %s\nis 'odd'", args=("é",), model="m", request_id=7))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.250+00:00",
        "level": "warning",
        "logger": "a.b",
        "message": "model é\nis 'odd'",
        "model": "m",
        "request_id": "7",
    }


def test_a_log_record_tells_its_exception() -> None:
    try:
        os.stat("/absent")  # noqa: PTH116  # any error
    except OSError as error:
        line = JsonLines().format(record(msg="no", exc_info=(type(error), error, error.__traceback__)))
    assert "FileNotFoundError" in json.loads(line)["exception"]
