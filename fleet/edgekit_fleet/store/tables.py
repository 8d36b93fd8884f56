"""The tables of the fleet. Times are seconds since 1970 by the clock of the manager's machine.

`database` makes them in an empty store. From the first release on, each change needs a migration, too.
"""

import dataclasses
import zlib
from typing import Any, ClassVar, Final, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Float,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAME = String(128)
SHARDS: Final = 64

Record = TypeVar("Record")


class Table(DeclarativeBase):
    """What all tables share: how Python's types are stored, and how constraints are named."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        int: BigInteger,
        float: Float(53),
        str: String,
        bytes: LargeBinary,
        dict[str, Any]: JSON,
        dict[str, str]: JSON,
        list[Any]: JSON,
        list[str]: JSON,
    }


def read_record(kind: type[Record], row: Table, **others: Any) -> Record:
    """Return a `kind` with the columns of a row that its fields name; `others` are its further fields."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    columns = set(row.__table__.columns.keys())
    values = {field.name: getattr(row, field.name) for field in fields if field.name in columns}
    return kind(**{**values, **others})


def shard_of(name: str) -> int:
    """Return the number of the shard, below `SHARDS`, of the device or rollout with this name."""
    return zlib.crc32(name.encode()) % SHARDS


def _find_shard(context: Any) -> int:
    return shard_of(context.get_current_parameters()["name"])


class DeviceRow(Table):
    """A device that was enrolled.

    Attributes:
        shard: shard of its name, see `shard_of`.
        target: the target of its packages; `class` in selectors.
        tags: set by people, such as `site` -> `lyon`.
        public_key: Ed25519 key of its certificate and its documents, 32 bytes.
        certificate_serial: serial number of the newest certificate, in hexadecimal digits.
        certificate_expires_at: end of its validity.
        revoked_at: when it was shut out, or None.
        status: status of its last report; `new` before the first; `faulty` if a desired version runs and
            answers NaN; `revoked` after `revoked_at`.
        because: one sentence for the status.
        facts: facts of its last report.
        reported: the whole last report as plain values, or None.
        desired_held: `$version` of the desired document that the device says it holds.
        sequence, hello_sequence, event_sequence: sequence numbers of its last report, hello and event. They
            are separate, since a retained report may come after a newer event.
        is_online: whether it is connected, by its last will.
        last_seen_at: when its last document came, or None.
        pinned: model -> version at which somebody pinned it on the device, as it reports.
        streams: name -> stream that the device should run: a `StreamOptions` as plain values, with passwords.
        decryption_key: P-256 public key (PEM) from its enrolment, for which content keys are wrapped; empty
            for a device that stated none.
        settings: key -> value of the settings that it should have.
        logs: the newest `LogRequest` as plain values, or empty.
    """

    __tablename__ = "devices"
    __table_args__ = (
        Index(None, "status", "is_online", "name", "target"),
        Index(None, "is_online", "last_seen_at", "status"),
    )

    name: Mapped[str] = mapped_column(NAME, primary_key=True)
    shard: Mapped[int] = mapped_column(SmallInteger, default=_find_shard)
    target: Mapped[str] = mapped_column(NAME)
    tags: Mapped[dict[str, str]] = mapped_column(default=dict)
    public_key: Mapped[bytes]
    certificate_serial: Mapped[str] = mapped_column(String(64))
    certificate_expires_at: Mapped[float] = mapped_column(index=True)
    enrolled_at: Mapped[float]
    revoked_at: Mapped[float | None]
    status: Mapped[str] = mapped_column(String(16), default="new")
    because: Mapped[str] = mapped_column(default="")
    facts: Mapped[dict[str, str]] = mapped_column(default=dict)
    reported: Mapped[dict[str, Any] | None]
    desired_held: Mapped[int] = mapped_column(default=0)
    sequence: Mapped[int] = mapped_column(default=0)
    hello_sequence: Mapped[int] = mapped_column(default=0)
    event_sequence: Mapped[int] = mapped_column(default=0)
    is_online: Mapped[bool] = mapped_column(default=False)
    last_seen_at: Mapped[float | None]
    pinned: Mapped[dict[str, str]] = mapped_column(default=dict)
    streams: Mapped[dict[str, Any]] = mapped_column(default=dict)
    decryption_key: Mapped[str] = mapped_column(default="")
    settings: Mapped[dict[str, str]] = mapped_column(default=dict)
    logs: Mapped[dict[str, Any]] = mapped_column(default=dict)


