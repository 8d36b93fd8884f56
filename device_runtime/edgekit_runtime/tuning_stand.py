"""Settings of one model side by side: opened, warmed and measured in turn."""

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np

from edgekit_runtime.canonical import JsonValue
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.latency import Latency, LatencyLimits, measure_latency
from edgekit_runtime.service.instances import open_instances
from edgekit_runtime.sessions.session import Array, Session

_TURN_S: Final = 1e-3  # a shorter turn tells more of the neighbours' caches
_MOST_RUNS: Final = 50
_PAUSE_S: Final = 2e-3  # before each turn, until the neighbour's threads have stopped spinning


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run a model.

    Attributes:
        options: of the backend that differ from the package's.
        instances: runs at once.
        batch: rows of a run.
    """

    options: tuple[tuple[str, JsonValue], ...] = ()
    instances: int = 1
    batch: int = 1

    @property
    def name(self) -> str:
        """What differs from the package's way."""
        parts = [f"{name} {_say(value)}" for name, value in self.options]
        parts += [f"{self.instances} instances"] * (self.instances > 1) + [f"batch {self.batch}"] * (
            self.batch > 1
        )
        return ", ".join(parts) or "as packaged"


def _say(value: JsonValue) -> str:
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)


class Stand:
    """Opened settings; close it when done.

    Settings that differ in the batch only share their sessions.
    """

    def __init__(
        self,
        open_one: Callable[[Setting], Session],
        inputs: Mapping[str, Array],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make a stand with nothing opened.

        Args:
            open_one: opens a session with the options of a setting.
            inputs: of a run.
            clock: seconds since any moment.
        """
        self._open_one, self._inputs, self._clock = open_one, inputs, clock
        self._sessions: dict[tuple[object, int], tuple[Session, ...]] = {}
        self._settings: set[Setting] = set()
        self._runs: dict[Setting, int] = {}
        self._one_s: dict[Setting, float] = {}
        self._uncounted_s = 0.0
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> "Stand":
        return self

    def __exit__(self, *_: object) -> None:
        for setting in list(self._settings):
            self.close(setting)
        if self._threads is not None:
            self._threads.shutdown()

    def now_s(self) -> float:
        """Return the time on the clock."""
        return self._clock()

    def open(self, setting: Setting) -> None:
        """Open a setting and run it twice.

        Raises:
            BackendError: the engine refused an option, or failed.
        """
        key = (setting.options, setting.instances)
        if key not in self._sessions:
            self._sessions[key] = open_instances(
                functools.partial(self._open_one, setting), setting.instances
            )
        self._settings.add(setting)
        try:
            self._turn(setting, 1)
            begin_s = self._clock()
            self._turn(setting, 1)
        except EdgekitError:
            self.close(setting)
            raise
        one_s = max(self._clock() - begin_s, 1e-9)
        self._runs[setting] = min(max(math.ceil(_TURN_S / one_s), 1), _MOST_RUNS)
        self._one_s[setting] = one_s

    def close(self, setting: Setting) -> None:
        """Close a setting's sessions, unless another setting that is open uses them."""
        self._settings.remove(setting)
        key = (setting.options, setting.instances)
        if all((other.options, other.instances) != key for other in self._settings):
            for session in set(self._sessions.pop(key)):
                session.close()

    def first_s(self, setting: Setting) -> float:
        """Return the seconds of the run that was timed on opening, which says little."""
        return self._one_s[setting] / self._rows(setting)

    def rounds_within(self, settings: Sequence[Setting], seconds: float) -> int:
        """Return how many rounds of `settings` take about that long, the one for warming up aside."""
        round_s = sum(self._one_s[s] * self._runs[s] + self._settle_s(s) for s in settings)
        return max(int(seconds / round_s) - 1, 0)

    def measure(self, settings: Sequence[Setting], rounds: int) -> dict[Setting, Latency]:
        """Return the seconds of one run for each setting, from turns in random orders.

        A batch counts for as many runs as it has copies of the inputs.

        Args:
            settings: that are open.
            rounds: most turns of each; fewer where the medians are certain within 1 %.
        """
        limits = LatencyLimits(
            warmup_rounds=1, min_rounds=1, max_rounds=rounds, time_limit_s=math.inf, precision=0.01
        )
        turns = {str(i): functools.partial(self._measured_turn, s) for i, s in enumerate(settings)}
        self._uncounted_s = 0.0
        # The pause and the first run of a turn do not count: this clock stands still meanwhile.
        found = measure_latency(turns, limits, clock=lambda: self._clock() - self._uncounted_s)
        result = {}
        for (_, latency), setting in zip(found.items(), settings, strict=True):
            rows = self._runs[setting] * self._rows(setting)
            result[setting] = Latency(tuple((np.array(latency.seconds) / rows).tolist()))
        return result

    def _measured_turn(self, setting: Setting) -> None:
        begin_s = self._clock()
        if self._settle_s(setting):
            time.sleep(_PAUSE_S)
            self._turn(setting, 1)
        self._uncounted_s += self._clock() - begin_s
        self._turn(setting, self._runs[setting])

    def _settle_s(self, setting: Setting) -> float:
        """Return how long a turn lasts before it counts; long runs need no such care."""
        return _PAUSE_S + self._one_s[setting] if self._runs[setting] > 1 else 0.0

    def _turn(self, setting: Setting, runs: int) -> None:
        sessions = self._sessions[setting.options, setting.instances]
        inputs = self._batch(setting.batch)
        if len(sessions) == 1:
            _run(sessions[0], inputs, runs)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor()
        for done in [self._threads.submit(_run, session, inputs, runs) for session in sessions]:
            done.result()

    def _rows(self, setting: Setting) -> int:
        return setting.instances * setting.batch

    def _batch(self, times: int) -> Mapping[str, Array]:
        if times == 1:
            return self._inputs
        return {name: np.concatenate([array] * times) for name, array in self._inputs.items()}


def _run(session: Session, inputs: Mapping[str, Array], runs: int) -> None:
    for _ in range(runs):
        session.run(inputs)
