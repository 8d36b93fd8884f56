import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.runtime.conftest import PackageMaker
from tests.service.service_parts import Replies, X, Y, ask, infer_bytes, running_linear

from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.observability.server_timing import (
    RunTimes,
    TimedMetrics,
    UtilizationMeter,
    format_fields,
)
from edgekit_runtime.service.options.http import HttpLimits
from edgekit_runtime.service.options.model import ModelOptions, SchedulingLimits

TIMING = re.compile(r"queue;dur=(\d+\.\d{3}), compute;dur=(\d+\.\d{3})")
LOAD = re.compile(r"TEXT application_utilization=(\d+\.\d{3})")
ON = HttpLimits(server_timing=True)


def read_load(fields: Mapping[str, str]) -> float:
    found = LOAD.fullmatch(fields["endpoint-load-metrics"])
    assert found is not None
    return float(found[1])


def test_responses_say_nothing_unless_asked_to(maker: PackageMaker, tmp_path: Path) -> None:
    with running_linear(maker, tmp_path) as service:
        fields = ask(service, infer_bytes(X)).fields
    assert not {"server-timing", "endpoint-load-metrics"} & fields.keys()


@pytest.mark.parametrize(
    "scheduling",
    [SchedulingLimits(), SchedulingLimits(short_s=0.0), SchedulingLimits(short_s=0.0, max_batch=4)],
)
def test_responses_state_times_and_load(
    scheduling: SchedulingLimits, maker: PackageMaker, tmp_path: Path
) -> None:
    options = {"linear": ModelOptions(scheduling=scheduling)}
    with running_linear(maker, tmp_path, http=ON, models=options) as service, service.connect() as client:
        replies = Replies(client)
        for _ in range(3):  # the head is written once and kept
            client.sendall(infer_bytes(X))
            reply = replies.next()
            assert reply.binary == Y
            found = TIMING.fullmatch(reply.fields["server-timing"])
            assert found is not None and float(found[2]) > 0
            assert LOAD.fullmatch(reply.fields["endpoint-load-metrics"])


def test_isolated_model_states_times_too(maker: PackageMaker, tmp_path: Path) -> None:
    options = {"linear": ModelOptions(isolated=True)}
    with running_linear(maker, tmp_path, http=ON, models=options) as service:
        reply = ask(service, infer_bytes(X))
    assert reply.binary == Y
    assert TIMING.fullmatch(reply.fields["server-timing"])


def test_call_that_waits_for_others_states_its_time_in_the_queue(maker: PackageMaker, tmp_path: Path) -> None:
    scheduling = SchedulingLimits(max_batch=8, max_delay_s=0.1, short_s=0.0)
    options = {"linear": ModelOptions(scheduling=scheduling)}
    with running_linear(maker, tmp_path, http=ON, models=options) as service:
        found = TIMING.fullmatch(ask(service, infer_bytes(X)).fields["server-timing"])
    assert found is not None and float(found[1]) >= 90


def test_cached_answer_took_no_time(maker: PackageMaker, tmp_path: Path) -> None:
    options = {"linear": ModelOptions(cache=True, scheduling=SchedulingLimits(short_s=0.0))}
    with running_linear(maker, tmp_path, http=ON, models=options) as service:
        first, second = (ask(service, infer_bytes(X)).fields["server-timing"] for _ in range(2))
    assert first != second == "queue;dur=0.000, compute;dur=0.000"