class DeviceLogRow(Table):
    """The last lines of the logs of a device, as it answered the newest request.

    Attributes:
        request, source, refusal, text: see `Logs`; the text is unpacked.
        asked_at, asked_by: when and by whom the device was asked for the lines.
        answered_at: when the answer came, or None.
    """

    __tablename__ = "device_logs"

    device: Mapped[str] = mapped_column(NAME, ForeignKey("devices.name"), primary_key=True)
    request: Mapped[str] = mapped_column(String(64))
    lines: Mapped[int]
    asked_at: Mapped[float]
    asked_by: Mapped[str]
    answered_at: Mapped[float | None]
    source: Mapped[str] = mapped_column(String(16), default="")
    refusal: Mapped[str] = mapped_column(default="")
    text: Mapped[str] = mapped_column(default="")


class AttributeRow(Table):
    """A search attribute of a device: a tag, a fact that does not change by itself, or a model's version.

    Attributes:
        name: name such as `site`, `runtime`, `model:detector`.
    """

    __tablename__ = "device_attributes"
    __table_args__ = (Index(None, "name", "value", "device"),)

    device: Mapped[str] = mapped_column(NAME, ForeignKey("devices.name"), primary_key=True)
    name: Mapped[str] = mapped_column(NAME, primary_key=True)
    value: Mapped[str] = mapped_column(String(256))


class WantedModelRow(Table):
    """The version of one model that a device should run; a rollout writes this part of its desired document.

    The manager makes a device's document from all its rows, and publishes each document that has changed.

    Attributes:
        rollout: rollout that set the version; None after the rollout's end.
        document: a `DesiredModel` as plain values.
        is_removed: whether the device should have no version of the model; then `document` does not count.
    """

    __tablename__ = "wanted_models"

    device: Mapped[str] = mapped_column(NAME, ForeignKey("devices.name"), primary_key=True)
    model: Mapped[str] = mapped_column(NAME, primary_key=True)
    rollout: Mapped[str | None] = mapped_column(NAME, index=True)
    document: Mapped[dict[str, Any]]
    is_removed: Mapped[bool] = mapped_column(default=False)


class DesiredRow(Table):
    """The newest desired document of a device.

    Attributes:
        version: its `$version`.
        content_sha256: SHA-256 of its models and streams, to see whether they changed.
        envelope: signed envelope as it is published.
        key_id: id of the manager's key that signed it.
        issued_at, expires_at: begin and end of the document's validity. With a notice,
            `expires_at` is set too early, so that a document without the notice follows after a day.
        is_due: whether the document must be written again, since its content may have changed.
    """

    __tablename__ = "desired"

    device: Mapped[str] = mapped_column(NAME, ForeignKey("devices.name"), primary_key=True)
    version: Mapped[int] = mapped_column(default=0)
    content_sha256: Mapped[str] = mapped_column(String(64), default="")
    envelope: Mapped[bytes] = mapped_column(default=b"")
    key_id: Mapped[str] = mapped_column(String(64), default="")
    issued_at: Mapped[float] = mapped_column(default=0.0)
    expires_at: Mapped[float] = mapped_column(default=0.0)
    is_due: Mapped[bool] = mapped_column(default=True, index=True)


class CodeRow(Table):
    """A one-time code of enrolment.

    Attributes:
        secret_sha256: SHA-256 of the code's secret, which itself is not stored.
        target: target of the device, or empty where the device states it.
        used_at: when it was used, or None.
    """

    __tablename__ = "enrolment_codes"

    secret_sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    device: Mapped[str] = mapped_column(NAME, index=True)
    target: Mapped[str] = mapped_column(NAME, default="")
    tags: Mapped[dict[str, str]] = mapped_column(default=dict)
    created_at: Mapped[float]
    expires_at: Mapped[float]
    used_at: Mapped[float | None]
    created_by: Mapped[str] = mapped_column(default="")


