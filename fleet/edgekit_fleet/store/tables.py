"""The tables of the fleet. All times are in seconds since 1970 by the clock of the manager's machine.

`database` creates the tables in an empty store. After the first release, each change also needs a migration.
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
    """The base of all tables, which defines column types and the names of constraints."""

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
    """Return an object of the class `kind`, whose fields have the values of the columns with the same names.

    `others` contains further field values by name, which take precedence over the columns.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    columns = set(row.__table__.columns.keys())
    values = {field.name: getattr(row, field.name) for field in fields if field.name in columns}
    return kind(**{**values, **others})


def shard_of(name: str) -> int:
    """Return the shard number of the device or rollout with this name, from 0 to `SHARDS` - 1."""
    return zlib.crc32(name.encode()) % SHARDS


def _find_shard(context: Any) -> int:
    return shard_of(context.get_current_parameters()["name"])


class DeviceRow(Table):
    """An enrolled device.

    Attributes:
        shard: The shard of the device, see `shard_of`.
        target: The target of its packages, which selectors call `class`.
        tags: The tags that operators set, such as `site` with the value `lyon`.
        public_key: The Ed25519 key of its certificate and its documents, 32 bytes.
        certificate_serial: The serial number of the newest certificate in hexadecimal.
        certificate_expires_at: When the certificate expires.
        revoked_at: When the device was revoked, or None.
        status: The status in its last report, or `new` before the first report. It is `faulty` if a desired
            version runs and returns NaN, and `revoked` after `revoked_at`.
        because: A sentence that explains the status.
        facts: The facts in its last report.
        reported: Its last report as plain values, or None.
        desired_held: The `$version` of the desired document that the device has, according to the device.
        sequence, hello_sequence, event_sequence: The sequence numbers of its last report, hello and event.
            They are separate because a retained report may arrive after a newer event.
        is_online: Whether the device is connected, according to its hello or last will.
        last_seen_at: When its last document arrived, or None.
        pinned: The versions that were pinned on the device, by model.
        streams: The streams that the device should run, by name, as plain `StreamOptions` with passwords.
        decryption_key: The P-256 public key in PEM for which content keys are encrypted. It is empty if the
            device enrolled without one.
        settings: The settings that the device should have, by name.
        logs: The newest `LogRequest` as plain values, or empty.
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
    """The last log lines of a device, from its answer to the newest request.

    Attributes:
        request, source, refusal, text: See `Logs`. The text is decompressed.
        asked_at, asked_by: When and by whom the lines were requested.
        answered_at: When the answer arrived, or None.
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
    """A search attribute of a device: a tag, a stable fact or the version of a model.

    Attributes:
        name: The name, such as `site`, `runtime` or `model:detector`.
    """

    __tablename__ = "device_attributes"
    __table_args__ = (Index(None, "name", "value", "device"),)

    device: Mapped[str] = mapped_column(NAME, ForeignKey("devices.name"), primary_key=True)
    name: Mapped[str] = mapped_column(NAME, primary_key=True)
    value: Mapped[str] = mapped_column(String(256))


