"""The page that plans and starts a rollout. It shows which devices are included, and why others are not."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlencode

from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgekit_fleet.console.rollouts.background import Background, Lookup
from edgekit_fleet.console.rollouts.queries import Reason
from edgekit_fleet.console.shell import Console
from edgekit_fleet.operations import saved
from edgekit_fleet.operations.rollouts import (
    PlanSummary,
    RolloutLimits,
    StartRollout,
    propose_name,
    start_rollout,
    sum_plan,
)
from edgekit_fleet.rollouts.gate_table import LIMITS
from edgekit_fleet.rollouts.preview import DevicePlan, DeviceRefusal
from edgekit_fleet.rollouts.progress import RolloutSettings
from edgekit_fleet.rollouts.waves import DEFAULT_WAVES
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.tables import ReleaseRow
from edgekit_runtime.errors import EdgekitError, FleetError

_RELEASES: Final = 50
_MAX_NAMES: Final = 5
_MAX_DEVICES: Final = 10**9
_DEFAULTS: Final = RolloutSettings(waves=(1,), minimum=1)

FIELDS: Final[Mapping[str, str]] = {
    "release": "",
    "selector": "all",
    "waves": DEFAULT_WAVES,
    "minimum": "",
    "trial": _DEFAULTS.trial,
    "approval": _DEFAULTS.approval,
    "window": "",
    "soak_min": f"{_DEFAULTS.soak_s / 60:g}",
    **{limit.name: "" for limit in LIMITS},
}
"""A dict from fields of the form to their initial values. An empty limit means its default."""
_OPTIONS: Final = ("trial", "approval", "window", "soak_min", *(limit.name for limit in LIMITS))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassPlan:
    """The packages for the devices of one class.

    Attributes:
        packages: The packages, such as `digits 1.2.0`.
        bytes: The total size of the downloads of all devices.
        minutes: The download time of the slowest device in minutes.
        notes: A dict from a note about missing information to the number of devices that it concerns.
    """

    target: str
    devices: int
    packages: tuple[str, ...]
    bytes: int
    minutes: float
    notes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """A plan as it is shown on the page.

    Attributes:
        some: The names of a few devices that get packages.
        others: The number of matching devices that get no packages.
        classes: The packages of each device class.
        refused: The reasons why other devices get no packages.
        bytes: The total size of the downloads.
        minutes: The download time of the slowest device in minutes.
        minimum: The number of devices of the first step.
    """

    summary: PlanSummary
    some: Sequence[str]
    others: int
    classes: Sequence[ClassPlan]
    refused: Sequence[Reason]
    bytes: int
    minutes: float
    minimum: int


class PlanPages:
    """The page of plans. It stays responsive during the 2 s that a plan for 100,000 devices takes."""

    def __init__(self, closing: ExitStack) -> None:
        self._plans: Background[PlanView] = Background(closing)

    def show(self, console: Console, request: Request) -> Response:
        """Return the form for a rollout with the fields in the query, and the plan for this rollout."""
        fields = {name: request.query_params.get(name, value) for name, value in FIELDS.items()}
        return self._render(console, request, fields)

    def start(self, console: Console, request: Request) -> Response:
        """Start the rollout in the form, and redirect to it. An error is shown in the form."""
        form = request.state.form
        fields = {name: form.get(name, value) for name, value in FIELDS.items()}
        try:
            rollout = _read_request(fields, form.get("name", ""))
            name = start_rollout(console.store, rollout, request.state.principal.name)
        except EdgekitError as error:
            return self._render(console, request, fields, str(error))
        return console.redirect(request, f"/rollouts/{quote(name)}", f"{name} began.")

    def _render(
        self, console: Console, request: Request, fields: Mapping[str, str], problem: str = ""
    ) -> Response:
        with console.store.snapshot() as session:
            releases = session.scalars(
                select(ReleaseRow.name)
                .where(ReleaseRow.withdrawn_at.is_(None))
                .order_by(ReleaseRow.created_at.desc())
                .limit(_RELEASES)
            ).all()
            windows = saved.list_windows(session)
            name = propose_name(session, fields["release"])
        is_again = "again" in request.query_params
        lookup: Lookup[PlanView] = Lookup(None, True)
        if fields["release"]:
            try:
                rollout = _read_request(fields)
                key = tuple(fields.values())
                lookup = self._plans.find(key, lambda: _make_view(console.store, rollout), is_again=is_again)
            except EdgekitError as error:
                problem = problem or str(error)
        return console.render(
            request,
            "rollout_plan.html",
            status=422 if problem and not is_again else 200,  # the open page takes no part with an error
            fields=fields,
            releases=releases,
            release_choices=[("", "choose one"), *((release, release) for release in releases)],
            has_options=any(fields[name] != FIELDS[name] for name in _OPTIONS),
            limits=LIMITS,
            windows=windows,
            problem=problem,
            plan=lookup.result if lookup.is_current else None,
            is_current=lookup.is_current,
            is_again=is_again,
            again=f"/rollouts/new?{urlencode({**fields, 'again': '1'})}",
            # The name is fixed here: a form that is sent twice starts one rollout.
            name=name,
        )


def _make_view(store: Store, request: StartRollout) -> PlanView:
    plan = sum_plan(store, request)
    return PlanView(
        summary=plan,
        some=_first(names for _, names in plan.planned),
        others=sum(len(names) for _, names in plan.refused),
        classes=_sum_classes(plan.planned),
        refused=_group_refused(plan.refused),
        bytes=sum(planned_device.bytes * len(names) for planned_device, names in plan.planned),
        minutes=max((planned_device.minutes for planned_device, _ in plan.planned), default=0.0),
        minimum=min(plan.settings.minimum, plan.devices),
    )


def _read_request(fields: Mapping[str, str], name: str = "") -> StartRollout:
    limits = {limit.name: _read_number(fields, limit.name) for limit in LIMITS}
    minimum = _read_number(fields, "minimum")
    if minimum is not None and not (minimum.is_integer() and 1 <= minimum <= _MAX_DEVICES):
        raise FleetError(f"first step: {fields['minimum']!r} is no number of devices")
    return StartRollout(
        release=fields["release"],
        selector=fields["selector"].strip() or "all",
        waves=fields["waves"].strip() or DEFAULT_WAVES,
        minimum=None if minimum is None else int(minimum),
        name=name,
        limits=RolloutLimits(**limits),
        trial=fields["trial"],  # type: ignore[arg-type]  # the settings of the rollout check it
        approval=fields["approval"],  # type: ignore[arg-type]
        soak_s=60.0 * (_read_number(fields, "soak_min") or 0.0),
        window=fields["window"].strip() or None,
    )


def _read_number(fields: Mapping[str, str], name: str) -> float | None:
    text = fields[name].strip().replace(",", ".")
    try:
        return float(text) if text else None
    except ValueError as cause:
        raise FleetError(f"{name.replace('_', ' ')}: {text[:40]!r} is no number") from cause


def _sum_classes(planned: Sequence[tuple[DevicePlan, Sequence[str]]]) -> list[ClassPlan]:
    of_class: dict[str, list[tuple[DevicePlan, int]]] = {}
    for planned_device, names in planned:
        of_class.setdefault(planned_device.target, []).append((planned_device, len(names)))
    plans = []
    for target, some in sorted(of_class.items()):
        notes: dict[str, int] = {}
        for planned_device, count in some:
            if planned_device.note:
                notes[planned_device.note] = notes.get(planned_device.note, 0) + count
        packages = {
            f"{package.model} {package.version}"
            for planned_device, _ in some
            for package in planned_device.packages
        }
        plans.append(
            ClassPlan(
                target=target,
                devices=sum(count for _, count in some),
                packages=tuple(sorted(packages)),
                bytes=sum(planned_device.bytes * count for planned_device, count in some),
                minutes=max(planned_device.minutes for planned_device, _ in some),
                notes=notes,
            )
        )
    return plans


def _group_refused(refused: Sequence[tuple[DeviceRefusal, Sequence[str]]]) -> list[Reason]:
    of_code: dict[str, list[tuple[DeviceRefusal, Sequence[str]]]] = {}
    for refusal, names in refused:
        of_code.setdefault(refusal.code, []).append((refusal, names))
    reasons = [
        Reason("", code, some[0][0].reason, sum(len(names) for _, names in some), _first(n for _, n in some))
        for code, some in of_code.items()
    ]
    return sorted(reasons, key=lambda reason: -reason.count)


def _first(groups: Iterable[Sequence[str]]) -> list[str]:
    """Return the first few names of groups, each of which is sorted."""
    return sorted(itertools.chain.from_iterable(names[:_MAX_NAMES] for names in groups))[:_MAX_NAMES]


def list_routes(console: Console) -> list[Route]:
    plans = PlanPages(console.closing)
    return [
        console.post("/rollouts", plans.start, "rollout"),
        console.get("/rollouts/new", plans.show, "rollout"),
    ]
