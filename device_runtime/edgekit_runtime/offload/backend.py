"""The backend `offload`: runs a package with a cut table on this device and a server."""

import logging

from edgekit_runtime.errors import ConfigError, EdgekitError, UnavailableError
from edgekit_runtime.offload.cut_table import read_cut_table
from edgekit_runtime.offload.offload_options import read_offload_options
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.manifest import BackendChoice
from edgekit_runtime.sessions.backends import open_choice
from edgekit_runtime.sessions.session import Session

_logger = logging.getLogger(__name__)


def open_offload(package: OpenedPackage, choice: BackendChoice, threads: int | None) -> Session:
    """Return a session that runs the model on this device, on a server or on both.

    If no server is set, or the offload options of this device cannot be used, the model runs on this device.

    Args:
        package: the verified package.
        choice: backend with the name `offload`. Its fallback is the local backend.
        threads: number of threads of one inference, or None.

    Raises:
        EngineMissingError: the engine is not installed.
        BackendError: the engine refused the model or an option.
        CutError: the cut table is malformed.
        UnavailableError: the options of this device cannot be used, and this device cannot run the model.
    """
    local = choice.fallback or BackendChoice("ort", choice.artifact, choice.options)
    options = token = fault = None
    try:
        options = read_offload_options()
        token = None if options is None else options.read_token()
    except ConfigError as cause:
        fault = cause
    is_told = (options is not None or fault is not None) and package.submodel is None
    table = read_cut_table(package) if is_told else None
    if table is None or all(plan.tail is None for plan in table.plans):
        return open_choice(package, local, threads)
    if options is None or fault is not None:
        if table.local is None:
            raise UnavailableError(f"backend 'offload': this device cannot run the model; {fault}") from fault
        _logger.warning("%s runs on this device alone: %s", package.manifest.name, fault)
        return open_choice(package, local, threads)
    # Only with a server: a device without one pays nothing.
    from edgekit_runtime.offload.session.remote_session import RemoteSession

    shared = package.share()
    session = None if table.local is None else open_choice(shared, local, threads)
    try:
        return RemoteSession(shared, table, options, session, threads, token=token)
    except EdgekitError:
        if session is not None:
            session.close()
        shared.close()
        raise
