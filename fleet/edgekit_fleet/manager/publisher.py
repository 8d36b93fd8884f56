"""Makes the desired documents of devices from their models and settings, and signs and stores them.

A document is only written if its content has changed, the old document is about to expire, or the manager's
key was rotated.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import ColumnElement, Select, Text, cast, select, update
from sqlalchemy.orm import Session

from edgekit_fleet.manager.inbox import DeviceIndex
from edgekit_fleet.samples.orders import list_wishes
from edgekit_fleet.store import audit
from edgekit_fleet.store.database import update_many
from edgekit_fleet.store.due import mark_due
from edgekit_fleet.store.future import CLOCK_STEP_S
from edgekit_fleet.store.shards import Shards
from edgekit_fleet.store.tables import SHARDS, ContentKeyRow, DesiredRow, DeviceRow, WantedModelRow
from edgekit_runtime.agent.signing import key_id, seal_payload
from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.encryption.container import ContentKey
from edgekit_runtime.encryption.device_key import parse_public_device_key
from edgekit_runtime.encryption.key_wrapping import wrap_key

_LEAST_RECONNECT_S: Final = 5.0
_DEVICES_A_SECOND: Final = 250.0  # reconnects over TLS that one core of the broker handles
_PARTS: Final = ("streams", "settings", "logs")  # columns of a device that are copied into its document
_MOST_AT_ONCE: Final = 900  # documents of one turn
_KEY_ID: Final = re.compile(r'"key_id": ?"(\w+)"')  # no match within a string, whose quotes are escaped


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A desired document to publish.

    Attributes:
        version: The `$version` of the document.
    """

    device: str
    version: int
    envelope: bytes


