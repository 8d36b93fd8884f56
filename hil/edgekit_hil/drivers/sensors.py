"""A meter in the device, such as the INA3221 of a Jetson, which `edgekit-device sensors` reads."""

import contextlib
import json
import shlex
from collections.abc import Iterator

import attr
from labgrid.driver import Driver
from labgrid.factory import target_factory

from edgekit_hil.drivers.meter import MeterProtocol, check_watts
from edgekit_runtime.errors import BenchError

_START_LIMIT_S = 20


@target_factory.reg_driver
@attr.s(eq=False)
class SensorsDriver(Driver, MeterProtocol):
    """Reads the power sensors of the device once a second.

    Attributes:
        python: The command that starts a Python with the runtime installed on the device.
        sysfs: The path of sysfs on the device.
    """

    bindings = {"command": "CommandProtocol"}  # noqa: RUF012  # labgrid's
    python: str = attr.ib(default="python3", validator=attr.validators.instance_of(str))
    sysfs: str = attr.ib(default="/sys", validator=attr.validators.instance_of(str))

    def on_activate(self) -> None:
        """Find the sensors.

        Raises:
            BenchError: The device has no sensors for power. The message says what is missing.
        """
        document = json.loads(
            "\n".join(self.command.run_check(self._sensors("--json"), timeout=_START_LIMIT_S))
        )
        if document["power_w"] is None:
            missing = "; ".join(document["missing"].values()) or "no reading"
            raise BenchError(f"the device's sensors measure no power: {missing}")
        self.is_whole = document["is_whole_device"]
        self._scope = (
            f"{document['power_of']}, by {', '.join(sensor['name'] for sensor in document['sensors'])}"
        )

    @property
    def scope(self) -> str:
        return self._scope

    @Driver.check_active  # type: ignore[untyped-decorator]
    @contextlib.contextmanager
    def measure(self) -> Iterator[list[tuple[float, float]]]:
        """Measure during the block, see `MeterProtocol`.

        Raises:
            BenchError: There are no readings, or a reading is not between 0 and `MOST_WATTS`.
        """
        readings: list[tuple[float, float]] = []
        # There the next run ends what a killed one has left.
        folder = self.command.run_check(
            "mkdir -p ~/.edgekit-bench && mktemp -d ~/.edgekit-bench/watts.XXXXXX"
        )[0]
        watch = self._sensors("--watch", "--json")
        command = f"cd {folder}; nohup {watch} </dev/null >{folder}/watts 2>{folder}/errors & echo $!"
        process = int(self.command.run_check(command)[0])
        first = f"n=0; while [ ! -s {folder}/watts ] && kill -0 {process} 2>/dev/null"
        first += f" && [ $n -lt {10 * _START_LIMIT_S} ]; do sleep 0.1; n=$((n+1)); done"
        try:
            self.command.run_check(first, timeout=2 * _START_LIMIT_S)
            yield readings
        finally:
            lines = self.command.run_check(
                f"kill {process}; cat {folder}/watts {folder}/errors; rm -r {folder}"
            )
        records = [json.loads(line) for line in lines if line.startswith("{")]
        if not records or any(record["power_w"] is None for record in records):
            raise BenchError(f"the device's sensors gave no power: {' '.join(lines[-1:]) or 'no reading'}")
        readings += [
            (record["at_s"] - records[0]["at_s"], check_watts(float(record["power_w"]))) for record in records
        ]

    def _sensors(self, *arguments: str) -> str:
        words = ["-m", "edgekit_runtime.cli", "sensors", "--sysfs", self.sysfs, *arguments]
        return f"{self.python} {shlex.join(words)}"
