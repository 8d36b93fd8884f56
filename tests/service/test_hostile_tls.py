"""Clients from other machines that begin to speak TLS and never go on."""

import contextlib
import os
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.descriptor_parts import count_descriptors
from tests.runtime.conftest import PackageMaker
from tests.service.service_parts import Replies, Running, X, Y, ask, infer_bytes, running_linear
from tests.waiting import wait_for

from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.request_head import RequestHead
from edgekit_runtime.service.options.http import HttpLimits

TLS_CLIENTS = 40


class Encrypted:
    """A service over TLS with a token, and its clients."""

    def __init__(self, service: Running, certificate: Path, token_file: Path) -> None:
        self.service = service
        self._context = ssl.create_default_context(cafile=str(certificate))
        self.request = infer_bytes(X, fields=f"Authorization: Bearer {token_file.read_text().strip()}\r\n")

    def connect(self) -> ssl.SSLSocket:
        """Return a connection after its handshake."""
        return self._context.wrap_socket(self.service.connect_tcp(), server_hostname="127.0.0.1")

    def reset(self) -> None:
        """Finish a handshake and reset the connection at once."""
        client = self.connect()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()


@contextlib.contextmanager
def encrypted(
    maker: PackageMaker, folder: Path, certificate: tuple[Path, Path], token_file: Path, **limits: Any
) -> Iterator[Encrypted]:
    listen = {
        "tls_certificate": str(certificate[0]),
        "tls_key": str(certificate[1]),
        "token_file": str(token_file),
    }
    with running_linear(maker, folder, listen=listen, http=HttpLimits(**limits)) as service:
        yield Encrypted(service, certificate[0], token_file)


def test_clients_after_reset_connections_are_all_answered(
    maker: PackageMaker, tmp_path: Path, token_file: Path, certificate: tuple[Path, Path]
) -> None:
    """Their sockets get the numbers of the descriptors that were closed."""
    with (
        encrypted(maker, tmp_path, certificate, token_file) as target,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(TLS_CLIENTS):
            target.reset()
        for number in range(TLS_CLIENTS):
            client = stack.enter_context(target.connect() if number % 2 else target.service.connect())
            client.sendall(target.request)
            assert Replies(client).next().binary == Y


def test_watch_list_of_the_loop_holds_no_closed_descriptor(
    maker: PackageMaker, tmp_path: Path, token_file: Path, certificate: tuple[Path, Path]
) -> None:
    with encrypted(maker, tmp_path, certificate, token_file) as target:
        loop: Any = target.service.service.http.loop
        before = target.service.call(lambda: set(loop._selector.get_map()))
        for _ in range(TLS_CLIENTS):
            target.reset()
        wait_for(lambda: target.service.call(lambda: set(loop._selector.get_map())) == before)


def test_silent_finished_handshakes_lock_nobody_out(
    maker: PackageMaker, tmp_path: Path, token_file: Path, certificate: tuple[Path, Path]
) -> None:
    with (
        encrypted(maker, tmp_path, certificate, token_file, max_tls_connections=8) as target,
        contextlib.ExitStack() as stack,
    ):
        known = stack.enter_context(target.connect())
        known.sendall(target.request)
        assert Replies(known).next().binary == Y
        for _ in range(20):
            stack.enter_context(target.connect())
        newcomer = stack.enter_context(target.connect())
        for client in (newcomer, known):  # who has shown the token is not pushed out
            client.sendall(target.request)
            assert Replies(client).next().binary == Y


def test_strangers_do_not_take_the_places_of_clients_with_the_token(
    maker: PackageMaker, tmp_path: Path, token_file: Path, certificate: tuple[Path, Path]
) -> None:
    with (
        encrypted(maker, tmp_path, certificate, token_file, max_tls_connections=2) as target,
        contextlib.ExitStack() as stack,
    ):
        known = [stack.enter_context(target.connect()) for _ in range(2)]
        for client in known:
            client.sendall(target.request)
            assert Replies(client).next().binary == Y
        with pytest.raises(OSError):
            target.connect()
        for client in known:
            client.sendall(target.request)
            assert Replies(client).next().binary == Y


def test_connection_without_a_first_request_ends_long_before_an_idle_one(
    maker: PackageMaker, tmp_path: Path, token_file: Path, certificate: tuple[Path, Path]
) -> None:
    with (
        encrypted(
            maker, tmp_path, certificate, token_file, read_timeout_s=0.5, idle_timeout_s=600.0
        ) as target,
        target.connect() as known,
        target.connect() as silent,
    ):
        known.sendall(target.request)
        assert Replies(known).next().binary == Y
        assert Replies(silent).is_closed()
        known.sendall(target.request)
        assert Replies(known).next().binary == Y


def test_half_handshakes_are_bounded_and_disturb_nobody(
    maker: PackageMaker, tmp_path: Path, token_file: Path, certificate: tuple[Path, Path]
) -> None:
    with (
        encrypted(maker, tmp_path, certificate, token_file, max_tls_connections=20) as target,
        contextlib.ExitStack() as stack,
    ):
        service = target.service
        open_before = count_descriptors()
        silent = [stack.enter_context(service.connect_tcp()) for _ in range(60)]
        for client in silent[::2]:
            client.sendall(b"\x16\x03\x01\x02\x00\x01")
        time.sleep(0.5)
        # Each of the test's own sockets is one; those that the service still holds are the rest.
        held = count_descriptors() - open_before - len(silent)
        assert held <= 22
        assert ask(service, infer_bytes(X)).binary == Y
        for client in silent:
            client.close()
        time.sleep(0.3)
        with target.connect() as client:
            client.sendall(target.request)
            assert Replies(client).next().binary == Y


def test_client_of_a_connection_is_its_address_or_its_process(
    maker: PackageMaker, tmp_path: Path, token_file: Path, certificate: tuple[Path, Path]
) -> None:
    with (
        encrypted(maker, tmp_path, certificate, token_file) as target,
        contextlib.ExitStack() as stack,
    ):
        http, clients = target.service.service.http, []
        handle = http.handle_request

        def note(connection: Connection, head: RequestHead, body: memoryview) -> None:
            clients.append(connection.client)
            handle(connection, head, body)

        http.handle_request = note
        for connect in (target.connect, target.service.connect):
            client = stack.enter_context(connect())
            client.sendall(target.request)
            assert Replies(client).next().binary == Y
    (tmp_path / "plain").mkdir()
    with running_linear(maker, tmp_path / "plain") as service, service.connect_tcp() as client:
        handle, service.service.http.handle_request = service.service.http.handle_request, note
        client.sendall(infer_bytes(X))
        assert Replies(client).next().binary == Y
    assert clients == ["127.0.0.1", str(os.getpid()), "127.0.0.1"]
