"""What a device says where it cannot reach its fleet: one sentence for each kind of failure."""

import ipaddress
import socket
import ssl
import threading
from datetime import datetime, timedelta, timezone

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from tests.agent.parts import make_enrolment
from tests.toolkit.cases import cases

from edgekit_runtime.agent.membership import LINK, Membership, explain_failure, make_context, read_link_status

DAY = timedelta(days=1)


def make_server(folder, begin=-DAY, end=DAY, name="127.0.0.1"):
    """Return a TLS context of a server, and the PEM of its certificate, which is its authority, too."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(timezone.utc)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fleet")])
    address = x509.IPAddress(ipaddress.ip_address(name))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begin)
        .not_valid_after(now + end)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, SHA256())
    )
    pem = certificate.public_bytes(Encoding.PEM)
    (folder / "device.crt").write_bytes(pem)
    (folder / "device.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "device.crt", folder / "device.key")
    return context, pem.decode()


def shake_hands(server, client):
    """Return the error of a TLS handshake with a server, or None."""

    def answer():
        plain, _ = listener.accept()
        try:
            server.wrap_socket(plain, server_side=True).close()
        except OSError:
            plain.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with socket.create_connection(listener.getsockname(), 10) as plain:
                client.wrap_socket(plain, server_hostname="127.0.0.1").close()
        except OSError as error:
            return error
        finally:
            thread.join()
    return None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"begin": -2 * DAY, "end": -DAY}, "has expired by this device's clock, which says 20"),
        ({"name": "127.0.0.2"}, "is for another address: start `edgekit fleet up` with `--name`"),
    ],
)
def test_certificate_that_is_refused_is_explained(tmp_path, options, words):
    server, pem = make_server(tmp_path, **options)
    problem = explain_failure(shake_hands(server, make_context(pem)), "fleet:8883")
    assert problem.text.startswith("fleet:8883: its certificate ")
    assert words in problem.text
    assert not problem.is_refusal


def test_public_certificate_that_is_not_valid_yet_is_explained(tmp_path):
    server, pem = make_server(tmp_path, begin=DAY, end=2 * DAY)
    member = Membership(
        enrolment=make_enrolment(authority=pem, artifacts="https://cdn"), key=None, folder=tmp_path
    )
    problem = explain_failure(shake_hands(server, member.make_download_context()), "cdn:443")
    assert "is not valid yet by this device's clock, which says 20" in problem.text


def test_server_of_another_fleet_is_explained(tmp_path):
    server, _ = make_server(tmp_path)
    (tmp_path / "other").mkdir()
    _, pem = make_server(tmp_path / "other")
    text = explain_failure(shake_hands(server, make_context(pem)), "fleet:8883").text
    assert "belongs to another fleet, or this fleet was created again; to let it in again" in text


@cases(
    ("error", "words", "is_refusal"),
    [
        (ssl.SSLError(1, "[SSL: SSLV3_ALERT_CERTIFICATE_REVOKED] sslv3 alert"), "has revoked", True),
        (ssl.SSLError(1, "[SSL] ssl/tls alert certificate revoked (_ssl.c:1)"), "has revoked", True),
        (ssl.SSLError(1, "[SSL: SSLV3_ALERT_CERTIFICATE_EXPIRED] x"), "asks for a new one", True),
        (ssl.SSLError(1, "[SSL: TLSV1_ALERT_UNKNOWN_CA] x"), "was created again", True),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] x"), "WRONG_VERSION_NUMBER", False),
        (ssl.SSLEOFError(8, "[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred"), "EOF occurred", False),
        (ConnectionRefusedError(111, "Connection refused"), "is the fleet's server up?", False),
        (TimeoutError(), "TimeoutError; is the fleet's server up?", False),
    ],
)
def test_each_failure_has_a_sentence(error, words, is_refusal):
    problem = explain_failure(error, "fleet:8883")
    assert words in problem.text
    assert problem.is_refusal is is_refusal


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b"[]", b'{"error": 1}'])
def test_link_status_that_cannot_be_read_is_none(tmp_path, content):
    (tmp_path / LINK).write_bytes(content)
    assert read_link_status(tmp_path) is None
