"""Compares the speed of settings of a package in several fresh processes.

The speed of a setting depends on where the system places the threads and the memory of a process. They stay
there while the process runs. Therefore each process contributes one value per setting, which is the lower
quartile of its measurements.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.errors import BackendError, PackageError
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.manifest import BackendChoice, Manifest
from edgekit_runtime.package.variants import DEFAULT_VARIANT
from edgekit_runtime.records import dataclass
from edgekit_runtime.sessions.latency import TIE_SHARE, Latency
from edgekit_runtime.system.child_process import JsonChild
from edgekit_runtime.system.own_process import count_cores

MODULE: Final = "edgekit_runtime.autotune.contest_child"
_FIRST_ANSWER_S: Final = 60.0  # limit for reading the package
_END_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class RunSetting:
    """One way to run a package.

    Attributes:
        chain_index: position of the backend in the variant's chain of backends.
        options: name and value of each backend option that differs from the package's option.
        instances: number of simultaneous runs.
        batch: number of rows in a run.
    """

    variant: str = DEFAULT_VARIANT
    chain_index: int = 0
    options: tuple[tuple[str, JsonValue], ...] = ()
    instances: int = 1
    batch: int = 1

    @property
    def name(self) -> str:
        """Name to display: the differences from the package's own setting, or `as packaged`."""
        parts = [f"{name} {_format(value)}" for name, value in self.options]
        parts += [f"{self.instances} instances"] * (self.instances > 1)
        parts += [f"batch {self.batch}"] * (self.batch > 1)
        return ", ".join(parts) or "as packaged"

    def find_choice(self, manifest: Manifest) -> BackendChoice:
        """Return the backend with the options of this setting and without its fallbacks."""
        choice = manifest.select(self.variant).backend.chain[self.chain_index]
        return replace(choice, options={**choice.options, **dict(self.options)}, fallback=None)


def _format(value: JsonValue) -> str:
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOrder:
    """Tells a process which settings to measure.

    Attributes:
        package: absolute path of the package.
        manifest_sha256: expected digest of the package's manifest.
        keys: folder of the trusted keys.
        threads: number of threads of one inference, or None for the number in the options.
        end_s: time on the monotonic clock after which no round starts, except the first.
        seed: seed of the random orders.
    """

    package: str
    manifest_sha256: str
    keys: str
    settings: tuple[RunSetting, ...]
    threads: int | None
    rounds: int
    end_s: float
    seed: int


class Measure(Protocol):
    def __call__(
        self, settings: Sequence[RunSetting], *, rounds: int, seconds: float, seed: int
    ) -> Sequence[float | str]:
        """Return for each setting its seconds per row, or why it has none.

        Args:
            settings: settings to measure.
            rounds: limit of rounds; fewer if the times are certain.
            seconds: time from now after which no round starts, except the first.
            seed: seed of the random orders.

        Raises:
            BackendError: the process died or hung.
            PackageError: the package has changed.
        """


def measure_afresh(package: OpenedPackage, keys: Path, threads: int | None = None) -> Measure:
    """Return a function that measures settings of `package`, in a new process at each call.

    `keys` is the folder of the trusted keys. `threads` is the number of threads of one inference, or None for
    the number in the options.
    """
    digest = package.manifest.sha256

    def measure(
        settings: Sequence[RunSetting], *, rounds: int, seconds: float, seed: int
    ) -> Sequence[float | str]:
        order = MeasureOrder(
            package=str(package.path.absolute()),
            manifest_sha256=digest,
            keys=str(keys.absolute()),
            settings=tuple(settings),
            threads=threads,
            rounds=rounds,
            end_s=time.monotonic() + seconds,
            seed=seed,
        )
        return _run_child(order)

    return measure


def _run_child(order: MeasureOrder) -> list[float | str]:
    """Return the measurements of a new process, which has ended in any case.

    Raises:
        BackendError: the process died, or sent nothing for longer than it had announced.
        PackageError: the package has changed.
    """
    answers: list[float | str] | None = None
    limit_s = _FIRST_ANSWER_S
    with JsonChild(MODULE) as child:
        try:
            child.send(to_plain(order), limit_s)
            while answers is None:
                received = child.receive(limit_s)
                if isinstance(received, list):
                    answers = received
                else:
                    limit_s = received  # it may be silent for this time
        except TimeoutError as cause:
            raise BackendError(f"the measuring process hung: it was silent for {limit_s:.0f} s") from cause
        except (OSError, EOFError):
            pass  # the process's end tells more
        code = child.wait(_END_S)
        if code == PackageError.exit_code:
            raise PackageError(child.last_line or "the package cannot be read any more; try again")
        if code is None:
            raise BackendError(f"the measuring process hung: it did not end within {_END_S:g} s")
        if code or answers is None:
            raise BackendError(f"the measuring process ended {child.explain_end()}")
    return answers


