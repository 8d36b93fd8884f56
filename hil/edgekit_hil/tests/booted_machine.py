"""The service under systemd on the booted machine, and the events that a device must survive.

`ServiceMachine` installs the service as docs/reference/service.md says, and keeps that as a snapshot. Each of
`EVENTS` begins there and does something to the machine; then the right version must serve again.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgekit_hil.benches.device import describe
from edgekit_hil.benches.opening import Bench
from edgekit_hil.tests.host_side import Fleet
from edgekit_runtime.errors import BenchError

MODEL: Final = "digits_cnn"
FIRST, SECOND = "1.0.0", "1.1.0"  # of one model, but each may be quantized in its own way
MOST_RESTART_S: Final = 10.0
"""The time in which systemd must restart the service, in seconds. The unit says 100 ms, but the machine is
emulated."""

_SERVING: Final = "serving"
_NEAR: Final = 0.2  # between the outputs of two quantized forms of the model, which are about -3 to 1
_SETTLE_S: Final = 240.0  # a boot and a start of the service, on a machine under load
_SHORT_WATCHDOG_US: Final = 10_000_000
_BEFORE_PANIC_S: Final = 3  # for the shell that ordered it
_BEFORE_REBOOT_S: Final = 0.2  # likewise, because systemd also ends the shell
_ROLLOUT_S: Final = 240.0
_AFTER_BEGIN_S: Final = 5.0  # of an update by a fleet, which reports its begin late
_AS_EDGEKIT: Final = (
    "runuser -u edgekit -- env EDGEKIT_STATE=/var/lib/edgekit EDGEKIT_HOME=/etc/edgekit"
    " EDGEKIT_CACHE=/var/cache/edgekit"
)
_UNIT: Final = "/etc/systemd/system/edgekit.service"
_AGENT_UNIT: Final = "/etc/systemd/system/edgekit-agent.service"
_INFER: Final = """
import json, socket, sys
values = [0.5] * 64
body = json.dumps({"inputs": [{"name": sys.argv[2], "datatype": "FP32", "shape": json.loads(sys.argv[3]),
                               "data": values}]}).encode()