class ReleaseRow(Table):
    """Packages that are released together.

    Attributes:
        name: such as `2026-11-22.1`.
        withdrawn_at: when it was withdrawn, or None.
    """

    __tablename__ = "releases"

    name: Mapped[str] = mapped_column(NAME, primary_key=True)
    created_at: Mapped[float]
    created_by: Mapped[str] = mapped_column(default="")
    note: Mapped[str] = mapped_column(default="")
    withdrawn_at: Mapped[float | None]


class ReleasePackageRow(Table):
    """A package of a release.

    Attributes:
        version, manifest_sha256: version of the package, and SHA-256 of its manifest.
        path, size_bytes, sha256: path, size and SHA-256 of its file in the TUF repository.
        needs: requirements of a device: `engines`, `memory_bytes`; `min_agreement` for the gates; and
            `score`, the packager's evidence.
        deltas: `DeltaOffer`s as plain values.
        key_id: the content key that encrypts the file and its deltas, see `ContentKeyRow`; empty for a plain
            package.
        allows_plain: whether it may follow an encrypted version although it is plain.
    """

    __tablename__ = "release_packages"

    release: Mapped[str] = mapped_column(NAME, ForeignKey("releases.name"), primary_key=True)
    model: Mapped[str] = mapped_column(NAME, primary_key=True)
    target: Mapped[str] = mapped_column(NAME, primary_key=True)
    version: Mapped[str] = mapped_column(NAME)
    manifest_sha256: Mapped[str] = mapped_column(String(64), index=True)
    path: Mapped[str]
    size_bytes: Mapped[int]
    sha256: Mapped[str] = mapped_column(String(64))
    needs: Mapped[dict[str, Any]] = mapped_column(default=dict)
    deltas: Mapped[list[Any]] = mapped_column(default=list)
    key_id: Mapped[str] = mapped_column(String(64), default="")
    allows_plain: Mapped[bool] = mapped_column(default=False)


class ContentKeyRow(Table):
    """The secret key of one encrypted package of a release.

    Attributes:
        content_key: 32 bytes.
    """

    __tablename__ = "content_keys"

    key_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    content_key: Mapped[bytes]
    created_at: Mapped[float]


class RolloutRow(Table):
    """A rollout of a release to a cohort.

    Attributes:
        release, selector: its release, and the devices that get it.
        state: `running`, `paused`, `returning`, `succeeded` or `aborted`.
        because: one sentence for the state.
        settings: waves, gates, window, order and so on, as plain values; frozen at the start.
        wave: number of the wave that is open, from 0.
    """

    __tablename__ = "rollouts"

    name: Mapped[str] = mapped_column(NAME, primary_key=True)
    release: Mapped[str] = mapped_column(NAME, ForeignKey("releases.name"), index=True)
    selector: Mapped[str]
    state: Mapped[str] = mapped_column(String(32), index=True)
    because: Mapped[str] = mapped_column(default="")
    settings: Mapped[dict[str, Any]]
    wave: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[float]
    created_by: Mapped[str] = mapped_column(default="")
    started_at: Mapped[float | None]
    wave_started_at: Mapped[float | None]
    ended_at: Mapped[float | None]


class MemberRow(Table):
    """A device of a rollout's cohort.

    Attributes:
        wave: number of its wave, from 0; -1 for a device that the plan refuses.
        state: state of the device in the rollout, such as `waiting`, `offered`, `succeeded`, `failed`,
            `returned`.
        because: one sentence for the state.
        attempts: executions so far.
        before: versions that it ran when the cohort was frozen: model -> `DesiredModel` as plain values, {}
            if it ran no version. Empty if the device had not reported yet.
        offered_at, answered_at: when the release was offered, and answered; or None.
    """

    __tablename__ = "rollout_members"
    __table_args__ = (Index(None, "rollout", "wave", "state"),)

    rollout: Mapped[str] = mapped_column(NAME, ForeignKey("rollouts.name"), primary_key=True)
    device: Mapped[str] = mapped_column(NAME, ForeignKey("devices.name"), primary_key=True, index=True)
    wave: Mapped[int]
    state: Mapped[str] = mapped_column(String(32))
    because: Mapped[str] = mapped_column(default="")
    attempts: Mapped[int] = mapped_column(default=0)
    before: Mapped[dict[str, Any]] = mapped_column(default=dict)
    offered_at: Mapped[float | None]
    answered_at: Mapped[float | None]


