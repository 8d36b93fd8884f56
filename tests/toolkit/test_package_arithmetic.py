"""Packages made on x86-64 with and without VNNI: the same scores, and each passes its self-test on the other.

One of the two processors is this machine's, the other is emulated. Where this machine has no VNNI, both are
of that kind, and the tests hold all the same.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.toolkit.package_run import edgekit
from tests.toolkit.small_models import model_of, node

from edgekit_runtime.sessions.ort_products import saturates
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.measurement.arithmetic import score_label
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.models.saturating_products import find_saturating
from edgekit_toolkit.packaging.evidence import evidence_path, read_evidence

ROOT = Path(__file__).parents[2]
RUN = "import sys; from edgekit_cli.cli import main; sys.exit(main(sys.argv[1:]))"


pytestmark = [pytest.mark.long, pytest.mark.usefixtures("home")]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python on an emulated processor with AVX2 and without VNNI."""
    folder = tmp_path_factory.mktemp("emulated")
    made = subprocess.run(
        [ROOT / "scripts" / "emulated-python", folder], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(made.stderr.strip())
    return folder / "bin" / "python"


def run_on(python: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `edgekit ARGUMENTS` in another Python."""
    paths = os.pathsep.join(
        str(ROOT / name) for name in ("device_runtime", "host", "toolkit", "offload", "fleet", "hil")
    )
    return subprocess.run(
        [python, "-c", RUN, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Arguments that package a classifier whose 8-bit products go beyond 16 bits, from the first on."""
    folder = tmp_path_factory.mktemp("work")
    rng = np.random.default_rng(0)
    # Activations near the top of their range and weights of one sign in pairs: what saturates first.
    weights = {
        "w": np.abs(rng.normal(size=(64, 3, 3, 3))).astype(np.float32),
        "v": (rng.normal(size=(64, 10)) / 8).astype(np.float32),
    }
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Relu", ["c"], ["r"]),
        node("GlobalAveragePool", ["r"], ["p"]),
        node("Flatten", ["p"], ["f"]),
        node("MatMul", ["f", "v"], ["y"]),
    ]
    model = model_of(nodes, weights, {"x": ["N", 3, 8, 8]})
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    for name in ("calibration", "evaluation"):
        np.savez(folder / f"{name}.npz", x=rng.uniform(0.5, 1, (100, 3, 8, 8)).astype(np.float32))
    return (
        "package", folder / "model.onnx", "--target", "rpi5", "--backend", "ort", "--threads", 1,
        "--search-seconds", 0, "--budget", "drop=100%",
        "--calibration", folder / "calibration.npz", "--eval", folder / "evaluation.npz",
    )  # fmt: skip


def scores_of(folder: Path) -> dict[str, float]:
    """The score of each candidate by its label, all measured."""
    report = json.loads(next(folder.glob("*.report.json")).read_text(encoding="utf-8"))
    scores = {one["label"]: one["figures"]["score"] for one in report["candidates"]}
    assert {score["label"] for score in scores.values()} == {"measured"}
    return {label: score["value"] for label, score in scores.items()}


def host_of(package: Path) -> Any:
    """What the evidence of a package says of the machine."""
    trust = TrustStore.from_folder(find_keys_folder())
    return read_evidence(evidence_path(package), package, trust).predicate["host"]


def test_processors_with_and_without_vnni_give_the_same_scores_and_packages_that_pass_on_both(
    emulated: Path, work: tuple[object, ...], tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    made = edgekit(*work, "-o", here)
    assert made.code == 0, made.stderr
    other = run_on(emulated, *work, "-o", there)
    assert other.returncode == 0, other.stderr
    first, second = scores_of(here), scores_of(there)
    assert {"int8 weights, float arithmetic", "int8 per-channel, all layers"} <= first.keys() & second.keys()
    shared = sorted(first.keys() & second.keys())  # which relative is set aside may differ by a hair
    # Half a point of 100: float kernels of other vector widths round differently.
    assert [second[label] for label in shared] == pytest.approx([first[label] for label in shared], abs=0.005)
    (mine,), (theirs,) = here.glob("*.edgepkg"), there.glob("*.edgepkg")
    assert host_of(theirs)["instruction_set"] == "avx2"
    assert host_of(theirs)["exact_products_by"] == "session.x64quantprecision=1"
    verified = edgekit("verify", theirs)
    assert verified.code == 0, verified.stderr
    passed = run_on(emulated, "verify", mine)
    assert passed.returncode == 0, passed.stderr


@pytest.mark.int8_products
def test_products_that_cannot_be_made_exact_are_named_and_their_score_is_no_measurement() -> None:
    product = node("MatMulInteger", ["x", "w"], ["y"])
    inputs = [helper.make_tensor_value_info("x", TensorProto.UINT8, [1, 4])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.INT32, [1, 2])]
    weight = [numpy_helper.from_array(np.full((4, 2), 127, np.int8), "w")]
    stored = helper.make_model(helper.make_graph([product], "stored", inputs, outputs, weight))
    inputs.append(helper.make_tensor_value_info("w", TensorProto.INT8, [4, 2]))
    given = helper.make_model(helper.make_graph([product], "given", inputs, outputs))
    assert (find_saturating(given), find_saturating(stored)) == (("y",) if saturates() else (), ())
    assert score_label(OnnxModel(given)) == ("estimated" if saturates() else "measured")
