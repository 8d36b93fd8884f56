"""Packages install and compute right on the device."""

import json
from typing import Final

import pytest

from edgekit_hil.benches.device import Device
from edgekit_hil.benches.opening import Bench
from edgekit_hil.tests.conftest import Recorder
from edgekit_hil.tests.models import MODELS, PackageMaker

_SELFTEST: Final = """
import dataclasses, json, sys
from pathlib import Path
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.sessions import open_choice
from edgekit_runtime.sessions.selftest import run_selftest
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore

package_path, engine = sys.argv[1:]
with read_package(Path(package_path), TrustStore.from_folder(find_keys_folder())) as package:
    (choice,) = [each for each in package.manifest.backend.chain if each.name == engine]
    with_engine = open_choice(package, dataclasses.replace(choice, fallback=None), 1)
    checks = run_selftest(with_engine, package).checks
print(json.dumps([[each.name, each.passed, each.max_abs_error, each.message] for each in checks]))
"""
"""Opens a package with one engine, without its fallback, and prints how its golden outputs compare."""

ENGINE_PACKAGES: Final = {
    "ort": ("onnxruntime", "onnxruntime-gpu"),
    "litert": ("ai-edge-litert", "tflite-runtime"),
    "tensorrt": ("tensorrt",),
}


@pytest.mark.parametrize("engine", ENGINE_PACKAGES)
@pytest.mark.parametrize("model", sorted(path.stem for path in MODELS.glob("*.onnx")) or ["none"])
def test_package_installs_and_matches_golden_outputs(
    bench: Bench, device: Device, packages: PackageMaker, evidence: Recorder, model: str, engine: str
) -> None:
    """The package installs, is on trial, and each golden output is within its tolerance on this engine."""
    if not bench.facts.engines.keys() & set(ENGINE_PACKAGES[engine]):
        pytest.skip(f"the device of bench '{bench.file.settings.name}' has no {ENGINE_PACKAGES[engine][0]}")
    package = packages.make(model, bench.file.settings.target, engine)
    remote = device.put(package, package.name)
    device.edgekit("keys", "trust", device.put(packages.public_key, "bench.pub.pem"))

    installed = device.edgekit("install", remote)

    assert installed["active"]
    assert installed["on_trial"]
    checks = json.loads(device.run_python(_SELFTEST, remote, engine))
    assert all(passed for _, passed, _, _ in checks), [message for *_, message in checks]
    error = max(abs_error for _, _, abs_error, _ in checks)
    evidence(f"largest error of {model} on {engine}", error, "", "self-test: golden outputs, absolute")