class ExecutionRow(Table):
    """One attempt of a device to install and run a version of a model.

    Attributes:
        execution: name of the attempt, as in `DesiredModel`.
        rollout, device, model, version: rollout, device, model and version of the attempt; `rollout` is None
            if the manager did not order it.
        state, reason, code, done_bytes, sent_bytes: see `Execution`.
        created_at, changed_at: when the row was made and last changed.
        ended_at: when its state became one of `ENDED`, or None.
    """

    __tablename__ = "executions"
    __table_args__ = (Index(None, "rollout", "state"), Index(None, "device", "model"))

    execution: Mapped[str] = mapped_column(NAME, primary_key=True)
    rollout: Mapped[str | None] = mapped_column(NAME)
    device: Mapped[str] = mapped_column(NAME, ForeignKey("devices.name"))
    model: Mapped[str] = mapped_column(NAME)
    version: Mapped[str] = mapped_column(NAME)
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(default="")
    code: Mapped[str] = mapped_column(String(64), default="")
    done_bytes: Mapped[int] = mapped_column(default=0)
    sent_bytes: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[float]
    changed_at: Mapped[float]
    ended_at: Mapped[float | None]


class FigureRow(Table):
    """Counts of one version on a device in one hour: the last report of the hour.

    Attributes:
        hour: number of the hour since 1970, by the manager's clock.
        figures: `ModelFigures` as plain values.
    """

    __tablename__ = "figures"
    __table_args__ = (Index(None, "model", "version", "hour"),)

    device: Mapped[str] = mapped_column(NAME, ForeignKey("devices.name"), primary_key=True)
    model: Mapped[str] = mapped_column(NAME, primary_key=True)
    version: Mapped[str] = mapped_column(NAME, primary_key=True)
    hour: Mapped[int] = mapped_column(primary_key=True)
    figures: Mapped[dict[str, Any]]
    reported_at: Mapped[float]


class AuditRow(Table):
    """An entry of the audit log, which the database refuses to change or delete.

    Attributes:
        number: number of the entry, from 1, without gaps.
        actor: who, such as a user's name or `manager`.
        action: such as `rollout.start`, `device.revoke`, `alarm.restored`.
        subject: object of the action, such as a device.
        detail: further fields, as plain values.
        previous_sha256, sha256: digests of the entry before this one, and of this one; see `audit`.
    """

    __tablename__ = "audit"
    __table_args__ = (UniqueConstraint("previous_sha256"), Index(None, "actor", "number"))

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[float]
    actor: Mapped[str]
    action: Mapped[str] = mapped_column(String(64), index=True)
    subject: Mapped[str] = mapped_column(index=True)
    detail: Mapped[dict[str, Any]]
    previous_sha256: Mapped[str] = mapped_column(String(64))
    sha256: Mapped[str] = mapped_column(String(64))


class ManagerRow(Table):
    """A manager that has joined; see `shards`.

    Attributes:
        number: number of the manager, from 0: the lowest that was free.
        holder: identifier of the process.
        heartbeat_at: time of the last heartbeat, by the clock of the database.
        turned_at: time, by its own clock, before which all messages that it received are in the store.
    """

    __tablename__ = "managers"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    holder: Mapped[str] = mapped_column(NAME, unique=True)
    heartbeat_at: Mapped[float]
    turned_at: Mapped[float]


class ShardRow(Table):
    """A share of the devices and rollouts; there are `SHARDS` rows.

    Attributes:
        number: see `shards.shard_of`.
        holder: `holder` of a `ManagerRow`; if there is no such row, any manager may take the shard.
        epoch: rises with each new holder.
    """

    __tablename__ = "shards"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    holder: Mapped[str] = mapped_column(NAME, default="")
    epoch: Mapped[int] = mapped_column(default=0)


