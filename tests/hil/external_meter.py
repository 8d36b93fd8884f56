"""A meter beside a device, for tests: a file with what the meter's command prints."""

import os
import threading
from pathlib import Path
from typing import Any

from tests.waiting import wait_for


class ExternalMeter:
    """A meter beside the device: a file with what its command prints.

    Attributes:
        command: command that reads it.
        drivers: part of the environment file.
    """

    def __init__(self, folder: Path, watts: str, **options: Any) -> None:
        self._watts, self._seen, self._folder = folder / "watts", folder / "seen", folder
        self.show(watts)
        self.command = f"cat {self._watts}; code=$?; echo >>{self._seen}; exit $code"
        options = {"interval_s": 0.05, "measures": "board with its supply", **options}
        self.drivers = {"CommandMeterDriver": {"command": self.command, **options}}

    def show(self, watts: str) -> None:
        (self._folder / "next").write_text(watts)
        (self._folder / "next").replace(self._watts)

    def vanish(self) -> None:
        self._watts.unlink()

    def hang(self) -> None:
        self.vanish()
        os.mkfifo(self._watts)

    def wait_read(self, count: int = 1) -> None:
        """Wait until the command has begun and ended `count` times from now on."""
        before = self._count()
        wait_for(lambda: self._count() > before + count, f"{count} readings")

    def wait_failed(self) -> None:
        """Wait until the driver has stopped to read."""
        wait_for(lambda: not any(each.name == "meter" for each in threading.enumerate()), "a refused reading")

    def _count(self) -> int:
        return len(self._seen.read_text().splitlines())
