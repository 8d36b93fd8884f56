"""The backward pass of a graph, and the noise of layers that it gives, against the same measured directly."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from tests.toolkit.cases import cases
from tests.toolkit.small_models import Array, model_of, node, random_weight, run

from edgekit_runtime.errors import BackendError
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.adjoint import Adjoint
from edgekit_toolkit.onnx_graph.index import copy_model, float_tensors
from edgekit_toolkit.quantize.forms import FLOAT16_WEIGHTS
from edgekit_toolkit.quantize.onnx.output_parts import output_parts
from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.quantize.scheme import ASYMMETRIC, SYMMETRIC, Scheme
from edgekit_toolkit.quantize.sensitivity import Fidelity, measure_blocks, measure_weights

pytestmark = pytest.mark.int8_products

RNG = np.random.default_rng(11)
IMAGE = (2, 6, 7, 8)
Case = tuple[Sequence[onnx.NodeProto], Mapping[str, Array], tuple[int, ...]]


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


def conv(*shape: int, **attributes: Any) -> Case:
    op = attributes.pop("op", "Conv")
    return [node(op, ["x", "w"], ["y"], **attributes)], {"w": random_weight(RNG, *shape)}, IMAGE


def single(op: str, shape: tuple[int, ...] = IMAGE, *more: Array, **attributes: Any) -> Case:
    names = [f"k{number}" for number in range(len(more))]
    return [node(op, ["x", *names], ["y"], **attributes)], dict(zip(names, more, strict=True)), shape


CASES: dict[str, Case] = {
    "conv": conv(4, 6, 3, 3, pads=[1, 1, 1, 1]),
    "conv, strides": conv(4, 6, 3, 3, strides=[2, 3], pads=[1, 0, 2, 1]),
    "conv, dilated depthwise": conv(6, 1, 3, 3, group=6, dilations=[2, 1]),
    "conv, groups": conv(4, 3, 2, 3, group=2, strides=[2, 2]),
    "conv, auto_pad": conv(4, 6, 3, 2, strides=[2, 2], auto_pad="SAME_UPPER"),
    "conv, padding beyond the kernel": conv(4, 6, 1, 1, pads=[1, 1, 1, 1]),
    "transposed conv": conv(6, 4, 3, 3, op="ConvTranspose", strides=[2, 2], output_padding=[1, 1]),
    "gemm": single("Gemm", (3, 5), RNG.normal(size=(4, 5)).astype("f4"), transB=1, alpha=0.5),
    "matmul": single("MatMul", (2, 3, 5), RNG.normal(size=(5, 4)).astype("f4")),
    "product of activations": (
        [node("Transpose", ["x"], ["t"], perm=[0, 2, 1]), node("MatMul", ["x", "t"], ["y"])],
        {},
        (2, 3, 5),
    ),
    "broadcast sum": single("Add", (2, 1, 5), RNG.normal(size=(2, 4, 1)).astype("f4")),
    "swish": ([node("Sigmoid", ["x"], ["s"]), node("Mul", ["x", "s"], ["y"])], {}, IMAGE),
    "difference": ([node("Tanh", ["x"], ["s"]), node("Sub", ["s", "x"], ["y"])], {}, IMAGE),
    "division": ([node("Exp", ["x"], ["s"]), node("Div", ["x", "s"], ["y"])], {}, (3, 5)),
    "concat": (
        [node("Softsign", ["x"], ["s"]), node("Concat", ["x", "s", "x"], ["y"], axis=-1)],
        {},
        (2, 3, 5),
    ),
    "slice": single("Slice", IMAGE, ints(1, 6), ints(9, 0), ints(1, 3), ints(2, -2)),
    "split": (
        [node("Split", ["x"], ["a", "b"], axis=1), node("Mul", ["a", "b"], ["y"])],
        {},
        IMAGE,
    ),
    "nearest resize": single("Resize", IMAGE, np.zeros(0, "f4"), np.array([1, 1, 2, 2], "f4")),
    "depth to space": single("DepthToSpace", (1, 8, 3, 2), blocksize=2, mode="CRD"),
    "padding": single("Pad", (2, 3), ints(1, 0, 0, 2), np.float32(7)),
    "lookup": single("Gather", (5, 3), ints(4, 0, 4)),
    "max pool": single("MaxPool", IMAGE, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    "global mean": single("GlobalAveragePool"),
    "mean": single("ReduceMean", IMAGE, axes=[1, -1], keepdims=0),
    "softmax": single("Softmax", (3, 5), axis=-1),
    "flatten": single("Flatten"),
    "average pool": single(
        "AveragePool", kernel_shape=[3, 2], strides=[2, 2], count_include_pad=1, pads=[1] * 4
    ),
    "average pool, rounded up": single("AveragePool", (1, 2, 8, 8), kernel_shape=[3, 3], strides=[3, 3]),
    "instance norm": single("InstanceNormalization", IMAGE, *RNG.uniform(1, 2, (2, 6)).astype("f4")),
    "layer norm": single("LayerNormalization", (2, 3, 5), RNG.uniform(1, 2, 5).astype("f4")),
    "norm": single("BatchNormalization", IMAGE, *(RNG.uniform(1, 2, 6).astype("f4") for _ in range(4))),
}


@cases("name", CASES)
def test_adjoint_of_an_operator_agrees_with_a_difference(name: str) -> None:
    nodes, weights, shape = CASES[name]
    model = model_of(nodes, weights, {"x": shape})
    rng = np.random.default_rng(list(name.encode()))  # whatever other tests have drawn
    x, direction = rng.normal(size=(2, *shape)).astype(np.float32)
    taps = copy_model(model)
    taps.graph.output.extend(
        onnx.helper.make_tensor_value_info(item, onnx.TensorProto.FLOAT, None)
        for each in nodes
        for item in each.output
        if item != "y"
    )
    values = run(taps, {"x": x})
    seed = rng.normal(size=values["y"].shape).astype(np.float32)
    shapes = {key: value.shape for key, value in {**values, **weights, "x": x}.items()}
    program = copy_model(model)
    program.graph.input.append(onnx.helper.make_tensor_value_info("v", onnx.TensorProto.FLOAT, seed.shape))
    adjoint = Adjoint(program.graph, shapes, float_tensors(model))
    adjoint.pass_back({"y": "v"})
    del program.graph.output[:]
    program.graph.output.append(
        onnx.helper.make_tensor_value_info(adjoint.tensors["x"], onnx.TensorProto.FLOAT, None)
    )
    (gradient,) = run(program, {"x": x, "v": seed}).values()
    step = np.float32(1e-3)
    change = run(model, {"x": x + step * direction})["y"] - run(model, {"x": x - step * direction})["y"]
    want = float((seed * change).astype(np.float64).sum()) / (2e-3)
    scale = float(np.linalg.norm(gradient) * np.linalg.norm(direction) / np.sqrt(direction.size))
    assert gradient.shape == x.shape
    assert float((gradient * direction).sum()) == pytest.approx(want, abs=0.05 * scale + 1e-3)


def network(rng: np.random.Generator, layers: int = 12) -> onnx.ModelProto:
    """Residual layers of several kinds, each with a share of its own in the outputs."""
    weights: dict[str, Array] = {}
    nodes, name = [], "x"
    for number in range(layers):
        weight = random_weight(rng, 8, 8, 3, 3) * np.float32(1.5)
        weight[rng.integers(8)] *= np.float32(rng.choice([1, 1, 4, 16]))
        weights[f"w{number}"] = weight
        act = rng.choice(["Sigmoid", "Relu", "Softsign", "InstanceNormalization", "AveragePool"])
        more: dict[str, Any] = {"AveragePool": {"kernel_shape": [3, 3], "pads": [1] * 4}}.get(act, {})
        reads = ["ones", "zeros"] if act == "InstanceNormalization" else []
        nodes += [
            node("Conv", [name, f"w{number}"], [f"c{number}"], pads=[1] * 4),
            node(act, [f"c{number}", *reads], [f"s{number}"], **more),
            node("Mul", [f"s{number}", f"k{number}"], [f"m{number}"]),
            node("Add", [name, f"m{number}"], [f"a{number}"]),
        ]
        weights[f"k{number}"] = np.float32(10 ** rng.uniform(-2, 0.5))
        name = f"a{number}"
    nodes += [node("Concat", [name, "c3"], ["y"], axis=1)]
    weights |= {"ones": np.ones(8, "f4"), "zeros": np.zeros(8, "f4")}
    return model_of(nodes, weights, {"x": (1, 8, 10, 10)})


def correlate_ranks(*noises: Sequence[float]) -> float:
    """Return the rank correlation of two lists; equal values share their mean rank."""
    values = np.asarray(noises)
    larger, equal = values[:, :, None] > values[:, None], values[:, :, None] == values[:, None]
    return float(np.corrcoef((larger + equal / 2).sum(axis=2))[0, 1])


@cases("seed", range(4))
@cases("scheme", [ASYMMETRIC, SYMMETRIC])
def test_propagated_noises_have_the_order_of_one_layer_at_a_time(seed: int, scheme: Scheme) -> None:
    rng = np.random.default_rng(seed)
    model = network(rng)
    samples = [{"x": rng.normal(size=(1, 8, 10, 10)).astype(np.float32)} for _ in range(16)]
    quantizer = OnnxQuantizer(model, scheme, threads=1)
    kernels = quantizer.kernels(elementwise=False)
    found = quantizer.ranges(kernels, lambda: iter(samples), lambda: None)
    plan = Plan(scheme, frozenset(kernels), {name: item.whole() for name, item in found.items()})
    fidelity = Fidelity(quantizer.model, samples, threads=1, softmax_axes=[None])
    propagated = list(quantizer.block_noises(plan, {}, fidelity, lambda: False))
    parts = [item.block for item in propagated]
    measured = list(measure_blocks(quantizer.writer({}), plan, parts, fidelity, lambda: False))
    ratios = [one.noise / other.noise for one, other in zip(propagated, measured, strict=True) if other.noise]
    assert correlate_ranks([one.noise for one in propagated], [one.noise for one in measured]) > 0.9
    assert 0.5 < np.median(ratios) < 2


def test_propagated_noises_of_weights_have_the_order_of_one_layer_at_a_time() -> None:
    rng = np.random.default_rng(3)
    model = network(rng)
    samples = [{"x": rng.normal(size=(1, 8, 10, 10)).astype(np.float32)} for _ in range(8)]
    quantizer = OnnxQuantizer(model, ASYMMETRIC, threads=1)
    fidelity = Fidelity(quantizer.model, samples, threads=1, softmax_axes=[None])
    layers = quantizer.int8_layers()
    assert FLOAT16_WEIGHTS in quantizer.labels
    propagated = [cost.noise for cost in quantizer.weight_costs(layers, fidelity, lambda: False)]
    measured = [cost.noise for cost in measure_weights(quantizer.build, layers, fidelity, lambda: False)]
    assert correlate_ranks(propagated, measured) > 0.9


def test_propagated_noise_of_tables_is_that_of_one_layer_at_a_time() -> None:
    rng = np.random.default_rng(8)
    weights = {"rows": RNG.normal(size=(256, 32)).astype("f4"), "w": random_weight(rng, 32, 16)}
    weights |= {"places": (RNG.normal(size=(1, 128, 32)) * 4).astype("f4")}
    nodes = [
        node("Abs", ["x"], ["positive"]),
        node("Cast", ["positive"], ["codes"], to=onnx.TensorProto.INT64),
        node("Gather", ["rows", "codes"], ["e"]),
        node("Add", ["places", "e"], ["a"]),
        node("MatMul", ["a", "w"], ["y"]),
    ]
    model = model_of(nodes, weights, {"x": (1, 128)})
    samples = [{"x": rng.uniform(0, 255, (1, 128)).astype(np.float32)} for _ in range(8)]
    quantizer = OnnxQuantizer(model, ASYMMETRIC, threads=1)
    fidelity = Fidelity(quantizer.model, samples, threads=1, softmax_axes=[None])
    layers = quantizer.int8_layers()
    assert set(layers) == {"e", "a", "y"}
    propagated = [cost.noise for cost in quantizer.weight_costs(layers, fidelity, lambda: False)]
    measured = [cost.noise for cost in measure_weights(quantizer.build, layers, fidelity, lambda: False)]
    assert propagated == pytest.approx(measured, rel=0.7)


def test_graph_whose_backward_pass_fails_is_measured_one_layer_at_a_time() -> None:
    """The shape of the result depends on the values, so a change of the input cannot be compared with it."""
    rng = np.random.default_rng(4)
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Greater", ["h", "zero"], ["over"]),
        node("Compress", ["h", "flat"], ["y"]),
    ]
    nodes.insert(2, node("Reshape", ["over", "all"], ["flat"]))
    weights = {"w": random_weight(rng, 16, 8), "zero": np.float32(0), "all": ints(-1)}
    model = model_of(nodes, weights, {"x": (3, 16)})
    samples = [{"x": rng.normal(size=(3, 16)).astype(np.float32)} for _ in range(4)]
    quantizer = OnnxQuantizer(model, ASYMMETRIC, threads=1)
    found = quantizer.ranges(("h",), lambda: iter(samples), lambda: None)
    plan = Plan(ASYMMETRIC, frozenset({"h"}), {name: item.whole() for name, item in found.items()})
    fidelity = Fidelity(OnnxModel(model), samples, threads=1, softmax_axes=[None])
    (noise,) = quantizer.block_noises(plan, {}, fidelity, lambda: False)
    assert noise.block == ("h",)
    assert 0 < noise.noise <= 1


@pytest.mark.parametrize("error", [BackendError("refused"), KeyError("y"), ValueError("a rank")])
def test_graph_that_no_rule_fits_is_measured_one_layer_at_a_time(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> list[float]:
        raise error

    rng = np.random.default_rng(4)
    model = model_of([node("MatMul", ["x", "w"], ["y"])], {"w": random_weight(rng, 16, 8)}, {"x": (3, 16)})
    samples = [{"x": rng.normal(size=(3, 16)).astype(np.float32)} for _ in range(4)]
    quantizer = OnnxQuantizer(model, ASYMMETRIC, threads=1)
    fidelity = Fidelity(OnnxModel(model), samples, threads=1, softmax_axes=[None])
    monkeypatch.setattr("edgekit_toolkit.quantize.onnx.quantizer.propagate", fail)
    (cost,) = quantizer.weight_costs(("y",), fidelity, lambda: False)
    assert [cost] == list(measure_weights(quantizer.build, ("y",), fidelity, lambda: False))


def test_outputs_whose_moves_the_engine_refuses_have_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BackendError("refused")

    model = model_of(
        [node("Abs", ["x"], ["a"]), node("Concat", ["a", "x"], ["y"], axis=0)], {}, {"x": (2, 3)}
    )
    feeds = {"x": np.ones((2, 3), np.float32)}
    assert output_parts(model, feeds, threads=1)[0] is not None
    monkeypatch.setattr("edgekit_toolkit.quantize.onnx.output_parts.run_session", refuse)
    assert output_parts(model, feeds, threads=1) == [None]
