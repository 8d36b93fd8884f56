"""Run a package on its golden inputs for some seconds; print latencies and the peak memory of this process.

Arguments: PACKAGE SECONDS. Prints `{"seconds": [of each inference], "peak_bytes": int}`.
"""

import json
import re
import sys
from pathlib import Path

from edgekit_runtime.package.archive import read_package
from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.latency import LatencyLimits, measure_latency
from edgekit_runtime.sessions.selftest import read_golden_inputs
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore


def main() -> None:
    """Measure and print."""
    path = Path(sys.argv[1])
    session = open_session(path)
    with read_package(path, TrustStore.from_folder(find_keys_folder())) as package:
        feeds = read_golden_inputs(package)
    for spec in session.inputs:  # sizes that are free are 1, as in the prediction
        if isinstance(spec.shape[0], str):
            feeds[spec.name] = feeds[spec.name][:1]
    limits = LatencyLimits(max_rounds=20_000, time_limit_s=float(sys.argv[2]), precision=0.0)
    latency = measure_latency({"model": lambda: session.run(feeds)}, limits)["model"]
    (peak_kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    print(json.dumps({"seconds": latency.seconds, "peak_bytes": int(peak_kib) << 10}))


if __name__ == "__main__":
    main()
