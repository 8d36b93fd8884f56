"""Calls of clients that have gone are not run; requests that are refused are counted."""

import contextlib
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.conftest import PackageMaker
from tests.service.gates import ON_THREADS, Gate
from tests.service.scheduling_parts import Bench
from tests.service.service_parts import (
    Replies,
    Running,
    X,
    ask,
    get_bytes,
    infer_bytes,
    post_bytes,
    running_linear,
)
from tests.service.test_metrics import parse
from tests.waiting import wait_for

from edgekit_runtime.errors import DeadlineError, UnavailableError


def yes() -> bool:
    return True


def test_call_that_nobody_waits_for_is_not_run() -> None:
    bench = Bench(seconds=0.5, max_batch=4)
    bench.submit(1)
    bench.submit(2, is_unwanted=yes)
    bench.submit(3)
    bench.finish()
    assert bench.session.runs == [[1], [3]]
    assert isinstance(bench.client.error(2), UnavailableError)
    assert (bench.metrics.cancelled, bench.metrics.succeeded) == (1, 2)
    assert bench.lane.is_idle


def test_lane_comes_to_its_end_where_nobody_waits_any_more() -> None:
    bench, ended = Bench(seconds=0.5), []
    for value in (1, 2, 3):
        bench.submit(value, is_unwanted=yes if value > 1 else lambda: False)
    bench.lane.drain(lambda: ended.append(True))
    bench.finish()
    bench.loop.turn()
    assert (ended, bench.session.runs) == ([True], [[1]])


def test_full_queue_makes_room_of_calls_that_nobody_waits_for() -> None:
    bench = Bench(seconds=0.5, max_waiting=2)
    for value in (1, 2, 3):
        bench.submit(value, is_unwanted=yes if value > 1 else lambda: False)
    bench.submit(4)
    bench.finish()
    assert bench.session.runs == [[1], [4]]
    assert (bench.metrics.shed, bench.metrics.cancelled) == (0, 2)


def metric(service: Running, name: str, **labels: str) -> float:
    samples: dict[Any, float] = parse(ask(service, get_bytes("/metrics")).body.decode()).get(name, {})
    found = [value for key, value in samples.items() if dict(key).items() >= labels.items()]
    return found[0] if found else 0.0


@pytest.mark.parametrize("is_tcp", [False, True])
def test_calls_of_clients_that_went_are_dropped_from_the_queue(
    maker: PackageMaker, tmp_path: Path, gate: Gate, is_tcp: bool
) -> None:
    with (
        running_linear(maker, tmp_path, models={"linear": ON_THREADS}) as service,
        contextlib.ExitStack() as stack,
    ):
        gate.shut()

        def send() -> socket.socket:
            client = stack.enter_context(service.connect_tcp() if is_tcp else service.connect())
            client.sendall(infer_bytes(X))
            return client

        lane = service.service.registry.models.find("linear", None).own_lane
        first = send()
        wait_for(lambda: not lane.is_idle, "the first call")
        others = [send() for _ in range(5)]
        stays = send()
        wait_for(lambda: metric(service, "edgekit_queue_length") >= 5, "the queue")
        for client in others:
            client.close()
        gate.open()
        assert [Replies(client).next().status for client in (first, stays)] == [200, 200]
        count = metric(service, "edgekit_requests_total", outcome="cancelled")
        assert count + metric(service, "edgekit_requests_total", outcome="succeeded") == 7
        assert count >= 4  # as many threads as processors may have begun others before


def test_client_of_the_socket_that_only_ends_its_half_gets_its_answer(
    maker: PackageMaker, tmp_path: Path, gate: Gate
) -> None:
    with running_linear(maker, tmp_path, models={"linear": ON_THREADS}) as service:
        gate.shut()
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(service.connect()) for _ in range(6)]
            for client in clients:
                client.sendall(infer_bytes(X))
                client.shutdown(socket.SHUT_WR)
            wait_for(lambda: metric(service, "edgekit_queue_length") >= 3, "the queue")
            gate.open()
            assert [Replies(client).next().status for client in clients] == [200] * 6


