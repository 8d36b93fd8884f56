"""The membership of this device in its fleet: its key, its certificate and its TLS context.

The module also explains failed connections. The agent writes its connection status to `link.json`, and
`edgekit-device fleet status` reads it.
"""

import base64
import contextlib
import math
import re
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from edgekit_runtime.agent.documents import Enrolment
from edgekit_runtime.agent.journal import read_journal
from edgekit_runtime.agent.trusted_time import TrustedTime, format_utc, read_validity
from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.dataclass_json import from_json, to_plain
from edgekit_runtime.errors import ConfigError, EdgekitError
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.atomic_files import Disk, read_stamp, write_atomically

KEY, CERTIFICATE, ENROLMENT = "device.key", "device.crt", "enrolment.json"
"""The files of a membership."""
_KEY_BYTES: Final = 32
_NO_CHECK_TIME: Final = ssl.VerifyFlags(0x200000)  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL
# Prefix of the key in DER: PKCS #8.
_PRIVATE_DER: Final = bytes.fromhex("302e020100300506032b657004220420")
LINK: Final = "link.json"
_AGAIN: Final = (
    "to let it in again, make a code by `edgekit fleet enroll --name DEVICE`, and run"
    " `edgekit-device enroll --code CODE` here"
)
# A dict from X509_V_ERR_* of OpenSSL to faults of the server's certificate.
_SERVER_FAULTS: Final = {
    **dict.fromkeys((18, 19, 20, 21), f"belongs to another fleet, or this fleet was created again; {_AGAIN}"),
    **dict.fromkeys((62, 64), "is for another address: start `edgekit fleet up` with `--name` for this one"),
}
_TIME_FAULTS: Final = {9: "is not valid yet", 10: "has expired"}
# A dict from TLS alerts to reasons why the fleet refuses this device's certificate.
_ALERTS: Final = {
    "ALERT_CERTIFICATE_REVOKED": f"the fleet has revoked this device; {_AGAIN}",
    "ALERT_BAD_CERTIFICATE": "this device's certificate is not valid yet; the agent asks for a new one",
    "ALERT_CERTIFICATE_EXPIRED": "this device's certificate has expired; the agent asks for a new one",
    "ALERT_UNKNOWN_CA": f"the fleet was created again and does not know this device; {_AGAIN}",
}


class EnrolmentError(EdgekitError):
    """The fleet refuses this device, or this device belongs to no fleet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The membership of this device in its fleet.

    Attributes:
        folder: folder that contains the key, the certificate and the enrolment.
        stamp: a value that changes with each enrolment and renewal, see `read_stamp`.
    """

    enrolment: Enrolment
    key: Ed25519PrivateKey
    folder: Path
    stamp: tuple[int, ...] = ()

    def make_context(self, trusted_time: TrustedTime | None = None) -> ssl.SSLContext:
        """Return a TLS context with this device's certificate, see the function `make_context`."""
        certificate, key = self.folder / CERTIFICATE, self.folder / KEY
        return make_context(self.enrolment.authority, str(certificate), str(key), trusted_time=trusted_time)

    def make_download_context(self, trusted_time: TrustedTime | None = None) -> ssl.SSLContext:
        """Return a TLS context for downloads. It trusts public authorities if a CDN serves the packages."""
        context = self.make_context(trusted_time)
        if not self.enrolment.artifacts.startswith(f"{self.enrolment.web}/"):
            context.load_default_certs()
            if isinstance(context, ResumingContext):
                context.authority_end_s = math.inf
        return context

    def read_time(self, folder: Path, clock: Callable[[], float] = time.time) -> TrustedTime:
        """Return the trusted time, based on the journal. `clock` returns seconds since 1970."""
        trusted_time = TrustedTime(self.enrolment.certificate, folder, clock)
        trusted_time.note(read_journal(folder / "journal.json").known_time_s)
        return trusted_time


