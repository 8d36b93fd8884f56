"""Which local runs beside late requests are charged, and what the debt of them may not do."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from tests.offload.session.hostile_server import HostileServer, Misbehave, tensor_reply
from tests.offload.session.offload_parts import RAW, WEIGHT, X, Y, wait_until, write_offloaded
from tests.runtime.conftest import PackageMaker

from edgekit_runtime.errors import BackendError
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.offload_options import OffloadOptions
from edgekit_runtime.offload.offload_plan import OffloadPlan, PlanCosts
from edgekit_runtime.offload.session.remote_session import RemoteSession
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.sessions.backends import open_session
from edgekit_runtime.sessions.session import Session
from edgekit_runtime.tensors import Array

LOCAL = OffloadPlan("local", PlanCosts(0.1))
RUN_S = 0.5  # more than the four runs of LOCAL that are free


class SlowLocal:
    """A local engine that takes longer than planned, and fails when it is told to."""

    is_concurrent = True

    def __init__(self, session: Session) -> None:
        self.inputs, self.outputs, self.close = session.inputs, session.outputs, session.close
        self.fails = False
        self.over = threading.Event()  # a run has ended

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        try:
            if self.fails:
                raise BackendError("the engine is broken")
            time.sleep(RUN_S)
            return {"y": inputs["x"] @ WEIGHT}
        finally:
            self.over.set()


@pytest.fixture
def server() -> Iterator[HostileServer]:
    server = HostileServer()
    yield server
    server.close()


@contextlib.contextmanager
def hedging(
    maker: PackageMaker, folder: Path, server: HostileServer
) -> Iterator[tuple[RemoteSession, SlowLocal]]:
    """Open a session whose requests add nothing to its credit, and that uses the server."""
    path = folder / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    package = read_package(path, maker.trust)
    local = SlowLocal(open_session(package.share()))
    options = OffloadOptions(f"127.0.0.1:{server.port}", hedge_share=0.0)
    session = RemoteSession(package, CutTable((LOCAL, RAW)), options, local, None)
    try:
        wait_until(lambda: session.decision().plan.name == "raw", "the server is not used")
        yield session, local
    finally:
        session.close()


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))


def stall(server: HostileServer, client: socket.socket, right: bytes) -> None:
    server.over.wait(20)


def answer_after(local: SlowLocal, late_s: float) -> Misbehave:
    """Return what answers rightly, once a local run has ended and some time more."""

    def answer(server: HostileServer, client: socket.socket, right: bytes) -> bytes:
        local.over.wait(20)
        server.over.wait(late_s)
        return tensor_reply(right)

    return answer


def run_once(session: RemoteSession, server: HostileServer, misbehave: Misbehave) -> None:
    """Ask once, hedged, of a server that misbehaves for this request."""
    server.misbehave, hedged = misbehave, session.counts.hedged
    np.testing.assert_allclose(session.run({"x": X})["y"], Y)
    server.misbehave = None
    assert session.counts.hedged == hedged + 1


def is_in_debt(session: RemoteSession) -> bool:
    return "used up their share" in session.decision().reason


def test_local_run_in_place_of_a_silent_server_is_not_charged(
    maker: PackageMaker, tmp_path: Path, server: HostileServer
) -> None:
    with hedging(maker, tmp_path, server) as (session, _):
        run_once(session, server, stall)
        wait_until(lambda: session.decision().plan.name == "raw", "the server is not used again")


def test_local_run_beside_a_reply_that_comes_after_it_is_charged(
    maker: PackageMaker, tmp_path: Path, server: HostileServer
) -> None:
    with hedging(maker, tmp_path, server) as (session, local):
        run_once(session, server, answer_after(local, 0.1))
        wait_until(lambda: is_in_debt(session), "the local run is not charged")


def test_wait_for_a_reply_after_the_engine_failed_is_not_charged(
    maker: PackageMaker, tmp_path: Path, server: HostileServer
) -> None:
    with hedging(maker, tmp_path, server) as (session, local):
        local.fails = True
        run_once(session, server, answer_after(local, 0.6))
        assert session.counts.remote == 1
        local.fails = False
        run_once(session, server, stall)  # after which a debt would count again
        wait_until(lambda: session.decision().plan.name == "raw", "waiting has led to debt")


def test_debt_does_not_keep_requests_from_the_server_where_the_engine_fails(
    maker: PackageMaker, tmp_path: Path, server: HostileServer
) -> None:
    with hedging(maker, tmp_path, server) as (session, local):
        run_once(session, server, answer_after(local, 0.1))
        wait_until(lambda: is_in_debt(session), "the local run is not charged")
        local.fails = True
        with pytest.raises(BackendError, match="broken"):
            session.run({"x": X})
        assert session.decision().plan.name == "raw"
        np.testing.assert_allclose(session.run({"x": X})["y"], Y)
        assert session.counts.remote == 1
