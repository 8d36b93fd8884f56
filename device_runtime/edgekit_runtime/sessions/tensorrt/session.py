"""A session that uses its fallback until the TensorRT engine has passed its tests."""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import field

from edgekit_runtime.errors import BackendError, EdgekitError
from edgekit_runtime.records import dataclass
from edgekit_runtime.sessions.session import Session
from edgekit_runtime.sessions.tensorrt.cache import StoppedError
from edgekit_runtime.sessions.tensorrt.prepare import PreparedEngine, RunnableEngine
from edgekit_runtime.tensors import Array, TensorSpec

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineState:
    """The state of the engine.

    Attributes:
        phase: `building` (or loading), `serving`, `failed` or `closed`.
        precision: The precision of the engine, or None before it serves.
        seconds: A dict from each measured precision to its median latency in seconds.
        notes: The reasons why the build or engines of other precisions failed.
    """

    phase: str
    precision: str | None = None
    seconds: Mapping[str, float] = field(default_factory=dict, hash=False)
    notes: tuple[str, ...] = ()


class TensorRtSession:
    """A `Session` that runs its fallback until the TensorRT engine is ready.

    Inputs with shapes outside the range of the engine always run on the fallback.
    """

    __slots__ = ("_serving", "_state", "_stop", "_thread", "inputs", "outputs")

    def __init__(
        self,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        fallback: Session | None,
        prepare: Callable[[threading.Event], PreparedEngine],
    ) -> None:
        """Start to prepare the engine in the background; without a fallback, return when it serves.

        `inputs`, `outputs`: specifications in the manifest. `fallback`: session that runs meanwhile, or None.
        `prepare`: returns the engine; its argument is an event, set when the engine is no longer wanted.

        Raises:
            BackendError: there is no fallback, and the engine could not be prepared.
        """
        self.inputs, self.outputs = inputs, outputs
        # One attribute, so that a run sees both or neither of an exchange's changes.
        self._serving: tuple[RunnableEngine | None, Session | None] = (None, fallback)
        self._state = EngineState("building")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._prepare, args=(prepare,), name="tensorrt", daemon=True)
        self._thread.start()
        if fallback is None:
            self._thread.join()
            if self._state.phase == "failed":
                raise BackendError(f"backend 'tensorrt': {'; '.join(self._state.notes)}")

    @property
    def state(self) -> EngineState:
        return self._state

    def wait(self, timeout_s: float | None = None) -> EngineState:
        """Wait up to `timeout_s` until the engine is ready or has failed, and return the state."""
        self._thread.join(timeout_s)
        return self._state

    def _prepare(self, prepare: Callable[[threading.Event], PreparedEngine]) -> None:
        try:
            prepared = prepare(self._stop)
        except StoppedError:
            return
        except (EdgekitError, OSError) as cause:
            self._state = EngineState("failed", notes=(str(cause),))
            _logger.warning("TensorRT does not serve this model, its fallback goes on: %s", cause)
            return
        except Exception as cause:
            self._state = EngineState("failed", notes=(f"{type(cause).__name__}: {cause}",))
            _logger.exception("TensorRT does not serve this model, its fallback goes on")
            return
        is_fixed = all(spec.size_bytes is not None for spec in prepared.engine.inputs)
        # Released, not closed: a run that has just taken the fallback must still end on it.
        self._serving = (prepared.engine, None if is_fixed else self._serving[1])
        entry = prepared.entry
        self._state = EngineState("serving", prepared.precision, entry.seconds, entry.notes)
        _logger.info("TensorRT serves this model in %s", prepared.precision)

    @property
    def alone(self) -> contextlib.AbstractContextManager[object]:
        """A context manager like `EngineExecutor.alone`. It does not delay runs on the fallback."""
        alone: contextlib.AbstractContextManager[object] = getattr(
            self._serving[0], "alone", contextlib.nullcontext()
        )
        return alone

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        engine, fallback = self._serving
        if engine is not None and (fallback is None or engine.accepts(inputs)):
            return engine.run(inputs)
        if fallback is None:
            raise BackendError("backend 'tensorrt': the session is closed")
        return fallback.run(inputs)

    def close(self) -> None:
        """Cancel the build, wait for its end and free the model. A second call does nothing."""
        self._stop.set()
        self._thread.join()
        engine, fallback = self._serving
        self._serving, self._state = (None, None), EngineState("closed")
        for session in (engine, fallback):
            if session is not None:
                session.close()