class UserRow(Table):
    """A user of the console.

    Attributes:
        password_digest: argon2id; empty for a user whom a proxy logs in.
        role: `viewer`, `operator` or `admin`.
    """

    __tablename__ = "users"

    name: Mapped[str] = mapped_column(NAME, primary_key=True)
    password_digest: Mapped[str]
    role: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[float]


class LoginRow(Table):
    """An open login of a user.

    Attributes:
        secret_sha256: SHA-256 of the secret in the cookie.
        created_at, seen_at, expires_at: when it began, was used last (to a minute), and ends.
    """

    __tablename__ = "logins"

    secret_sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    user: Mapped[str] = mapped_column(NAME, ForeignKey("users.name"), index=True)
    created_at: Mapped[float]
    seen_at: Mapped[float]
    expires_at: Mapped[float]


class SecondFactorRow(Table):
    """The second factor of a user, see `access.second_factor`.

    Attributes:
        secret: what the user's app holds, in base 32.
        is_confirmed: whether a login needs it.
        last_step: time step of the last used one-time code; codes of this step and earlier ones are refused.
        failures, failed_at: number of wrong codes in a row, and time of the last wrong code.
        recovery_sha256: digests of the recovery codes that were not used yet.
    """

    __tablename__ = "second_factors"

    user: Mapped[str] = mapped_column(NAME, ForeignKey("users.name"), primary_key=True)
    secret: Mapped[str]
    is_confirmed: Mapped[bool]
    last_step: Mapped[int] = mapped_column(default=0)
    failures: Mapped[int] = mapped_column(default=0)
    failed_at: Mapped[float] = mapped_column(default=0.0)
    recovery_sha256: Mapped[list[str]]


class KnownAddressRow(Table):
    """An address or a browser from which a user has logged in.

    Attributes:
        address: IPv4 address, /64 network, or `browser` with the SHA-256 of the secret in its cookie.
        seen_at: time of the newest login.
    """

    __tablename__ = "known_addresses"

    user: Mapped[str] = mapped_column(NAME, ForeignKey("users.name"), primary_key=True)
    address: Mapped[str] = mapped_column(NAME, primary_key=True)
    seen_at: Mapped[float]


class FailureRow(Table):
    """Failed attempts of an address or a name, see `access.failure_limit`.

    Attributes:
        key_sha256: SHA-256 of the address or name.
        begun_at: seconds since 1970; from then on, each 60 s / limit, one failure of `count` is forgiven.
        count: number of failed attempts.
    """

    __tablename__ = "failures"

    key_sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    begun_at: Mapped[float] = mapped_column(index=True)
    count: Mapped[int]


class TokenRow(Table):
    """A token of a program.

    Attributes:
        secret_sha256: SHA-256 of the secret that the program sends.
        scopes: what it may do, see `access.principal`.
        expires_at: end of its validity, or None.
        used_at: when it was used last, to a minute, or None.
    """

    __tablename__ = "api_tokens"

    name: Mapped[str] = mapped_column(NAME, primary_key=True)
    secret_sha256: Mapped[str] = mapped_column(String(64), index=True)
    scopes: Mapped[list[str]]
    created_at: Mapped[float]
    created_by: Mapped[str]
    expires_at: Mapped[float | None]
    used_at: Mapped[float | None]


class IdempotencyRow(Table):
    """A request that changed something, and its answer, in case the client repeats the request.

    Attributes:
        actor, key: who sent it, and under which `Idempotency-Key`.
        request_sha256: SHA-256 of method, path and body.
        status: HTTP status of the answer, or None while there is none.
    """

    __tablename__ = "idempotency_keys"

    actor: Mapped[str] = mapped_column(NAME, primary_key=True)
    key: Mapped[str] = mapped_column(NAME, primary_key=True)
    request_sha256: Mapped[str] = mapped_column(String(64))
    status: Mapped[int | None]
    answer: Mapped[bytes] = mapped_column(default=b"")
    created_at: Mapped[float] = mapped_column(index=True)


