"""What benchmarks of fleets share: `edgekit fleet up` as a process, rollouts, a limit on time."""

import contextlib
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.free_port import free_port

from edgekit_fleet.operations.rollouts import StartRollout, find_rollout, start_rollout
from edgekit_fleet.simulation.enrolment import add_simulated_release
from edgekit_fleet.store.database import Store
from edgekit_runtime.errors import OutputError

MODEL, TARGET = "digits", "x86-64"


def find_log(folder: Path) -> Path:
    return folder.with_suffix(".log")


def start_fleet(folder: Path, *words: str) -> "subprocess.Popen[bytes]":
    """Start `edgekit fleet up` on a folder, and wait until it runs; its log stands beside the folder."""
    command = [sys.executable, "-m", "edgekit_cli", "fleet", "up", "--json", "--folder", str(folder), *words]
    with find_log(folder).open("ab") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    if not process.stdout.readline():
        sys.exit(find_log(folder).read_text()[-3000:])
    return process


@contextlib.contextmanager
def running_fleet_up(folder: Path, *words: str) -> Iterator[int]:
    """Run `edgekit fleet up`; yields its process id."""
    process = start_fleet(folder, *words)
    try:
        yield process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


@contextlib.contextmanager
def running_on_free_ports() -> Iterator[tuple[Path, int, dict[str, int]]]:
    """Run `edgekit fleet up` on a new folder; yields this, the process id, and the ports by name."""
    ports = {name: free_port() for name in ("broker", "web", "console")}
    words = [word for name, port in ports.items() for word in (f"--{name}-port", str(port))]
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "fleet")
        with running_fleet_up(folder, *words) as pid:
            yield folder, pid, ports


def make_context() -> ssl.SSLContext:
    """Return a context that takes any certificate of a server."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def roll_out(store: Store, version: str, *, size_bytes: int, **request: Any) -> str:
    """Start a rollout of a new release, by default to all devices; returns its name."""
    add_simulated_release(store, version, model=MODEL, target=TARGET, size_bytes=size_bytes)
    return start_rollout(
        store, StartRollout(**{"release": version, "selector": "all"} | request), "benchmark"
    )


def wait_for_end(store: Store, rollout: str, limit_s: float) -> float:
    """Wait until a rollout has succeeded; returns the seconds."""
    begin_s, state = time.monotonic(), ""
    while time.monotonic() - begin_s < limit_s:
        with contextlib.suppress(OutputError):  # the database is away
            found = find_rollout(store, rollout)
            if found.state == "succeeded":
                return time.monotonic() - begin_s
            state = f"{found.state}: {found.because} {dict(found.members)}"
        time.sleep(0.05)
    sys.exit(f"rollout {rollout} is {state}")


def limit_time(seconds: int) -> None:
    """End this process after some seconds."""
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"stopped after {seconds} s"))
    signal.alarm(seconds)
