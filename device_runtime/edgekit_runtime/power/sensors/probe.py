"""The common interface of all sensors: a probe returns a number, or None with a reason.

`Probe.read` never raises, because a sensor that fails must not stop the service.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import field
from typing import Final, Literal, TypeAlias

from edgekit_runtime.records import dataclass

Quantity: TypeAlias = Literal[
    "power_w",  # watts
    "energy_j",  # joules since the probe was made, never falling
    "temperature_c",  # degrees Celsius
    "charge",  # of a battery, 0..1
    "discharge_w",  # power out of a battery, watts, negative while it is charged
    "capacity_j",  # energy of a full battery, joules
    "throttle_bits",  # of a Raspberry Pi, see `raspberry`
    "clock_share",  # 0..1, of the highest clock that the CPU has
]

MOST_POWER_W: Final = 2000.0  # beyond any edge device
# A number outside these bounds is a fault of the sensor.
_BOUNDS: Final[dict[Quantity, tuple[float, float]]] = {
    "power_w": (0.0, MOST_POWER_W),
    "energy_j": (0.0, math.inf),
    "temperature_c": (-60.0, 200.0),
    "charge": (0.0, 1.0),
    "discharge_w": (-MOST_POWER_W, MOST_POWER_W),
    "capacity_j": (1.0, 1e9),
    "throttle_bits": (0.0, float(0xFFFFFFFF)),
    "clock_share": (0.0, 1.5),
}

_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Probe:
    """Reads one number from a sensor. Faults of the sensor are logged, never raised.

    Attributes:
        name: A name that is unique on the device, such as `ina3221/VDD_IN`.
        quantity: The meaning and unit of the number.
        ask: A function that takes the time of a monotonic clock in seconds and returns the number. It may
            raise OSError or ValueError.
        fault: Why the last reading failed, or None.
    """

    name: str
    quantity: Quantity
    ask: Callable[[float], float]
    fault: str | None = None
    _is_logged: bool = field(default=False, repr=False)

    def read(self, now_s: float) -> float | None:
        """Return the number, or None if the sensor failed or the number is impossible.

        A failure sets `fault`. Only the first failure is logged.
        """
        low, high = _BOUNDS[self.quantity]
        try:
            value = self.ask(now_s)
        except (OSError, ValueError) as cause:
            self._fail(str(cause))
            return None
        if not low <= value <= high:  # nan, too
            self._fail(f"{value:g} {self.quantity}, expected {low:g} to {high:g}")
            return None
        self.fault = None
        return value

    def _fail(self, reason: str) -> None:
        self.fault = reason
        if not self._is_logged:  # a sensor that comes and goes would fill the log
            self._is_logged = True
            _logger.warning("sensor %s: no reading: %s", self.name, reason)
