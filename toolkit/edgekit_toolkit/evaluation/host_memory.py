"""Peak memory of the chosen candidate on this machine: in a separate process and in the service.

In the service, a model needs more memory than in a separate process, because a second call may arrive before
the inputs of the first call are freed.
"""

import contextlib
import functools
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from edgekit_runtime.client import Client
from edgekit_runtime.errors import BackendError, EdgekitError
from edgekit_runtime.package.archive import write_package
from edgekit_runtime.package.golden import Golden, GoldenInput, GoldenOutput
from edgekit_runtime.package.manifest import BackendChoice, Manifest
from edgekit_runtime.system.child_process import ChildProcess
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.costs.peak_memory import MemoryEstimate
from edgekit_toolkit.measurement.peak_memory import PeakMemory, measure_model_memory, trivial_model
from edgekit_toolkit.measurement.peak_memory_child import peak_bytes
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.packaging.assemble import describe_artifacts
from edgekit_toolkit.packaging.signing_keys import load_signer
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.targets.spec import Target

_NAME: Final = "trivial"
_CALLS: Final = 5
_READY_LIMIT_S: Final = 60.0
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class MemoryHere:
    """The memory of a model on this machine.

    Attributes:
        peak: The peak memory of a new process that opens the model, or None if it could not be measured.
        service_bytes: The estimated peak memory of a service with the model. None if there is no memory limit
            or no estimate.
        notes: Sentences for the user on how the memory was determined.
    """

    peak: PeakMemory | None
    service_bytes: int | None
    notes: tuple[str, ...]


def measure_memory_here(
    model: Model,
    modelled: MemoryEstimate | PeakMemory | str,
    feeds: Feeds,
    *,
    target: Target,
    limit_bytes: float,
) -> MemoryHere:
    """Measure the peak memory of a new process that runs a model, and estimate the memory of a service.

    `modelled` is the result of `find_memory`. A `PeakMemory` is not measured again. `limit_bytes` is the
    memory limit, or infinity.
    """
    notes = []
    peak = modelled if isinstance(modelled, PeakMemory) else None
    try:
        peak = peak or measure_model_memory(model, feeds)
    except BackendError as error:
        notes.append(f"peak memory was not measured here: {str(error).splitlines()[0]}")
    if peak is not None and peak.total_bytes > limit_bytes:
        notes.append(
            f"peak memory measured on this machine is {peak.total_bytes / 1e6:.1f} MB, OVER THE LIMIT of"
            f" {limit_bytes / 1e6:.1f} MB: measure on {target.name} before you rely on it"
        )
    service_bytes = None
    if isinstance(modelled, str) or math.isinf(limit_bytes):
        return MemoryHere(peak, None, tuple(notes))
    if target.arch == "x86_64" and model.divides_by_inputs():
        notes.append(
            "the memory limit is for one process that runs the model: edgekit-device serve runs this one"
            " beside the service, in a process of its own (it divides integers by values of its inputs)"
        )
    else:
        try:
            service_bytes = estimate_service_bytes(model.engine, modelled.model_bytes, feeds)
            notes.append(_describe(modelled, service_bytes, limit_bytes))
        except BackendError as error:
            notes.append(str(error).splitlines()[0])
    return MemoryHere(peak, service_bytes, tuple(notes))


def _describe(memory: MemoryEstimate | PeakMemory, service_bytes: int, limit_bytes: float) -> str:
    over = ", OVER THE LIMIT" if service_bytes > limit_bytes else ""
    return (
        f"memory of {memory.total_bytes / 1e6:.1f} MB is that of a process that opens the package with"
        f" open_session; edgekit-device serve takes about {service_bytes / 1e6:.1f} MB with this model"
        f" (estimated){over}"
    )


def estimate_service_bytes(engine: str, model_bytes: int, feeds: Feeds) -> int:
    """Estimate the peak memory of a service with one model and one client, in bytes.

    `model_bytes` is the memory that the model adds to a process, estimated or measured. `feeds` are the
    inputs of one call.

    Raises:
        BackendError: See `measure_service_bytes`.
    """
    return measure_service_bytes(engine) + model_bytes + sum(array.nbytes for array in feeds.values())


@functools.cache
def measure_service_bytes(engine: str = "ort") -> int:
    """Return the peak resident memory of `edgekit-device serve` with a trivial model, in bytes.

    The result is cached.

    Raises:
        BackendError: The service did not start or did not answer.
    """
    with tempfile.TemporaryDirectory(prefix="edgekit-service-") as name:
        folder = Path(name)
        try:
            package = _write_package(folder, engine)
            return serve_once(package, folder / "keys", _NAME, {"x": np.zeros(1, np.float32)})
        except (OSError, EdgekitError) as error:
            raise BackendError(f"memory of the service cannot be measured: {error}") from error


def _write_package(folder: Path, engine: str) -> Path:
    zero = np.zeros(1, np.float32).tobytes()
    contents = {"golden/x.bin": zero, "golden/y.bin": zero, "model": trivial_model(engine)}
    manifest = Manifest(
        name=_NAME,
        version="1",
        target="any",
        inputs=(TensorSpec("x", "float32", (1,)),),
        outputs=(TensorSpec("y", "float32", (1,)),),
        artifacts=describe_artifacts(contents, {path: path.partition("/")[0] for path in contents}),
        backend=BackendChoice(engine, "model", {}),
        golden=Golden(
            (GoldenInput("x", "float32", (1,), "golden/x.bin"),),
            (GoldenOutput(name="y", dtype="float32", shape=(1,), path="golden/y.bin", atol=0.0, rtol=0.0),),
        ),
    )
    path = folder / manifest.file_name
    write_package(path, manifest, contents, load_signer(folder=folder / "keys"))
    return path


def serve_once(package: Path, keys: Path, name: str, feeds: Feeds) -> int:
    """Serve a package, send a few calls, and return the peak resident memory of the service in bytes.

    `package` must be signed by a key in the folder `keys`. A socket is created beside that folder. `feeds`
    are the inputs of all calls.

    Raises:
        EdgekitError: The service does not start, or refuses the model or a call.
        OSError: A file cannot be written.
    """
    folder = keys.parent
    socket = str(folder / "socket")
    words = ("serve", "--package", str(package), "--keys", str(keys), "--unix-socket", socket, "--port", "0")
    with ChildProcess("edgekit_runtime.cli", *words, folder=folder) as child:
        _wait_until_ready(child, socket, name)
        with Client(socket) as client:
            for _ in range(_CALLS):
                client.infer(name, feeds)
        return peak_bytes(child.pid)


def _wait_until_ready(child: ChildProcess, socket: str, name: str) -> None:
    end_s = time.monotonic() + _READY_LIMIT_S
    while time.monotonic() < end_s and child.wait(_POLL_S) is None:
        with contextlib.suppress(EdgekitError), Client(socket) as client:  # the service may not listen yet
            if client.ready(name):
                return
    last_line = child.last_line or "it printed no message"
    raise BackendError(f"the service was not ready within {_READY_LIMIT_S:g} s: {last_line}")
