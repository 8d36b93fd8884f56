"""Open a package with one engine, without its fallback, and print how its golden outputs compare.

Arguments: PACKAGE ENGINE. Prints a list of `[output, passed, largest absolute error, message]`.
"""

import dataclasses
import json
import sys
from pathlib import Path

from edgekit_runtime.package.archive import read_package
from edgekit_runtime.sessions import open_choice
from edgekit_runtime.sessions.selftest import run_selftest
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore


def main() -> None:
    """Compare and print."""
    with read_package(Path(sys.argv[1]), TrustStore.from_folder(find_keys_folder())) as package:
        (choice,) = [backend for backend in package.manifest.backend.chain if backend.name == sys.argv[2]]
        session = open_choice(package, dataclasses.replace(choice, fallback=None), 1)
        checks = run_selftest(session, package).checks
    print(json.dumps([[check.name, check.passed, check.max_abs_error, check.message] for check in checks]))


if __name__ == "__main__":
    main()
