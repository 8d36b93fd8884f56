"""Opens a verified package: creates, tests and warms up sessions within a time limit.

`load` blocks, so call it on a thread.
"""

import contextlib
import dataclasses
import functools
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from edgekit_runtime.errors import BackendError, EdgekitError
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.records import dataclass
from edgekit_runtime.service.observability.crash_names import name_frame
from edgekit_runtime.service.options.model import GovernorOptions, Isolation, ModelOptions, SchedulingLimits
from edgekit_runtime.service.serving.hostile_inputs import find_hazard
from edgekit_runtime.service.serving.load_deadline import LoadAttempt
from edgekit_runtime.service.serving.memory_estimate import count_sessions, model_bytes
from edgekit_runtime.service.serving.remote import IsolatedVersion
from edgekit_runtime.sessions.backends import open_preferred, open_session
from edgekit_runtime.sessions.instances import LoadedSetting, open_instances, warm_up
from edgekit_runtime.sessions.local_results import recall_order, recall_tuned
from edgekit_runtime.sessions.row_independence import rows_are_independent
from edgekit_runtime.sessions.selftest import GoldenCase, find_answerer, read_golden
from edgekit_runtime.sessions.session import Session
from edgekit_runtime.system.engines import EngineMissingError, get_engine
from edgekit_runtime.system.own_process import trim_memory
from edgekit_runtime.system.resource_errors import check_descriptors, check_lack
from edgekit_runtime.tensors import TensorSpec

if TYPE_CHECKING:
    from edgekit_runtime.tasks.answerer import Answerer

_LOAD_TIMEOUT_S: Final = 120.0
_NO_LIMIT: Final = 2**31 - 1

_logger = logging.getLogger(__name__)


