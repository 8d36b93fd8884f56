"""What a session does after a fault, and until then."""

import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.offload.onnx_models import model_of
from tests.offload.session.hostile_server import HostileServer, http, tensor_reply
from tests.offload.session.offload_parts import (
    LOCAL,
    RAW,
    X,
    Y,
    offloading,
    set_server,
    wait_until,
    write_offloaded,
)
from tests.runtime.conftest import WEIGHT, PackageMaker

from edgekit_host.emulation.testbed import Testbed
from edgekit_runtime.client.link import Link
from edgekit_runtime.errors import BackendError, UnavailableError
from edgekit_runtime.offload.choose import PlanChoice
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.offload_options import OffloadOptions
from edgekit_runtime.offload.offload_plan import PlanCosts
from edgekit_runtime.offload.offload_server import OffloadServer, Pending, Reply, TailRequest
from edgekit_runtime.offload.session import offload_state
from edgekit_runtime.offload.session.offload_state import OffloadState
from edgekit_runtime.offload.session.plan_runner import PlanRunner
from edgekit_runtime.offload.session.remote_session import RemoteSession
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.tensors import Array, TensorSpec


@pytest.fixture
def server() -> Iterator[HostileServer]:
    server = HostileServer()
    yield server
    server.close()


def test_server_is_used_again_after_its_fault_is_mended(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: HostileServer
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}")
    with offloading(maker, path) as session:
        wait_until(lambda: session.decision().plan.name == "raw", "the server is not used")
        server.misbehave = lambda *_: http(b"{}", "500 Oh")
        np.testing.assert_allclose(session.run({"x": X})["y"], Y)
        assert session.decision().plan.name == "local"
        server.misbehave = None
        wait_until(lambda: session.decision().plan.name == "raw", "the server is not used again")


def test_tail_that_fails_must_prove_itself_even_if_the_server_is_well(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: HostileServer
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}")
    asked: list[bytes] = []

    def fail(_: HostileServer, client: socket.socket, right: bytes) -> bytes:
        asked.append(right)
        return http(b"{}", "500 Oh")

    with offloading(maker, path) as session:
        wait_until(lambda: session.decision().plan.name == "raw", "the server is not used")
        server.misbehave = fail
        for _ in range(3):
            np.testing.assert_allclose(session.run({"x": X})["y"], Y)
        wait_until(lambda: len(asked) >= 2, "the tail is not asked to prove itself")
        assert session.counts.failed == 1  # of the application; the other were golden inputs
        assert session.decision().plan.name == "local"


def test_server_that_is_right_on_golden_inputs_only_is_tried_ever_more_rarely(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: HostileServer
) -> None:
    chance = SimpleNamespace(random=lambda: 1.0)  # the longest of the pauses
    monkeypatch.setattr(offload_state, "random", SimpleNamespace(Random=lambda: chance))
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}")
    x, refused_s = 7 * X, list[float]()

    def refuse_the_application(_: HostileServer, client: socket.socket, right: bytes) -> bytes:
        if right != (x @ WEIGHT).tobytes():
            return tensor_reply(right)
        refused_s.append(time.monotonic())
        return http(b"{}", "413 Payload Too Large")

    server.misbehave = refuse_the_application
    with offloading(maker, path) as session:

        def is_refused() -> bool:
            np.testing.assert_allclose(session.run({"x": x})["y"], x @ WEIGHT)
            return len(refused_s) == 4

        wait_until(is_refused, "the server is not tried again")
        pauses_s = [later - sooner for sooner, later in pairwise(refused_s)]
        assert all(pause_s > least_s for pause_s, least_s in zip(pauses_s, (0.5, 1.0, 2.0), strict=True))
        server.misbehave = None
        wait_until(lambda: session.decision().plan.name == "raw", "the server is not used again")


def test_plan_that_gives_infinity_is_left_and_the_server_is_not_blamed(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: HostileServer
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}")
    endless = np.full((1, 2), -np.inf, np.float32).tobytes()
    with offloading(maker, path) as session:
        wait_until(lambda: session.decision().plan.name == "raw", "the server is not used")
        server.misbehave = lambda *_: tensor_reply(endless)
        np.testing.assert_allclose(session.run({"x": X})["y"], Y)
        assert session.decision().plan.name == "local"
        assert session.state.breaker.is_closed
        assert "NaN or infinity in 'y'" in session.decision().reason
        server.misbehave = None
        wait_until(lambda: session.decision().plan.name == "raw", "the plan is not used again")


