"""Isolated models: who answers, what a crash costs, what a hang costs, swaps, ends; with real processes."""

import contextlib
import os
import signal
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.descriptor_parts import count_descriptors
from tests.runtime.conftest import WEIGHT, PackageMaker
from tests.service.service_parts import Replies, Running, X, Y, ask, get_bytes, infer_bytes
from tests.service.wiring_parts import load
from tests.service.worker_parts import (
    OTHER,
    SLOW,
    ask_again,
    asking,
    find_pids,
    kill,
    running_isolated,
    slow_input,
    wait_backed,
)
from tests.waiting import is_running, wait_for

from edgekit_runtime.client import Client
from edgekit_runtime.service.workers import restart_policy
from edgekit_runtime.sessions.local_results import Tuned, keep_tuned

LINEAR = "/v2/models/linear/infer"


@pytest.fixture(scope="module")
def isolated(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    # The tests of this file share it and crash it often, which in life would reject the version.
    with running_isolated(
        maker,
        tmp_path_factory.mktemp("w"),
        slow=True,
        max_crashes=1000,
        max_delay_s=0.3,
        max_data_bytes=2 << 30,
        niceness=5,
        oom_score=300,
    ) as service:
        yield service


@pytest.fixture(autouse=True)
def _whole(request: pytest.FixtureRequest) -> None:
    """Each test begins with living workers, whatever the one before did."""
    if "isolated" in request.fixturenames:
        service = request.getfixturevalue("isolated")
        ask_again(service, infer_bytes(X))
        ask_again(service, infer_bytes(slow_input(1), path=SLOW))


def count_lent(service: Running) -> int:
    count: int = service.call(lambda: service.service.http.lent)
    return count


def test_request_is_answered_by_the_worker_itself(isolated: Running) -> None:
    wait_for(lambda: count_lent(isolated) == 0, "all other connections to end")
    with isolated.connect() as client:
        client.sendall(infer_bytes(X))
        assert Replies(client).next().binary == Y
        assert count_lent(isolated) == 1
    wait_for(lambda: count_lent(isolated) == 0, "the connection to end in the service too")


def test_pipelined_requests_to_all_models_are_answered_in_order(isolated: Running) -> None:
    parts, expected = [], []
    for number in range(60):
        x = np.full((1, 4), number, np.float32)
        parts += [infer_bytes(x), infer_bytes(x, path=OTHER), infer_bytes(slow_input(1), path=SLOW)]
        expected += [(x @ WEIGHT).tobytes()] * 2 + [slow_input(1).tobytes()]
    with isolated.connect() as client:
        client.sendall(b"".join(parts) + get_bytes("/v2"))
        replies = Replies(client)
        for binary in expected:
            assert replies.next().binary == binary
        assert replies.next().json["name"] == "edgekit"


def test_metadata_and_readiness_are_as_without_isolation(isolated: Running) -> None:
    described = ask(isolated, get_bytes("/v2/models/linear")).json
    other = ask(isolated, get_bytes("/v2/models/other")).json
    assert {**described, "name": "other"} == other
    assert ask(isolated, get_bytes("/v2/models/linear/ready")).json["ready"] is True


def test_wrong_inputs_are_refused_by_the_worker_and_the_connection_stays(isolated: Running) -> None:
    with isolated.connect() as client:
        replies = Replies(client)
        client.sendall(infer_bytes(np.zeros((1, 3), np.float32)))
        assert replies.next().status == 400
        client.sendall(infer_bytes(X) + get_bytes(LINEAR))
        assert replies.next().binary == Y
        assert replies.next().status == 405


@pytest.mark.parametrize("number", [signal.SIGSEGV, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_crash_under_load_costs_other_models_nothing(isolated: Running, number: int) -> None:
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(asking(isolated, OTHER, tcp=tcp)) for tcp in (False, True)]
        own = [stack.enter_context(asking(isolated, LINEAR)) for _ in range(2)]
        time.sleep(0.3)
        pid = kill(isolated, number)
        wait_for(lambda: not is_running(pid), "the end of the worker")
        ask_again(isolated, infer_bytes(X))
        time.sleep(0.2)
    assert [(set(asker.statuses), asker.ends, asker.wrong) for asker in others] == [({200}, 0, 0)] * 2
    assert all(asker.wrong == 0 and set(asker.statuses) <= {200, 503} for asker in own)
    assert all(asker.ends <= 1 for asker in own)  # an answer may have been under way


def test_idle_connection_outlives_the_worker(isolated: Running) -> None:
    with isolated.connect() as client, isolated.connect_tcp() as over_tcp:
        for connection in (client, over_tcp):
            connection.sendall(infer_bytes(X))
            assert Replies(connection).next().binary == Y
        time.sleep(0.1)  # until the worker knows that the answers are sent
        pid = kill(isolated, signal.SIGSEGV)
        wait_for(lambda: not is_running(pid), "the end of the worker")
        for connection in (client, over_tcp):
            connection.sendall(infer_bytes(X, path=OTHER))
            assert Replies(connection).next().binary == Y
        ask_again(isolated, infer_bytes(X))
        for connection in (client, over_tcp):
            connection.sendall(infer_bytes(X))
            assert Replies(connection).next().binary == Y


def test_request_that_a_stopped_worker_never_read_is_not_lost(isolated: Running) -> None:
    with isolated.connect() as client:
        replies = Replies(client)
        client.sendall(infer_bytes(X))
        replies.next()
        time.sleep(0.1)  # until the worker knows that the answer is sent
        pid = kill(isolated, signal.SIGSTOP)
        client.sendall(infer_bytes(X, path=OTHER) + infer_bytes(X))
        os.kill(pid, signal.SIGKILL)
        assert replies.next().binary == Y
        assert replies.next().status in (200, 503)


def test_crash_while_a_body_is_received_is_answered_with_503(isolated: Running) -> None:
    request = infer_bytes(X)
    with isolated.connect() as client:
        client.sendall(request[:-4])
        wait_for(lambda: count_lent(isolated), "the connection to be lent")
        time.sleep(0.1)
        kill(isolated, signal.SIGSEGV)
        reply = Replies(client).next()
    assert (reply.status, reply.fields["connection"], reply.fields["retry-after"]) == (503, "close", "1")


def test_crash_while_the_model_runs_is_answered_with_503(isolated: Running) -> None:
    with isolated.connect() as client:
        client.sendall(infer_bytes(slow_input(20_000), path=SLOW))
        wait_for(lambda: count_lent(isolated), "the connection to be lent")
        time.sleep(0.3)
        kill(isolated, signal.SIGSEGV, "slow")
        replies = Replies(client)
        reply = replies.next()
        assert (reply.status, reply.fields["retry-after"]) == (503, "1")
        assert replies.is_closed()


def test_crash_while_an_answer_is_sent_closes_the_connection(isolated: Running) -> None:
    with isolated.connect() as client:
        client.sendall(infer_bytes(slow_input(1000), path=SLOW))
        client.recv(1000)
        kill(isolated, signal.SIGSEGV, "slow")
        with contextlib.suppress(ConnectionResetError):
            while received := client.recv(1 << 16):
                assert b"HTTP/1.1" not in received


def test_statistics_outlive_the_worker(isolated: Running) -> None:
    def count() -> int:
        stats = ask(isolated, get_bytes("/v2/models/linear/stats")).json["model_stats"][0]
        number: int = stats["inference_stats"]["success"]["count"]
        return number

    ask_again(isolated, infer_bytes(X))
    before = wait_for(count, "what the worker counted")
    time.sleep(1.2)  # two beats
    before = count()
    kill(isolated, signal.SIGKILL)
    ask_again(isolated, infer_bytes(X))
    wait_for(lambda: count() > before, "what the next worker counted")


def test_crashes_leak_no_descriptors(isolated: Running) -> None:
    def crash() -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(8):
                client = stack.enter_context(isolated.connect())
                client.sendall(infer_bytes(X) + infer_bytes(X)[:-1])
                Replies(client).next()
            kill(isolated, signal.SIGKILL)
        ask_again(isolated, infer_bytes(X))

    crash()
    wait_for(lambda: count_lent(isolated) == 0, "all connections to end")
    before = count_descriptors()
    crash()
    wait_for(lambda: count_lent(isolated) == 0, "all connections to end")
    wait_for(lambda: count_descriptors() <= before, "all descriptors to be closed")


def test_region_of_shared_memory_reaches_the_worker_and_ends_with_its_connection(isolated: Running) -> None:
    with Client(isolated.socket_path) as client:
        x, y = client.shared((1, 4)), client.shared((1, 2))
        x[...] = X
        for _ in range(3):
            y[...] = 0
            client.infer("linear", {"x": x}, outputs={"y": y})
            assert y.tobytes() == Y
        kill(isolated, signal.SIGKILL)
        ask_again(isolated, infer_bytes(X))
        client.infer("linear", {"x": x}, outputs={"y": y})
    status = get_bytes("/v2/systemsharedmemory/status")
    wait_for(lambda: ask(isolated, status).json == [], "the region to be gone")


def test_memory_is_still_its_own_on_a_connection_that_a_worker_had(isolated: Running) -> None:
    with Client(isolated.socket_path) as client:
        for _ in range(2):  # each is registered after the connection has come back
            client.infer("linear", {"x": client.shared((1, 4))})
        status = "/v2/systemsharedmemory/status"
        assert len(client._call("GET", status)) == 2
        client._call("POST", "/v2/systemsharedmemory/unregister")
        assert client._call("GET", status) == []


def test_stopped_worker_is_replaced(maker: PackageMaker, tmp_path: Path) -> None:
    with running_isolated(maker, tmp_path, hang_s=1.0) as service, service.connect() as client:
        pid = kill(service, signal.SIGSTOP)
        client.sendall(infer_bytes(X))  # lent to the stopped worker, which never reads it
        with service.connect() as other:
            other.sendall(infer_bytes(X, path=OTHER))
            assert Replies(other).next().binary == Y
        assert Replies(client).next().status == 503
        ask_again(service, infer_bytes(X))
        assert not is_running(pid)
        assert find_pids(service) != (pid,)


def test_standby_takes_over(maker: PackageMaker, tmp_path: Path) -> None:
    with running_isolated(maker, tmp_path, standby=True) as service:
        wait_backed(service)
        first, second = find_pids(service)
        with service.connect() as client:
            replies = Replies(client)
            client.sendall(infer_bytes(X))
            replies.next()
            time.sleep(0.1)  # until the worker knows that the answer is sent
            os.kill(first, signal.SIGSEGV)
            wait_for(lambda: find_pids(service)[0] == second, "the switch")
            client.sendall(infer_bytes(X))
            assert replies.next().binary == Y
        wait_for(lambda: len(find_pids(service)) == 2, "another worker that stands by")


def test_swap_under_load_loses_no_request(maker: PackageMaker, tmp_path: Path) -> None:
    with running_isolated(maker, tmp_path) as service, contextlib.ExitStack() as stack:
        first = find_pids(service)
        askers = [stack.enter_context(asking(service, LINEAR)) for _ in range(3)]
        maker.write(tmp_path / "packages" / "linear-2.edgepkg", version="2.0.0")
        assert load(service).status == 200
        assert ask(service, get_bytes("/v2/models/linear")).json["versions"] == ["2.0.0"]
        time.sleep(0.2)
        stack.close()
        assert [(set(asker.statuses), asker.ends, asker.wrong) for asker in askers] == [({200}, 0, 0)] * 3
        wait_for(lambda: not is_running(first[0]), "the end of the old worker")


def test_limits_hold_in_the_worker(isolated: Running) -> None:
    proc = Path(f"/proc/{find_pids(isolated)[0]}")
    limits = (proc / "limits").read_text()
    assert str(2 << 30) in next(line for line in limits.splitlines() if line.startswith("Max data size"))
    assert int((proc / "oom_score_adj").read_text()) >= 300
    niceness = os.getpriority(os.PRIO_PROCESS, int(proc.name))
    assert niceness >= min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)


def test_worker_runs_as_tuned_here(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    manifest = maker.manifest()
    threads = []
    for count in (1, 4):
        keep_tuned(manifest, manifest.backend, Tuned("latency", {"threads": count}))
        folder = tmp_path / str(count)
        folder.mkdir()
        with running_isolated(maker, folder) as service:
            ask_again(service, infer_bytes(X))
            threads.append(len(list(Path(f"/proc/{find_pids(service)[0]}/task").iterdir())))
    assert threads[1] - threads[0] == 3  # onnxruntime starts one fewer than it uses


def test_worker_without_memory_to_load_is_refused_with_its_reason(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_policy, "MAX_FIRST_REFUSALS", 2)
    with running_isolated(maker, tmp_path, max_data_bytes=30 << 20) as service:
        assert ask(service, infer_bytes(X, path=OTHER)).binary == Y
        reply = ask(service, infer_bytes(X))
        assert reply.status == 503
        assert "in its worker" in reply.json["error"]


def test_stop_answers_what_a_worker_has_under_way(maker: PackageMaker, tmp_path: Path) -> None:
    with running_isolated(maker, tmp_path, slow=True) as service:
        pids = (*find_pids(service), *find_pids(service, "slow"))
        client = service.connect()
        x = slow_input(100)
        client.sendall(infer_bytes(x, path=SLOW))
        wait_for(lambda: count_lent(service), "the connection to be lent")
    with client:
        assert Replies(client).next().binary == x.tobytes()  # it fits into what the kernel holds
    wait_for(lambda: not any(map(is_running, pids)), "the end of all workers")


def test_stranger_is_refused_on_a_lent_connection(isolated: Running) -> None:
    with isolated.connect_tcp() as client:
        replies = Replies(client)
        client.sendall(infer_bytes(X))
        assert replies.next().binary == Y
        client.sendall(infer_bytes(X, fields="Origin: http://evil\r\n"))
        assert replies.next().status == 403


def test_encrypted_connection_is_answered_by_the_worker(
    maker: PackageMaker, tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    listen = {"tls_certificate": str(certificate[0]), "tls_key": str(certificate[1])}
    context = ssl.create_default_context(cafile=str(certificate[0]))
    with (
        running_isolated(maker, tmp_path, config={"listen": listen}) as service,
        service.connect_tcp() as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as client,
    ):
        replies = Replies(client)
        for path in (LINEAR, OTHER, LINEAR):
            client.sendall(infer_bytes(X, path=path))
            assert replies.next().binary == Y
        assert count_lent(service) == 1
        time.sleep(0.1)  # until the worker knows that the answer is sent
        kill(service, signal.SIGSEGV)
        client.sendall(infer_bytes(X, path=OTHER))
        assert replies.next().binary == Y