class WebhookRow(Table):
    """An address that is told of actions in the audit log.

    Attributes:
        url: where messages go.
        actions: beginnings of actions, such as `rollout.`; empty for all.
        secret: secret that signs messages.
        position: number of the last entry of the audit log that was sent or skipped.
        failures: attempts in a row that failed.
        because: why the last attempt failed, or empty.
        due_at: when to send next; a sender moves this time ahead, so that no other sender sends meanwhile.
    """

    __tablename__ = "webhooks"

    name: Mapped[str] = mapped_column(NAME, primary_key=True)
    url: Mapped[str]
    actions: Mapped[list[str]]
    secret: Mapped[str]
    created_at: Mapped[float]
    created_by: Mapped[str]
    position: Mapped[int]
    failures: Mapped[int] = mapped_column(default=0)
    because: Mapped[str] = mapped_column(default="")
    due_at: Mapped[float] = mapped_column(default=0.0)


class SavedQueryRow(Table):
    """A selector of devices under a name, for all users.

    Attributes:
        selector: see `rollouts.selector`.
    """

    __tablename__ = "saved_queries"

    name: Mapped[str] = mapped_column(NAME, primary_key=True)
    selector: Mapped[str]
    created_at: Mapped[float]
    created_by: Mapped[str]


class SavedWindowRow(Table):
    """A window in which devices may switch, under a name, for all users.

    Attributes:
        window: see `RolloutSettings`.
    """

    __tablename__ = "saved_windows"

    name: Mapped[str] = mapped_column(NAME, primary_key=True)
    window: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[float]
    created_by: Mapped[str]


class SampleSettingRow(Table):
    """Whether the fleet collects samples from the field; there is no row before somebody decides it.

    Attributes:
        number: 1.
        days: days for which samples are stored.
        max_bytes: most bytes that all stored samples may have together.
        public_key: key for which devices seal samples, see `SampleOrder`.
    """

    __tablename__ = "sample_settings"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    is_on: Mapped[bool]
    days: Mapped[float]
    max_bytes: Mapped[int]
    public_key: Mapped[str]
    changed_at: Mapped[float]
    changed_by: Mapped[str]


class SampleOrderRow(Table):
    """An order of samples for all devices that its selector matches, also for later ones.

    Attributes:
        id, model, triggers, per_day, max_bytes, ends_at, window: see `SampleOrder`.
        selector: devices that get the order, see `rollouts.selector`.
        stopped_at: when somebody ended it early, or None.
    """

    __tablename__ = "sample_orders"

    id: Mapped[str] = mapped_column(NAME, primary_key=True)
    model: Mapped[str] = mapped_column(NAME)
    selector: Mapped[str]
    triggers: Mapped[list[Any]]
    per_day: Mapped[float]
    max_bytes: Mapped[int]
    ends_at: Mapped[float] = mapped_column(index=True)
    window: Mapped[str | None] = mapped_column(String(16))
    created_at: Mapped[float]
    created_by: Mapped[str]
    stopped_at: Mapped[float | None]


class SampleRow(Table):
    """A received sample; its file is encrypted.

    Attributes:
        id, order, model, version, probability, media_type, taken_at: see `SampleHeader`.
        triggers: kinds of triggers, with a space before and after each kind.
        size_bytes: size of the sealed file.
        received_at: seconds since 1970.
    """

    __tablename__ = "samples"
    __table_args__ = (Index(None, "received_at", "id"), Index(None, "device", "order"))

    id: Mapped[str] = mapped_column(NAME, primary_key=True)
    device: Mapped[str] = mapped_column(NAME, ForeignKey("devices.name"))
    order: Mapped[str] = mapped_column(NAME)
    model: Mapped[str] = mapped_column(NAME)
    version: Mapped[str]
    triggers: Mapped[str]
    probability: Mapped[float]
    media_type: Mapped[str]
    size_bytes: Mapped[int]
    taken_at: Mapped[float]
    received_at: Mapped[float]
