"""Samples from the field: the setting of the fleet, orders, and what has come."""

from alembic import op
from sqlalchemy import JSON, BigInteger, Boolean, Column, Float, ForeignKey, String, inspect

revision = "v0006"
down_revision = "v0005"


def upgrade() -> None:
    """Make the tables unless they exist."""
    if "samples" in inspect(op.get_bind()).get_table_names():
        return
    name = String(128)
    op.create_table(
        "sample_settings",
        Column("number", BigInteger, primary_key=True, autoincrement=False),
        Column("is_on", Boolean, nullable=False),
        Column("days", Float(53), nullable=False),
        Column("max_bytes", BigInteger, nullable=False),
        Column("public_key", String, nullable=False),
        Column("changed_at", Float(53), nullable=False),
        Column("changed_by", String, nullable=False),
    )
    op.create_table(
        "sample_orders",
        Column("id", name, primary_key=True),
        Column("model", name, nullable=False),
        Column("selector", String, nullable=False),
        Column("triggers", JSON, nullable=False),
        Column("per_day", Float(53), nullable=False),
        Column("max_bytes", BigInteger, nullable=False),
        Column("ends_at", Float(53), nullable=False, index=True),
        Column("window", String(16)),
        Column("created_at", Float(53), nullable=False),
        Column("created_by", String, nullable=False),
        Column("stopped_at", Float(53)),
    )
    op.create_table(
        "samples",
        Column("id", name, primary_key=True),
        Column("device", name, ForeignKey("devices.name"), nullable=False),
        Column("order", name, nullable=False),
        Column("model", name, nullable=False),
        Column("version", String, nullable=False),
        Column("triggers", String, nullable=False),
        Column("probability", Float(53), nullable=False),
        Column("media_type", String, nullable=False),
        Column("size_bytes", BigInteger, nullable=False),
        Column("taken_at", Float(53), nullable=False),
        Column("received_at", Float(53), nullable=False),
    )
    op.create_index("ix_samples_received_at_id", "samples", ["received_at", "id"])
    op.create_index("ix_samples_device_order", "samples", ["device", "order"])
