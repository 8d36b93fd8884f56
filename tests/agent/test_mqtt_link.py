"""The agent's link to a broker that sends more than it should."""

import socket
import ssl
import threading

from tests.waiting import wait_for

from edgekit_fleet.identity.authority import Authority
from edgekit_runtime.agent.membership import make_context
from edgekit_runtime.agent.mqtt_link import MqttLink

CONNACK, HUGE_PUBLISH = b"\x20\x03\x00\x00\x00", b"\x30\xff\xff\xff\x7f"  # the second one has 256 MiB


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


def test_packet_without_end_is_not_read_and_is_reported(tmp_path):
    authority = Authority(tmp_path)
    authority.make_server(("127.0.0.1",))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.pair("server"))
    sent = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: sent.append(serve_endless_packet(listener, context)))
        thread.start()
        broker = f"127.0.0.1:{listener.getsockname()[1]}"
        link = MqttLink("d1", [broker], make_context(authority.certificate_path.read_text()), b"gone")
        link.start()
        wait_for(lambda: not link.received.empty(), "the event", 10)
        link.stop()
        thread.join()
    received = link.received.get()
    assert (received.kind, b"packet of 268435455 bytes" in received.payload) == ("event", True)
    assert sent[0] < 16 << 20
