"""One process of a contest: `python -m edgekit_runtime.autotune.contest_child`."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from edgekit_runtime.autotune.contest import MeasureOrder, RunSetting
from edgekit_runtime.autotune.interleaving import Runner, take_turns
from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import BackendError, DataError, EdgekitError, PackageError
from edgekit_runtime.package.archive import OpenedPackage, read_package
from edgekit_runtime.sessions.backends import open_choice
from edgekit_runtime.sessions.instances import open_instances
from edgekit_runtime.sessions.latency import LatencyLimits
from edgekit_runtime.sessions.selftest import read_golden_inputs, run_selftest
from edgekit_runtime.sessions.session import Session
from edgekit_runtime.system.child_process import open_channel
from edgekit_runtime.system.engines import find_engine
from edgekit_runtime.trust.trust_store import TrustStore

_PRECISION: Final = 0.01
_OPENING_S: Final = 60.0  # to open, test and run one setting once
_SLOWER: Final = 20  # the minimum number of runs takes at most this multiple of the first run's time


def measure(
    package: OpenedPackage, order: MeasureOrder, announce: Callable[[float], None]
) -> list[float | str]:
    """Return for each setting its time in seconds per row, or the reason why the setting failed.

    The time is the lower quartile of the measurements, because other work on the machine can only add time.

    Each setting must first reproduce the golden outputs of its variant. All settings are timed on the golden
    inputs of the default variant.

    `announce` is called with the maximum time until the next message to the parent process, in seconds.

    Raises:
        BackendError: an engine failed during the measurement.
    """
    inputs = read_golden_inputs(package)
    opened: dict[RunSetting, tuple[Session, ...] | BackendError] = {}
    runners: dict[str, Runner] = {}
    answers: list[float | str] = []
    once_s = 0.0
    for setting in order.settings:
        try:
            announce(_OPENING_S + find_engine(setting.find_choice(package.manifest).name).builds_for_s)
            sessions = _open(package, setting, order.threads, opened)
            batch = dict(inputs)
            if setting.batch > 1:  # an input without axes cannot be repeated, and has no batch
                batch = {name: np.concatenate([array] * setting.batch) for name, array in inputs.items()}
            begin_s = time.monotonic()
            sessions[0].run(batch)  # another variant's golden inputs may have other sizes
            once_s += time.monotonic() - begin_s
        except (BackendError, DataError) as cause:
            answers.append(str(cause))
            continue
        runners[str(len(answers))] = Runner(sessions, batch, setting.instances * setting.batch)
        answers.append(0.0)
    left_s = max(order.end_s - time.monotonic(), 1e-3)
    announce(left_s + _SLOWER * once_s + _OPENING_S)
    limits = LatencyLimits(
        warmup_rounds=0, min_rounds=1, max_rounds=order.rounds, time_limit_s=left_s, precision=_PRECISION
    )
    for number, latency in take_turns(runners, limits, seed=order.seed).items():
        answers[int(number)], _ = latency.quartiles_s
    return answers


def _open(
    package: OpenedPackage,
    setting: RunSetting,
    threads: int | None,
    opened: dict[RunSetting, tuple[Session, ...] | BackendError],
) -> tuple[Session, ...]:
    """Return the sessions of a setting; settings that differ only in the batch share sessions or errors."""
    key = replace(setting, batch=1)
    if key not in opened:
        try:
            opened[key] = _prove(package, setting, threads)
        except BackendError as cause:
            opened[key] = cause
    sessions = opened[key]
    if isinstance(sessions, BackendError):
        raise sessions
    return sessions


def _prove(package: OpenedPackage, setting: RunSetting, threads: int | None) -> tuple[Session, ...]:
    """Return the sessions of a setting; closes them all if they fail the self-test."""
    selected = package.select(setting.variant)
    choice = setting.find_choice(package.manifest)
    sessions = open_instances(lambda: open_choice(selected, choice, threads), setting.instances)
    wrong = ["an engine failed"]
    try:
        checks = run_selftest(sessions[0], selected).checks
        wrong = [check.message for check in checks if not check.passed]
    finally:
        if wrong:  # open sessions would take memory while others are timed
            for session in sessions:
                session.close()
    if wrong:
        raise BackendError(f"fails the self-test: {'; '.join(wrong)}")
    return sessions


def main() -> None:
    with open_channel() as channel, channel.makefile("rw", encoding="ascii") as lines:
        order = from_plain(MeasureOrder, json.loads(lines.readline()))

        def announce(silent_s: float) -> None:
            lines.write(f"{silent_s}\n")
            lines.flush()

        with read_package(Path(order.package), TrustStore.from_folder(Path(order.keys))) as package:
            if package.manifest.sha256 != order.manifest_sha256:
                raise PackageError(f"{order.package}: has changed since it was verified; try again")
            lines.write(json.dumps(measure(package, order, announce)) + "\n")


def run() -> None:
    """Call `main`. After an error, exit with a code and a last line on stderr for the parent process."""
    try:
        main()
    except PackageError as error:
        print(error, file=sys.stderr)  # the parent reads it
        sys.exit(PackageError.exit_code)
    except EdgekitError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    run()
