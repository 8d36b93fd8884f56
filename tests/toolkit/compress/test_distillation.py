"""Distillation: what comes back, what is refused, and that the same samples give the same bytes."""

import json
import math
import multiprocessing
import resource
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.toolkit.small_models import assert_valid, model_of, node, random_weight

from edgekit_runtime.errors import DataError, ModelError
from edgekit_toolkit.compress.distillation import BATCH, WORK, Distillation, distil
from edgekit_toolkit.compress.sequential import round_weights
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.models.ort_session import run_session, session_for
from edgekit_toolkit.onnx_graph.index import copy_model
from edgekit_toolkit.pipeline.near_misses import improve_near_misses
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import FLOAT32, Form
from edgekit_toolkit.quantize.search_work import SearchWork
from edgekit_toolkit.samples.generated import Feeds

STEPS = 100


def network(batch: int | str = "n", *, tail: str = "Softmax", outputs: int = 4) -> onnx.ModelProto:
    """Conv -> Relu -> depthwise Conv -> Clip -> mean -> Gemm -> Softmax or another operator."""
    rng = np.random.default_rng(0)
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Relu", ["c"], ["d"]),
        node("Conv", ["d", "dw", "db"], ["e"], group=8, pads=[1, 1, 1, 1]),
        node("Clip", ["e", "low", "high"], ["f"]),
        node("GlobalAveragePool", ["f"], ["g"]),
        node("Flatten", ["g"], ["h"]),
        node("Gemm", ["h", "v", "vb"], ["z"], transB=1),
        node(tail, ["z"], ["y"]),
    ]
    weights = {
        "w": random_weight(rng, 8, 3, 3, 3),
        "b": random_weight(rng, 8),
        "dw": random_weight(rng, 8, 1, 3, 3) * np.float32(4),
        "db": random_weight(rng, 8),
        "low": np.float32(0),
        "high": np.float32(6),
        "v": random_weight(rng, outputs, 8) * np.float32(4),
        "vb": random_weight(rng, outputs),
    }
    return model_of(nodes, weights, {"x": [batch, 3, 8, 8]})


def two_headed(scale: float = 1.0) -> onnx.ModelProto:
    """Return the network with a further output `object` [n, 1] about 1."""
    model = network()
    nodes = [
        node("Gemm", ["h", "o"], ["score"]),
        node("Mul", ["score", "scale"], ["scaled"]),
        node("Add", ["scaled", "one"], ["object"]),
    ]
    weights = {
        "o": random_weight(np.random.default_rng(3), 8, 1) * np.float32(4),
        "scale": np.array(scale, np.float32),
        "one": np.float32(1),
    }
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()
    )
    model.graph.output.append(helper.make_tensor_value_info("object", TensorProto.FLOAT, ["n", 1]))
    return model


def spoil(model: onnx.ModelProto, share: float = 0.3) -> onnx.ModelProto:
    """Return a copy with noise on all weights."""
    rng, result = np.random.default_rng(1), copy_model(model)
    for tensor in result.graph.initializer:
        value = numpy_helper.to_array(tensor)
        if value.ndim and value.dtype == np.float32:
            noise = rng.normal(size=value.shape).astype(np.float32) * value.std() * np.float32(share)
            tensor.CopyFrom(numpy_helper.from_array(value + noise, tensor.name))
    return result


def images(count: int, seed: int = 2) -> list[Feeds]:
    rng = np.random.default_rng(seed)
    return [
        {"x": (rng.normal(size=(1, 3, 8, 8)) * rng.uniform(0.3, 2)).astype(np.float32)} for _ in range(count)
    ]


def noise(
    model: onnx.ModelProto, variant: onnx.ModelProto, samples: Sequence[Feeds], output: str = "y"
) -> float:
    sessions = [session_for(proto, threads=1, optimise=False) for proto in (model, variant)]
    wanted, outputs = (
        np.concatenate([run_session(session, sample, [output])[0] for sample in samples])
        for session in sessions
    )
    return float(((outputs - wanted) ** 2).sum() / ((wanted - wanted.mean()) ** 2).sum())


