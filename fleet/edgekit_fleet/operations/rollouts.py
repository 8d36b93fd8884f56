"""Operations on rollouts: plan, start, order, list, describe, replay, and the effects of tag changes."""

import bisect
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Annotated, Any, Final, Literal

from sqlalchemy import false, func, or_, select
from sqlalchemy.orm import Session

from edgekit_fleet.identity.enrolment import find_device
from edgekit_fleet.operations.names import check_name, follows
from edgekit_fleet.operations.saved import check_window
from edgekit_fleet.rollouts.gate_table import LIMITS, MIN_AGREEMENT, make_limits
from edgekit_fleet.rollouts.outside_gates import OutsideGate
from edgekit_fleet.rollouts.preview import DevicePlan, DeviceRefusal, PackageView, preview
from edgekit_fleet.rollouts.progress import (
    Approval,
    LoadOrder,
    ModelSettings,
    Order,
    OrderEntry,
    RolloutSettings,
    StartEntry,
)
from edgekit_fleet.rollouts.replay import Difference, replay
from edgekit_fleet.rollouts.runner import OPEN_STATES, log_entries, read_entries
from edgekit_fleet.rollouts.selector import parse_selector
from edgekit_fleet.rollouts.views import (
    list_attributes,
    read_before,
    read_devices,
    read_groups,
    read_packages,
)
from edgekit_fleet.rollouts.waves import DEFAULT_WAVES, default_minimum, freeze_cohort, plan_waves
from edgekit_fleet.store.database import Store, insert_many
from edgekit_fleet.store.tables import MemberRow, ReleasePackageRow, RolloutRow, WantedModelRow, read_record
from edgekit_runtime.dataclass_json import Range, from_plain, to_plain
from edgekit_runtime.errors import FleetError, NotFoundError

_PRIORITY: Final = Range(0, 1_000_000)
_LEAST_PATIENCE_S: Final = 5.0  # a device looks at its service every second, and installs for seconds
_LEAST_ANSWER_S: Final = 60.0  # of a step, beside the times that the rollout itself orders to wait


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """The planned effect of a rollout.

    Attributes:
        planned: The devices that get packages, sorted by name.
        refused: The devices that match the selector but get no packages.
        waves: The number of devices that have the release at the end of each wave.
        min_agreement: The minimum agreement with the previous version, which a gate checks.
    """

    release: str
    selector: str
    planned: tuple[DevicePlan, ...]
    refused: tuple[DeviceRefusal, ...]
    waves: tuple[int, ...]
    min_agreement: float

    @property
    def bytes(self) -> int:
        """The total size of the downloads of all devices."""
        return sum(planned_device.bytes for planned_device in self.planned)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """The planned effect of a rollout, without an object for each device.

    Attributes:
        planned: The devices that get packages, in groups with the same packages. Each item is the plan of one
            device in the group, and the names of all devices in the group.
        refused: The devices that get no packages, in groups with the same reason. Each item is the refusal of
            one device in the group, and the names of all devices in the group.
        devices: The number of devices that get packages.
        settings: The settings of the rollout.
    """

    planned: tuple[tuple[DevicePlan, Sequence[str]], ...]
    refused: tuple[tuple[DeviceRefusal, Sequence[str]], ...]
    devices: int
    settings: RolloutSettings


