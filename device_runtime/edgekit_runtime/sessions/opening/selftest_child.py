"""Self-tests a package in a separate process, so that a crashing engine does not end other processes.

`python -m edgekit_runtime.sessions.opening.selftest_child REQUEST` exits with 1 and prints the fault to
standard error if the test fails. REQUEST is a JSON object:

- `package`: The path of the package.
- `sha256`: The expected digest of the manifest. By default, the signature is verified instead of the digest.
- `submodel`, `variants`: The part to open. The default is the preferred variant of the whole model.
- `threads`: The number of threads per inference.
- `forget`: If true, a success is not stored, see `package_opening`.
"""

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from edgekit_runtime.errors import EdgekitError, OutputError
from edgekit_runtime.package.archive import DEFAULT_LIMITS, Limits, OpenedPackage, read_package
from edgekit_runtime.package.canonical_zip import MAX_ARCHIVE_BYTES, MAX_ARCHIVE_MEMBERS
from edgekit_runtime.sessions.backends import open_preferred, open_session
from edgekit_runtime.sessions.local_results import keep_opening
from edgekit_runtime.sessions.selftest import run_selftest
from edgekit_runtime.system.child_process import end_with_parent
from edgekit_runtime.system.engines import EngineMissingError
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.dsse import KnownDigest

# The parent has read the same bytes within limits of its own.
_VERIFIED_LIMITS: Final = Limits(
    max_package_bytes=MAX_ARCHIVE_BYTES,
    max_manifest_bytes=MAX_ARCHIVE_BYTES,
    max_signature_bytes=MAX_ARCHIVE_BYTES,
    max_members=MAX_ARCHIVE_MEMBERS,
)


def main(request: Mapping[str, Any]) -> str:
    """Self-test the package in `request`. Return the faults, or an empty text if there are none."""
    try:
        with _read(request) as whole:
            submodel = request.get("submodel")
            package = whole if submodel is None else whole.select_submodel(submodel)
            variants = tuple(request.get("variants", ()))
            faults = _test_all(package, variants, request.get("threads"))
            if not faults and not request.get("forget"):
                with contextlib.suppress(OutputError):  # the parent says so
                    keep_opening(package, variants)
    except EdgekitError as error:
        return str(error)
    return "; ".join(faults)


def _read(request: Mapping[str, Any]) -> OpenedPackage:
    path = Path(request["package"])
    if "sha256" in request:
        return read_package(path, KnownDigest(request["sha256"]), _VERIFIED_LIMITS)
    from edgekit_runtime.trust.trust_store import TrustStore  # 10 MB, and 0.1 s of a core

    return read_package(path, TrustStore.from_folder(find_keys_folder()), DEFAULT_LIMITS)


def _test_all(package: OpenedPackage, variants: tuple[str, ...], threads: int | None) -> list[str]:
    if not variants:
        return _test(package, None, threads)
    faults: list[str] = []
    missing: list[EngineMissingError] = []
    for variant in variants:
        try:
            faults += _test(package, variant, threads)
        except EngineMissingError as cause:  # noqa: PERF203  # the others may have theirs
            missing.append(cause)
    if len(missing) == len(variants):
        raise missing[0]
    return faults


def _test(package: OpenedPackage, variant: str | None, threads: int | None) -> list[str]:
    if variant is None:
        variant, session = open_preferred(package, threads)
    else:
        session = open_session(package, variant=variant, threads=threads)
    try:
        # If the session may offload, only what this device computes by itself.
        alone = getattr(session, "local", None) or session
        checks = run_selftest(alone, package.select(variant)).checks
    finally:
        session.close()
    return [f"variant '{variant}': {check.message}" for check in checks if not check.passed]


if __name__ == "__main__":
    end_with_parent()
    problem = main(json.loads(sys.argv[1]))
    print(problem, file=sys.stderr)
    sys.exit(1 if problem else 0)
