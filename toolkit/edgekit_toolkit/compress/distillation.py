"""Trains a pruned model to reproduce the float model's outputs, without labels and without torch.

One ONNX graph computes the outputs of the student, and the gradients of its error for all weights and biases
(`onnx_graph.adjoint`). onnxruntime runs the graph, and this module updates the weights with Adam. The error
is the power of the output differences, divided by the variance of the float model's outputs over the samples.
For a softmax, the logits are compared, after their mean in each sample is subtracted, because a softmax does
not depend on this mean.

The inputs are samples and mixtures of two samples, which reduce overfitting to few samples. Some of the
samples are held back. They decide when training stops and whether its result is used, because training can
make a good fit worse.

All random numbers are seeded, and one thread computes sums, so the same inputs give the same bytes.

Source: G. Hinton et al., Distilling the knowledge in a neural network, 2015; T. Kim et al., Comparing
Kullback-Leibler divergence and mean squared error loss in knowledge distillation, 2021, for squared errors of
logits; H. Zhang et al., mixup, 2018.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgekit_runtime.errors import BackendError, DataError, ModelError
from edgekit_toolkit.compress.sequential import MAX_COLUMNS
from edgekit_toolkit.models.ort_session import measure_shapes, run_session, session_for
from edgekit_toolkit.onnx_graph.adjoint import Adjoint, copy_for_adjoint
from edgekit_toolkit.onnx_graph.index import GraphIndex, attribute, copy_model, reads, with_outputs
from edgekit_toolkit.onnx_graph.layers import find_layers
from edgekit_toolkit.samples.generated import Feeds

BATCH: Final = 32
"""The number of samples in a training step."""
WORK: Final = 14
"""The work of a training step per sample, in inferences, which is 13 to 14 for DS-CNN and ResNet8. The model
runs forward once and backward twice, with weights that the engine has not laid out in advance."""

Array = NDArray[np.float32]
Weights = Mapping[str, Array]

_HELD_BACK: Final = 0.2
# Of 28 samples of a person detector 6 were held back: their noise halved while its score fell.
_MIN_SAMPLES: Final = 50
_MIXES: Final = 32  # mixes of each training sample
SAMPLE_RUNS: Final = 1 + _MIXES
"""The maximum number of inferences per sample beside the training steps. The float model runs on a training
sample and its mixes. A sample that is held back has no mixes, and the student runs on it three times."""
_RATE: Final = 2e-3  # of a step, as a share of the weights' root mean square
_LEAST_SIZE: Final = 1e-3  # of weights, for biases near 0
_WARM_UP: Final = 0.1  # of the steps: the first ones of Adam are as long as the rate allows, in every weight
_MEMORY: Final = (0.9, 0.999)  # of Adam, for gradients and their squares
_TINY: Final = 1e-12
# Of stored outputs, and of activations with their adjoints and what a rule copies of them.
_MAX_BYTES: Final = 1 << 29
_COPIES: Final = 3
# Tensors of these types have no gradient.
_COUNTED: Final = frozenset({TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64, TensorProto.UINT8})
_LEAST_POWER: Final = 1e-10  # of an output, as a share of its mean square. Rounding makes less
_MIN_GAIN: Final = 0.1  # of the noise, for a result to be of use


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """The result of a training.

    Attributes:
        model: The trained student, or None if it is not better on held-back samples.
        noise_before: The noise of the student on held-back samples, as a share of the outputs' power.
        noise_after: The noise of the trained student, measured in the same way.
    """

    model: onnx.ModelProto | None
    noise_before: float
    noise_after: float


def distil(
    teacher: onnx.ModelProto,
    student: onnx.ModelProto,
    samples: Sequence[Feeds],
    *,
    steps: int,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Distillation:
    """Train a copy of the student on the teacher's outputs.

    Training stops halfway if the student is not better on held-back samples by then.

    Args:
        teacher: The float model.
        student: A float model with the same inputs and outputs. The weights and biases of its layers are
            trained.
        samples: The inputs. Samples with other shapes than the first sample are ignored.
        steps: The maximum number of steps, which use `BATCH` samples each.
        progress: Called with the number of completed steps and the maximum number of steps.

    Raises:
        ModelError: An operator has no exact gradient, the student has no layers, or its activations are too
            large.
        DataError: There are too few samples.
        BackendError: onnxruntime cannot run the training graph.
    """
    rng = np.random.default_rng(0)
    held_back, own = _hold_back(samples, rng)
    targets = _Targets(teacher, own)
    room = _MAX_BYTES // max(sum(value.nbytes for value in targets.outputs[0]), 1)
    mixes = _Mixes(own, min(_MIXES * len(own), room), rng)
    target_outputs = targets.outputs + [targets.run(mixes.feeds(i)) for i in range(len(own), mixes.count)]
    wanted_back = [targets.run(feeds) for feeds in held_back]
    network = _Network(student, targets, own)

    def noise(weights: Weights) -> float:
        outputs = [network.run(weights, feeds) for feeds in held_back]
        errors = [targets.error(*pair) for pair in zip(outputs, wanted_back, strict=True)]
        return float(np.mean(errors))

    adam = _Adam(network.weights)
    weights: Weights = network.weights
    noise_before = noise_after = noise(weights)
    model = None
    rounds = math.ceil(steps * BATCH / mixes.count)
    draws = np.concatenate([rng.permutation(mixes.count) for _ in range(rounds)])
    for step in range(steps):
        batch = draws[step * BATCH : (step + 1) * BATCH]
        parts = (
            network.gradients(weights, [mixes.feeds(i) for i in part], [target_outputs[i] for i in part])
            for part in np.split(batch, BATCH // network.batch)
        )
        gradients = functools.reduce(_add, parts)  # each as it comes: all of them are as large as 32 models
        weights = adam.move(weights, gradients, _find_rate(step, steps))
        progress(step + 1, steps)
        if step + 1 in {steps // 2, steps}:  # most of a gain shows in the first half
            noise_after = noise(weights)
            if not noise_after < (1 - _MIN_GAIN) * noise_before:  # nor is NaN, nor 0 of 0
                break
    else:
        model = _with_weights(student, weights)
    return Distillation(model=model, noise_before=noise_before, noise_after=noise_after)


def _hold_back(samples: Sequence[Feeds], rng: np.random.Generator) -> tuple[list[Feeds], list[Feeds]]:
    """Split the samples with the shapes of the first: held back, and the others."""
    alike = [feeds for feeds in samples if _shapes(feeds) == _shapes(samples[0])]
    if len(alike) < _MIN_SAMPLES:
        raise DataError(f"{len(alike)} samples are too few, at least {_MIN_SAMPLES} are needed")
    shuffled = [alike[index] for index in rng.permutation(len(alike))]
    count = math.ceil(len(alike) * _HELD_BACK)
    return shuffled[:count], shuffled[count:]


def _find_rate(step: int, steps: int) -> float:
    """Return the rate of a step: it rises in a warm-up, then falls to 0 along a cosine."""
    return _RATE * min(1, (step + 1) / (_WARM_UP * steps)) * (1 + math.cos(math.pi * step / steps)) / 2


def _shapes(feeds: Feeds) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in feeds.items()}


def _add(first: Weights, second: Weights) -> Weights:
    return {name: value + second[name] for name, value in first.items()}


def _stack(rows: Sequence[Feeds]) -> Feeds:
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def _with_weights(model: onnx.ModelProto, weights: Weights) -> onnx.ModelProto:
    result = copy_model(model)
    for tensor in result.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
    return result


class _Mixes:
    """Samples and, of floats, mixes of two of them.

    Attributes:
        count: of both.
    """

    def __init__(self, samples: Sequence[Feeds], added: int, rng: np.random.Generator) -> None:
        self._samples = samples
        added *= all(value.dtype == np.float32 for value in samples[0].values())
        self.count = len(samples) + added
        self._pairs = rng.integers(len(samples), size=(added, 2))
        self._shares = rng.uniform(0, 0.5, added).astype(np.float32)

    def feeds(self, number: int) -> Feeds:
        if number < len(self._samples):
            return self._samples[number]
        mix = number - len(self._samples)
        first, second = (self._samples[index] for index in self._pairs[mix])
        return {name: value + self._shares[mix] * (second[name] - value) for name, value in first.items()}


class _Targets:
    """The target outputs of a float model, and the weight of their errors.

    Attributes:
        axes: axis of the softmax by each tensor that is compared: a float output, or the logits of a softmax.
        outputs: values of these tensors for each sample.
        scales: turn a sum of squared errors of each tensor into a share of its power, over all tensors.
    """

    def __init__(self, teacher: onnx.ModelProto, samples: Sequence[Feeds]) -> None:
        producers = GraphIndex(teacher.graph).producers
        self.axes: dict[str, int | None] = {}
        for value in teacher.graph.output:
            if value.type.tensor_type.elem_type == TensorProto.FLOAT and value.name in producers:
                node = producers[value.name]
                is_softmax = node.op_type == "Softmax"
                name = node.input[0] if is_softmax else value.name
                self.axes[name] = int(attribute(node, "axis", -1)) if is_softmax else None
        self._session = session_for(with_outputs(teacher, self.axes), threads=1)
        self.outputs = [self.run(feeds) for feeds in samples]
        powers = [
            _power(rows, is_centred=axis is not None)
            for rows, axis in zip(zip(*self.outputs, strict=True), self.axes.values(), strict=True)
        ]
        # An output that never changes has no power, and does not count.
        self.scales = [1 / (power * len(powers)) if power > 0 else 0.0 for power in powers]

    def run(self, feeds: Feeds) -> list[Array]:
        return self.centre(run_session(self._session, feeds))

    def centre(self, outputs: Sequence[Array]) -> list[Array]:
        """Return outputs without the mean of logits, which a softmax does not see."""
        return [
            value if axis is None else value - value.mean(axis=axis, keepdims=True)
            for value, axis in zip(outputs, self.axes.values(), strict=True)
        ]

    def error(self, outputs: Sequence[Array], target_outputs: Sequence[Array]) -> float:
        """Return the noise of the outputs of a sample, as a share of their power."""
        squares = [
            np.square(a - b, dtype=np.float64).sum() for a, b in zip(outputs, target_outputs, strict=True)
        ]
        return float(np.dot(self.scales, squares))


def _power(rows: Sequence[Array], *, is_centred: bool) -> float:
    """Return the power about the mean over samples, of centred values about 0; 0 if rounding explains it."""
    mean = np.zeros(1) if is_centred else np.mean(rows, axis=0, dtype=np.float64)
    total, power = (
        float(np.mean([np.square(row - centre, dtype=np.float64).sum() for row in rows]))
        for centre in (0.0, mean)
    )
    return power if power > _LEAST_POWER * total else 0.0


class _Network:
    """A student whose weights are inputs, and the gradients of its error.

    Attributes:
        weights: those that train, by name, as the student has them.
        batch: samples at once: all of a step, or one where the model does not take more.
    """

    def __init__(self, student: onnx.ModelProto, targets: _Targets, samples: Sequence[Feeds]) -> None:
        model = onnx.shape_inference.infer_shapes(student)
        constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self.weights = {name: numpy_helper.to_array(constants[name]) for name in _trained_names(model)}
        self._targets = targets
        self._forward = session_for(with_outputs(_free(model, self.weights), targets.axes), threads=1)
        program = _free(copy_for_adjoint(model), self.weights)
        floats = _dependent(model, self.weights)
        shapes = measure_shapes(model, samples[0], threads=1)
        sample_bytes = _COPIES * 4 * sum(math.prod(shapes[name]) for name in floats)
        if sample_bytes > _MAX_BYTES:
            raise ModelError(f"{sample_bytes} bytes of activations and adjoints are too many")
        fits = sample_bytes * BATCH <= _MAX_BYTES
        self.batch = BATCH if fits and self._takes_batches(samples[:2]) else 1
        shapes = measure_shapes(model, _stack([samples[0]] * self.batch), threads=1)
        adjoint = Adjoint(program.graph, shapes, floats, exact=True)
        slopes = {}
        for number, (name, axis) in enumerate(targets.axes.items()):
            target = helper.make_tensor_value_info(
                f"edgekit_wanted_{number}", TensorProto.FLOAT, shapes[name]
            )
            program.graph.input.append(target)
            difference = adjoint.add("Sub", [name, target.name])
            if axis is not None:
                total = adjoint.add("ReduceSum", [difference, adjoint.constant([axis])], keepdims=1)
                mean = adjoint.add("Div", [total, adjoint.constant(float(shapes[name][axis]))])
                difference = adjoint.add("Sub", [difference, mean])
            factor = adjoint.constant(2 * targets.scales[number] / BATCH)
            slopes[name] = adjoint.add("Mul", [difference, factor])
        adjoint.pass_back(slopes)
        self._names = [name for name in self.weights if name in adjoint.tensors]
        if not self._names:
            raise ModelError("no layer of the model can train")
        gradients = with_outputs(program, [adjoint.tensors[name] for name in self._names])
        self._backward = session_for(gradients, threads=1)

    def run(self, weights: Weights, feeds: Feeds) -> list[Array]:
        return self._targets.centre(run_session(self._forward, {**feeds, **weights}))

    def gradients(
        self, weights: Weights, rows: Sequence[Feeds], target_outputs: Sequence[Sequence[Array]]
    ) -> Weights:
        """Return the gradients of the mean error of the samples of a step, summed over some of them."""
        named = {
            f"edgekit_wanted_{number}": np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
            for number, arrays in enumerate(zip(*target_outputs, strict=True))
        }
        values = run_session(self._backward, {**_stack(rows), **weights, **named})
        return dict(zip(self._names, values, strict=True))

    def _takes_batches(self, pair: Sequence[Feeds]) -> bool:
        """Whether samples can be stacked along the first axis, and change nothing for each other."""
        apart = [self.run(self.weights, feeds) for feeds in pair]
        try:
            stacked = self.run(self.weights, _stack(pair))
            expected = [np.concatenate(rows) for rows in zip(*apart, strict=True)]
        except (BackendError, ValueError):
            return False
        return all(
            ours.shape == theirs.shape
            and np.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * np.abs(ours).max())
            for ours, theirs in zip(stacked, expected, strict=True)
        )


class _Adam:
    """Adam: moves weights along gradients, with steps by their variance; D. Kingma and J. Ba, 2015."""

    def __init__(self, weights: Weights) -> None:
        self._sizes = {
            name: max(float(np.sqrt(np.square(value).mean())), _LEAST_SIZE) for name, value in weights.items()
        }
        self._means = {name: np.zeros_like(value) for name, value in weights.items()}
        self._squares = {name: np.zeros_like(value) for name, value in weights.items()}
        self._count = 0

    def move(self, weights: Weights, gradients: Weights, rate: float) -> Weights:
        """Return the weights one step further; `rate` is a share of their root mean square."""
        self._count += 1
        moved = dict(weights)
        first, second = (1 - share**self._count for share in _MEMORY)
        for name, gradient in gradients.items():
            mean = self._means[name] = _MEMORY[0] * self._means[name] + (1 - _MEMORY[0]) * gradient
            square = self._squares[name] = (
                _MEMORY[1] * self._squares[name] + (1 - _MEMORY[1]) * gradient * gradient
            )
            step = (mean / first) / (np.sqrt(square / second) + _TINY)
            moved[name] = np.asarray(weights[name] - rate * self._sizes[name] * step, np.float32)
        return moved


def _trained_names(model: onnx.ModelProto) -> list[str]:
    """Return the weights, and the biases that only one layer reads, that rounding stores in a recipe."""
    readers = Counter(name for node in model.graph.node for name in node.input)
    layers = [layer for layer in find_layers(model) if layer.columns <= MAX_COLUMNS]
    biases = [layer.bias for layer in layers if layer.bias and readers[layer.bias] == 1]
    return list(dict.fromkeys([*(layer.weight for layer in layers), *biases]))


def _free(model: onnx.ModelProto, weights: Collection[str]) -> onnx.ModelProto:
    """Return a copy in which some weights are inputs."""
    result = copy_model(model)
    del result.graph.initializer[:]
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            info = helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, list(tensor.dims))
            result.graph.input.append(info)
        else:
            result.graph.initializer.append(tensor)
    return result


def _dependent(model: onnx.ModelProto, weights: Collection[str]) -> frozenset[str]:
    """Return the float32 tensors that depend on weights, and these.

    Raises:
        ModelError: a tensor that may have a gradient depends on them in another precision, or in a graph
            inside a node.
    """
    values = [*model.graph.value_info, *model.graph.output]
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    floats = set(weights)
    for node in model.graph.node:
        if floats.isdisjoint(reads(node)):
            continue
        for name in filter(None, node.output):
            if types.get(name) == TensorProto.FLOAT:
                floats.add(name)
            elif types.get(name) not in _COUNTED:
                raise ModelError(f"{node.op_type} has no exact gradient here")
        if not floats.isdisjoint(set(reads(node)) - set(node.input)):
            raise ModelError(f"{node.op_type} has no exact gradient here")
    return frozenset(floats)
