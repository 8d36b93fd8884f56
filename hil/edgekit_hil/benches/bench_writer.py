"""Writes the environment file of a device that is reached by ssh."""

import getpass
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from edgekit_runtime.errors import BenchError
from edgekit_runtime.system.atomic_files import write_atomically

SENSORS: Final = "sensors"
"""Stands for the device's own meter."""
METER_COMMAND: Final = "command:"
"""The prefix of a meter that a command on this machine reads."""

_USB: Final = "usb"
_SWITCH_DELAY_S: Final = 5.0  # capacitors keep a board running for a moment
_CONNECT_LIMIT_S: Final = 20.0
_HEAD: Final = "# An environment file of labgrid with one more section, `edgekit:`; see docs/guide/hil.md.\n"


@dataclass(frozen=True, slots=True)
class SshBench:
    """The ssh address of a device, and its power switch.

    Attributes:
        address, port, user: The ssh login.
        power: The labgrid resource and the labgrid driver of the power switch, or None without a switch. Each
            is a dict from class name to arguments.
    """

    address: str
    port: int
    user: str
    power: tuple[Mapping[str, Any], Mapping[str, Any]] | None

    @classmethod
    def parse(cls, host: str, *, power: str | None) -> "SshBench":
        """Parse the address `[USER@]HOST[:PORT]` and the power switch `MODEL:HOST:OUTLET` or `usb:HUB:PORT`.

        The default user is the user of this process, and the default port is 22.

        Raises:
            BenchError: A text is malformed.
        """
        user, _, host_and_port = host.rpartition("@")
        address, colon, port = host_and_port.partition(":")
        port = port if colon else "22"
        if not address or not port.isdecimal() or not 0 < int(port) < 1 << 16 or address.startswith("-"):
            raise BenchError(f"host {host!r}: expected [USER@]HOST[:PORT], such as user@jetson.local")
        switch = None if power is None else _read_switch(power)
        return cls(address, int(port), user or getpass.getuser(), switch)


def _read_switch(text: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    model, _, address = text.partition(":")
    outlet_host, _, index = address.rpartition(":")
    if not model or not outlet_host or not index.isdigit():
        raise BenchError(
            f"power switch {text!r}: expected MODEL:HOST:OUTLET with a model of labgrid's NetworkPowerPort,"
            " such as shelly_gen2:http://10.0.0.5:0, or usb:HUB:PORT, such as usb:1-1:2"
        )
    delay = {"delay": _SWITCH_DELAY_S}
    if model == _USB:
        port = {"USBPowerPort": {"match": {"sys_name": f"{outlet_host}:1.0"}, "index": int(index)}}
        return port, {"USBPowerDriver": delay}
    import importlib.util

    if importlib.util.find_spec(f"labgrid.driver.power.{model}") is None:
        raise BenchError(f"power switch {text!r}: labgrid knows no model {model!r} of NetworkPowerPort")
    return {"NetworkPowerPort": {"model": model, "host": outlet_host, "index": index}}, {
        "NetworkPowerDriver": delay
    }


def write_bench(
    path: Path, bench: SshBench, *, settings: Mapping[str, str], key: Path | None, meter: str | None
) -> None:
    """Write an environment file that only its owner can read, because it may contain a password.

    Args:
        path: The path of the file.
        bench: The device.
        settings: The section `edgekit:`, see `BenchSettings`.
        key: The path of an ssh private key, or None for the default keys of ssh.
        meter: `SENSORS` for the power sensors of the device, `METER_COMMAND` followed by a local command that
            prints watts, or None.

    Raises:
        OutputError: The file cannot be written.
    """
    service = {"address": bench.address, "username": bench.user, "port": bench.port}
    resources: list[Mapping[str, Any]] = [{"NetworkService": service}]
    ssh: dict[str, Any] = {"connection_timeout": _CONNECT_LIMIT_S}
    if key is not None:
        ssh["keyfile"] = str(key.absolute())
    drivers: list[Mapping[str, Any]] = [{"SSHDriver": ssh}]
    if bench.power is not None:
        resources.append(bench.power[0])
        drivers.append(bench.power[1])
    document: dict[str, Any] = {
        "edgekit": dict(settings),
        "targets": {"main": {"resources": resources, "drivers": drivers}},
    }
    if meter == SENSORS:
        drivers.append({"SensorsDriver": {"python": settings["python"]}})
        document["imports"] = ["edgekit_hil.drivers.sensors"]
    elif meter is not None:
        drivers.append({"CommandMeterDriver": {"command": meter.removeprefix(METER_COMMAND).strip()}})
        document["imports"] = ["edgekit_hil.drivers.meter"]
    with write_atomically(path, mode=0o600) as file:
        file.write(f"{_HEAD}{yaml.safe_dump(document, sort_keys=False)}".encode())
