"""Loads or builds engines, checks them, and returns the fastest one that is correct.

`Machine` provides all access to the GPU, processes and libraries.
"""

import functools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

from edgekit_runtime.errors import BackendError, DataError, OutputError
from edgekit_runtime.records import dataclass
from edgekit_runtime.sessions.latency import LatencyLimits, measure_latency
from edgekit_runtime.sessions.selftest import GoldenCase
from edgekit_runtime.sessions.session import Session
from edgekit_runtime.sessions.tensorrt.build import BuiltEngines
from edgekit_runtime.sessions.tensorrt.cache import CacheEntry, EngineCache, EngineKey, StoppedError
from edgekit_runtime.sessions.tensorrt.cuda import Gpu
from edgekit_runtime.sessions.tensorrt.options import TensorRtOptions
from edgekit_runtime.tensors import Array, TensorSpec

if TYPE_CHECKING:
    from edgekit_runtime.encryption.container import ContentKey

_TIMING: Final = LatencyLimits(warmup_rounds=5, min_rounds=20, time_limit_s=5.0)

_logger = logging.getLogger(__name__)


class RunnableEngine(Session, Protocol):
    def accepts(self, inputs: Mapping[str, Array]) -> bool:
        """Return whether the engine supports the shapes of these inputs."""


class BuildEngines(Protocol):
    """The signature of `build.build_engines`."""

    def __call__(
        self, model: bytes, options: TensorRtOptions, *, timings: tuple[bytes, ...], stop: threading.Event
    ) -> BuiltEngines:
        """Return the engines of `model`."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine on which engines are built and run.

    Attributes:
        version: The version of TensorRT.
        power_mode: See `read_power_mode`.
        cache: The engines that were built on this machine.
        build: Builds the engines of a model, see `build_engines`.
        load: Loads a serialized engine.
    """

    version: str
    gpu: Gpu
    power_mode: str
    cache: EngineCache
    build: BuildEngines
    load: Callable[[bytes], RunnableEngine]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BuildJob:
    """The input of `prepare`. It stays valid after the package is closed.

    Attributes:
        golden: The tensors that an engine must reproduce.
        inputs, outputs: The inputs and outputs in the manifest.
        timings: The timing caches in the package.
        local_key: The key that encrypts cached engines, or None if the package is not encrypted.
    """

    key: EngineKey
    model: bytes
    options: TensorRtOptions
    golden: GoldenCase
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    timings: tuple[bytes, ...]
    local_key: "ContentKey | None" = None


@dataclass(frozen=True, slots=True, eq=False)
class PreparedEngine:
    """An engine that reproduced the golden outputs.

    Attributes:
        entry: The cache entry of the engine.
    """

    engine: RunnableEngine
    precision: str
    entry: CacheEntry


class _WrongError(BackendError):
    """An engine computes wrong values: another build would not help."""


def prepare(job: BuildJob, machine: Machine, stop: threading.Event) -> PreparedEngine:
    """Return the fastest engine that reproduces the golden outputs, from the cache or a new build.

    A failure is also cached if the model cannot be parsed or all engines compute wrong values.

    Raises:
        StoppedError: `stop` was set.
        BackendError: No engine reproduces the golden outputs. The message states all reasons.
    """
    with machine.cache.only_one(job.key, stop):
        entry = machine.cache.read(job.key, job.local_key)
        if entry is not None and entry.plan is None:
            raise BackendError(
                f"{'; '.join(entry.notes)} (found before; {machine.cache.root} remembers it, delete"
                f" {job.key.digest} there to try again)"
            )
        if entry is not None and entry.plan is not None and entry.precision is not None:
            try:
                return PreparedEngine(_admit(job, machine, entry.plan), entry.precision, entry)
            except BackendError as cause:
                _logger.warning("the cached engine is not used, and built again: %s", cause)
                machine.cache.forget(job.key)
        return _build(job, machine, stop)


def _build(job: BuildJob, machine: Machine, stop: threading.Event) -> PreparedEngine:
    timing = machine.cache.read_timing(job.key)
    timings = job.timings if timing is None else (timing, *job.timings)
    engines = machine.build(job.model, job.options, timings=timings, stop=stop)
    if engines.timing is not None:
        _keep(functools.partial(machine.cache.write_timing, job.key, engines.timing))
    notes = [f"{precision}: {why}" for precision, why in engines.refused.items()]
    admitted: dict[str, RunnableEngine] = {}
    is_final = engines.refused.keys() <= {"model"}
    for precision, plan in engines.plans.items():
        if stop.is_set():
            raise StoppedError
        try:
            admitted[precision] = _admit(job, machine, plan)
        except BackendError as cause:
            notes.append(f"{precision}: {cause}")
            is_final = is_final and isinstance(cause, _WrongError)
    if not admitted:
        if is_final:
            _keep(functools.partial(machine.cache.write, job.key, CacheEntry(None, {}, tuple(notes), None)))
        raise BackendError("; ".join(notes) or "TensorRT built nothing")
    seconds = _measure(admitted, job.golden)
    fastest = min(seconds, key=seconds.__getitem__)
    for precision, engine in admitted.items():
        if precision != fastest:
            engine.close()
    entry = CacheEntry(fastest, seconds, tuple(notes), engines.plans[fastest])
    _keep(functools.partial(machine.cache.write, job.key, entry, job.local_key))
    return PreparedEngine(admitted[fastest], fastest, entry)


def _keep(write: Callable[[], None]) -> None:
    try:
        write()
    except (OutputError, OSError) as cause:  # the engine can still serve
        _logger.warning("the engine is not cached and will be built again: %s", cause)


def _admit(job: BuildJob, machine: Machine, plan: bytes) -> RunnableEngine:
    """Return the loaded engine once it has reproduced the golden outputs.

    Raises:
        BackendError: the engine cannot be loaded or run; `_WrongError` if it computes wrong values.
    """
    engine = machine.load(plan)
    try:
        _check(job, engine)
    except BaseException:
        engine.close()
        raise
    return engine


def _check(job: BuildJob, engine: RunnableEngine) -> None:
    for side, specs, stated in (
        ("inputs", engine.inputs, job.inputs),
        ("outputs", engine.outputs, job.outputs),
    ):
        dtypes = {spec.name: spec.dtype for spec in specs}
        expected = {spec.name: spec.dtype for spec in stated}
        if dtypes != expected:
            raise _WrongError(f"the engine has {side} {dtypes}, the manifest says {expected}")
    try:
        test = job.golden.check(engine)
    except DataError as cause:  # the engine takes other shapes than the package states
        raise _WrongError(str(cause)) from cause
    if not test.passed:
        raise _WrongError("; ".join(check.message for check in test.checks if not check.passed))


def _measure(engines: dict[str, RunnableEngine], golden: GoldenCase) -> dict[str, float]:
    """Return the median latencies in seconds, interleaved."""
    calls = {precision: functools.partial(engine.run, golden.inputs) for precision, engine in engines.items()}
    return {precision: latency.median_s for precision, latency in measure_latency(calls, _TIMING).items()}
