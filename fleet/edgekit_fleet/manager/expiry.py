"""The expiry of the fleet's own certificates and metadata, with advice on what to do.

Certificates of devices are not included, since devices renew them.
"""

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgekit_fleet.identity.authority import Authority
from edgekit_fleet.releases.repository import TufRepository
from edgekit_fleet.store import audit
from edgekit_fleet.store.tables import AuditRow

EXPIRY_ALARM: Final = "alarm.expiry"
"""The action of entries in the audit log that warn of an expiry."""
_DAY_S: Final = 86_400.0
_NOTICE_S: Final = 60 * _DAY_S
_AUTHORITY_NOTICE_S: Final = 365 * _DAY_S
_ROOT: Final = (
    "sign it again with its keys: `edgekit fleet keys rotate`, with --root-keys FOLDER where they lie;"
    " devices follow, also from several versions behind"
)
_ONLINE: Final = (
    "`edgekit fleet up` signs it again by itself; see that it runs, and its log for a missing key"
)
_CERTIFICATE: Final = (
    "restart `edgekit fleet up`, which makes a new one; copy the folder `broker` to brokers that others run"
)
_AUTHORITY: Final = "devices trust this one alone; make a new fleet before, and enrol each device there"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expiry:
    """The validity of a certificate or of metadata.

    Attributes:
        what: A name for the certificate or metadata.
        begins_at, ends_at: The start and end of the validity, in seconds since 1970.
        notice_s: The time before `ends_at` at which an alarm is due, in seconds.
    """

    what: str
    begins_at: float = 0.0
    ends_at: float
    notice_s: float
    advice: str

    def is_due(self, now: float) -> bool:
        """Return True if the validity ends within `notice_s` from `now`, has ended, or has not begun."""
        return now > self.ends_at - self.notice_s or now < self.begins_at

    def is_urgent(self, now: float) -> bool:
        """Return True if the validity ends within `notice_s / 2` from `now`, has ended, or has not begun."""
        return now > self.ends_at - self.notice_s / 2 or now < self.begins_at

    def describe(self, now: float) -> str:
        """Return a sentence, without a full stop, about the start or end of the validity."""
        if now < self.begins_at:
            return f"the {self.what} is not valid before {_format(self.begins_at)}: a clock is or was wrong"
        verb = "ended" if now > self.ends_at else "ends"
        return f"the {self.what} {verb} at {_format(self.ends_at)}"


def list_expiries(authority: Authority, repository: TufRepository | None) -> list[Expiry]:
    """Return all expiries, earliest first.

    Args:
        authority: The authority of the fleet.
        repository: The repository of the fleet, or None if it is on another machine.

    Raises:
        ConfigError: A certificate cannot be read.
        PackageError: The repository cannot be read.
    """
    expiries = []
    certificates = {"authority": authority.certificate, **authority.read_own()}
    for name, certificate in certificates.items():
        is_authority = name == "authority"
        expiries.append(
            Expiry(
                what=f"certificate of the {name}",
                begins_at=certificate.not_valid_before_utc.timestamp(),
                ends_at=certificate.not_valid_after_utc.timestamp(),
                notice_s=_AUTHORITY_NOTICE_S if is_authority else _NOTICE_S,
                advice=_AUTHORITY if is_authority else _CERTIFICATE,
            )
        )
    if repository is not None and repository.exists:
        for role, (ends_at, life_s) in repository.read_expiries().items():
            is_root = role == "root"
            expiries.append(
                Expiry(
                    what=f"{role} of the repository",
                    ends_at=ends_at,
                    notice_s=_NOTICE_S if is_root else life_s / 4,  # half of its life is left by then
                    advice=_ROOT if is_root else _ONLINE,
                )
            )
    return sorted(expiries, key=lambda expiry: expiry.ends_at)


def alarm_expiries(session: Session, expiries: list[Expiry], now: float) -> None:
    """Write due expiries to the audit log, each at most once a day.

    Args:
        session: The session of a transaction.
        expiries: The result of `list_expiries`.
        now: The time in seconds since 1970.
    """
    due = [expiry for expiry in expiries if expiry.is_due(now)]
    if not due:
        return
    recent = select(AuditRow.subject).where(AuditRow.action == EXPIRY_ALARM, AuditRow.at > now - _DAY_S)
    recent_subjects = set(session.scalars(recent))
    for expiry in due:
        if expiry.what not in recent_subjects:
            detail = {"advice": expiry.advice, "ends_at": expiry.ends_at, "is_urgent": expiry.is_urgent(now)}
            audit.record(session, "manager", EXPIRY_ALARM, expiry.what, text=expiry.describe(now), **detail)


def _format(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
