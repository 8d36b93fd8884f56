"""The `Host` field of requests: what RFC 9110 asks for, from each part of the device that makes requests."""

import contextlib
import http.server
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from tests.toolkit.cases import cases

from edgekit_runtime.client import Client
from edgekit_runtime.client.link import Address
from edgekit_runtime.errors import EdgekitError, TransportError
from edgekit_runtime.offload.measurement.link_probe import probe_link
from edgekit_runtime.offload.offload_server import OffloadServer


def ask_as_client(address: str) -> None:
    with Client(address) as client:
        client.ready()


def ask_as_session(address: str) -> None:
    server = OffloadServer(Address.parse(address))
    server.measure_round_trip(20.0)
    server.close()


def ask_as_probe(address: str) -> None:
    with contextlib.suppress(EdgekitError):  # the server has no bandwidth to measure
        probe_link(address, seconds=0.1)


@contextlib.contextmanager
def recording(host: str) -> Iterator[tuple[int, set[str | None]]]:
    """Yield the port of a server that answers every request, and the `Host` fields that it got."""
    found: set[str | None] = set()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            found.add(self.headers["Host"])
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *args: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    try:
        server = Server((host, 0), Handler)
    except OSError as cause:
        pytest.skip(f"{host} cannot be used here: {cause}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port, found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@cases("ask", [ask_as_client, ask_as_session, ask_as_probe])
@cases("host", ["127.0.0.1", "::1"])
def test_requests_state_the_port_and_an_ipv6_address_in_brackets(
    host: str, ask: Callable[[str], None]
) -> None:
    with recording(host) as (port, found):
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        ask(f"http://{place}")
        assert found == {place}


@cases(
    ("address", "authority"),
    [
        ("https://edge-box:8443", "edge-box:8443"),
        ("https://edge-box:443", "edge-box"),
        ("http://edge-box:443", "edge-box:443"),
        ("edge-box:80", "edge-box"),
        ("https://[2001:db8::7]:8443", "[2001:db8::7]:8443"),
        ("https://[fe80::1%eth0]:443", "[fe80::1]"),
        ("https://b\u00fcro.example:8443", "xn--bro-hoa.example:8443"),
        ("/run/edgekit.sock", "localhost"),
        ("unix:/run/edgekit.sock", "localhost"),
        ("https://edge-box", "edge-box"),
        ("http://[::1]/", "[::1]"),
    ],
)
def test_authority_of_an_address_is_what_a_host_field_may_hold(address: str, authority: str) -> None:
    assert Address.parse(address, insecure=True).authority == authority


@pytest.mark.parametrize(
    ("address", "path"),
    [
        *(("unix:/run/e.sock", "/run/e.sock"), ("unix:///run/e.sock", "/run/e.sock")),
        *(("unix:e.sock", "e.sock"), ("./unix:e", "./unix:e")),
    ],
)
def test_unix_socket_may_be_stated_as_services_and_urls_state_it(address: str, path: str) -> None:
    assert Address.parse(address) == Address(path=path)


@pytest.mark.parametrize("address", ["https://h/a", "http://localhost:80/a/b"])
def test_path_of_a_server_is_refused_where_nothing_would_use_it(address: str) -> None:
    with pytest.raises(TransportError, match="path"):
        Address.parse(address)


def test_ipv6_address_in_a_message_can_be_read_again() -> None:
    address = Address.parse("https://[2001:db8::7]:8443")
    assert str(address) == "[2001:db8::7]:8443"
    assert Address.parse(f"https://{address}") == address
