"""One version of a model whose sessions are in a process of their own, as the rest of the service sees it.

As a session it stands for what is loaded there; as a lane it answers what reaches the service itself while no
worker can take it. Requests reach a worker without passing through here: see `worker_process`.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from edgekit_runtime.canonical import JsonValue
from edgekit_runtime.errors import BackendError, EdgekitError, UnavailableError
from edgekit_runtime.manifest import Manifest
from edgekit_runtime.service.call import Call, Lane
from edgekit_runtime.service.connection import Connection
from edgekit_runtime.service.tally import Tally
from edgekit_runtime.sessions.session import Array
from edgekit_runtime.tensors import TensorSpec

if TYPE_CHECKING:
    from concurrent.futures import Future

    from edgekit_runtime.service.isolated_model import IsolatedModel
    from edgekit_runtime.service.isolated_trial import IsolatedTrial
    from edgekit_runtime.service.orders import Given


class Processes(Protocol):
    """The workers of one model; all of it on the thread of the loop but `close`."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way in any of them."""

    def lend(self, connection: Connection, *, is_default: bool) -> bool:
        """Let a worker answer the present request of `connection`; see `Worker.lend`."""

    def explain(self) -> UnavailableError:
        """Return why no worker can take a call now."""

    def say(self, tally: Tally) -> dict[str, JsonValue]:
        """Return what the worker that answers says of a version."""

    def try_beside(
        self, manifest: Manifest, given: "Given", package: int, opened: "Future[IsolatedLane]"
    ) -> None:
        """Try a version in the worker of the one in use.

        Args:
            manifest: of the candidate.
            given: its package.
            package: descriptor of that, owned by this from now on.
            opened: gets its lane once it gets calls, or an error.
        """

    def promote(self, lane: "IsolatedLane") -> bool:
        """Let a candidate take over from the version in use; returns whether it still lives."""

    def drop(self, lane: "IsolatedLane") -> None:
        """Try a candidate no more."""

    def drain(self, lane: "IsolatedLane", done: Callable[[], None]) -> None:
        """Serve a version no more, and call `done` once all that was taken is answered."""

    def close(self, lane: "IsolatedLane") -> None:
        """Free a version; from any thread."""


class Events(Protocol):
    """What a model tells of itself."""

    def on_started(self, model: "IsolatedModel", error: EdgekitError | None) -> None:
        """It is loaded for the first time, or cannot be, for `error`; said once."""

    def on_crash(self, model: "IsolatedModel", reason: str, *, is_loop: bool) -> None:
        """A worker that had loaded it has crashed, too often where `is_loop`."""

    def on_end(self, model: "IsolatedModel") -> None:
        """It has ended its processes; said once."""


class IsolatedLane(Lane):
    """Stands for a version; all of it on the thread of the loop but `close`.

    Attributes:
        processes: that serve it.
        manifest: of the version.
        tally: what is counted of it.
        trial: in which it is the candidate, until that begins; or None.
    """

    __slots__ = ("manifest", "processes", "tally", "trial")

    def __init__(self, processes: Processes, manifest: Manifest) -> None:
        self.processes = processes
        self.manifest = manifest
        self.tally = Tally()
        self.trial: IsolatedTrial | None = None

    # As a session

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """As the package states them."""
        return self.manifest.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """As the package states them."""
        return self.manifest.outputs

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:  # noqa: ARG002  # of the protocol
        """Not possible here: the model is loaded in another process.

        Raises:
            BackendError: always.
        """
        raise BackendError(f"{self.manifest.name} is isolated: it cannot be run within the service")

    def close(self) -> None:
        """Free it; from any thread."""
        self.processes.close(self)

    # As a lane

    def lend(self, connection: Connection, *, is_default: bool) -> bool:
        """Let a worker answer the present request of `connection`; see `Worker.lend`."""
        return self.processes.lend(connection, is_default=is_default)

    def submit(self, call: Call) -> None:
        """Answer that the model cannot be asked now."""
        self.tally.refuse()
        call.reply(self.processes.explain())

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way in any of its workers, whichever version it is for."""
        return self.processes.is_idle

    def drain(self, done: Callable[[], None]) -> None:
        """Serve no more, and call `done` once all that was taken is answered."""
        self.processes.drain(self, done)

    def to_json(self) -> dict[str, JsonValue]:
        """Return what its worker says of it, for `/v2` statistics."""
        return self.processes.say(self.tally)
