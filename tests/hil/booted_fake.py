"""A machine with the service, for tests of what judges the booted one."""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from edgekit_hil.tests.booted_machine import FIRST, SECOND, ServiceMachine

RIGHT = "0.1 0.9"


@dataclass
class Clock:
    """Time that passes only in `sleep`."""

    now_s: float = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass
class FakeMachine:
    """The machine; a test changes what it does wrong.

    Attributes:
        version: version that serves, or None.
        answer: outputs of an inference.
        boot: number of the present boot.
        boots: whether power cuts, reboots and panics lead to another boot.
        is_up: whether it answers.
        restart_s: time until systemd has restarted the service; None if it does not.
        installed: exit code of an ended installation, or an empty text.
        pid: of the service.
        hog_kills_service: whether the kernel kills the service for the memory of another program.
        agent: whether the agent's unit is active.
    """

    version: str | None = FIRST
    answer: str = RIGHT
    boot: int = 1
    boots: bool = True
    is_up: bool = True
    restart_s: float | None = 0.1
    installed: str = ""
    pid: int = 100
    hog_kills_service: bool = False
    agent: bool = True
    restarts: int = field(default=0, init=False)

    def open(self) -> ServiceMachine:
        """Return what a test and a benchmark use, on this machine."""
        drivers = {"BootedMachineDriver": self, "SSHDriver": self}
        target = SimpleNamespace(get_strategy=lambda: self, get_driver=lambda name, **_: drivers[name])
        bench: Any = SimpleNamespace(target=target, break_on_error=lambda _: contextlib.nullcontext())
        return ServiceMachine(bench, {FIRST: Path("first"), SECOND: Path("second")}, Path("key"))

    # labgrid's strategy and drivers:

    def transition(self, _: str) -> None: ...

    def restore(self, _: str) -> None: ...

    def save(self, _: str) -> None: ...

    def put(self, *_: str) -> None: ...

    def connect(self) -> None:
        if not self.is_up:
            raise ConnectionError("no route to host")

    def cycle(self) -> None:
        self.boot += self.boots

    def run(self, command: str, timeout: float) -> tuple[list[str], list[str], int]:
        del timeout
        self.connect()
        if "AF_UNIX" in command:
            if self.version is None:
                return [], ["connection refused"], 1
            return [f"{self.version} {self.answer}"], [], 0
        if "boot_id" in command:
            return [f"boot {self.boot}"], [], 0
        if "ExecMainStart" in command:
            start_us = 1e6 * (50 + (self.restart_s or 0))
            return (
                [
                    f"ExecMainStartTimestampMonotonic={start_us}",
                    "InactiveEnterTimestampMonotonic=50000000",
                    f"MainPID={self.pid}",
                    f"NRestarts={self.restarts}",
                ],
                [],
                0,
            )
        if "kill -" in command or "MemoryMax" in command:
            self.restarts += self.restart_s is not None
        elif "held = " in command:
            self.pid += self.hog_kills_service
        elif "systemctl reboot" in command or "sysrq" in command:
            self.cycle()
        elif "/srv/installed 2>" in command:
            return [self.installed] if self.installed else [], [], 0
        elif "is-active edgekit-agent" in command and not self.agent:
            return ["inactive"], [], 3
        return [], [], 0
