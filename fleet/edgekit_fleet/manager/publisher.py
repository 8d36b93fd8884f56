"""Desired documents: made of the wanted models of a device, numbered, signed and kept before they go out.

A document is written only if its content has changed, or the old one is about to expire.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import bindparam, select, update
from sqlalchemy.orm import Session

from edgekit_fleet.manager.inbox import DeviceIndex
from edgekit_fleet.store import audit
from edgekit_fleet.store.tables import DesiredRow, DeviceRow, WantedModelRow
from edgekit_runtime.agent.documents import Desired, DesiredModel
from edgekit_runtime.agent.signing import seal
from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.dataclass_json import from_plain

_LEAST_RECONNECT_S: Final = 5.0
_DEVICES_A_SECOND: Final = 250.0  # reconnects that one core of the broker takes, over TLS


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A desired document to be published.

    Attributes:
        device: for whom.
        version: its `$version`.
        envelope: signed.
    """

    device: str
    version: int
    envelope: bytes


class Publisher:
    """Makes the documents of one lease.

    Attributes:
        epoch: of the lease.
    """

    def __init__(self, index: DeviceIndex, key: Ed25519PrivateKey, epoch: int, desired_life_s: float) -> None:
        self.epoch = epoch
        self._index = index
        self._key = key
        self._life_s = desired_life_s

    def make_due(self, session: Session, now: float, limit: int = 500) -> list[Outgoing]:
        """Return new documents of devices whose wanted models have changed; commit before they are published.

        Args:
            session: of a transaction.
            now: seconds since 1970.
            limit: at most so many devices.
        """
        statement = (
            select(DesiredRow.device, DesiredRow.version, DesiredRow.content_sha256, DesiredRow.expires_at)
            .join(DeviceRow, DeviceRow.name == DesiredRow.device)
            .where(DesiredRow.is_due, DeviceRow.revoked_at.is_(None))
            .limit(limit)
        )
        due = session.execute(statement).all()
        if not due:
            return []
        wanted = _read_wanted(session, [row.device for row in due])
        outgoing, changed, unchanged = [], [], []
        for row in due:
            content = wanted.get(row.device, [])
            digest = hashlib.sha256(encode_json(content)).hexdigest()
            if digest == row.content_sha256 and row.expires_at - now > self._life_s / 2:
                unchanged.append(row.device)
                continue
            known = self._index.devices.get(row.device)
            held = known.desired_held if known is not None else 0
            document = self._make(row.device, max(row.version, held) + 1, content, now)
            try:
                envelope = seal(document, "desired", self._key)
            except ValueError as cause:  # it must not stop the others
                text = f"{cause}; the device keeps its old document: release fewer models or deltas"
                audit.record(session, "manager", "alarm.document-size", row.device, text=text)
                unchanged.append(row.device)
                continue
            outgoing.append(Outgoing(row.device, document.version, envelope))
            changed.append(
                {
                    "b_device": row.device,
                    "b_version": document.version,
                    "b_content_sha256": digest,
                    "b_envelope": envelope,
                    "b_issued_at": now,
                    "b_expires_at": document.expires_at,
                }
            )
        _write(session, changed, unchanged)
        return outgoing

    def note_published(self, outgoing: Iterable[Outgoing], now: float) -> None:
        """Remember what went out."""
        for each in outgoing:
            known = self._index.devices.get(each.device)
            if known is not None:
                known.desired_sent, known.sent_at = each.version, now

    def answer(self, session: Session, devices: Iterable[str]) -> list[Outgoing]:
        """Return the documents that devices need which have just said what they hold.

        A device that holds a higher number than ours was told so by a manager whose store is lost: its next
        document gets a number above that, and the audit log an alarm.

        Args:
            session: of a transaction.
            devices: their names.
        """
        known = [self._index.devices[name] for name in devices]
        for each in known:
            if each.desired_held <= each.desired_sent:
                continue
            text = "the device is ahead: this store was restored from a backup"
            detail = {"held": each.desired_held, "sent": each.desired_sent, "text": text}
            audit.record(session, "manager", "alarm.restored", each.name, **detail)
            # No content has this digest: the document is written although its content may be the same.
            session.execute(
                update(DesiredRow)
                .where(DesiredRow.device == each.name)
                .values(is_due=True, content_sha256="")
            )
        return self.read(session, [each.name for each in known if each.desired_held < each.desired_sent])

    def read(self, session: Session, devices: Sequence[str]) -> list[Outgoing]:
        """Return the newest documents of devices."""
        outgoing = []
        for begin in range(0, len(devices), 500):
            statement = select(DesiredRow.device, DesiredRow.version, DesiredRow.envelope).where(
                DesiredRow.device.in_(devices[begin : begin + 500]), DesiredRow.version > 0
            )
            outgoing += [
                Outgoing(row.device, row.version, row.envelope) for row in session.execute(statement)
            ]
        return outgoing

    def mark_expiring(self, session: Session, now: float) -> None:
        """Mark documents that are past half of their life, so that `make_due` writes them again."""
        session.execute(
            update(DesiredRow)
            .where(DesiredRow.version > 0, DesiredRow.expires_at < now + self._life_s / 2)
            .values(is_due=True)
        )

    def _make(self, device: str, version: int, content: list[dict[str, Any]], now: float) -> Desired:
        return Desired(
            device=device,
            version=version,
            issued_at=now,
            expires_at=now + self._life_s,
            epoch=self.epoch,
            models=tuple(
                from_plain(DesiredModel, row["document"], device) for row in content if not row["is_removed"]
            ),
            removed=tuple(row["model"] for row in content if row["is_removed"]),
            reconnect_s=max(_LEAST_RECONNECT_S, len(self._index.devices) / _DEVICES_A_SECOND),
        )


def mark_due(session: Session, devices: Iterable[str]) -> None:
    """Make the manager write the documents of devices again, after their wanted models were changed."""
    names = list(devices)
    for begin in range(0, len(names), 500):
        session.execute(
            update(DesiredRow).where(DesiredRow.device.in_(names[begin : begin + 500])).values(is_due=True)
        )


def _read_wanted(session: Session, devices: list[str]) -> dict[str, list[dict[str, Any]]]:
    wanted: dict[str, list[dict[str, Any]]] = {}
    statement = (
        select(
            WantedModelRow.device, WantedModelRow.model, WantedModelRow.document, WantedModelRow.is_removed
        )
        .where(WantedModelRow.device.in_(devices))
        .order_by(WantedModelRow.model)
    )
    for row in session.execute(statement):
        content = {"model": row.model, "document": row.document, "is_removed": row.is_removed}
        wanted.setdefault(row.device, []).append(content)
    return wanted


def _write(session: Session, changed: list[dict[str, Any]], unchanged: list[str]) -> None:
    connection = session.connection()
    desired, devices = DesiredRow.__table__, DeviceRow.__table__
    if changed:
        columns = ("version", "content_sha256", "envelope", "issued_at", "expires_at")
        connection.execute(
            update(desired)  # type: ignore[arg-type]
            .where(desired.c.device == bindparam("b_device"))
            .values({"is_due": False, **{name: bindparam(f"b_{name}") for name in columns}}),
            changed,
        )
        connection.execute(
            update(devices)  # type: ignore[arg-type]
            .where(devices.c.name == bindparam("b_device"))
            .values(desired_sent=bindparam("b_version")),
            [{name: row[name] for name in ("b_device", "b_version")} for row in changed],
        )
    if unchanged:
        session.execute(update(DesiredRow).where(DesiredRow.device.in_(unchanged)).values(is_due=False))
