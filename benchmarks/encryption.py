"""What an encrypted package costs when it is loaded: time and peak memory against a plain one.

    python -m benchmarks.encryption [--rounds 15] [--megabytes 5]

Each load is in a process of its own, plain and encrypted by turns: `read_package` and `open_session`, once as
commands do (signature and decryption in the process) and once as a service does (in the verifying process,
which has started). Peak memory is the growth of VmHWM over the load. The key of the device is in a file.
Times are the shortest of all rounds, since other work on the machine only adds; processor times are medians
and count this process and its children.
"""

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS
from pathlib import Path

from benchmarks.results import make_parser
from tests.runtime.conftest import make_maker
from tests.runtime.encryption_parts import encrypt_package, make_device, make_heavy
from tests.runtime.slot_cases import write_keys

KINDS = ("plain", "encrypted")
READERS = ("command", "service")


def load(path: Path, keys: Path, reader: str) -> dict[str, float]:
    """Load a package in this process; returns milliseconds and the growth of peak memory in bytes."""
    from edgekit_runtime.package.archive import read_package
    from edgekit_runtime.sessions.backends import open_session
    from edgekit_runtime.trust.trust_store import TrustStore
    from edgekit_runtime.trust.verifier_process import VerifyingProcess

    if reader == "service":
        trust = VerifyingProcess(keys)
        trust.check_keys()
    else:
        trust = TrustStore.from_folder(keys)
    importlib.import_module(
        "onnxruntime"
    )  # is there before a model is loaded; the runtime ends its telemetry

    before_bytes, before_s, begin_s = read_peak(), read_processor_s(), time.perf_counter()
    with read_package(path, trust) as package:
        read_s = time.perf_counter() - begin_s
        session = open_session(package, variant="default")
    load_s = time.perf_counter() - begin_s
    growth, work_s = read_peak() - before_bytes, read_processor_s() - before_s
    session.close()
    return {
        "read_ms": 1e3 * read_s,
        "load_ms": 1e3 * load_s,
        "work_ms": 1e3 * work_s,
        "growth_bytes": growth,
    }


def read_processor_s() -> float:
    """Return the processor time of this process and of its children."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    children_s = 0.0
    for pid in children:
        children_s += float(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    return time.process_time() + children_s


def read_peak() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--megabytes", type=float, default=5.0)
    parser.add_argument("--load", nargs=3, help=SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        path, keys, reader = arguments.load
        print(json.dumps(load(Path(path), Path(keys), reader)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["EDGEKIT_HOME"] = str(folder)
        maker, _ = make_heavy(make_maker(), int(arguments.megabytes * 1e6 / 24))
        maker.write(folder / "plain.edgepkg")
        encrypt_package(folder / "plain.edgepkg", folder / "encrypted.edgepkg", make_device(folder))
        keys = write_keys(folder / "trusted")
        results: dict[str, list[dict[str, float]]] = {}
        for _ in range(arguments.rounds):
            for reader in READERS:
                for kind in KINDS:
                    command = [sys.executable, "-m", "benchmarks.encryption", "--load"]
                    command += [str(folder / f"{kind}.edgepkg"), str(keys), reader]
                    done = subprocess.run(command, capture_output=True, text=True, check=True)
                    results.setdefault(f"{reader}, {kind}", []).append(json.loads(done.stdout))
        size_bytes = (folder / "plain.edgepkg").stat().st_size
        print(
            f"package of {size_bytes:,} bytes, {arguments.rounds} loads each; times: shortest and processor"
        )
        for title, loads in results.items():
            medians = {key: statistics.median(load[key] for load in loads) for key in loads[0]}
            least = {key: min(load[key] for load in loads) for key in loads[0]}
            print(
                f"{title:20} read {least['read_ms']:6.1f} ms  load {least['load_ms']:6.1f} ms"
                f"  work {medians['work_ms']:6.1f} ms"
                f"  peak +{medians['growth_bytes'] / size_bytes:5.2f} x package"
            )


if __name__ == "__main__":
    main()
