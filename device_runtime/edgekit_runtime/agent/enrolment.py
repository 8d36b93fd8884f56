"""Joining a fleet: the device makes a key and sends a one-time code, and the fleet issues a certificate.

    <config>/fleet/device.key       Ed25519 private key, never leaves the device
    <config>/fleet/device.crt       the certificate for this key
    <config>/fleet/enrolment.json   the answer of the fleet, see `Enrolment`
    <config>/keys/NAME.pub.pem      keys whose packages are trusted
    <config>/keys/device-key.json   key for which the fleet wraps content keys

The device writes both of its keys to the disk before it sends the request. If the answer is lost, the device
repeats the request with the same keys, and the fleet accepts it.
"""

import contextlib
import hashlib
import http.client
import json
import ssl
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from edgekit_runtime.agent.documents import (
    Enrolment,
    EnrolmentCode,
    EnrolmentRequest,
    PackageKey,
    RenewalRequest,
)
from edgekit_runtime.agent.membership import (
    CERTIFICATE,
    ENROLMENT,
    KEY,
    EnrolmentError,
    Membership,
    explain_failure,
    make_context,
    read_membership,
)
from edgekit_runtime.agent.trusted_time import TrustedTime, read_validity
from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.dataclass_json import from_json, to_plain
from edgekit_runtime.encryption.device_key import make_device_key
from edgekit_runtime.errors import ConfigError, EdgekitError, SignatureError, TransportError
from edgekit_runtime.system.atomic_files import DISK, Disk, write_atomically
from edgekit_runtime.system.child_process import end_with_parent
from edgekit_runtime.system.shown_text import clean
from edgekit_runtime.trust.keys import PUBLIC_KEY_SUFFIX
from edgekit_runtime.trust.trusted_keys import (
    check_name,
    forget_key,
    make_keys_folder,
    write_public_file,
)

_MAX_ANSWER_BYTES: Final = 1 << 20
_MAX_SHOWN_BYTES: Final = 400
_TIMEOUT_S: Final = 30.0
_OK: Final = 200
_RENEW_AT: Final = 1 / 3  # remaining share of the certificate's life
_NOT_DUE: Final = 3  # exit code of this module. `commands.agent` knows it


def enrol(
    code: EnrolmentCode,
    config: Path,
    facts: Mapping[str, str],
    disk: Disk = DISK,
    *,
    trusted_time: TrustedTime | None = None,
) -> Membership:
    """Join the fleet that a code names.

    If this device was in another fleet, the package keys of that fleet are no longer trusted. Keys that were
    added by hand stay trusted.

    Args:
        code: the enrolment code.
        config: configuration folder. The files are written into its folders `fleet` and `keys`.
        facts: the same field as in `Reported`.
        disk: file operations.
        trusted_time: time for checks of certificates, by default the time of the clock.

    Raises:
        EnrolmentError: the fleet refuses.
        SignatureError: this is not the server that the code names.
        TransportError: the server cannot be reached.
        OutputError: a file cannot be written.
    """
    folder = config / "fleet"
    make_keys_folder(folder, 0o700)
    key = _make_key(folder, disk)
    # Of this connection only the certificate with the code's digest is trusted.
    unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    authority = _ask(code.address, unverified, "GET", "/authority").decode(errors="replace")
    fingerprint = hashlib.sha256(_read_certificate(authority)).hexdigest()
    if fingerprint != code.authority_sha256:
        raise SignatureError(
            f"{code.address}: its authority has sha256 {fingerprint}, the code states"
            f" {code.authority_sha256}; is this the right server?"
        )
    request = EnrolmentRequest(
        secret=code.secret,
        csr=make_csr(key),
        facts=facts,
        decryption_key=make_device_key(config / "keys", disk).pem,
    )
    body = json.dumps(to_plain(request)).encode()
    context = make_context(authority, trusted_time=trusted_time)
    answer = _parse(_ask(code.address, context, "POST", "/enrol", body), code.address)
    old_keys = _list_foreign_keys(config, authority)
    _store(config, answer, authority, answer.package_keys, old_keys=old_keys, disk=disk)
    return read_membership(config)


def is_renewal_due(enrolment: Enrolment, now_s: float) -> bool:
    """Return whether the certificate has less than a third of its lifetime left or is not yet valid.

    `now_s` is in seconds since 1970.
    """
    begin_s, end_s = read_validity(ssl.PEM_cert_to_DER_cert(enrolment.certificate))
    # Before its begin, the fleet's clock was ahead.
    return now_s > end_s - (end_s - begin_s) * _RENEW_AT or now_s < begin_s


