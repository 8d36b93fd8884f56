"""The backend `offload`: a package with a cut table, on this device and a server."""

from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.manifest import BackendChoice
from edgekit_runtime.remote.cut_table import read_cut_table
from edgekit_runtime.remote.offload_options import read_offload_options
from edgekit_runtime.sessions.session import Session, open_choice


def open_offload(package: OpenedPackage, choice: BackendChoice, threads: int | None) -> Session:
    """Return a session that runs the model where it is fastest; the plain local one without a server.

    Args:
        package: verified.
        choice: of the name `offload`; its fallback is the local backend.
        threads: threads of one inference, or None.

    Raises:
        EngineMissingError: the engine is not installed.
        BackendError: the engine refused the model or an option.
        CutError: the cut table is malformed.
        ConfigError: the options of this device are malformed.
    """
    local = choice.fallback or BackendChoice("ort", choice.artifact, choice.options)
    options = read_offload_options()
    table = None if options is None or package.submodel is not None else read_cut_table(package)
    if options is None or table is None or all(plan.tail is None for plan in table.plans):
        return open_choice(package, local, threads)
    # Only with a server: a device without one pays nothing.
    from edgekit_runtime.remote.session.remote_session import RemoteSession

    shared = package.share()
    session = None if table.local is None else open_choice(shared, local, threads)
    try:
        return RemoteSession(shared, table, options, session, threads)
    except EdgekitError:
        if session is not None:
            session.close()
        shared.close()
        raise
