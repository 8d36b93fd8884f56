"""The sensors of one kind, as returned by the functions `find_sensors` of the modules in this folder."""

from edgekit_runtime.power.sensors.power_source import PowerSource
from edgekit_runtime.power.sensors.probe import Probe
from edgekit_runtime.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The sensors of one kind that were found.

    Attributes:
        probes: The probes that were found.
        missing: A text that says what is missing, why, and how to fix it. Empty if nothing is missing.
        sources: Power sources made of the probes. The rank of a source is 0 for a rail at the board's input,
            1 for all rails, 2 for the platform's counters, 3 for the processor's counters, 4 for a power
            chip, and 5 for a battery.
    """

    name: str
    probes: tuple[Probe, ...] = ()
    missing: str = ""
    sources: tuple[PowerSource, ...] = ()
