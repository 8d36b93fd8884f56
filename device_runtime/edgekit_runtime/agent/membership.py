"""This device in its fleet: its key and certificate, as `enrolment` stored them."""

import base64
import contextlib
import json
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from edgekit_runtime.agent.documents import Enrolment
from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import ConfigError, EdgekitError

KEY, CERTIFICATE, ENROLMENT = "device.key", "device.crt", "enrolment.json"
"""Names of the files."""
_KEY_BYTES: Final = 32
# Prefix of the key in DER: PKCS #8.
_PRIVATE_DER: Final = bytes.fromhex("302e020100300506032b657004220420")


class EnrolmentError(EdgekitError):
    """The fleet does not let this device in, or this device is in none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """This device in its fleet.

    Attributes:
        enrolment: the fleet's answer.
        key: the device's private key.
        folder: folder of key and certificate.
    """

    enrolment: Enrolment
    key: Ed25519PrivateKey
    folder: Path

    def make_context(self) -> ssl.SSLContext:
        """Return a TLS context of this device."""
        certificate, key = self.folder / CERTIFICATE, self.folder / KEY
        return make_context(self.enrolment.authority, str(certificate), str(key))

    def make_download_context(self) -> ssl.SSLContext:
        """Return a TLS context for packages, which are signed: public authorities may name a CDN."""
        context = self.make_context()
        if not self.enrolment.artifacts.startswith(f"{self.enrolment.web}/"):
            context.load_default_certs()
        return context


def read_membership(config: Path) -> Membership:
    """Return this device in its fleet.

    Raises:
        EnrolmentError: this device is in no fleet, or its files are damaged.
    """
    folder = config / "fleet"
    try:
        enrolment = from_plain(Enrolment, json.loads((folder / ENROLMENT).read_bytes()), ENROLMENT)
        key = _read_key((folder / KEY).read_text())
    except FileNotFoundError as cause:
        raise EnrolmentError(
            "this device is in no fleet; join one by `edgekit-device enroll --code CODE`"
        ) from cause
    except (OSError, ValueError, ConfigError) as cause:
        raise EnrolmentError(f"{folder}: {cause}; join the fleet again") from cause
    own = Ed25519PrivateKey.from_private_bytes(key)
    return Membership(enrolment=enrolment, key=own, folder=folder)


def _read_key(pem: str) -> bytes:
    """Return the 32 bytes of a private Ed25519 key; the library's reader of all formats takes a megabyte.

    Raises:
        ValueError: the text is another kind of key, or no key.

    Source: RFC 8410, section 7.
    """
    found = re.fullmatch(r"\s*-----BEGIN PRIVATE KEY-----([^-]*)-----END PRIVATE KEY-----\s*", pem)
    data = base64.b64decode("".join(found[1].split()), validate=True) if found else b""
    if len(data) != len(_PRIVATE_DER) + _KEY_BYTES or not data.startswith(_PRIVATE_DER):
        raise ValueError("expected an Ed25519 private key in PEM")
    return data[len(_PRIVATE_DER) :]


class ResumingContext(ssl.SSLContext):
    """A context that resumes its last session, which costs the broker a third of a full handshake."""

    _session: ssl.SSLSession | None = None

    def remember(self, connection: Any) -> None:
        """Keep the session of a connection for the next one."""
        with contextlib.suppress(AttributeError, ValueError):
            self._session = connection.session or self._session

    def wrap_socket(self, *args: Any, **options: Any) -> ssl.SSLSocket:
        """Return the socket over TLS, see `ssl.SSLContext.wrap_socket`."""
        try:
            return super().wrap_socket(*args, **{"session": self._session, **options})
        except ssl.SSLError:  # some SSLErrors are ValueErrors
            raise
        except ValueError:  # a session of another context
            self._session = None
            return super().wrap_socket(*args, **options)


def make_context(authority: str, certificate: str | None = None, key: str | None = None) -> ssl.SSLContext:
    """Return a context that trusts only the fleet's authority, with TLS 1.2 or newer.

    Args:
        authority: the authority's certificate, in PEM.
        certificate: path of the device's certificate, or None before it has one.
        key: path of the device's key.
    """
    context = ResumingContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=authority)
    if certificate is not None:
        context.load_cert_chain(certificate, key)
    return context
