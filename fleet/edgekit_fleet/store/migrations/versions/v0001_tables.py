"""The tables of the fleet."""

import sqlalchemy as sa
from alembic import op

revision = "v0001"
down_revision = None


def upgrade() -> None:
    """Bring the tables to this form."""
    op.create_table(
        "audit",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.Column("previous_sha256", sa.String(length=64), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_audit")),
        sa.UniqueConstraint("previous_sha256", name=op.f("uq_audit_previous_sha256")),
    )
    with op.batch_alter_table("audit", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_audit_action"), ["action"], unique=False)
        batch_op.create_index(batch_op.f("ix_audit_subject"), ["subject"], unique=False)

    op.create_table(
        "devices",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("target", sa.String(length=128), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("public_key", sa.LargeBinary(), nullable=False),
        sa.Column("certificate_serial", sa.String(length=64), nullable=False),
        sa.Column("certificate_expires_at", sa.Float(precision=53), nullable=False),
        sa.Column("enrolled_at", sa.Float(precision=53), nullable=False),
        sa.Column("revoked_at", sa.Float(precision=53), nullable=True),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("because", sa.String(), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("reported", sa.JSON(), nullable=True),
        sa.Column("desired_held", sa.BigInteger(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("hello_sequence", sa.BigInteger(), nullable=False),
        sa.Column("event_sequence", sa.BigInteger(), nullable=False),
        sa.Column("is_online", sa.Boolean(), nullable=False),
        sa.Column("last_seen_at", sa.Float(precision=53), nullable=True),
        sa.Column("pinned", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_devices")),
    )
    with op.batch_alter_table("devices", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_devices_target"), ["target"], unique=False)

    op.create_table(
        "enrolment_codes",
        sa.Column("secret_sha256", sa.String(length=64), nullable=False),
        sa.Column("device", sa.String(length=128), nullable=False),
        sa.Column("target", sa.String(length=128), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("expires_at", sa.Float(precision=53), nullable=False),
        sa.Column("used_at", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("secret_sha256", name=op.f("pk_enrolment_codes")),
    )
    with op.batch_alter_table("enrolment_codes", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_enrolment_codes_device"), ["device"], unique=False)

    op.create_table(
        "lease",
        sa.Column("name", sa.String(length=16), nullable=False),
        sa.Column("holder", sa.String(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("heartbeat_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_lease")),
    )
    op.create_table(
        "releases",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("created_by", sa.String(), nullable=False),
        sa.Column("note", sa.String(), nullable=False),
        sa.Column("approved_at", sa.Float(precision=53), nullable=True),
        sa.Column("approved_by", sa.String(), nullable=True),
        sa.Column("withdrawn_at", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_releases")),
    )
    op.create_table(
        "desired",
        sa.Column("device", sa.String(length=128), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("content_sha256", sa.String(length=64), nullable=False),
        sa.Column("envelope", sa.LargeBinary(), nullable=False),
        sa.Column("issued_at", sa.Float(precision=53), nullable=False),
        sa.Column("expires_at", sa.Float(precision=53), nullable=False),
        sa.Column("is_due", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["devices.name"], name=op.f("fk_desired_device")),
        sa.PrimaryKeyConstraint("device", name=op.f("pk_desired")),
    )
    with op.batch_alter_table("desired", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_desired_is_due"), ["is_due"], unique=False)

    op.create_table(
        "executions",
        sa.Column("execution", sa.String(length=128), nullable=False),
        sa.Column("rollout", sa.String(length=128), nullable=True),
        sa.Column("device", sa.String(length=128), nullable=False),
        sa.Column("model", sa.String(length=128), nullable=False),
        sa.Column("version", sa.String(length=128), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("code", sa.String(length=64), nullable=False),
        sa.Column("done_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sent_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("changed_at", sa.Float(precision=53), nullable=False),
        sa.Column("ended_at", sa.Float(precision=53), nullable=True),
        sa.ForeignKeyConstraint(["device"], ["devices.name"], name=op.f("fk_executions_device")),
        sa.PrimaryKeyConstraint("execution", name=op.f("pk_executions")),
    )
    with op.batch_alter_table("executions", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_executions_device_model"), ["device", "model"], unique=False)
        batch_op.create_index(batch_op.f("ix_executions_rollout_state"), ["rollout", "state"], unique=False)

    op.create_table(
        "figures",
        sa.Column("device", sa.String(length=128), nullable=False),
        sa.Column("model", sa.String(length=128), nullable=False),
        sa.Column("version", sa.String(length=128), nullable=False),
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("figures", sa.JSON(), nullable=False),
        sa.Column("reported_at", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["devices.name"], name=op.f("fk_figures_device")),
        sa.PrimaryKeyConstraint("device", "model", "version", "hour", name=op.f("pk_figures")),
    )
    with op.batch_alter_table("figures", schema=None) as batch_op:
        batch_op.create_index(
            batch_op.f("ix_figures_model_version_hour"), ["model", "version", "hour"], unique=False
        )

    op.create_table(
        "release_packages",
        sa.Column("release", sa.String(length=128), nullable=False),
        sa.Column("model", sa.String(length=128), nullable=False),
        sa.Column("target", sa.String(length=128), nullable=False),
        sa.Column("version", sa.String(length=128), nullable=False),
        sa.Column("manifest_sha256", sa.String(length=64), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("needs", sa.JSON(), nullable=False),
        sa.Column("deltas", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["release"], ["releases.name"], name=op.f("fk_release_packages_release")),
        sa.PrimaryKeyConstraint("release", "model", "target", name=op.f("pk_release_packages")),
    )
    with op.batch_alter_table("release_packages", schema=None) as batch_op:
        batch_op.create_index(
            batch_op.f("ix_release_packages_manifest_sha256"), ["manifest_sha256"], unique=False
        )

    op.create_table(
        "rollouts",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("release", sa.String(length=128), nullable=False),
        sa.Column("selector", sa.String(), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("because", sa.String(), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("wave", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("created_by", sa.String(), nullable=False),
        sa.Column("started_at", sa.Float(precision=53), nullable=True),
        sa.Column("wave_started_at", sa.Float(precision=53), nullable=True),
        sa.Column("ended_at", sa.Float(precision=53), nullable=True),
        sa.ForeignKeyConstraint(["release"], ["releases.name"], name=op.f("fk_rollouts_release")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_rollouts")),
    )
    with op.batch_alter_table("rollouts", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_rollouts_release"), ["release"], unique=False)
        batch_op.create_index(batch_op.f("ix_rollouts_state"), ["state"], unique=False)

    op.create_table(
        "wanted_models",
        sa.Column("device", sa.String(length=128), nullable=False),
        sa.Column("model", sa.String(length=128), nullable=False),
        sa.Column("rollout", sa.String(length=128), nullable=True),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("is_removed", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["device"], ["devices.name"], name=op.f("fk_wanted_models_device")),
        sa.PrimaryKeyConstraint("device", "model", name=op.f("pk_wanted_models")),
    )
    with op.batch_alter_table("wanted_models", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_wanted_models_rollout"), ["rollout"], unique=False)

    op.create_table(
        "rollout_members",
        sa.Column("rollout", sa.String(length=128), nullable=False),
        sa.Column("device", sa.String(length=128), nullable=False),
        sa.Column("wave", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("because", sa.String(), nullable=False),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("before", sa.JSON(), nullable=False),
        sa.Column("offered_at", sa.Float(precision=53), nullable=True),
        sa.Column("answered_at", sa.Float(precision=53), nullable=True),
        sa.ForeignKeyConstraint(["device"], ["devices.name"], name=op.f("fk_rollout_members_device")),
        sa.ForeignKeyConstraint(["rollout"], ["rollouts.name"], name=op.f("fk_rollout_members_rollout")),
        sa.PrimaryKeyConstraint("rollout", "device", name=op.f("pk_rollout_members")),
    )
    with op.batch_alter_table("rollout_members", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_rollout_members_device"), ["device"], unique=False)
        batch_op.create_index(
            batch_op.f("ix_rollout_members_rollout_wave_state"), ["rollout", "wave", "state"], unique=False
        )

    _guard_audit()


def _guard_audit() -> None:
    """Make the database refuse to change or delete entries of the audit log."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'the audit log is append-only'; END $$"
        )
        op.execute(
            "CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit"
            " EXECUTE FUNCTION refuse_change()"
        )
        return
    for change in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER audit_no_{change.lower()} BEFORE {change} ON audit"
            " BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END"
        )
