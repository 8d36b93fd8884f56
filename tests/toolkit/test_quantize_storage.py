"""Weights that are stored smaller while the arithmetic stays float."""

import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from tests.toolkit.cases import cases
from tests.toolkit.small_models import (
    Array,
    assert_valid,
    model_of,
    node,
    operators,
    random_feeds,
    random_weight,
    run,
    snr_db,
)

from edgekit_runtime.errors import BackendError
from edgekit_toolkit.quantize.onnx.storage import dynamic_int8, half_weights, int4_weights, int8_weights

pytestmark = pytest.mark.int8_products


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(13)


def types_of(model: onnx.ModelProto) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in model.graph.initializer}


def halved(model: onnx.ModelProto) -> set[str]:
    """Names of the weights that the model stores as float16."""
    given = model.SerializeToString()
    after = half_weights(model)
    assert model.SerializeToString() == given
    if after is None:
        return set()
    assert_valid(after)
    types = types_of(after)
    widened = {
        item.output[0] for item in after.graph.node if item.op_type == "Cast" and item.input[0] in types
    }
    assert all(types[item.input[0]] == TensorProto.FLOAT16 for item in after.graph.node[: len(widened)])
    return widened


def test_half_weights_are_widened_and_the_outputs_stay_nearly_equal(rng: np.random.Generator) -> None:
    weights = {
        "w": random_weight(rng, 16, 4, 3, 3),
        "b": random_weight(rng, 16),
        "shape": np.array([0, -1], np.int64),
        "d": random_weight(rng, 576, 10),
    }
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"]),
        node("Reshape", ["c", "shape"], ["f"]),
        node("MatMul", ["f", "d"], ["y"]),
    ]
    model = model_of(nodes, weights, {"x": ("N", 4, 8, 8)})
    assert halved(model) == {"w", "d"}
    after = half_weights(model)
    assert after is not None
    assert after.ByteSize() < 0.55 * model.ByteSize()
    feeds = random_feeds(model, rng)
    # Eleven bits of the weights: 2^-12 each at most, 66 dB and more for sums of random ones.
    assert snr_db(run(model, feeds)["y"], run(after, feeds)["y"]) > 60


def test_weights_of_recurrent_and_embedding_layers_are_halved(rng: np.random.Generator) -> None:
    weights = {
        "table": random_weight(rng, 40, 8),
        "w": random_weight(rng, 1, 64, 8),
        "r": random_weight(rng, 1, 64, 16),
        "b": random_weight(rng, 1, 128),
        "k": random_weight(rng, 1, 16, 16),
    }
    nodes = [
        node("Cast", ["x"], ["i"], to=TensorProto.INT64),
        node("Gather", ["table", "i"], ["e"]),
        node("LSTM", ["e", "w", "r", "b"], ["h"], hidden_size=16),
        node("ConvTranspose", ["h4", "t"], ["y"]),
    ]
    nodes.insert(3, node("Reshape", ["h", "shape"], ["h4"]))
    weights |= {"shape": np.array([1, 16, 5, -1], np.int64), "t": random_weight(rng, 16, 4, 2, 2)}
    model = model_of(nodes, weights, {"x": (5, 2)})
    assert halved(model) == {"table", "w", "r", "b", "t"}


def test_limits_of_a_clip_sizes_of_a_resize_and_the_like_are_never_halved(rng: np.random.Generator) -> None:
    nodes = [
        node("Clip", ["x", "low", "high"], ["c"]),
        node("Resize", ["c", "", "scales"], ["r"]),
        node("Pad", ["r", "pads", "fill"], ["p"]),
        node("QuantizeLinear", ["p", "steps"], ["q"], axis=1),
        node("DequantizeLinear", ["q", "steps"], ["d"], axis=1),
        node("BatchNormalization", ["d", "steps", "steps", "steps", "steps"], ["n"]),
        node("Where", ["mask", "n", "steps4"], ["y"]),
    ]
    many = np.linspace(0.5, 1, 200, dtype=np.float32)
    weights = {
        "low": np.float32(-1),
        "high": np.float32(1),
        "scales": np.array([1, 1, 2, 2], np.float32),
        "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64),
        "fill": np.float32(0.1),
        "steps": many,
        "steps4": many.reshape(1, 200, 1, 1),
        "mask": np.ones((1, 1, 6, 6), np.bool_),
    }
    model = model_of(nodes, weights, {"x": (1, 200, 2, 2)})
    assert half_weights(model) is None


