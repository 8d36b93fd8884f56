"""The self-test of a package in a separate process, so that an engine that crashes ends nothing else."""

import sys
from pathlib import Path

from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.sessions.selftest import run_selftest
from edgekit_runtime.sessions.session import open_session
from edgekit_runtime.system.child_process import end_with_parent
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore


def main(path: Path) -> str:
    """Return the fault of the package at `path`, or an empty text."""
    try:
        with read_package(path, TrustStore.from_folder(find_keys_folder())) as package:
            session = open_session(package)
            try:
                found = run_selftest(session, package)
            finally:
                session.close()
    except EdgekitError as error:
        return str(error)
    return "; ".join(check.message for check in found.checks if not check.passed)


if __name__ == "__main__":
    end_with_parent()
    problem = main(Path(sys.argv[1]))
    print(problem, file=sys.stderr)
    sys.exit(1 if problem else 0)
