"""Windows that are kept under a name."""

import sqlalchemy as sa
from alembic import op

revision = "v0008"
down_revision = "v0007"


def upgrade() -> None:
    """Bring the tables to this form."""
    op.create_table(
        "saved_windows",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("window", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("created_by", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_saved_windows")),
    )
