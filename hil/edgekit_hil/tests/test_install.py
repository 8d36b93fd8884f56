"""Packages install and compute right on the device."""

import json

import pytest

from edgekit_hil.benches.device import Device
from edgekit_hil.benches.opening import Bench
from edgekit_hil.tests.bench_target import ENGINE_PACKAGES, OPEN_LIMIT_S, BenchTarget
from edgekit_hil.tests.conftest import Recorder
from edgekit_hil.tests.models import MODEL_NAMES, PackageMaker
from edgekit_hil.tests.programs import read_program


@pytest.mark.parametrize("engine", ENGINE_PACKAGES)
@pytest.mark.parametrize("model", MODEL_NAMES)
def test_package_installs_and_matches_golden_outputs(
    bench: Bench,
    device: Device,
    packages: PackageMaker,
    target: BenchTarget,
    evidence: Recorder,
    model: str,
    engine: str,
) -> None:
    """The package installs, is on trial, and each golden output is within its tolerance on this engine."""
    if engine not in target.engines:
        pytest.skip(f"the device of bench '{bench.file.settings.name}' has no {ENGINE_PACKAGES[engine][0]}")
    package = packages.make(model, target.name, engine)
    remote = device.put(package, "model.edgepkg")
    device.trust(packages.public_key)

    program = read_program("install") + read_program("selftest")
    printed = device.run_python(program, remote, engine, limit_s=OPEN_LIMIT_S)

    installed, checks = map(json.loads, printed.splitlines())
    assert installed["active"]
    assert installed["on_trial"]
    assert all(passed for _, passed, _, _ in checks), [message for *_, message in checks]
    error = max(abs_error for _, _, abs_error, _ in checks)
    evidence(f"largest error of {model} on {engine}", error, "", "self-test: golden outputs, absolute")


def test_package_of_an_unknown_key_is_refused(
    device: Device, packages: PackageMaker, target: BenchTarget
) -> None:
    """A device takes no package whose key it does not trust; `keys trust` names the key that it takes."""
    package = packages.make(MODEL_NAMES[0], target.name, target.engine)
    remote = device.put(package, "model.edgepkg")

    result = device.try_run(f"{device.python} -m edgekit_runtime.cli install {remote}")

    assert result.exit_code == 8, result.errors
    assert device.edgekit("status")["models"] == []
    trusted = device.edgekit("keys", "trust", device.put(packages.public_key, "bench.pub.pem"))
    assert trusted["key_id"] in result.errors
