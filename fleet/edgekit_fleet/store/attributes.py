"""Search attributes of devices, in a separate table because JSON columns are too slow to search."""

import itertools
from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from edgekit_fleet.store.database import insert_many
from edgekit_fleet.store.due import mark_due
from edgekit_fleet.store.tables import AttributeRow, DeviceRow, SampleOrderRow

CHANGING: Final = frozenset(("battery", "boot", "clock", "free_bytes"))
"""Facts that change with nearly every report. They cannot be searched for."""
MODEL: Final = "model:"
"""The prefix of the attribute of a model. Its value is the version that runs."""
_MOST: Final = 256  # attributes that a device states. A report has room for thousands
_BATCH: Final = 500  # devices. A statement may have 999 parameters


def list_models(reported: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the running version of each model in a report, or an empty dict if there is no report."""
    return {model["model"]: model["version"] for model in (reported or {}).get("models", ())}


def list_stable(facts: Mapping[str, str], models: Mapping[str, str]) -> dict[str, str]:
    """Return at most 256 search attributes of a device.

    The version of each model has the name `model:NAME` and comes first. The facts follow, except those in
    `CHANGING`.

    Args:
        facts: The facts from the last report of the device.
        models: The running version of each model.
    """
    stable = {name: value for name, value in facts.items() if name not in CHANGING}
    versions = {f"{MODEL}{model}": version for model, version in models.items()}
    return dict(itertools.islice({**versions, **stable, **versions}.items(), _MOST))


def make_rows(device: str, stable: Mapping[str, str], tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the `AttributeRow`s of a device as dicts. A tag replaces a fact of the same name.

    `stable` is a result of `list_stable`.
    """
    attributes = {_clean(name, 128): _clean(value, 256) for name, value in {**stable, **tags}.items()}
    return [{"device": device, "name": name, "value": value} for name, value in attributes.items()]


def replace_attributes(session: Session, stable: Mapping[str, Mapping[str, str]]) -> None:
    """Write the search attributes of devices whose tags, facts or models have changed.

    If there are orders for samples, also schedule new desired documents for these devices.

    Args:
        session: The session of the change.
        stable: The result of `list_stable` for each device.
    """
    names = sorted(stable)
    for begin in range(0, len(names), _BATCH):
        batch = names[begin : begin + _BATCH]
        tags = session.execute(select(DeviceRow.name, DeviceRow.tags).where(DeviceRow.name.in_(batch))).all()
        session.execute(delete(AttributeRow).where(AttributeRow.device.in_(batch)))
        insert_many(
            session, AttributeRow, [row for name, own in tags for row in make_rows(name, stable[name], own)]
        )
    if names and session.scalar(select(SampleOrderRow.id).limit(1)) is not None:
        mark_due(session, names)  # an order may mean them now, or no longer


def _clean(text: str, most: int) -> str:
    """Return text that any database can store, whatever the device reported."""
    return text[:most].replace("\0", "").encode("utf-8", "replace").decode()