def test_server_without_the_tail_is_not_probed_until_it_is_asked_for_it_again(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: HostileServer
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}")
    server.misbehave = lambda *_: http(b"{}", "404 Not Found")
    monkeypatch.setattr(offload_state, "REFUSED_S", 3600.0)
    looks: list[float] = []
    preview = OffloadState.preview

    def note(self: OffloadState) -> PlanChoice:
        looks.append(time.monotonic())
        return preview(self)

    monkeypatch.setattr(OffloadState, "preview", note)  # once in each round of the prober
    with offloading(maker, path) as session:
        assert session.wait_for_probe(20)
        breaker = session.state.breaker
        wait_until(lambda: breaker.may_probe(time.monotonic()), "the pause after the fault does not end")
        before = len(looks)

        def is_looked_at() -> bool:
            session.run({"x": X})
            return len(looks) > before + 5

        wait_until(is_looked_at, "the prober has ended")
        assert not server.probes


def test_loaded_server_is_used_again_once_it_tells_a_probe_that_it_is_at_rest(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: HostileServer
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}")
    loaded = "Endpoint-Load-Metrics: TEXT application_utilization=0.99\r\n"
    with offloading(maker, path) as session:
        wait_until(lambda: session.decision().plan.name == "raw", "the server is not used")
        server.misbehave = lambda _server, _client, right: tensor_reply(right, loaded)
        session.run({"x": X})
        assert "loaded" in session.decision().reason

        def is_used() -> bool:
            session.run({"x": X})
            return session.decision().plan.name == "raw"

        def is_probed() -> bool:
            assert not is_used()
            return len(server.probes) > before

        for server.stated in (loaded, ""):  # who says nothing has not become less loaded
            before = len(server.probes) + 2
            wait_until(is_probed, "the server is not probed")
        assert server.probes[-1][0] == "/v2/models/edgekit-link-probe/versions/linear/infer"
        server.misbehave, server.stated = None, loaded.replace("0.99", "0.10")
        wait_until(is_used, "the server is not used again")


def test_link_of_zero_costs_no_answer_and_is_used_again_when_it_carries(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: HostileServer
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    with Testbed(kind="proxy") as testbed:
        host, port = testbed.reach(server.port)
        testbed.set_link(up_mbit_s=100, down_mbit_s=100, rtt_ms=1)
        set_server(tmp_path, monkeypatch, f"{host}:{port}")
        with offloading(maker, path) as session:
            wait_until(lambda: session.decision().plan.name == "raw", "the server is not used")
            testbed.block()
            for factor in range(1, 4):
                np.testing.assert_allclose(session.run({"x": X * factor})["y"], Y * factor)
            assert session.counts.hedged == 1
            assert session.decision().plan.name == "local"
            testbed.set_link(up_mbit_s=100, down_mbit_s=100, rtt_ms=1)
            wait_until(lambda: session.decision().plan.name == "raw", "the server is not used again")


def test_request_without_local_plan_waits_no_longer_than_its_limit(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: HostileServer
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, RAW)
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}", timeout_s=0.2)
    goes_on = threading.Event()
    with offloading(maker, path) as session:
        assert session.wait_for_probe(20)
        np.testing.assert_allclose(session.run({"x": X})["y"], Y)
        monkeypatch.setattr(Link, "connect", lambda *_: goes_on.wait(60))  # a name that nobody resolves
        server.hang_up()
        with pytest.raises(UnavailableError, match=r"no answer within 0\.2 s"):
            session.run({"x": X})
        assert not goes_on.is_set()
        goes_on.set()


def test_request_after_the_server_closed_an_idle_connection_is_predicted_to_connect(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: HostileServer
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}")
    with offloading(maker, path) as session:
        wait_until(lambda: session.decision().plan.name == "raw", "the server is not used")
        session.run({"x": X})
        wait_until(lambda: session.decision().conditions.server_wait_s == 0, "an open connection costs time")
        server.hang_up()
        wait_until(lambda: session.decision().conditions.server_wait_s > 0, "to connect costs no time")
        np.testing.assert_allclose(session.run({"x": X})["y"], Y)
        assert session.counts.hedged == session.counts.failed == 0


def test_prober_does_not_look_for_a_better_plan_after_each_request(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: HostileServer
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    slow = dataclasses.replace(RAW, costs=dataclasses.replace(RAW.costs, server_s=3600.0))
    write_offloaded(maker, path, dataclasses.replace(LOCAL, costs=PlanCosts(1e-4)), slow)
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}")
    looks: list[float] = []
    find = OffloadState.find_better

    def note(self: OffloadState, now_s: float) -> PlanRunner | None:
        looks.append(now_s)
        return find(self, now_s)

    monkeypatch.setattr(OffloadState, "find_better", note)
    with offloading(maker, path) as session:
        wait_until(lambda: session.state.runners["raw"].is_proved, "the server is not proved")
        until_s = time.monotonic() + 1
        while time.monotonic() < until_s:
            session.run({"x": X})
        assert looks
        assert all(later - sooner > 0.2 for sooner, later in pairwise(looks))


