"""Open a bench: hold it, bring its device to a shell, and see that the device is what the file says."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from labgrid import Environment
from labgrid.exceptions import NoDriverFoundError, NoStrategyFoundError

from edgekit_hil.benches.bench_file import BenchFile
from edgekit_hil.benches.bench_lock import BenchLock
from edgekit_hil.benches.device import Device, describe
from edgekit_hil.evidence.evidence_file import DeviceFacts
from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import BenchError, BenchUnavailableError, EdgekitError

LEAST_FREE_BYTES: Final = 200 << 20  # for packages in two slots, with their caches
_LEAST_PYTHON: Final = (3, 10)
_FACTS: Final = """
import json, os, platform, shutil, sys
from importlib import metadata

def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip("\\0 \\n")
    except OSError:
        return ""

def engine(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

def processor():
    for line in read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return ""

names = ("onnxruntime", "onnxruntime-gpu", "ai-edge-litert", "tflite-runtime", "tensorrt")
release = [line for line in read("/etc/os-release").splitlines() if line.startswith("PRETTY_NAME=")]
try:
    import edgekit_runtime
    runtime = edgekit_runtime.__version__
except ImportError:
    runtime = ""
print(json.dumps({
    "model": read("/proc/device-tree/model") or processor() or platform.machine(),
    "architecture": platform.machine(),
    "os": release[0].partition("=")[2].strip('"') if release else platform.system(),
    "kernel": platform.release(),
    "python": ".".join(map(str, sys.version_info[:3])),
    "runtime": runtime,
    "engines": {name: engine(name) for name in names if engine(name)},
    "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    "free_bytes": shutil.disk_usage(".").free,
}))
"""


@dataclass(frozen=True, slots=True)
class Bench:
    """An opened bench.

    Attributes:
        file: its environment file.
        facts: what its device is.
        target: labgrid's, for drivers that only some benches have.
        home: absolute path of the folder on the device in which tests make theirs.
        power: labgrid's driver that cuts the device's power, or None.
        lock: to note that the bench is broken.
    """

    file: BenchFile
    facts: DeviceFacts
    target: Any
    home: str
    power: Any
    lock: BenchLock

    @property
    def power_label(self) -> str:
        """How the power is cut, for evidence."""
        return str(getattr(self.power, "power_label", type(self.power).__name__))

    def open_folder(self, name: str) -> Device:
        """Return the device with a folder of that name for its state."""
        command = self.target.get_active_driver("CommandProtocol")
        transfer = self.target.get_active_driver("FileTransferProtocol")
        return Device(command, transfer, f"{self.home}/{name}", self.file.settings.python)


@contextlib.contextmanager
def open_bench(file: BenchFile) -> Iterator[Bench]:
    """Return a bench whose device answers, and release it at the end.

    Raises:
        BenchUnavailableError: it cannot be had here and now; the message says why.
        BenchError: it is in use or broken, or labgrid refuses the file.
    """
    lock = BenchLock.of(file)
    with lock.hold(keeps_state=file.settings.kind == "real"), contextlib.ExitStack() as undo:
        try:
            environment = Environment(str(file.path))
            undo.callback(environment.cleanup)
            target = environment.get_target("main")
        except Exception as cause:
            raise BenchError(f"{file.path}: labgrid refuses it: {describe(cause)}") from cause
        _bring_up(file, target)
        home = _run(target, 'mkdir -p "$HOME/.edgekit-bench" && cd "$HOME/.edgekit-bench" && pwd')
        probe = Device(target.get_active_driver("CommandProtocol"), None, home.strip(), file.settings.python)
        facts = read_facts(file, probe)
        yield Bench(file, facts, target, home.strip(), _find_power(target), lock)


def read_facts(file: BenchFile, device: Device) -> DeviceFacts:
    """Return what a device is.

    Raises:
        BenchUnavailableError: it is not what the file says, or lacks what the runtime needs.
    """
    name, python = file.settings.name, file.settings.python
    found = device.try_run("uname -m")
    machine = found.output.strip()
    if machine != file.settings.architecture:
        raise BenchUnavailableError(
            f"bench '{name}': the device is {machine or found.errors.strip()}, and {file.path} expects"
            f" {file.settings.architecture}: check the address, or correct the file"
        )
    version = device.try_run(f"{python} -c 'import sys; print(*sys.version_info[:2])'")
    if version.exit_code or tuple(map(int, version.output.split())) < _LEAST_PYTHON:
        what = f"is {'.'.join(version.output.split())}" if not version.exit_code else "does not start"
        least = ".".join(map(str, _LEAST_PYTHON))
        raise BenchUnavailableError(
            f"bench '{name}': `{python}` on the device {what}, and the runtime needs Python {least} or later:"
            f" name another one as `python:` in {file.path}. {version.errors.strip()[-300:]}".strip()
        )
    facts = from_plain(DeviceFacts, json.loads(device.run_python(_FACTS)), "facts", BenchError)
    if facts.free_bytes < LEAST_FREE_BYTES:
        raise BenchUnavailableError(
            f"bench '{name}': {facts.free_bytes >> 20} MiB are free in {device.folder} on the device, and the"
            f" tests need {LEAST_FREE_BYTES >> 20} MiB: remove something"
        )
    return facts


def _bring_up(file: BenchFile, target: Any) -> None:
    """Bring the device to a shell, by the strategy of the file if it names one."""
    try:
        try:
            target.get_strategy().transition("shell")
        except NoStrategyFoundError:
            for protocol in ("CommandProtocol", "FileTransferProtocol"):
                target.activate(target.get_driver(protocol, activate=False))
    except Exception as cause:
        why = cause if isinstance(cause, EdgekitError) else describe(cause)
        raise BenchUnavailableError(f"bench '{file.settings.name}': {why}") from cause


def _find_power(target: Any) -> Any:
    """Return the active driver that cuts the power, or None."""
    try:
        return target.get_driver("PowerProtocol")
    except NoDriverFoundError:
        return None


def _run(target: Any, command: str) -> str:
    output, errors, code = target.get_active_driver("CommandProtocol").run(command, timeout=60)
    if code:
        raise BenchUnavailableError(f"`{command}` ended with {code} on the device: {' '.join(errors)}")
    return "\n".join(output)