link = socket.socket(socket.AF_UNIX)
link.settimeout(30)
link.connect("/run/edgekit/edgekit.sock")
head = f"POST /v2/models/{sys.argv[1]}/infer HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n"
link.sendall(f"{head}Content-Length: {len(body)}\\r\\n\\r\\n".encode() + body)
answer = b"".join(iter(lambda: link.recv(65536), b""))
reply = json.loads(answer.partition(b"\\r\\n\\r\\n")[2])
print(reply["model_version"], *[round(each, 3) for each in reply["outputs"][0]["data"]])
"""


_INSTALL: Final = (
    "systemd-run --quiet --unit=installing sh -c '"
    f"{_AS_EDGEKIT} edgekit-device install /srv/packages/{SECOND}.edgepkg;"
    " echo $? >/srv/installed; sync'"
)
"""Starts an installation of the second version, and writes its exit code to the disk when it ends."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What is expected after an event.

    Attributes:
        versions: versions that may serve.
        share: share of the time of an installation after which the machine went down; None for other events.
        is_interrupted: whether it went down before the end of an installation or update.
    """

    versions: tuple[str, ...]
    share: float | None = None
    is_interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an event.

    Attributes:
        version: version that serves afterwards.
        restart_s: seconds from the end of the service to the start of its next process, by the machine's
            clock; None if it should not end, or the machine booted.
        seconds: time from the begin of the event to the first answer, by this machine's clock; it includes
            what the event interrupts, such as an installation.
    """

    event: str
    version: str
    expected: Expectation
    restart_s: float | None
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether the right version serves, and systemd has restarted it in time if it had ended."""
        in_time = self.restart_s is None or 0 < self.restart_s < MOST_RESTART_S
        return self.version in self.expected.versions and in_time


class ServiceMachine:
    """The booted machine with the service under systemd and one installed model.

    Attributes:
        install_s: duration of an installation of the second version as events begin it, on the machine of the
            snapshot, by this machine's clock.
    """

    def __init__(self, bench: Bench, packages: Mapping[str, Path], public_key: Path) -> None:
        """Install the service, and save the machine as a snapshot."""
        self._bench = bench
        self._answer: list[str] | None = None
        self._strategy = bench.target.get_strategy()
        self._machine = bench.target.get_driver("BootedMachineDriver")
        self._ssh = bench.target.get_driver("SSHDriver", activate=False)
        self._strategy.transition("shell")
        for version, path in packages.items():
            self._ssh.put(str(path), f"/srv/{version}.edgepkg")
        self._ssh.put(str(public_key), "/srv/bench.pub.pem")
        self.run("useradd --system --no-create-home edgekit")
        self.run(f"edgekit-device serve --print-unit >{_UNIT}")
        self.run("EDGEKIT_HOME=/etc/edgekit edgekit-device keys trust /srv/bench.pub.pem")
        self.run("mkdir /srv/packages && mv /srv/*.edgepkg /srv/packages")
        self.run("systemctl daemon-reload && systemctl enable --now edgekit")
        self.install(FIRST)
        self.wait_serving()
        self.run("sync")
        self._boot = self.read_boot()
        self._machine.save(_SERVING)
        self.begin()
        begun_s = time.monotonic()
        self.install(SECOND)
        self.install_s = time.monotonic() - begun_s

    def begin(self) -> None:
        """Restore the machine on which the first version serves; the bench breaks if it does not answer."""
        with self._bench.break_on_error("before an event"):
            self._strategy.restore(_SERVING)

    def run(self, command: str, limit_s: float = 120.0) -> str:
        """Return the output of a command.

        Raises:
            BenchError: it failed.
        """
        output, errors, code = self._ssh.run(command, timeout=limit_s)
        if code:
            raise BenchError(f"`{command}` ended with {code}: {' '.join(errors or output)[-800:]}")
        return "\n".join(output)

    def install(self, version: str) -> None:
        """Install a version as the service's user, to its end."""
        self.run(f"{_AS_EDGEKIT} edgekit-device install /srv/packages/{version}.edgepkg")

    def join_fleet(self, code: str, target: str) -> None:
        """Enrol the machine in a fleet, with the agent's unit; all of it is on the disk afterwards."""
        self.run("install -d -o edgekit -g edgekit /etc/edgekit/keys /etc/edgekit/fleet")
        self.run(f"{_AS_EDGEKIT} EDGEKIT_TARGET={target} edgekit-device enroll --code {code}", _SETTLE_S)
        self.run(f"edgekit-device agent --print-unit >{_AGENT_UNIT}")
        self.run("systemctl daemon-reload && systemctl enable --now edgekit-agent && sync")

    def wait_serving(self) -> str:
        """Return the version that answers an inference, once one does.

        Raises:
            BenchError: none answered within four minutes, or one did not answer about as the first time.
        """
        words = f"python3 -S -c '{_INFER}' {MODEL} image '[1, 1, 8, 8]'"
        deadline = time.monotonic() + _SETTLE_S
        while True:
            output, errors, code = self._ssh.run(words, timeout=60)
            if code == 0:
                version, *answer = output[0].split()
                self._answer = self._answer or answer
                if any(
                    abs(float(actual) - float(other)) > _NEAR
                    for actual, other in zip(answer, self._answer, strict=True)
                ):
                    raise BenchError(f"version {version} answers {answer}, expected {self._answer}")
                return str(version)
            if time.monotonic() > deadline:
                state = self.run("systemctl status edgekit --no-pager -n 15 || true")
                raise BenchError(f"the service does not answer: {' '.join(errors)[-300:]} {state}")
            time.sleep(0.5)

    def reconnect(self) -> None:
        """Connect again after a boot."""
        self._strategy.connect()

    def cut_power(self) -> None:
        """Cut the power for a moment, and connect when the machine is up again.

        Raises:
            BenchError: it has not booted.
        """
        self._machine.cycle()
        self.wait_boot(self._boot)

    def read_boot(self) -> str:
        """Return the id of the present boot."""
        return self.run("cat /proc/sys/kernel/random/boot_id")

    def wait_boot(self, before: str) -> None:
        """Connect again once the machine has booted after the boot `before`.

        Raises:
            BenchError: it has not booted within four minutes.
        """
        deadline, why = time.monotonic() + _SETTLE_S, ""
        while time.monotonic() < deadline:
            try:
                self.reconnect()
                if self.read_boot() != before:
                    return
                why = "it goes on in the boot before"
            except Exception as cause:  # of any class, while the machine goes down
                why = describe(cause)
            time.sleep(0.5)
        raise BenchError(f"the machine did not boot again: {why}")

    def reboot(self, after_s: float = 0.0, *, beside: str = "true") -> None:
        """Reboot by systemd, which stops each unit, and connect when the machine is up again.

        Args:
            after_s: seconds until the reboot, by the machine's clock.
            beside: shell command that starts together with the wait.
        """
        delay_s = max(after_s, _BEFORE_REBOOT_S)
        self.run(f"systemd-run --quiet sh -c 'sleep {delay_s:.2f}; systemctl reboot' & {beside}; wait")
        self.wait_boot(self._boot)

    def read_times(self) -> dict[str, float]:
        """Return when the service ended and started, in seconds of the machine's clock, and its process."""
        names = ("ExecMainStartTimestampMonotonic", "InactiveEnterTimestampMonotonic", "MainPID", "NRestarts")
        lines = self.run(f"systemctl show edgekit -p {','.join(names)}").splitlines()
        settings = dict(line.split("=", 1) for line in lines)
        return {name: float(settings[name] or 0) / (1e6 if "Timestamp" in name else 1) for name in names}