def test_refusal_of_a_full_queue_carries_a_load_above_one(maker: PackageMaker, tmp_path: Path) -> None:
    scheduling = SchedulingLimits(max_waiting=1, max_batch=2, max_delay_s=0.5, short_s=0.0)
    options = {"linear": ModelOptions(scheduling=scheduling)}
    replies = []
    with running_linear(maker, tmp_path, http=ON, models=options) as service:
        threads = [
            threading.Thread(target=lambda: replies.append(ask(service, infer_bytes(X)))) for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    refused = [reply for reply in replies if reply.status == 503]
    assert refused and len(refused) < 6
    for reply in refused:
        found = LOAD.fullmatch(reply.fields["endpoint-load-metrics"])
        assert found is not None and float(found[1]) >= 0.5  # one of a batch of two waits
        assert "server-timing" not in reply.fields
        assert "retry-after" in reply.fields


def test_load_is_the_busy_share_of_the_slots() -> None:
    now = [0.0]
    meter = UtilizationMeter(2, lambda: now[0])
    metrics = LaneMetrics("m", "1")
    assert meter.measure(lambda: [metrics]) == 0
    metrics.note_run(1, 1, 0.0, 0.3, 0.0)
    now[0] = 0.3
    assert meter.measure(lambda: [metrics]) == pytest.approx(0.5)
    metrics.note_run(1, 1, 0.0, 5.0, 0.0)
    now[0] = 0.4
    assert meter.measure(lambda: [metrics]) == pytest.approx(0.5)  # within the same window
    now[0] = 0.6
    assert meter.measure(lambda: [metrics]) == 1.0
    now[0] = 10.6
    assert meter.measure(lambda: [metrics]) == 0.0
    now[0] = 11.0
    assert meter.measure(list) == 0.0  # the version was unloaded


def test_who_asks_alone_is_told_no_load_and_others_are_told_of_it(
    maker: PackageMaker, tmp_path: Path
) -> None:
    with running_linear(maker, tmp_path, http=ON) as service, service.connect() as busy:
        replies, until_s = Replies(busy), time.monotonic() + 0.7
        while time.monotonic() < until_s:  # longer than two windows
            busy.sendall(infer_bytes(X))
            reply = replies.next()
            assert read_load(reply.fields) == 0
        with service.connect() as other:
            other.sendall(infer_bytes(X))
            assert read_load(Replies(other).next().fields) > 0


def test_probe_of_the_link_is_told_the_load_of_the_model_that_it_names(
    maker: PackageMaker, tmp_path: Path
) -> None:
    probe = infer_bytes(X).replace(b"/models/linear/", b"/models/edgekit-link-probe/versions/linear/")
    with running_linear(maker, tmp_path, http=ON) as service, service.connect() as busy:
        replies, until_s = Replies(busy), time.monotonic() + 0.4
        while time.monotonic() < until_s:
            busy.sendall(infer_bytes(X))
            replies.next()
        reply = ask(service, probe)
        assert reply.status == 404
        assert read_load(reply.fields) > 0
        busy.sendall(probe)
        reply = replies.next()
    assert reply.status == 404
    assert read_load(reply.fields) == 0  # its own load is none


def test_share_of_a_batch_is_that_of_its_calls() -> None:
    now = [0.0]
    meter, metrics = UtilizationMeter(1, lambda: now[0]), LaneMetrics("m", "1")
    metrics.note_run(4, 4, 0.0, 1.0, 0.0)
    for asker in range(4):
        meter.note(asker, 1.0)
    now[0] = 1.25
    assert meter.measure(lambda: [metrics], 0) == pytest.approx((0.8 - 0.2) / (1 - 0.2))
    assert meter.measure(lambda: [metrics], 9) == pytest.approx(0.8)


def test_times_are_those_of_the_last_call_and_are_taken_once() -> None:
    times = RunTimes()
    metrics = TimedMetrics("m", "1", times)
    metrics.note_success(0.001, 0.002, 0.004, 1.0)
    assert times.take() == (0.001, 0.002)
    assert times.take() == (0.0, 0.0)
    metrics.note_lone(0.003, 2.0)
    assert times.take() == (0.0, 0.003)
    assert (metrics.succeeded, metrics.total.count) == (2, 2)


def test_headers_are_in_the_standard_forms() -> None:
    assert format_fields((0.0123456, 1.0), 0.25) == {
        "Endpoint-Load-Metrics": "TEXT application_utilization=0.250",
        "Server-Timing": "queue;dur=12.346, compute;dur=1000.000",
    }
