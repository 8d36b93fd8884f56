"""Occupies a processor for a share of each half millisecond.

    steal_time CPU SHARE GROUP

`CpuQuota` starts this process, which has a higher priority than all normal processes and does no useful work.
It pauses while the cgroup in the folder GROUP is empty.
"""

import os
import sys
import time
from pathlib import Path
from typing import Final

from edgekit_runtime.system.child_process import end_with_parent

# Work that has waited for something may find the processor taken for up to a period, so periods are short.
# The rest of a period must be long compared with a context switch: with 0.25 ms models ran 1.4 to 2 times
# slower than the share says, with 0.5 ms 0.9 to 1.1 times.
_LEAST_PERIOD_S: Final = 0.0005
_LEAST_SLICE_S: Final = 0.00005
_EMPTY_S: Final = 0.005  # between two looks for a process: one that starts takes longer until it computes
_PERIODS: Final = 20  # until the next look


def is_empty(group: Path) -> bool:
    """Return whether a cgroup contains no process."""
    try:
        # Opened each time: a file of version 1 that stays open shows the processes of its first reading.
        with (group / "cgroup.procs").open("rb", buffering=0) as file:
            return not file.read(1)
    except OSError:
        return not group.exists()


def main() -> None:
    """Keep the processor busy for the given share of each period, until this process is killed."""
    end_with_parent()
    os.sched_setaffinity(0, {int(sys.argv[1])})
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))
    share, group, clock = float(sys.argv[2]), Path(sys.argv[3]), time.perf_counter
    period_s = max(_LEAST_PERIOD_S, _LEAST_SLICE_S / max(1 - share, _LEAST_SLICE_S))
    while True:
        while is_empty(group):
            time.sleep(_EMPTY_S)
        period_end = clock()
        for _ in range(_PERIODS):
            period_end += period_s
            busy_until = period_end - period_s * (1 - share)
            while clock() < busy_until:
                pass
            left_s = period_end - clock()
            if left_s > 0:
                time.sleep(left_s)
            else:
                period_end = clock()  # this process was delayed, and does not catch up


if __name__ == "__main__":
    main()
