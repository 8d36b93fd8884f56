"""Servers that lie, stall and die: every answer is right all the same."""

import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.offload.session.hostile_server import HostileServer, Misbehave, http, tensor_reply
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
from tests.runtime.conftest import PackageMaker

from edgekit_runtime.errors import BackendError, SignatureError, UnavailableError
from edgekit_toolkit.packaging.signing_keys import StatementSigner


def stall(server: HostileServer, client: socket.socket, right: bytes) -> None:
    server.over.wait(20)


def drip(server: HostileServer, client: socket.socket, right: bytes) -> None:
    for byte in tensor_reply(right):
        client.sendall(bytes([byte]))
        if server.over.wait(0.05):
            return


def die_halfway(server: HostileServer, client: socket.socket, right: bytes) -> None:
    client.sendall(tensor_reply(right)[:-3])
    client.shutdown(socket.SHUT_RDWR)


def compute_something_else(server: HostileServer, client: socket.socket, right: bytes) -> bytes:
    return tensor_reply((np.frombuffer(right, np.float32) + 1).tobytes())


def say(reply: bytes) -> Misbehave:
    return lambda server, client, right: reply


NAN = np.full((1, 2), np.nan, np.float32).tobytes()
FAULTS: dict[str, Misbehave] = {
    "stalls": stall,
    "drips": drip,
    "dies halfway": die_halfway,
    "dies": lambda server, client, right: None,
    "other shape": lambda server, client, right: tensor_reply(right, shape=[2, 1]),
    "more rows": lambda server, client, right: tensor_reply(right * 2),
    "other dtype": lambda server, client, right: tensor_reply(right, datatype="INT32"),
    "other name": lambda server, client, right: tensor_reply(right, name="z"),
    "NaN": say(tensor_reply(NAN)),
    "empty tensor": say(tensor_reply(b"", shape=[1, 2])),
    "short tensor": lambda server, client, right: tensor_reply(right[:4], shape=[1, 2]),
    "more than it states": lambda server, client, right: http(
        tensor_reply(right).partition(b"\r\n\r\n")[2] + b"more",
        fields=tensor_reply(right).decode("latin-1").split("\r\n")[1] + "\r\n",
    ),
    "empty 200": say(http(b"")),
    "no JSON": say(http(b"\xff" * 100)),
    "another protocol": say(b"220 mail.example ESMTP\r\n" * 20),
    "huge length": say(http(b"", length=1 << 50)),
    "redirect": say(http(b"", "307 Temporary Redirect", "Location: http://127.0.0.1:1/\r\n")),
    "overloaded": say(http(b"{}", "503 Busy", "Retry-After: 3600\r\n")),
    "overloaded for ever": say(http(b"{}", "503 Busy", f"Retry-After: {'9' * 400}\r\n")),
    "other version": say(http(b'{"error":"no such model"}', "404 Not Found")),
    "lies about its time": lambda server, client, right: tensor_reply(
        right, "Server-Timing: compute;dur=1e308, queue;dur=nan\r\nEndpoint-Load-Metrics: TEXT x=,=\r\n"
    ),
}


@pytest.fixture
def server() -> Iterator[HostileServer]:
    server = HostileServer()
    yield server
    server.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_server_never_changes_an_answer(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: HostileServer, fault: str
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}")
    with offloading(maker, path) as session:

        def is_used() -> bool:
            np.testing.assert_allclose(session.run({"x": X})["y"], Y)
            return session.counts.remote > 0 and session.decision().plan.name == "raw"

        wait_until(is_used, "the server is not used")
        before = dataclasses.replace(session.counts)
        server.misbehave = FAULTS[fault]
        for factor in range(1, 6):
            np.testing.assert_allclose(session.run({"x": X * factor})["y"], Y * factor)
        if fault != "lies about its time":
            noticed = session.counts.failed + session.counts.hedged
            assert noticed > before.failed + before.hedged
            assert session.counts.remote == before.remote


def test_server_that_computes_something_else_is_never_used(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: HostileServer
) -> None:
    server.misbehave = compute_something_else
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}")
    with offloading(maker, path) as session:
        assert session.wait_for_probe(20)
        for _ in range(5):
            np.testing.assert_allclose(session.run({"x": X})["y"], Y)
        assert session.counts.remote == 0
        assert "something else" in session.decision().reason


def test_server_that_computes_something_else_is_not_used_where_the_device_cannot_run_the_model(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: HostileServer
) -> None:
    server.misbehave = compute_something_else
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, RAW)
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}")
    with offloading(maker, path) as session:
        for _ in range(3):
            with pytest.raises(BackendError, match="something else"):
                session.run({"x": X})
        assert "something else" in session.decision().reason


def test_server_that_failed_proves_itself_again_before_it_gets_the_next_request(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: HostileServer
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, RAW)
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}")
    with offloading(maker, path) as session:
        for _ in range(3):
            np.testing.assert_allclose(session.run({"x": X})["y"], Y)
            server.misbehave = say(http(b"{}", "500 Oh"))
            with pytest.raises(UnavailableError, match="cannot run the model"):
                session.run({"x": X})
            server.misbehave = None  # the next request does not wait for the end of a pause
        np.testing.assert_allclose(session.run({"x": X})["y"], Y)
        server.misbehave = say(http(b"{}", "500 Oh"))
        with pytest.raises(UnavailableError):
            session.run({"x": X})
        server.misbehave = compute_something_else
        with pytest.raises(BackendError, match="something else"):
            session.run({"x": X})


@pytest.mark.parametrize("accepts", [True, False])
def test_server_that_never_answers_or_is_not_there_leaves_all_local(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accepts: bool
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if not accepts:
            listener.close()
        set_server(tmp_path, monkeypatch, f"127.0.0.1:{port}")
        with offloading(maker, path) as session:
            assert session.wait_for_probe(20)
            for _ in range(20):
                np.testing.assert_allclose(session.run({"x": X})["y"], Y)
            assert session.counts.local == 20
            assert "cannot be used" in session.decision().reason


def test_cut_table_signed_by_a_stranger_is_refused(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_signer: StatementSigner
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(dataclasses.replace(maker, signer=other_signer), path, LOCAL, RAW)
    set_server(tmp_path, monkeypatch, "127.0.0.1:9")
    with pytest.raises(SignatureError), offloading(maker, path):
        pass