def test_weight_that_something_else_reads_too_is_not_halved(rng: np.random.Generator) -> None:
    weights = {"w": random_weight(rng, 16, 16)}
    nodes = [node("MatMul", ["x", "w"], ["m"]), node("Max", ["m", "w"], ["y"])]
    assert halved(model_of(nodes, weights, {"x": (16, 16)})) == set()


def test_weight_of_two_layers_is_halved_once(rng: np.random.Generator) -> None:
    nodes = [node("MatMul", ["x", "w"], ["m"]), node("MatMul", ["m", "w"], ["y"])]
    model = model_of(nodes, {"w": random_weight(rng, 16, 16)}, {"x": (2, 16)})
    assert halved(model) == {"w"}
    after = half_weights(model)
    assert after is not None
    assert operators(after) == ["Cast", "MatMul", "MatMul"]


@cases(
    ("value", "fits"),
    [
        (6e4, True),
        (65504.0, True),
        (65520.0, False),  # rounds to infinity
        (1e5, False),
        (-1e5, False),
        (np.inf, False),
        (np.nan, False),
        (1e-4, True),
        (1e-6, False),
        (0.0, True),
    ],
)
def test_weights_outside_the_range_of_half_precision_are_left(value: float, fits: bool) -> None:
    weight = np.zeros((16, 16), np.float32)
    weight[3, 4] = value
    model = model_of([node("MatMul", ["x", "w"], ["y"])], {"w": weight}, {"x": (2, 16)})
    assert halved(model) == ({"w"} if fits else set())


def test_weight_whose_small_values_half_precision_loses_is_left(rng: np.random.Generator) -> None:
    weight = (random_weight(rng, 64, 64) * 1e-7).astype(np.float32)
    weight[3, 4] = 1e-4  # in range, but the others are not
    model = model_of([node("MatMul", ["x", "w"], ["y"])], {"w": weight}, {"x": (2, 64)})
    assert halved(model) == set()


@pytest.mark.parametrize(("ir", "opset"), [(3, 8), (8, 17)])
def test_weight_that_a_caller_may_replace_is_left(ir: int, opset: int, rng: np.random.Generator) -> None:
    nodes = [node("MatMul", ["x", "w"], ["y"])]
    weights = {"w": random_weight(rng, 64, 64)}
    model = model_of(nodes, weights, {"x": (2, 64), "w": (64, 64)}, opset=opset, ir=ir)
    assert [make(model) for make in (half_weights, int8_weights, int4_weights)] == [None, None, None]


def test_weight_that_is_an_output_is_not_halved(rng: np.random.Generator) -> None:
    nodes = [node("MatMul", ["x", "w"], ["y"])]
    model = model_of(nodes, {"w": random_weight(rng, 16, 16)}, {"x": (2, 16)})
    model.graph.output.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, (16, 16)))
    assert halved(model) == set()


def test_name_that_the_half_weight_would_like_may_be_taken(rng: np.random.Generator) -> None:
    nodes = [node("MatMul", ["x", "w"], ["w_half"]), node("MatMul", ["w_half", "w"], ["y"])]
    model = model_of(nodes, {"w": random_weight(rng, 16, 16)}, {"x": (2, 16)})
    assert halved(model) == {"w"}


# int8.


