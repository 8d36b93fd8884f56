"""Compressed requests of 64 clients of tritonclient.http.aio at once: how many are refused, and the memory.

    scripts/python -m benchmarks.service_compressed [--requests 256]

Each row has a service of its own on loopback, with its default limits; the client runs in an environment of
its own, made on first use. Memory is the peak of the service's resident memory during a row, less that
before. Goals: no request is refused; a bomb is refused with 413, and 64 of them at once take at most twice
the largest body. Read counts and memory; the time is that of a shared machine.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from benchmarks.environments import make_environment
from benchmarks.results import make_parser, print_head
from tests.runtime.conftest import make_maker
from tests.runtime.slot_cases import write_keys
from tests.service.serve_parts import Served, served

CLIENT: Final = Path(__file__).with_name("peers") / "ask_compressed.py"
PACKAGES: Final = ("tritonclient[http]==2.73.0",)
ROWS: Final = {"64 bytes": 4, "160 kB": 10_000, "640 kB": 40_000, "bomb of 64 MiB": 0}


def read_memory_bytes(service: Served, field: str) -> int:
    """Return a field of the process's status."""
    status = Path(f"/proc/{service.process.pid}/status").read_text()
    return 1024 * int(status.partition(f"{field}:")[2].split()[0])


def measure(service: Served, python: Path, arguments: list[str]) -> tuple[str, float, float]:
    """Return the outcomes, the seconds and the MiB that the memory grew at its peak."""
    Path(f"/proc/{service.process.pid}/clear_refs").write_text("5")  # the peak is that from now on
    before_bytes = read_memory_bytes(service, "VmRSS")
    begin_s = time.perf_counter()
    outcomes = subprocess.run(
        [python, CLIENT, service.tcp_port, *arguments], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    grown_bytes = read_memory_bytes(service, "VmHWM") - before_bytes
    return outcomes, time.perf_counter() - begin_s, grown_bytes / 2**20


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=256)
    count = parser.parse_args().requests
    python = make_environment("tritonclient", PACKAGES, "0.1 GB")
    if python is None:
        raise SystemExit(f"pip cannot install {PACKAGES[0]}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_maker().write(folder / "linear.edgepkg")
        write_keys(folder / "keys")
        print_head("body", "coding", "outcomes", "s", "memory, MiB")
        for title, rows in ROWS.items():
            for coding in ("gzip", "deflate"):
                with served(folder) as service:
                    outcomes, seconds, grown = measure(service, python, [coding, str(rows), str(count)])
                print(f"| {title} | {coding} | {outcomes} | {seconds:.1f} | {grown:.0f} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
