"""Makes compressed candidates, where no plain form keeps all limits.

Every one has the ranges and kernels of the best static int8 form, or int8 weights alone where there is none.
Its weights are rounded by their second moments (`compress`): to 8 bits for its accuracy, and to fewer where
the limit on transport binds. Where the time, energy or memory of an inference binds, channels go first.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from edgekit_runtime.errors import EdgekitError
from edgekit_toolkit.compress.compression import Compression, entropy_bits
from edgekit_toolkit.compress.pruning import prune
from edgekit_toolkit.compress.sequential import ChooseStep, round_weights
from edgekit_toolkit.compress.steps import EqualSlopeSteps, probe_step
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.channels import Channels
from edgekit_toolkit.onnx_graph.layers import Layer, find_layers
from edgekit_toolkit.pipeline.candidates import Candidate, CandidateSet
from edgekit_toolkit.pipeline.request import Progress
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.clipping import RANGE_METHODS
from edgekit_toolkit.quantize.forms import Form, compressed_floats
from edgekit_toolkit.quantize.onnx.propagation import ODD_GRAPH, Rounding, propagate
from edgekit_toolkit.quantize.quantizer import Quantizer
from edgekit_toolkit.quantize.scheme import fake_quantize
from edgekit_toolkit.quantize.sensitivity import Fidelity, softmax_axes
from edgekit_toolkit.samples.generated import Feeds

_FAILURES: Final = (EdgekitError, np.linalg.LinAlgError)
# Shares of the multiply-adds that pruned candidates save.
_SHARES: Final = (0.10, 0.25, 0.40)
# Int8 kernels are fast for multiples of so many channels: AVX-512 multiplies 16 at a time.
_CHANNELS_MULTIPLES: Final = {"x86_64": 16}
_USUAL_MULTIPLE: Final = 8
# Samples for second moments, and the most bytes that their activations take while layers are rounded.
_SAMPLES: Final = 200
_LEAST_SAMPLES: Final = 2
_ACTIVATION_BYTES: Final = 1 << 30
_NOISE_SAMPLES: Final = 16
# Weights of so many bits: with a scale for each channel they lose little (benchmarks/compression.py).
_FEW_BITS: Final = (4, 3)
# The search for steps ends with a package of at least this share of the limit, or after so many tries.
_CLOSE: Final = 0.985
_MAX_TRIES: Final = 4
# The package that is tried has the golden outputs of another form, which may take some bytes more or fewer.
_MARGIN: Final = 0.998
_STRENGTHS: Final = (1e-4, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionTask:
    """What compressed candidates are made of.

    Attributes:
        quantizer: quantizer of the float model.
        floats: the float model, of which the compression is made.
        open_quantizer: returns the quantizer of another float model for the same engine.
        calibration: makes a fresh stream of samples.
        dims: sizes of free dimensions.
        arch: architecture of the target.
        needs_fewer_macs: whether a limit on time, energy, memory or size binds.
        max_transport_bytes: limit on the bytes that travel, if it binds; else infinite.
        transport_bytes: returns the bytes that travel of a candidate's package.
        progress: where the steps are shown.
    """

    quantizer: Quantizer
    floats: onnx.ModelProto
    open_quantizer: Callable[[OnnxModel], Quantizer]
    calibration: Callable[[], Iterator[Feeds]]
    dims: Mapping[str, int]
    arch: str
    needs_fewer_macs: bool
    max_transport_bytes: float
    transport_bytes: Callable[[Candidate], int]
    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """A float model to compress.

    Attributes:
        floats: the model; its layers are rounded.
        channels: the channels that stay, in groups that lose some.
        bases: forms that are made of it, by the name of the arithmetic.
    """

    floats: onnx.ModelProto
    channels: Channels
    bases: dict[str, Form]


def add_compressed(candidate_set: CandidateSet, task: CompressionTask) -> None:
    """Add the compressed candidates; what cannot be made is noted among the dropped forms."""
    starts = _find_starts(candidate_set, task)
    if not starts:
        candidate_set.dropped.append("compressed forms: the model has no int8 form to start from")
        return
    samples = _draw_samples(task)
    fidelity = Fidelity(
        OnnxModel(task.floats),
        samples[:_NOISE_SAMPLES],
        threads=task.quantizer.threads,
        softmax_axes=softmax_axes(task.floats),
    )
    if task.needs_fewer_macs:
        starts += _prune(candidate_set, task, samples, fidelity, starts[0].bases)
    for start in starts:
        _Compressor(candidate_set, task, samples, fidelity, start).add_all()


def _find_starts(candidate_set: CandidateSet, task: CompressionTask) -> list[_Start]:
    """Return the float model for each form to compress.

    They are the static int8 form with all layers and, where there is none or where each byte counts, the
    form of int8 weights, whose graph is smaller.
    """
    static = _find_static(candidate_set)
    weights = next(
        (
            candidate.form
            for candidate in candidate_set.candidates
            if candidate.form.kind == forms.INT8_WEIGHTS and candidate.form.layers is None
        ),
        None,
    )
    starts = []
    if static is not None:
        floats = compressed_floats(task.floats, static)
        starts.append(_Start(floats=floats, channels={}, bases={"int8": static}))
    if weights is not None and (static is None or math.isfinite(task.max_transport_bytes)):
        named = {"float arithmetic": weights}
        if static is not None and not static.factors:
            starts[0].bases.update(named)
        else:
            starts.append(_Start(floats=task.floats, channels={}, bases=named))
    return starts


def _find_static(candidate_set: CandidateSet) -> Form | None:
    """Return the static int8 form with a scale for each channel that has the most kernels, the first such."""
    with_plans = (
        (len(candidate.form.plan.kernels), candidate.form)
        for candidate in candidate_set.candidates
        if candidate.form.plan is not None and candidate.form.plan.per_channel
    )
    return max(with_plans, key=lambda pair: pair[0], default=(0, None))[1]


def _prune(
    candidate_set: CandidateSet,
    task: CompressionTask,
    samples: Sequence[Feeds],
    fidelity: Fidelity,
    bases: Mapping[str, Form],
) -> list[_Start]:
    """Return float models with fewer and fewer channels, each with the forms `bases` for its own ranges."""
    try:
        sliced_models = prune(
            task.floats,
            samples,
            shares=_SHARES,
            multiple=_CHANNELS_MULTIPLES.get(task.arch, _USUAL_MULTIPLE),
            threads=task.quantizer.threads,
            progress=lambda done, total: task.progress("ranking channels", done, total),
        )
        all_macs = _count_macs(task.floats, task.dims)
        starts = []
        for sliced in sliced_models:
            saved = 1 - _count_macs(sliced.model, task.dims) / all_macs
            quantizer = task.open_quantizer(OnnxModel(onnx.shape_inference.infer_shapes(sliced.model)))
            own = {
                f"{name}, {100 * saved:.0f} % of the work pruned": _with_own_ranges(
                    task, quantizer, form, fidelity
                )
                for name, form in bases.items()
            }
            starts.append(_Start(floats=sliced.model, channels=sliced.channels, bases=own))
    except _FAILURES as error:
        candidate_set.dropped.append(f"pruned forms: {str(error).splitlines()[0]}")
        return []
    if not starts:
        candidate_set.dropped.append("pruned forms: no channels can go")
    return starts


def _with_own_ranges(task: CompressionTask, quantizer: Quantizer, form: Form, fidelity: Fidelity) -> Form:
    """Return a form with the ranges of another model's activations, those that make the least noise."""
    plan = form.plan
    if plan is None:
        return form
    kernels = tuple(name for name in quantizer.kernels(elementwise=True) if name in plan.kernels)
    ranges = quantizer.ranges(kernels, task.calibration, lambda: None)
    whole = {name: item.whole() for name, item in ranges.items()}
    histograms = quantizer.histograms(kernels, list(islice(task.calibration(), _NOISE_SAMPLES)), whole)
    rivals = [whole] + [
        whole
        | {
            name: method.narrow(histogram, symmetric=plan.scheme.symmetric)
            for name, histogram in histograms.items()
        }
        for method in RANGE_METHODS
    ]
    candidates = [
        replace(form, factors={}, plan=replace(plan, kernels=frozenset(kernels), ranges=rival))
        for rival in rivals
    ]
    return min(candidates, key=lambda candidate: _noise(quantizer, candidate, fidelity))