def test_int8_weights_have_a_scale_a_channel_and_float_arithmetic(rng: np.random.Generator) -> None:
    weights = {
        "w": random_weight(rng, 16, 4, 3, 3) * np.logspace(-3, 3, 16, dtype=np.float32).reshape(16, 1, 1, 1),
        "shape": np.array([0, -1], np.int64),
        "d": random_weight(rng, 12, 576),
        "b": random_weight(rng, 12),
        "m": random_weight(rng, 12, 12),
    }
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Reshape", ["c", "shape"], ["f"]),
        node("Gemm", ["f", "d", "b"], ["g"], transB=1),
        node("MatMul", ["g", "m"], ["y"]),
    ]
    model = model_of(nodes, weights, {"x": (1, 4, 8, 8)}, ["c", "g", "y"])
    after = int8_weights(model)
    assert after is not None
    assert_valid(after)
    assert Counter(operators(after)) == Counter([*operators(model), *["DequantizeLinear"] * 3])
    sizes = {tensor.name: list(tensor.dims) for tensor in after.graph.initializer}
    dequantizers = [item for item in after.graph.node if item.op_type == "DequantizeLinear"]
    assert [sizes[item.input[1]] for item in dequantizers] == [[16], [12], [12]]
    feeds = random_feeds(model, rng)
    want, got = run(model, feeds), run(after, feeds)
    for channel in range(16):  # the smallest channel as well as the largest
        assert snr_db(want["c"][:, channel], got["c"][:, channel]) > 35
    assert snr_db(want["y"], got["y"]) > 35


def test_int8_weight_of_layers_along_both_axes_has_two_forms(rng: np.random.Generator) -> None:
    nodes = [
        node("Gemm", ["x", "w"], ["a"]),
        node("Gemm", ["a", "w"], ["b"], transB=1),
        node("Gemm", ["b", "w"], ["y"]),
    ]
    model = model_of(nodes, {"w": random_weight(rng, 16, 16)}, {"x": (2, 16)})
    after = int8_weights(model)
    assert after is not None
    axes = [item.attribute[0].i for item in after.graph.node if item.op_type == "DequantizeLinear"]
    assert axes == [1, 0]
    feeds = random_feeds(model, rng)
    assert snr_db(run(model, feeds)["y"], run(after, feeds)["y"]) > 30


