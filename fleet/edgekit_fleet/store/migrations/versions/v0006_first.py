"""The tables that `database` creates in an empty store. Migrations after a release build on them.

The number is that of the last migration before the first release, so that stores of checkouts open unchanged.
"""

revision = "v0006"
down_revision = None


def upgrade() -> None:
    """Change nothing."""
