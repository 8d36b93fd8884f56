"""Enrolment of devices with one-time codes, renewal of their certificates, and revocation."""

import hashlib
import secrets
import time
from collections.abc import Mapping
from typing import Final

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from edgekit_fleet.identity.authority import Authority, SignedCertificate, check_device_name, read_csr_key
from edgekit_fleet.store import audit
from edgekit_fleet.store.attributes import list_models, list_stable, replace_attributes
from edgekit_fleet.store.due import mark_due
from edgekit_fleet.store.tables import AuditRow, CodeRow, DesiredRow, DeviceRow
from edgekit_runtime.agent.documents import EnrolmentCode, EnrolmentRequest, RenewalRequest
from edgekit_runtime.agent.trusted_time import format_utc
from edgekit_runtime.encryption.container import EncryptionError, make_content_key
from edgekit_runtime.encryption.device_key import parse_public_device_key
from edgekit_runtime.encryption.key_wrapping import wrap_key
from edgekit_runtime.errors import ConfigError, NotFoundError, SignatureError

_SECRET_BYTES: Final = 20
_MAX_FACTS: Final = 64
_MAX_FACT_CHARS: Final = 256


def make_code(
    session: Session,
    device: str,
    *,
    actor: str,
    target: str = "",
    tags: Mapping[str, str] | None = None,
    life_s: float = 86_400.0,
) -> str:
    """Make a one-time code, and return its secret. The store keeps only the digest of the secret.

    Args:
        session: The session of a transaction.
        device: The name of the device.
        actor: The actor who makes the code.
        target: The target of the device, or empty if the device states it.
        tags: The tags of the device.
        life_s: The lifetime of the code in seconds.

    Raises:
        ConfigError: The name is malformed or taken, or a tag is malformed.
    """
    check_device_name(device)
    check_tags(tags or {})
    there = session.get(DeviceRow, device)
    if there is not None and there.revoked_at is None and there.decryption_key:
        raise ConfigError(f"device '{device}' is enrolled already; revoke it first, or choose another name")
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    now = time.time()
    session.add(
        CodeRow(
            secret_sha256=_hash(secret),
            device=device,
            target=target,
            tags=dict(tags or {}),
            created_at=now,
            expires_at=now + life_s,
            created_by=actor,
        )
    )
    audit.record(session, actor, "device.invite", device, target=target, tags=dict(tags or {}), life_s=life_s)
    return secret


def format_code(address: str, authority: Authority, secret: str) -> str:
    """Return the code with which a device enrols, `ADDRESS/DIGEST/SECRET`.

    `address` is `HOST:PORT` of the web server. The digest is that of the authority's certificate.
    """
    return str(EnrolmentCode(address=address, authority_sha256=authority.fingerprint, secret=secret))


def enrol(
    session: Session, authority: Authority, request: EnrolmentRequest, life_s: float
) -> tuple[DeviceRow, SignedCertificate]:
    """Enrol a device with its code, and return its row and its certificate.

    If the device is already enrolled with the same key, it gets a new certificate and keeps its tags and
    class. It may use the same code again, because it may not have received the first answer. If the code was
    not used before and the device has no decryption key, the decryption key in the request is added.

    Raises:
        SignatureError: The code is unknown, expired or used, or a key or the certificate request is invalid.
    """
    now = time.time()
    statement = select(CodeRow).where(CodeRow.secret_sha256 == _hash(request.secret)).with_for_update()
    code = session.scalars(statement).first()
    if code is None or code.expires_at < now:
        raise SignatureError("the code is unknown or has expired; ask for a new one: `edgekit fleet enroll`")
    _check_facts(request.facts)
    _check_decryption_key(request.decryption_key)
    public_key = read_csr_key(request.csr).public_bytes(Encoding.Raw, PublicFormat.Raw)
    device = session.get(DeviceRow, code.device)
    is_again = device is not None and device.public_key == public_key and device.revoked_at is None
    if is_again:
        if device is not None and code.used_at is None and not device.decryption_key:
            _set_decryption_key(session, device, request.decryption_key)
        code.used_at = code.used_at or now
        return renew(session, authority, RenewalRequest(device=code.device, csr=request.csr), life_s)
    if code.used_at is not None:
        raise SignatureError("the code was used already; ask for a new one: `edgekit fleet enroll`")
    if device is not None and device.revoked_at is None:
        raise SignatureError(f"device '{code.device}' is enrolled already, with another key; revoke it first")
    target = code.target or request.facts.get("target", "")
    if not target:
        raise SignatureError(
            "neither the code nor the device states the target of its packages; set EDGEKIT_TARGET on the"
            " device (such as rpi5), or make the code by `edgekit fleet enroll --target TARGET`; enrol again"
        )
    certificate = authority.sign_device(request.csr, code.device, life_s)
    code.used_at = now
    if device is None:
        device = DeviceRow(name=code.device)
        session.add(device)
    device.target = target
    device.tags = dict(code.tags)
    device.facts = dict(request.facts)
    device.public_key = public_key
    device.certificate_serial, device.certificate_expires_at = certificate.serial, certificate.expires_at
    device.enrolled_at, device.revoked_at = now, None
    device.status, device.because = "new", ""
    device.sequence = device.hello_sequence = device.event_sequence = 0
    session.flush()
    if session.get(DesiredRow, device.name) is None:
        session.add(DesiredRow(device=device.name))
    _set_decryption_key(session, device, request.decryption_key)
    replace_attributes(session, {device.name: list_stable(device.facts, list_models(device.reported))})
    audit.record(session, "web", "device.enrol", device.name, serial=certificate.serial, target=device.target)
    return device, certificate


