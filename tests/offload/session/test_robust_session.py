"""What must not end, block or disturb a session that offloads."""

import dataclasses
import json
import socket
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

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
from tests.offload.session.planned_package import REMOTE, serving
from tests.runtime.conftest import PackageMaker

from edgekit_offload.packaging.submodels import attach_plans
from edgekit_offload.partition.split import split_model
from edgekit_runtime.client.link import Address
from edgekit_runtime.errors import CutError, DataError
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.offload_options import OffloadOptions
from edgekit_runtime.offload.offload_plan import Escalation, OffloadPlan
from edgekit_runtime.offload.offload_server import OffloadServer, make_tail_request
from edgekit_runtime.offload.offload_status import read_statuses
from edgekit_runtime.offload.probe_schedule import CircuitBreaker
from edgekit_runtime.offload.session.remote_session import RemoteSession
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.sessions.backends import open_session
from edgekit_runtime.sessions.session import Session
from edgekit_runtime.system.processor_speed import find_cpu
from edgekit_runtime.tensors import TensorSpec
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.plain_package import write_plain_package
from edgekit_toolkit.packaging.signing_keys import generate_key, load_signer


@pytest.fixture
def server() -> Iterator[HostileServer]:
    server = HostileServer()
    yield server
    server.close()


def test_second_answer_to_one_request_is_not_the_answer_to_the_next(server: HostileServer) -> None:
    def answer_twice(server: HostileServer, client: socket.socket, right: bytes) -> bytes:
        client.sendall(tensor_reply(right))
        time.sleep(0.05)  # the first has been read whole, so the second waits in the socket
        return tensor_reply(right)

    server.misbehave = answer_twice
    remote = OffloadServer(Address(host="127.0.0.1", port=server.port))
    for factor in range(1, 4):
        x = X * np.float32(factor)
        request = make_tail_request(
            "linear", {"x": x}, (TensorSpec("y", "float32", (1, 2)),), "identity", remote.fields
        )
        pending = remote.send(request, 10.0, lambda *_: None)
        assert pending.done.wait(20)
        assert pending.reply is not None
        assert pending.reply.outputs is not None
        np.testing.assert_allclose(pending.reply.outputs["y"], Y * factor)
        time.sleep(0.1)
    remote.close()


def test_reply_with_the_id_of_another_request_is_not_used(server: HostileServer) -> None:
    server.misbehave = lambda _server, _client, right: tensor_reply(right, request_id="another")
    remote = OffloadServer(Address(host="127.0.0.1", port=server.port))
    request = make_tail_request(
        "linear", {"x": X}, (TensorSpec("y", "float32", (1, 2)),), "identity", remote.fields
    )
    pending = remote.send(request, 10.0, lambda *_: None)
    assert pending.done.wait(20)
    assert pending.reply is not None
    assert "another request" in str(pending.reply.error)
    remote.close()


def test_abort_after_the_reply_spares_the_next_request_on_the_connection(server: HostileServer) -> None:
    remote = OffloadServer(Address(host="127.0.0.1", port=server.port))
    request = make_tail_request(
        "linear", {"x": X}, (TensorSpec("y", "float32", (1, 2)),), "identity", remote.fields
    )
    first = remote.send(request, 10.0, lambda *_: None)
    assert first.done.wait(20)
    first.abort()
    assert not first.is_aborted
    second = remote.send(request, 10.0, lambda *_: first.abort())
    assert second.done.wait(20)
    assert second.reply is not None
    assert second.reply.outputs is not None
    remote.close()


def test_server_that_reads_no_zstd_gets_plain_bodies(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: HostileServer
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    costs = dataclasses.replace(RAW.costs, upload_bytes=8.0, plain_bytes=16.0)
    write_offloaded(maker, path, LOCAL, dataclasses.replace(RAW, compression="zstd", costs=costs))
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}")
    with offloading(maker, path) as session:
        wait_until(lambda: session.decision().plan.name == "raw", "the server is not used")
        np.testing.assert_allclose(session.run({"x": X})["y"], Y)
        assert server.refused == 1
        assert session.decision().plan.compression == "identity"
        assert session.decision().plan.costs.upload_bytes == 16.0


def test_link_is_probed_with_bytes_that_do_not_compress_while_all_runs_locally(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: HostileServer
) -> None:
    heavy = dataclasses.replace(RAW, costs=dataclasses.replace(RAW.costs, upload_bytes=1e9))
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, heavy)
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}")
    with offloading(maker, path) as session:

        def is_probed() -> bool:
            session.run({"x": X})
            return bool(server.probes)

        wait_until(is_probed, "the link is not probed")
        assert session.decision().plan.name == "local"
    body = server.probes[0][1]
    assert len(zlib.compress(body)) > 0.9 * len(body) >= 0.9 * (12 << 10)


def test_server_that_asks_for_endless_patience_is_tried_again_within_a_minute() -> None:
    breaker = CircuitBreaker()
    breaker.fail(0.0, "loaded", chance=0.5, at_least_s=10**400)
    assert not breaker.may_probe(59.0)
    assert breaker.may_probe(60.0)


