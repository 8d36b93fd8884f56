"""The settings that the fleet wants of each device, and the last lines of its logs."""

from alembic import op
from sqlalchemy import JSON, Column, inspect

from edgekit_fleet.store.tables import DeviceLogRow, Table

revision = "v0004"
down_revision = "v0003"


def upgrade() -> None:
    """Add missing columns and the table."""
    columns = {column["name"] for column in inspect(op.get_bind()).get_columns("devices")}
    for name in ("settings", "logs"):
        if name not in columns:
            op.add_column("devices", Column(name, JSON, nullable=False, server_default="{}"))
    Table.metadata.create_all(op.get_bind(), [Table.metadata.tables[DeviceLogRow.__tablename__]])
