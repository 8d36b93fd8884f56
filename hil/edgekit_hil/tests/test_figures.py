"""Latency, memory and energy on the device beside what the package promises; engines against each other.

Only the memory decides a test: a timing of a busy bench proves nothing, and is recorded.
"""

import json
import statistics
from pathlib import Path
from typing import Any, Final

import pytest

from edgekit_hil.benches.device import Device
from edgekit_hil.benches.opening import Bench
from edgekit_hil.tests import large_model
from edgekit_hil.tests.bench_target import OPEN_LIMIT_S, BenchTarget
from edgekit_hil.tests.conftest import Recorder
from edgekit_hil.tests.models import MODEL_NAMES, PackageMaker, Promise
from edgekit_hil.tests.programs import read_program
from edgekit_runtime.package.archive import read_unverified_manifest
from edgekit_runtime.system.engines import find_engine

POWER_S: Final = 30
_MODEL: Final = "mnist5k_dscnn"
_MOST_MEMORY_ERROR: Final = 0.1  # of the measured peak. Without an estimate of the model, `large` is 35 % off


def measure(device: Device, package: Path, seconds: float) -> dict[str, Any]:
    """Return what `programs/measure.py` prints for one row of inputs."""
    manifest = read_unverified_manifest(package).manifest  # we have made it
    free = {spec.name for spec in manifest.inputs if isinstance(spec.shape[0], str)}
    inputs = {
        tensor.name: (tensor.dtype, [1, *tensor.shape[1:]] if tensor.name in free else list(tensor.shape))
        for tensor in manifest.golden.inputs
    }
    remote = device.put(package, "model.edgepkg")
    arguments = (remote, str(seconds), json.dumps(inputs))
    document = device.run_python(read_program("measure"), *arguments, limit_s=OPEN_LIMIT_S + 4 * seconds)
    result: dict[str, Any] = json.loads(document)
    return result


@pytest.mark.parametrize("model", (*MODEL_NAMES, large_model.NAME))
def test_memory_is_near_the_estimate_and_latency_is_recorded(
    bench: Bench,
    device: Device,
    packages: PackageMaker,
    target: BenchTarget,
    evidence: Recorder,
    request: pytest.FixtureRequest,
    model: str,
) -> None:
    """Peak memory of a process that runs the package is within 10 % of its estimate; latency is recorded."""
    if not bench.file.settings.has_memory:
        pytest.skip(f"on bench '{bench.file.settings.name}' the emulator is part of each process")
    package = packages.make(model, target.name, target.engine)
    device.trust(packages.public_key)

    measurement = measure(device, package, request.config.getoption("--measure-seconds"))

    record_latency(
        bench,
        target,
        evidence,
        model=model,
        seconds=measurement["seconds"],
        promise=packages.read_promise(package, "latency_ms"),
    )
    memory = packages.read_promise(package, "memory_bytes")
    # TensorRT's memory is estimated by nobody: a package states that of its fallback.
    stated = None if find_engine(target.engine).on_gpu else memory.value
    method = "VmHWM of a process that opens and runs it"
    if stated is not None:
        method += f"; prediction {memory.label}, with the engine's own memory on the machine that packages"
    peak_mb = measurement["peak_bytes"] / 1e6
    evidence(f"peak memory of {model} on {target.engine}", peak_mb, "MB", method, stated and stated / 1e6)
    if not find_engine(target.engine).on_gpu:
        assert stated, "the package states no memory"
        assert abs(stated / measurement["peak_bytes"] - 1) <= _MOST_MEMORY_ERROR