def test_refused_requests_are_counted_by_model_and_by_status(maker: PackageMaker, tmp_path: Path) -> None:
    with running_linear(maker, tmp_path) as service:
        assert ask(service, post_bytes("/v2/models/linear/infer", b"{}")).status == 400
        assert ask(service, post_bytes("/v2/models/linear/infer", b"[" * 5000)).status == 400
        assert ask(service, post_bytes("/v2/models/other/infer", b"{}")).status == 404
        assert ask(service, b"nonsense\r\n\r\n").status == 400
        assert metric(service, "edgekit_requests_total", model="linear", outcome="refused") == 2
        assert metric(service, "edgekit_error_answers_total", status="400") == 3
        assert metric(service, "edgekit_error_answers_total", status="404") == 1


class Endless:
    """A session whose runs end when a test says so; they cannot be cancelled, or end then."""

    def __init__(self, session: Any, *, can_cancel: bool) -> None:
        self.inputs, self.outputs, self.run, self.close = (
            *(session.inputs, session.outputs),
            *(session.run, session.close),
        )
        self.has_fixed_work = False
        self.cancelled = 0
        if can_cancel:
            self.cancel_runs = self._cancel

    def _cancel(self) -> None:
        self.cancelled += 1


@pytest.mark.parametrize("can_cancel", [True, False])
def test_run_that_does_not_stop_is_given_up_and_its_thread_replaced(
    can_cancel: bool,
) -> None:
    bench = Bench(seconds=0.5)
    session: Any = Endless(bench.session, can_cancel=can_cancel)
    lane = bench.add_lane((session,), bench.metrics, max_run_s=5.0)
    lane.submit(bench.client.call(1))
    lane.submit(bench.client.call(2))
    bench.loop.pass_s(4.0)
    assert bench.client.answers == {1: [], 2: []}
    assert bench.threads.count == 2  # one for others
    bench.loop.pass_s(4.0)
    assert isinstance(bench.client.error(1), DeadlineError)
    assert isinstance(bench.client.error(2), UnavailableError)
    assert (session.cancelled > 0) == can_cancel
    lane.submit(bench.client.call(3))
    assert "cannot be stopped" in str(bench.client.error(3))
    bench.finish()  # it has ended after all
    assert bench.threads.count == 1
    lane.submit(bench.client.call(4))
    bench.finish()
    assert bench.client.value(4)[0, 0] == 8
    assert len(bench.client.answers[1]) == 1


def test_batch_has_the_time_limit_once_for_each_of_its_calls() -> None:
    bench = Bench()
    lane = bench.add_lane((bench.session,), bench.metrics, max_run_s=5.0, max_batch=4)
    for value in (1, 2, 3):  # the first runs alone, the others share a batch
        lane.submit(bench.client.call(value))
    bench.threads.end()
    bench.loop.pass_s(8.0)
    assert bench.client.answers[2] == []
    bench.threads.end()
    assert bench.session.runs == [[1], [2, 3]]
    assert bench.client.value(2)[0, 0] == 4


def test_batch_that_takes_longer_than_its_calls_may_is_given_up() -> None:
    bench = Bench()
    lane = bench.add_lane((bench.session,), bench.metrics, max_run_s=5.0, max_batch=4)
    for value in (1, 2, 3):
        lane.submit(bench.client.call(value))
    bench.threads.end()
    bench.loop.pass_s(14.0)
    assert isinstance(bench.client.error(2), DeadlineError)
    assert isinstance(bench.client.error(3), DeadlineError)


def test_run_whose_client_has_gone_goes_on_where_stopping_it_would_stop_others() -> None:
    bench = Bench(threads=2)
    session: Any = Endless(bench.session, can_cancel=True)
    lane = bench.add_lane((session, session), bench.metrics)
    gone = threading.Event()
    lane.submit(bench.client.call(1, is_unwanted=gone.is_set))
    lane.submit(bench.client.call(2))
    gone.set()
    bench.loop.pass_s(1.0)
    assert session.cancelled == 0
    bench.finish()
    assert bench.client.value(2)[0, 0] == 4


def test_call_whose_client_goes_while_its_file_is_decoded_is_cancelled() -> None:
    bench = Bench()
    lane = bench.add_lane((bench.session,), bench.metrics)
    gone = threading.Event()
    call = bench.client.call(1, is_unwanted=gone.is_set)
    call.work = lambda run: run(call.inputs)
    lane.submit(call)
    gone.set()
    bench.loop.pass_s(1.0)
    bench.finish()
    assert isinstance(bench.client.error(1), UnavailableError)
    assert (bench.metrics.cancelled, bench.metrics.failed) == (1, 0)
