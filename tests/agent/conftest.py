"""Files of these tests are synced as on a device."""

from tests.memory_folder import tmp_path

__all__ = ["tmp_path"]