OpenRemote: TypeAlias = Callable[[OpenedPackage, ModelOptions, "Loaded | None"], IsolatedVersion]
"""Opens a package in a new worker, or in that of the given version. See `Supervisor.open`."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Loaded:
    """A version whose sessions are open, tested and warmed up, in this process or in workers.

    Attributes:
        scheduling: The scheduling options. Batching is disabled if rows affect each other's outputs.
        settings: The settings that a governor can choose from, the default setting first. Empty for a version
            in worker processes.
        answerer: The preprocessing and task, or None. It is None for a version in worker processes.
        remote: The version in worker processes, or None if it runs in this process.
        memory_bytes: The estimated memory in all processes.
        sessions_counted: The number of sessions per process on which `memory_bytes` is based.
    """

    manifest: Manifest
    path: Path
    scheduling: SchedulingLimits
    settings: tuple[LoadedSetting, ...] = ()
    answerer: "Answerer | None" = None
    remote: IsolatedVersion | None = None
    memory_bytes: int = 0
    sessions_counted: int = 1

    @property
    def instances(self) -> tuple[Session, ...]:
        """The sessions of the default setting. A session that runs in several threads is repeated.

        Empty for a version in worker processes.
        """
        return self.settings[0].instances if self.settings else ()

    @property
    def variant(self) -> str:
        """The variant of the default setting.

        For a version in worker processes, the first variant of the package.
        """
        return self.settings[0].variant if self.settings else self.manifest.all_variants[0].name

    @property
    def platform(self) -> str:
        """The format of the model, as named by the Open Inference Protocol."""
        name = self.manifest.backend.name
        engine = get_engine(name)
        return (engine and engine.platform) or f"edgekit_{name}"

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs of the default session.

        For a version in worker processes, the inputs in the manifest.
        """
        return self.instances[0].inputs if self.settings else self.manifest.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs of the default session.

        For a version in worker processes, the outputs in the manifest.
        """
        return self.instances[0].outputs if self.settings else self.manifest.outputs

    @property
    def session_count(self) -> int:
        """The number of different sessions. For a version in worker processes, the number per process."""
        return len({id(session) for session in self.instances}) or self.sessions_counted

    def close(self) -> None:
        """Close all sessions and return their memory to the system."""
        if self.remote is not None:
            self.remote.close()
        else:
            unload([session for setting in self.settings for session in setting.instances])


@contextlib.contextmanager
def map_exceptions(description: str) -> Iterator[None]:
    """Convert exceptions of the `with` block to `EdgekitError`.

    Engines and plug-ins can raise any exception, which could end the loop that serves all models. An
    `EdgekitError` is not changed.

    Raises:
        UnavailableError: The system ran out of memory or file descriptors.
        BackendError: Any other exception that is not an `EdgekitError`. The log contains its traceback.
    """
    try:
        yield
    except EdgekitError:
        raise
    except (Exception, SystemExit) as cause:  # a plug-in that means to end its own program
        check_lack(cause, f"{description}: cannot be loaded")
        _logger.exception("%s: cannot be loaded", description)
        raise BackendError(
            f"{description}: cannot be loaded, by a fault in its engine, a plug-in or edgekit that the log"
            f" shows: {type(cause).__name__}: {cause}"
        ) from cause


def load(
    package: OpenedPackage,
    options: ModelOptions,
    open_remote: OpenRemote | None = None,
    beside: Loaded | None = None,
) -> Loaded:
    """Return the model of `package`, tested and warmed up. The package may be closed afterwards.

    Args:
        package: The verified package.
        options: The options of the model.
        open_remote: Opens models in worker processes. None loads all models in this process.
        beside: The version in use, if the package is a version on trial. Both then run in the same process.

    Raises:
        BackendError: No engine is installed, the engine or the self-test failed, or the load took too long.
        UnavailableError: The package cannot be opened now, for example because memory is short.
            This is no evidence against the version.
    """
    manifest = package.manifest
    description = f"{package.path}: {manifest.name} {manifest.version}"
    if open_remote is not None:
        options = _isolate_hostile(package, options)
        is_beside_remote = beside is not None and beside.remote is not None
        if not options.isolated and not is_beside_remote:
            open_remote = None
        elif manifest.states and options.isolation.processes > 1:
            raise BackendError(
                f"{description} keeps the states of sequences, whose requests may use several connections:"
                " it needs isolation.processes = 1"
            )
    try:
        with map_exceptions(description):
            if open_remote is not None:
                remote = open_remote(package, options, beside)
                loaded = Loaded(
                    manifest=manifest, path=package.path, scheduling=options.scheduling, remote=remote
                )
                sessions = count_sessions(manifest, options)
            else:
                load_here = name_frame(_load_here, f"load of {manifest.name} {manifest.version}")
                work = functools.partial(load_here, package, options)
                loaded = LoadAttempt(description, work, Loaded.close).result_within(
                    find_limit(package, options)
                )
                sessions = loaded.session_count
            memory_bytes = model_bytes(manifest, package.path, options, sessions)
            return dataclasses.replace(loaded, memory_bytes=memory_bytes, sessions_counted=sessions)
    except BackendError:
        if open_remote is None:  # engines do not say why they cannot open a file
            check_descriptors(f"{package.path}: its engine cannot open it")
        raise


def _isolate_hostile(package: OpenedPackage, options: ModelOptions) -> ModelOptions:
    """Return options that isolate a package whose inputs could crash or block its process."""
    if options.isolated is False:
        return options
    hazard = find_hazard(package, options.instances)
    if hazard is None:
        return options
    isolation, usual = options.isolation, Isolation()
    if options.isolated is None:
        _logger.warning(
            "%s: %s, so it runs in a process of its own; isolated = false for this model keeps it here",
            package.path,
            hazard.reason,
        )
        isolation = usual
    # Its clients can end it, so no number of crashes says that the version is bad.
    crashes = _NO_LIMIT if isolation.max_crashes == usual.max_crashes else isolation.max_crashes
    limit = isolation.max_data_bytes or hazard.max_data_bytes
    isolation = dataclasses.replace(isolation, max_data_bytes=limit, max_crashes=crashes)
    if options.isolated is None and options.load_timeout_s is not None:
        # A process starts, too, and loads in a part of its time.
        start_s = max(isolation.start_timeout_s, 2 * options.load_timeout_s)
        isolation = dataclasses.replace(isolation, start_timeout_s=start_s)
    return dataclasses.replace(options, isolated=True, isolation=isolation)


def find_limit(package: OpenedPackage, options: ModelOptions) -> float:
    """Return the time limit of a load in seconds.

    It is `load_timeout_s`, or by default 120 s plus the time to build engines.
    """
    if options.load_timeout_s is not None:
        return options.load_timeout_s
    return _LOAD_TIMEOUT_S + sum(map(_count_build_s, (package, *package.list_members().values())))


def _count_build_s(package: OpenedPackage) -> float:
    """Return the time limit for the engine of one model to build it, in seconds."""
    backends = [variant.backend for variant in package.manifest.all_variants]
    engines = [get_engine(backend.name) for backend in backends if backend.fallback is None]
    return max((engine.builds_for_s for engine in engines if engine), default=0.0)


def _load_here(package: OpenedPackage, options: ModelOptions, attempt: LoadAttempt[Loaded]) -> Loaded:
    governor = options.governor
    threads = governor.threads[0] if governor is not None and governor.threads else 0
    answerer = find_answerer(package)
    variant, session = open_preferred(package, threads or options.threads)
    attempt.note(session)
    options = _apply_tuned(package, variant, options)
    settings = [_prove(package, (variant, threads), options, attempt, session)]
    try:
        scheduling = options.scheduling
        if governor is not None:
            for name, count in _list_settings(package, (variant, threads), governor):
                try:
                    settings.append(_prove(package, (name, count), options, attempt))
                except EngineMissingError as cause:  # noqa: PERF203  # the others do
                    _logger.warning("the governor cannot choose the variant '%s': %s", name, cause)
        scheduling = _limit_batches(scheduling, settings, package.path)
    except BaseException:
        unload([session for setting in settings for session in setting.instances])
        raise
    return Loaded(
        manifest=package.manifest,
        path=package.path,
        scheduling=scheduling,
        settings=tuple(settings),
        answerer=answerer,
    )


def trim_after_start() -> None:
    """Free memory that is unused after the start, and exclude existing objects from garbage collection."""
    gc.collect()
    gc.freeze()
    trim_memory()


def unload(sessions: Sequence[Session]) -> None:
    """Close sessions and return their memory to the system."""
    for session in sessions:
        session.close()
    trim_memory()


def _prove(
    package: OpenedPackage,
    setting: tuple[str, int],
    options: ModelOptions,
    attempt: LoadAttempt[Loaded],
    first: Session | None = None,
) -> LoadedSetting:
    """Open and test a variant with a number of threads. 0 means the number in the options."""
    variant, threads = setting
    selected = package.select(variant)
    golden = read_golden(selected)
    opened = [] if first is None else [first]

    def open_one() -> Session:
        if opened:
            return opened.pop()
        return attempt.note(open_session(package, variant=variant, threads=threads or options.threads))

    instances = open_instances(open_one, options.instances)
    try:
        # If the session may offload, only what this device computes by itself.
        proved = [getattr(instance, "local", None) or instance for instance in instances]
        _check(golden, proved[0], f"{package.path}: variant '{variant}'")
        max_batch = options.scheduling.max_batch
        # One row must keep no other waiting, nor change its answer. A server makes batches itself.
        has_fixed_work = getattr(instances[0], "has_fixed_work", False)
        if max_batch > 1 and not (has_fixed_work and rows_are_independent(proved[0], golden.inputs)):
            max_batch = 1
        warm_runs = warm_up(proved, golden.inputs, max_batch=max_batch)
    except BaseException:
        unload(instances)
        raise
    return LoadedSetting(
        variant=variant,
        threads=threads,
        instances=instances,
        warm_runs=tuple(warm_runs),
        figures=selected.manifest.figures,
        max_batch=max_batch,
    )


def _apply_tuned(package: OpenedPackage, variant: str, options: ModelOptions) -> ModelOptions:
    """Return the options with the results of `tune` for throughput."""
    backend = next(entry.backend for entry in recall_order(package.manifest) if entry.name == variant)
    tuned = recall_tuned(package.manifest, backend)
    if tuned is None:
        return options
    scheduling = options.scheduling
    if scheduling.max_batch == 1:
        scheduling = dataclasses.replace(scheduling, max_batch=tuned.batch)
    instances = tuned.instances if options.instances == 1 else options.instances
    return dataclasses.replace(options, scheduling=scheduling, instances=instances)


def _list_settings(
    package: OpenedPackage, first: tuple[str, int], governor: GovernorOptions
) -> list[tuple[str, int]]:
    """Return the variants and threads that a governor may choose, except `first`, which is already open."""
    variant_names = [variant.name for variant in package.manifest.all_variants]
    if missing := [name for name in governor.variants if name not in variant_names]:
        raise BackendError(
            f"{package.path}: has no variant '{missing[0]}', which its governor is to choose; there are"
            f" {', '.join(variant_names)}"
        )
    names = dict.fromkeys((first[0], *(governor.variants or variant_names)))
    settings = [(name, threads) for name in names for threads in governor.threads or (0,)]
    return [setting for setting in settings if setting != first]


def _limit_batches(
    limits: SchedulingLimits, settings: Sequence[LoadedSetting], path: Path
) -> SchedulingLimits:
    """Return the limits with batches that all settings can run, because a governor may change the setting."""
    for setting in settings:
        if setting.max_batch < limits.max_batch:
            _logger.warning(
                "%s: rows of the variant '%s' cannot share a batch, so max_batch is 1", path, setting.variant
            )
            return dataclasses.replace(limits, max_batch=1)
    return limits


def _check(golden: GoldenCase, session: Session, where: str) -> None:
    result = golden.check(session)
    if not result.passed:
        reasons = "; ".join(check.message for check in result.checks if not check.passed)
        raise BackendError(f"{where}: failed its self-test here: {reasons}")
