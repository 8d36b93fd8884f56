"""Processor time of what starts most often, of one or more checkouts in turns.

    benchmarks/starts.py [CHECKOUT ...] [--rounds 15]

Prints least and median of user and system time, ms. Each start imports what the process needs and ends; the
Python is this one, and modules are compiled before the first round counts.
"""

import os
import statistics
import subprocess
import sys
from pathlib import Path

from results import make_parser

RUNTIME = "edgekit_runtime"
STEP = f"{RUNTIME}.agent.execution"
STARTS = {
    "numpy and asyncio alone": "numpy, asyncio",
    "service": f"{RUNTIME}.service.server",
    "worker": f"{RUNTIME}.service.worker.__main__",
    "child of the self-test": f"{RUNTIME}.sessions.opening.selftest_child",
    "agent": f"{RUNTIME}.agent.agent",
    "step of the agent, without a delta": (
        f"{STEP}.step_child, {STEP}.local_steps, {RUNTIME}.trust.trust_store"
    ),
    "verifying process": f"{RUNTIME}.trust.verifier_process, {RUNTIME}.trust.trust_store",
    "`edgekit-device install`": f"{RUNTIME}.cli, {RUNTIME}.commands.install",
}


def measure_ms(checkout: Path, modules: str) -> float:
    """Return the processor time of a process that imports modules."""
    variables = {**os.environ, "PYTHONPATH": str(checkout / "device_runtime")}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    process = subprocess.Popen([sys.executable, "-c", f"import {modules}"], env=variables)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{checkout} cannot import {modules}")
    return (usage.ru_utime + usage.ru_stime) * 1000


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(__file__).resolve().parents[1]])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    times_ms: dict[tuple[str, Path], list[float]] = {}
    for number in range(arguments.rounds + 1):
        for start, modules in STARTS.items():
            for checkout in arguments.checkouts:
                time_ms = measure_ms(checkout.resolve(), modules)
                if number:
                    times_ms.setdefault((start, checkout), []).append(time_ms)
    for (start, checkout), values in times_ms.items():
        print(f"{start:36} {min(values):6.0f} {statistics.median(values):6.0f}  {checkout}")


if __name__ == "__main__":
    main()
