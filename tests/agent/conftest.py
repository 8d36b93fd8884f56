"""Files of these tests are synced as on a device; stores of their fleets begin with tables that lie ready."""

from tests.fleet.conftest import quick_digests, quick_stores
from tests.memory_folder import tmp_path

__all__ = ["quick_digests", "quick_stores", "tmp_path"]