@pytest.mark.parametrize("shape", [(2, 16, 16), (8, 8)], ids=["stack of matrices", "small"])
def test_weight_that_int8_does_not_suit_is_left(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    model = model_of(
        [node("MatMul", ["x", "w"], ["y"])], {"w": random_weight(rng, *shape)}, {"x": (2, shape[-2])}
    )
    assert int8_weights(model) is None


def test_int8_weights_need_an_operator_set_with_a_scale_a_channel(rng: np.random.Generator) -> None:
    weights = {"w": random_weight(rng, 16, 16)}
    nodes = [node("MatMul", ["x", "w"], ["y"])]
    assert int8_weights(model_of(nodes, weights, {"x": (2, 16)}, opset=12)) is None
    assert int8_weights(model_of(nodes, weights, {"x": (2, 16)}, opset=13)) is not None


# int4.


def blocks_of_32(weight: Array) -> Array:
    """A weight [K, N] rounded to 4 bits with a scale for each 32 inputs, by the formula."""
    blocks = weight.astype(np.float64).reshape(-1, 32, weight.shape[1])
    scale = (np.abs(blocks).max(axis=1, keepdims=True) / 7).astype(np.float32).astype(np.float64)
    return (np.rint(blocks / scale) * scale).reshape(weight.shape)


@pytest.mark.parametrize("kind", ["MatMul", "Gemm", "Gemm transposed"])
def test_int4_codes_decode_to_the_rounded_weights(kind: str, rng: np.random.Generator) -> None:
    weight = random_weight(rng, 96, 65)  # an odd number of outputs
    stored = weight.T.copy() if kind == "Gemm transposed" else weight
    attributes = {"transB": 1} if kind == "Gemm transposed" else {}
    nodes = [node(kind.split(maxsplit=1)[0], ["x", "w"], ["y"], **attributes)]
    after = int4_weights(model_of(nodes, {"w": stored}, {"x": (3, 96)}))
    assert after is not None
    assert_valid(after)
    assert TensorProto.INT4 in types_of(after).values()
    assert "w" not in types_of(after)
    x = rng.normal(size=(3, 96)).astype(np.float32)
    want = x @ blocks_of_32(weight)
    np.testing.assert_allclose(run(after, {"x": x})["y"], want, rtol=1e-4, atol=1e-4)
    reference = ReferenceEvaluator(after).run(None, {"x": x})[0]
    np.testing.assert_allclose(reference, want, rtol=1e-4, atol=1e-4)


def test_int4_weight_of_two_layers_is_stored_once(rng: np.random.Generator) -> None:
    nodes = [node("MatMul", ["x", "w"], ["m"]), node("MatMul", ["m", "w"], ["y"])]
    after = int4_weights(model_of(nodes, {"w": random_weight(rng, 64, 64)}, {"x": (2, 64)}))
    assert after is not None
    assert list(types_of(after).values()).count(TensorProto.INT4) == 1
    assert operators(after) == ["DequantizeLinear", "MatMul", "MatMul"]


@pytest.mark.parametrize("shape", [(100, 64), (32, 64)], ids=["no whole blocks", "small"])
def test_weight_that_int4_does_not_suit_is_left(shape: tuple[int, int], rng: np.random.Generator) -> None:
    model = model_of(
        [node("MatMul", ["x", "w"], ["y"])], {"w": random_weight(rng, *shape)}, {"x": (2, shape[0])}
    )
    assert int4_weights(model) is None


def test_convolutions_have_no_int4_form(rng: np.random.Generator) -> None:
    weights = {"w": random_weight(rng, 64, 64, 1, 1)}
    assert int4_weights(model_of([node("Conv", ["x", "w"], ["y"])], weights, {"x": (1, 64, 4, 4)})) is None


def test_int4_raises_the_operator_set_and_keeps_the_other_layers(rng: np.random.Generator) -> None:
    weights = {"w": random_weight(rng, 64, 64), "v": random_weight(rng, 64, 20)}
    nodes = [
        node("MatMul", ["x", "w"], ["m"]),
        node("Relu", ["m"], ["r"]),
        node("MatMul", ["r", "v"], ["z"]),
        node("ReduceMean", ["z"], ["y"], axes=[1]),
    ]
    model = model_of(nodes, weights, {"x": ("N", 64)}, ["y", "z"])
    after = int4_weights(model)
    assert after is not None
    assert after.opset_import[0].version >= 21
    assert types_of(after)["v"] == TensorProto.FLOAT
    feeds = random_feeds(model, rng)
    want, got = run(model, feeds), run(after, feeds)
    assert snr_db(want["z"], got["z"]) > 15
    assert got["y"].shape == want["y"].shape


# Dynamic int8.


def test_dynamic_int8_never_touches_convolutions(rng: np.random.Generator) -> None:
    weights = {
        "w": random_weight(rng, 16, 4, 3, 3),
        "shape": np.array([0, -1], np.int64),
        "d": random_weight(rng, 576, 10),
        "b": random_weight(rng, 10),
        "m": random_weight(rng, 10, 10),
    }
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Reshape", ["c", "shape"], ["f"]),
        node("Gemm", ["f", "d", "b"], ["g"]),
        node("MatMul", ["g", "m"], ["y"]),
    ]
    model = model_of(nodes, weights, {"x": (1, 4, 8, 8)})
    given = model.SerializeToString()
    after = dynamic_int8(model)
    assert model.SerializeToString() == given
    assert after is not None
    assert operators(after).count("Conv") == 1
    assert not {"ConvInteger", "QLinearConv"} & set(operators(after))
    assert types_of(after)["w"] == TensorProto.FLOAT
    assert operators(after).count("MatMulInteger") >= 1
    feeds = random_feeds(model, rng)
    assert snr_db(run(model, feeds)["y"], run(after, feeds)["y"]) > 25