def read_membership(config: Path) -> Membership:
    """Return the membership of this device.

    It is stored in the folder `fleet` of the configuration folder `config`.

    Raises:
        EnrolmentError: this device is in no fleet, or the files are damaged.
    """
    folder = config / "fleet"
    stamp = read_stamp(folder / ENROLMENT)
    try:
        enrolment = from_json(Enrolment, (folder / ENROLMENT).read_bytes(), ENROLMENT)
        key = _read_key((folder / KEY).read_text())
    except FileNotFoundError as cause:
        raise EnrolmentError(
            "this device is in no fleet; join one by `edgekit-device enroll --code CODE`"
        ) from cause
    except (OSError, ValueError, ConfigError) as cause:
        raise EnrolmentError(f"{folder}: {cause}; join the fleet again") from cause
    own = Ed25519PrivateKey.from_private_bytes(key)
    return Membership(enrolment=enrolment, key=own, folder=folder, stamp=stamp)


def _read_key(pem: str) -> bytes:
    """Return the 32 bytes of a private Ed25519 key; the library's reader of all formats takes a megabyte.

    Raises:
        ValueError: the text is another kind of key, or no key.

    Source: RFC 8410, section 7.
    """
    match = re.fullmatch(r"\s*-----BEGIN PRIVATE KEY-----([^-]*)-----END PRIVATE KEY-----\s*", pem)
    data = base64.b64decode("".join(match[1].split()), validate=True) if match else b""
    if len(data) != len(_PRIVATE_DER) + _KEY_BYTES or not data.startswith(_PRIVATE_DER):
        raise ValueError("expected an Ed25519 private key in PEM")
    return data[len(_PRIVATE_DER) :]


class ResumingContext(ssl.SSLContext):
    """A TLS context that resumes its last session, to save the broker the cost of a full handshake.

    The context uses the trusted time to check that certificates have not expired. A certificate of the
    fleet's authority that is not valid yet is accepted, because it means that this device's clock is behind.
    If public authorities are trusted, OpenSSL also compares certificates with the clock, unless the clock is
    certainly wrong.

    Attributes:
        trusted_time: see `TrustedTime`.
        authority_end_s: expiry of the certificate of the fleet's authority, in seconds since 1970, or
            infinity with public authorities.
        failure: the TLS error that ended the last connection, or None. It may be an alert that the broker
            sent after the handshake, which paho does not report.
    """

    trusted_time = TrustedTime()
    authority_end_s = math.inf
    failure: ssl.SSLError | None = None
    _session: ssl.SSLSession | None = None

    def remember(self, connection: Any) -> None:
        """Store the session of a connection for the next connection."""
        with contextlib.suppress(AttributeError, ValueError):
            self._session = connection.session or self._session

    def wrap_socket(self, *args: Any, **options: Any) -> ssl.SSLSocket:
        """Return the socket over TLS. Try to resume the last session, and set `failure` to None."""
        self.failure = None
        is_checked_here = self.authority_end_s < math.inf or self.trusted_time.is_clock_behind
        flags = self.verify_flags & ~_NO_CHECK_TIME
        self.verify_flags = flags | _NO_CHECK_TIME if is_checked_here else flags
        try:
            return super().wrap_socket(*args, **{"session": self._session, **options})
        except ssl.SSLError:  # some SSLErrors are ValueErrors
            raise
        except ValueError:  # a session of another context
            self._session = None
            return super().wrap_socket(*args, **options)

    def check_end(self, connection: ssl.SSLSocket) -> None:
        """Check that the certificate of a server has not expired.

        Raises:
            EndedCertificateError: the certificate has expired.
            ValueError: the certificate states no times.
        """
        end_s = read_validity(connection.getpeercert(binary_form=True) or b"")[1]
        if min(end_s, self.authority_end_s) < self.trusted_time.now_s:
            raise EndedCertificateError(self.trusted_time)


class EndedCertificateError(ssl.SSLCertVerificationError):
    """The certificate of a server has expired according to the trusted time.

    Attributes:
        least_s: lower bound of the time, in seconds since 1970, or None if the clock is later.
    """

    def __init__(self, trusted_time: TrustedTime) -> None:
        super().__init__(1, "certificate has expired")
        self.verify_code, self.verify_message = 10, "certificate has expired"  # X509_V_ERR_CERT_HAS_EXPIRED
        self.least_s = trusted_time.least_s if trusted_time.is_clock_behind else None


