"""The key that signed a desired document."""

import sqlalchemy as sa
from alembic import op

revision = "v0010"
down_revision = "v0009"


def upgrade() -> None:
    """Bring the tables to this form."""
    op.add_column("desired", sa.Column("key_id", sa.String(length=64), nullable=False, server_default=""))