def test_dynamic_int8_of_a_recurrent_layer(rng: np.random.Generator) -> None:
    weights = {"w": random_weight(rng, 1, 64, 8), "r": random_weight(rng, 1, 64, 16)}
    model = model_of([node("LSTM", ["x", "w", "r"], ["y"], hidden_size=16)], weights, {"x": (5, 1, 8)})
    after = dynamic_int8(model)
    assert after is not None
    assert "DynamicQuantizeLSTM" in operators(after)
    feeds = random_feeds(model, rng)
    # Optimised, as it is run: without, its products are not exact on every processor.
    assert snr_db(run(model, feeds)["y"], run(after, feeds, optimise=True)["y"]) > 35


def test_model_of_convolutions_has_no_dynamic_int8_form(rng: np.random.Generator) -> None:
    weights = {"w": random_weight(rng, 4, 4, 3, 3)}
    assert dynamic_int8(model_of([node("Conv", ["x", "w"], ["y"])], weights, {"x": (1, 4, 8, 8)})) is None


def test_product_of_two_activations_has_no_dynamic_int8_form() -> None:
    model = model_of([node("MatMul", ["x", "k"], ["y"])], {}, {"x": (2, 16, 16), "k": (2, 16, 16)})
    assert dynamic_int8(model) is None


def test_weights_inside_a_branch_are_left_where_they_are(rng: np.random.Generator) -> None:
    def branch(operator: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{operator}_out", TensorProto.FLOAT, None)
        inner = numpy_helper.from_array(random_weight(rng, 16, 16), f"{operator}_w")
        nodes = [
            node("MatMul", ["outer", inner.name], ["m" + operator]),
            node(operator, ["m" + operator], [out.name]),
        ]
        return helper.make_graph(nodes, operator, [], [out], [inner])

    nodes = [
        node("MatMul", ["x", "w"], ["outer"]),
        node("ReduceMax", ["x"], ["top"], keepdims=0),
        node("Greater", ["top", "zero"], ["positive"]),
        node("If", ["positive"], ["y"], then_branch=branch("Relu"), else_branch=branch("Neg")),
    ]
    weights = {"w": random_weight(rng, 16, 16), "zero": np.float32(0)}
    model = model_of(nodes, weights, {"x": (2, 16)})
    assert halved(model) == {"w"}
    feeds = random_feeds(model, rng)
    for made in (half_weights(model), int8_weights(model)):
        assert made is not None
        assert snr_db(run(model, feeds)["y"], run(made, feeds)["y"]) > 30


def test_dynamic_int8_that_the_library_cannot_make_is_an_error_of_ours(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds no type for the products of an LSTM that an exporter wrote out as 60 cells (captcha_crnn)."""
    from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer

    def refuse(_: ONNXQuantizer) -> None:
        raise RuntimeError("Unable to find data type\nfor weight_name='p'")

    monkeypatch.setattr(ONNXQuantizer, "quantize_model", refuse)
    model = model_of([node("MatMul", ["x", "w"], ["y"])], {"w": random_weight(rng, 8, 4)}, {"x": (1, 8)})
    with pytest.raises(BackendError, match=r"dynamic-int8.*find data type for weight_name"):
        dynamic_int8(model)


@pytest.mark.skipif(find_spec("sympy") is not None, reason="sympy is installed")
def test_dynamic_int8_needs_no_symbolic_shapes(tmp_path: Path) -> None:
    """The release for Python 3.10 imports sympy for them, which is not installed."""
    package = tmp_path / "onnxruntime_shapes.py"
    package.write_text(
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.endswith('quantization.shape_inference'):\n"
        "            raise ModuleNotFoundError(f'no {name}', name=name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
    )
    code = (
        "import onnxruntime_shapes\n"
        "from tests.toolkit.package_run import mlp\n"
        "from edgekit_toolkit.quantize.onnx.storage import dynamic_int8\n"
        "assert dynamic_int8(mlp(1)) is not None\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=True)
