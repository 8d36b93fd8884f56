"""Reads devices and releases from the store, in the form that `preview` needs."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import ColumnElement, String, and_, case, cast, func, or_, select
from sqlalchemy.orm import Session

from edgekit_fleet.rollouts.preview import DeviceView, PackageView, Situation
from edgekit_fleet.rollouts.selector import Selector
from edgekit_fleet.rollouts.selector_sql import compile_selector
from edgekit_fleet.store.attributes import list_models, list_stable
from edgekit_fleet.store.tables import (
    DeviceRow,
    MemberRow,
    ReleasePackageRow,
    ReleaseRow,
    RolloutRow,
    WantedModelRow,
    read_record,
)
from edgekit_runtime.agent.conditions import count_needed_bytes
from edgekit_runtime.agent.documents import DesiredModel
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.errors import FleetError, NotFoundError

_BATCH: Final = 500  # devices. A statement may have 999 parameters


def list_attributes(row: DeviceRow, tags: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the attributes of a device that selectors match. A tag replaces a fact of the same name.

    Args:
        row: The row of the device.
        tags: The tags to use instead of the tags in the row.
    """
    online = "yes" if row.is_online else "no"
    own = {"class": row.target, "name": row.name, "status": row.status, "online": online}
    stable = list_stable(row.facts, list_models(row.reported))
    return {**stable, **(row.tags if tags is None else tags), **own}


def read_packages(session: Session, release: str) -> tuple[PackageView, ...]:
    """Return the packages of a release.

    Raises:
        FleetError: The release does not exist or was withdrawn.
    """
    row = session.get(ReleaseRow, release)
    if row is None:
        newest = session.scalars(
            select(ReleaseRow.name).order_by(ReleaseRow.created_at.desc()).limit(5)
        ).all()
        raise NotFoundError(f"no release '{release}', the newest are: {', '.join(newest) or 'none'}")
    if row.withdrawn_at is not None:
        raise FleetError(f"release '{release}' was withdrawn; make another one")
    rows = session.scalars(select(ReleasePackageRow).where(ReleasePackageRow.release == release))
    return tuple(
        read_record(
            PackageView,
            row,
            engines=tuple(row.needs.get("engines", ())),
            memory_bytes=row.needs.get("memory_bytes"),
            agreement=row.needs.get("min_agreement"),
            deltas=tuple(row.deltas),
            is_encrypted=bool(row.key_id),
        )
        for row in rows
    )


def list_encrypted(session: Session, models: Collection[str]) -> Mapping[tuple[str, str], str]:
    """Return all encrypted packages of some models, as a dict from (model, manifest SHA-256) to release."""
    columns = ReleasePackageRow.model, ReleasePackageRow.manifest_sha256, ReleasePackageRow.release
    rows = session.execute(
        select(*columns).where(ReleasePackageRow.model.in_(models), ReleasePackageRow.key_id != "")
    )
    return {(model, digest): release for model, digest, release in rows}


def read_devices(session: Session, selector: Selector, packages: Sequence[PackageView]) -> list[DeviceView]:
    """Return a view of each device that matches a selector. See `read_groups` for the fields."""
    return [
        replace(group, name=name)
        for group, names in read_groups(session, selector, packages)
        for name in names
    ]


def read_groups(
    session: Session, selector: Selector, packages: Sequence[PackageView]
) -> list[tuple[DeviceView, list[str]]]:
    """Return the devices that match a selector, in groups of devices that differ only in their names.

    The database does the grouping, so that other threads need not wait while 100,000 rows become objects.

    Args:
        session: The session of the store.
        selector: The selector of the rollout.
        packages: The packages of the release.

    Returns:
        Pairs of the view of a group and the names of its devices. In the view, `rollout` is the open rollout
        that changes a model of `packages` on these devices, or empty. `free_bytes` is only set if the disk
        might be too small for the packages.
    """
    open_members = session.execute(
        select(MemberRow.device, MemberRow.rollout)
        .join(RolloutRow, RolloutRow.name == MemberRow.rollout)
        .join(ReleasePackageRow, ReleasePackageRow.release == RolloutRow.release)
        .where(
            or_(
                RolloutRow.state.in_(("running", "paused")),
                # Devices that have gone back are free, also while others have not.
                and_(RolloutRow.state == "returning", MemberRow.state.not_in(("waiting", "returned"))),
            ),
            ReleasePackageRow.model.in_({package.model for package in packages}),
            MemberRow.wave >= 0,
        )
    )
    busy = dict(open_members.all())
    # By the number of digits: the text may be anything, which PostgreSQL does not compare with a number.
    digits = len(str(count_needed_bytes([package.size_bytes for package in packages] or [0])))
    free_bytes = _read_fact("free_bytes")
    free_bytes = case((func.length(free_bytes) <= digits, free_bytes))
    columns = [column.label(f"c{number}") for number, column in enumerate((free_bytes, *_SITUATION))]
    alike = select(DeviceRow.name, *columns).where(compile_selector(session, selector)).subquery()
    keys = [alike.c[column.name] for column in columns]
    statement = select(func.aggregate_strings(alike.c.name, ","), *keys).group_by(*keys)
    encrypted = list_encrypted(session, {package.model for package in packages}).keys()
    groups = []
    for names, free, *situation in session.execute(statement):
        of_rollout: dict[str, list[str]] = {}
        for name in sorted(names.split(",")):
            of_rollout.setdefault(busy.get(name, ""), []).append(name)
        for rollout, some in of_rollout.items():
            view = DeviceView(some[0], _make_situation(encrypted, rollout, situation), free)
            groups.append((view, some))
    return groups


