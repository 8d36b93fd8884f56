"""The backend `offload`: runs a package with a cut table on this device and a server."""

from typing import TYPE_CHECKING, Final

from edgekit_runtime.system.engines import Engine, Installation, register

if TYPE_CHECKING:
    from edgekit_runtime.package.archive import OpenedPackage
    from edgekit_runtime.package.manifest import BackendChoice
    from edgekit_runtime.sessions.session import Session


def _open(package: "OpenedPackage", choice: "BackendChoice", threads: int | None) -> "Session":
    from edgekit_runtime.offload.backend import open_offload

    return open_offload(package, choice, threads)


OFFLOAD: Final = register(
    Engine(
        name="offload",
        title="offload",
        installation=Installation(modules=("onnxruntime",), extra="device"),
        open=_open,
        can_stop_runs=True,
    )
)
