"""Rounding of whole models: what it keeps, and models with odd weights."""

from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from tests.toolkit.cases import cases
from tests.toolkit.package_run import TINY
from tests.toolkit.small_models import Array, model_of, node, random_weight, run, snr_db

from edgekit_toolkit.compress.sequential import round_weights
from edgekit_toolkit.onnx_graph.layers import Floats, Layer
from edgekit_toolkit.passes.optimiser import optimise

SEED = 7


def feeds_of(shape: tuple[int, ...], count: int = 24) -> list[dict[str, Array]]:
    rng = np.random.default_rng(SEED)
    return [{"x": rng.normal(size=shape).astype(np.float32)} for _ in range(count)]


def nearest(model: onnx.ModelProto, peak: int) -> onnx.ModelProto:
    """The model with each weight rounded to nearest, a scale for each first axis."""
    rounded = onnx.ModelProto()
    rounded.CopyFrom(model)
    for tensor in rounded.graph.initializer:
        value = onnx.numpy_helper.to_array(tensor)
        if value.ndim > 1:
            scale = (
                np.abs(value).reshape(len(value), -1).max(axis=1).reshape(-1, *[1] * (value.ndim - 1)) / peak
            )
            codes = np.rint(value / np.maximum(scale, 1e-12))
            tensor.CopyFrom(onnx.numpy_helper.from_array((codes * scale).astype(np.float32), tensor.name))
    return rounded


def two_convolutions(weights: Mapping[str, Array]) -> onnx.ModelProto:
    return model_of(
        [
            node("Conv", ["x", "w1", "b1"], ["h"], pads=[1, 1, 1, 1]),
            node("Relu", ["h"], ["r"]),
            node("Conv", ["r", "w2", "b2"], ["y"]),
        ],
        weights,
        {"x": [1, 4, 10, 10]},
    )


def usual_weights() -> dict[str, Array]:
    rng = np.random.default_rng(SEED)
    return {
        "w1": random_weight(rng, 8, 4, 3, 3),
        "b1": random_weight(rng, 8),
        "w2": random_weight(rng, 6, 8, 3, 3),
        "b2": random_weight(rng, 6),
    }


@pytest.mark.parametrize("peak", [3, 7, 31, 127])
def test_rounded_model_is_nearer_than_with_nearest_codes(peak: int) -> None:
    model, samples = two_convolutions(usual_weights()), feeds_of((1, 4, 10, 10))
    compression = round_weights(model, samples[:16], peak=peak, threads=1)
    wanted, rounded, plain = (
        np.concatenate([run(variant, feeds)["y"] for feeds in samples[16:]])
        for variant in (model, compression.apply(model), nearest(model, peak))
    )
    assert snr_db(wanted, rounded) > snr_db(wanted, plain)
    assert compression.weights["w1"].codes.dtype == np.int8
    assert max(weight.bits for weight in compression.weights.values()) <= int(peak).bit_length() + 1


def test_means_of_the_outputs_stay_on_the_samples() -> None:
    model, samples = two_convolutions(usual_weights()), feeds_of((1, 4, 10, 10))
    rounded = round_weights(model, samples, peak=3, threads=1).apply(model)
    wanted, outputs = (
        np.concatenate([run(variant, feeds)["y"] for feeds in samples]).mean(axis=(0, 2, 3))
        for variant in (model, rounded)
    )
    np.testing.assert_allclose(outputs, wanted, atol=1e-4)


def test_tiny_model_keeps_its_answers_with_weights_of_three_bits() -> None:
    with (
        np.load(TINY / "mnist5k_dscnn.calib.npz") as calibration,
        np.load(TINY / "mnist5k_dscnn.eval.npz") as data,
    ):
        (name,) = (name for name in calibration.files if name != "y")
        images, values = calibration[name][:60], data[name][:200]
    model = optimise(onnx.load(TINY / "mnist5k_dscnn.onnx"), batch=None, feeds=[{name: images[:1]}]).model
    samples = [{name: image[None]} for image in images]
    rounded = round_weights(model, samples, peak=3, threads=1).apply(model)
    answers = [
        run(variant, {name: values})[model.graph.output[0].name].argmax(1) for variant in (model, rounded)
    ]
    assert (answers[0] == answers[1]).mean() > 0.97