@pytest.fixture(scope="module")
def distilled() -> Distillation:
    return distil(network(), spoil(network()), images(60), steps=STEPS)


def test_spoilt_weights_come_back(distilled: Distillation) -> None:
    assert distilled.model is not None
    assert_valid(distilled.model)
    before, after = (noise(network(), model, images(30, 3)) for model in (spoil(network()), distilled.model))
    assert after < before / 3


def test_noise_on_held_back_samples_is_stated(distilled: Distillation) -> None:
    assert distilled.noise_after < 0.9 * distilled.noise_before


def test_only_weights_change(distilled: Distillation) -> None:
    assert distilled.model is not None
    student, trained = spoil(network()).graph, distilled.model.graph
    assert trained.node == student.node
    assert [(tensor.name, tensor.dims) for tensor in trained.initializer] == [
        (tensor.name, tensor.dims) for tensor in student.initializer
    ]


def test_training_again_gives_the_same_bytes(distilled: Distillation) -> None:
    assert distil(network(), spoil(network()), images(60), steps=STEPS) == distilled


def measure_training_bytes() -> tuple[int, int]:
    """Return the bytes of a model that takes one sample at once, and those that its training adds."""
    wide = random_weight(np.random.default_rng(0), 1000, 1500)
    nodes = [node("Gemm", ["x", "w"], ["h"], transB=1), node("Reshape", ["h", "shape"], ["y"])]
    teacher, student = (
        model_of(nodes, {"w": scale * wide, "shape": np.array([1, 1000])}, {"x": [1, 1500]})
        for scale in (np.float32(1), np.float32(1.1))
    )
    draw = np.random.default_rng(1)
    samples: list[Feeds] = [{"x": draw.normal(size=(1, 1500)).astype(np.float32)} for _ in range(64)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    distil(teacher, student, samples, steps=2)
    return wide.nbytes, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_gradients_of_single_samples_are_not_kept() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # memory has its peak for a process
        weight_bytes, added_bytes = pool.apply(measure_training_bytes)
    assert added_bytes < BATCH * weight_bytes * 3 / 4


def test_form_of_a_distilled_model_is_made_again_from_its_recipe(distilled: Distillation) -> None:
    """The recipe alone has the trained weights: no samples are there when it is repeated."""
    assert distilled.model is not None
    compression = round_weights(distilled.model, images(60), peak=127, threads=1)
    form = Form(FLOAT32, compression=replace(compression, is_distilled=True))
    again = Form.from_json(json.loads(json.dumps(form.to_json())))
    first, second = (forms.build(network(), item) for item in (form, again))
    assert first == second
    assert second is not None
    spoilt, rounded = (noise(distilled.model, model, images(30, 3)) for model in (spoil(network()), second))
    assert rounded < spoilt / 10


def test_model_that_takes_one_sample_at_a_time_trains_alike(distilled: Distillation) -> None:
    result = distil(network(1), spoil(network(1)), images(60), steps=STEPS)
    assert result.noise_before == pytest.approx(distilled.noise_before, rel=1e-4)
    assert result.noise_after == pytest.approx(distilled.noise_after, rel=0.2)


def test_output_that_is_no_softmax_trains_by_its_own_error() -> None:
    model = network(tail="Sigmoid")
    result = distil(model, spoil(model), images(60), steps=STEPS)
    assert result.model is not None
    assert noise(model, result.model, images(30, 3)) < noise(model, spoil(model), images(30, 3)) / 3


@pytest.mark.parametrize("tail", ["Sigmoid", "Identity"])
def test_output_of_one_value_trains(tail: str) -> None:
    model = network(tail=tail, outputs=1)
    result = distil(model, spoil(model), images(60), steps=STEPS)
    assert result.model is not None
    assert noise(model, result.model, images(30, 3)) < noise(model, spoil(model), images(30, 3)) / 3


def test_output_of_one_value_counts_beside_others() -> None:
    model = two_headed()
    student = spoil(model, 0.1)
    result = distil(model, student, images(60), steps=STEPS)
    assert result.model is not None
    for output in ("y", "object"):
        before, after = (noise(model, item, images(30, 3), output) for item in (student, result.model))
        assert after < before / 3


def test_output_that_never_changes_does_not_count() -> None:
    """It changes by rounding alone, which would outweigh all else."""
    model = two_headed(scale=1e-7)
    student = spoil(model)
    result = distil(model, student, images(60), steps=STEPS)
    assert result.model is not None
    assert noise(model, result.model, images(30, 3)) < noise(model, student, images(30, 3)) / 3


@pytest.mark.parametrize(("tail", "outputs"), [("Softmax", 4), ("Identity", 1)])
def test_student_equal_to_its_teacher_stays(tail: str, outputs: int) -> None:
    model = network(tail=tail, outputs=outputs)
    result = distil(model, model, images(60), steps=STEPS)
    assert result.model is None
    assert result.noise_before < 1e-9


def test_gain_that_held_back_samples_do_not_see_is_refused() -> None:
    """The samples are noise, as are the weights of a layer as wide as they are many: nothing generalises."""
    rng = np.random.default_rng(4)
    weights = {"w": random_weight(rng, 1024, 64), "v": random_weight(rng, 64, 4)}
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Tanh", ["h"], ["t"]), node("MatMul", ["t", "v"], ["y"])]
    model = model_of(nodes, weights, {"x": ["n", 1024]})
    samples = [{"x": rng.normal(size=(1, 1024)).astype(np.float32)} for _ in range(50)]
    result = distil(model, spoil(model, 0.1), samples, steps=STEPS)
    assert result.model is None


def test_samples_without_numbers_train_nothing() -> None:
    samples = images(60)
    samples[0] = {"x": np.full_like(samples[0]["x"], np.nan)}
    assert distil(network(), spoil(network()), samples, steps=STEPS).model is None


def test_weight_of_two_layers_trains_for_both() -> None:
    rng = np.random.default_rng(5)
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Tanh", ["h"], ["t"]), node("MatMul", ["t", "w"], ["y"])]
    model = model_of(nodes, {"w": random_weight(rng, 6, 6)}, {"x": ["n", 6]})
    samples = [{"x": rng.normal(size=(1, 6)).astype(np.float32)} for _ in range(60)]
    student = spoil(model, 0.05)
    result = distil(model, student, samples, steps=STEPS)
    assert result.model is not None
    assert noise(model, result.model, samples) < noise(model, student, samples) / 10


def test_samples_of_integers_train_without_mixes() -> None:
    rng = np.random.default_rng(6)
    graph = helper.make_graph(
        [node("Gather", ["rows", "x"], ["e"]), node("MatMul", ["e", "w"], ["y"])],
        "lookup",
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["n", 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            numpy_helper.from_array(random_weight(rng, *shape), name)
            for name, shape in (("rows", (10, 6)), ("w", (6, 3)))
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    samples = [{"x": rng.integers(10, size=(1, 5))} for _ in range(60)]
    student = spoil(model, 0.05)
    student.graph.initializer[0].CopyFrom(model.graph.initializer[0])  # no layer, so it does not train
    result = distil(model, student, samples, steps=STEPS)
    assert result.model is not None
    assert noise(model, result.model, samples) < noise(model, student, samples) / 10


@pytest.mark.parametrize("tail", ["Softplus", "Softsign"])
def test_operator_without_exact_gradient_is_refused(tail: str) -> None:
    model = network(tail=tail)
    with pytest.raises(ModelError, match=tail):
        distil(model, spoil(model), images(60), steps=STEPS)


def test_detour_through_half_precision_is_refused() -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Cast", ["h"], ["half"], to=TensorProto.FLOAT16),
        node("Cast", ["half"], ["y"], to=TensorProto.FLOAT),
    ]
    model = model_of(nodes, {"w": random_weight(np.random.default_rng(0), 6, 3)}, {"x": ["n", 6]})
    samples = [{"x": np.full((1, 6), number, np.float32)} for number in range(50)]
    with pytest.raises(ModelError, match="Cast"):
        distil(model, spoil(model), samples, steps=STEPS)


def test_few_samples_are_refused() -> None:
    with pytest.raises(DataError, match="too few"):
        distil(network(), spoil(network()), images(49), steps=STEPS)


class Misses:
    """Distils with some drops as if they had been measured.

    Attributes:
        totals: steps that were announced.
        task: what distillation reads of a `CompressionTask`.
    """

    def __init__(
        self, floats: onnx.ModelProto, drops: Sequence[float], *, limit_s: float = 60.0, max_drop: float = 1.0
    ) -> None:
        self.totals: set[int] = set()
        self.task: Any = SimpleNamespace(
            floats=floats,
            work=SearchWork(OnnxModel(floats), {"n": 1}, limit_s),
            max_drop=max_drop,
            measure_drops=lambda _models: drops,
            progress=lambda _text, _done, total: self.totals.add(total or 0),
        )

    def improve(
        self, pruned: Sequence[onnx.ModelProto], samples: Sequence[Feeds]
    ) -> tuple[list[onnx.ModelProto | None], list[str]]:
        return improve_near_misses(pruned, samples, self.task)


def test_only_near_misses_are_distilled() -> None:
    misses = Misses(network(), [0.9, 1.1, 3.1])
    better, reasons = misses.improve([spoil(network())] * 3, images(60))
    assert [model is not None for model in better] == [False, True, False]
    assert reasons == []


def test_result_that_held_back_samples_refuse_is_not_used() -> None:
    better, reasons = Misses(network(), [2.0]).improve([network()], images(60))
    assert better == [None]
    assert "no gain on held-back samples" in reasons[0]


def test_operator_without_exact_gradient_is_a_reason() -> None:
    model = network(tail="Softplus")
    better, reasons = Misses(model, [2.0]).improve([spoil(model)], images(60))
    assert better == [None]
    assert "Softplus has no exact gradient" in reasons[0]


@pytest.mark.parametrize("spent_s", [0.0, 1.0])
def test_short_search_distils_nothing(spent_s: float) -> None:
    misses = Misses(network(), [2.0], limit_s=1e-3)
    misses.task.work.count(seconds=spent_s)
    better, reasons = misses.improve([spoil(network())], images(60))
    assert better == [None]
    expected = "too little of the search's work is left for 100 steps: raise --search-seconds"
    assert reasons == [f"distillation of a pruned form, drop 2.0 points: {expected}"]
    assert misses.totals == set()


def test_near_misses_share_half_the_work_of_the_search() -> None:
    model = network()
    limit_s = SearchWork(OnnxModel(model), {"n": 1}, 0.0).inference_s * 300_000
    for count in (1, 2):
        misses = Misses(model, [2.0] * count, limit_s=limit_s)
        misses.improve([model] * count, images(60))
        assert 0.48 * limit_s < misses.task.work.spent_s <= 0.5 * limit_s


def test_runs_of_the_float_model_on_samples_and_mixes_are_counted() -> None:
    model = network()
    inference_s = SearchWork(OnnxModel(model), {"n": 1}, 0.0).inference_s
    steps: list[int] = []
    for count in (50, 250):
        misses = Misses(model, [2.0], limit_s=inference_s * 120_000)
        misses.improve([model], images(count))
        steps += misses.totals
    runs_of_further_samples = 200 * 33
    assert steps[0] - steps[1] == pytest.approx(runs_of_further_samples / (BATCH * WORK), abs=1)


def test_without_a_limit_on_the_drop_nothing_is_distilled() -> None:
    misses = Misses(network(), [2.0], max_drop=math.inf)
    assert misses.improve([spoil(network())], images(60)) == ([None], [])