class WantedModelRow(Table):
    """The version of one model that a device should run. Rollouts write it.

    The manager makes the desired document of a device from all rows of the device. It publishes the document
    if it has changed.

    Attributes:
        rollout: The rollout that set the version, or None after the rollout has ended.
        document: A `DesiredModel` as plain values. It is ignored if `is_removed`.
        is_removed: Whether the device should have no version of the model.
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
        version: The `$version` of the document.
        content_sha256: The SHA-256 of its models and streams, to detect changes.
        envelope: The signed envelope as it is published.
        key_id: The id of the manager's key that signed it.
        issued_at, expires_at: When the document was signed, and when it expires. A document with a `notice`
            may expire earlier than others.
        is_due: Whether the document must be written again, because its content may have changed.
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
    """A one-time enrolment code.

    Attributes:
        secret_sha256: The SHA-256 of the code's secret. The secret itself is not stored.
        target: The target of the device, or empty if the device states it.
        used_at: When the code was used, or None.
        created_by: The user who created it. It is empty for codes from earlier versions of edgekit.
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
    """A release, which is a set of packages.

    Attributes:
        name: The name, such as `2026-11-22.1`.
        withdrawn_at: When the release was withdrawn, or None.
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
        version: The version of the package.
        manifest_sha256: The SHA-256 of its manifest.
        path, size_bytes, sha256: The path, size and SHA-256 of its file in the TUF repository.
        needs: A dict with the requirements `engines` and `memory_bytes`. It may also contain
            `min_agreement`, the minimum agreement with the previous version, and `score`, the score that was
            measured when the package was made.
        deltas: The `DeltaOffer`s as plain values.
        key_id: The id of the content key that encrypts the file and its deltas, see `ContentKeyRow`. It is
            empty for an unencrypted package.
        allows_plain: Whether the unencrypted package may replace an encrypted version.
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
    """The secret key of one encrypted package.

    Attributes:
        content_key: The key, 32 bytes.
    """

    __tablename__ = "content_keys"

    key_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    content_key: Mapped[bytes]
    created_at: Mapped[float]


class RolloutRow(Table):
    """A rollout of a release to a cohort.

    Attributes:
        selector: The selector of the devices that get the release.
        state: `running`, `paused`, `returning`, `succeeded` or `aborted`.
        because: A sentence that explains the state.
        settings: The `RolloutSettings` as plain values, which do not change after the start.
        wave: The index of the open wave, from 0.
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
    """A device in the cohort of a rollout.

    Attributes:
        wave: The index of its wave, from 0, or -1 if the plan refuses the device.
        state: The state of the device in the rollout, such as `waiting`, `offered`, `succeeded`, `failed` or
            `returned`.
        because: A sentence that explains the state.
        attempts: The number of executions so far.
        before: The version of each model at the start of the rollout, as a dict from model to plain
            `DesiredModel`. The value is an empty dict if the model did not run. The whole dict is empty if
            the device had not reported yet.
        offered_at, answered_at: When the release was offered and when the device answered, or None.
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
        execution: The name of the attempt, see `DesiredModel`.
        rollout: The rollout that ordered the attempt, or None if the manager did not order it.
        state, reason, code, done_bytes, sent_bytes: See `Execution`.
        created_at, changed_at: When the row was created and last changed.
        ended_at: When the state became one of `ENDED`, or None.
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
    """The figures of a device for a model version in one hour. Only the last report of the hour is kept.

    Attributes:
        hour: The number of the hour since 1970, by the manager's clock.
        figures: The `ModelFigures` as plain values.
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
        number: The number of the entry, from 1 without gaps.
        actor: Who acted, such as the name of a user or `manager`.
        action: The action, such as `rollout.start`, `device.revoke` or `alarm.restored`.
        subject: The object of the action, such as a device.
        detail: Further fields as plain values.
        previous_sha256, sha256: The digests of the previous entry and of this one, see `audit`.
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
    """A manager that has joined, see `shards`.

    Attributes:
        number: The number of the manager, from 0. A manager that joins gets the lowest free number.
        holder: The identifier of the process.
        heartbeat_at: The time of the last heartbeat, by the clock of the database.
        turned_at: All messages that the manager received before this time, by its own clock, are in the
            store.
    """

    __tablename__ = "managers"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    holder: Mapped[str] = mapped_column(NAME, unique=True)
    heartbeat_at: Mapped[float]
    turned_at: Mapped[float]


class ShardRow(Table):
    """One of the `SHARDS` shards of devices and rollouts.

    Attributes:
        number: See `shards.shard_of`.
        holder: The `holder` of a `ManagerRow`. If there is no such row, any manager may take the shard.
        epoch: The epoch, which increases with each new holder.
    """

    __tablename__ = "shards"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    holder: Mapped[str] = mapped_column(NAME, default="")
    epoch: Mapped[int] = mapped_column(default=0)