def test_words_of_a_server_are_shown_short_and_without_control_characters(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: HostileServer
) -> None:
    said = json.dumps({"error": "\x1b]0;owned\x07\n" + "x" * 100_000}).encode()
    server.misbehave = lambda *_: http(said, "500 Oh")
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}")
    with offloading(maker, path) as session:
        wait_until(lambda: "owned" in session.decision().reason, "the reason is not shown")
        assert session.decision().reason.isprintable()
        assert len(session.decision().reason) < 400
        wait_until(lambda: any("owned" in one["reason"] for one in read_statuses()), "no status is written")


@pytest.mark.parametrize("is_foreign", [True, False])
def test_status_says_whether_the_plans_were_measured_on_another_device(
    maker: PackageMaker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: HostileServer,
    *,
    is_foreign: bool,
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW, device=f"{'Cortex-A5' if is_foreign else find_cpu()}, 4 cores")
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}")
    with offloading(maker, path):
        wait_until(lambda: len(read_statuses()) == 1, "no status is written")
        (status,) = read_statuses()
    assert ("another device, Cortex-A5, 4 cores" in status["device"]) == is_foreign
    assert bool(status["device"]) == is_foreign


def test_fault_of_a_probe_that_nobody_foresaw_does_not_end_probing(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: HostileServer
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}")
    right, calls = OffloadServer.measure_round_trip, []

    def fail_once(self: OffloadServer, timeout_s: float) -> tuple[float, float]:
        calls.append(timeout_s)
        if len(calls) == 1:
            raise RuntimeError("a bug")
        return right(self, timeout_s)

    monkeypatch.setattr(OffloadServer, "measure_round_trip", fail_once)
    with offloading(maker, path) as session:
        wait_until(lambda: session.decision().plan.name == "raw", "the server is not used")


@pytest.mark.parametrize("inputs", [{"x": X, "more": X}, {"z": X}, {"x": np.float32(1)}, {"x": 3}, {}])
def test_wrong_inputs_are_refused_and_leave_the_plan_alone(
    maker: PackageMaker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: HostileServer,
    inputs: dict[str, np.ndarray],
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}")
    with offloading(maker, path) as session:
        wait_until(lambda: session.decision().plan.name == "raw", "the server is not used")
        with pytest.raises(DataError):
            session.run(inputs)
        assert session.decision().plan.name == "raw"


class OneAtATime:
    """A session of an engine that several threads may not use at one time."""

    def __init__(self, session: Session) -> None:
        self.inputs, self.outputs = session.inputs, session.outputs
        self.run, self.close = session.run, session.close


@pytest.mark.parametrize("is_concurrent", [True, False])
def test_session_is_concurrent_only_if_its_local_engine_is(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_concurrent: bool
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    package = read_package(path, maker.trust)
    local = open_session(package.share())
    engine = local if is_concurrent else OneAtATime(local)
    session = RemoteSession(package, CutTable((LOCAL, RAW)), OffloadOptions("127.0.0.1:9"), engine, None)
    assert session.is_concurrent == is_concurrent
    session.close()


def write_two_inputs(folder: Path, *, escalation: Escalation | None = None) -> Path:
    """Write a package of relu(x w) + z, whose head only passes `z` on."""
    keys = folder / "keys"
    generate_key("default", keys)
    sign = load_signer(folder=keys)
    nodes = [("MatMul", ["x", "w"], ["m"]), ("Relu", ["m"], ["r"]), ("Add", ["r", "z"], ["y"])]
    weights = {"w": np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)}
    model = model_of(nodes, {"x": ["N", 4], "z": ["N", 2]}, ["y"], weights=weights)
    (folder / "model.onnx").write_bytes(model)
    plain = write_plain_package(folder / "model.onnx", name="two", target="x86-64", folder=folder, sign=sign)
    plan = OffloadPlan("cut", REMOTE, head="cut.head", tail="cut.tail", escalation=escalation)
    made = folder / "made"
    made.mkdir()
    with read_package(plain, TrustStore.from_folder(keys)) as package:
        table = CutTable((LOCAL, plan))
        return attach_plans(package, {"cut": split_model(model, range(2))}, table, folder=made, sign=sign)


def test_input_that_only_the_tail_computes_with_gets_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_two_inputs(tmp_path)
    trust = TrustStore.from_folder(tmp_path / "keys")
    inputs = {"x": np.ones((3, 4), np.float32), "z": np.ones((3, 2), np.float32)}
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "none"))
    local = open_session(path, trust=trust)
    expected = local.run(inputs)["y"]
    local.close()
    with serving(tmp_path, tmp_path, "--tails", path) as server:
        set_server(tmp_path, monkeypatch, server, plan="cut")
        session = open_session(path, trust=trust)
        assert isinstance(session, RemoteSession)
        wait_until(lambda: session.decision(3).plan.name == "cut", "the server is not used")
        np.testing.assert_allclose(session.run(inputs)["y"], expected, rtol=1e-6)
        assert session.counts.remote == 1
        session.close()


def test_cascade_whose_head_lacks_an_output_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_two_inputs(tmp_path, escalation=Escalation("r", 0.5, 0.5))
    set_server(tmp_path, monkeypatch, "127.0.0.1:9")
    with pytest.raises(CutError, match="does not give y"):
        open_session(path, trust=TrustStore.from_folder(tmp_path / "keys"))
