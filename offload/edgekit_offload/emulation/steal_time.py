"""Take one processor away from others for a share of each quarter of a millisecond: `steal_time CPU SHARE`.

`CpuQuota` starts it. It computes nothing, at a priority above all normal processes.
"""

import os
import sys
import time
from typing import Final

from edgekit_runtime.system.child_process import end_with_parent

# Work finds its processor taken for up to a period wherever it waits for something. With periods of 1 ms each
# step of a request took a whole one; shorter ones than this lose too much of their share to switching.
_PERIOD_S: Final = 0.00025


def main() -> None:
    """Bind to the processor, and keep it busy until this process is killed."""
    end_with_parent()
    os.sched_setaffinity(0, {int(sys.argv[1])})
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))
    share, clock = float(sys.argv[2]), time.perf_counter
    period_end = clock()
    while True:
        period_end += _PERIOD_S
        busy_until = period_end - _PERIOD_S * (1 - share)
        while clock() < busy_until:
            pass
        left_s = period_end - clock()
        if left_s > 0:
            time.sleep(left_s)
        else:
            period_end = clock()  # it was held up, and does not catch up


if __name__ == "__main__":
    main()
