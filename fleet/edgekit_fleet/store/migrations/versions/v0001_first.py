"""The tables that `database` makes in an empty store; changes after a release build on them."""

revision = "v0001"
down_revision = None


def upgrade() -> None:
    """Change nothing."""
