import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import onnx
import pytest
from tests.toolkit.cases import cases
from tests.toolkit.small_models import Array, model_of, node, random_weight

from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.index import GraphIndex
from edgekit_toolkit.quantize.onnx.qdq import write_qdq
from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
from edgekit_toolkit.quantize.plan import Plan, kernel_names, operator_nodes
from edgekit_toolkit.quantize.precise import blocks
from edgekit_toolkit.quantize.ranges import collect
from edgekit_toolkit.quantize.scheme import ASYMMETRIC, SYMMETRIC, Scheme
from edgekit_toolkit.quantize.sensitivity import (
    BlockNoise,
    Fidelity,
    MixedPlan,
    decibel,
    measure_blocks,
    mixed_plans,
)
from edgekit_toolkit.samples.generated import Feeds

pytestmark = pytest.mark.int8_products


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(23)


def onnx_fidelity(model: onnx.ModelProto, samples: Sequence[Feeds], threads: int) -> Fidelity:
    axes = OnnxQuantizer(model, ASYMMETRIC, threads=threads).softmax_axes()
    return Fidelity(OnnxModel(model), samples, threads=threads, softmax_axes=axes)


def written(model: onnx.ModelProto, plan: Plan) -> OnnxModel:
    return OnnxModel(write_qdq(model, plan))


def never() -> bool:
    return False


def outlier_network(rng: np.random.Generator, bad: Sequence[int] = (1,), layers: int = 4) -> onnx.ModelProto:
    """Residual layers; a bad one makes a channel a thousand times larger, which its reader takes back."""
    weights: dict[str, Array] = {}
    nodes = []
    name = "x"
    for number in range(layers):
        inner, outer = random_weight(rng, 8, 8, 1, 1), random_weight(rng, 8, 8, 1, 1)
        if number in bad:
            inner[0] *= 1000
            outer[:, 0] /= 1000
        weights |= {f"i{number}": inner, f"o{number}": outer}
        nodes += [
            node("Conv", [name, f"i{number}"], [f"c{number}"]),
            node("Softsign" if number not in bad else "Identity", [f"c{number}"], [f"m{number}"]),
            node("Conv", [f"m{number}", f"o{number}"], [f"d{number}"]),
            node("Add", [name, f"d{number}"], [f"a{number}"]),
        ]
        name = f"a{number}"
    nodes.append(node("Relu", [name], ["y"]))
    return model_of(nodes, weights, {"x": (1, 8, 6, 6)})


def images(rng: np.random.Generator, count: int = 4) -> list[Feeds]:
    return [{"x": rng.normal(size=(1, 8, 6, 6)).astype(np.float32)} for _ in range(count)]


def whole_plan(model: onnx.ModelProto, samples: Sequence[Feeds], scheme: Scheme = SYMMETRIC) -> Plan:
    names = sorted({name for item in model.graph.node for name in item.output} | {"x"})
    ranges = collect(model, names, lambda: iter(samples), threads=1)
    kernels = frozenset(kernel_names(model, scheme, elementwise=False))
    return Plan(scheme, kernels, {name: item.whole() for name, item in ranges.items()})


def measured(
    model: onnx.ModelProto,
    plan: Plan,
    fidelity: Fidelity,
    expired: Callable[[], bool] = never,
) -> list[BlockNoise]:
    parts = blocks(operator_nodes(GraphIndex(model.graph)), plan.kernels)
    return list(measure_blocks(partial(written, model), plan, parts, fidelity, expired))


def released(
    rng: np.random.Generator, bad: Sequence[int] = (1,), max_blocks: int = 8, scheme: Scheme = SYMMETRIC
) -> tuple[list[MixedPlan], float]:
    """Steps of the search on an outlier network, and the noise before the first."""
    model, samples = outlier_network(rng, bad), images(rng)
    plan = whole_plan(model, samples, scheme)
    fidelity = onnx_fidelity(model, samples, threads=1)
    noises = measured(model, plan, fidelity)
    steps = mixed_plans(partial(written, model), plan, noises, fidelity, max_blocks=max_blocks, expired=never)
    return list(steps), fidelity.noise(written(model, plan))


def test_block_with_an_outlier_has_the_largest_noise(rng: np.random.Generator) -> None:
    model, samples = outlier_network(rng), images(rng)
    plan = whole_plan(model, samples)
    noises = measured(model, plan, onnx_fidelity(model, samples, threads=1))
    assert [item.block for item in noises] == [(f"{kind}{number}",) for number in range(4) for kind in "cd"]
    # The reader of the outlier rounds it: its other channels are lost in a step of the largest.
    assert max(noises, key=lambda item: item.noise).block == ("d1",)


