"""Models that store quantized weights and compute in float: onnxruntime widens the weights once."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.toolkit.package_run import isolated_home, mlp, package, read_only, saved
from tests.toolkit.small_models import model_of, node, random_feeds, random_weight, run

from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.ort import OrtSession
from edgekit_runtime.sessions.selftest import run_selftest
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.ort_graph import optimise_as_engine
from edgekit_toolkit.onnx_graph.traversal import has_foldable_weights
from edgekit_toolkit.quantize.onnx.storage import int4_weights, int8_weights


def convolutions(seed: int = 5) -> onnx.ModelProto:
    """Two convolutions with a pooling between them, where onnxruntime would move DequantizeLinear about."""
    rng = np.random.default_rng(seed)
    weights = {"w": random_weight(rng, 16, 4, 3, 3), "v": random_weight(rng, 8, 16, 1, 1)}
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("MaxPool", ["c"], ["p"], kernel_shape=[2, 2]),
        node("Conv", ["p", "v"], ["y"]),
    ]
    return model_of(nodes, weights, {"x": (1, 4, 10, 10)})


def products() -> onnx.ModelProto:
    weights = {"w": random_weight(np.random.default_rng(6), 128, 64)}
    return model_of([node("MatMul", ["x", "w"], ["y"])], weights, {"x": (2, 128)}, opset=21, ir=10)


@pytest.mark.parametrize(
    ("source", "form"),
    [(convolutions(), int8_weights), (products(), int8_weights), (products(), int4_weights)],
)
def test_weights_are_widened_when_the_model_is_loaded(source, form):
    made = form(source)
    assert made is not None
    assert "DequantizeLinear" in {item.op_type for item in made.graph.node}
    left = {item.op_type for item in optimise_as_engine(made).nodes}
    assert not left & {"DequantizeLinear", "MatMulNBits"}


@pytest.mark.parametrize("source", [convolutions(), products()])
def test_folding_leaves_the_outputs_as_the_standard_defines_them(source):
    made = int8_weights(source)
    assert made is not None
    feeds = random_feeds(made, np.random.default_rng(7))
    session = OnnxModel(made).open_session(threads=1)
    # Sums in another order: a few roundings of float32.
    np.testing.assert_allclose(session.run(feeds)["y"], run(made, feeds)["y"], rtol=1e-5, atol=1e-5)


def test_only_models_that_compute_in_float_are_folded():
    floats = convolutions()
    assert not has_foldable_weights(floats)
    stored = int8_weights(floats)
    assert stored is not None
    assert has_foldable_weights(stored)
    codes = onnx.ModelProto()
    codes.CopyFrom(stored)
    codes.graph.node.append(node("QuantizeLinear", ["y", "one"], ["codes"]))
    assert not has_foldable_weights(codes)


def test_a_package_of_stored_weights_tells_the_engine_to_widen_them(tmp_path: Path):
    made = int8_weights(mlp(wide=64))
    assert made is not None
    with isolated_home(tmp_path / "home"):
        result = package(saved(made, tmp_path / "model.onnx"), tmp_path / "out")
        assert result.code == 0, result.stderr
        with read_only(tmp_path / "out") as opened:
            assert opened.manifest.backend.options == {"fold_weights": True}
            session = open_session(opened)
            assert isinstance(session, OrtSession)
            assert session._session is not None
            settings = session._session.get_session_options()
            assert settings.get_session_config_entry("session.disable_quant_qdq") == "1"
            assert run_selftest(session, opened).passed


def test_a_package_of_float_weights_needs_no_option(tmp_path: Path):
    tiny = mlp(wide=4)  # too small for any other form
    with isolated_home(tmp_path / "home"):
        assert package(saved(tiny, tmp_path / "model.onnx"), tmp_path / "out").code == 0
        with read_only(tmp_path / "out") as opened:
            assert not has_foldable_weights(onnx.load_from_string(bytes(opened.read("model.onnx"))))
            assert opened.manifest.backend.options == {}
