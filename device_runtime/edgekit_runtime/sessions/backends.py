"""Opens a session of a package: chooses the variant and the backend, and calls the engine."""

import contextlib
import logging
import sys
from collections.abc import Mapping
from pathlib import Path

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import BackendError
from edgekit_runtime.package.archive import DEFAULT_LIMITS, Limits, OpenedPackage, read_package
from edgekit_runtime.package.manifest import BackendChoice, Manifest
from edgekit_runtime.sessions.local_results import apply_tuned, recall_order
from edgekit_runtime.sessions.options import DECODE
from edgekit_runtime.sessions.session import OpenBackend, Session, check_specs
from edgekit_runtime.system.engines import EngineMissingError, check_backends, find_engine
from edgekit_runtime.trust.dsse import Verifier

_logger = logging.getLogger(__name__)


def open_session(
    package: Path | OpenedPackage,
    *,
    variant: str | None = None,
    trust: Verifier | None = None,
    limits: Limits = DEFAULT_LIMITS,
    threads: int | None = None,
) -> Session:
    """Return a session of a variant. If its engine is not installed, the fallbacks are tried in order.

    The results of `edgekit-device tournament` and `edgekit-device tune` on this machine are used.

    Args:
        package: The path of a package to verify and open, or an opened package, which is not closed.
        variant: The name of the variant. The default is the choice of `open_preferred`.
        trust: The verifier of the signature. The default uses the keys in `find_keys_folder()`.
        limits: The limits for reading the package.
        threads: The number of threads per inference. The default is set by the options in the manifest.

    Raises:
        PackageError: The package is invalid (see the subclasses), or does not have this variant.
        BackendError: No engine of the variant is installed, or the engine refused the model.
    """
    if isinstance(package, OpenedPackage):
        if variant is None:
            return open_preferred(package, threads)[1]
        selected = package.select(variant)
        order = {variant.name: variant for variant in recall_order(package.manifest)}
        return open_choice(selected, apply_tuned(package.manifest, order[variant].backend), threads)
    with _open_verifier() if trust is None else contextlib.nullcontext(trust) as verifier:
        opened = read_package(package, verifier, limits)
    with opened:
        return open_session(opened, variant=variant, threads=threads)


def _open_verifier() -> contextlib.AbstractContextManager[Verifier]:
    """Return a verifier with the keys in `find_keys_folder()`, which runs in a separate process.

    In this process, its memory would not be freed: 10 MB, a sixth of the peak of a small model.

    Raises:
        SignatureError: A key is not a public key.
        UnavailableError: The keys cannot be read, or the process cannot be started at the moment.
    """
    if getattr(sys, "frozen", False):  # a program in one file: its executable is no Python
        from edgekit_runtime.system.paths import find_keys_folder
        from edgekit_runtime.trust.trust_store import TrustStore

        return contextlib.nullcontext(TrustStore.from_folder(find_keys_folder()))
    from edgekit_runtime.trust.verifier_process import VerifyingProcess

    return VerifyingProcess()


def open_preferred(package: OpenedPackage, threads: int | None = None) -> tuple[str, Session]:
    """Return the name of the preferred variant on this machine and a session of it.

    The preferred variant is the winner of `edgekit-device tournament` on this machine, or else the default
    variant. If none of its engines is installed, the next variant with an installed engine is used.

    Args:
        package: The verified package.
        threads: The number of threads per inference. The default is set by the options in the manifest.

    Raises:
        EngineMissingError: No engine of any variant is installed. The message lists all of them.
        BackendError: The first installed engine refused the model or an option.
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
    """Return a session of `choice`, or of its first fallback with an installed engine.

    Args:
        package: The verified package.
        choice: A backend with its artifact, options and fallbacks.
        threads: The number of threads per inference. The default is set by the options in the manifest.

    Raises:
        EngineMissingError: No engine of `choice` or its fallbacks is installed. The message lists all of
            them.
        BackendError: The first installed engine refused the model or an option.
    """
    try:
        session = _open_alone(package, choice, threads)
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
    from edgekit_runtime.sessions.media import MediaSession  # only if inputs are files

    try:
        return MediaSession(session, choice.options[DECODE])
    except BaseException:
        session.close()
        raise


def _open_alone(package: OpenedPackage, choice: BackendChoice, threads: int | None) -> Session:
    """Return a session of `choice`, without its fallbacks and decoding."""
    open_package: OpenBackend | None = find_engine(choice.name).open
    if open_package is not None:
        return open_package(package, choice, threads)
    try:
        session = open_model(choice.name, package.read(choice.artifact), choice.options, threads)
    except EngineMissingError:
        raise
    except BackendError as cause:
        raise BackendError(f"{package.path}: '{choice.artifact}': {cause}") from cause
    check_specs(session, package, choice)
    return session


def open_model(
    engine: str,
    model: bytes | memoryview,
    options: Mapping[str, JsonValue] | None = None,
    threads: int | None = None,
) -> Session:
    """Return a session of a model without a package.

    Args:
        engine: The name of the engine, such as `litert`.
        model: The content of a model file in the engine's format.
        options: The options, as in a manifest. The default is no options.
        threads: The number of threads per inference. The default is set by the options.

    Raises:
        EngineMissingError: The engine is not installed.
        BackendError: The engine can only open models of packages, or refused the model or an option.
    """
    opener = find_engine(engine).open_model
    if opener is None:
        raise BackendError(f"backend '{engine}' opens models of packages only")
    session: Session = opener(model, options or {}, threads)
    return session


def check_engines(manifest: Manifest) -> None:
    """Check that an engine is installed for at least one backend of the manifest.

    Engines are not imported, to save memory. So this does not find engines whose import fails.

    Raises:
        EngineMissingError: No engine is installed. The message says what to install.
    """
    label = f"{manifest.name} {manifest.version}"
    check_backends(list_backends(manifest), label)
    for stage in () if manifest.pipeline is None else manifest.pipeline.members:
        check_backends(stage.engines, f"{label}, stage '{stage.name}'")


def list_backends(manifest: Manifest) -> tuple[str, ...]:
    """Return the distinct names of the backends of all variants."""
    choices = [choice.name for variant in manifest.all_variants for choice in variant.backend.chain]
    return tuple(dict.fromkeys(choices))
