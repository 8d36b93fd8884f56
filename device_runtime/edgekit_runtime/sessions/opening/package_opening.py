"""Tests a package in a child process before an engine opens it for the first time on this machine.

Engines are native code. For example, onnxruntime 1.24.4 aborts on models that newer releases open. This would
end the whole process and all other models in it. Only the first opening is slower, because the result is
stored for this package, engine release and processor.
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
    """Check that opening `package` does not crash the process, unless it was already checked on this machine.

    If the engine refuses the package with an error, the check still passes.

    Args:
        package: The verified package.
        variants: The variants that will be opened. The default is the preferred variant.
        threads: The number of threads per inference. The default is set by the options in the manifest.
        limit_s: The time limit of the child process in seconds.

    Raises:
        BackendError: The engine crashed the child process, or the child process cannot be started.
        SlowOpeningError: The child process exceeded the time limit.
        UnavailableError: The child process was killed or cannot be started, for example for lack of memory.
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
    """Open and self-test `package` in a child process. Return the reason of a failure, or an empty text.

    Raises the same errors as `check_first_opening`.

    Args:
        package: The verified package.
        variants: The variants to open. Variants without an installed engine are skipped. The default is the
            preferred variant.
        threads: The number of threads per inference. The default is set by the options in the manifest.
        limit_s: The time limit of the child process in seconds.
        engines: A folder of Python packages that the child imports first, such as another release of an
            engine, or None.
        is_kept: Whether to store a success, so that later openings skip the test.
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
