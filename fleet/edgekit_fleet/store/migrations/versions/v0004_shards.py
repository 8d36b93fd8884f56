"""Shards of devices and rollouts, for several managers, in place of one lease."""

import sqlalchemy as sa
from alembic import op

from edgekit_fleet.store.tables import SHARDS, shard_of

revision = "v0004"
down_revision = "v0002"


def upgrade() -> None:
    """Bring the tables to this form."""
    connection = op.get_bind()
    op.create_table(
        "managers",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("holder", sa.String(length=128), nullable=False),
        sa.Column("heartbeat_at", sa.Float(precision=53), nullable=False),
        sa.Column("turned_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_managers")),
        sa.UniqueConstraint("holder", name=op.f("uq_managers_holder")),
    )
    shards = op.create_table(
        "shards",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("holder", sa.String(length=128), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_shards")),
    )
    epoch = connection.execute(sa.text("SELECT max(epoch) FROM lease")).scalar() or 0
    rows = [{"number": number, "holder": "", "epoch": epoch} for number in range(SHARDS)]
    connection.execute(shards.insert(), rows)
    op.drop_table("lease")

    op.add_column("devices", sa.Column("shard", sa.SmallInteger(), server_default="0", nullable=False))
    names = connection.execute(sa.text("SELECT name FROM devices")).scalars().all()
    if names:
        rows = [{"name": name, "shard": shard_of(name)} for name in names]
        connection.execute(sa.text("UPDATE devices SET shard = :shard WHERE name = :name"), rows)
