"""Whole models as TFLite: those of the project, real public ones, and topologies with random weights."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.toolkit.cases import cases

pytest.importorskip("ai_edge_litert")
from onnx import numpy_helper
from tests.toolkit.tflite_models import operators

from edgekit_toolkit.importers.onnx import load_onnx
from edgekit_toolkit.onnx_graph.specs import tensor_specs
from edgekit_toolkit.passes.optimiser import optimise
from edgekit_toolkit.samples.generated import bind_dims, generate_feeds
from edgekit_toolkit.tflite.check import convert_checked

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "models" / "models"
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def converted(model: onnx.ModelProto, *, optimised: bool = True) -> bytes:
    """The TFLite file of a model that went through our passes, compared on generated inputs."""
    dims = bind_dims(model)
    feeds = generate_feeds(tensor_specs(model)[0], 2, 1, dims)
    if optimised:
        model = optimise(model, batch=None, feeds=feeds[:1]).model
    return convert_checked(model, dims, feeds)


@cases("name", ["digits_cnn", "italy_power_mlp", "japanese_vowels_tcn", "mnist5k_dscnn"])
@cases("optimised", [True, False])
def test_tiny_models_convert(name: str, optimised: bool) -> None:
    converted(load_onnx(ROOT / "models" / "tiny" / f"{name}.onnx").model.proto, optimised=optimised)


@pytest.mark.parametrize(
    ("name", "transposes"),
    [
        ("resnet8_cifar10_fp32", 0),
        ("dscnn_kws_fp32", 0),
        ("mobilenetv1_025_vww_fp32", 0),
        ("mobilenet_v1_025_224_fp32", 0),
        pytest.param("efficientnet_lite0_fp32", 1, marks=pytest.mark.long),  # takes [N, C, H, W]
        ("mnist8_fp32", 0),  # takes one channel
    ],
)
@pytest.mark.parametrize("optimised", [True, False])
def test_real_models_convert_without_a_transposition_too_many(
    name: str, transposes: int, optimised: bool
) -> None:
    path = SHARED / f"{name}.onnx"
    if not path.is_file():
        pytest.skip("needs the real models in ../shared/models")
    content = converted(load_onnx(path).model.proto, optimised=optimised)
    assert operators(content)["TRANSPOSE"] == transposes


@pytest.mark.parametrize(("name", "transposes"), [("light_squeezenet", 1), ("light_shufflenet", 17)])
def test_topologies_with_random_weights_convert(name: str, transposes: int) -> None:
    model = onnx.load(LIGHT / f"{name}.onnx")
    rng = np.random.default_rng(0)
    sizes_of = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    kept = []
    for node in model.graph.node:
        if node.op_type != "ConstantOfShape":
            kept.append(node)
            continue
        sizes = sizes_of[node.input[0]]
        value = rng.uniform(0.5, 1.5, sizes)
        if len(sizes) > 1:
            value = rng.normal(size=sizes) * np.sqrt(2 / np.prod(sizes[1:]))
        stored = numpy_helper.from_array(value.astype(np.float32), node.output[0])
        model.graph.initializer.append(stored)
    if kept[-1].op_type == "Softmax":  # of such weights it is 0 or 1, which hides every difference
        model.graph.output[0].name = kept.pop().input[0]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    # The channel shuffles of ShuffleNet are 16 transpositions of its own.
    assert operators(converted(model))["TRANSPOSE"] == transposes
