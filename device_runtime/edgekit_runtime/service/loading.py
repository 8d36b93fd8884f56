"""From a verified package to sessions that have proved themselves: open, self-test, warm-up.

It blocks, so it runs on a thread; it touches nothing of the service.
"""

import dataclasses
import functools
import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgekit_runtime.archive import OpenedPackage
from edgekit_runtime.errors import BackendError
from edgekit_runtime.manifest import Manifest
from edgekit_runtime.ort_memory import trim_memory
from edgekit_runtime.selftest import GoldenCase, read_golden
from edgekit_runtime.service.batching import rows_are_independent
from edgekit_runtime.service.instances import WarmRun, open_instances, warm_up
from edgekit_runtime.service.limits import SchedulingLimits
from edgekit_runtime.service.versions import SwapOrder, VersionPolicy
from edgekit_runtime.sessions.session import Session, open_session

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How one model is kept.

    Attributes:
        policy: which of its versions are served.
        swap: order of a swap, or None to choose by the memory that is free.
        threads: of one inference, or None as its package says.
        instances: how many inferences may run at once.
        scheduling: of its calls.
    """

    policy: VersionPolicy = field(default_factory=VersionPolicy)
    swap: SwapOrder | None = None
    threads: int | None = None
    instances: int = 1
    scheduling: SchedulingLimits = field(default_factory=SchedulingLimits)


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """Sessions that compute what their package promises.

    Attributes:
        instances: open and warm; one session may be there several times.
        manifest: of the package.
        path: of the package.
        key_id: who signed it.
        scheduling: of its calls; without batches where rows change each other's answers.
        warm_runs: what was measured before there was traffic.
    """

    instances: tuple[Session, ...]
    manifest: Manifest
    path: Path
    key_id: str
    scheduling: SchedulingLimits
    warm_runs: Sequence[WarmRun]


def load(package: OpenedPackage, options: ModelOptions) -> Loaded:
    """Return the model of `package`, tested and warm; the package may be closed after that.

    Raises:
        BackendError: no engine for it is here, the engine refused it, or it computes something else than the
            package promises.
    """
    golden = read_golden(package)
    instances = open_instances(
        functools.partial(open_session, package, threads=options.threads), options.instances
    )
    try:
        _check(golden, instances[0], package.path)
        scheduling = _limit_batches(options.scheduling, instances[0], golden, package.path)
        warm_runs = warm_up(instances, golden.inputs, max_batch=scheduling.max_batch)
    except BaseException:
        unload(instances)
        raise
    return Loaded(instances, package.manifest, package.path, package.key_id, scheduling, warm_runs)


def settle() -> None:
    """Give back what starting has left behind, and let the garbage collector pass over what stays."""
    gc.collect()
    gc.freeze()
    trim_memory()


def unload(instances: Sequence[Session]) -> None:
    """Close sessions and give their memory back to the system."""
    for session in instances:
        session.close()
    gc.collect(0)
    trim_memory()


def _limit_batches(
    limits: SchedulingLimits, session: Session, golden: GoldenCase, path: Path
) -> SchedulingLimits:
    if limits.max_batch == 1 or rows_are_independent(session, golden.inputs):
        return limits
    _logger.warning("%s: its rows cannot share a batch, so max_batch is 1", path)
    return dataclasses.replace(limits, max_batch=1)


def _check(golden: GoldenCase, session: Session, path: Path) -> None:
    result = golden.check(session)
    if not result.passed:
        reasons = "; ".join(check.message for check in result.checks if not check.passed)
        raise BackendError(f"{path}: failed its self-test here: {reasons}")
