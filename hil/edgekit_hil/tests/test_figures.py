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
from edgekit_hil.tests.conftest import Recorder
from edgekit_hil.tests.models import MODEL_NAMES, PackageMaker
from edgekit_hil.tests.programs import read_program
from edgekit_hil.tests.test_install import list_engines
from edgekit_runtime.package.archive import read_unverified_manifest

_POWER_S: Final = 30
_MODEL: Final = "mnist5k_dscnn"
_MOST_MEMORY_ERROR: Final = 0.25  # of the measured peak; the goal is 0.1


def measure(device: Device, package: Path, seconds: float) -> dict[str, Any]:
    """Return what `programs/measure.py` prints for one row of inputs."""
    manifest = read_unverified_manifest(package).manifest  # we have made it
    free = {spec.name for spec in manifest.inputs if isinstance(spec.shape[0], str)}
    inputs = {
        each.name: (each.dtype, [1, *each.shape[1:]] if each.name in free else list(each.shape))
        for each in manifest.golden.inputs
    }
    remote = device.put(package, "model.edgepkg")
    arguments = (remote, str(seconds), json.dumps(inputs))
    found = device.run_python(read_program("measure"), *arguments, limit_s=60 + 4 * seconds)
    result: dict[str, Any] = json.loads(found)
    return result


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_memory_is_near_the_estimate_and_latency_is_recorded(
    bench: Bench,
    device: Device,
    packages: PackageMaker,
    evidence: Recorder,
    request: pytest.FixtureRequest,
    model: str,
) -> None:
    """Peak memory of a process that runs the package is near its estimate; latency is recorded."""
    settings = bench.file.settings
    if not settings.has_memory:
        pytest.skip(f"on bench '{settings.name}' the emulator is part of each process")
    engine = list_engines(bench)[0]
    package = packages.make(model, settings.target, engine)
    device.edgekit("keys", "trust", device.put(packages.public_key, "bench.pub.pem"))

    found = measure(device, package, request.config.getoption("--measure-seconds"))

    times_ms = sorted(1e3 * each for each in found["seconds"])
    latency = packages.read_promise(package, "latency_ms")
    memory = packages.read_promise(package, "memory_bytes")
    predicted_ms = None if latency.value is None else latency.value * bench.slowdown
    # A quota takes the processor away for parts of a period, which most short inferences never see.
    kind = "median" if bench.slowdown == 1 else "mean"
    latency_ms = statistics.median(times_ms) if kind == "median" else statistics.fmean(times_ms)
    method = f"{kind} of {len(times_ms)} inferences, {engine}; prediction {latency.label}"
    if bench.slowdown != 1:
        method += f", times {bench.slowdown:g} for this bench"
    evidence(f"latency of {model}", latency_ms, "ms", method, predicted_ms)
    shares = [index / 100 for index in range(1, 100)]
    points = [(times_ms[int(share * len(times_ms))], share) for share in shares]
    evidence.curve(f"latency of {model}", ("ms", "share of inferences below"), points)
    method = f"VmHWM of a process that opens and runs it, {engine}; prediction {memory.label}"
    evidence(f"peak memory of {model}", found["peak_bytes"] / 1e6, "MB", method, (memory.value or 0) / 1e6)
    assert memory.value, "the package states no memory"
    assert abs(memory.value / found["peak_bytes"] - 1) <= _MOST_MEMORY_ERROR


def test_energy_of_an_inference_is_recorded(
    bench: Bench, device: Device, packages: PackageMaker, evidence: Recorder
) -> None:
    """The device draws more power under load than at rest; energy is recorded beside its prediction."""
    if bench.meter is None:
        pytest.skip(f"bench '{bench.file.settings.name}' has no power meter: {bench.meter_text}")
    engine = list_engines(bench)[0]
    package = packages.make(_MODEL, bench.file.settings.target, engine)
    device.edgekit("keys", "trust", device.put(packages.public_key, "bench.pub.pem"))
    with bench.meter.measure() as idle:
        device.run(f"sleep {_POWER_S}", 2 * _POWER_S)

    with bench.meter.measure() as busy:
        found = measure(device, package, _POWER_S)

    idle_w = statistics.median(watts for _, watts in idle)
    busy_w = statistics.median(watts for _, watts in busy)
    energy_mj = 1e3 * (busy_w - idle_w) * statistics.median(found["seconds"])
    promise = packages.read_promise(package, "energy_mj")
    method = f"{bench.meter_text}, above rest, times the median latency; prediction {promise.label}"
    evidence(f"energy of {_MODEL}", energy_mj, "mJ", method, promise.value)
    for name, watts in (("power at rest", idle), ("power under load", busy)):
        evidence.curve(name, ("s", "W"), watts)
    assert busy_w > idle_w


def test_tournament_keeps_an_engine_that_is_used_from_then_on(
    bench: Bench, device: Device, packages: PackageMaker, evidence: Recorder
) -> None:
    """Each engine of the package is measured in turn, and the session that opens next is the winner's."""
    package = packages.make(_MODEL, bench.file.settings.target, "auto")
    device.edgekit("keys", "trust", device.put(packages.public_key, "bench.pub.pem"))
    remote = device.put(package, "model.edgepkg")

    result = device.edgekit("tournament", remote, "--seconds", "10", limit_s=180)

    measured = {each["name"]: each["median_ms"] for each in result["engines"] if each["median_ms"]}
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
    winner = next(each for each in result["engines"] if each["name"] == result["winner"])
    assert device.run_python(code, remote) == winner["variant"]
