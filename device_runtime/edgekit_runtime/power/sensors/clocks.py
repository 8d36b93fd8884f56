"""The cap that the kernel or the firmware holds the CPU's clock down to, as a share of its highest.

Source: Documentation/admin-guide/pm/cpufreq.rst of the kernel (kilohertz).
"""

from functools import partial
from pathlib import Path

from edgekit_runtime.power.sensors.probe import Family, Probe
from edgekit_runtime.power.sensors.sysfs import Sysfs, read_number


def find_clocks(sysfs: Sysfs) -> Family:
    """Return one probe a cluster of cores."""
    probes = tuple(
        Probe(f"cpufreq/{policy.name}", "clock_share", partial(_read, policy))
        for policy in sysfs.find("devices/system/cpu/cpufreq/policy*")
        if (policy / "cpuinfo_max_freq").exists()
    )
    return Family("cpufreq", probes, "" if probes else "no cpufreq (virtual machines have none)")


def _read(policy: Path, _now_s: float) -> float:
    # The cap, not the clock of the moment: an idle core clocks low without being held down.
    highest = read_number(policy / "cpuinfo_max_freq")
    if highest <= 0:
        raise ValueError(f"{policy}/cpuinfo_max_freq is {highest}, expected more than 0")
    return read_number(policy / "scaling_max_freq") / highest