def make_slow_model() -> bytes:
    """Return 0 * x of x [1, 4] with the outputs of `linear`, after seconds of work on any machine."""
    side, layers = 768, 400
    weights = {
        "first": np.zeros((4, side), np.float32),
        "rows": np.zeros((side, side), np.float32),
        "w": np.eye(side, dtype=np.float32),
        "last": np.zeros((1, 2), np.float32),
    }
    nodes = [("MatMul", ["x", "first"], ["m"]), ("Add", ["m", "rows"], ["h0"])]
    nodes += [("MatMul", [f"h{n}", "w"], [f"h{n + 1}"]) for n in range(layers)]
    nodes += [("ReduceMax", [f"h{layers}"], ["top"]), ("MatMul", ["top", "last"], ["y"])]
    return model_of(nodes, {"x": [1, 4]}, ["y"], weights=weights)


def test_reply_ends_the_local_run_of_a_hedged_request(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: HostileServer
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    local = OrtSession(make_slow_model(), OrtOptions(threads=1))
    began, ended = threading.Event(), threading.Event()
    run = OrtSession.run

    def note(self: OrtSession, inputs: Mapping[str, Array]) -> dict[str, Array]:
        began.set()
        try:
            return run(self, inputs)
        except BackendError:
            ended.set()
            raise

    monkeypatch.setattr(OrtSession, "run", note)

    def answer_late(_: HostileServer, client: socket.socket, right: bytes) -> bytes:
        began.wait(20)  # the local run
        return tensor_reply(right)

    package = read_package(path, maker.trust)
    options = OffloadOptions(f"127.0.0.1:{server.port}")
    session = RemoteSession(package, CutTable((LOCAL, RAW)), options, local, None)
    wait_until(lambda: session.decision().plan.name == "raw", "the server is not used")
    server.misbehave = answer_late
    began.clear()
    np.testing.assert_allclose(session.run({"x": X})["y"], Y)  # of the server; the local model gives 0
    assert (session.counts.hedged, session.counts.remote) == (1, 1)
    assert ended.is_set()
    server.misbehave = None
    wait_until(lambda: session.decision().plan.name == "raw", "a late answer has put the server out of use")
    session.close()


class Shared:
    """A local engine whose runs can be ended; it is held up before the first one."""

    is_concurrent = True

    def __init__(self) -> None:
        self.asked, self.goes_on = threading.Event(), threading.Event()
        self.inputs = (TensorSpec("x", "float32", ("N", 4)),)
        self.outputs = (TensorSpec("y", "float32", ("N", 2)),)
        self.runs = 0

    def share(self) -> "Shared":
        self.asked.set()
        assert self.goes_on.wait(20)
        return self

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.runs += 1
        return {"y": inputs["x"] @ WEIGHT}

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_reply_that_comes_while_a_local_run_begins_keeps_it_from_running(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: HostileServer
) -> None:
    """The reply is noted before there is a local run that it could end, and the run begins after that."""
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    local, over = Shared(), threading.Event()
    send = OffloadServer.send

    def send_and_hold(
        self: OffloadServer,
        request: TailRequest,
        timeout_s: float,
        finish: Callable[[Pending, Reply], None],
    ) -> Pending:
        def hold(pending: Pending, reply: Reply) -> None:
            finish(pending, reply)
            if local.asked.is_set():
                local.goes_on.set()
                over.wait(20)

        return send(self, request, timeout_s, hold)

    def answer_late(_: HostileServer, client: socket.socket, right: bytes) -> bytes:
        local.asked.wait(20)
        return tensor_reply(right)

    monkeypatch.setattr(OffloadServer, "send", send_and_hold)
    package = read_package(path, maker.trust)
    options = OffloadOptions(f"127.0.0.1:{server.port}")
    session = RemoteSession(package, CutTable((LOCAL, RAW)), options, local, None)
    try:
        wait_until(lambda: session.decision().plan.name == "raw", "the server is not used")
        server.misbehave = answer_late
        np.testing.assert_allclose(session.run({"x": X})["y"], Y)
        assert local.runs == 0
        assert (session.counts.hedged, session.counts.remote) == (1, 1)
    finally:
        over.set()
        session.close()


def test_close_does_not_wait_for_a_server_that_never_answers(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        set_server(tmp_path, monkeypatch, f"127.0.0.1:{listener.getsockname()[1]}")
        with offloading(maker, path) as session:
            client, _ = listener.accept()
            client.recv(1)  # the probe waits for an answer
            before = {thread for thread in threading.enumerate() if thread.name == "edgekit-prober"}
            assert len(before) == 1
        # It was told to end, and not waited for until its time limit of 2 s.
        assert "no answer within" not in session.decision().reason
        wait_until(lambda: not any(thread.is_alive() for thread in before), "the prober does not end")
        client.close()
