"""Devices that are searched: a table of their attributes, indexes, and statuses as lists show them."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.orm import Session

from edgekit_fleet.store.attributes import list_models, list_stable, replace_attributes

revision = "v0005"
down_revision = "v0004"


def upgrade() -> None:
    """Bring the tables to this form."""
    op.create_table(
        "device_attributes",
        sa.Column("device", sa.String(length=128), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("value", sa.String(length=256), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["devices.name"], name=op.f("fk_device_attributes_device")),
        sa.PrimaryKeyConstraint("device", "name", name=op.f("pk_device_attributes")),
    )
    op.create_index(
        op.f("ix_device_attributes_name_value_device"), "device_attributes", ["name", "value", "device"]
    )
    op.create_index(
        op.f("ix_devices_status_is_online_name_target"), "devices", ["status", "is_online", "name", "target"]
    )
    op.create_index(
        op.f("ix_devices_is_online_last_seen_at_status"), "devices", ["is_online", "last_seen_at", "status"]
    )
    op.create_index(op.f("ix_devices_certificate_expires_at"), "devices", ["certificate_expires_at"])
    op.execute("UPDATE devices SET status = 'revoked' WHERE revoked_at IS NOT NULL")
    _fill()


def _fill() -> None:
    devices = sa.table(
        "devices", sa.column("name"), sa.column("facts", sa.JSON), sa.column("reported", sa.JSON)
    )
    with Session(op.get_bind()) as session:
        attributes = {
            row.name: list_stable(row.facts, list_models(row.reported))
            for row in session.execute(sa.select(devices))
        }
        replace_attributes(session, attributes)
        session.flush()
