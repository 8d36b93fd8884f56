"""The protocol of power meters, and a driver for an external meter that a command reads."""

import abc
import contextlib
import math
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

import attr
from labgrid.driver import Driver
from labgrid.factory import target_factory

from edgekit_host.evidence import MOST_WATTS, MeasuredPower
from edgekit_runtime.errors import BenchError
from edgekit_runtime.system.child_process import run_program

_LEAST_READINGS: Final = 3
_MAX_OUTPUT_BYTES: Final = 1 << 16
_TIMED_OUT: Final = 124  # exit code of timeout(1)


class MeterProtocol(abc.ABC):
    """A driver that measures power. Users can implement it for their own meters.

    Attributes:
        is_whole: Whether the meter measures the whole device. Only then can its readings be compared with the
            power of a target.
    """

    is_whole: bool = True

    @property
    @abc.abstractmethod
    def scope(self) -> str:
        """The measured part, such as `board`, as text for reports."""

    @abc.abstractmethod
    def measure(self) -> contextlib.AbstractContextManager[list[tuple[float, float]]]:
        """Measure during a `with` block, and yield a list that is filled at the end.

        Each entry is a pair (seconds since the first reading, power in watts). The first reading is taken
        before the block runs, so even a short block has a reading.

        Raises:
            BenchError: There are no readings, or a reading is not between 0 and `MOST_WATTS`.
        """


def check_watts(watts: float) -> float:
    """Check a reading of a meter, and return it.

    Raises:
        BenchError: The reading is NaN, or not between 0 and `MOST_WATTS`.
    """
    if not 0 <= watts <= MOST_WATTS:  # also refuses NaN
        raise BenchError(f"the meter reads {watts:g} W, expected 0 to {MOST_WATTS:g} W")
    return watts


def summarize(idle: Sequence[tuple[float, float]], active: Sequence[tuple[float, float]]) -> MeasuredPower:
    """Return the median power at rest and under load, from readings of `MeterProtocol.measure`.

    Raises:
        BenchError: There are fewer than three readings at rest or under load, or the power under load is not
            above the power at rest.
    """
    if (least := min(len(idle), len(active))) < _LEAST_READINGS:
        raise BenchError(
            f"{least} readings, expected {_LEAST_READINGS} at rest and under load; measure longer"
        )
    return MeasuredPower(*(statistics.median(watts for _, watts in samples) for samples in (idle, active)))


@target_factory.reg_driver
@attr.s(eq=False)
class CommandMeterDriver(Driver, MeterProtocol):
    """Reads an external meter repeatedly with a command on this machine.

    Attributes:
        command: A shell command that prints the current power in watts as one number, and ends.
        measures: The meter and the measured part, as text for reports.
        is_whole: Whether the meter measures the whole device.
        interval_s: The time between two readings.
        limit_s: The time limit of a reading.
    """

    command: str = attr.ib(validator=attr.validators.instance_of(str))
    measures: str = attr.ib(default="an external meter", validator=attr.validators.instance_of(str))
    is_whole: bool = attr.ib(default=True, validator=attr.validators.instance_of(bool))
    interval_s: float = attr.ib(default=1.0, converter=float, validator=attr.validators.gt(0))
    limit_s: float = attr.ib(default=10.0, converter=float, validator=attr.validators.gt(0))

    def on_activate(self) -> None:
        """Check the meter by reading it once.

        Raises:
            BenchError: The command fails, or prints no power between 0 and `MOST_WATTS`.
        """
        self._read()

    @property
    def scope(self) -> str:
        return self.measures

    @Driver.check_active  # type: ignore[untyped-decorator]
    @contextlib.contextmanager
    def measure(self) -> Iterator[list[tuple[float, float]]]:
        """Measure during the block, see `MeterProtocol`.

        Raises:
            BenchError: A reading failed. If it was the first reading, the block does not run. Otherwise the
                error is raised after the block.
        """
        readings: list[tuple[float, float]] = []
        samples, faults, ended = [(0.0, self._read())], [], threading.Event()
        begun_s = time.monotonic()

        def read_on() -> None:
            while not ended.wait(self.interval_s):
                try:
                    watts = self._read()
                except (BenchError, OSError) as error:
                    faults.append(error)
                    return
                samples.append((time.monotonic() - begun_s, watts))

        thread = threading.Thread(target=read_on, name="meter")
        thread.start()
        try:
            yield readings
        finally:
            ended.set()
            thread.join()
        if faults:
            raise BenchError(f"after {len(samples)} readings: {faults[0]}") from faults[0]
        readings += samples

    def _read(self) -> float:
        """Return the current power in watts.

        Raises:
            BenchError: The command failed, or printed no power.
        """
        words = ["timeout", "-k", "1", f"{self.limit_s:g}", "sh", "-c", self.command]  # ends its children too
        done = run_program(words, (), self.limit_s + 5, _MAX_OUTPUT_BYTES)
        if done.exit_code in (None, _TIMED_OUT):
            raise BenchError(f"the meter's command did not end within {self.limit_s:g} s")
        if done.exit_code:
            raise BenchError(f"the meter's command ended with {done.exit_code}: {done.last_line}")
        text = done.output.decode(errors="replace").strip()
        try:
            watts = float(text)
        except ValueError:
            watts = math.nan
        if math.isnan(watts):
            raise BenchError(f"the meter's command printed {text[:80]!r}, expected one number, the watts")
        return check_watts(watts)
