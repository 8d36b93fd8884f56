"""Second factors of users."""

from alembic import op
from sqlalchemy import JSON, BigInteger, Boolean, Column, Float, ForeignKey, String, inspect

revision = "v0005"
down_revision = "v0004"


def upgrade() -> None:
    """Add the table unless it exists."""
    if not inspect(op.get_bind()).has_table("second_factors"):
        op.create_table(
            "second_factors",
            Column("user", String(128), ForeignKey("users.name"), primary_key=True),
            Column("secret", String, nullable=False),
            Column("is_confirmed", Boolean, nullable=False),
            Column("last_step", BigInteger, nullable=False),
            Column("failures", BigInteger, nullable=False),
            Column("failed_at", Float(53), nullable=False),
            Column("recovery_sha256", JSON, nullable=False),
        )