_LIMIT_TEXTS = "\n".join(f"    {limit.name}: {limit.label}." for limit in LIMITS)
RolloutLimits = make_dataclass(
    "RolloutLimits",
    [
        (limit.name, Annotated[(int if limit.is_whole else float) | None, limit.range], field(default=None))
        for limit in LIMITS
    ],
    namespace={
        "__doc__": "The limits of the gates. A limit that is left out has its default.\n\nAttributes:\n"
        + _LIMIT_TEXTS
    },
    frozen=True,
    slots=True,
    kw_only=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRollout:
    """A rollout to plan.

    Attributes:
        release: The name of the release.
        selector: The selector of the devices that get the release.
        waves: The sizes of the waves, as shares or counts.
        minimum: The number of devices of the first step. The default is a tenth of all devices, but at least
            1 and at most 30.
    """

    release: str
    selector: str
    waves: str = DEFAULT_WAVES
    minimum: Annotated[int | None, Range(1, 1_000_000_000)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRollout(PlanRollout):
    """A rollout to start. Omitted fields have the defaults of `RolloutSettings`.

    Attributes:
        name: The name of the rollout. If empty, it is the name of the release and a number.
        limits: The limits of the gates.
        evidence: The gates with outside judges, by name. The rollout waits for their evidence at the end of
            its first wave.
        soak_s, patience_s, step_timeout_s, retries, spread_s, approval, is_dynamic, window, trial: See
            `RolloutSettings`.
        order: `new-first` loads the new version before it unloads the old one, which needs memory for both.
            `old-first` unloads the old version first. `unloaded` unloads it before the new version is
            installed.
        priority: The priority of the models. A device updates models with a higher priority first.
        orders, priorities: The order or priority of single models, by model name.
    """

    name: str = ""
    limits: RolloutLimits = field(default_factory=RolloutLimits)  # type: ignore[valid-type]
    evidence: Mapping[str, OutsideGate] = field(default_factory=dict)
    soak_s: float | None = None
    patience_s: float | None = None
    step_timeout_s: float | None = None
    retries: Annotated[int | None, Range(0, 10)] = None
    spread_s: Annotated[float | None, Range(0.0, 86_400.0)] = None
    approval: Approval = "none"
    is_dynamic: bool = False
    window: str | None = None
    trial: Literal["none", "shadow", "canary"] = "none"
    order: LoadOrder = "new-first"
    priority: Annotated[int, _PRIORITY] = 0
    orders: Mapping[str, LoadOrder] = field(default_factory=dict)
    priorities: Mapping[str, Annotated[int, _PRIORITY]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """The current state of a rollout.

    Attributes:
        name, release, selector, state, because, created_at, created_by, ended_at: See `RolloutRow`.
        wave: The number of the open wave, from 1.
        waves: The number of devices that have the release at the end of each wave.
        members: A dict from device state to the number of devices.
    """

    name: str
    release: str
    selector: str
    state: str
    because: str
    created_at: float
    created_by: str
    ended_at: float | None
    wave: int
    waves: tuple[int, ...]
    members: Mapping[str, int]


def plan_rollout(store: Store, request: StartRollout) -> RolloutPlan:
    """Return the effect of a rollout without starting it.

    Raises:
        FleetError: There is no such release, the selector or the waves are malformed, or an option is
            invalid.
    """
    with store.snapshot() as session:
        packages = read_packages(session, request.release)
        devices = read_devices(session, parse_selector(request.selector), packages)
    planned, refused = preview(devices, packages)
    settings = _make_settings(request, packages, max(len(planned), 1))
    return RolloutPlan(
        release=request.release,
        selector=request.selector,
        planned=planned,
        refused=refused,
        waves=settings.waves,
        min_agreement=settings.limits[MIN_AGREEMENT.name],
    )


def sum_plan(store: Store, request: StartRollout) -> PlanSummary:
    """Return the effect of a rollout like `plan_rollout`, but for groups of devices with the same result.

    Raises:
        FleetError: See `plan_rollout`.
    """
    with store.snapshot() as session:
        packages = read_packages(session, request.release)
        groups = read_groups(session, parse_selector(request.selector), packages)
    names = {group.name: some for group, some in groups}
    planned, refused = preview((group for group, _ in groups), packages)
    devices = sum(len(names[planned_device.device]) for planned_device in planned)
    return PlanSummary(
        planned=tuple((planned_device, names[planned_device.device]) for planned_device in planned),
        refused=tuple((refusal, names[refusal.device]) for refusal in refused),
        devices=devices,
        settings=_make_settings(request, packages, max(devices, 1)),
    )


def start_rollout(store: Store, request: StartRollout, actor: str) -> str:
    """Start a rollout with a fixed cohort of devices, and return its name.

    Raises:
        FleetError: As for `plan_rollout`, or no device gets any package, or the name is taken.
    """
    now = time.time()
    selector = parse_selector(request.selector)
    with store.transaction() as session:
        packages = read_packages(session, request.release)
        models = frozenset(package.model for package in packages)
        devices = {view.name: view for view in read_devices(session, selector, packages)}
        planned, refused = preview(devices.values(), packages)
        if not planned:
            raise _explain_empty_cohort(request, refused)
        name = request.name or propose_name(session, request.release)
        if request.name:
            check_name("rollout", name)
        if session.get(RolloutRow, name) is not None:
            raise FleetError(f"rollout '{name}' exists; choose another name")
        settings = _make_settings(request, packages, len(planned))
        classes = {planned_device.device: planned_device.target for planned_device in planned}
        cohort = freeze_cohort(name, classes)
        before = read_before(session, [devices[device] for device in cohort], models)
        session.add(
            RolloutRow(
                name=name,
                release=request.release,
                selector=request.selector,
                state="running",
                because="the first devices are next",
                settings=to_plain(settings),
                created_at=now,
                created_by=actor,
                started_at=now,
            )
        )
        session.flush()
        members = [
            _make_member(name, device, bisect.bisect_right(settings.waves, rank), before=before.get(device))
            for rank, device in enumerate(cohort)
        ]
        members += [_make_member(name, refusal.device, -1, because=refusal.reason) for refusal in refused]
        insert_many(session, MemberRow, members)
        entry = StartEntry(
            settings=settings, devices=cohort, classes=tuple(classes[device] for device in cohort)
        )
        log_entries(session, name, actor, [entry], now)
    return name


def _make_member(
    rollout: str, device: str, wave: int, *, because: str = "", before: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "rollout": rollout,
        "device": device,
        "wave": wave,
        "state": "waiting" if wave >= 0 else "refused",
        "because": because,
        "attempts": 0,
        "before": before or {},
    }


def _explain_empty_cohort(request: StartRollout, refused: Sequence[DeviceRefusal]) -> FleetError:
    first = {refusal.code: refusal for refusal in reversed(refused)}
    reasons = "; ".join(f"{refusal.device}: {refusal.reason}" for refusal in first.values())
    return FleetError(
        f"no device gets release '{request.release}' by {request.selector!r}: {reasons or 'none matches'};"
        " see all by `edgekit fleet rollout plan`"
    )


def propose_name(session: Session, release: str) -> str:
    """Return an unused name for the next rollout of a release, such as `RELEASE-r2`."""
    rollout_count = session.scalar(
        select(func.count()).select_from(RolloutRow).where(RolloutRow.release == release)
    )
    names = (f"{release}-r{number}" for number in itertools.count((rollout_count or 0) + 1))
    return next(name for name in names if session.get(RolloutRow, name) is None)


def _make_settings(request: StartRollout, packages: Sequence[PackageView], devices: int) -> RolloutSettings:
    minimum = min(request.minimum or default_minimum(devices), devices)
    waves = plan_waves(request.waves, devices, minimum)
    stated = {name: value for name, value in to_plain(request.limits).items() if value is not None}
    limits = make_limits({**_find_limits(packages), **stated})
    models = {name: to_plain(settings) for name, settings in _make_models(request, packages).items()}
    names = {setting.name for setting in fields(RolloutSettings)}
    plain: dict[str, Any] = {
        name: value for name, value in to_plain(request).items() if name in names and value is not None
    }
    plain |= {"waves": list(waves), "minimum": minimum, "models": models, "limits": limits}
    if plain.get("window"):  # a device may answer a day later and is not offline
        check_window(plain["window"])
        plain.setdefault("patience_s", 93_600.0)
        plain.setdefault("step_timeout_s", 259_200.0)
    elif spread_s := plain.get("spread_s", 0.0):
        plain.setdefault("patience_s", 3600.0 + spread_s)
    settings = from_plain(RolloutSettings, plain, "rollout", FleetError)
    _check_times(settings)
    return settings


def _check_times(settings: RolloutSettings) -> None:
    """Refuse times after which every device would count as silent, or every step as late."""
    least_s = settings.spread_s + _LEAST_PATIENCE_S
    if settings.patience_s < least_s:
        raise FleetError(
            f"rollout: patience_s is {settings.patience_s:.16g}, expected at least {least_s:.16g}:"
            f" {_LEAST_PATIENCE_S:.0f} s more than spread_s, so that a device can answer"
        )
    least_s = settings.spread_s + settings.soak_s + _LEAST_ANSWER_S
    if settings.step_timeout_s < least_s:
        raise FleetError(
            f"rollout: step_timeout_s is {settings.step_timeout_s:.16g}, expected at least {least_s:.16g}:"
            f" {_LEAST_ANSWER_S:.0f} s more than spread_s and soak_s; shorten these, or give it more"
        )


def _make_models(request: StartRollout, packages: Sequence[PackageView]) -> dict[str, ModelSettings]:
    classes: dict[str, list[str]] = {}
    for package in packages:
        classes.setdefault(package.model, []).append(package.target)
    unknown = sorted((request.orders.keys() | request.priorities.keys()) - classes.keys())
    if unknown:
        model_names = ", ".join(sorted(classes))
        raise FleetError(
            f"release '{request.release}' has no model '{unknown[0][:80]}', it has: {model_names}"
        )
    return {
        model: ModelSettings(
            classes=tuple(sorted(targets)),
            order=request.orders.get(model, request.order),
            priority=request.priorities.get(model, request.priority),
        )
        for model, targets in sorted(classes.items())
    }


def _find_limits(packages: Sequence[PackageView]) -> dict[str, float]:
    """Return the lowest of the agreement limits of the packages, if they have any."""
    stated = [package.agreement for package in packages if package.agreement is not None]
    return {MIN_AGREEMENT.name: min(stated)} if stated else {}


def give_order(
    store: Store, name: str, order: Order, actor: str, *, note: str = "", allow_plain: bool = False
) -> RolloutSummary:
    """Store an order to a rollout, which the manager executes in its next turn.

    Return the state of the rollout before the execution.

    Args:
        store: The store of the fleet.
        name: The name of the rollout.
        order: `approve`, `pause`, `resume`, or `abort`, which also rolls back a rollout that has succeeded.
        actor: The actor who gives the order.
        note: A note for the audit log.
        allow_plain: Whether a rollback may return devices from an encrypted version to a plain one.

    Raises:
        FleetError: There is no such rollout, or its state does not allow the order. After the end of the
            rollout, an abort also fails if later rollouts control all its devices, or if it would restore a
            plain version without `allow_plain`.
    """
    with store.transaction() as session:
        row = find_row(session, name, will_change=True)
        fits = {
            "pause": ("running",),
            "resume": ("paused",),
            "approve": ("running", "paused"),
            "abort": ("running", "paused", "succeeded"),
        }
        if row.state not in fits[order]:
            expected = " or ".join(fits[order])
            raise FleetError(
                f"rollout '{name}' is {row.state}, expected {expected} to {order} it;"
                " an order takes effect at the manager's next turn, so look again"
            )
        if order == "abort":
            others = _count_overridden(session, row)
            if plain := list_plain_returns(session, row):
                if not allow_plain:
                    raise FleetError(
                        f"rollout '{name}' brought {', '.join(plain)} encrypted, and before it devices ran a"
                        " plain version; to go back to that, allow it: `edgekit fleet rollback"
                        f" {name} --allow-plain`, `allow_plain` in the API, or the box in the console"
                    )
                note = f"{note}; plain versions allowed" if note else "plain versions allowed"
            if others:
                stay = ", ".join(f"{count} by '{other}'" for other, count in sorted(others.items()))
                stay = f"other rollouts have decided since on devices, which stay: {stay}"
                note = f"{note}; {stay}" if note else stay
            row.because = f"{actor} ordered the way back{': ' * bool(note)}{note}"
            if row.state == "succeeded":
                row.state, row.ended_at = "returning", None
        log_entries(session, name, actor, [OrderEntry(order=order, who=actor, note=note)], time.time())
    return find_rollout(store, name)


def list_plain_returns(session: Session, row: RolloutRow) -> list[str]:
    """Return the models that an abort would roll back from an encrypted version to a plain one.

    The result is empty unless the rollout has succeeded. A rollout that is still open can always be rolled
    back, because devices still have the plain version.
    """
    if row.state != "succeeded":
        return []
    is_encrypted = (ReleasePackageRow.release == row.release) & (ReleasePackageRow.key_id != "")
    models = []
    for model in session.scalars(select(ReleasePackageRow.model).where(is_encrypted).distinct()):
        before = MemberRow.before[model]
        ran_plain = select(MemberRow.device).where(
            MemberRow.rollout == row.name,
            before["version"].as_string() != "",
            func.coalesce(before["key_id"].as_string(), "") == "",
        )
        if session.scalars(ran_plain.limit(1)).first():
            models.append(model)
    return sorted(models)


def _count_overridden(session: Session, row: RolloutRow) -> dict[str, int]:
    """Return the number of devices of `row` that later rollouts have taken over, by rollout.

    Raises:
        FleetError: Later rollouts have taken over all devices.
    """
    models = select(ReleasePackageRow.model).where(ReleasePackageRow.release == row.release)
    by = WantedModelRow.document["rollout"].as_string()
    is_own = or_(WantedModelRow.rollout == row.name, by == row.name)
    desired_count = (
        select(WantedModelRow.rollout, by, func.count(WantedModelRow.device.distinct()))
        .join(MemberRow, MemberRow.device == WantedModelRow.device)
        .where(MemberRow.rollout == row.name, MemberRow.wave >= 0, MemberRow.state != "waiting")
        .where(WantedModelRow.model.in_(models))
        .group_by(WantedModelRow.rollout, by)
    )
    others: dict[str, int] = {}
    for rollout, returning, count in session.execute(
        desired_count.where(func.coalesce(is_own, false()).is_(False))
    ):
        name = rollout or returning or "another one"
        others[name] = others.get(name, 0) + count
    if (
        others
        and row.state == "succeeded"
        and session.execute(desired_count.where(is_own).limit(1)).first() is None
    ):
        names = ", ".join(f"'{name}'" for name in sorted(others))
        raise FleetError(
            f"rollout '{row.name}' decides on none of its devices any more: {names} came after it; roll that"
            " back"
        )
    return others


def list_rollouts(store: Store, *, after: str = "", limit: int | None = None) -> list[RolloutSummary]:
    """Return rollouts, newest first.

    Args:
        store: The store of the fleet.
        after: The name of the rollout after which the list begins. If empty, it begins with the newest.
        limit: The maximum number of rollouts.

    Raises:
        NotFoundError: There is no rollout `after`.
    """
    statement = select(RolloutRow).order_by(RolloutRow.created_at.desc(), RolloutRow.name).limit(limit)
    with store.snapshot() as session:
        if after:
            statement = statement.where(follows(RolloutRow, find_row(session, after).created_at, after))
        rows = session.scalars(statement).all()
        counts: dict[str, dict[str, int]] = {}
        for rollout, state, count in session.execute(
            select(MemberRow.rollout, MemberRow.state, func.count())
            .where(MemberRow.rollout.in_([row.name for row in rows]))
            .group_by(MemberRow.rollout, MemberRow.state)
        ):
            counts.setdefault(rollout, {})[state] = count
        return [_summarize(row, counts.get(row.name, {})) for row in rows]


def find_rollout(store: Store, name: str) -> RolloutSummary:
    """Return the current state of a rollout.

    Raises:
        FleetError: There is no rollout of that name.
    """
    with store.snapshot() as session:
        row = find_row(session, name)
        counts = session.execute(
            select(MemberRow.state, func.count()).where(MemberRow.rollout == name).group_by(MemberRow.state)
        )
        return _summarize(row, dict(counts.all()))


def replay_rollout(store: Store, name: str) -> list[Difference]:
    """Repeat the decisions of a rollout from its log, and return those that differ. There should be none.

    Raises:
        FleetError: There is no such rollout, or its log is damaged.
    """
    with store.snapshot() as session:
        find_row(session, name)
        entries = [(at, entry) for _, at, entry in read_entries(session, name)]
    return replay(entries)[1]


def find_tag_effects(store: Store, device: str, tags: Mapping[str, str]) -> list[str]:
    """Return a sentence for each open rollout that is affected by a change of a device's tags.

    Either the device would join the rollout, or it is in the cohort and would no longer match the selector.

    Args:
        store: The store of the fleet.
        device: The name of the device.
        tags: The new tags. An empty value removes the tag.

    Raises:
        FleetError: There is no such device.
    """
    with store.snapshot() as session:
        row = find_device(session, device)
        after = {key: value for key, value in {**row.tags, **tags}.items() if value}
        effects = []
        for rollout in session.scalars(select(RolloutRow).where(RolloutRow.state.in_(OPEN_STATES))):
            try:
                selector = parse_selector(rollout.selector)
            except FleetError:  # an older version accepted it: the cohort stays as it is
                continue
            was, will = (selector.matches(list_attributes(row, tags)) for tags in (row.tags, after))
            if was == will:
                continue
            if will and rollout.settings.get("is_dynamic"):
                effects.append(
                    f"{device} joins rollout '{rollout.name}' and gets release '{rollout.release}'"
                )
            elif not will and session.get(MemberRow, (rollout.name, device)) is not None:
                effects.append(
                    f"{device} no longer matches rollout '{rollout.name}', whose cohort keeps it: it still"
                    f" gets release '{rollout.release}'"
                )
        return effects


def find_row(session: Session, name: str, *, will_change: bool = False) -> RolloutRow:
    """Return the row of a rollout. With `will_change`, it is locked until the transaction ends.

    Raises:
        NotFoundError: There is no rollout of that name.
    """
    row = session.get(RolloutRow, name, with_for_update=will_change or None)
    if row is None:
        newest = session.scalars(
            select(RolloutRow.name).order_by(RolloutRow.created_at.desc()).limit(5)
        ).all()
        raise NotFoundError(f"no rollout '{name}', the newest are: {', '.join(newest) or 'none'}")
    return row


def _summarize(row: RolloutRow, members: Mapping[str, int]) -> RolloutSummary:
    waves = tuple(row.settings["waves"])
    return read_record(RolloutSummary, row, wave=row.wave + 1, waves=waves, members=members)