def test_block_with_an_outlier_is_the_first_to_be_released(rng: np.random.Generator) -> None:
    steps, before = released(rng)
    assert steps[0].blocks == (("d1",),)
    assert "d1" not in steps[0].plan.kernels
    assert decibel(steps[0].noise) > decibel(before) + 10


def test_block_that_writes_an_outlier_is_released_too_where_outputs_are_rounded(
    rng: np.random.Generator,
) -> None:
    steps, before = released(rng, scheme=ASYMMETRIC)
    assert {block for step in steps[:2] for block in step.blocks} == {("c1",), ("d1",)}
    assert decibel(steps[1].noise) > decibel(before) + 10


def test_each_step_releases_one_more_block_and_has_less_noise(rng: np.random.Generator) -> None:
    steps, before = released(rng, bad=(0, 2))
    assert {step.blocks[-1] for step in steps[:2]} == {("d0",), ("d2",)}
    noises = [before, *(step.noise for step in steps)]
    assert noises == sorted(noises, reverse=True)
    for earlier, later in pairwise(steps):
        assert later.blocks[:-1] == earlier.blocks
        assert later.plan.kernels == earlier.plan.kernels - set(later.blocks[-1])


def test_noise_of_a_step_is_that_of_its_model(rng: np.random.Generator) -> None:
    seed = rng.integers(1000)
    steps, _ = released(np.random.default_rng(seed))
    again = np.random.default_rng(seed)
    model, samples = outlier_network(again), images(again)
    fidelity = onnx_fidelity(model, samples, threads=1)
    assert fidelity.noise(written(model, steps[-1].plan)) == pytest.approx(steps[-1].noise)


def test_no_more_blocks_are_released_than_allowed(rng: np.random.Generator) -> None:
    steps, _ = released(rng, bad=(0, 1, 2, 3), max_blocks=2)
    assert len(steps) == 2


def clock(readings: int) -> Callable[[], bool]:
    """Expires after some readings."""
    left: Iterator[bool] = iter([False] * readings)
    return lambda: next(left, True)


def test_time_that_is_over_stops_measuring_and_releasing(rng: np.random.Generator) -> None:
    model, samples = outlier_network(rng), images(rng)
    plan = whole_plan(model, samples)
    fidelity = onnx_fidelity(model, samples, threads=1)
    assert [item.block for item in measured(model, plan, fidelity, clock(2))] == [("c0",), ("d0",)]
    noises = measured(model, plan, fidelity)
    assert (
        list(mixed_plans(partial(written, model), plan, noises, fidelity, max_blocks=8, expired=clock(0)))
        == []
    )
    assert (
        len(
            list(mixed_plans(partial(written, model), plan, noises, fidelity, max_blocks=8, expired=clock(1)))
        )
        == 1
    )


def test_block_whose_noise_is_infinite_is_released_first(rng: np.random.Generator) -> None:
    model, samples = outlier_network(rng), images(rng)
    plan = whole_plan(model, samples)
    fidelity = onnx_fidelity(model, samples, threads=1)
    noises = [
        replace(item, noise=math.inf) if item.block == ("d1",) else item
        for item in measured(model, plan, fidelity)
    ]
    first = next(mixed_plans(partial(written, model), plan, noises, fidelity, max_blocks=8, expired=never))
    assert first.blocks == (("d1",),)


def test_no_block_is_released_where_none_adds_noise(rng: np.random.Generator) -> None:
    model, samples = outlier_network(rng), images(rng)
    plan = whole_plan(model, samples)
    fidelity = onnx_fidelity(model, samples, threads=1)
    silent = [replace(item, noise=0.0) for item in measured(model, plan, fidelity)]
    assert (
        list(mixed_plans(partial(written, model), plan, silent, fidelity, max_blocks=8, expired=never)) == []
    )


def test_block_is_a_product_with_the_element_wise_kernels_after_it(rng: np.random.Generator) -> None:
    model = outlier_network(rng, layers=2)
    order = ["c0", "d0", "a0", "c1", "d1", "a1"]
    nodes = operator_nodes(GraphIndex(model.graph))
    assert blocks(nodes, order) == [("c0",), ("d0", "a0"), ("c1",), ("d1", "a1")]
    assert blocks(nodes, ["a0", "c1"]) == [("a0",), ("c1",)]
    assert blocks(nodes, []) == []


# Noise.


