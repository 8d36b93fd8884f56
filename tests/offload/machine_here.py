"""The machine that measures in this process: no program is started for each measurement."""

import io
import json
from collections.abc import Iterable, Sequence

from edgekit_offload.profiling.machine import Machine
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.offload.measurement.job import read_job
from edgekit_runtime.offload.measurement.job_runner import measure
from edgekit_runtime.system.child_process import ProgramResult


def measure_here(
    _argv: Sequence[str], sent: Iterable[bytes | memoryview], _limit_s: float, _max_bytes: int
) -> ProgramResult:
    """Run a measurement in this process, as the program of a machine does."""
    job, blobs = read_job(io.BytesIO(b"".join(sent)))
    try:
        return ProgramResult(0, json.dumps(to_plain(measure(job, blobs))).encode(), "")
    except EdgekitError as cause:
        return ProgramResult(1, b"", str(cause))


MACHINE_HERE = Machine("local", (), execute=measure_here)
