"""Migrations of the tables, for alembic. The name of a file begins with its revision: `v0007_ROOMS.py`."""

from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent


def find_newest_revision() -> str:
    """Return the revision of the newest migration, such as `v0006`."""
    return max(path.name for path in FOLDER.glob("versions/v*.py")).partition("_")[0]