class Publisher:
    """Makes desired documents for the devices in a `DeviceIndex`."""

    def __init__(
        self,
        index: DeviceIndex,
        shards: Shards,
        read_key: Callable[[], Ed25519PrivateKey],
        desired_life_s: float,
    ) -> None:
        """Make documents for the devices in an index.

        Args:
            index: The devices.
            shards: The shards of this manager.
            read_key: Returns the manager's current key (see `ManagerKey`).
            desired_life_s: The lifetime of a document in seconds.

        Raises:
            PackageError: There is no key.
        """
        self._index = index
        self._shards = shards
        self._read_key = read_key
        self._key = read_key()
        self._key_id = key_id(self._key.public_key())
        self._life_s = desired_life_s
        self._longest_s = desired_life_s + CLOCK_STEP_S

    def follow_key(self) -> bool:
        """Use the manager's current key from now on. Return True if the key has changed.

        Raises:
            PackageError: There is no key.
        """
        key = self._read_key()
        is_new = key is not self._key
        self._key, self._key_id = key, key_id(key.public_key())
        return is_new

    def make_due(self, session: Session, now: float) -> list[Outgoing]:
        """Make, store and return new documents for devices whose desired state has changed.

        Publish the documents after the commit. The number of documents per call is limited, and the next call
        continues. `now` is in seconds since 1970.
        """
        due = session.execute(self._select_due()).all()
        if not due:
            return []
        devices = [row.device for row in due]
        models_of, wishes = _read_wanted(session, devices), list_wishes(session, devices, now)
        outgoing, changed, unchanged, life_s = [], [], [], self._life_s
        for row in due:
            content = models_of.get(row.device, [])
            parts = ",".join(f'"{part}":{getattr(row, part)}' for part in _PARTS)
            if row.device in wishes:  # an agent before them would refuse the field
                parts += f',"samples":{encode_json(wishes[row.device]).decode()}'
            digest = hashlib.sha256(f"{content}{parts}{row.decryption_key}".encode()).hexdigest()
            is_same = (digest, self._key_id) == (row.content_sha256, row.key_id)
            if is_same and self._life_s / 2 < row.expires_at - now <= self._longest_s:
                unchanged.append(row.device)
                continue
            entry = self._index.devices.get(row.device)
            desired_version = entry.desired_held if entry is not None else 0
            notice_s = entry.notice_ends_at - now if entry is not None else 0.0
            version = max(row.version, desired_version) + 1
            try:
                content = _add_keys(session, content, row.decryption_key)
                document = self._make(row.device, version, content, parts, now)
                envelope = seal_payload(document, "desired", self._key)
            except ValueError as cause:  # it must not stop the others
                text = f"{cause}; the device keeps its old document: release fewer models or deltas"
                audit.record(session, "manager", "alarm.document-size", row.device, text=text)
                unchanged.append(row.device)
                continue
            outgoing.append(Outgoing(row.device, version, envelope))
            changed.append(
                {
                    "device": row.device,
                    "version": version,
                    "content_sha256": digest,
                    "envelope": envelope,
                    "key_id": self._key_id,
                    "issued_at": now,
                    # At half its life it is written again: with a notice, when that ends.
                    "expires_at": now + (min(life_s, life_s / 2 + notice_s) if notice_s > 0 else life_s),
                    "is_due": False,
                }
            )
        update_many(session, DesiredRow, changed, keys=("device",))
        if unchanged:
            session.execute(update(DesiredRow).where(DesiredRow.device.in_(unchanged)).values(is_due=False))
        return outgoing

    def _select_due(self) -> Select[Any]:
        columns = ("device", "version", "content_sha256", "key_id", "expires_at")
        return (
            select(
                *(getattr(DesiredRow, column) for column in columns),
                *(cast(getattr(DeviceRow, part), Text).label(part) for part in _PARTS),
                DeviceRow.decryption_key,
            )
            .join(DeviceRow, DeviceRow.name == DesiredRow.device)
            .where(DesiredRow.is_due, DeviceRow.revoked_at.is_(None), *self._own())
            .limit(_MOST_AT_ONCE)
            # A row that somebody marks just now follows at the next turn.
            .with_for_update(of=DesiredRow, skip_locked=True)
        )

    def note_published(self, outgoing: Iterable[Outgoing], now: float) -> None:
        """Record in the index that documents were published at `now`, in seconds since 1970."""
        for message in outgoing:
            entry = self._index.devices.get(message.device)
            if entry is not None:
                entry.desired_sent, entry.sent_at = message.version, now

    def answer(self, session: Session, devices: Iterable[str]) -> list[Outgoing]:
        """Return the stored documents for all given devices whose document is older than the stored one.

        If a device has a newer document than the store, the store was restored from a backup. In this case,
        the next document gets a higher number, and an alarm is written to the audit log.
        """
        entries = [self._index.devices[name] for name in devices if name in self._index.devices]
        for entry in entries:
            if entry.desired_held <= entry.desired_sent:
                continue
            text = "the device is ahead: this store was restored from a backup"
            detail = {"held": entry.desired_held, "sent": entry.desired_sent, "text": text}
            audit.record(session, "manager", "alarm.restored", entry.name, **detail)
            self.renew(session, [entry.name])
        return self.read(
            session, [entry.name for entry in entries if entry.desired_held < entry.desired_sent]
        )

    def read(self, session: Session, devices: Sequence[str]) -> list[Outgoing]:
        """Return the newest documents of devices, except those signed with an older key of the manager."""
        outgoing = []
        for begin in range(0, len(devices), 500):
            statement = select(DesiredRow.device, DesiredRow.version, DesiredRow.envelope).where(
                DesiredRow.device.in_(devices[begin : begin + 500]),
                DesiredRow.version > 0,
                DesiredRow.key_id == self._key_id,
            )
            outgoing += [
                Outgoing(row.device, row.version, row.envelope) for row in session.execute(statement)
            ]
        return outgoing

    def renew(self, session: Session, devices: Sequence[str]) -> None:
        """Mark the documents of devices, so that `make_due` writes new ones even without changes."""
        mark_due(session, devices, content_sha256="")  # no content has this digest

    def mark_expiring(self, session: Session, now: float) -> None:
        """Mark documents that are past half of their lifetime, so that `make_due` writes new ones.

        Documents that were signed with an older key of the manager are marked too. Documents with too long a
        lifetime are also marked, because they were written while the clock was ahead. `now` is in seconds
        since 1970.
        """
        ends = DesiredRow.expires_at
        expiring = (
            select(DesiredRow.device)
            .join(DeviceRow, DeviceRow.name == DesiredRow.device)
            .where(
                DesiredRow.version > 0,
                (ends < now + self._life_s / 2)
                | (ends > now + self._longest_s)
                | (DesiredRow.key_id != self._key_id),
                *self._own(),
            )
        )
        mark_due(session, session.scalars(expiring))

    def _own(self) -> list[ColumnElement[bool]]:
        """Return the SQL condition that a device is in a shard of this manager."""
        shards = self._shards
        return [] if shards.is_complete else [DeviceRow.shard.in_(sorted(shards.epochs))]

    def _make(
        self, device: str, version: int, content: list[tuple[str, str]], parts: str, now: float
    ) -> bytes:
        """Return a `Desired` document with the texts of models and parts as they are in the store."""
        # Of the whole fleet, as far as this manager knows it.
        devices = len(self._index.devices) * SHARDS / len(self._shards.epochs)
        entry = self._index.devices.get(device)
        plain: dict[str, Any] = {
            "device": device,
            "version": version,
            "issued_at": now,
            "expires_at": now + self._life_s,
            "epoch": self._shards.epoch_of(device),
            "sequence": entry.highest_sequence if entry is not None else 0,
            "notice": entry.notice if entry is not None and now < entry.notice_ends_at else "",
            "removed": [model for model, text in content if not text],
            "reconnect_s": max(_LEAST_RECONNECT_S, devices / _DEVICES_A_SECOND),
        }
        models = ",".join(text for _, text in content if text)
        return b'{"models":[%b],%b,%b' % (models.encode(), parts.encode(), encode_json(plain)[1:])


def _read_wanted(session: Session, devices: list[str]) -> dict[str, list[tuple[str, str]]]:
    """Return the (model, document) pairs of each device, sorted by model. Removed models have no document."""
    models_of: dict[str, list[tuple[str, str]]] = {}
    statement = (
        select(
            WantedModelRow.device,
            WantedModelRow.model,
            cast(WantedModelRow.document, Text),
            WantedModelRow.is_removed,
        )
        .where(WantedModelRow.device.in_(devices))
        .order_by(WantedModelRow.model)
    )
    for device, model, text, is_removed in session.execute(statement):
        models_of.setdefault(device, []).append((model, "" if is_removed else text))
    return models_of


def _add_keys(session: Session, content: list[tuple[str, str]], decryption_key: str) -> list[tuple[str, str]]:
    """Return the models' documents with content keys that only this device can unwrap."""
    if not decryption_key:
        return content
    public_key = parse_public_device_key(decryption_key)
    documents = []
    for model, text in content:
        if match := _KEY_ID.search(text):
            row = session.get(ContentKeyRow, match[1])
            wrapped_key = "" if row is None else wrap_key(ContentKey(row.key_id, row.content_key), public_key)
            documents.append((model, json.dumps({**json.loads(text), "wrapped_key": wrapped_key})))
        else:
            documents.append((model, text))
    return documents
