"""Rewrites of onnxruntime's optimiser against the ONNX reference evaluator, on inputs of both signs."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from tests.toolkit.package_run import package, read_only
from tests.toolkit.small_models import model_of, node, random_weight, run

from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.ort import OrtSession
from edgekit_toolkit.passes.optimiser import optimise

pytestmark = pytest.mark.usefixtures("home")
INPUT = (2, 3, 8, 8)


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    """Zeros around the input of a MaxPool and of a convolution, as models from TensorFlow have them."""
    rng = np.random.default_rng(0)
    pads = np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64)
    nodes = [
        node("Pad", ["x", "pads"], ["p"]),
        node("MaxPool", ["p"], ["m"], kernel_shape=[3, 3], strides=[2, 2]),
        node("Pad", ["m", "pads"], ["q"]),
        node("Conv", ["q", "w"], ["y"]),
    ]
    return model_of(nodes, {"pads": pads, "w": random_weight(rng, 4, 3, 3, 3)}, {"x": ["N", *INPUT[1:]]})


@pytest.fixture(params=["positive", "negative", "both signs"])
def x(request: Any) -> Any:
    values = np.random.default_rng(1).uniform(1, 2, INPUT).astype(np.float32)
    return {"positive": values, "negative": -values, "both signs": 3 * (values - 1.5)}[request.param]


def expected(model: onnx.ModelProto, x: Any) -> Any:
    return ReferenceEvaluator(model).run(None, {"x": x})[0]


def test_sessions_of_device_and_host_compute_what_onnx_says(model: onnx.ModelProto, x: Any) -> None:
    want = expected(model, x)
    device = OrtSession(model.SerializeToString()).run({"x": x})["y"]
    host = run(model, {"x": x}, optimise=True)["y"]
    np.testing.assert_allclose(device, want, rtol=1e-5, atol=1e-5)  # float32 sums in another order
    np.testing.assert_allclose(host, want, rtol=1e-5, atol=1e-5)


def test_samples_of_one_sign_hide_no_wrong_rewrite(model: onnx.ModelProto, x: Any) -> None:
    samples = np.random.default_rng(2).uniform(0, 1, INPUT).astype(np.float32)
    result = optimise(model, batch=None, feeds=[{"x": samples}])
    got = run(result.model, {"x": x})["y"]
    np.testing.assert_allclose(got, expected(model, x), rtol=1e-4, atol=1e-4)
    (step,) = (step for step in result.steps if step.name == "ort_basic")
    assert step.reason.startswith("output 'y' differs")


def test_a_package_computes_what_onnx_says(model: onnx.ModelProto, x: Any, tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    source.write_bytes(model.SerializeToString())
    samples = tmp_path / "samples.npz"
    np.savez(samples, x=np.random.default_rng(3).uniform(0, 1, (40, *INPUT[1:])).astype(np.float32))
    out = tmp_path / "out"
    made = package(source, out, "--calibration", samples, "--budget", "drop=100%,size=10MB", target="rpi5")
    assert made.code in (0, 5), made.stderr
    with read_only(out) as opened:
        session = open_session(opened)
        got = session.run({"x": x[:1]})["y"]
        session.close()
    want = expected(model, x[:1])
    assert np.abs(got - want).max() <= 0.1 * np.ptp(want)
