"""The device's own meter, such as the INA3221 of a Jetson, as `edgekit-device sensors` reads it."""

import abc
import json
import shlex

import attr
from labgrid.driver import Driver
from labgrid.factory import target_factory

from edgekit_runtime.errors import BenchError

_START_LIMIT_S = 20


class MeterProtocol(abc.ABC):
    """Measures what the device draws."""

    @abc.abstractmethod
    def start(self) -> None:
        """Begin to measure."""

    @abc.abstractmethod
    def stop(self) -> tuple[tuple[float, float], ...]:
        """Return (seconds since `start`, watts) of each reading since then."""

    @property
    @abc.abstractmethod
    def scope(self) -> str:
        """What the watts are of, such as `board`; for the method of a figure."""


@target_factory.reg_driver
@attr.s(eq=False)
class SensorsDriver(Driver, MeterProtocol):
    """Reads the sensors over the device's shell, once a second.

    Attributes:
        python: starts, on the device, a Python in which the runtime is installed.
        sysfs: where the kernel's tree is on the device.
    """

    bindings = {"command": "CommandProtocol"}  # noqa: RUF012  # labgrid's
    python: str = attr.ib(default="python3", validator=attr.validators.instance_of(str))
    sysfs: str = attr.ib(default="/sys", validator=attr.validators.instance_of(str))

    def on_activate(self) -> None:
        """Find the sensors.

        Raises:
            BenchError: the device has none that measures power; the message says what is missing.
        """
        found = json.loads("\n".join(self.command.run_check(self._sensors("--json"), timeout=_START_LIMIT_S)))
        if found["power_w"] is None:
            missing = "; ".join(found["missing"].values()) or "no reading"
            raise BenchError(f"the device's sensors measure no power: {missing}")
        self._scope = f"{found['power_of']}, by {', '.join(each['name'] for each in found['sensors'])}"
        self._process = 0

    @property
    def scope(self) -> str:
        """What the watts are of."""
        return self._scope

    @Driver.check_active  # type: ignore[untyped-decorator]
    def start(self) -> None:
        """Begin to measure."""
        watch = self._sensors("--watch", "--json")
        folder = self.command.run_check("mktemp -d")[0]
        command = f"nohup {watch} </dev/null >{folder}/watts 2>{folder}/errors & echo $!"
        self._folder, self._process = folder, int(self.command.run_check(command)[0])

    @Driver.check_active  # type: ignore[untyped-decorator]
    def stop(self) -> tuple[tuple[float, float], ...]:
        """Return the readings since `start`.

        Raises:
            BenchError: there are none.
        """
        folder = self._folder
        lines = self.command.run_check(f"kill {self._process}; cat {folder}/watts {folder}/errors")
        self.command.run(f"rm -r {folder}")
        readings = [json.loads(line) for line in lines if line.startswith("{")]
        watts = [each["power_w"] for each in readings]
        if not watts or None in watts:
            raise BenchError(f"the device's sensors gave no power: {' '.join(lines[-1:]) or 'no reading'}")
        return tuple((second + 1.0, float(each)) for second, each in enumerate(watts))

    def _sensors(self, *arguments: str) -> str:
        words = ["-m", "edgekit_runtime.cli", "sensors", "--sysfs", self.sysfs, *arguments]
        return f"{self.python} {shlex.join(words)}"
