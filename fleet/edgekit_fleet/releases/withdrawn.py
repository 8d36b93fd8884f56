"""Finds the files that no release offers any more."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgekit_fleet.store.tables import ReleasePackageRow, ReleaseRow


def list_withdrawn(session: Session, before: float) -> set[str]:
    """Return the paths `CLASS/NAME` of packages and deltas that are only in withdrawn releases.

    A release counts as withdrawn if it was withdrawn before the time `before`, in seconds since 1970.
    """
    statement = select(ReleaseRow.withdrawn_at, ReleasePackageRow.path, ReleasePackageRow.deltas)
    files: dict[bool, set[str]] = {True: set(), False: set()}
    for withdrawn_at, path, deltas in session.execute(statement.join_from(ReleasePackageRow, ReleaseRow)):
        is_withdrawn = withdrawn_at is not None and withdrawn_at < before
        files[is_withdrawn] |= {path, *(str(delta["path"]) for delta in deltas)}
    return files[True] - files[False]
