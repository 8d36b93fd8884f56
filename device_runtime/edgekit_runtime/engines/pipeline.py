"""The backend `pipeline`: runs a package of several models, each with its own engine."""

from typing import TYPE_CHECKING, Final

from edgekit_runtime.system.engines import Engine, Installation, register

if TYPE_CHECKING:
    from edgekit_runtime.package.archive import OpenedPackage
    from edgekit_runtime.package.manifest import BackendChoice
    from edgekit_runtime.sessions.session import Session


def _open(package: "OpenedPackage", choice: "BackendChoice", threads: int | None) -> "Session":
    from edgekit_runtime.pipelines.backend import open_pipeline

    return open_pipeline(package, choice, threads)


PIPELINE: Final = register(
    Engine(
        name="pipeline",
        title="pipeline",
        installation=Installation(
            modules=("edgekit_runtime",)
        ),  # the members state the engines that they need
        open=_open,
        can_stop_runs=True,
    )
)
