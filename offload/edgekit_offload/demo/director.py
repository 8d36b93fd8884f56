"""Runs the demo: starts server and device, changes the link, and loads and kills the server.

The package must exist already. The caller gets each new state, for example to display it.
"""

import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from edgekit_host.emulation.cpu_quota import can_limit_processor
from edgekit_host.emulation.testbed import LinkKind, Testbed
from edgekit_offload.demo.device_worker import WorkerConfig
from edgekit_offload.demo.recording import Phase, PhaseTimes, Recording, Request
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.errors import TransportError
from edgekit_runtime.system.child_process import ChildProcess

RTT_MS: Final = 20.0
PHASES: Final = (
    Phase("20 Mbit/s", "link", 20.0, RTT_MS, 0.2),
    Phase("2 Mbit/s", "link", 2.0, RTT_MS, 0.25),
    Phase("20 Mbit/s again", "link", 20.0, RTT_MS, 0.2),
    Phase("loaded server", "load", 20.0, RTT_MS, 0.2),
    Phase("killed server", "kill", 20.0, RTT_MS, 0.15),
)
DEVICE_SHARE: Final = 0.2  # share of a processor that the device gets, where it can be limited
_POLL_S: Final = 0.25
_START_LIMIT_S: Final = 90.0
_WORKER: Final = "edgekit_offload.demo.device_worker"
LOOPBACK: Final = "127.0.0.1"
_DEFAULT_PORT: Final = 8000  # in the server's own namespace every port is free
_LOAD: Final = "edgekit_offload.demo.load_worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSetup:
    """The settings of a demo. The attributes that are not listed here are described in `WorkerConfig`.

    Attributes:
        folder: The folder for files that the processes of the demo exchange.
        serve: Returns the command that serves the tails of the package on a host and port.
        scheme: The scheme of the server, `http` or `https`.
        plans: The names of the plans that are compared with edgekit's choice, `local` first.
    """

    folder: Path
    package: Path
    home: Path
    serve: Callable[[str, int], Sequence[str]]
    scheme: str
    token_file: str
    ca_file: str
    plans: tuple[str, ...]
    requests: Path
    output: str
    model: str


def run_demo(
    setup: DemoSetup,
    *,
    seconds: float,
    kind: LinkKind | None,
    on_change: Callable[[Recording], None],
    device_share: float | None = DEVICE_SHARE,
) -> Recording:
    """Run the demo and return its recording.

    Args:
        setup: The settings.
        seconds: The duration of all phases together.
        kind: How the link is emulated. By default, this is the best way that the user's rights allow.
        on_change: Called with each new state, a few times per second.
        device_share: The fraction of a processor for the device, or None for no limit. Ignored if the
            processor cannot be limited here.

    Raises:
        ConfigError: The machines cannot be emulated here.
        TransportError: The server or the device did not start, or terminated.
    """
    share = device_share if can_limit_processor() else None
    with Testbed(device_share=share, kind=kind) as bed:
        bed.set_link(up_mbit_s=PHASES[0].mbit_s, down_mbit_s=PHASES[0].mbit_s, rtt_ms=PHASES[0].rtt_ms)
        port = _DEFAULT_PORT if bed.kind == "namespaces" else find_free_port()
        server = bed.spawn("server", setup.serve(bed.server_host, port))
        config = _configure(setup, *bed.reach(port))
        home = f"EDGEKIT_HOME={setup.home}"
        device = bed.spawn("device", ["env", home, *_python(_WORKER, str(config))])
        recording = Recording(
            model=setup.model, machine=_describe_machine(share), label=bed.label, plans=setup.plans
        )
        course = _Course(bed, server, device, config, recording, on_change=on_change)
        course.wait_ready()
        for phase in PHASES:
            course.begin(phase, f"{setup.scheme}://{bed.server_host}:{port}")
            course.follow(phase.share * seconds)
        return course.finish()


