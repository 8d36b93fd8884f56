"""One isolated model in several processes: shares of connections, a crash of one, sums."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runtime.conftest import PackageMaker
from tests.service.service_parts import Replies, Running, X, Y, infer_bytes
from tests.service.wiring_parts import load, statistics
from tests.service.worker_parts import ask_again, asking, find_model, find_pids, running_isolated
from tests.waiting import is_running, wait_for

from edgekit_runtime.system import child_process

CONNECTIONS = 6
REQUEST = infer_bytes(X)


def count_lent(service: Running) -> list[int]:
    model = find_model(service)
    counts: list[int] = service.call(lambda: [worker.lent for worker in model.workers if worker.is_ready])
    return counts


def await_processes(service: Running, count: int) -> None:
    wait_for(lambda: len(count_lent(service)) == count, f"{count} processes that have loaded the model")


def ask_on(client: socket.socket) -> None:
    client.sendall(REQUEST)
    assert Replies(client).next().binary == Y


def connect_and_ask(
    service: Running, stack: contextlib.ExitStack, connections: int = CONNECTIONS
) -> list[socket.socket]:
    """Clients that stay connected; each has had an answer."""
    clients = [stack.enter_context(service.connect()) for _ in range(connections)]
    for client in clients:
        ask_on(client)
    return clients


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("p")


@pytest.fixture(scope="module")
def shared(maker: PackageMaker, packages: Path) -> Iterator[Running]:
    """A service with a model in three processes, two of which tests kill, and which the last one swaps."""
    with running_isolated(maker, packages, processes=3, max_crashes=1000) as service:
        yield service


@pytest.fixture
def service(shared: Running) -> Running:
    await_processes(shared, 3)
    wait_for(lambda: not any(count_lent(shared)), "the end of the clients of the test before")
    return shared


def test_processes_share_connections(service: Running) -> None:
    with contextlib.ExitStack() as stack:
        connect_and_ask(service, stack)
        assert count_lent(service) == [2, 2, 2]


def test_one_process_that_stands_by_is_lent_nothing(maker: PackageMaker, tmp_path: Path) -> None:
    with (
        running_isolated(maker, tmp_path, processes=2, standby=True) as service,
        contextlib.ExitStack() as stack,
    ):
        await_processes(service, 3)
        connect_and_ask(service, stack)
        assert count_lent(service) == [3, 3, 0]
        os.kill(find_pids(service)[0], signal.SIGKILL)
        wait_for(lambda: count_lent(service)[:2] == [3, 0], "the end of one process")
        connect_and_ask(service, stack, 3)
        assert count_lent(service)[:2] == [3, 3]


def test_crash_of_one_process_leaves_the_connections_of_the_others_alone(service: Running) -> None:
    with contextlib.ExitStack() as stack:
        clients = connect_and_ask(service, stack)
        time.sleep(0.1)  # until all know that their answers are sent
        lost, *kept = find_pids(service)
        os.kill(lost, signal.SIGSEGV)
        wait_for(lambda: not is_running(lost), "the crash")
        for client in clients:  # those of the lost one too, since they were idle: the others take them
            ask_on(client)
        assert list(find_pids(service)[:2]) == kept


def test_statistics_are_sums_of_all_processes(maker: PackageMaker, tmp_path: Path) -> None:
    with running_isolated(maker, tmp_path, processes=2) as service, contextlib.ExitStack() as stack:
        await_processes(service, 2)
        clients = connect_and_ask(service, stack)
        for client in clients:
            for _ in range(10):
                ask_on(client)
        stack.close()
        asked = 11 * CONNECTIONS

        def count() -> int:
            return int(statistics(service)["inference_stats"]["success"]["count"])

        wait_for(lambda: count() == asked, "the counts of both")
        os.kill(find_pids(service)[0], signal.SIGKILL)
        await_processes(service, 2)
        assert count() == asked


def test_swap_of_all_processes_under_load_loses_no_request(
    service: Running, maker: PackageMaker, packages: Path
) -> None:
    with contextlib.ExitStack() as stack:
        old = find_pids(service)
        askers = [stack.enter_context(asking(service, "/v2/models/linear/infer")) for _ in range(4)]
        maker.write(packages / "packages" / "linear-2.edgepkg", version="2.0.0")
        assert load(service).status == 200
        await_processes(service, 3)
        time.sleep(0.2)
        stack.close()
        assert [(set(asker.statuses), asker.ends, asker.wrong) for asker in askers] == [({200}, 0, 0)] * 4
        wait_for(lambda: not any(is_running(pid) for pid in old), "the end of the old processes")


def test_end_of_a_process_is_noticed_where_the_kernel_has_no_descriptor_for_it(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "open_pidfd", lambda _pid: None)  # before Linux 5.3
    with running_isolated(maker, tmp_path) as service:
        await_processes(service, 1)
        (lost,) = find_pids(service)
        os.kill(lost, signal.SIGKILL)
        assert ask_again(service, REQUEST).binary == Y
        assert lost not in find_pids(service)
