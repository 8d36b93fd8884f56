"""Downloads over links that are cut, slow, capped, and from servers that misbehave."""

import hashlib
import http.server
import os
import re
import socket
import ssl
import threading
import time

import pytest
from tests.free_port import free_port

from edgekit_fleet.identity.authority import Authority
from edgekit_runtime.agent.artifacts.download import (
    Downloader,
    DownloadLimitError,
    DownloadLimits,
    DownloadStoppedError,
    SlowError,
)
from edgekit_runtime.agent.membership import make_context
from edgekit_runtime.errors import DigestError, TransportError

CONTENT = bytes(range(256)) * 2000  # 512 kB
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class FileServer:
    """Serves `content` over TLS.

    Attributes:
        cut_bytes: connections end after so many bytes of content, or None.
        has_ranges: whether ranges are answered.
        delay_s: between pieces of `piece` bytes.
        sent: bytes of content and of heads.
        resumed: of each connection, whether it resumed a session of TLS.
    """

    def __init__(self, folder):
        authority = Authority(folder)
        authority.make_server(("127.0.0.1",))
        self.pem = authority.certificate_path.read_text()
        self.content, self.cut_bytes, self.has_ranges = CONTENT, None, True
        self.delay_s, self.piece, self.sent, self.connections = 0.0, 4096, 0, 0
        self.resumed = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                outer.answer(self)

            def log_message(self, *_):
                pass

        port = free_port()
        self.url = f"https://127.0.0.1:{port}/file"
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*authority.pair("server"))
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    def answer(self, handler):
        self.connections += 1
        self.resumed.append(handler.connection.session_reused)
        found = re.match(r"bytes=(\d+)-", handler.headers.get("Range", ""))
        begin = int(found[1]) if found and self.has_ranges else 0
        body = self.content[begin:]
        handler.send_response(206 if begin else 200)
        if begin:
            size = len(self.content)
            handler.send_header("Content-Range", f"bytes {begin}-{size - 1}/{size}")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        self.sent += 500
        left = self.cut_bytes
        try:
            for at in range(0, len(body), self.piece):
                piece = body[at : at + self.piece]
                handler.wfile.write(piece)
                self.sent += len(piece)
                time.sleep(self.delay_s)
                if left is not None and (left := left - len(piece)) <= 0:
                    break
        except OSError:
            pass
        handler.close_connection = True

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def server(tmp_path):
    server = FileServer(tmp_path / "authority")
    yield server
    server.close()


class Fetch:
    def __init__(self, server, path, **limits):
        self.server, self.path, self.came_bytes = server, path, 0
        self.downloader = Downloader(make_context(server.pem), DownloadLimits(**limits))
        self.stop = threading.Event()

    def count(self, received_bytes):
        self.came_bytes += received_bytes

    def run(self, **options):
        self.downloader.fetch(
            *(self.server.url, self.path, len(CONTENT)),
            sha256=SHA256,
            count=self.count,
            stop=self.stop,
            **options,
        )
        return self.path.read_bytes() == CONTENT


def test_cut_link_brings_no_byte_twice(server, tmp_path):
    server.cut_bytes = 200_000
    fetch = Fetch(server, tmp_path / "file")
    assert fetch.run()
    assert (server.connections, fetch.came_bytes) == (3, len(CONTENT))
    assert server.sent <= 1.05 * len(CONTENT)


def test_certificates_of_the_system_are_not_read_for_a_connection(server, tmp_path, monkeypatch):
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", lambda *_: pytest.fail("20 ms of a core"))
    assert Fetch(server, tmp_path / "file").run()


def test_next_connection_resumes_the_session_of_tls(server, tmp_path):
    server.cut_bytes = 200_000
    assert Fetch(server, tmp_path / "file").run()
    assert server.resumed == [False, True, True]


def test_download_goes_on_after_a_restart(server, tmp_path):
    first = Fetch(server, tmp_path / "file")
    with pytest.raises(DownloadLimitError):
        first.run(most_bytes=200_000)
    second = Fetch(server, tmp_path / "file")
    assert second.run()
    assert first.came_bytes + second.came_bytes == len(CONTENT)


def test_server_without_ranges_is_read_from_the_beginning(server, tmp_path):
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    server.has_ranges = False
    assert Fetch(server, tmp_path / "file").run()


def test_endless_data_is_not_read(server, tmp_path):
    server.content = CONTENT + b"x" * (8 << 20)
    fetch = Fetch(server, tmp_path / "file")
    assert fetch.run()
    assert fetch.came_bytes == len(CONTENT)


def test_other_content_is_removed(server, tmp_path):
    server.content = os.urandom(len(CONTENT))
    with pytest.raises(DigestError, match="expected"):
        Fetch(server, tmp_path / "file").run()
    assert not list(tmp_path.glob("file*"))


def test_slow_retrieval_ends(server, tmp_path):
    server.piece, server.delay_s = 10, 0.05
    with pytest.raises(SlowError):
        Fetch(server, tmp_path / "file", least_bytes_per_s=10_000.0, slow_s=0.5).run()


def test_stop_ends_a_download(server, tmp_path):
    server.delay_s = 0.05
    fetch = Fetch(server, tmp_path / "file")
    threading.Timer(0.3, fetch.stop.set).start()
    with pytest.raises(DownloadStoppedError):
        fetch.run()


def test_cap_is_held(server, tmp_path):
    fetch, begin_s = Fetch(server, tmp_path / "file", bytes_per_s=200_000.0), time.monotonic()
    assert fetch.run()
    took_s = time.monotonic() - begin_s
    assert len(CONTENT) / took_s <= 200_000.0 * 1.05  # a lower bound of time holds under any load


def test_server_of_another_authority_is_refused(server, tmp_path):
    server.pem = Authority(tmp_path / "other").certificate_path.read_text()
    with pytest.raises(TransportError, match="certificate"):
        Fetch(server, tmp_path / "file").run()


@pytest.mark.parametrize("drips", ["handshake", "head"])
def test_server_that_drips_before_the_first_byte_of_content_ends(server, tmp_path, drips):
    context = server.server.socket.context
    record = b"\x16\x03\x03\x40\x00"  # the head of a message of TLS; its 16 KiB follow slowly

    def drip(listener):
        connection, _ = listener.accept()
        with connection if drips == "handshake" else context.wrap_socket(connection, server_side=True) as way:
            for byte in (record if drips == "handshake" else b"HTTP/1.1 200 OK\r\nX: ") + b"x" * 400:
                try:
                    way.sendall(bytes((byte,)))
                except OSError:
                    return
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server.url = f"https://127.0.0.1:{listener.getsockname()[1]}/file"
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        with pytest.raises(SlowError, match="no answer within"):
            Fetch(server, tmp_path / "file", slow_s=0.5).run()
        thread.join()