def test_shared_weights_are_rounded_once() -> None:
    rng = np.random.default_rng(SEED)
    model = model_of(
        [
            node("Conv", ["x", "w", "b"], ["h"], pads=[1, 1, 1, 1]),
            node("Relu", ["h"], ["r"]),
            node("Conv", ["r", "w", "b"], ["y"], pads=[1, 1, 1, 1]),
        ],
        {"w": random_weight(rng, 4, 4, 3, 3), "b": random_weight(rng, 4)},
        {"x": [1, 4, 8, 8]},
    )
    samples = feeds_of((1, 4, 8, 8))
    compression = round_weights(model, samples, peak=31, threads=1)
    assert list(compression.weights) == ["w"]
    assert not compression.biases  # no single bias suits both
    rounded = compression.apply(model)
    assert snr_db(run(model, samples[0])["y"], run(rounded, samples[0])["y"]) > 20


@pytest.mark.parametrize("width", [8, 16])
def test_weight_that_another_layer_reads_transposed_is_left_alone(width: int) -> None:
    model = model_of(
        [
            node("MatMul", ["x", "w"], ["h"]),
            node("Relu", ["h"], ["r"]),
            node("Gemm", ["r", "w"], ["y"], transB=1),
        ],
        {"w": random_weight(np.random.default_rng(SEED), 16, width)},
        {"x": [1, 16]},
    )
    compression = round_weights(model, feeds_of((1, 16)), peak=127, threads=1)
    assert not compression.weights


def test_dense_layer_with_one_bias_for_all_channels_is_left_alone() -> None:
    rng = np.random.default_rng(SEED)
    weights = {"w": random_weight(rng, 16, 8), "b": random_weight(rng, 1)}
    model = model_of([node("Gemm", ["x", "w", "b"], ["y"])], weights, {"x": [1, 16]})
    compression = round_weights(model, feeds_of((1, 16)), peak=127, threads=1)
    compression.apply(model)
    assert not compression.biases


def test_layer_that_is_read_twice_is_rounded_for_both_readers() -> None:
    rng = np.random.default_rng(SEED)
    model = model_of(
        [
            node("Conv", ["x", "w1"], ["h"], pads=[1, 1, 1, 1]),
            node("Conv", ["h", "w2"], ["a"]),
            node("Conv", ["h", "w3"], ["b"]),
            node("Add", ["a", "b"], ["y"]),
        ],
        {name: random_weight(rng, 4, 4, 3, 3) for name in ("w1", "w2", "w3")},
        {"x": [1, 4, 8, 8]},
    )
    samples = feeds_of((1, 4, 8, 8))
    compression = round_weights(model, samples, peak=31, threads=1)
    assert sorted(compression.weights) == ["w1", "w2", "w3"]
    assert snr_db(run(model, samples[0])["y"], run(compression.apply(model), samples[0])["y"]) > 20


@pytest.mark.parametrize("alone", [True, False])
def test_layer_that_is_rounded_alone_does_not_see_the_others(alone: bool) -> None:
    model, samples = two_convolutions(usual_weights()), feeds_of((1, 4, 10, 10))
    codes = []
    for coarseness in (0.1, 2.0):  # of the first layer

        def choose_step(layer: Layer, rows: Floats, coarseness: float = coarseness) -> Floats:
            return np.full((*rows.shape[:2], 1), coarseness if layer.weight == "w1" else 0.1)

        rounded = round_weights(model, samples, peak=127, choose_step=choose_step, threads=1, alone=alone)
        codes.append(rounded.weights["w2"].codes)
    assert np.array_equal(*codes) == alone


def test_activations_stay_where_layers_are_rounded_alone() -> None:
    model, samples = two_convolutions(usual_weights()), feeds_of((1, 4, 10, 10))
    plain, quantized = (
        round_weights(model, samples, peak=7, threads=1, quantize=quantize, alone=True).weights["w2"].codes
        for quantize in (lambda _name, values: values, lambda _name, values: 0 * values)
    )
    np.testing.assert_array_equal(plain, quantized)


