"""The session protocol, and the choice of the backend that opens one for a package."""

import contextlib
import importlib
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from edgekit_runtime.errors import BackendError
from edgekit_runtime.package.archive import DEFAULT_LIMITS, Limits, OpenedPackage, read_package
from edgekit_runtime.package.manifest import BackendChoice, Manifest
from edgekit_runtime.sessions.local_results import apply_tuned, recall_order
from edgekit_runtime.sessions.options import DECODE
from edgekit_runtime.system.engines import BUILT_IN, EngineMissingError, check_backends, find_entry_point
from edgekit_runtime.tensors import Array, TensorSpec
from edgekit_runtime.trust.dsse import Verifier

_logger = logging.getLogger(__name__)


class Session(Protocol):
    """A loaded model ready to run.

    Attributes:
        inputs: specifications of the inputs of `run`.
        outputs: specifications of the outputs of `run`.

    A session may have more: `has_fixed_work` (values of inputs cannot change how long a run takes, see
    `fixed_work`; without it the service runs the model on threads only and makes no batches),
    `is_concurrent`, `share`, `trim` and `cancel_runs`, see `OrtSession`.
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
            RefusedInputError: the engine refused these inputs, which fit their specs.
            BackendError: the engine failed, or the session is closed.
        """

    def close(self) -> None:
        """Free the model; a second call does nothing."""


def share_session(session: Session) -> Session:
    """Return a session of the same loaded model whose runs are cancelled alone; `session` if it has none."""
    share = getattr(session, "share", None)
    shared: Session = session if share is None else share()
    return shared


def cancel_runs(session: object) -> None:
    """End the runs under way of a session with an error, from any thread, where its engine can be stopped.

    A backend may offer that as `cancel_runs()` of its sessions. It may come too early for a run that begins
    at this moment, so repeat it until the run has ended.
    """
    cancel = getattr(session, "cancel_runs", None)
    if cancel is not None:
        cancel()


class OpenBackend(Protocol):
    """An entry point of the group `edgekit.backends`: it opens the model of a package."""

    def __call__(self, package: OpenedPackage, choice: BackendChoice, threads: int | None) -> Session:
        """Return a session for `choice.artifact` of `package`.

        Args:
            package: the verified package; the session must not need it after this returns.
            choice: the artifact to open and the backend's own options.
            threads: overrides the number of threads in the options, or None.

        Raises:
            EngineMissingError: the engine is not installed.
            BackendError: the engine refused the model or an option.
        """


def open_session(
    package: Path | OpenedPackage,
    *,
    variant: str | None = None,
    trust: Verifier | None = None,
    limits: Limits = DEFAULT_LIMITS,
    threads: int | None = None,
) -> Session:
    """Return a session of a variant's backend, or of its next fallback if that engine is missing.

    If a tournament was held on this machine, its winner comes first; if the package was tuned here, it runs
    with the found options.

    Args:
        package: path of a package, which is then verified first, or an opened package, which stays open.
        variant: name of the variant; by default the choice of `open_preferred`.
        trust: the verifier whose packages are accepted; by default the keys in `find_keys_folder()`.
        limits: limits of reading the package.
        threads: threads of one inference; by default as the manifest's options say.

    Raises:
        PackageError: the package is wrong (the subclass says how), or it has no such variant.
        BackendError: no engine for it is installed, or the engine refused the model.
    """
    if isinstance(package, OpenedPackage):
        if variant is None:
            return open_preferred(package, threads)[1]
        selected = package.select(variant)
        order = {one.name: one for one in recall_order(package.manifest)}
        return open_choice(selected, apply_tuned(package.manifest, order[variant].backend), threads)
    with _open_verifier() if trust is None else contextlib.nullcontext(trust) as verifier:
        opened = read_package(package, verifier, limits)
    with opened:
        return open_session(opened, variant=variant, threads=threads)


def _open_verifier() -> contextlib.AbstractContextManager[Verifier]:
    """Return a verifier by the keys in `find_keys_folder()`, in a separate process that ends with it.

    Its memory would stay in this process: 10 MB, a sixth of the peak of a small model.

    Raises:
        SignatureError: one of the keys is no public key.
        UnavailableError: the keys cannot be read, or the process not be started, now.
    """
    if getattr(sys, "frozen", False):  # a program in one file: its executable is no Python
        from edgekit_runtime.system.paths import find_keys_folder
        from edgekit_runtime.trust.trust_store import TrustStore

        return contextlib.nullcontext(TrustStore.from_folder(find_keys_folder()))
    from edgekit_runtime.trust.verifier_process import VerifyingProcess

    return VerifyingProcess()


