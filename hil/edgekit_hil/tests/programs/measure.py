"""Run a package for some seconds; print latencies and the peak memory of this process.

Arguments: PACKAGE SECONDS INPUTS; INPUTS is JSON of `{name: [dtype, shape]}`. Prints `{"seconds": [of each
inference], "peak_bytes": int}`. It imports no more than `open_session` needs: the estimate of memory is for
such a process, which verifies packages in another process.
"""

import json
import re
import sys
import time
from pathlib import Path

import numpy as np

from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.latency import LatencyLimits, measure_latency


def main() -> None:
    """Measure and print."""
    session = open_session(Path(sys.argv[1]))
    inputs: dict[str, tuple[str, list[int]]] = json.loads(sys.argv[3])
    numbers = np.random.default_rng(0)
    feeds = {name: numbers.random(shape).astype(dtype) for name, (dtype, shape) in inputs.items()}
    until_s = time.monotonic() + float(sys.argv[2])
    limits = LatencyLimits(max_rounds=20_000, time_limit_s=float(sys.argv[2]), precision=0.0)
    latency = measure_latency({"model": lambda: session.run(feeds)}, limits)["model"]
    while time.monotonic() < until_s:  # a meter reads meanwhile; more times would take memory
        session.run(feeds)
    (peak_kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    print(json.dumps({"seconds": latency.seconds, "peak_bytes": int(peak_kib) << 10}))


if __name__ == "__main__":
    main()
