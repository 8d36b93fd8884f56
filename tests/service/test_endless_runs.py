"""Runs that never end: they freeze nothing, are stopped, and their model comes back."""

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.conftest import PackageMaker
from tests.runtime.slot_cases import write_keys
from tests.service.endless_parts import HOSTILE, with_loop, write_while
from tests.service.serve_parts import Served, served
from tests.service.service_parts import Replies, X, Y, get_bytes, infer_bytes
from tests.waiting import wait_for

PATH = "/v2/models/endless/infer"
KINDS = [
    "loop",
    *(pytest.param(kind, marks=pytest.mark.long) for kind in ("while", "condition", "loop-isolated")),
]
CALM = np.array([[-1, 0, 0, -3]], np.float32)
"""What asks for no round."""


def write(maker: PackageMaker, folder: Path, kind: str) -> list[str]:
    """Write a package of the model `endless`; returns the arguments that serve it."""
    path = folder / "endless.edgepkg"
    if kind == "while":
        write_while(maker, path, "endless")
    else:
        with_loop(maker, is_counted=kind != "condition").write(path, name="endless")
    return ["--package", str(path), *(["--isolate", "endless"] if kind.endswith("isolated") else [])]


def configure(folder: Path, text: str) -> list[str]:
    path = folder / "service.toml"
    path.write_text(text)
    return ["--config", str(path)]


def attack(service: Served, count: int = 1) -> list[socket.socket]:
    """Send hostile requests; each begins to run if there is a thread for it."""
    clients = [service.connect() for _ in range(count)]
    for client in clients:
        client.sendall(infer_bytes(HOSTILE, path=PATH))
    return clients


def ask(service: Served, request: bytes) -> Any:
    with service.connect() as client:
        client.sendall(request)
        return Replies(client).next()


def ask_until_back(service: Served) -> None:
    def is_back() -> bool:
        return bool(ask(service, infer_bytes(CALM, path=PATH)).status == 200)

    wait_for(is_back, "the model that was attacked")


def check_others(service: Served) -> None:
    """Health, metrics and another model answer."""
    assert ask(service, get_bytes("/v2/health/ready")).status == 200
    assert ask(service, get_bytes("/metrics")).status == 200
    assert ask(service, infer_bytes(X)).binary == Y


@pytest.fixture(scope="module", params=KINDS)
def attacked(
    request: pytest.FixtureRequest, maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A service with a model that a request may keep busy for ever, its time limit a second.

    Each test leaves it well, and the last one ends it.
    """
    folder = tmp_path_factory.mktemp("s")
    maker.write(folder / "linear.edgepkg")
    write_keys(folder / "keys")
    limits = configure(folder, "[models.endless.scheduling]\nmax_run_s = 1\nmax_batch = 4\n")
    with served(folder, *write(maker, folder, request.param), *limits) as service:
        assert ask(service, infer_bytes(CALM, path=PATH)).status == 200
        yield service


def test_while_a_run_never_ends_all_else_answers_and_the_run_is_stopped_in_time(attacked: Served) -> None:
    (client,) = attack(attacked)
    with client:
        for _ in range(5):
            check_others(attacked)
        reply = Replies(client).next()
        assert (reply.status, "max_run_s" in reply.json["error"]) == (504, True)
    ask_until_back(attacked)


def test_run_whose_client_has_gone_is_stopped_before_its_time_limit(
    maker: PackageMaker, folder: Path
) -> None:
    limits = configure(folder, "[models.endless.scheduling]\nmax_run_s = 0\n")
    with served(folder, *write(maker, folder, "loop"), *limits) as service:
        (client,) = attack(service)
        check_others(service)
        client.close()
        ask_until_back(service)


def test_client_that_leaves_an_isolated_run_which_cannot_be_stopped_costs_one_restart(
    maker: PackageMaker, folder: Path
) -> None:
    with served(folder, *write(maker, folder, "while")) as service:
        (client,) = attack(service)
        check_others(service)
        client.close()
        ask_until_back(service)
        metrics = ask(service, get_bytes("/metrics")).body.decode()
        assert 'edgekit_worker_restarts_total{model="endless",version="1.0.0"} 1' in metrics


def test_many_endless_runs_at_once_keep_no_other_model_waiting(attacked: Served, is_long: bool) -> None:
    clients = attack(attacked, 40 if is_long else 12)
    for _ in range(5):
        check_others(attacked)
    for client in clients:
        client.close()
    ask_until_back(attacked)


def test_sigterm_ends_the_service_whatever_runs(attacked: Served) -> None:
    (client,) = attack(attacked)
    with client:
        check_others(attacked)
        code, printed = attacked.end(signal.SIGTERM)  # its time is in docs/benchmarks.md
        assert (code, "stopped" in printed) == (0, True), printed