def open_preferred(package: OpenedPackage, threads: int | None = None) -> tuple[str, Session]:
    """Return the name of the variant that is best here, and a session of it.

    That is the winner of the tournament on this machine, or without one the default; if no engine of it is
    installed, the first of the others that has one.

    Args:
        package: verified.
        threads: threads of one inference, or None for the options' number.

    Raises:
        EngineMissingError: no engine of any variant is installed; the message has every reason.
        BackendError: the first engine that is installed refused the model or an option.
    """
    missing: list[EngineMissingError] = []
    for variant in recall_order(package.manifest):
        try:
            choice = apply_tuned(package.manifest, variant.backend)
            session = open_choice(package.select(variant.name), choice, threads)
        except EngineMissingError as cause:
            missing.append(cause)
            continue
        if missing:
            _logger.warning("%s; using the variant '%s'", missing[0], variant.name)
        return variant.name, session
    if len(missing) == 1:
        raise missing[0]
    raise EngineMissingError("; and another variant: ".join(map(str, missing))) from missing[-1]


def open_choice(package: OpenedPackage, choice: BackendChoice, threads: int | None = None) -> Session:
    """Return a session of `choice`, or of its next fallback with an installed engine.

    Args:
        package: verified.
        choice: a backend with its artifact, options and fallbacks.
        threads: threads of one inference, or None for the options' number.

    Raises:
        EngineMissingError: no engine of them is installed; the message has every reason.
        BackendError: the first engine that is installed refused the model or an option.
    """
    try:
        session = _find_backend(choice.name)(package, choice, threads)
    except EngineMissingError as cause:
        if choice.fallback is None:
            raise
        _logger.warning("%s; using the fallback '%s'", cause, choice.fallback.name)
        try:
            return open_choice(package, choice.fallback, threads)
        except EngineMissingError as second:
            raise EngineMissingError(f"{cause}; and its fallback: {second}") from second
    if DECODE not in choice.options:
        return session
    media = importlib.import_module("edgekit_runtime.sessions.media")  # only if inputs are files, as above
    try:
        decoding: Session = media.MediaSession(session, choice.options[DECODE])
        return decoding  # noqa: TRY300  # nothing more can fail
    except BaseException:
        session.close()
        raise


def check_engines(manifest: Manifest) -> None:
    """Check that an engine is installed here for one of the backends that the manifest names.

    No engine is imported, so this takes no memory, and does not detect an engine that cannot be imported.

    Raises:
        EngineMissingError: none is installed; the message says what to install for each.
    """
    check_backends(list_backends(manifest), f"{manifest.name} {manifest.version}")


def list_backends(manifest: Manifest) -> tuple[str, ...]:
    """Return the backends in the variants of a manifest; one of them is enough."""
    choices = [choice.name for variant in manifest.all_variants for choice in variant.backend.chain]
    return tuple(dict.fromkeys(choices))


def _find_backend(name: str) -> OpenBackend:
    if name in BUILT_IN:
        # Not an entry point, so that it also works if edgekit is not installed but on the path.
        module = importlib.import_module(BUILT_IN[name].module)
        built_in: OpenBackend = getattr(module, BUILT_IN[name].function)
        return built_in
    entry_point = find_entry_point(name)
    try:
        backend: OpenBackend = entry_point.load()
    except ImportError as cause:
        raise EngineMissingError(f"backend '{name}' ({entry_point.value}): {cause}") from cause
    return backend


def check_specs(session: Session, package: OpenedPackage, choice: BackendChoice) -> None:
    """Check that a session has the inputs and outputs of the manifest, and accepts the stated shapes.

    Args:
        session: session of `choice.artifact`.
        package: the package that holds it.
        choice: the choice that was opened.

    Raises:
        BackendError: their names or dtypes differ, or it takes inputs of other shapes.
    """
    manifest = package.manifest
    stated_inputs = manifest.inputs
    if isinstance(decoded := choice.options.get(DECODE), Mapping):
        # For these the manifest states the files that arrive; `MediaSession` checks the model's own inputs.
        files = tuple(spec for spec in session.inputs if spec.name in decoded)
        stated_inputs = (*(spec for spec in stated_inputs if spec.name not in decoded), *files)
    for what, found, stated in (
        ("inputs", session.inputs, stated_inputs),
        ("outputs", session.outputs, manifest.outputs),
    ):
        got = {spec.name: spec.dtype for spec in found}
        expected = {spec.name: spec.dtype for spec in stated}
        if got != expected:
            raise BackendError(
                f"{package.path}: '{choice.artifact}' has {what} {got}, manifest says {expected}"
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
        isinstance(size, str) or size == wanted for size, wanted in zip(own, stated, strict=True)
    )
