"""An index for what somebody did."""

from alembic import op

revision = "v0006"
down_revision = "v0005"


def upgrade() -> None:
    """Bring the tables to this form."""
    op.create_index(op.f("ix_audit_actor_number"), "audit", ["actor", "number"])