class UserRow(Table):
    """A user of the console.

    Attributes:
        password_digest: The argon2id digest, or empty if a proxy logs the user in.
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
        secret_sha256: The SHA-256 of the secret in the cookie.
        seen_at: When the login was last used, to the minute.
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
        secret: The secret in the user's app, in base 32.
        is_confirmed: Whether a login requires it.
        last_step: The time step of the last used one-time code. Codes of this step and earlier are refused.
        failures, failed_at: The number of consecutive wrong codes, and the time of the last one.
        recovery_sha256: The digests of the unused recovery codes.
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
        address: An IPv4 address, a /64 network, or `browser` with the SHA-256 of the secret in its cookie.
        seen_at: The time of the last login.
    """

    __tablename__ = "known_addresses"

    user: Mapped[str] = mapped_column(NAME, ForeignKey("users.name"), primary_key=True)
    address: Mapped[str] = mapped_column(NAME, primary_key=True)
    seen_at: Mapped[float]


class FailureRow(Table):
    """Failed attempts from an address or with a name, see `access.failure_limit`.

    Attributes:
        key_sha256: The SHA-256 of the address or name.
        begun_at: The time from which failures expire. One failure expires every `60 / limit` seconds, where
            `limit` is the allowed number of failures in a minute.
        count: The number of failed attempts, without those that expired before `begun_at`.
    """

    __tablename__ = "failures"

    key_sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    begun_at: Mapped[float] = mapped_column(index=True)
    count: Mapped[int]


class TokenRow(Table):
    """An access token of a program.

    Attributes:
        secret_sha256: The SHA-256 of the secret that the program sends.
        scopes: The permissions, see `access.principal`.
        expires_at: When the token expires, or None.
        used_at: When the token was last used, to the minute, or None.
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
    """A request that changed something, and its answer in case the client repeats the request.

    Attributes:
        actor, key: The sender and its `Idempotency-Key`.
        request_sha256: The SHA-256 of the method, path and body.
        status: The HTTP status of the answer, or None while the request is in progress.
    """

    __tablename__ = "idempotency_keys"

    actor: Mapped[str] = mapped_column(NAME, primary_key=True)
    key: Mapped[str] = mapped_column(NAME, primary_key=True)
    request_sha256: Mapped[str] = mapped_column(String(64))
    status: Mapped[int | None]
    answer: Mapped[bytes] = mapped_column(default=b"")
    created_at: Mapped[float] = mapped_column(index=True)


class WebhookRow(Table):
    """A webhook, which is notified of actions in the audit log.

    Attributes:
        url: The URL that messages are sent to.
        actions: The prefixes of the actions that are sent, such as `rollout.`, or empty for all actions.
        secret: The secret that signs messages.
        position: The number of the last audit entry that was sent or skipped.
        failures: The number of consecutive failed attempts.
        because: Why the last attempt failed, or empty.
        due_at: The time of the next attempt. A sender sets a later time before it sends, so that no other
            sender sends the same messages.
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
    """A named selector of devices for all users.

    Attributes:
        selector: See `rollouts.selector`.
    """

    __tablename__ = "saved_queries"

    name: Mapped[str] = mapped_column(NAME, primary_key=True)
    selector: Mapped[str]
    created_at: Mapped[float]
    created_by: Mapped[str]


class SavedWindowRow(Table):
    """A named time window in which devices may switch to a new version. All users can use it.

    Attributes:
        window: See `RolloutSettings`.
    """

    __tablename__ = "saved_windows"

    name: Mapped[str] = mapped_column(NAME, primary_key=True)
    window: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[float]
    created_by: Mapped[str]


class SampleSettingRow(Table):
    """The settings for collecting samples from devices. There is no row until they are first changed.

    Attributes:
        number: Always 1.
        days: How many days samples are stored.
        max_bytes: The maximum total size of the stored samples.
        public_key: The key with which devices encrypt samples, see `SampleOrder`.
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
    """An order for samples from all devices that match its selector, now or later.

    Attributes:
        id, model, triggers, per_day, max_bytes, ends_at, window: See `SampleOrder`.
        selector: The selector of the devices, see `rollouts.selector`.
        stopped_at: When somebody stopped it early, or None.
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
    """A received sample, whose file is encrypted.

    Attributes:
        id, order, model, version, probability, media_type, taken_at: See `SampleHeader`.
        triggers: The kinds of triggers, with a space before and after each kind.
        size_bytes: The size of the encrypted file.
        received_at: The time of arrival.
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
