"""Classes of devices without an index of their own."""

from alembic import op

revision = "v0009"
down_revision = "v0008"


def upgrade() -> None:
    """Bring the tables to this form."""
    # SQLite preferred it to the index that holds status and class, and read each device of a class.
    op.drop_index(op.f("ix_devices_target"), "devices")
