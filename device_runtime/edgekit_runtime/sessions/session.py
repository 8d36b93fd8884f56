"""The protocol that the sessions of all engines implement, and the check of a session against a manifest."""

from collections.abc import Mapping
from typing import Protocol

from edgekit_runtime.errors import BackendError
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.manifest import BackendChoice
from edgekit_runtime.sessions.options import DECODE
from edgekit_runtime.tensors import Array, TensorSpec


class Session(Protocol):
    """A model that is loaded and ready to run.

    Attributes:
        inputs: The specifications of the inputs of `run`.
        outputs: The specifications of the outputs of `run`.

    A session may have more attributes. `has_fixed_work` is True if the duration of a run does not depend on
    the values of its inputs. Otherwise, the service does not batch requests, and does not run the model on
    its event loop. See `OrtSession` for `is_concurrent`, `share`, `trim` and `cancel_runs`.
    """

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...  # noqa: D102  # see the class

    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...  # noqa: D102  # see the class

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model once and return all outputs.

        Args:
            inputs: A dict from the name of each input to an array with the dtype and shape of its spec.

        Raises:
            DataError: An input is missing or unknown, or does not match its spec.
            RefusedInputError: The engine refused inputs that match their specs.
            BackendError: The engine failed, or the session is closed.
        """

    def close(self) -> None:
        """Free the model. A second call does nothing."""


class OpenBackend(Protocol):
    """The type of `Engine.open`, which opens the model of a package."""

    def __call__(self, package: OpenedPackage, choice: BackendChoice, threads: int | None) -> Session:
        """Return a session for `choice.artifact` of `package`.

        Args:
            package: The verified package. It may be closed after this returns.
            choice: The artifact to open and the options of the backend.
            threads: The number of threads per inference. The default is set by the options.

        Raises:
            EngineMissingError: The engine is not installed.
            BackendError: The engine refused the model or an option.
        """


def share_session(session: Session) -> Session:
    """Return `session.share()`, or `session` itself if it has no such method. See `OrtSession.share`."""
    share = getattr(session, "share", None)
    shared: Session = session if share is None else share()
    return shared


def cancel_runs(session: object) -> None:
    """Abort the current runs of a session with an error. Any thread may call this function.

    It does nothing if the session has no method `cancel_runs`. It may miss a run that is just starting, so
    repeat the call until the run has ended.
    """
    cancel = getattr(session, "cancel_runs", None)
    if cancel is not None:
        cancel()


def check_specs(session: Session, package: OpenedPackage, choice: BackendChoice) -> None:
    """Check that the inputs and outputs of a session match the manifest.

    Raises:
        BackendError: A name or dtype differs, or the session does not accept the stated shape of an input.
    """
    manifest = package.manifest
    stated_inputs = manifest.inputs
    if isinstance(decoded := choice.options.get(DECODE), Mapping):
        # For these the manifest states the files that arrive; `MediaSession` checks the model's own inputs.
        files = tuple(spec for spec in session.inputs if spec.name in decoded)
        stated_inputs = (*(spec for spec in stated_inputs if spec.name not in decoded), *files)
    for side, specs, stated in (
        ("inputs", session.inputs, stated_inputs),
        ("outputs", session.outputs, manifest.outputs),
    ):
        dtypes = {spec.name: spec.dtype for spec in specs}
        expected = {spec.name: spec.dtype for spec in stated}
        if dtypes != expected:
            raise BackendError(
                f"{package.path}: '{choice.artifact}' has {side} {dtypes}, manifest says {expected}"
            )
    shapes = {spec.name: spec.shape for spec in session.inputs}
    for spec in stated_inputs:
        if not _takes(shapes[spec.name], spec.shape):
            raise BackendError(
                f"{package.path}: '{choice.artifact}' takes '{spec.name}' of shape"
                f" {list(shapes[spec.name])}, manifest says {list(spec.shape)}"
            )


def _takes(own: tuple[int | str, ...], stated: tuple[int | str, ...]) -> bool:
    """Return whether a model whose input has the shape `own` takes every array of the shape `stated`."""
    return len(own) == len(stated) and all(
        isinstance(size, str) or size == stated_size for size, stated_size in zip(own, stated, strict=True)
    )
