"""What broker and web server refuse: weak TLS, foreign authorities, packets and heads without end."""

import asyncio
import contextlib
import gc
import socket
import ssl
import struct
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from tests.fleet.new_fleet import copy_new_fleet
from tests.free_port import free_port
from tests.waiting import wait_for

from edgekit_fleet.broker.mosquitto import Mosquitto, write_configuration
from edgekit_fleet.identity.authority import MANAGER, Authority, open_authority
from edgekit_fleet.store.fleet_folder import FleetSettings
from edgekit_fleet.web.server import ConnectionLimits, WebServer, serve_devices
from edgekit_runtime.agent.documents import MAX_DOCUMENT_BYTES, topic

STRONG, WEAK = "ECDHE-ECDSA-AES128-GCM-SHA256", "ECDHE-ECDSA-AES128-SHA256"
CONNACK_ACCEPTED = b"\x20\x02\x00\x00"


class Site:
    """Broker and web server of a fleet, without a manager."""

    def __init__(self, path):
        self.folder = copy_new_fleet(path)
        self.settings = FleetSettings(broker_port=free_port(), web_port=free_port())
        self.folder.write_settings(self.settings)
        self.authority = open_authority(self.folder, self.settings)
        self.store = self.folder.open_store()

    @contextlib.contextmanager
    def up(self):
        configuration = write_configuration(self.folder, self.settings, self.authority)
        with Mosquitto(configuration, self.settings, self.authority), self.serve():
            yield self
        self.store.close()

    @contextlib.contextmanager
    def serve(self, **limits):
        """Yield the port of a web server."""
        settings = replace(self.settings, web_port=free_port()) if limits else self.settings
        with serve_devices(
            self.store, self.folder, settings, self.authority, limits=ConnectionLimits(**limits)
        ):
            yield settings.web_port

    def context(self, name="d1", *, signer=None, trusted=None):
        context = ssl.create_default_context(cafile=(trusted or self.authority).certificate_path)
        (signer or self.authority).load_short_lived(context, name)
        return context

    @contextlib.contextmanager
    def shake_hands(self, port, context):
        plain = socket.create_connection(("127.0.0.1", port), 5.0)
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
            yield connection

    @contextlib.contextmanager
    def connect(self, name="d1", context=None):
        """Yield a connection to the broker that is accepted; raises OSError where it is not."""
        port = self.settings.broker_port
        with self.shake_hands(port, context or self.context(name)) as connection:
            body = string(b"MQTT") + struct.pack(">BBH", 4, 2, 60) + string(name.encode())
            connection.sendall(b"\x10" + bytes((len(body),)) + body)
            if connection.recv(4) != CONNACK_ACCEPTED:
                raise ConnectionRefusedError(name)
            yield connection


def string(data):
    return struct.pack(">H", len(data)) + data


def publish(connection, device, payload):
    """Send a message of QoS 1; returns whether the broker acknowledges it."""
    body = string(topic(device, "event").encode()) + b"\x00\x01" + payload
    length = bytes((len(body) & 127 | 128, len(body) >> 7 & 127 | 128, len(body) >> 14))
    try:
        connection.sendall(b"\x32" + length + body)
        return connection.recv(4) == b"\x40\x02\x00\x01"
    except OSError:
        return False


def get(connection):
    connection.sendall(b"GET /authority HTTP/1.1\r\nHost: a\r\n\r\n")
    return connection.recv(1 << 16)


@pytest.fixture(scope="module")
def site(mosquitto, tmp_path_factory):
    with Site(tmp_path_factory.mktemp("site") / "fleet").up() as site:
        yield site