@dataclass(frozen=True, slots=True)
class ContestLimits:
    """Limits of a contest.

    Attributes:
        fewest: minimum number of processes if there is enough time.
        most: maximum number of processes.
        rounds: maximum number of rounds in each process.
        end_s: monotonic time at which the contest ends. No process starts if the remaining time is less than
            half the duration of the last process.
    """

    fewest: int
    most: int
    rounds: int
    end_s: float


def hold_contest(
    measure: Measure,
    settings: Sequence[RunSetting],
    limits: ContestLimits,
    *,
    clock: Callable[[], float] = time.monotonic,
    is_decided: Callable[[Mapping[RunSetting, Latency]], bool] = lambda _: False,
    report: Callable[[str], None] = lambda _: None,
) -> dict[RunSetting, Latency | str]:
    """Measure settings in several processes.

    A setting that crashes its process is identified, and excluded from later processes.

    Args:
        measure: measures settings in one process.
        settings: settings to measure, at least one.
        limits: limits of the contest, which runs at least one process.
        clock: returns a monotonic time in seconds.
        is_decided: returns whether the results so far are sufficient.
        report: called with lines about the progress.

    Returns:
        A dict from each setting to its seconds per row, one value for each process, or to the reason why the
            setting failed.

    Raises:
        BackendError: a process with several settings died or hung, although each setting runs alone.
        PackageError: the package has changed.
    """
    medians: dict[RunSetting, list[float]] = {setting: [] for setting in settings}
    reasons: dict[RunSetting, str] = {}
    latencies: dict[RunSetting, Latency] = {}
    last_s = 0.0
    for count in range(limits.most):
        begin_s = clock()
        left_s = limits.end_s - begin_s
        if count and (left_s < last_s / 2 or (count >= limits.fewest and is_decided(latencies))):
            break
        racing = [setting for setting in settings if setting not in reasons]
        if not racing:
            break
        report(f"process {count + 1} of at most {limits.most}: {len(racing)} settings in turn")
        racing = [racing[index] for index in np.random.default_rng(count).permutation(len(racing))]
        share_s = max(left_s, 0.0) / (limits.most - count)

        def race(
            racing: Sequence[RunSetting], share_s: float = share_s, seed: int = count
        ) -> Sequence[float | str]:
            return measure(racing, rounds=limits.rounds, seconds=share_s, seed=seed)

        for setting, answer in _without_culprits(race, racing, report).items():
            if isinstance(answer, str):
                reasons[setting] = answer
            else:
                medians[setting].append(answer)
        latencies = {s: Latency(tuple(medians[s])) for s in settings if s not in reasons}
        last_s = clock() - begin_s
    return {setting: reasons.get(setting) or latencies[setting] for setting in settings}


def _without_culprits(
    race: Callable[[Sequence[RunSetting]], Sequence[float | str]],
    racing: Sequence[RunSetting],
    report: Callable[[str], None],
) -> dict[RunSetting, float | str]:
    """Return a process's measurements; start another one without settings that end or stop it."""
    answers: dict[RunSetting, float | str] = {}
    while racing:
        try:
            return answers | dict(zip(racing, race(racing), strict=True))
        except BackendError as cause:  # noqa: PERF203  # each process is a try of its own
            if len(racing) > 1:
                report(f"{cause}; each setting runs alone once, to find out which it is")
            culprits = _find_culprits(race, racing, cause)
            answers |= culprits
            racing = [setting for setting in racing if setting not in culprits]
    return answers


def _find_culprits(
    race: Callable[[Sequence[RunSetting]], Sequence[float | str]],
    racing: Sequence[RunSetting],
    cause: BackendError,
) -> dict[RunSetting, str]:
    """Return the settings that alone end or stop their process, and how."""
    if len(racing) == 1:
        return {racing[0]: str(cause)}
    culprits = {}
    for setting in racing:
        try:
            race([setting])
        except BackendError as alone:  # noqa: PERF203  # each process is a try of its own
            culprits[setting] = str(alone)
    if not culprits:
        raise BackendError(
            f"{cause}; each of its {len(racing)} settings runs alone: together they may need more memory than"
            " there is, so free some, or leave out variants or engines"
        ) from cause
    return culprits


def rank(times: Mapping[RunSetting, float], manifest: Manifest) -> list[RunSetting]:
    """Return the settings, best first.

    Settings within 2 % of the fastest come first, ordered by their number of threads. The others follow,
    ordered by time. Settings with the same rank keep the order of `times`, whose unit is arbitrary.
    """
    limit = (1 + TIE_SHARE) * min(times.values(), default=0.0)

    def key(setting: RunSetting) -> tuple[bool, float]:
        if times[setting] > limit:
            return True, times[setting]
        threads = setting.find_choice(manifest).options.get("threads")
        stated = threads if isinstance(threads, int) else count_cores()
        return False, setting.instances * stated

    return sorted(times, key=key)