def _read_fact(name: str) -> ColumnElement[str]:
    fact: ColumnElement[str] = DeviceRow.facts[name].as_string()
    return fact


_FACTS: Final = ("memory_bytes", "engines", "link_mbit_s")
_SITUATION: Final = (
    _read_fact("free_bytes").is_not(None),
    DeviceRow.target,
    DeviceRow.revoked_at.is_not(None),
    DeviceRow.decryption_key != "",
    # Read as text, because few texts differ among many devices, and only those are parsed.
    cast(DeviceRow.pinned, String),
    DeviceRow.reported["models"].as_string(),
    *map(_read_fact, _FACTS),
)


def _make_situation(
    encrypted: Collection[tuple[str, str]], rollout: str, situation: Sequence[Any]
) -> Situation:
    is_disk_known, target, is_revoked, can_decrypt, pinned, models, *facts = situation
    reported = json.loads(models or "[]")
    versions = {model["model"]: (model["version"], model["manifest_sha256"]) for model in reported}
    return Situation(
        target=target,
        facts={name: value for name, value in zip(_FACTS, facts, strict=True) if value is not None},
        versions=versions,
        encrypted=tuple(model for model, (_, digest) in versions.items() if (model, digest) in encrypted),
        has_reported=models is not None,
        pinned=tuple(json.loads(pinned)),
        rollout=rollout,
        is_revoked=is_revoked,
        can_decrypt=can_decrypt,
        is_disk_known=is_disk_known,
    )


def read_before(
    session: Session, devices: list[DeviceView], models: frozenset[str]
) -> dict[str, dict[str, Any]]:
    """Return the version of each model that each device runs.

    The result maps the device and then the model to a `DesiredModel` as plain values, or to an empty dict if
    the device does not run the model. A device that has not reported is left out, because it may run models
    from its system image.
    """
    columns = WantedModelRow.device, WantedModelRow.model, WantedModelRow.rollout, WantedModelRow.document
    statement = select(*columns).where(WantedModelRow.model.in_(models), WantedModelRow.is_removed.is_(False))
    desired = {}
    names = sorted(device.name for device in devices)
    for begin in range(0, len(names), _BATCH):
        batch = names[begin : begin + _BATCH]
        rows = session.execute(statement.where(WantedModelRow.device.in_(batch)))
        for device, model, rollout, document in rows:
            desired[device, model] = {**document, "rollout": rollout or ""}
    released = {
        (row.target, row.manifest_sha256): row
        for row in session.scalars(select(ReleasePackageRow).where(ReleasePackageRow.model.in_(models)))
    }
    before: dict[str, dict[str, Any]] = {}
    for device in devices:
        versions = device.situation.versions
        if device.situation.has_reported:
            before[device.name] = {model: {} for model in models}
        for model in models & versions.keys():
            version, digest = versions[model]
            document = desired.get((device.name, model))
            if document is None or document.get("manifest_sha256") != digest:
                package = released.get((device.situation.target, digest))
                # A version that the fleet never released is still in the device's spare slot: its digest is
                # all that a return needs.
                document = to_plain(
                    DesiredModel(
                        model=model,
                        version=version,
                        manifest_sha256=digest,
                        path=package.path if package else "",
                        size_bytes=package.size_bytes if package else 0,
                        sha256=package.sha256 if package else "",
                        execution="",
                        release=package.release if package else "",
                        rollout="",
                        key_id=package.key_id if package else "",
                    )
                )
            if version:
                before[device.name][model] = document
    return before
