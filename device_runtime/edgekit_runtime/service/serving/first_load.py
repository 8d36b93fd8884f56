"""Tests a package in a child process before loading it, so that an engine crash does not end the service."""

from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.service.options.model import ModelOptions
from edgekit_runtime.service.serving.loader import Loaded, OpenRemote, find_limit, load, map_exceptions


def load_tested(
    package: OpenedPackage,
    options: ModelOptions,
    open_remote: OpenRemote | None = None,
    beside: Loaded | None = None,
) -> Loaded:
    """Load a package with `load`. If its model runs in this process, a child process tests it first.

    Raises:
        BackendError: As in `load`, or the child process crashed.
        SlowOpeningError: The test in the child process took too long.
        UnavailableError: As in `load`, or there was no memory for the child process.
    """
    if not options.isolated or beside is not None:
        from edgekit_runtime.sessions.opening.package_opening import check_first_opening  # not in a worker

        governor = options.governor
        every = tuple(variant.name for variant in package.manifest.all_variants)
        variants = () if governor is None else governor.variants or every
        with map_exceptions(f"{package.path}: {package.manifest.name} {package.manifest.version}"):
            limit_s = find_limit(package, options)
            check_first_opening(package, variants=variants, threads=options.threads, limit_s=limit_s)
    return load(package, options, open_remote, beside)
