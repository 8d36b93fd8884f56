"""The `pipeline` backend, which opens each member of a package as a package of its own."""

from collections.abc import Mapping
from contextlib import ExitStack

from edgekit_runtime.errors import PackageError
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.manifest import BackendChoice
from edgekit_runtime.package.pipeline import Pipeline
from edgekit_runtime.pipelines.member import PipelineMember, open_member
from edgekit_runtime.pipelines.session import PipelineSession
from edgekit_runtime.sessions.session import check_specs


def open_pipeline(package: OpenedPackage, choice: BackendChoice, threads: int | None) -> PipelineSession:
    """Return a session that runs all stages. For the arguments see `OpenBackend`.

    Raises:
        PackageError: A member has no task or preprocessing, or does not fit the stages before and after it.
    """
    if package.manifest.pipeline is None:
        raise PackageError(f"{package.path}: its backend is 'pipeline', but it has no stages")
    session = open_stages(package.manifest.pipeline, package.list_members(), threads)
    try:
        check_specs(session, package, choice)
    except BaseException:
        session.close()
        raise
    return session


def open_stages(
    pipeline: Pipeline, packages: Mapping[str, OpenedPackage], threads: int | None = None
) -> PipelineSession:
    """Open the models of a pipeline. `packages` is a dict from stage names to the packages of the models."""
    with ExitStack() as opened:
        members: dict[str, PipelineMember] = {}
        for name, package in packages.items():
            members[name] = open_member(name, package, threads)
            opened.callback(members[name].session.close)
        session = PipelineSession(pipeline, members)
        opened.pop_all()
    return session