def find_free_port() -> int:
    """Return a free TCP port of the loopback interface."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        return int(listener.getsockname()[1])


def _python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def _configure(setup: DemoSetup, host: str, port: int) -> Path:
    """Write the configuration of the device's process; return its path."""
    config = WorkerConfig(
        package=str(setup.package),
        home=str(setup.home),
        server=f"{setup.scheme}://{host}:{port}",
        token_file=setup.token_file,
        ca_file=setup.ca_file,
        plans=setup.plans,
        requests=str(setup.requests),
        output=setup.output,
    )
    path = setup.folder / "device.json"
    path.write_text(json.dumps(to_plain(config)), encoding="utf-8")
    return path


def _describe_machine(share: float | None) -> str:
    cores = os.cpu_count() or 1
    slow = (
        "at full speed (a quota needs root and cgroups)"
        if share is None
        else f"with {100 * share:.0f} % of one of them"
    )
    return f"this machine, {cores} cores: the device {slow}, the server with what it takes"


class _Course:
    def __init__(
        self,
        bed: Testbed,
        server: ChildProcess,
        device: ChildProcess,
        config: Path,
        recording: Recording,
        *,
        on_change: Callable[[Recording], None],
    ) -> None:
        self._bed, self._server, self._device, self._config = bed, server, device, config
        self._recording, self._on_change = recording, on_change
        self._read_bytes = 0
        self._begin_s = 0.0

    def wait_ready(self) -> None:
        """Wait until the device has an answer of each plan.

        Raises:
            TransportError: the device's process ended, or an answer did not come in time.
        """
        deadline = time.monotonic() + _START_LIMIT_S
        while b'"ready"' not in self._device.output:
            self._check()
            if time.monotonic() > deadline:
                raise TransportError(f"the demo's device had no answer in {_START_LIMIT_S:.0f} s")
            time.sleep(_POLL_S)
        self._begin_s = time.monotonic()

    def begin(self, phase: Phase, near_address: str) -> None:
        self._bed.set_link(up_mbit_s=phase.mbit_s, down_mbit_s=phase.mbit_s, rtt_ms=phase.rtt_ms)
        if phase.event == "load":
            self._bed.spawn("server", _python(_LOAD, str(self._config), near_address))
        if phase.event == "kill":
            self._server.kill()
        now_s = time.monotonic() - self._begin_s
        begun = (
            *self._recording.begun[:-1],
            *(replace(begun, end_s=now_s) for begun in self._recording.begun[-1:]),
        )
        self._recording = replace(self._recording, begun=(*begun, PhaseTimes(phase, now_s, now_s)))

    def follow(self, seconds: float) -> None:
        """Record for a while.

        Raises:
            TransportError: the device's process ended.
        """
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            time.sleep(min(_POLL_S, max(until_s - time.monotonic(), 0.0)))
            self._check()
            self._update()

    def finish(self) -> Recording:
        self._recording = replace(self._recording, is_over=True)
        self._on_change(self._recording)
        return self._recording

    def _check(self) -> None:
        if self._device.wait(0) is not None:
            raise TransportError(f"the demo's device ended {self._device.explain_end()}")

    def _update(self) -> None:
        written = self._device.output[self._read_bytes :]
        whole = written[: written.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        now_s = time.monotonic() - self._begin_s
        requests = [
            _read_request(plain, self._begin_s)
            for plain in map(json.loads, whole.splitlines())
            if "policy" in plain
        ]
        *before, last = self._recording.begun
        self._recording = replace(
            self._recording,
            begun=(*before, replace(last, end_s=now_s)),
            requests=(*self._recording.requests, *(request for request in requests if request.at_s >= 0)),
        )
        self._on_change(self._recording)


def _read_request(plain: dict[str, Any], begin_s: float) -> Request:
    return Request(
        at_s=plain["at_s"] - begin_s,
        policy=plain["policy"],
        plan=plain["plan"],
        latency_s=plain.get("latency_s", math.inf),
        is_right=plain["is_right"],
        reason=plain["reason"],
    )
