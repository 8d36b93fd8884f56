"""Failed attempts, and addresses of users, which all managers share."""

import sqlalchemy as sa
from alembic import op

revision = "v0007"
down_revision = "v0006"


def upgrade() -> None:
    """Bring the tables to this form."""
    op.create_table(
        "failures",
        sa.Column("key_sha256", sa.String(length=64), nullable=False),
        sa.Column("begun_at", sa.Float(precision=53), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("key_sha256", name=op.f("pk_failures")),
    )
    op.create_index(op.f("ix_failures_begun_at"), "failures", ["begun_at"])
    op.create_table(
        "known_addresses",
        sa.Column("user", sa.String(length=128), nullable=False),
        sa.Column("address", sa.String(length=128), nullable=False),
        sa.Column("seen_at", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["user"], ["users.name"], name=op.f("fk_known_addresses_user")),
        sa.PrimaryKeyConstraint("user", "address", name=op.f("pk_known_addresses")),
    )