@pytest.mark.parametrize("peak", [7, 127])
def test_moment_of_a_layer_is_inverted_once(peak: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    invert = np.linalg.inv

    def count(moment: Floats) -> Floats:
        shapes.append(moment.shape)
        return invert(moment)

    monkeypatch.setattr(np.linalg, "inv", count)
    round_weights(two_convolutions(usual_weights()), feeds_of((1, 4, 10, 10)), peak=peak, threads=1)
    assert len(shapes) == 2


@pytest.mark.parametrize(("peak", "most"), [(1, 100), (7, 500)])
def test_bias_has_as_few_digits_as_its_weights(peak: int, most: int) -> None:
    model = two_convolutions(usual_weights())
    samples = feeds_of((1, 4, 10, 10))
    biases = round_weights(model, samples, peak=peak, threads=1, coarse_biases=True).biases["b1"]
    step = np.gcd.reduce((biases.astype(np.float64) * 2**40).astype(np.int64)) / 2**40
    assert np.abs(biases / step).max() < most


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_weights_that_are_not_finite_are_left_alone(value: float) -> None:
    weights = usual_weights()
    weights["w2"][0, 0] = value
    compression = round_weights(two_convolutions(weights), feeds_of((1, 4, 10, 10)), peak=7, threads=1)
    assert list(compression.weights) == ["w1"]


@cases("value", [0.0, 1.0, 1e-30, 1e30])
def test_constant_weights_are_rounded(value: float) -> None:
    weights = usual_weights()
    weights["w1"][:] = value
    model = two_convolutions(weights)
    compression = round_weights(model, feeds_of((1, 4, 10, 10)), peak=7, threads=1)
    floats = compression.weights["w1"].floats(0)
    np.testing.assert_allclose(floats, weights["w1"], rtol=0.2, atol=1e-12)


def test_one_sample_is_enough() -> None:
    model = two_convolutions(usual_weights())
    compression = round_weights(model, feeds_of((1, 4, 10, 10), 1), peak=7, threads=1)
    assert sorted(compression.weights) == ["w1", "w2"]


def test_layer_that_no_sample_reaches_is_left_alone() -> None:
    rng = np.random.default_rng(SEED)
    model = model_of(
        [
            node("Gemm", ["x", "w1"], ["h"]),
            node("Compress", ["h", "first"], ["rows"], axis=0),
            node("MatMul", ["rows", "w2"], ["y"]),
        ],
        {
            "w1": random_weight(rng, 6, 5),
            "w2": random_weight(rng, 5, 4),
            "first": np.array([False]),
        },
        {"x": [1, 6]},
    )
    assert "w2" not in round_weights(model, feeds_of((1, 6)), peak=7, threads=1).weights


def test_branches_that_read_an_activation_are_followed() -> None:
    rng = np.random.default_rng(SEED)
    branches = {
        f"{name}_branch": onnx.helper.make_graph(
            [node(op, ["h"], [f"{name}_y"])],
            name,
            [],
            [onnx.helper.make_tensor_value_info(f"{name}_y", onnx.TensorProto.FLOAT, None)],
        )
        for name, op in (("then", "Relu"), ("else", "Neg"))
    }
    model = model_of(
        [
            node("Conv", ["x", "w1"], ["h"]),
            node("ReduceMax", ["x"], ["top"], keepdims=0),
            node("Less", ["top", "limit"], ["low"]),
            node("If", ["low"], ["branch"], **branches),
            node("Conv", ["branch", "w2"], ["y"]),
        ],
        {"w1": random_weight(rng, 4, 4, 3, 3), "w2": random_weight(rng, 4, 4, 3, 3), "limit": np.float32(2)},
        {"x": [1, 4, 8, 8]},
    )
    samples = feeds_of((1, 4, 8, 8))
    compression = round_weights(model, samples, peak=31, threads=1)
    assert sorted(compression.weights) == ["w1", "w2"]
    assert snr_db(run(model, samples[0])["y"], run(compression.apply(model), samples[0])["y"]) > 20
