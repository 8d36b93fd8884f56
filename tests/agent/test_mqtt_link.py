"""The agent's link to a broker that sends more than it should, or refuses."""

import contextlib
import socket
import ssl
import threading

import pytest
from tests.waiting import wait_for

from edgekit_fleet.identity.authority import Authority
from edgekit_runtime.agent.membership import make_context
from edgekit_runtime.agent.mqtt_link import MqttLink

CONNACK, HUGE_PUBLISH = b"\x20\x03\x00\x00\x00", b"\x30\xff\xff\xff\x7f"  # the second one has 256 MiB


def make_authority(folder):
    """Return an authority, and the TLS context of a server of it."""
    authority = Authority(folder)
    authority.make_server(("127.0.0.1",))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.pair("server"))
    return authority, context


def serve_endless_packet(listener, context):
    """Answer one connection with a packet without end; return what was sent of it."""
    plain, _ = listener.accept()
    sent = 0
    with context.wrap_socket(plain, server_side=True) as connection:
        connection.recv(4096)
        connection.sendall(CONNACK + HUGE_PUBLISH)
        try:
            while sent < 64 << 20:
                sent += connection.send(bytes(1 << 16))
        except OSError:
            pass
    return sent


@pytest.mark.parametrize(
    ("answer", "words", "is_refusal"),
    [
        (b"", "without a word", False),  # as of a load balancer
        (b"\x20\x03\x00\x86\x00", "Bad user name or password", True),
        (b"\x20\x03\x00\x87\x00", "Not authorized", True),
        (b"\x20\x03\x00\x84\x00", "Unsupported protocol version", False),
        (b"\x20\x03\x00\x88\x00", "Server unavailable", False),
        (b"\x20\x03\x00\x89\x00", "Server busy", False),
        (b"\x20\x03\x00\x97\x00", "Quota exceeded", False),
    ],
)
def test_only_a_broker_that_names_the_device_refuses_it(tmp_path, answer, words, is_refusal):
    def serve():
        with contextlib.suppress(OSError), context.wrap_socket(listener.accept()[0], server_side=True) as one:
            one.recv(4096)
            one.sendall(answer)
            one.unwrap()

    authority, context = make_authority(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        broker = f"127.0.0.1:{listener.getsockname()[1]}"
        link = MqttLink("d1", [broker], make_context(authority.certificate_path.read_text()))
        link.start()
        wait_for(lambda: link.problem is not None, "the answer of the broker")
        problem = link.problem
        thread.join()
    link.stop()
    assert words in problem.text
    assert problem.is_refusal is is_refusal


def test_packet_without_end_is_not_read_and_is_reported(tmp_path):
    authority, context = make_authority(tmp_path)
    sent = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: sent.append(serve_endless_packet(listener, context)))
        thread.start()
        broker = f"127.0.0.1:{listener.getsockname()[1]}"
        link = MqttLink("d1", [broker], make_context(authority.certificate_path.read_text()))
        link.start()
        wait_for(lambda: not link.received.empty(), "the event")
        link.stop()
        thread.join()
    received = link.received.get()
    assert (received.kind, b"packet of 268435455 bytes" in received.payload) == ("event", True)
    assert sent[0] < 16 << 20