@pytest.mark.parametrize("server", ["broker", "web"])
@pytest.mark.parametrize(
    ("most", "ciphers", "is_accepted"),
    [
        (ssl.TLSVersion.TLSv1_1, "ALL:@SECLEVEL=0", False),
        (ssl.TLSVersion.TLSv1_2, WEAK, False),
        (ssl.TLSVersion.TLSv1_2, STRONG, True),
        (ssl.TLSVersion.TLSv1_3, STRONG, True),
    ],
)
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated:DeprecationWarning")
def test_weak_tls_is_refused(site, server, most, ciphers, is_accepted):
    context = site.context()
    context.set_ciphers(ciphers)
    context.minimum_version = context.maximum_version = most
    port = site.settings.broker_port if server == "broker" else site.settings.web_port
    refusal = contextlib.nullcontext() if is_accepted else pytest.raises(ssl.SSLError)
    with refusal, site.shake_hands(port, context) as connection:
        assert connection.version() == most.name.replace("_", ".")


def test_certificate_of_another_authority_is_refused_by_the_broker(site, tmp_path):
    context = site.context(signer=Authority(tmp_path / "other"))
    with pytest.raises(OSError), site.connect(context=context):
        pass


def test_certificate_of_another_authority_with_the_name_of_the_manager_is_refused(site, tmp_path):
    context = site.context(MANAGER, signer=Authority(tmp_path / "other"))
    with pytest.raises(OSError), site.connect(MANAGER, context):
        pass


def test_broker_of_another_authority_is_refused_by_the_device(site, tmp_path):
    context = site.context(trusted=Authority(tmp_path / "other"))
    with pytest.raises(ssl.SSLCertVerificationError), site.connect(context=context):
        pass


def test_plain_connection_to_the_broker_is_refused(site):
    with socket.create_connection(("127.0.0.1", site.settings.broker_port), 5.0) as plain:
        plain.sendall(b"\x10\x0e" + string(b"MQTT") + struct.pack(">BBH", 4, 2, 60) + string(b"d1"))
        with contextlib.suppress(ConnectionResetError):
            assert plain.recv(4) != CONNACK_ACCEPTED


def test_packet_over_the_limit_ends_the_connection_of_its_sender_alone(site):
    with site.connect("d1") as hostile, site.connect("d2") as other:
        assert publish(other, "d2", b"x" * 1000)
        assert not publish(hostile, "d1", b"x" * (2 * MAX_DOCUMENT_BYTES + 1))
        assert publish(other, "d2", b"x" * 1000)


@pytest.mark.parametrize("is_first", [True, False])
def test_head_that_drips_ends_after_a_limit_and_others_are_served(site, is_first):
    with site.serve(head_s=0.5) as port:
        with site.shake_hands(port, site.context()) as slow:
            if not is_first:
                assert get(slow).startswith(b"HTTP/1.1 200")
            with pytest.raises(OSError):
                for byte in b"GET /authority HTTP/1.1\r\nX: " + b"x" * 100:
                    slow.sendall(bytes((byte,)))
                    time.sleep(0.05)
        with site.shake_hands(port, site.context()) as other:
            assert get(other).startswith(b"HTTP/1.1 200")


def test_connection_that_asks_for_nothing_ends_after_a_limit(site):
    with site.serve(head_s=0.5) as port, site.shake_hands(port, site.context()) as idle:
        idle.settimeout(10.0)
        with contextlib.suppress(ssl.SSLEOFError, ConnectionResetError):
            assert idle.recv(1) == b""