def scaled(factor: float, operator: str = "Identity", axis: int | None = None) -> onnx.ModelProto:
    """y = operator(factor * x), x [1, 4]."""
    attributes = {} if axis is None else {"axis": axis}
    nodes = [node("Mul", ["x", "k"], ["s"]), node(operator, ["s"], ["y"], **attributes)]
    return model_of(nodes, {"k": np.float32(factor)}, {"x": (1, 4)})


def vectors(*rows: Sequence[float]) -> list[Feeds]:
    return [{"x": np.array([row], np.float32)} for row in rows]


def test_noise_is_the_power_of_the_error_over_that_of_the_output() -> None:
    fidelity = onnx_fidelity(scaled(1), vectors([1, 2, 3, 4], [-1, 0, 0, 5]), threads=1)
    assert fidelity.noise(OnnxModel(scaled(1))) == 0
    assert fidelity.noise(OnnxModel(scaled(1.1))) == pytest.approx(0.01, rel=1e-5)
    assert fidelity.noise(OnnxModel(scaled(0))) == pytest.approx(1)


def test_sample_whose_output_is_zero_does_not_outweigh_the_others() -> None:
    # The first output is all zeros in the reference, and nearly so in the variant.
    fidelity = onnx_fidelity(scaled(1, "Relu"), vectors([-1, -1, -1, -1], [10, 10, 10, 10]), threads=1)
    assert fidelity.noise(OnnxModel(scaled(-0.01, "Relu"))) == pytest.approx(1, rel=1e-3)
    blank = onnx_fidelity(scaled(1, "Relu"), vectors([-1, -1, -1, -1], [1, 1, 1, 1]), threads=1)
    assert blank.noise(OnnxModel(scaled(1, "Identity"))) == pytest.approx(1)


def test_noise_is_the_mean_over_float_outputs() -> None:
    def model(factor: float) -> onnx.ModelProto:
        nodes = [
            node("Mul", ["x", "k"], ["y"]),
            node("Identity", ["x"], ["same"]),
            node("ArgMax", ["x"], ["place"], axis=1),
        ]
        made = model_of(nodes, {"k": np.float32(factor)}, {"x": (1, 4)}, ("y", "same"))
        made.graph.output.append(onnx.helper.make_tensor_value_info("place", onnx.TensorProto.INT64, (1, 1)))
        return made

    fidelity = onnx_fidelity(model(1), vectors([1, 2, 3, 4]), threads=1)
    assert fidelity.noise(OnnxModel(model(1.2))) == pytest.approx(0.04 / 2, rel=1e-5)


def test_output_that_is_not_finite_is_infinite_noise() -> None:
    fidelity = onnx_fidelity(scaled(1, "Sqrt"), vectors([1, 2, 3, 4]), threads=1)
    assert fidelity.noise(OnnxModel(scaled(-1, "Sqrt"))) == math.inf
    assert fidelity.noise(OnnxModel(scaled(math.inf, "Sqrt"))) == math.inf


def test_output_of_another_shape_is_all_error() -> None:
    def positive(factor: float) -> onnx.ModelProto:
        nodes = [
            node("Mul", ["x", "k"], ["s"]),
            node("Greater", ["s", "one"], ["over"]),
            node("Compress", ["x", "flat"], ["y"]),
        ]
        nodes.insert(2, node("Reshape", ["over", "all"], ["flat"]))
        weights = {"k": np.float32(factor), "one": np.float32(1), "all": np.array([-1], np.int64)}
        return model_of(nodes, weights, {"x": (1, 4)})

    fidelity = onnx_fidelity(positive(1), vectors([0.5, 2, 3, 4]), threads=1)
    assert fidelity.noise(OnnxModel(positive(1))) == 0
    assert fidelity.noise(OnnxModel(positive(10))) == pytest.approx(1)


@pytest.mark.parametrize("axis", [1, -1])
def test_noise_of_a_softmax_is_that_of_its_logits(axis: int) -> None:
    # Probabilities near 1 hide an error of a tenth of the logits; as logits up to a constant it shows.
    fidelity = onnx_fidelity(scaled(1, "Softmax", axis), vectors([9, 1, 0, 2]), threads=1)
    assert fidelity.noise(OnnxModel(scaled(1.1, "Softmax", axis))) == pytest.approx(0.01, rel=1e-2)


@cases(("noise", "shown"), [(1.0, 0), (0.01, 20), (0.0, 200), (1e-30, 200), (100.0, -20), (math.inf, -200)])
def test_noise_in_decibel(noise: float, shown: float) -> None:
    assert decibel(noise) == pytest.approx(shown)
