"""The sensors of one kind, as a module of this folder finds them with its function `find_sensors`."""

from edgekit_runtime.power.sensors.power_source import PowerSource
from edgekit_runtime.power.sensors.probe import Probe
from edgekit_runtime.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The sensors of one kind that were found.

    Attributes:
        probes: the found probes; may be empty.
        missing: what is missing, why, and the remedy; empty if nothing is missing.
        sources: sources of the device's power, made of the probes. Ranks so far: 0 a rail at the board's
            input, 1 all rails, 2 and 3 counters of the platform and of the processor, 4 a power chip, 5 a
            battery.
    """

    name: str
    probes: tuple[Probe, ...] = ()
    missing: str = ""
    sources: tuple[PowerSource, ...] = ()
