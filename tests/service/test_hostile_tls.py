"""Clients from other machines that begin to speak TLS and never go on."""

import contextlib
import socket
import ssl
import time
from pathlib import Path

from tests.descriptor_parts import count_descriptors
from tests.runtime.conftest import PackageMaker
from tests.service.service_parts import Replies, X, Y, ask, infer_bytes, running_linear

from edgekit_runtime.service.http_limits import HttpLimits


def test_half_handshakes_are_bounded_and_disturb_nobody(
    maker: PackageMaker, tmp_path: Path, token_file: Path, certificate: tuple[Path, Path]
) -> None:
    listen = {
        "tls_certificate": str(certificate[0]),
        "tls_key": str(certificate[1]),
        "token_file": str(token_file),
    }
    http = HttpLimits(max_tls_connections=20)
    with (
        running_linear(maker, tmp_path, listen=listen, http=http) as service,
        contextlib.ExitStack() as stack,
    ):
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
        context = ssl.create_default_context(cafile=str(certificate[0]))
        raw = socket.create_connection(("127.0.0.1", service.port), 10)
        with context.wrap_socket(raw, server_hostname="127.0.0.1") as client:
            token = token_file.read_text().strip()
            client.sendall(infer_bytes(X, fields=f"Authorization: Bearer {token}\r\n"))
            assert Replies(client).next().binary == Y