def is_established(own_port, other_port):
    """Return whether this end of a connection is open; a client that takes nothing is not told of its end."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()
    ]
    return any(
        line[1].endswith(f":{own_port:04X}") and line[2].endswith(f":{other_port:04X}") and line[3] == "01"
        for line in lines
    )


@pytest.mark.parametrize("bytes_per_s", [0, 100])
def test_client_that_takes_too_little_data_is_dropped(site, bytes_per_s):
    size_bytes = 64 << 20
    with (site.folder.repository / "targets" / "large").open("wb") as file:
        file.truncate(size_bytes)
    with site.serve(window_s=1.0) as port, site.shake_hands(port, site.context()) as lazy:
        lazy.sendall(b"GET /artifacts/targets/large HTTP/1.1\r\nHost: a\r\n\r\n")
        ports = port, lazy.getsockname()[1]
        taken_bytes, end_at = 0, time.monotonic() + 60.0
        while is_established(*ports):
            assert time.monotonic() < end_at, "the server still serves a client that takes too little"
            time.sleep(0.1)
            taken_bytes += len(lazy.recv(bytes_per_s // 10)) if bytes_per_s else 0
        with contextlib.suppress(OSError):
            while data := lazy.recv(1 << 20):
                taken_bytes += len(data)
    assert taken_bytes < size_bytes / 2


def test_client_that_takes_its_data_is_served_for_many_windows():
    """The server's clock goes on by a second with each part that the client takes."""
    sent = []

    async def answer_without_end(_scope, _receive, send):
        asyncio.get_running_loop().time = lambda: time.monotonic() + len(sent)
        await send({"type": "http.response.start", "status": 200})
        while True:
            await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
            sent.append(1)
            await asyncio.sleep(0)

    with (
        WebServer(answer_without_end, "127.0.0.1", 0, None, option="--port") as server,
        socket.create_connection(("127.0.0.1", server.port), 5.0) as connection,
    ):
        connection.sendall(GET)
        while len(sent) < 10 * ConnectionLimits().window_s:
            assert connection.recv(1 << 16)


begun = []  # addresses of requests


async def answer(scope, receive, send):
    """An application that reads the body, and answers."""
    begun.append(scope["client"])
    while (await receive()).get("more_body"):
        pass
    address = scope["client"][0].encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"address", address)]})
    await send({"type": "http.response.body"})


@pytest.fixture
def small():
    """A server of 20 connections."""
    begun.clear()
    limits = ConnectionLimits(connections=20)
    with WebServer(answer, "127.0.0.1", 0, None, option="--port", limits=limits) as server:
        yield server


def connect_from(stack, address, server, data=b""):
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 5.0, (address, 0)))
    connection.sendall(data)
    return connection


GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
UNFINISHED = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n1"


def status_of(connection, data=GET):
    connection.sendall(data)
    return int(connection.recv(1 << 16).split()[1])


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_idle_connections_of_one_address_keep_nobody_out(small, address):
    with contextlib.ExitStack() as stack:
        other = connect_from(stack, "127.0.0.3", small)
        idle = [connect_from(stack, "127.0.0.1", small) for _ in range(60)]
        assert status_of(connect_from(stack, address, small)) == 200
        assert status_of(other) == 200  # an older one, but of an address with fewer
        assert status_of(idle[-1]) == 200


def test_connections_of_one_address_that_wait_do_not_delay_another():
    is_busy, is_free, served = threading.Event(), threading.Event(), []

    async def answer_late(scope, receive, send):
        if scope["path"] == "/busy":  # the loop accepts nothing meanwhile
            is_busy.set()
            is_free.wait(60.0)
        served.append(scope["client"][0])
        await answer(scope, receive, send)

    with (
        WebServer(
            answer_late, "127.0.0.1", 0, None, option="--port", limits=ConnectionLimits(waiting=20)
        ) as server,
        contextlib.ExitStack() as stack,
    ):
        connect_from(stack, "127.0.0.3", server, GET.replace(b"/", b"/busy", 1))
        assert is_busy.wait(60.0)
        for _ in range(100):
            connect_from(stack, "127.0.0.1", server, GET)
        other = connect_from(stack, "127.0.0.2", server, GET)
        is_free.set()
        assert other.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert served.count("127.0.0.1") <= 1


def test_requests_of_one_address_that_do_not_end_keep_no_other_address_out(small):
    with contextlib.ExitStack() as stack:
        for _ in range(19):
            connect_from(stack, "127.0.0.1", small, UNFINISHED)
        wait_for(lambda: len(begun) == 19)
        assert status_of(connect_from(stack, "127.0.0.1", small)) == 503
        assert status_of(connect_from(stack, "127.0.0.2", small)) == 200


