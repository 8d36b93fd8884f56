"""The load of this machine by other processes and virtual machines during a latency measurement.

Linux counts both in `/proc/stat`. On other systems, only the load average and the spread of the runs are
known.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgekit_runtime.offload.measurement.machine_facts import read_load_average
from edgekit_runtime.sessions.latency import Latency
from edgekit_runtime.system.own_process import count_cores

# Shares beyond which a latency needs a warning. An idle machine stays well below each.
MOST_OTHERS: Final = 0.10
MOST_STOLEN: Final = 0.02
MOST_SPREAD: Final = 0.25

_STAT = Path("/proc/stat")
_COLUMNS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_IDLE = ("idle", "iowait", "steal")


@dataclass(frozen=True, slots=True)
class HostLoad:
    """The load of this machine during a measurement.

    Attributes:
        cores: The number of cores that this process may use.
        load_average: The load average of the last minute when the measurement ended, including this process,
            or None if unknown.
        others_share: The share of the time of these cores that other processes used, or None if unknown.
        stolen_share: The share of the time of these cores that the hypervisor gave to other virtual machines,
            or None if unknown.
        spread: The interquartile range of the runs of one model, divided by their median.
    """

    cores: int
    load_average: float | None
    others_share: float | None
    stolen_share: float | None
    spread: float

    @property
    def is_heavy(self) -> bool:
        """Whether this load makes measured latencies doubtful."""
        shares = ((self.others_share, MOST_OTHERS), (self.stolen_share, MOST_STOLEN))
        return self.spread > MOST_SPREAD or any(share is not None and share > most for share, most in shares)

    def __str__(self) -> str:
        shares = []
        if self.others_share is not None:
            shares.append(f"other processes used {100 * self.others_share:.0f} % of the {self.cores} cores")
        if self.stolen_share is not None:
            shares.append(f"{100 * self.stolen_share:.0f} % was stolen by the hypervisor")
        if self.load_average is not None:
            shares.append(f"the load average was {self.load_average:.1f}")
        shares.append(f"half of the runs lie within {100 * self.spread:.0f} % of the median")
        return ", ".join(shares)


@dataclass(frozen=True, slots=True)
class _Reading:
    """Seconds of the cores since the start of the machine, and of this process."""

    total_s: float
    idle_s: float
    stolen_s: float
    own_s: float


class LoadMeter:
    """Measures the load of this machine from its creation to `finish`."""

    def __init__(self, stat: Path = _STAT, own_s: Callable[[], float] | None = None) -> None:
        """Take the first reading.

        Args:
            stat: file with the kernel's counters of processor time.
            own_s: processor seconds of this process; by default as the system counts them.
        """
        self._stat = stat
        self._own_s = own_s or _process_s
        self._begin = self._read()

    def finish(self, latency: Latency) -> HostLoad:
        end = self._read()
        others, stolen = None, None
        if self._begin is not None and end is not None and end.total_s > self._begin.total_s:
            total = end.total_s - self._begin.total_s
            stolen = (end.stolen_s - self._begin.stolen_s) / total
            busy = total - (end.idle_s - self._begin.idle_s) - (end.own_s - self._begin.own_s)
            others = min(1.0, max(0.0, busy / total))
        low, high = latency.quartiles_s
        return HostLoad(count_cores(), read_load_average(), others, stolen, (high - low) / latency.median_s)

    def _read(self) -> _Reading | None:
        own_s = self._own_s()
        try:
            lines = self._stat.read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError):
            return None
        mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        sums = dict.fromkeys(_COLUMNS, 0.0)
        for line in lines:
            name, *values = line.split()
            if name in mine:
                for column, value in zip(_COLUMNS, values, strict=False):
                    sums[column] += int(value) * tick_s
        idle_s = sum(sums[column] for column in _IDLE)
        return _Reading(sum(sums.values()), idle_s, sums["steal"], own_s)


def _process_s() -> float:
    times = os.times()
    return times.user + times.system
