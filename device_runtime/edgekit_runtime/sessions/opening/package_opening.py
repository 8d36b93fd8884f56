"""The first opening of a package by an engine on this machine, in a process that may die of it.

An engine is native code: onnxruntime 1.24.4 aborts on models that newer releases open, and an abort ends the
whole process, with every other model in it. So a package is opened and tested in a child first. That costs a
start of Python and of the engine; the outcome is remembered for this package, release of the engine and
processor, so that only the first opening pays.
"""

import json
import logging
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from edgekit_runtime.errors import BackendError, SlowOpeningError, UnavailableError
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.sessions.local_results import is_opening_kept
from edgekit_runtime.system.child_process import ChildProcess, child_environment, describe_end
from edgekit_runtime.system.resource_errors import check_lack

_MODULE: Final = "edgekit_runtime.sessions.opening.selftest_child"
_FAULT: Final = 1  # exit code of a child whose engine refused the package, or computed something else
_RETRY_AFTER_S: Final = 5.0

_logger = logging.getLogger(__name__)


def check_first_opening(
    package: OpenedPackage, *, variants: Sequence[str] = (), threads: int | None = None, limit_s: float
) -> None:
    """Check that opening `package` does not crash the process, unless it was checked here before.

    A package that its engine refuses with an error passes this check.

    Args:
        package: verified.
        variants: variants that will be opened; by default the preferred one.
        threads: threads of one inference; by default as the options say.
        limit_s: seconds until the child is ended.

    Raises:
        BackendError: the engine crashed the child process, or the child cannot be started.
        SlowOpeningError: the child did not end within `limit_s`.
        UnavailableError: the child was killed or cannot be started now, as when memory is lacking.
    """
    if is_opening_kept(package, variants):
        return
    problem = test_in_child(package, variants=variants, threads=threads, limit_s=limit_s)
    if not problem and not is_opening_kept(package, variants):
        _logger.warning(
            "%s: the cache folder cannot be written, so each load tests it in a process of its own first; set"
            " EDGEKIT_CACHE to a folder of this user",
            package.path,
        )


def test_in_child(
    package: OpenedPackage,
    *,
    variants: Sequence[str] = (),
    threads: int | None = None,
    limit_s: float,
    engines: Path | None = None,
    is_kept: bool = True,
) -> str:
    """Open and self-test `package` in a child process; return why that fails, or an empty text.

    Raises the same errors as `check_first_opening`.

    Args:
        package: verified.
        variants: variants to open; those without an installed engine are skipped. By default the preferred
            one.
        threads: threads of one inference; by default as the options say.
        limit_s: seconds until the child is ended.
        engines: folder of Python packages, such as another release of an engine, that the child imports
            before the packages of this process; or None.
        is_kept: whether to store a success, so that later openings skip the test.
    """
    request = {
        "package": str(package.path.absolute()),
        "sha256": package.signed_sha256,
        "submodel": package.submodel,
        "variants": list(variants),
        "threads": threads,
        "forget": not is_kept,
    }
    variables = {} if engines is None else {"PYTHONPATH": f"{engines}:{child_environment()['PYTHONPATH']}"}
    label = f"{package.path.name}: {package.manifest.name} {package.manifest.version}"
    try:
        child = ChildProcess(_MODULE, json.dumps(request), variables=variables, own_session=True)
    except OSError as cause:
        check_lack(cause, f"{label}: cannot be tested in a process of its own")
        raise BackendError(f"{label}: cannot be tested in a process of its own: {cause}") from cause
    with child:
        child.lower_priority()
        code, last_line = child.wait(limit_s), child.last_line
    if code is None:
        raise SlowOpeningError(
            f"{label}: was not opened and tested within {limit_s:g} s: the machine is busy, or its engine"
            " hangs; try again",
            _RETRY_AFTER_S,
        )
    if code == -signal.SIGKILL:
        raise UnavailableError(
            f"{label}: the process that tested it was killed, as by a lack of memory; load it again later",
            _RETRY_AFTER_S,
        )
    if code not in (0, _FAULT):
        raise BackendError(
            f"{label}: its engine ended the process that opened and tested it, {describe_end(code)}"
            f" ({last_line or 'without a message'}); package it again, or install another release of"
            " the engine"
        )
    return last_line if code else ""
