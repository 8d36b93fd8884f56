"""The trusted time of this device: the time of its clock, but at least a lower bound from signed sources.

A board without a battery for its clock starts in 1970, or at the time when it was switched off. The lower
bound is the first available time in this list, plus the time that has passed since this device read it:

    issued_at of the manager's newest document (stored in the journal)
    `FIELD` of the last verified TUF timestamp metadata
    start of the validity of this device's certificate

The bound is never before `RELEASED_S`. For example, the clock shows 1970, the newest document is from 28
November, and the device read it two days ago. The date is then at least 30 November, and a certificate that
expired on 29 November is refused.

The bound moves back only through a newer document with an earlier time, or through a root that names another
manager key. A thief of a manager key can move the bound ahead by at most `MAX_LEAD_S`. All metadata is then
expired until the key is replaced. A clock that is ahead cannot be detected, and metadata may seem expired
until the clock is corrected. The wrong time is not stored.
"""

import json
import math
import re
import ssl
import time
from calendar import timegm
from collections.abc import Callable
from pathlib import Path
from typing import Final

RELEASED_S: Final = 1_793_491_200.0
"""2026-11-01, before this release. No correct clock shows an earlier time. Raise it with each release."""
FIELD: Final = "x-edgekit-signed-at"
"""The field of TUF timestamp metadata with its time in seconds since 1970."""
MAX_LEAD_S: Final = 2 * 365 * 86_400.0  # the life of a root
TOLERATED_S: Final = 3600.0
"""How far a clock or a stored bound can be behind and still count as correct."""
_VALIDITY: Final = re.compile(
    rb"\x30.(?:\x17\x0d|\x18\x0f)(\d{12,14})Z(?:\x17\x0d|\x18\x0f)(\d{12,14})Z", re.DOTALL
)
_LONG_YEAR: Final = 14  # digits of a time with a four-digit year


class TrustedTime:
    """The time of this device's clock, but never earlier than a lower bound from signed sources."""

    def __init__(
        self,
        certificate: str = "",
        folder: Path | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without a document, see `note`.

        Args:
            certificate: this device's, in PEM; empty before it has one.
            folder: the agent's folder, with the verified metadata, or None.
            clock: seconds since 1970, of the clock that may be wrong.
            monotonic: seconds of a clock that is never set.
        """
        self._timestamp = None if folder is None else folder / "tuf" / "timestamp.json"
        self._begin_s = read_validity(ssl.PEM_cert_to_DER_cert(certificate))[0] if certificate else 0.0
        self._clock, self._monotonic = clock, monotonic
        self.note(0.0)

    def note(self, issued_s: float) -> None:
        """Set the time of the manager's newest document in seconds since 1970. Set 0 if there is none.

        This also reads the timestamp of the repository again.
        """
        self._issued_s, self._noted_s = issued_s, self._monotonic()
        self._signed_s = _read_signed(self._timestamp)

    @property
    def now_s(self) -> float:
        """The time of the clock or the lower bound, whichever is later."""
        return max(self._clock(), self.least_s)

    @property
    def least_s(self) -> float:
        return max(RELEASED_S, self.stated_s or self._begin_s + self._passed_s)

    @property
    def stated_s(self) -> float:
        """The lower bound from a document or metadata, in seconds since 1970, or 0 if there is neither."""
        limit_s = max(RELEASED_S, self._clock(), self._begin_s) + MAX_LEAD_S
        stated_s = min(self._issued_s or self._signed_s, limit_s)
        return stated_s + self._passed_s if stated_s else 0.0

    @property
    def is_clock_behind(self) -> bool:
        """Whether the clock is certainly wrong, because it is over `TOLERATED_S` behind the bound."""
        return self._clock() < self.least_s - TOLERATED_S

    def outgrows(self, stored_s: float) -> bool:
        """Return whether the clock is behind, and the bound is over an hour later than `stored_s`.

        `stored_s` is the time in the journal.
        """
        return self.is_clock_behind and self.stated_s > stored_s + TOLERATED_S

    @property
    def _passed_s(self) -> float:
        return self._monotonic() - self._noted_s

    def explain(self) -> str:
        """Return a text that says what is wrong with the clock, empty if nothing is wrong."""
        if not self.is_clock_behind:
            return ""
        return (
            f"the clock says {format_utc(self._clock())}, and it is {format_utc(self.least_s)} at least:"
            " set it (timedatectl set-ntp true)"
        )


def read_validity(certificate: bytes) -> tuple[float, float]:
    """Return the start and the end of the validity of a DER certificate, in seconds since 1970.

    Raises:
        ValueError: `certificate` is not a certificate.

    Source: RFC 5280, section 4.1.2.5.
    """
    match = _VALIDITY.search(certificate)
    if match is None:
        raise ValueError("a certificate without times")
    begin_s, end_s = (_parse_time(text.decode()) for text in match.groups())
    return begin_s, end_s


def _parse_time(text: str) -> float:
    if len(text) < _LONG_YEAR:
        text = f"{'19' if text >= '50' else '20'}{text}"
    return float(timegm((int(text[:4]), *(int(text[at : at + 2]) for at in range(4, _LONG_YEAR, 2)))))


def _read_signed(timestamp: Path | None) -> float:
    """Return when verified metadata was signed; 0 if there is none."""
    if timestamp is None:
        return 0.0
    try:
        signed_s = float(json.loads(timestamp.read_bytes())["signed"].get(FIELD, 0))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return 0.0
    return signed_s if 0.0 <= signed_s < math.inf else 0.0


def format_utc(at: float) -> str:
    """Return a time in seconds since 1970 as text, such as `2026-11-28 12:00:00 UTC`."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
