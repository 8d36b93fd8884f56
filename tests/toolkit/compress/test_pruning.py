"""Pruning: how many multiply-adds go, what it costs, and where it leaves a network alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from tests.toolkit.small_models import assert_valid, model_of, node, random_weight

from edgekit_toolkit.compress import pruning
from edgekit_toolkit.costs.onnx_operators import node_costs
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.models.ort_session import run_session, session_for
from edgekit_toolkit.onnx_graph.channels import slice_channels
from edgekit_toolkit.passes.dead_channels import SlicedModel
from edgekit_toolkit.passes.optimiser import optimise
from edgekit_toolkit.quantize.sensitivity import Fidelity
from edgekit_toolkit.samples.generated import Feeds

TINY = Path(__file__).resolve().parents[3] / "models" / "tiny"


class Trained(NamedTuple):
    """A network with its samples."""

    model: onnx.ModelProto
    samples: list[Feeds]
    images: NDArray[np.float32]
    labels: NDArray[np.int64]


@pytest.fixture(scope="module")
def trained() -> Trained:
    with np.load(TINY / "mnist5k_dscnn.calib.npz") as data:
        samples = [{"image": image[np.newaxis]} for image in data["image"][:64]]
    model = optimise(onnx.load(TINY / "mnist5k_dscnn.onnx"), batch=None, feeds=samples[:1]).model
    with np.load(TINY / "mnist5k_dscnn.eval.npz") as data:
        images, labels = data["image"], data["y"]
    return Trained(onnx.shape_inference.infer_shapes(model), samples, images, labels)


@pytest.fixture(scope="module")
def pruned(trained: Trained) -> list[SlicedModel]:
    return prune(trained.model, trained.samples, shares=[0.1, 0.25], multiple=8)


def prune(
    model: onnx.ModelProto, samples: Sequence[Feeds], *, shares: Sequence[float], multiple: int
) -> list[SlicedModel]:
    fidelity = Fidelity(OnnxModel(model), samples[:16], threads=1, softmax_axes=[None])
    return pruning.prune(
        model,
        samples,
        shares=shares,
        multiple=multiple,
        threads=1,
        measure_noise=lambda variant: fidelity.noise(OnnxModel(variant)),
    )


def macs(model: onnx.ModelProto) -> int:
    return sum(cost.macs for cost in node_costs(model, {"N": 1, "n": 1}))


def accuracy(model: onnx.ModelProto, trained: Trained) -> float:
    (logits,) = run_session(session_for(model, threads=1), {"image": trained.images})
    return float((logits.argmax(axis=1) == trained.labels).mean())


def residual_network(rng: np.random.Generator) -> onnx.ModelProto:
    """A stem of 16 channels and two residual blocks of 24 inside; all weights are random."""
    nodes = [node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]), node("Relu", ["c"], ["r0"])]
    weights = {"w": random_weight(rng, 16, 3, 3, 3), "b": random_weight(rng, 16)}
    for block in range(2):
        first, second, total = f"f{block}", f"s{block}", f"t{block}"
        nodes += [
            node("Conv", [f"r{block}", f"w{first}", f"b{first}"], [first], pads=[1, 1, 1, 1]),
            node("Relu", [first], [f"{first}r"]),
            node("Conv", [f"{first}r", f"w{second}", f"b{second}"], [second]),
            node("Add", [f"r{block}", second], [total]),
            node("Relu", [total], [f"r{block + 1}"]),
        ]
        weights |= {f"w{first}": random_weight(rng, 24, 16, 3, 3), f"b{first}": random_weight(rng, 24)}
        weights |= {f"w{second}": random_weight(rng, 16, 24, 1, 1), f"b{second}": random_weight(rng, 16)}
    nodes.append(node("Conv", ["r2", "v", "vb"], ["y"]))
    weights |= {"v": random_weight(rng, 4, 16, 1, 1), "vb": random_weight(rng, 4)}
    return model_of(nodes, weights, {"x": ["n", 3, 12, 12]})


def feeds(count: int) -> list[Feeds]:
    rng = np.random.default_rng(1)
    return [{"x": rng.normal(size=(1, 3, 12, 12)).astype(np.float32)} for _ in range(count)]


def noise(model: onnx.ModelProto, variant: onnx.ModelProto, samples: Sequence[Feeds]) -> float:
    outputs = []
    for proto in (model, variant):
        session = session_for(proto, threads=1)
        outputs.append(np.concatenate([run_session(session, sample)[0] for sample in samples]))
    return float(((outputs[1] - outputs[0]) ** 2).sum() / (outputs[0] ** 2).sum())


def test_pruned_models_have_the_shares_of_multiply_adds(trained: Trained, pruned: list[SlicedModel]) -> None:
    total = macs(trained.model)
    assert len(pruned) == 2
    for share, result in zip([0.1, 0.25], pruned, strict=True):
        assert_valid(result.model)
        assert macs(result.model) <= (1 - share) * total
        assert all(len(stays) % 8 == 0 for stays in result.channels.values())


def test_a_quarter_of_the_work_costs_at_most_a_point(trained: Trained, pruned: list[SlicedModel]) -> None:
    assert accuracy(pruned[1].model, trained) >= accuracy(trained.model, trained) - 0.01


def test_repair_takes_most_of_the_noise_away(trained: Trained, pruned: list[SlicedModel]) -> None:
    sliced = slice_channels(trained.model, pruned[1].channels)
    plain, repaired = (noise(trained.model, model, trained.samples) for model in (sliced, pruned[1].model))
    assert repaired < plain / 4


def test_pruned_models_differ_from_slices_in_weights_alone(
    trained: Trained, pruned: list[SlicedModel]
) -> None:
    sliced, model = slice_channels(trained.model, pruned[0].channels), pruned[0].model
    assert [(tensor.name, tuple(tensor.dims)) for tensor in sliced.graph.initializer] == [
        (tensor.name, tuple(tensor.dims)) for tensor in model.graph.initializer
    ]
    assert sliced.graph.node == model.graph.node


def test_pruning_is_repeatable(trained: Trained, pruned: list[SlicedModel]) -> None:
    again = prune(trained.model, trained.samples, shares=[0.1], multiple=8)
    assert again[0] == pruned[0]


def test_channels_of_a_residual_network_go_inside_blocks_and_around_them() -> None:
    model = residual_network(np.random.default_rng(0))
    (result,) = prune(model, feeds(12), shares=[0.65], multiple=4)
    assert_valid(result.model)
    assert set(result.channels) == {"c", "f0", "f1"}
    assert macs(result.model) <= 0.35 * macs(model)


def test_channels_of_both_branches_of_a_concat_go_and_their_reader_is_fitted() -> None:
    rng = np.random.default_rng(5)
    model = model_of(
        [
            node("Conv", ["x", "w0", "b0"], ["c0"]),
            node("Relu", ["c0"], ["r0"]),
            node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1]),
            node("Relu", ["c1"], ["r1"]),
            node("Concat", ["r0", "r1"], ["j"], axis=1),
            node("Conv", ["j", "v", "bv"], ["y"]),
        ],
        {
            "w0": random_weight(rng, 16, 4, 1, 1),
            "b0": random_weight(rng, 16),
            "w1": random_weight(rng, 24, 4, 3, 3),
            "b1": random_weight(rng, 24),
            "v": random_weight(rng, 8, 40, 1, 1),
            "bv": random_weight(rng, 8),
        },
        {"x": [1, 4, 10, 10]},
    )
    samples = [{"x": rng.normal(size=(1, 4, 10, 10)).astype(np.float32)} for _ in range(24)]
    (sliced,) = prune(model, samples, shares=[0.4], multiple=2)
    assert len(sliced.channels) == 2
    assert noise(model, sliced.model, samples) < noise(model, slice_channels(model, sliced.channels), samples)


def test_channels_of_no_use_cost_nothing() -> None:
    model = residual_network(np.random.default_rng(0))
    for tensor in model.graph.initializer:
        if tensor.name in {"wf0", "bf0"}:  # twice the same 12 channels
            value = onnx.numpy_helper.to_array(tensor).copy()
            value[12:] = value[:12]
            tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
    (result,) = prune(model, feeds(12), shares=[0.15], multiple=1)
    assert noise(model, result.model, feeds(4)) < 1e-3


def test_too_few_samples_leave_all_channels() -> None:
    nodes = [
        node("Gemm", ["x", "w", "b"], ["c"], transB=1),
        node("Relu", ["c"], ["d"]),
        node("Gemm", ["d", "v", "vb"], ["y"], transB=1),
    ]
    rng = np.random.default_rng(0)
    weights = {"w": random_weight(rng, 32, 10), "b": random_weight(rng, 32)}
    weights |= {"v": random_weight(rng, 4, 32), "vb": random_weight(rng, 4)}
    model = model_of(nodes, weights, {"x": ["n", 10]})
    samples = [{"x": rng.normal(size=(1, 10)).astype(np.float32)} for _ in range(100)]
    assert prune(model, samples[:40], shares=[0.25], multiple=8) == []
    assert len(prune(model, samples, shares=[0.25], multiple=8)) == 1


def test_shares_that_cannot_be_saved_have_no_model(trained: Trained) -> None:
    assert prune(trained.model, trained.samples, shares=[0.999], multiple=8) == []


def test_shares_that_one_step_saves_have_one_model(trained: Trained) -> None:
    results = prune(trained.model, trained.samples, shares=[0.01, 0.02], multiple=8)
    assert len(results) == 1


def test_layers_with_infinite_weights_stay() -> None:
    model = residual_network(np.random.default_rng(0))
    for tensor in model.graph.initializer:
        if tensor.name == "wf1":
            value = onnx.numpy_helper.to_array(tensor).copy()
            value[0, 0, 0, 0] = np.inf
            tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
    with np.errstate(invalid="ignore"):
        results = prune(model, feeds(12), shares=[0.05], multiple=4)
    assert all(set(result.channels) == {"f0"} for result in results)
