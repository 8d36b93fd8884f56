"""Wait until the governor of the service admits less than, or at least, a share of a model's requests.

Arguments: MODEL `below` or `above` SHARE LIMIT_S. Prints the share that it admits then.
"""

import re
import sys
import time

from edgekit_runtime.client.control import read_metrics
from edgekit_runtime.system.paths import find_running_service


def main() -> None:
    """Wait and print."""
    model, side, share, limit_s = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
    deadline, socket_path = time.monotonic() + limit_s, find_running_service()
    assert socket_path is not None, "no service runs"
    line = re.compile(rf'edgekit_governor_admitted_ratio{{[^}}]*model="{model}"[^}}]*}} (\S+)')
    while True:
        (admitted,) = map(float, line.findall(read_metrics(socket_path))[:1] or ["nan"])
        if (admitted < share) if side == "below" else (admitted >= share):
            print(admitted)
            return
        assert time.monotonic() < deadline, f"it admits {admitted}"
        time.sleep(0.1)


if __name__ == "__main__":
    main()
