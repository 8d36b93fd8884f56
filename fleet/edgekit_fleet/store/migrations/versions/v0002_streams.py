"""The streams that the fleet wants of each device."""

from alembic import op
from sqlalchemy import JSON, Column, inspect

revision = "v0002"
down_revision = "v0001"


def upgrade() -> None:
    """Add the column unless it exists."""
    if "streams" not in {column["name"] for column in inspect(op.get_bind()).get_columns("devices")}:
        op.add_column("devices", Column("streams", JSON, nullable=False, server_default="{}"))
