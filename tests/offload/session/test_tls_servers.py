"""Servers behind TLS and a token, and those that must not be trusted."""

import contextlib
import socket
import ssl
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.offload.session.hostile_server import HostileServer, http
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
from tests.service.serve_parts import TOKEN, write_certificate
from tests.service.service_parts import running_linear

from edgekit_runtime.cli import main
from edgekit_runtime.client import Client
from edgekit_runtime.client.link import Address, open_connection
from edgekit_runtime.errors import ConfigError, TransportError
from edgekit_runtime.offload.measurement.link_probe import probe_link
from edgekit_runtime.offload.offload_options import OffloadOptions, find_options_file, read_offload_options
from edgekit_runtime.offload.offload_server import OffloadServer, make_tail_request


def write_token(folder: Path, token: str = TOKEN) -> Path:
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(f"{token}\n")
    return path


@pytest.mark.parametrize("case", ["right", "other authority", "other token"])
def test_only_a_server_with_the_right_certificate_gets_requests_and_only_with_the_token(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    for name in ("server", "stranger", "device"):
        (tmp_path / name).mkdir()
    certificate, key = write_certificate(tmp_path / "server")
    stranger, _ = write_certificate(tmp_path / "stranger")
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    listen = {
        "tls_certificate": str(certificate),
        "tls_key": str(key),
        "token_file": str(write_token(tmp_path / "server")),
    }
    token = write_token(tmp_path / "device", "f" * 32 if case == "other token" else TOKEN)
    with running_linear(maker, tmp_path, listen=listen) as service:
        set_server(
            tmp_path,
            monkeypatch,
            f"https://127.0.0.1:{service.port}",
            token_file=str(token),
            ca_file=str(stranger if case == "other authority" else certificate),
        )
        with offloading(maker, path) as session:
            if case == "right":
                wait_until(lambda: session.decision().plan.name == "raw", "the server is not used")
            assert session.wait_for_probe(20)
            np.testing.assert_allclose(session.run({"x": X})["y"], Y)
            if case != "right":
                assert session.counts.local == 1
                expected = "certificate" if case == "other authority" else "token"
                assert expected in session.decision().reason


def test_redirect_is_not_followed(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    server, stranger = HostileServer(), HostileServer()
    asked: list[bytes] = []

    def note(_: HostileServer, client: socket.socket, right: bytes) -> None:
        asked.append(right)

    stranger.misbehave = note
    location = f"Location: http://127.0.0.1:{stranger.port}/v2/models/linear/infer\r\n"
    server.misbehave = lambda *_: http(b"", "307 Temporary Redirect", location)
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}")
    with offloading(maker, path) as session:
        assert session.wait_for_probe(20)
        np.testing.assert_allclose(session.run({"x": X})["y"], Y)
        assert session.counts.local == 1
        assert "307" in session.decision().reason
    assert not asked
    server.close()
    stranger.close()


def test_server_that_drops_connection_requests_leaves_all_local(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for waiting in (first, second):  # the queue of the listener is full: Linux drops each further SYN
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        set_server(tmp_path, monkeypatch, f"127.0.0.1:{listener.getsockname()[1]}")
        with offloading(maker, path) as session:
            np.testing.assert_allclose(session.run({"x": X})["y"], Y)  # while the probe tries to connect
            assert session.wait_for_probe(20)
            np.testing.assert_allclose(session.run({"x": X})["y"], Y)
            assert session.counts.local == 2
            assert "timed out" in session.decision().reason


OTHERS = ["http://192.0.2.1:8000", "edge-box:8000", "http://[2001:db8::1]:80"]


@pytest.mark.parametrize("server", OTHERS)
def test_token_does_not_go_to_another_machine_without_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    command = ["offload", "server", server, "--token-file", str(write_token(tmp_path))]
    for more in ([], ["--insecure"]):
        assert main([*command, *more]) == ConfigError.exit_code
        assert read_offload_options() is None
        with pytest.raises(ConfigError, match="the token would go there"):
            probe_link(server, token=TOKEN, insecure=bool(more))
        with pytest.raises(ConfigError, match="the token would go there"):
            Client(server, token=TOKEN, insecure=bool(more))
    assert main(["offload", "server", f"https://{server.removeprefix('http://')}", *command[3:]]) == 0


@pytest.mark.parametrize("server", OTHERS)
def test_data_go_to_another_machine_without_tls_only_where_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    assert main(["offload", "server", server]) == ConfigError.exit_code
    assert read_offload_options() is None
    for ask in (Client, probe_link):
        with pytest.raises(ConfigError, match="answer with wrong numbers"):
            ask(server)
    assert main(["offload", "server", server, "--insecure"]) == 0
    kept = read_offload_options()
    assert kept is not None
    assert kept.insecure
    Client(server, insecure=True).close()


def test_server_that_was_set_before_this_rule_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    find_options_file().parent.mkdir(parents=True, exist_ok=True)
    find_options_file().write_text('{"server": "http://192.0.2.1:8000"}')
    with pytest.raises(ConfigError, match=r"plain HTTP.*run `edgekit-device offload server URL` again"):
        read_offload_options()


def test_empty_file_of_a_token_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    command = ["offload", "server", "https://edge-box:8000", "--token-file", "/dev/null"]
    assert main(command) == ConfigError.exit_code
    assert read_offload_options() is None


def test_token_goes_over_loopback_without_tls(tmp_path: Path) -> None:
    for server in ("127.0.0.1:8000", "localhost:8000", "http://[::1]:8000", "/run/edgekit.sock"):
        assert OffloadOptions(server, token_file=str(write_token(tmp_path))).read_token() == TOKEN


def test_abort_over_tls_keeps_the_encryption_and_probes_keep_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = write_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    over, accepted = threading.Event(), []

    def serve(listener: socket.socket) -> None:
        client, _ = listener.accept()
        accepted.append(client)
        with contextlib.suppress(OSError), context.wrap_socket(client, server_side=True) as secured:
            while secured.recv(1 << 16).startswith(b"GET"):
                secured.sendall(http(b"{}"))
            over.wait(20)

    def refuse(*_: object) -> None:
        raise AssertionError("TLS was ended while another thread was sending")

    monkeypatch.setattr(ssl.SSLSocket, "shutdown", refuse)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        server = OffloadServer(Address.parse(url, str(certificate)))
        for _ in range(3):
            server.measure_round_trip(20.0)
        body = np.zeros(16 << 20, np.uint8)
        request = make_tail_request("m", {"x": body}, (), "identity", server.fields)
        pending = server.send(request, 20.0, lambda *_: None)
        wait_until(lambda: bool(pending.sent_bytes), "nothing is sent")
        pending.abort()
        assert pending.done.wait(20)
        assert pending.reply is not None
        assert pending.reply.is_cut_off
        assert len(accepted) == 1
        over.set()
        thread.join(20)
        server.close()


def test_missing_file_of_the_authority_leaves_no_connection_open(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        port = listener.getsockname()[1]
        with pytest.raises(TransportError, match="No such file"):
            open_connection(Address.parse(f"https://127.0.0.1:{port}", str(tmp_path / "none.pem")), 5.0)
        client, _ = listener.accept()
        with client:
            client.settimeout(20)
            assert client.recv(1) == b""


def test_short_parts_of_a_request_go_over_tls_in_one_record(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    tensor = np.arange(50_000, dtype=np.uint8)
    request = make_tail_request("m", {"x": tensor[:100], "y": tensor}, (), "identity", "Host: a\r\n")
    received: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            plain, _ = listener.accept()
            with context.wrap_socket(plain, server_side=True) as connection:
                while sum(map(len, received)) < request.size_bytes:
                    received.append(connection.recv(1 << 16))  # one record at most
                connection.sendall(http(b"{}"))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        port = listener.getsockname()[1]
        server = OffloadServer(Address(host="127.0.0.1", port=port, is_tls=True, ca_file=str(certificate)))
        server.send(request, 20, lambda *_: None).done.wait(20)
        thread.join(20)
        server.close()
    assert b"".join(received) == b"".join(map(bytes, request.parts))
    assert received[0] == b"".join(map(bytes, request.parts[:-1]))
