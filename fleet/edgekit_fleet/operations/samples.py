"""Operations on samples from the field: switch on or off, order, stop, list, read, delete."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from sqlalchemy import ColumnElement, Select, and_, func, select, true, tuple_
from sqlalchemy.orm import Session

from edgekit_fleet.operations.saved import check_window
from edgekit_fleet.rollouts.selector import parse_selector
from edgekit_fleet.samples.deletion import delete_where
from edgekit_fleet.samples.orders import SETTING, list_orders, mark_meant, read_order, read_setting
from edgekit_fleet.samples.vault import SampleVault
from edgekit_fleet.store import audit
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.tables import SampleOrderRow, SampleRow, SampleSettingRow, read_record
from edgekit_runtime.dataclass_json import Range, from_plain, to_plain
from edgekit_runtime.errors import DataError, FleetError, NotFoundError, RequestError
from edgekit_runtime.protocol.samples import MAX_ORDERS, TRIGGERS, Sample, SampleTrigger

DEFAULT_DAYS: Final = 90.0
DEFAULT_MAX_BYTES: Final = 20 << 30
_DAY_S: Final = 86_400.0
_MAX_NAME: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSamples:
    """An order to devices to send samples.

    Attributes:
        model: The name of the model.
        selector: The devices, such as `site=lyon`. It also applies to devices that are added later.
        triggers: The reasons to sample a request.
        per_day: The maximum number of samples a day from a device.
        max_bytes: The maximum size of the samples that wait on a device.
        days: The days until the order ends.
        window: The local time of day at which devices send, such as `01:00-04:00`. Any time by default.
    """

    model: str
    selector: str
    triggers: tuple[SampleTrigger, ...]
    per_day: Annotated[float, Range(0.001, 10**6)] = 20.0
    max_bytes: Annotated[int, Range(1, 1 << 40)] = 50 << 20
    days: Annotated[float, Range(0.01, 3650)] = 14.0
    window: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrderStatus:
    """An order to send samples, and its state.

    Attributes:
        id, model, selector, triggers, per_day, max_bytes, created_at, created_by, ends_at: See
            `SampleOrderRow`.
        state: `active`, `stopped` or `ended`.
        samples: The number of stored samples of the order.
    """

    id: str
    model: str
    selector: str
    triggers: tuple[SampleTrigger, ...]
    per_day: float
    max_bytes: int
    created_at: float
    created_by: str
    ends_at: float
    state: str
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStatus:
    """Whether the fleet collects samples, and what it has collected.

    Attributes:
        days, max_bytes: See `SampleSettingRow`.
        samples, size_bytes: The number and total size of the stored samples.
        by_trigger: A dict from kind of trigger to the number of its samples.
        orders: The orders, newest first.
    """

    is_on: bool
    days: float
    max_bytes: Annotated[int, Range(0, 1 << 50)]
    samples: int
    size_bytes: int
    by_trigger: Mapping[str, int]
    orders: tuple[SampleOrderStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSummary:
    """A sample in a list. See `SampleRow`."""

    id: str
    device: str
    order: str
    model: str
    version: str
    triggers: tuple[str, ...]
    probability: float
    media_type: str
    size_bytes: int
    taken_at: float
    received_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleChoice:
    """A choice of samples. An empty field matches all samples.

    Attributes:
        order: The id of an order.
        trigger: The kind of trigger that selected the samples.
        older_than_days: The minimum number of days since the samples were received.
    """

    ids: tuple[str, ...] = ()
    model: str = ""
    device: str = ""
    version: str = ""
    order: str = ""
    trigger: str = ""
    older_than_days: float = 0.0

    @property
    def is_all(self) -> bool:
        return self == SampleChoice()

    def condition(self) -> ColumnElement[bool]:
        """Return the SQL condition on `SampleRow` for the chosen samples."""
        equal = {
            name: value for name in ("model", "device", "version", "order") if (value := getattr(self, name))
        }
        parts: list[ColumnElement[bool]] = [
            getattr(SampleRow, name) == value for name, value in equal.items()
        ]
        if self.ids:
            parts.append(SampleRow.id.in_(self.ids))
        if self.trigger:
            parts.append(SampleRow.triggers.contains(f" {self.trigger} ", autoescape=True))
        if self.older_than_days > 0:
            parts.append(SampleRow.received_at < time.time() - self.older_than_days * _DAY_S)
        return and_(true(), *parts)


def switch(
    store: Store,
    vault: SampleVault,
    *,
    is_on: bool,
    days: float | None = None,
    max_bytes: int | None = None,
    actor: str,
) -> None:
    """Switch the collection of samples on or off. Stored samples are kept.

    A missing key is created in `vault`. `days` is how long samples are stored, and `max_bytes` is the maximum
    size of all samples. If they are None, they are not changed.

    Raises:
        FleetError: This manager has joined the fleet of another machine.
        ConfigError: The key cannot be read.
        OutputError: The key cannot be written.
    """
    public_key = vault.make_key()
    with store.transaction() as session:
        row = session.get(SampleSettingRow, SETTING)
        if row is None:
            row = SampleSettingRow(number=SETTING, days=DEFAULT_DAYS, max_bytes=DEFAULT_MAX_BYTES)
            session.add(row)
        row.is_on, row.public_key = is_on, public_key
        row.days, row.max_bytes = days or row.days, max_bytes or row.max_bytes
        row.changed_at, row.changed_by = time.time(), actor
        audit.record(session, actor, f"sample.{'on' if is_on else 'off'}", "samples", days=row.days)
        session.flush()
        for order in list_orders(session, time.time()):
            mark_meant(session, order)


def parse_triggers(text: str) -> tuple[SampleTrigger, ...]:
    """Return the triggers in a text such as `uncertain:0.1 or drift or random:5`.

    The number after the colon is optional. For the trigger `uncertain`, it is the threshold. For every other
    trigger, it is the maximum number of samples a day.

    Raises:
        FleetError: A trigger is unknown, or the text after its colon is not a number.
    """
    triggers = []
    for part in text.split(" or "):
        kind, sign, number = part.strip().partition(":")
        if kind not in TRIGGERS:
            raise FleetError(f"--when: there is no trigger {kind[:40]!r}, expected {', '.join(TRIGGERS)}")
        name = "threshold" if kind == "uncertain" else "per_day"
        try:
            value = {name: float(number)} if sign else {}
        except ValueError as cause:
            raise FleetError(f"--when: {number[:40]!r} behind '{kind}:' is no number") from cause
        triggers.append(from_plain(SampleTrigger, {"kind": kind, **value}, "--when", FleetError))
    return tuple(triggers)


def start(store: Store, request: StartSamples, *, actor: str) -> SampleOrderStatus:
    """Order samples of a model from all devices that match a selector, now or later.

    Raises:
        FleetError: The fleet collects no samples, the selector is malformed, or there are too many orders.
    """
    parse_selector(request.selector)
    if request.window is not None:
        check_window(request.window)
    if unknown := {trigger.kind for trigger in request.triggers} - TRIGGERS.keys():
        raise FleetError(f"there is no trigger {min(unknown)[:40]!r}, expected {', '.join(TRIGGERS)}")
    now = time.time()
    if not request.model.isprintable() or not 0 < len(request.model) <= _MAX_NAME:
        raise FleetError(f"there is no model {request.model[:40]!r}")
    with store.transaction() as session:
        setting = read_setting(session)
        if setting is None:
            raise FleetError(
                "this fleet collects no samples; an administrator allows it: edgekit fleet samples on"
            )
        if len(list_orders(session, now)) >= MAX_ORDERS:
            raise FleetError(f"{MAX_ORDERS} orders are active; stop one: edgekit fleet samples stop ORDER")
        row = SampleOrderRow(
            id=f"s-{secrets.token_hex(4)}",
            model=request.model,
            selector=request.selector,
            triggers=to_plain(request.triggers),
            per_day=request.per_day,
            max_bytes=request.max_bytes,
            ends_at=now + request.days * _DAY_S,
            window=request.window,
            created_at=now,
            created_by=actor,
        )
        try:
            order = read_order(row, setting.public_key)
        except ValueError as cause:
            raise FleetError(str(cause)) from cause
        session.add(row)
        session.flush()
        devices = mark_meant(session, row)
        detail = {name: value for name, value in to_plain(order).items() if name not in ("id", "public_key")}
        audit.record(session, actor, "sample.start", row.id, selector=row.selector, devices=devices, **detail)
        return _describe_order(row, {}, now)


def stop(store: Store, order_id: str, *, actor: str) -> SampleOrderStatus:
    """Stop an order of samples, and return its state. Its samples are kept.

    Raises:
        NotFoundError: There is no such order, or it was already stopped.
    """
    with store.transaction() as session:
        row = session.get(SampleOrderRow, order_id)
        if row is None or row.stopped_at is not None:
            raise NotFoundError(
                f"no order '{order_id[:40]}' is active; `edgekit fleet samples status` lists them"
            )
        row.stopped_at = time.time()
        mark_meant(session, row)
        audit.record(session, actor, "sample.stop", row.id)
        return _describe_order(row, _count_by(session, SampleRow.order), time.time())


def read_status(store: Store) -> SampleStatus:
    """Return whether the fleet collects samples, with the 200 newest orders and the numbers of samples."""
    now = time.time()
    with store.snapshot() as session:
        setting = session.get(SampleSettingRow, SETTING)
        counts = _count_by(session, SampleRow.order)
        newest = select(SampleOrderRow).order_by(SampleOrderRow.created_at.desc()).limit(200)
        return SampleStatus(
            is_on=setting is not None and setting.is_on,
            days=setting.days if setting is not None else DEFAULT_DAYS,
            max_bytes=setting.max_bytes if setting is not None else DEFAULT_MAX_BYTES,
            samples=sum(counts.values()),
            size_bytes=session.scalar(select(func.coalesce(func.sum(SampleRow.size_bytes), 0))) or 0,
            by_trigger=count_by_trigger(session, SampleChoice()),
            orders=tuple(_describe_order(row, counts, now) for row in session.scalars(newest)),
        )


def count_by_trigger(session: Session, choice: SampleChoice) -> dict[str, int]:
    """Return the number of samples for each kind of trigger. A sample can have several triggers."""
    counts = dict.fromkeys(TRIGGERS, 0)
    statement = (
        select(SampleRow.triggers, func.count()).where(choice.condition()).group_by(SampleRow.triggers)
    )
    for triggers, count in session.execute(statement):
        for kind in triggers.split():
            counts[kind] += count
    return {kind: count for kind, count in counts.items() if count}


def page_samples(
    session: Session, choice: SampleChoice, *, after: str = "", limit: int = 100
) -> tuple[list[SampleSummary], str | None]:
    """Return a page of samples, newest first.

    Also return the value of `after` for the next page, or None on the last page. `after` is the id of the
    last sample of the previous page, or empty for the first page.

    Raises:
        NotFoundError: The sample `after` was deleted.
    """
    statement: Select[Any] = select(SampleRow).where(choice.condition())
    order = tuple_(SampleRow.received_at, SampleRow.id)
    if after:
        last = session.get(SampleRow, after)
        if last is None:
            raise NotFoundError(f"sample {after[:40]!r} is gone; begin with the first page")
        statement = statement.where(order < tuple_(last.received_at, last.id))
    statement = statement.order_by(SampleRow.received_at.desc(), SampleRow.id.desc()).limit(limit + 1)
    rows = session.scalars(statement).all()
    items = [_describe(row) for row in rows[:limit]]
    return items, items[-1].id if len(rows) > limit else None


def read(store: Store, vault: SampleVault, sample_id: str, *, actor: str) -> tuple[SampleSummary, Sample]:
    """Decrypt a stored sample, and return it with its summary. The audit log records the access.

    Raises:
        NotFoundError: There is no such sample.
        RequestError: 422, its file is damaged.
    """
    with store.transaction() as session:
        row = session.get(SampleRow, sample_id)
        if row is None:
            raise NotFoundError(f"there is no sample '{sample_id[:40]}'")
        summary = _describe(row)
        audit.record(session, actor, "sample.read", sample_id, device=row.device, model=row.model)
    return summary, open_sample(vault, sample_id)


def open_sample(vault: SampleVault, sample_id: str) -> Sample:
    """Decrypt a stored sample. The caller must record the access in the audit log, as `read` does.

    Raises:
        RequestError: 422, its file is damaged.
    """
    try:
        return vault.read(sample_id)
    except DataError as cause:
        raise RequestError(422, str(cause)) from cause


def delete(store: Store, vault: SampleVault, choice: SampleChoice, *, actor: str) -> int:
    """Delete the files of the chosen samples and then their rows in the store. Return the number of samples.

    Raises:
        FleetError: All samples of the fleet are chosen.
        OutputError: A file cannot be deleted. Some samples may already have been deleted.
    """
    if choice.is_all:
        raise FleetError("say which samples: by ids, model, device, version, order, trigger or age")
    detail = {name: value for name, value in to_plain(choice).items() if value and name != "ids"}
    return delete_where(store, vault, choice.condition(), actor, **detail)


def _count_by(session: Session, column: Any) -> dict[str, int]:
    rows = session.execute(select(column, func.count()).group_by(column)).all()
    return {str(name): int(count) for name, count in rows}


def _describe_order(row: SampleOrderRow, counts: dict[str, int], now: float) -> SampleOrderStatus:
    state = "stopped" if row.stopped_at is not None else "active" if now < row.ends_at else "ended"
    triggers = read_order(row, "").triggers
    return read_record(SampleOrderStatus, row, triggers=triggers, state=state, samples=counts.get(row.id, 0))


def _describe(row: SampleRow) -> SampleSummary:
    return read_record(SampleSummary, row, triggers=tuple(row.triggers.split()))