def _noise(quantizer: Quantizer, form: Form, fidelity: Fidelity) -> float:
    built = quantizer.build(form)
    return math.inf if built is None else fidelity.noise(built)


def _count_macs(model: onnx.ModelProto, dims: Mapping[str, int]) -> float:
    return max(sum(cost.macs for cost in OnnxModel(model).node_costs(dims)), 1)


class _Compressor:
    def __init__(
        self,
        candidate_set: CandidateSet,
        task: CompressionTask,
        samples: Sequence[Feeds],
        fidelity: Fidelity,
        start: _Start,
    ) -> None:
        self._set, self._task, self._samples, self._fidelity = candidate_set, task, samples, fidelity
        self._floats, self._channels, self._bases = start.floats, start.channels, start.bases
        self._plan = next((base.plan for base in start.bases.values() if base.plan is not None), None)
        self._peak = 127 if self._plan is None else self._plan.scheme.weight_peak

    def add_all(self) -> None:
        try:
            self._add_forms()
        except _FAILURES as error:
            self._set.dropped.append(f"compressed forms: {str(error).splitlines()[0]}")

    def _add_forms(self) -> None:
        compression = self._round("8 bits", self._peak)
        if not compression.weights:
            self._set.dropped.append("compressed forms: the model has no weights that can be rounded")
            return
        self._add("second-order rounding", compression)
        if math.isinf(self._task.max_transport_bytes):
            return
        for bits in _FEW_BITS:
            self._add(f"weights of {bits} bits", self._round(f"{bits} bits", 2 ** (bits - 1) - 1))
        limit = self._task.max_transport_bytes * _MARGIN
        steps = EqualSlopeSteps(find_layers(self._floats), self._layer_noises(), peak=self._peak)
        for arithmetic in self._bases:
            self._add_for_transport(arithmetic, steps, limit)

    def _add(self, label: str, compression: Compression) -> None:
        """Add the forms with this compression."""
        for arithmetic in self._bases:
            self._add_form(arithmetic, label, compression)

    def _add_form(self, arithmetic: str, label: str, compression: Compression) -> Candidate | None:
        form = replace(self._bases[arithmetic], compression=compression)
        return self._set.add(f"{arithmetic}, {label}", self._task.quantizer, form, self._fidelity)

    def _round(self, aim: str, peak: int, choose_step: ChooseStep | None = None) -> Compression:
        """Return the rounded weights; `aim` is shown as progress."""
        options: dict[str, Any] = (
            {} if choose_step is None else {"choose_step": choose_step, "coarse_biases": True}
        )
        compression = round_weights(
            self._floats,
            self._samples,
            peak=peak,
            fine_peak=self._peak,
            threads=self._task.quantizer.threads,
            quantize=self._quantize,
            progress=lambda done, total: self._task.progress(f"rounding weights to {aim}", done, total),
            **options,
        )
        return replace(compression, channels=self._channels)

    def _quantize(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        """Return an activation as the kernels see it."""
        if self._plan is None or name not in self._plan.ranges:
            return values
        return fake_quantize(values, *self._plan.ranges[name], self._plan.scheme)

    def _add_for_transport(self, arithmetic: str, steps: EqualSlopeSteps, limit: float) -> None:
        """Add the form with the finest steps whose package travels within a limit, in bytes."""
        strength = self._guess(steps, limit)
        too_fine, fine_enough = _STRENGTHS
        best: Candidate | None = None
        target = limit * (1 + _CLOSE) / 2
        for attempt in range(_MAX_TRIES):
            label, compression = self._coded(steps, strength)
            candidate = self._add_form(arithmetic, label, compression)
            if candidate is None:
                return
            self._set.candidates.remove(candidate)
            size = self._task.transport_bytes(candidate)
            if size <= limit:
                best, fine_enough = candidate, strength
                if size >= _CLOSE * limit:
                    break
            else:
                too_fine = strength
            count = _count_codes(compression)
            if attempt == 0:  # now it is known what travels besides the codes
                strength = self._guess(steps, target - size + compression.mean_bits * count / 8)
            else:
                strength *= 2 ** (8 * (size - target) / count)  # a step twice as long saves a bit of each
            if not too_fine < strength < fine_enough:
                strength = math.sqrt(too_fine * fine_enough)
        if best is None:
            self._set.dropped.append(f"{arithmetic}, weights of few bits: none travels within the limit")
        else:
            self._set.candidates.append(best)

    def _coded(self, steps: EqualSlopeSteps, strength: float) -> tuple[str, Compression]:
        compression = self._round(
            "the limit on transport", self._peak, lambda layer, rows: steps.choose(layer, rows, strength)
        )
        return f"weights of {compression.mean_bits:.1f} bits", compression

    def _guess(self, steps: EqualSlopeSteps, limit: float) -> float:
        """Return the strength at which nearest codes take the limit, by their entropy."""
        constants = {tensor.name: tensor for tensor in self._floats.graph.initializer}
        layers = find_layers(self._floats)
        rows = {layer.name: layer.to_rows(numpy_helper.to_array(constants[layer.weight])) for layer in layers}
        low, high = _STRENGTHS
        for _ in range(20):
            middle = math.sqrt(low * high)
            bits = sum(
                entropy_bits(np.rint(rows[layer.name] / steps.choose(layer, rows[layer.name], middle)))
                for layer in layers
            )
            low, high = (middle, high) if bits / 8 > limit else (low, middle)
        return high

    def _layer_noises(self) -> dict[str, float]:
        """Return the output noise of each layer alone at the probe step; nothing for an odd graph."""
        threads = self._task.quantizer.threads
        probes = round_weights(
            self._floats, self._samples, peak=127, choose_step=probe_step, threads=threads, alone=True
        )
        layers = [layer for layer in find_layers(self._floats) if layer.weight in probes.weights]

        def probe(layer: Layer) -> Rounding:
            rounded = probes.weights[layer.weight].floats(layer.channel_axis)
            bias = probes.biases.get(layer.bias)
            return Rounding(layer.name, 1, rounded=rounded, bias=bias, by_channel=True)

        try:
            noises = propagate(
                self._floats, [[probe(layer)] for layer in layers], self._fidelity, threads=threads
            )
        except ODD_GRAPH:
            return {}
        return {layer.name: noise for layer, noise in zip(layers, noises, strict=True)}


def _count_codes(compression: Compression) -> int:
    return sum(weight.codes.size for weight in compression.weights.values())


def _draw_samples(task: CompressionTask) -> list[Feeds]:
    """Return samples for moments, as many as fit in memory with their activations."""
    try:
        estimate = OnnxModel(task.floats).estimate_memory(task.dims, blocked_layout=False)
        each = 1 if estimate is None else estimate.activations_bytes
    except EdgekitError:
        each = 1
    # Both runs keep the tensors between two layers, which are less than an engine holds at once.
    count = int(np.clip(_ACTIVATION_BYTES // max(2 * each, 1), _LEAST_SAMPLES, _SAMPLES))
    return list(islice(task.calibration(), count))