class _RecordingSocket(ssl.SSLSocket):
    """Checks times of certificates, and notes in its context why it fails."""

    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        if isinstance(self.context, ResumingContext):
            self.context.check_end(self)

    def recv(self, *args: Any) -> bytes:
        try:
            return super().recv(*args)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            if isinstance(self.context, ResumingContext):
                self.context.failure = error
            raise

    def send(self, *args: Any) -> int:
        """Send bytes, see `ssl.SSLSocket.send`; where that fails, read the alert that says why."""
        try:
            return super().send(*args)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except OSError:
            with contextlib.suppress(OSError):
                self.recv(1)
            raise


def make_context(
    authority: str,
    certificate: str | None = None,
    key: str | None = None,
    *,
    trusted_time: TrustedTime | None = None,
) -> ResumingContext:
    """Return a context that trusts only the fleet's authority, with TLS 1.2 or newer.

    Args:
        authority: certificate of the authority in PEM.
        certificate: path of the device's certificate, or None before enrolment.
        key: path of the device's key.
        trusted_time: time for checks of certificates, by default the time of the clock.
    """
    context = ResumingContext(ssl.PROTOCOL_TLS_CLIENT)
    context.trusted_time = trusted_time or TrustedTime()
    context.authority_end_s = read_validity(ssl.PEM_cert_to_DER_cert(authority))[1]
    context.sslsocket_class = _RecordingSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=authority)
    if certificate is not None:
        context.load_cert_chain(certificate, key)
    return context


@dataclass(frozen=True, slots=True)
class LinkProblem:
    """A reason why this device does not reach its fleet.

    Attributes:
        text: what happened and what to do, without a full stop.
        is_refusal: whether the fleet refuses this device. If so, the fleet's web server may know the reason.
    """

    text: str
    is_refusal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatus:
    """The status of the connection.

    Attributes:
        is_connected: whether the broker has accepted the agent.
        since_at: time of the last change of `is_connected`, in seconds since 1970.
        problem: why there is no connection, or what is wrong with it. It is empty if nothing is wrong or the
            agent has stopped.
    """

    is_connected: bool = False
    since_at: float = 0.0
    problem: str = ""


def explain_failure(error: BaseException, address: str) -> LinkProblem:
    """Return why a connection to the fleet failed. `address` is `HOST:PORT`."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if fault := _TIME_FAULTS.get(error.verify_code):
            if isinstance(error, EndedCertificateError) and error.least_s is not None:
                return LinkProblem(
                    f"{address}: its certificate has expired: by what the fleet has signed it is"
                    f" {format_utc(error.least_s)} at least; start `edgekit fleet up` on the server again"
                )
            text = f"its certificate {fault} by this device's clock, which says {format_utc(time.time())}"
            return LinkProblem(
                f"{address}: {text}: set the clock (`timedatectl set-ntp true`); if the clock is right, start"
                " `edgekit fleet up` on the server again"
            )
        fault = _SERVER_FAULTS.get(error.verify_code, f"is refused: {error.verify_message}")
        return LinkProblem(f"{address}: its certificate {fault}")
    if isinstance(error, ssl.SSLError):
        words = str(error).upper().replace(" ", "_")
        reason = next((text for alert, text in _ALERTS.items() if alert in words), "")
        return LinkProblem(f"{address}: {reason or error}", is_refusal=bool(reason))
    return LinkProblem(f"{address}: {str(error) or type(error).__name__}; is the fleet's server up?")


def write_link_status(folder: Path, state: LinkStatus, disk: Disk) -> None:
    with write_atomically(folder / LINK, mode=0o600, disk=disk) as file:
        file.write(encode_json(to_plain(state)))


def read_link_status(folder: Path) -> LinkStatus | None:
    """Return the status that the agent wrote last, or None if no status can be read."""
    try:
        return from_json(LinkStatus, (folder / LINK).read_bytes(), LINK)
    except (OSError, ConfigError):
        return None
