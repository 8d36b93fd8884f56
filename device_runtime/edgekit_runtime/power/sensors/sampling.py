"""Reads the sensors once a second on a separate thread.

If the bus of a sensor hangs, only this thread is blocked. The readings then become old, which `at_s` shows.
"""

import threading
import time
from typing import Final

from edgekit_runtime.power.sensors.discovery import Sensors
from edgekit_runtime.power.sensors.readings import Readings

DEFAULT_PERIOD_S: Final = 1.0


class Sampling:
    """Reads the sensors every `period_s` seconds on a thread.

    Attributes:
        latest: The latest readings, empty at first. Any thread may read this attribute.
    """

    def __init__(self, sensors: Sensors, period_s: float = DEFAULT_PERIOD_S) -> None:
        self.latest = Readings(at_s=time.monotonic())
        self._sensors, self._period_s = sensors, period_s
        self._stop = threading.Event()
        # A daemon: a read that hangs in the kernel must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="edgekit-sensors", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. Waits at most one period."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=self._period_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.latest = self._sensors.read(time.monotonic())
            self._stop.wait(self._period_s)
