"""One process of a contest: `python -m edgekit_runtime.contest_process`, an `Order` in, medians out."""

import hashlib
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from edgekit_runtime.archive import OpenedPackage, read_package
from edgekit_runtime.contest import Order, Setting
from edgekit_runtime.errors import BackendError, DataError, EdgekitError, PackageError
from edgekit_runtime.latency import LatencyLimits
from edgekit_runtime.selftest import read_golden_inputs, run_selftest
from edgekit_runtime.service.confinement import end_with
from edgekit_runtime.service.instances import open_instances
from edgekit_runtime.service.plain import from_plain
from edgekit_runtime.sessions.session import Session, open_choice
from edgekit_runtime.signing import TrustStore
from edgekit_runtime.turns import Runner, take_turns

_PRECISION: Final = 0.01


def measure(package: OpenedPackage, order: Order) -> list[float | str]:
    """Return for each setting of the order its median seconds a row, or why it has none.

    All run the default variant's golden inputs, once each has reproduced its own variant's golden outputs.

    Args:
        package: verified.
        order: what to measure.

    Raises:
        BackendError: an engine failed between its turns.
    """
    inputs = read_golden_inputs(package)
    opened: dict[Setting, tuple[Session, ...]] = {}
    runners: dict[str, Runner] = {}
    answers: list[float | str] = []
    for setting in order.settings:
        try:
            sessions = _open(package, setting, order.threads, opened)
            batch = {name: np.concatenate([array] * setting.batch) for name, array in inputs.items()}
            sessions[0].run(batch)  # another variant's golden inputs may have other sizes
        except (BackendError, DataError) as cause:
            answers.append(str(cause))
            continue
        runners[str(len(answers))] = Runner(sessions, batch, setting.instances * setting.batch)
        answers.append(0.0)
    left_s = max(order.end_s - time.monotonic(), 1e-3)
    limits = LatencyLimits(0, 1, order.rounds, left_s, _PRECISION)
    for place, latency in take_turns(runners, limits, seed=order.seed).items():
        answers[int(place)] = latency.median_s
    return answers


def _open(
    package: OpenedPackage,
    setting: Setting,
    threads: int | None,
    opened: dict[Setting, tuple[Session, ...]],
) -> tuple[Session, ...]:
    """Return the sessions of a setting; settings that differ in the batch only share theirs."""
    key = replace(setting, batch=1)
    if key not in opened:
        selected = package.select(setting.variant)
        choice = setting.find_choice(package.manifest)
        sessions = open_instances(lambda: open_choice(selected, choice, threads), setting.instances)
        wrong = [check.message for check in run_selftest(sessions[0], selected).checks if not check.passed]
        if wrong:
            raise BackendError(f"fails the self-test: {'; '.join(wrong)}")
        opened[key] = sessions
    return opened[key]


def _main() -> None:
    order = from_plain(Order, json.load(sys.stdin))
    end_with(order.parent)
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)  # engines print
        with read_package(Path(order.package), TrustStore.from_folder(Path(order.keys))) as package:
            if hashlib.sha256(package.manifest.to_bytes()).hexdigest() != order.manifest_sha256:
                raise PackageError(f"{order.package}: has changed since it was verified; try again")
            json.dump(measure(package, order), answer)


if __name__ == "__main__":
    try:
        _main()
    except EdgekitError as error:
        sys.exit(str(error))
