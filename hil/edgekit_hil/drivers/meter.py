"""Meters of power: what the tests expect of one, and a meter outside of the device that a command reads."""

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
    """A driver that measures power. A user's own driver can implement it, and is then its bench's meter.

    Attributes:
        is_whole: whether it measures the whole device. The watts of a part are not comparable with a
            target's.
    """

    is_whole: bool = True

    @property
    @abc.abstractmethod
    def scope(self) -> str:
        """The measured part, such as `board`, as a text for reports."""

    @abc.abstractmethod
    def measure(self) -> contextlib.AbstractContextManager[list[tuple[float, float]]]:
        """Measure in a `with` block; the list that it yields is filled at the end.

        Each entry is (seconds since the first reading, watts). The first reading is taken before the block
        runs, so even a short block has one.

        Raises:
            BenchError: there are no readings, or a reading is not between 0 and `MOST_WATTS`.
        """


def check_watts(watts: float) -> float:
    """Return a reading of a meter unchanged, after a check.

    Raises:
        BenchError: the reading is NaN, or not between 0 and `MOST_WATTS`.
    """
    if not 0 <= watts <= MOST_WATTS:  # also refuses NaN
        raise BenchError(f"the meter reads {watts:g} W, expected 0 to {MOST_WATTS:g} W")
    return watts


def summarize(idle: Sequence[tuple[float, float]], active: Sequence[tuple[float, float]]) -> MeasuredPower:
    """Return the median power of readings at rest and under load, as `MeterProtocol.measure` gives them.

    Raises:
        BenchError: there are fewer than three readings at rest or under load, or the power under load is not
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
    """Reads a meter outside of the device by a command on this machine, again and again.

    Attributes:
        command: a command of the shell that prints one number, the watts at this moment, and ends.
        measures: the meter and the measured part, as a text for reports.
        is_whole: whether the meter measures the whole device.
        interval_s: time between two readings.
        limit_s: time limit of one reading.
    """

    command: str = attr.ib(validator=attr.validators.instance_of(str))
    measures: str = attr.ib(default="an external meter", validator=attr.validators.instance_of(str))
    is_whole: bool = attr.ib(default=True, validator=attr.validators.instance_of(bool))
    interval_s: float = attr.ib(default=1.0, converter=float, validator=attr.validators.gt(0))
    limit_s: float = attr.ib(default=10.0, converter=float, validator=attr.validators.gt(0))

    def on_activate(self) -> None:
        """Read the meter once, to check it.

        Raises:
            BenchError: the command fails, or prints no power between 0 and `MOST_WATTS`.
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
            BenchError: a reading failed. If the first reading fails, the block does not run. If a later one
                fails, the block still runs to its end.
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
        """Return the watts at this moment.

        Raises:
            BenchError: the command failed, or printed no power.
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
