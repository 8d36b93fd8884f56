"""Opens a bench: locks it, connects to its device, and checks that the device matches the bench file."""

import contextlib
import json
import shlex
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from labgrid import Environment
from labgrid.exceptions import NoDriverFoundError, NoResourceFoundError, NoStrategyFoundError
from labgrid.strategy import StrategyError

import edgekit_runtime
from edgekit_hil.benches import runtime_digest
from edgekit_hil.benches.bench_file import BenchFile
from edgekit_hil.benches.bench_lock import BenchLock
from edgekit_hil.benches.device import Device, describe
from edgekit_hil.drivers.meter import MeterProtocol
from edgekit_hil.provisioning.device_facts import OLDEST_PYTHON
from edgekit_runtime.agent.device_facts import DeviceFacts
from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import BenchError, BenchUnavailableError, EdgekitError

LEAST_FREE_BYTES: Final = 200 << 20  # for packages in two slots, with their caches
_CONNECT_LIMIT_S: Final = 10.0
# One start of Python, of which a small or emulated device takes seconds: version, then runtime_digest.
_PROBE: Final = f"""
import sys
print(*sys.version_info[:2])
if sys.version_info >= {OLDEST_PYTHON}:
    exec(sys.argv[1])
"""
# Ends the programs that a killed run has left, and prints the folder of all tests.
_HOME: Final = """
mkdir -p "$HOME/.edgekit-bench" && cd "$HOME/.edgekit-bench" && home=$(pwd -P) && cd / &&
left=$(find /proc -maxdepth 2 -path "/proc/[0-9]*/cwd" -lname "$home/*" 2>/dev/null | cut -d / -f 3)
if [ -n "$left" ]; then kill -9 $left 2>/dev/null; fi
echo "$home"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """An opened bench.

    Attributes:
        target: The labgrid target, which gives access to drivers that only some benches have.
        home: The absolute path on the device in which each test gets a folder.
        power: The labgrid driver that switches the power of the device, or None.
        meter: The active driver with `MeterProtocol`, or None.
        meter_text: What the meter measures, or why there is no meter.
        lock: The lock that marks the bench as broken.
        boot_id: The path of a file on the device whose content changes with each boot.
        boot_limit_s: The time limit for the device to answer after power is restored.
    """

    file: BenchFile
    facts: DeviceFacts
    target: Any
    home: str
    power: Any
    meter: Any
    meter_text: str
    lock: BenchLock
    boot_id: str = "/proc/sys/kernel/random/boot_id"
    boot_limit_s: float = 300

    def cut_power(self) -> None:
        """Cut the power of the device, restore it, and wait until the device has booted.

        Raises:
            BenchError: The device does not answer in time, or its power was not cut.
        """
        command = self.command
        if command is self.power:  # a device without a boot
            command.cycle()
            return
        before = _run(self.target, f"cat {self.boot_id}")
        try:
            self.power.cycle()
        except BaseException:  # also Ctrl-C between off and on
            with contextlib.suppress(Exception):
                self.power.on()
            raise
        deadline = time.monotonic() + self.boot_limit_s
        stopped = self.target.deactivate(command)  # also the drivers that use it, such as the meter's
        for driver in stopped:
            while (fault := _try_activate(self.target, driver)) is not None:
                if time.monotonic() > deadline:
                    raise BenchError(
                        f"no answer for {self.boot_limit_s:g} s after the power came back: {fault}"
                    )
        if _run(self.target, f"cat {self.boot_id}") == before:
            raise BenchError(
                f"the power switch of bench '{self.file.settings.name}' did not cut the device's power: it"
                " has not booted. Is it the right outlet; can the hub switch its ports (`uhubctl`)?"
            )

    @property
    def power_label(self) -> str:
        """How the power is cut, as a text for evidence."""
        return str(getattr(self.power, "power_label", type(self.power).__name__))

    @property
    def can_restore(self) -> bool:
        """Whether the bench file has a labgrid strategy that can restore snapshots of the device."""
        try:
            return hasattr(self.target.get_strategy(), "restore")
        except NoStrategyFoundError:
            return False

    @property
    def host_address(self) -> str | None:
        """The address of this machine in the device's private network, or None without such a network."""
        addresses = (getattr(driver, "host_address", None) for driver in self.target.drivers)
        return next((address for address in addresses if address is not None), None)

    @property
    def slowdown(self) -> float:
        """The factor by which the driver slows the device down, or 1 if it does not.

        Latencies that are predicted for the target of the bench do not include this factor.
        """
        return float(getattr(self.command, "slowdown", 1.0))

    @property
    def command(self) -> Any:
        """The labgrid driver with `CommandProtocol`, which runs commands on the device."""
        return self.target.get_active_driver("CommandProtocol")

    @contextlib.contextmanager
    def open_folder(self, name: str, user: str) -> Iterator[Device]:
        """Yield the device with an empty folder. If the bench has a snapshot, restore the snapshot first.

        If the device does not answer at the start or the end, the bench is marked as broken.

        Args:
            name: The name of the folder in `home`, which is deleted at the end.
            user: The test or command that uses the device, for the message if the bench breaks.

        Raises:
            BenchError: The device does not answer.
        """
        with self.break_on_error(f"before {user}"):
            _transition(self.target)
            transfer = self.target.get_active_driver("FileTransferProtocol")
            device = Device(self.command, transfer, f"{self.home}/{name}", self.file.settings.python)
        try:
            yield device
        finally:
            with self.break_on_error(f"after {user}"):
                device.close()

    @contextlib.contextmanager
    def break_on_error(self, when: str) -> Iterator[None]:
        """Mark the bench as broken if the block raises `BenchError`, and raise the error again.

        Args:
            when: The prefix of the stored reason, such as `after test_boot`.
        """
        try:
            yield
        except BenchError as error:
            self.lock.mark_broken(f"{when}: {error}")
            raise


