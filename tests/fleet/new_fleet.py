"""The folder of a new fleet: made once for all tests of a process, and copied for each."""

import atexit
import functools
import shutil
import tempfile
import time
from pathlib import Path

from edgekit_fleet.identity.authority import open_authority
from edgekit_fleet.releases.repository import TufRepository
from edgekit_fleet.store.database import open_store, sqlite_url
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings


@functools.cache
def _make_template() -> FleetFolder:
    path = Path(tempfile.mkdtemp(prefix="edgekit-new-fleet-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    folder = FleetFolder(path)  # which only its owner can read
    open_authority(folder, FleetSettings())
    TufRepository(folder.repository, folder.repository_keys).create(time.time())
    open_store(sqlite_url(folder.database)).close()
    return folder


def copy_new_fleet(path: Path) -> FleetFolder:
    """Return a folder as the first start of a fleet leaves it, but for its settings."""
    return FleetFolder(shutil.copytree(_make_template().path, path, dirs_exist_ok=True))


def copy_new_store(path: Path) -> str:
    """Return the URL of a store that has its tables, in a new file."""
    shutil.copy2(_make_template().database, path)
    return sqlite_url(path)
