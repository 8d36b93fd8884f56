"""The limit that the kernel or the firmware sets on the CPU clock, as a fraction of the highest clock.

Source: Documentation/admin-guide/pm/cpufreq.rst of the kernel (kilohertz).
"""

from functools import partial
from pathlib import Path

from edgekit_runtime.power.sensors.family import Family
from edgekit_runtime.power.sensors.probe import Probe
from edgekit_runtime.power.sensors.sysfs import Sysfs, read_number


def find_sensors(sysfs: Sysfs) -> Family:
    """Return one probe for each CPU cluster: the clock limit as a fraction of the highest clock."""
    probes = tuple(
        Probe(f"cpufreq/{policy.name}", "clock_share", partial(_read, policy))
        for policy in sysfs.find("devices/system/cpu/cpufreq/policy*")
        if (policy / "cpuinfo_max_freq").exists()
    )
    missing = "" if probes else "no cpufreq (virtual machines have none)"
    return Family(name="cpufreq", probes=probes, missing=missing)


def _read(policy: Path, _now_s: float) -> float:
    # The cap, not the present clock: an idle core has a low clock without being throttled.
    highest = read_number(policy / "cpuinfo_max_freq")
    if highest <= 0:
        raise ValueError(f"{policy}/cpuinfo_max_freq is {highest}, expected more than 0")
    return read_number(policy / "scaling_max_freq") / highest