@contextlib.contextmanager
def open_bench(file: BenchFile) -> Iterator[Bench]:
    """Yield a bench whose device answers, and release the bench at the end of the block.

    Raises:
        BenchUnavailableError: The bench is not available now. The message says why.
        BenchError: The bench is in use or broken, or labgrid refuses the file.
    """
    lock = BenchLock.of(file)
    with lock.hold(keeps_state=file.keeps_state), contextlib.ExitStack() as undo:
        try:
            environment = Environment(str(file.path))
            undo.callback(environment.cleanup)
            target = environment.get_target("main")
        except Exception as cause:
            raise BenchError(f"{file.path}: labgrid refuses it: {describe(cause)}") from cause
        _bring_up(file, target)
        home = _run(target, _HOME).strip()
        probe = Device(target.get_active_driver("CommandProtocol"), None, home, file.settings.python)
        facts = read_facts(file, probe)
        meter, meter_text = _find_meter(target)
        yield Bench(
            file=file,
            facts=facts,
            target=target,
            home=home,
            power=_find_power(file, target),
            meter=meter,
            meter_text=meter_text,
            lock=lock,
        )


def read_facts(file: BenchFile, device: Device) -> DeviceFacts:
    """Check the architecture and the runtime of a device, and return the facts about it.

    Raises:
        BenchUnavailableError: The device does not match the file, or does not meet the runtime's
            requirements.
    """
    name, python = file.settings.name, file.settings.python
    uname = device.try_run("uname -m")
    machine = uname.output.strip()
    if machine != file.settings.architecture:
        raise BenchUnavailableError(
            f"bench '{name}': the device is {machine or uname.errors.strip()}, and {file.path} expects"
            f" {file.settings.architecture}: check the address, or correct the file"
        )
    expected = runtime_digest.hash_sources(Path(edgekit_runtime.__file__).parent)
    program = Path(runtime_digest.__file__).read_text(encoding="utf-8")
    probe = device.try_run(f"{python} -c {shlex.join([_PROBE, program, expected])}")
    version, sources, facts_json = (*probe.output.splitlines(), "", "", "")[:3]
    if not version or tuple(map(int, version.split())) < OLDEST_PYTHON:
        fault = f"is {'.'.join(version.split())}" if version else "does not start"
        least = ".".join(map(str, OLDEST_PYTHON))
        raise BenchUnavailableError(
            f"bench '{name}': `{python}` on the device {fault}, and the runtime needs Python {least} or"
            " later: `edgekit device install --host` makes /opt/edgekit/current/bin/python; or name another"
            f" one as `python:` in {file.path}. {probe.errors.strip()[-300:]}".strip()
        )
    if probe.exit_code:
        raise BenchError(f"bench '{name}': `{python}` on the device fails: {probe.errors.strip()[-2000:]}")
    if not sources:
        raise BenchUnavailableError(
            f"bench '{name}': `{python}` on the device has no edgekit: `edgekit device install --host` puts"
            f" it into /opt/edgekit/current/bin/python; name that as `python:` in {file.path}"
        )
    if sources != expected:
        raise BenchUnavailableError(
            f"bench '{name}': `{python}` on the device has another edgekit than this one, and the evidence"
            " names the commit of this one: bring it up to date by `edgekit device install --host`, with the"
            " options that you gave first"
        )
    facts = from_plain(DeviceFacts, json.loads(facts_json), "facts", BenchError)
    if facts.free_bytes < LEAST_FREE_BYTES:
        raise BenchUnavailableError(
            f"bench '{name}': {facts.free_bytes >> 20} MiB are free in {device.folder} on the device, and the"
            f" tests need {LEAST_FREE_BYTES >> 20} MiB: remove something"
        )
    return facts


