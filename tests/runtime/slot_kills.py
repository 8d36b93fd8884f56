"""Kills a process at every step of every case, and starts again: python -m ... PACKAGES KEYS WORK

A program of its own, since it forks, which a process with threads must not. Prints one JSON object: case ->
the number of steps at which a process was killed, and what was wrong afterwards.
"""

import json
import os
import signal
import sys
from pathlib import Path

from tests.runtime.slot_cases import CASES, Case, copy_folder, make_bench, start_fresh
from tests.runtime.slot_disks import SteppedDisk

from edgekit_runtime.trust.trust_store import TrustStore


def run_until(step: int, case: Case, folder: Path, packages: Path, trust: TrustStore) -> bool:
    """Return whether a child process that does `case` was killed at `step`; False if it has fewer."""
    child = os.fork()
    if child == 0:

        def kill(number: int, _: str) -> None:
            if number == step:
                os.kill(os.getpid(), signal.SIGKILL)

        case.act(make_bench(folder, packages, trust, SteppedDisk(kill)))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


def kill_everywhere(case: Case, packages: Path, trust: TrustStore, work: Path) -> tuple[int, list[str]]:
    """Return at how many steps a process was killed, and what was wrong afterwards."""
    before, folder = work / "before", work / "state"
    copy_folder(work / "missing", before)
    case.prepare(make_bench(before, packages, trust))
    wrong: list[str] = []
    step = 0
    while True:
        copy_folder(before, folder)
        if not run_until(step, case, folder, packages, trust):
            break
        if (started := start_fresh(folder, trust)) not in case.during:
            wrong.append(f"step {step}: {started} started")
        step += 1
    if (started := start_fresh(folder, trust)) not in case.after:
        wrong.append(f"at the end: {started} started")
    return step, wrong


def main() -> None:
    packages, keys, work = (Path(argument) for argument in sys.argv[1:4])
    trust = TrustStore.from_folder(keys)
    print(json.dumps({name: kill_everywhere(case, packages, trust, work) for name, case in CASES.items()}))


if __name__ == "__main__":
    main()
