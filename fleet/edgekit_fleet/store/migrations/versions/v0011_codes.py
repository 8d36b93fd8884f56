"""Who made a code of enrolment."""

import sqlalchemy as sa
from alembic import op

revision = "v0011"
down_revision = "v0010"


def upgrade() -> None:
    """Bring the tables to this form."""
    op.add_column("enrolment_codes", sa.Column("created_by", sa.String(), nullable=False, server_default=""))
