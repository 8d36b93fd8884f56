"""The certificate authority of a fleet, which signs X.509 certificates for devices, broker and manager.

All keys are Ed25519. A device's key also signs its documents. The authority's private key is on the manager's
machine, so whoever controls that machine controls the fleet.

Source: RFC 5280, RFC 8410.
"""

import contextlib
import ipaddress
import os
import re
import ssl
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings, split_address
from edgekit_runtime.errors import ConfigError, SignatureError
from edgekit_runtime.system.atomic_files import make_folders, write_atomically

MANAGER: Final = "edgekit-manager"
"""The common name of the manager's certificate, and its user name at the broker. No device gets this name."""

TLS_1_2_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""The ciphers that broker and web server accept below TLS 1.3. All offer forward secrecy and authenticated
encryption."""

_LOCAL_NAMES: Final = ("127.0.0.1", "::1", "localhost")
_DEVICE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)
_MAX_CSR_CHARS: Final = 8 << 10
_TOLERATED_S: Final = 86_400.0  # a device's clock may be slow
_AUTHORITY_LIFE_S: Final = 20 * 365 * 86_400.0
_SERVER_LIFE_S: Final = 2 * 365 * 86_400.0
_CRL_LIFE_S: Final = 10 * 365 * 86_400.0  # an expired list would shut everybody out


@dataclass(frozen=True, slots=True)
class SignedCertificate:
    """A certificate of a device.

    Attributes:
        pem: The certificate in PEM.
        serial: The serial number in hexadecimal digits.
        expires_at: The time of expiry, in seconds since 1970.
        public_key: The device's Ed25519 key, 32 bytes.
    """

    pem: str
    serial: str
    expires_at: float
    public_key: bytes


def check_device_name(name: str) -> str:
    """Return the name if it is allowed for a device.

    Raises:
        ConfigError: The name has characters that have a meaning in a topic, an ACL or a path.
    """
    if _DEVICE_NAME.fullmatch(name) is None or name.startswith("edgekit-"):
        raise ConfigError(
            f"a device cannot be named {name[:80]!r}: expected up to 63 letters, digits, '.', '_', '-', the"
            " first a letter or digit, and not 'edgekit-' at its beginning"
        )
    return name


class Authority:
    """The authority in a folder.

    The folder contains the private keys `*.pem` and certificates `*.crt` of `authority`, `manager` and
    `server`, and the revocation list `revoked.crl`.
    """

    def __init__(self, folder: Path) -> None:
        """Open the authority, or create it if it is missing.

        Raises:
            ConfigError: A file is malformed.
            OutputError: The folder cannot be written.
        """
        self.folder = folder
        make_folders(folder, 0o700)
        self._key = _read_or_make_key(folder / "authority.pem")
        path = folder / "authority.crt"
        if not path.exists():
            _write(path, _pem(self._sign_itself()))
        self.certificate = _read_certificate(path)
        if self.certificate.public_key() != self._key.public_key():
            raise ConfigError(
                f"{path} does not belong to {folder / 'authority.pem'}; restore both from a backup"
            )
        if not self.crl.exists():
            self.write_crl(())
        self.make_manager(0)

    @property
    def certificate_path(self) -> Path:
        return self.folder / "authority.crt"

    @property
    def crl(self) -> Path:
        """The path of the list of revoked certificates."""
        return self.folder / "revoked.crl"

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the authority's certificate (DER), in hexadecimal digits."""
        return self.certificate.fingerprint(SHA256()).hex()

    def pair(self, name: str) -> tuple[Path, Path]:
        """Return the paths of the certificate and private key of `manager` or `server`."""
        return self.folder / f"{name}.crt", self.folder / f"{name}.pem"

    @staticmethod
    def name_manager(number: int) -> str:
        """Return the user name of a manager at the broker. `number` is 0 for the first manager."""
        return f"{MANAGER}-{number}" if number else MANAGER

    def make_manager(self, number: int) -> tuple[Path, Path]:
        """Return the paths of a manager's certificate and private key. Missing files are created.

        `number` is 0 for the first manager.

        Raises:
            OutputError: The folder cannot be written.
        """
        name = f"manager-{number}" if number else "manager"
        self._make_pair(name, self.name_manager(number), ())
        return self.pair(name)

    def read_own(self) -> dict[str, x509.Certificate]:
        """Return the certificates of this machine's servers and managers.

        The result is a dict from the file name without its suffix to the certificate.

        Raises:
            ConfigError: A certificate cannot be read.
        """
        paths = sorted([*self.folder.glob("manager*.crt"), *self.folder.glob("server.crt")])
        return {path.stem: _read_certificate(path) for path in paths}

    def make_server(self, names: tuple[str, ...]) -> None:
        """Make the certificate of the broker and the web server, unless there is a valid one for `names`.

        `names` are DNS names and addresses.

        Raises:
            OutputError: The folder cannot be written.
        """
        self._make_pair("server", names[0], names)

    def sign_device(self, csr: str, name: str, life_s: float) -> SignedCertificate:
        """Return a certificate for the public key in a signing request.

        Args:
            csr: An untrusted certificate signing request in PEM. Only its key is used.
            name: The name in the certificate.
            life_s: The lifetime of the certificate in seconds.

        Raises:
            SignatureError: The request is malformed or not signed by its own key, or its key is not Ed25519.
            ConfigError: The name is not allowed for a device.
        """
        public_key = read_csr_key(csr)
        certificate = self._sign(check_device_name(name), public_key, life_s)
        return SignedCertificate(
            pem=_pem(certificate).decode(),
            serial=f"{certificate.serial_number:x}",
            expires_at=certificate.not_valid_after_utc.timestamp(),
            public_key=public_key.public_bytes(Encoding.Raw, PublicFormat.Raw),
        )

    def load_short_lived(self, context: ssl.SSLContext, name: str) -> None:
        """Load a new key into `context`, with a certificate for `name` that is valid for ten minutes.

        The manager uses the context to connect with the name of a revoked device, so that the broker closes
        the device's own connection. `doctor` uses it for its test devices.
        """
        key = Ed25519PrivateKey.generate()
        with tempfile.TemporaryDirectory(prefix="edgekit-certificate-") as folder:  # `ssl` reads files alone
            path = Path(folder) / "both.pem"
            _write(path, _pem(self._sign(name, key.public_key(), 600.0)) + _private_pem(key))
            context.load_cert_chain(path)

    def write_crl(self, serials: Iterable[str]) -> None:
        """Replace the list of revoked certificates in `crl`.

        Args:
            serials: The serial numbers of all revoked certificates, in hexadecimal digits.

        Raises:
            OutputError: The folder cannot be written.
        """
        # Dated before now: otherwise lists written within one second would be dated later than now, and a
        # broker would refuse everybody until then.
        now = datetime.fromtimestamp(int(time.time() - _TOLERATED_S), timezone.utc)
        with contextlib.suppress(OSError, ValueError):  # OpenSSL prefers the newer list, by the second
            last = x509.load_pem_x509_crl(self.crl.read_bytes()).last_update_utc
            if last.timestamp() < time.time():  # else the clock was ahead, and the old list is not valid yet
                now = max(now, last + timedelta(seconds=1))
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(now)
            .next_update(now + timedelta(seconds=_CRL_LIFE_S))
        )
        for serial in serials:
            builder = builder.add_revoked_certificate(
                x509.RevokedCertificateBuilder().serial_number(int(serial, 16)).revocation_date(now).build()
            )
        _write(self.crl, builder.sign(self._key, None).public_bytes(Encoding.PEM))

    def _make_pair(self, name: str, common_name: str, names: tuple[str, ...]) -> None:
        path, key_path = self.pair(name)
        key = _read_or_make_key(key_path)
        if path.exists():
            there = _read_certificate(path)
            left_s = there.not_valid_after_utc.timestamp() - time.time()
            is_valid = _SERVER_LIFE_S / 4 < left_s <= _SERVER_LIFE_S + _TOLERATED_S
            is_of_key = there.public_key() == key.public_key()  # else the key was removed, to be exchanged
            if _alternative_names(there) == names and is_valid and is_of_key:
                return
        _write(path, _pem(self._sign(common_name, key.public_key(), _SERVER_LIFE_S, names)))

    def _sign_itself(self) -> x509.Certificate:
        name = f"edgekit fleet {os.urandom(4).hex()}"
        builder = _start(name, name, self._key.public_key(), _AUTHORITY_LIFE_S)
        return (
            builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(is_authority=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, None)
        )

    def _sign(
        self, name: str, key: Ed25519PublicKey, life_s: float, names: tuple[str, ...] = ()
    ) -> x509.Certificate:
        issuer = self.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if names else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = (
            _start(name, str(issuer), key, life_s)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(is_authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        if names:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False
            )
        return builder.sign(self._key, None)


def open_authority(folder: FleetFolder, settings: FleetSettings) -> Authority:
    """Return the authority, with a server certificate for the names in the settings. Create missing files.

    Raises:
        ConfigError: A file is malformed.
        OutputError: The folder cannot be written.
    """
    authority = Authority(folder.identity)
    names = (*settings.names, *(split_address(address)[0] for address in settings.brokers), *_LOCAL_NAMES)
    authority.make_server(tuple(dict.fromkeys(names)))
    return authority


def read_csr_key(csr: str) -> Ed25519PublicKey:
    """Return the public key in a certificate signing request (PEM), and check the request's signature.

    Raises:
        SignatureError: The request is malformed or not signed by its own key, or its key is not Ed25519.
    """
    if len(csr) > _MAX_CSR_CHARS:
        raise SignatureError(
            f"certificate request: has {len(csr)} signs, at most {_MAX_CSR_CHARS} are allowed"
        )
    try:
        request = x509.load_pem_x509_csr(csr.encode())
        public_key = request.public_key()
        is_right = request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion) as cause:
        raise SignatureError(f"certificate request: cannot be read: {cause}") from cause
    if not isinstance(public_key, Ed25519PublicKey):
        raise SignatureError("certificate request: its key is not Ed25519")
    if not is_right:
        raise SignatureError("certificate request: its signature is not by its own key")
    return public_key


def _start(name: str, issuer: str, key: Ed25519PublicKey, life_s: float) -> x509.CertificateBuilder:
    now = datetime.fromtimestamp(int(time.time()), timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(seconds=_TOLERATED_S))
        .not_valid_after(now + timedelta(seconds=life_s))
    )


def _key_usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _alternative_names(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return ()
    return tuple(str(name.value) for name in extension.value)


def _read_or_make_key(path: Path) -> Ed25519PrivateKey:
    if not path.exists():
        _write(path, _private_pem(Ed25519PrivateKey.generate()))
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as cause:
        raise ConfigError(f"{path}: cannot read a private key: {cause}; restore it from a backup") from cause
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path}: is no Ed25519 key; restore it from a backup")
    return key


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as cause:
        raise ConfigError(f"{path}: cannot read a certificate: {cause}; restore it from a backup") from cause


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def _private_pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, data: bytes) -> None:
    with write_atomically(path, mode=0o600) as file:
        file.write(data)
