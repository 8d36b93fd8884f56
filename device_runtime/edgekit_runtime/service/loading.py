"""From a package on disk to a session that has proved itself: read, open, self-test, warm-up.

It blocks, so it runs on a thread; it touches nothing of the service.
"""

import gc
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgekit_runtime.archive import read_package
from edgekit_runtime.errors import BackendError
from edgekit_runtime.manifest import Manifest
from edgekit_runtime.ort_memory import trim_memory
from edgekit_runtime.selftest import read_golden
from edgekit_runtime.sessions.session import Session, open_session
from edgekit_runtime.signing import TrustStore

_WARM_UPS: Final = 3


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A session that computes what its package promises.

    Attributes:
        session: open and warm.
        manifest: of its package.
        key_id: who signed the package.
        latency_s: of the last warm-up run.
        input_bytes: of the golden inputs with which that was measured.
    """

    session: Session
    manifest: Manifest
    key_id: str
    latency_s: float
    input_bytes: int


def load(path: Path, trust: TrustStore, threads: int | None = None) -> Loaded:
    """Return the model of the package at `path`, tested and warm.

    Raises:
        PackageError: the package is not right, or signed by somebody who is not trusted.
        BackendError: no engine for it is here, the engine refused it, or it computes something else than the
            package promises.
    """
    with read_package(path, trust) as package:
        golden = read_golden(package)
        session = open_session(package, threads=threads)
        manifest, key_id = package.manifest, package.key_id
    try:
        result = golden.check(session)
        if not result.passed:
            reasons = "; ".join(check.message for check in result.checks if not check.passed)
            raise BackendError(f"{path}: failed its self-test here: {reasons}")
        for _ in range(_WARM_UPS):
            began_s = time.perf_counter()
            session.run(golden.inputs)
            latency_s = time.perf_counter() - began_s
    except BaseException:
        session.close()
        raise
    input_bytes = sum(array.nbytes for array in golden.inputs.values())
    return Loaded(session, manifest, key_id, latency_s, input_bytes)


def unload(session: Session) -> None:
    """Close `session` and give its memory back to the system."""
    session.close()
    del session
    gc.collect(0)
    trim_memory()