Event = Callable[[ServiceMachine, random.Random], Expectation]
"""Acts on the machine and returns what is expected afterwards."""


def kill(machine: ServiceMachine, _: random.Random) -> Expectation:
    machine.run("kill -9 $(systemctl show edgekit -p MainPID --value)")
    return Expectation((FIRST,))


def hang(machine: ServiceMachine, _: random.Random) -> Expectation:
    """Stop the service's process, so that it no longer feeds systemd's watchdog; wait until it has ended."""
    pid = machine.run("systemctl show edgekit -p MainPID --value")
    machine.run(f"kill -STOP {pid}; while [ -e /proc/{pid} ]; do sleep 0.5; done")
    return Expectation((FIRST,))


def exhaust_memory(machine: ServiceMachine, _: random.Random) -> Expectation:
    """Take all memory of the machine in another program; the kernel must kill that, not the service."""
    before = machine.read_times()["MainPID"]
    hog = "python3 -S -c 'held = [bytearray(16 << 20) for _ in range(128)]'"
    machine.run(f"{hog}; [ $? = 137 ]")
    after = machine.read_times()["MainPID"]
    if before != after:
        raise BenchError("the kernel killed the service instead of the program that took all memory")
    return Expectation((FIRST,))


def limit_memory(machine: ServiceMachine, _: random.Random) -> Expectation:
    """Have the kernel kill the service for its own use of memory."""
    pid = machine.run("systemctl show edgekit -p MainPID --value")
    limit = "echo 8M >/sys/fs/cgroup/system.slice/edgekit.service/memory.max"
    machine.run(
        "systemctl set-property --runtime edgekit MemoryMax=8M;"
        f" while [ -e /proc/{pid} ]; do {limit}; sleep 0.2; done;"
        " systemctl set-property --runtime edgekit MemoryMax=infinity"
    )
    return Expectation((FIRST,))


def _find_expected(machine: ServiceMachine, share: float) -> Expectation:
    """Return the expected state after a power cut at this share of an installation's time."""
    code = machine.run("cat /srv/installed 2>/dev/null || true")
    if code not in ("", "0"):
        raise BenchError(f"the installation ended with {code} before the machine went down")
    return Expectation((SECOND,) if code else (FIRST, SECOND), share, is_interrupted=not code)


def cut_power_in_installation(machine: ServiceMachine, rng: random.Random) -> Expectation:
    """Cut the power at any point of an installation of the second version, or shortly after it."""
    share = rng.uniform(0, 1)
    machine.run(_INSTALL)
    time.sleep(share * machine.install_s)
    machine.cut_power()
    return _find_expected(machine, share)


