"""Certificates and the list of revoked ones after a clock that was wrong."""

import base64
import ssl
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from tests.fleet.fleet_device import make_csr

from edgekit_fleet.identity import authority as authority_module
from edgekit_fleet.identity.authority import Authority
from edgekit_runtime.agent.documents import Enrolment
from edgekit_runtime.agent.enrolment import is_renewal_due
from edgekit_runtime.errors import SignatureError

YEAR_S = 365 * 86_400.0


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return by how much the clock of the authority is ahead."""
    lie = {"s": YEAR_S}
    monkeypatch.setattr(authority_module, "time", SimpleNamespace(time=lambda: time.time() + lie["s"]))
    return lie


def test_list_of_revoked_certificates_of_a_clock_ahead_is_replaced_by_a_valid_one(
    tmp_path: Path, ahead: dict[str, float]
) -> None:
    made = Authority(tmp_path)
    ahead["s"] = 0.0
    made.write_crl(["1"])
    assert x509.load_pem_x509_crl(made.crl.read_bytes()).last_update_utc.timestamp() < time.time()


def test_certificate_of_the_servers_of_a_clock_ahead_is_made_again(
    tmp_path: Path, ahead: dict[str, float]
) -> None:
    ahead["s"] = 0.0
    made = Authority(tmp_path)
    ahead["s"] = YEAR_S
    made.make_server(("fleet.example",))
    ahead["s"] = 0.0
    made.make_server(("fleet.example",))
    found = x509.load_pem_x509_certificate(made.pair("server")[0].read_bytes())
    assert found.not_valid_before_utc.timestamp() < time.time()


def test_certificate_request_of_a_version_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    request = x509.load_pem_x509_csr(make_csr(Ed25519PrivateKey.generate()).encode())
    body = request.public_bytes(Encoding.DER).replace(b"\x02\x01\x00", b"\x02\x01\x05", 1)
    title = "CERTIFICATE REQUEST"
    text = f"-----BEGIN {title}-----\n{base64.encodebytes(body).decode()}-----END {title}-----\n"
    with pytest.raises(SignatureError, match="cannot be read"):
        Authority(tmp_path).sign_device(text, "d1", YEAR_S)


def test_device_renews_a_certificate_that_is_not_valid_yet(tmp_path: Path, ahead: dict[str, float]) -> None:
    signed = Authority(tmp_path).sign_device(make_csr(Ed25519PrivateKey.generate()), "d1", YEAR_S)
    enrolment = Enrolment(
        device="d1",
        certificate=signed.pem,
        authority="",
        brokers=(),
        web="",
        artifacts="",
        tuf_root="",
        package_keys=(),
        target="x86-64",
    )
    now = time.time()
    assert [is_renewal_due(enrolment, now + passed) for passed in (0.0, YEAR_S)] == [True, False]


@pytest.mark.parametrize("name", ["manager", "server"])
def test_certificate_follows_a_key_that_was_removed_and_made_again(tmp_path: Path, name: str) -> None:
    made = Authority(tmp_path)
    made.make_server(("fleet.example",))
    certificate, key = made.pair(name)
    key.unlink()
    made = Authority(tmp_path)
    made.make_server(("fleet.example",))
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key)
