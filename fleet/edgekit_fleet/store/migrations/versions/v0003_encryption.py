"""Decryption keys of devices, and content keys of releases."""

from alembic import op
from sqlalchemy import Boolean, Column, Float, LargeBinary, String, false, inspect

revision = "v0003"
down_revision = "v0002"

_COLUMNS = (
    ("devices", Column("decryption_key", String, nullable=False, server_default="")),
    ("release_packages", Column("key_id", String(64), nullable=False, server_default="")),
    ("release_packages", Column("allows_plain", Boolean, nullable=False, server_default=false())),
)


def upgrade() -> None:
    """Add missing columns and the table; earlier devices and releases get no key."""
    store = inspect(op.get_bind())
    for table, column in _COLUMNS:
        if column.name not in {there["name"] for there in store.get_columns(table)}:
            op.add_column(table, column)
    if not store.has_table("content_keys"):
        op.create_table(
            "content_keys",
            Column("key_id", String(64), primary_key=True),
            Column("content_key", LargeBinary, nullable=False),
            Column("created_at", Float(53), nullable=False),
        )