def reboot_in_installation(machine: ServiceMachine, rng: random.Random) -> Expectation:
    """Reboot in order at any point of an installation of the second version, or shortly after it."""
    share = rng.uniform(0, 1)
    machine.reboot(share * machine.install_s, beside=_INSTALL)
    return _find_expected(machine, share)


def panic(machine: ServiceMachine, _: random.Random) -> Expectation:
    """Let the kernel panic; the watchdog of the board must reset the machine."""
    manager = "org.freedesktop.systemd1 /org/freedesktop/systemd1 org.freedesktop.systemd1.Manager"
    machine.run(f"busctl set-property {manager} RuntimeWatchdogUSec t {_SHORT_WATCHDOG_US}")
    boot = machine.read_boot()
    machine.run(f"sync; (sleep {_BEFORE_PANIC_S}; echo c >/proc/sysrq-trigger) >/dev/null 2>&1 &")
    machine.wait_boot(boot)
    return Expectation((FIRST,))


@dataclass(frozen=True, slots=True)
class InterruptedUpdate:
    """The event that the machine goes down while a fleet updates it to the second version.

    Attributes:
        package: package of the second version.
        interrupt: brings the machine down, and returns when it is up again.
    """

    fleet: Fleet
    package: Path
    target: str
    interrupt: Callable[[ServiceMachine], None]

    def __call__(self, machine: ServiceMachine, rng: random.Random) -> Expectation:
        """Interrupt an update, and wait until the fleet has ended its rollout."""
        name = f"booted-{rng.getrandbits(32):08x}"
        machine.join_fleet(self.fleet.invite(name), self.target)
        self.fleet.start_rollout(name, self.package, to=f"bench={name}")
        self.fleet.wait_begun(name)
        time.sleep(rng.uniform(0, _AFTER_BEGIN_S))
        self.fleet.check_open(name)
        self.interrupt(machine)
        ended = self.fleet.wait_ended(name, _ROLLOUT_S)
        if ended["state"] != "succeeded":
            raise BenchError(f"the rollout did not go on after the boot: {ended}")
        machine.run("systemctl is-active edgekit-agent")
        return Expectation((SECOND,), is_interrupted=True)


EVENTS: Final[Mapping[str, Event]] = {
    "kill -9": kill,
    "service hangs": hang,
    "out of memory: another program": exhaust_memory,
    "out of memory: the service": limit_memory,
    "power cut in an installation": cut_power_in_installation,
    "reboot in an installation": reboot_in_installation,
    "kernel panic": panic,
}
UPDATE_EVENTS: Final[Mapping[str, Callable[[ServiceMachine], None]]] = {
    "power cut in an update by a fleet": ServiceMachine.cut_power,
    "reboot in an update by a fleet": ServiceMachine.reboot,
}
"""A dict from names of events to functions that bring the machine down in an `InterruptedUpdate`."""
_ENDS_SERVICE: Final = {"kill -9", "service hangs", "out of memory: the service"}


def try_event(machine: ServiceMachine, name: str, event: Event, seed: int) -> Outcome:
    """Return the outcome of one event, from the snapshot on.

    Args:
        machine: machine on which it happens.
        name: name of the event.
        event: one of `EVENTS`, or an `InterruptedUpdate`.
        seed: seed of its random choices.

    Raises:
        BenchError: the service does not serve again in time.
    """
    machine.begin()
    begun_s = time.monotonic()
    expected = event(machine, random.Random(seed))  # noqa: S311
    version = machine.wait_serving()
    seconds = time.monotonic() - begun_s
    restart_s = None
    if name in _ENDS_SERVICE:
        times = machine.read_times()
        if times["NRestarts"] < 1:
            raise BenchError(f"systemd has not restarted the service after the event '{name}'")
        restart_s = times["ExecMainStartTimestampMonotonic"] - times["InactiveEnterTimestampMonotonic"]
    return Outcome(name, version, expected, restart_s, round(seconds, 1))