def renew(
    session: Session, authority: Authority, request: RenewalRequest, life_s: float
) -> tuple[DeviceRow, SignedCertificate]:
    """Sign a new certificate for a device's current key. Return the device's row and the certificate.

    Args:
        session: The session of a transaction.
        authority: The authority that signs the certificate.
        request: An untrusted request, which the device's key must have signed.
        life_s: The lifetime of the certificate in seconds.

    Raises:
        SignatureError: The device is unknown or revoked, or its key did not sign the request.
    """
    device = session.get(DeviceRow, request.device)
    key = read_csr_key(request.csr).public_bytes(Encoding.Raw, PublicFormat.Raw)
    if device is None:
        raise SignatureError(f"device '{request.device[:80]}' is not of this fleet; enrol it with a new code")
    if key != device.public_key:
        raise SignatureError(f"renewal for '{device.name}': the key is not that of the device")
    if device.revoked_at is not None:
        at = format_utc(device.revoked_at)
        raise SignatureError(f"device '{device.name}' was revoked at {at}; enrol it with a new code")
    certificate = authority.sign_device(request.csr, device.name, life_s)
    device.certificate_serial, device.certificate_expires_at = certificate.serial, certificate.expires_at
    audit.record(session, "web", "device.renew", device.name, serial=certificate.serial)
    return device, certificate


def is_expected(session: Session, request: EnrolmentRequest | RenewalRequest) -> bool:
    """Return True if a request has a valid code, or is signed by the key of its device.

    Raises:
        SignatureError: The certificate request is invalid.
    """
    if isinstance(request, EnrolmentRequest):
        code = session.get(CodeRow, _hash(request.secret))
        return code is not None and code.expires_at >= time.time()
    key = read_csr_key(request.csr).public_bytes(Encoding.Raw, PublicFormat.Raw)
    device = session.get(DeviceRow, request.device)
    return device is not None and device.revoked_at is None and device.public_key == key


def find_device(session: Session, name: str) -> DeviceRow:
    """Return the row of an enrolled device, including a revoked one.

    Raises:
        NotFoundError: There is no device of that name.
    """
    device = session.get(DeviceRow, name)
    if device is None:
        raise NotFoundError(f"no device '{name}' is enrolled; `edgekit fleet devices` lists them")
    return device


def revoke(session: Session, name: str, actor: str, why: str) -> DeviceRow:
    """Revoke a device and its unused codes, and return its row.

    From now on, `list_revoked_serials` includes all certificates that the audit log lists for the device.

    Raises:
        FleetError: There is no such device, or it is already revoked.
    """
    device = session.get(DeviceRow, name)
    if device is None or device.revoked_at is not None:
        raise NotFoundError(f"no device '{name}' is enrolled; `edgekit fleet devices` lists them")
    now = time.time()
    # A code that was made before, and not used, would let it in again.
    is_open = (CodeRow.device == name) & CodeRow.used_at.is_(None) & (CodeRow.expires_at > now)
    session.execute(update(CodeRow).where(is_open).values(expires_at=now))
    device.revoked_at = now
    device.is_online, device.status, device.because = False, "revoked", why
    audit.record(session, actor, "device.revoke", name, serial=device.certificate_serial, why=why)
    return device


def list_revoked_serials(session: Session) -> list[str]:
    """Return the serial numbers of all certificates that devices got before they were revoked."""
    valid: dict[str, list[str]] = {}
    revoked: list[str] = []
    actions = ("device.enrol", "device.renew", "device.revoke")
    # Of devices that were revoked alone: the entries of 100,000 others would take longer than a lease.
    were_revoked = select(AuditRow.subject).where(AuditRow.action == "device.revoke")
    statement = (
        select(AuditRow)
        .where(AuditRow.action.in_(actions), AuditRow.subject.in_(were_revoked))
        .order_by(AuditRow.number)
    )
    for row in session.scalars(statement):
        if row.action == "device.revoke":
            revoked += valid.pop(row.subject, [])
        else:
            valid.setdefault(row.subject, []).append(row.detail["serial"])
    return revoked


def check_tags(tags: Mapping[str, str]) -> None:
    """Check that selectors can refer to these tags.

    Raises:
        ConfigError: A name or value is empty, too long, or has characters that selectors do not allow.
    """
    for name, value in tags.items():
        for text in (name, value):
            if (
                not text
                or len(text) > _MAX_FACT_CHARS
                or not all(character.isalnum() or character in "._-" for character in text)
            ):
                raise ConfigError(f"tag {name!r}={value!r}: expected letters, digits, '.', '_' and '-'")


def _check_facts(facts: Mapping[str, str]) -> None:
    if len(facts) > _MAX_FACTS or any(len(k) + len(v) > _MAX_FACT_CHARS for k, v in facts.items()):
        raise SignatureError(f"facts: expected at most {_MAX_FACTS} of {_MAX_FACT_CHARS} signs each")


def _set_decryption_key(session: Session, device: DeviceRow, pem: str) -> None:
    if pem == device.decryption_key:
        return
    device.decryption_key = pem
    mark_due(session, [device.name])  # its document holds content keys for the old one
    audit.record(session, "web", "device.decryption-key", device.name, sha256=_hash(pem) if pem else "")


def _check_decryption_key(pem: str) -> None:
    try:
        if pem:
            wrap_key(make_content_key(), parse_public_device_key(pem))
    except EncryptionError as cause:
        raise SignatureError(f"decryption key: {cause}") from cause


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