def renew(config: Path, disk: Disk = DISK, *, trusted_time: TrustedTime | None = None) -> Membership:
    """Fetch and store a new certificate, and the addresses of the fleet if they have changed.

    A renewal sets the package keys and the first TUF root only if the device has none. Otherwise an attacker
    who controls the fleet's server could make the device trust any package and obey any manager.

    Raises:
        EnrolmentError: the fleet refuses, or this device is in no fleet.
        TransportError: the fleet cannot be reached.
        OutputError: the answer cannot be stored.
    """
    member = read_membership(config)
    before = member.enrolment
    request = RenewalRequest(device=before.device, csr=make_csr(member.key))
    address = before.web.removeprefix("https://").rstrip("/")
    body = json.dumps(to_plain(request)).encode()
    context = make_context(before.authority, trusted_time=trusted_time)
    answer = _parse(_ask(address, context, "POST", "/renew", body), address)
    if answer.device != before.device:
        raise EnrolmentError(f"{address}: renews {answer.device!r}, this is {before.device!r}")
    # A fleet that had none when the device enrolled may name them once.
    new_keys = () if before.package_keys else answer.package_keys
    answer = replace(
        answer,
        package_keys=before.package_keys or answer.package_keys,
        tuf_root=before.tuf_root or answer.tuf_root,
    )
    _store(config, answer, before.authority, new_keys, disk=disk)
    return read_membership(config)


def _make_key(folder: Path, disk: Disk) -> Ed25519PrivateKey:
    with contextlib.suppress(OSError, ValueError):
        there = load_pem_private_key((folder / KEY).read_bytes(), None)
        if isinstance(there, Ed25519PrivateKey):
            return there
    key = Ed25519PrivateKey.generate()
    with write_atomically(folder / KEY, mode=0o600, disk=disk) as file:
        file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return key


def make_csr(key: Ed25519PrivateKey) -> str:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "device")])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, None)
    return request.public_bytes(Encoding.PEM).decode()


def _read_certificate(pem: str) -> bytes:
    try:
        return x509.load_pem_x509_certificate(pem.encode()).public_bytes(Encoding.DER)
    except ValueError as cause:
        raise SignatureError(f"the server's authority is no certificate: {cause}") from cause


def _parse(answer: bytes, where: str) -> Enrolment:
    try:
        enrolment = from_json(Enrolment, answer, where)
        for key in enrolment.package_keys:
            check_name(key.name)
    except (ConfigError, SignatureError) as cause:
        raise EnrolmentError(f"{where}: its answer is not understood: {cause}; update edgekit") from cause
    return enrolment


def _list_foreign_keys(config: Path, authority: str) -> Sequence[PackageKey]:
    """Return the package keys that came with the enrolment in a fleet of another authority."""
    try:
        before = read_membership(config).enrolment
        is_other = _read_certificate(before.authority) != _read_certificate(authority)
    except (EnrolmentError, SignatureError):  # it was in none, or its files are damaged
        return ()
    return before.package_keys if is_other else ()


def _store(
    config: Path,
    answer: Enrolment,
    authority: str,
    new_keys: Sequence[PackageKey],
    *,
    old_keys: Sequence[PackageKey] = (),
    disk: Disk,
) -> None:
    """Store the answer; the file that makes this device a member comes last.

    Until then the old file says which keys to forget, if this is cut off and done again.
    """
    if _read_certificate(answer.authority) != _read_certificate(authority):
        raise EnrolmentError("the fleet's answer names another authority than its server")
    keys = config / "keys"
    make_keys_folder(keys, 0o755)
    for name in new_keys:
        write_public_file(keys / f"{name.name}{PUBLIC_KEY_SUFFIX}", name.public_key.encode())
    folder = config / "fleet"
    with write_atomically(folder / CERTIFICATE, mode=0o600, disk=disk) as file:
        file.write(answer.certificate.encode())
    for name in set(old_keys) - set(new_keys):
        forget_key(keys, name.name, name.public_key.encode())
    with write_atomically(folder / ENROLMENT, mode=0o600, disk=disk) as file:
        file.write(encode_json(to_plain(answer)))


def _ask(address: str, context: ssl.SSLContext, method: str, path: str, body: bytes | None = None) -> bytes:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPSConnection(host.strip("[]"), int(port), timeout=_TIMEOUT_S, context=context)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        response = connection.getresponse()
        data = response.read(_MAX_ANSWER_BYTES)
    except (OSError, http.client.HTTPException, ValueError) as cause:
        raise TransportError(explain_failure(cause, address).text) from cause
    finally:
        connection.close()
    if response.status != _OK:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            raise EnrolmentError(f"{address}: refuses ({response.status}): {json.loads(data)['error']}")
        answer_text = clean(data[:_MAX_SHOWN_BYTES].decode("utf-8", "replace")).strip()
        raise EnrolmentError(f"{address}: refuses ({response.status}){answer_text and f': {answer_text}'}")
    return data


if __name__ == "__main__":  # the agent renews in a separate process: CONFIG STATED_S [--refused]
    end_with_parent()
    try:
        folder = Path(sys.argv[1])
        enrolment = read_membership(folder).enrolment
        trusted_time = TrustedTime(enrolment.certificate)
        trusted_time.note(float(sys.argv[2]))
        is_refused = sys.argv[3:] == ["--refused"]  # by the broker. The web server says why, or renews
        if not is_refused and not is_renewal_due(enrolment, trusted_time.now_s):
            sys.exit(_NOT_DUE)
        renew(folder, trusted_time=trusted_time)
    except EdgekitError as error:
        sys.exit(str(error))
