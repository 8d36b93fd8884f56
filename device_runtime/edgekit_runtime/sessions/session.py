"""The session protocol, and the choice of the backend that opens one for a package."""

import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from edgekit_runtime.archive import DEFAULT_LIMITS, Limits, OpenedPackage, read_package
from edgekit_runtime.errors import BackendError
from edgekit_runtime.manifest import BackendChoice
from edgekit_runtime.sessions.preference import recall_order
from edgekit_runtime.sessions.tuned import apply_tuned
from edgekit_runtime.signing import TrustStore, find_keys_folder
from edgekit_runtime.tensors import TensorSpec

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

ENTRY_POINT_GROUP: Final = "edgekit.backends"

# Imported when used: each needs an engine, and a device has one or two of them.
_BUILT_IN: Final[Mapping[str, tuple[str, str]]] = {
    "ort": ("edgekit_runtime.sessions.ort", "open_ort"),
    "tensorrt": ("edgekit_runtime.sessions.tensorrt", "open_tensorrt"),
    "litert": ("edgekit_runtime.sessions.litert", "open_litert"),
}

_logger = logging.getLogger(__name__)


class EngineMissingError(BackendError):
    """The engine of a backend cannot be imported; another backend may be tried."""


class Session(Protocol):
    """A loaded model ready to run.

    Attributes:
        inputs: what `run` takes.
        outputs: what `run` returns.
    """

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...  # noqa: D102  # see the class

    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...  # noqa: D102  # see the class

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return all outputs for one set of inputs.

        Args:
            inputs: input name -> array of the spec's dtype and shape, one for each input.

        Raises:
            DataError: a name is missing or unknown, or an array does not fit its spec.
            BackendError: the engine failed, or the session is closed.
        """

    def close(self) -> None:
        """Free the model; a second call does nothing."""


class OpenBackend(Protocol):
    """What an entry point of the group `edgekit.backends` names: it opens the model of a package."""

    def __call__(self, package: OpenedPackage, choice: BackendChoice, threads: int | None) -> Session:
        """Return a session for `choice.artifact` of `package`.

        Args:
            package: verified; the session must not need it after this returns.
            choice: the artifact to open and the backend's own options.
            threads: overrides the number of threads in the options, or None.

        Raises:
            EngineMissingError: the engine is not installed.
            BackendError: the engine refused the model or an option.
        """


def open_session(
    package: Path | OpenedPackage,
    *,
    trust: TrustStore | None = None,
    limits: Limits = DEFAULT_LIMITS,
    threads: int | None = None,
) -> Session:
    """Return a session of the manifest's backend, or of its next fallback where that engine is missing.

    Where a tournament was held on this machine, its winner comes first; where the package was tuned here, it
    runs with the options that were found.

    Args:
        package: path of a package, which is then verified first, or an opened package, which stays open.
        trust: whose packages are accepted; by default the keys in `find_keys_folder()`.
        limits: of reading.
        threads: of one inference; by default as the manifest's options say.

    Raises:
        PackageError: of a subclass that says what is wrong with the package.
        BackendError: no engine for it is installed, or the engine refused the model.
    """
    if isinstance(package, OpenedPackage):
        choice = apply_tuned(package.manifest, recall_order(package.manifest))
        return open_choice(package, choice, threads)
    trust = TrustStore.from_folder(find_keys_folder()) if trust is None else trust
    with read_package(package, trust, limits) as opened:
        return open_session(opened, threads=threads)


def open_choice(package: OpenedPackage, choice: BackendChoice, threads: int | None = None) -> Session:
    """Return a session of `choice`, or of its next fallback whose engine is there.

    Args:
        package: verified.
        choice: a backend with its artifact, options and fallbacks.
        threads: of one inference, or None for those of the options.

    Raises:
        EngineMissingError: no engine of them is installed; the message has every reason.
        BackendError: the first engine that is installed refused the model or an option.
    """
    try:
        return _find_backend(choice.name)(package, choice, threads)
    except EngineMissingError as cause:
        if choice.fallback is None:
            raise
        _logger.warning("%s; using the fallback '%s'", cause, choice.fallback.name)
        try:
            return open_choice(package, choice.fallback, threads)
        except EngineMissingError as second:
            raise EngineMissingError(f"{cause}; and its fallback: {second}") from second


def _find_backend(name: str) -> OpenBackend:
    if name in _BUILT_IN:
        # Not an entry point, so that it also works where edgekit is not installed but on the path.
        module, function = _BUILT_IN[name]
        built_in: OpenBackend = getattr(importlib.import_module(module), function)
        return built_in
    from importlib.metadata import entry_points  # takes 10 ms and a megabyte, which few need

    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        if entry_point.name == name:
            try:
                backend: OpenBackend = entry_point.load()
            except ImportError as cause:
                raise EngineMissingError(f"backend '{name}' ({entry_point.value}): {cause}") from cause
            return backend
    raise EngineMissingError(
        f"no backend '{name}' here; install a distribution that offers the entry point '{name}' in the group"
        f" '{ENTRY_POINT_GROUP}', or a package with a backend that is here ({', '.join(_BUILT_IN)})"
    )


def check_specs(session: Session, package: OpenedPackage, choice: BackendChoice) -> None:
    """Return when a session has the inputs and outputs that the manifest states, by name and dtype.

    Args:
        session: of `choice.artifact`.
        package: that holds it.
        choice: that was opened.

    Raises:
        BackendError: it has others.
    """
    manifest = package.manifest
    for what, found, stated in (
        ("inputs", session.inputs, manifest.inputs),
        ("outputs", session.outputs, manifest.outputs),
    ):
        got = {spec.name: spec.dtype for spec in found}
        expected = {spec.name: spec.dtype for spec in stated}
        if got != expected:
            raise BackendError(
                f"{package.path}: '{choice.artifact}' has {what} {got}, manifest says {expected}"
            )