def record_latency(
    bench: Bench,
    target: BenchTarget,
    evidence: Recorder,
    *,
    model: str,
    seconds: list[float],
    promise: Promise,
) -> None:
    """Record a latency beside its prediction, and its distribution.

    Args:
        bench: where it was measured.
        target: target of the package.
        evidence: where it is recorded.
        model: name of the model.
        seconds: seconds of each inference.
        promise: promise of the package, in ms.
    """
    times_ms = sorted(1e3 * duration_s for duration_s in seconds)
    # A quota takes the processor away for parts of a period, which most short inferences never see.
    kind, average = ("median", statistics.median) if bench.slowdown == 1 else ("mean", statistics.fmean)
    method = f"{kind} of {len(times_ms)} inferences"
    predicted_ms = promise.value if target.engine == target.predicted_engine else None
    if predicted_ms is not None:
        method += f"; prediction by {promise.source}"
        if bench.slowdown != 1 and not target.is_profile:
            predicted_ms *= bench.slowdown
            method += f", times {bench.slowdown:g} for this bench"
    name = f"latency of {model} on {target.engine}"
    evidence(name, average(times_ms), "ms", method, predicted_ms)
    shares = [index / 100 for index in range(1, 100)]
    points = [(times_ms[int(share * len(times_ms))], share) for share in shares]
    evidence.curve(name, ("ms", "share of inferences below"), points)


def test_energy_of_an_inference_is_recorded(
    bench: Bench, device: Device, packages: PackageMaker, target: BenchTarget, evidence: Recorder
) -> None:
    """The device draws more power under load than at rest; energy is recorded beside its prediction."""
    if bench.meter is None:
        pytest.skip(f"bench '{bench.file.settings.name}' has no power meter: {bench.meter_text}")
    package = packages.make(_MODEL, target.name, target.engine)
    device.trust(packages.public_key)
    measure(device, package, 1.0)  # an engine that is built on the device is not part of an inference
    with bench.meter.measure() as idle:
        device.run(f"sleep {POWER_S}", 2 * POWER_S)

    with bench.meter.measure() as busy:
        measurement = measure(device, package, POWER_S)

    idle_w = statistics.median(watts for _, watts in idle)
    busy_w = statistics.median(watts for _, watts in busy)
    for title, watts in (("power at rest", idle), ("power under load", busy)):
        evidence.curve(title, ("s", "W"), watts)
    assert busy_w > idle_w  # otherwise the meter measures something else, and there is no energy to record
    latency_ms = 1e3 * statistics.median(measurement["seconds"])
    promise = packages.read_promise(package, "energy_mj")
    # A prediction is of the whole board, as the target states its power.
    is_comparable = bench.meter.is_whole and target.engine == target.predicted_engine
    name, method = f"energy of {_MODEL} on {target.engine}", f"{bench.meter_text}, times the median latency"
    if is_comparable:
        compared = f"{method}; prediction from {promise.source} and the target's power"
        evidence(f"{name}, whole board", busy_w * latency_ms, "mJ", compared, promise.value)
    else:
        evidence(f"{name}, with rest", busy_w * latency_ms, "mJ", method)
    evidence(f"{name}, above rest", (busy_w - idle_w) * latency_ms, "mJ", method)


def test_tournament_keeps_an_engine_that_is_used_from_then_on(
    device: Device, packages: PackageMaker, target: BenchTarget, evidence: Recorder
) -> None:
    """Each engine of the package is measured in turn, and the session that opens next is the winner's."""
    package = packages.make(_MODEL, target.name, "auto")
    device.trust(packages.public_key)
    remote = device.put(package, "model.edgepkg")

    result = device.edgekit("tournament", remote, "--seconds", "10", limit_s=OPEN_LIMIT_S)

    measured = {engine["name"]: engine["median_ms"] for engine in result["engines"] if engine["median_ms"]}
    assert result["winner"] in measured
    assert result["kept_in"]
    for name, median_ms in measured.items():
        evidence(f"tournament of {_MODEL}: {name}", median_ms, "ms", "edgekit-device tournament, 10 s")
    code = (
        "import sys; from edgekit_runtime.package.archive import read_package;"
        "from edgekit_runtime.sessions.local_results import recall_order;"
        "from edgekit_runtime.system.paths import find_keys_folder;"
        "from edgekit_runtime.trust.trust_store import TrustStore; from pathlib import Path;"
        "package = read_package(Path(sys.argv[1]), TrustStore.from_folder(find_keys_folder()));"
        "print(recall_order(package.manifest)[0].name)"
    )
    winner = next(engine for engine in result["engines"] if engine["name"] == result["winner"])
    assert device.run_python(code, remote) == winner["variant"]