def test_requests_of_three_addresses_that_do_not_end_keep_no_other_address_out(small):
    with contextlib.ExitStack() as stack:
        for number in range(21):
            connect_from(stack, f"127.0.0.{number % 3 + 1}", small, UNFINISHED)
        wait_for(lambda: len(begun) >= 19)
        assert status_of(connect_from(stack, "127.0.0.1", small)) == 503
        others = [connect_from(stack, f"127.0.1.{number}", small) for number in range(1, 6)]
        assert {status_of(other) for other in others} == {200}


def test_requests_of_many_addresses_are_not_ended_for_another_one(small):
    with contextlib.ExitStack() as stack:
        held = [connect_from(stack, f"127.0.1.{number}", small, UNFINISHED) for number in range(1, 20)]
        wait_for(lambda: len(begun) == 19)
        assert status_of(connect_from(stack, "127.0.0.2", small)) == 503
        assert {status_of(each, b"2345") for each in held} == {200}


def test_handshakes_that_do_not_begin_keep_nobody_out(site):
    with site.serve(handshakes=5) as port, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 5.0)) for _ in range(12)]
        with site.shake_hands(port, site.context()) as other:
            assert get(other).startswith(b"HTTP/1.1 200")
            assert silent[0].recv(1) == b""


def test_handshakes_of_one_address_end_no_handshake_of_another(site):
    with site.serve(handshakes=5) as port, contextlib.ExitStack() as stack:
        slow = stack.enter_context(
            socket.create_connection(("127.0.0.1", port), 5.0, source_address=("127.0.0.9", 0))
        )
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 5.0)) for _ in range(12)]
        assert silent[0].recv(1) == b""
        honest = stack.enter_context(site.context().wrap_socket(slow, server_hostname="127.0.0.1"))
        assert get(honest).startswith(b"HTTP/1.1 200")


def test_memory_of_requests_that_end_after_their_connections_is_given_back():
    limits = ConnectionLimits(trim_connections=5, settle_s=2.0)
    begun, ended, garbage = [], [], []

    def make_garbage():
        cycle = threading.Event()
        cycle.itself = cycle
        garbage.append(weakref.ref(cycle))

    async def answer_late(_scope, receive, _send):
        begun.append(1)
        while (await receive())["type"] != "http.disconnect":
            pass
        make_garbage()
        while garbage[0]() is not None:  # the first collection came too early for this request
            await asyncio.sleep(0.01)
        make_garbage()
        ended.append(1)

    gc.disable()
    try:
        with WebServer(answer_late, "127.0.0.1", 0, None, option="--port", limits=limits) as server:
            with contextlib.ExitStack() as stack:
                for _ in range(5):
                    connect_from(stack, "127.0.0.1", server, GET)
                wait_for(lambda: len(begun) == 5)
            wait_for(lambda: len(ended) == 5)
            wait_for(lambda: not any(reference() for reference in garbage))
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("trusted", "address"), [((), "127.0.0.1"), (("10.0.0.1",), "127.0.0.1"), (("127.0.0.0/24",), "9.9.9.9")]
)
def test_address_that_a_client_claims_counts_of_trusted_proxies_alone(trusted, address):
    with (
        WebServer(answer, "127.0.0.1", 0, None, option="--port", trusted_proxies=trusted) as server,
        contextlib.ExitStack() as stack,
    ):
        connection = connect_from(stack, "127.0.0.1", server)
        connection.sendall(GET.replace(b"\r\n\r\n", b"\r\nX-Forwarded-For: 8.8.8.8, 9.9.9.9\r\n\r\n"))
        assert f"address: {address}".encode() in connection.recv(1 << 16)


def test_revocations_within_a_second_are_dated_in_order_and_not_later_than_now(tmp_path):
    authority = Authority(tmp_path)
    dates = []
    for number in range(5):
        authority.write_crl([f"{number + 1:x}"])
        dates.append(x509.load_pem_x509_crl(authority.crl.read_bytes()).last_update_utc)
    assert dates == sorted(set(dates))
    assert dates[-1].timestamp() <= time.time()