def _bring_up(file: BenchFile, target: Any) -> None:
    """Connect to a shell on the device, with the strategy of the file if there is one."""
    try:
        if not _transition(target):
            _check_reachable(file, target)
            for protocol in ("CommandProtocol", "FileTransferProtocol"):
                target.activate(target.get_driver(protocol, activate=False))
    except Exception as cause:
        if isinstance(cause, BenchUnavailableError):
            raise
        why = cause if isinstance(cause, EdgekitError) else describe(cause)
        raise BenchUnavailableError(f"bench '{file.settings.name}': {why}") from cause


def _transition(target: Any) -> bool:
    """Connect to a shell with the strategy of the file, and return whether there is one.

    Raises:
        BenchError: The strategy failed.
    """
    try:
        target.get_strategy().transition("shell")
    except NoStrategyFoundError:
        return False
    except StrategyError as error:  # labgrid says no more than that it is broken
        cause = error.__cause__ or error
        raise cause if isinstance(cause, EdgekitError) else BenchError(describe(cause)) from error
    return True


def _find_power(file: BenchFile, target: Any) -> Any:
    """Return the active driver that cuts the power, or None.

    Raises:
        BenchUnavailableError: The power switch in the file does not work.
    """
    try:
        driver = target.get_driver("PowerProtocol", activate=False)
    except NoDriverFoundError:
        return None
    if (fault := _try_activate(target, driver)) is not None:
        raise BenchUnavailableError(f"bench '{file.settings.name}': its power switch does not work: {fault}")
    return driver


def _check_reachable(file: BenchFile, target: Any) -> None:
    """Check that something listens at the address, because ssh would try for a long time.

    Raises:
        BenchUnavailableError: Nothing listens there.
    """
    try:
        service = target.get_resource("NetworkService", wait_avail=False)
    except NoResourceFoundError:
        return
    address = (service.address, service.port)
    try:
        socket.create_connection(address, _CONNECT_LIMIT_S).close()
    except OSError as cause:
        raise BenchUnavailableError(
            f"bench '{file.settings.name}': {address[0]} does not answer on port {address[1]}: {cause}. Is"
            f" the device on, is its ssh server running, is the address in {file.path} right?"
        ) from cause


def _try_activate(target: Any, driver: Any) -> str | None:
    """Activate a driver, and return why that failed, or None."""
    try:
        target.activate(driver)
    except Exception as cause:
        return describe(cause)
    return None


def _find_meter(target: Any) -> tuple[Any, str]:
    """Return the active power meter and what it measures, or None and the reason."""
    meters = [driver for driver in target.drivers if isinstance(driver, MeterProtocol)]
    if not meters:
        return None, "none in the environment file"
    fault = _try_activate(target, meters[0])
    return (meters[0], meters[0].scope) if fault is None else (None, f"none: {fault}")


def _run(target: Any, command: str) -> str:
    try:
        output, errors, code = target.get_active_driver("CommandProtocol").run(command, timeout=60)
    except Exception as cause:  # labgrid's drivers raise whatever they met
        raise BenchUnavailableError(f"the device did not run `{command}`: {describe(cause)}") from cause
    if code:
        raise BenchUnavailableError(f"`{command}` ended with {code} on the device: {' '.join(errors)}")
    return "\n".join(output)
