"""Makes the compressed forms of one float model: weights of equal bits, or for a limit on transport.

The steps for a limit on transport come from a model of the bytes: those of a package whose codes are all 0,
and the entropy of the nearest codes. What one rounding takes more or less than that corrects the next guess,
so that one or two roundings meet the limit; both arithmetics share them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from edgekit_runtime.errors import EdgekitError
from edgekit_toolkit.compress.code_sizes import MAX_STRENGTH, MIN_STRENGTH, CodeSizes
from edgekit_toolkit.compress.compression import CodedWeight, Compression
from edgekit_toolkit.compress.sequential import MAX_COLUMNS, ChooseStep, least_error, round_weights
from edgekit_toolkit.compress.steps import EqualSlopeSteps, probe_step
from edgekit_toolkit.evaluation.judge import cost_of_nodes
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.channels import Channels
from edgekit_toolkit.onnx_graph.layers import Layer, find_layers
from edgekit_toolkit.pipeline.candidates import Candidate, CandidateSet
from edgekit_toolkit.pipeline.request import Progress
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.onnx.propagation import ODD_GRAPH, Rounding, propagate
from edgekit_toolkit.quantize.quantizer import Quantizer
from edgekit_toolkit.quantize.scheme import fake_quantize
from edgekit_toolkit.quantize.search_work import SearchWork
from edgekit_toolkit.quantize.sensitivity import Fidelity
from edgekit_toolkit.samples.generated import Feeds

FAILURES: Final = (EdgekitError, *ODD_GRAPH)
# Bytes of the scale of a channel and of its bias, where a channel has a step of its own.
_OWN_SCALE_BYTES: Final = 3
# Weights of so many bits: with a scale for each channel they lose little (benchmarks/compression.py).
_FEW_BITS: Final = (4, 3)
# The search for steps ends with a package of at least this share of the limit, or after so many tries.
_CLOSE: Final = 0.985
_MAX_TRIES: Final = 4
# The package that is tried has the golden outputs of another form, which may take some bytes more or fewer.
_MARGIN: Final = 0.998
# Of real codes over the entropy of the nearest ones, until a package was coded.
_USUAL_EXCESS: Final = 0.03
# Strength of the steps in a package without codes: its scales and biases take about as many bytes as others.
_EMPTY_STRENGTH: Final = 0.3
# Work of a nominal processor: products of moments and of rounding, values of patches, bytes of a package.
_PRODUCT_S: Final = 1 / 25e9
_PATCH_VALUE_S: Final = 10e-9
_ROUNDING_PRODUCTS: Final = 24
_CODED_BYTE_S: Final = 1e-6
_PACKAGE_S: Final = 0.5

_Package = tuple[int, Candidate]  # with the bytes that travel


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
        transport_bytes: returns the bytes that travel of a package with this model, a form of this kind.
        max_drop: limit on the drop in points; infinite without one.
        measure_drops: returns the drops of float models in points.
        work: counts the work and limits it.
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
    transport_bytes: Callable[[Model, str], int]
    max_drop: float
    measure_drops: Callable[[Sequence[Model]], Sequence[float]]
    work: SearchWork
    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatStart:
    """A float model to compress.

    Attributes:
        name: how it differs from the whole model, for labels.
        floats: the model; its layers are rounded.
        channels: the channels that stay, in groups that lose some.
        is_distilled: whether its weights were trained.
        bases: forms that are made of it, by the name of the arithmetic.
    """

    name: str = ""
    floats: onnx.ModelProto
    channels: Channels = field(default_factory=dict)
    is_distilled: bool = False
    bases: dict[str, Form]


def rounding_s(model: onnx.ModelProto, samples: int, task: CompressionTask, *, runs: int = 2) -> float:
    """Return the work of one rounding of all layers, in seconds of a nominal processor.

    `runs`: 1 if each layer is rounded alone, 2 if also the compressed network runs.
    """
    total_s = runs * samples * task.work.inference_s
    macs = {cost.name: cost.macs for cost in cost_of_nodes(OnnxModel(model), task.dims)}
    for layer in find_layers(model):
        weights = layer.channels * layer.columns
        positions = macs.get(layer.node.name or layer.name, math.inf) / weights
        values = runs * min(layer.max_patches, samples * positions) * layer.groups * layer.columns
        total_s += _PATCH_VALUE_S * values + _PRODUCT_S * layer.columns * (
            values + _ROUNDING_PRODUCTS * weights
        )
    return total_s


class FormCompressor:
    """Makes the compressed forms of one float model.

    Attributes:
        is_stopped: whether the limit of the search left a form out.
    """

    def __init__(
        self,
        candidate_set: CandidateSet,
        task: CompressionTask,
        samples: Sequence[Feeds],
        fidelity: Fidelity,
        start: FloatStart,
    ) -> None:
        self.is_stopped = False
        self._set, self._task, self._samples, self._fidelity = candidate_set, task, samples, fidelity
        self._start, self._limit = start, task.max_transport_bytes * _MARGIN
        self._plan = next((base.plan for base in start.bases.values() if base.plan is not None), None)
        self._peak = 127 if self._plan is None else self._plan.scheme.weight_peak
        constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in start.floats.graph.initializer}
        self._rounding_s = rounding_s(start.floats, len(samples), task)
        self._layers = [
            layer
            for layer in find_layers(start.floats)
            if layer.columns <= MAX_COLUMNS and np.isfinite(constants[layer.weight]).all()
        ]
        self._weights = {layer.weight: constants[layer.weight] for layer in self._layers}
        self._biases = {layer.bias: constants[layer.bias] for layer in self._layers if layer.bias}

    def add_all(self) -> None:
        try:
            self._add_forms()
        except FAILURES as error:
            self._set.dropped.append(f"compressed forms: {str(error).splitlines()[0]}")

    def _add_forms(self) -> None:
        if not self._layers:
            self._set.dropped.append("compressed forms: the model has no weights that can be rounded")
        elif math.isinf(self._limit):
            self._set.candidates += self._build_rounded(
                "second-order rounding", "8 bits", self._peak
            ).values()
        elif self._task.work.allows(self._rounding_s):
            self._add_for_transport()
        else:
            self.is_stopped = True

    def _build_rounded(self, label: str, aim: str, peak: int) -> dict[str, Candidate]:
        """Return the forms with weights of equal bits, by arithmetic; none at the limit of the search."""
        compression = self._round(aim, peak)
        if compression is None:
            return {}
        forms = {name: self._build_form(name, label, compression) for name in self._start.bases}
        return {name: form for name, form in forms.items() if form is not None}

    def _build_form(self, arithmetic: str, label: str, compression: Compression) -> Candidate | None:
        form = replace(self._start.bases[arithmetic], compression=compression)
        label = ", ".join(filter(None, (arithmetic, self._start.name, label)))
        return self._set.build(label, self._task.quantizer, form, self._fidelity)

    def _round(self, aim: str, peak: int, choose_step: ChooseStep = least_error) -> Compression | None:
        """Return the rounded weights; None at the limit of the search. `aim` is shown as progress."""
        if not self._task.work.take(self._rounding_s):
            self.is_stopped = True
            return None
        step = " of the model with ".join(filter(None, (f"rounding weights to {aim}", self._start.name)))
        compression = round_weights(
            self._start.floats,
            self._samples,
            peak=peak,
            fine_peak=self._peak,
            threads=self._task.quantizer.threads,
            quantize=self._quantize,
            progress=lambda done, total: self._task.progress(step, done, total),
            coarse_biases=math.isfinite(self._limit),
            choose_step=choose_step,
        )
        start = self._start
        return replace(compression, channels=start.channels, is_distilled=start.is_distilled)

    def _quantize(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        """Return an activation as the kernels see it."""
        if self._plan is None or name not in self._plan.ranges:
            return values
        return fake_quantize(values, *self._plan.ranges[name], self._plan.scheme)

    def _add_for_transport(self) -> None:
        """Add forms whose packages travel within the limit; where none does, the smallest ones."""
        noises = self._layer_noises()
        steps = EqualSlopeSteps(self._layers, noises, peak=self._peak)
        sizes = CodeSizes(self._layers, self._weights, steps)
        measured = {arithmetic: self._measure_empty(arithmetic, sizes) for arithmetic in self._start.bases}
        empty = {arithmetic: size for arithmetic, size in measured.items() if size is not None}
        if not empty:
            return
        channels = sum(len(step) for step in sizes.list_steps(_EMPTY_STRENGTH).values())
        uniform_bytes = min(empty.values()) + _OWN_SCALE_BYTES * channels
        fine: dict[str, _Package] = {}
        if uniform_bytes + sizes.of_peak(self._peak, self._peak) <= self._limit:  # a guess that may be low
            fine = self._measure(self._build_rounded("second-order rounding", "8 bits", self._peak))
        search = _StepSearch(sizes, self._limit)
        has_fit = has_fine_fit = False
        for arithmetic, empty_bytes in empty.items():
            packages = [fine[arithmetic]] if arithmetic in fine else []
            if packages and packages[0][0] <= self._limit:
                self._set.candidates.append(packages[0][1])
                has_fine_fit = True
            elif empty_bytes > self._limit:
                self._note_too_large(
                    arithmetic, f"without its weights the package takes {empty_bytes:,} bytes"
                )
            else:
                has_fit |= self._search_steps(arithmetic, empty_bytes, search, packages)
        for bits in () if has_fine_fit else _FEW_BITS:
            peak = 2 ** (bits - 1) - 1
            is_reference = bits == _FEW_BITS[-1] and not has_fit  # for a refusal
            if uniform_bytes + sizes.of_peak(peak, self._peak) <= self._limit or is_reference:
                candidates = self._build_rounded(f"weights of {bits} bits", f"{bits} bits", peak)
                self._set.candidates += candidates.values()
                coarse = self._measure(candidates)
                if not coarse or min(size for size, _ in coarse.values()) <= self._limit:
                    return

    def _measure(self, candidates: Mapping[str, Candidate]) -> dict[str, _Package]:
        return {
            arithmetic: (self._measure_transport(arithmetic, candidate.model), candidate)
            for arithmetic, candidate in candidates.items()
        }

    def _search_steps(
        self, arithmetic: str, empty_bytes: int, search: "_StepSearch", packages: list[_Package]
    ) -> bool:
        """Add the form with the finest steps whose package travels within the limit, or the smallest one.

        Returns whether it is within the limit. `packages`: those that were tried before, all too large.
        """
        bounds = (0.0, math.inf)  # a strength that is too small, and one that is not
        for _ in range(_MAX_TRIES):
            trial = search.find(empty_bytes)
            if trial is None and (trial := self._try(search.guess(empty_bytes, bounds), search)) is None:
                break
            label = f"weights of {trial.compression.mean_bits:.1f} bits"
            candidate = self._build_form(arithmetic, label, trial.compression)
            if candidate is None:
                break
            size = self._measure_transport(arithmetic, candidate.model)
            packages.append((size, candidate))
            trial.code_bytes = size - empty_bytes
            if search.suits(size, trial.strength):
                break
            bounds = (bounds[0], trial.strength) if size <= self._limit else (trial.strength, bounds[1])
        if not packages:
            return False
        within = [package for package in packages if package[0] <= self._limit]
        size, candidate = max(within or [min(packages, key=_size)], key=_size)
        self._set.candidates.append(candidate)
        if not within:
            limit = "; limit of the search (--search-seconds)" if self.is_stopped else ""
            self._note_too_large(arithmetic, f"the smallest tried takes {size:,} bytes{limit}")
        return bool(within)

    def _try(self, strength: float, search: "_StepSearch") -> "_Trial | None":
        """Return the weights with steps of a strength; None at the limit of the search."""
        compression = self._round(
            "the limit on transport",
            self._peak,
            lambda layer, rows: search.sizes.steps.choose(layer, rows, strength),
        )
        return None if compression is None else search.add(strength, compression)

    def _measure_empty(self, arithmetic: str, sizes: CodeSizes) -> int | None:
        """Return the bytes that travel of a package whose codes are all 0; None if it cannot be made."""
        weights = {
            name: CodedWeight(np.zeros(self._weights[name].shape, np.int8), step)
            for name, step in sizes.list_steps(_EMPTY_STRENGTH).items()
        }
        biases = {name: _coarsen_to_seven_bits(bias) for name, bias in self._biases.items()}
        form = replace(
            self._start.bases[arithmetic], compression=Compression(weights, biases, self._start.channels)
        )
        try:
            built = self._task.quantizer.build(form)
        except EdgekitError as error:
            self._set.dropped.append(f"{arithmetic}, compressed: {str(error).splitlines()[0]}")
            return None
        return None if built is None else self._measure_transport(arithmetic, built)

    def _measure_transport(self, arithmetic: str, model: Model) -> int:
        self._task.work.count(seconds=_CODED_BYTE_S * model.size_bytes)
        return self._task.transport_bytes(model, self._start.bases[arithmetic].kind)

    def _note_too_large(self, arithmetic: str, reason: str) -> None:
        self._set.dropped.append(
            f"{arithmetic}, weights of few bits: none travels within the limit; {reason}"
        )

    def _layer_noises(self) -> dict[str, float]:
        """Return the output noise of each layer alone at the probe step; nothing for an odd graph."""
        threads = self._task.quantizer.threads
        self._task.work.count(seconds=self._rounding_s)
        probes = round_weights(
            self._start.floats,
            self._samples,
            peak=127,
            choose_step=probe_step,
            threads=threads,
            alone=True,
        )
        layers = [layer for layer in self._layers if layer.weight in probes.weights]

        def probe(layer: Layer) -> Rounding:
            rounded = probes.weights[layer.weight].floats(layer.channel_axis)
            bias = probes.biases.get(layer.bias)
            return Rounding(layer.name, 1, rounded=rounded, bias=bias, by_channel=True)

        roundings = [[probe(layer)] for layer in layers]
        try:
            noises = propagate(self._start.floats, roundings, self._fidelity, threads=threads)
        except ODD_GRAPH:
            return {}
        return {layer.name: noise for layer, noise in zip(layers, noises, strict=True)}


@dataclass(slots=True)
class _Trial:
    """Weights with the steps of one strength.

    Attributes:
        code_bytes: what they add to a package without codes; by their entropy until a package is coded.
    """

    strength: float
    compression: Compression
    code_bytes: float


class _StepSearch:
    """Finds the strength of the steps for a limit on transport; arithmetics share the trials."""

    def __init__(self, sizes: CodeSizes, limit: float) -> None:
        self.sizes, self._limit = sizes, limit
        self._trials: list[_Trial] = []

    def suits(self, size: float, strength: float) -> bool:
        """Whether a package is within the limit, and close to it or of the finest steps there are."""
        is_within = size <= self._limit
        return is_within and (
            size >= _CLOSE * self._limit or self.sizes.at(strength) >= self.sizes.at(MIN_STRENGTH)
        )

    def find(self, empty_bytes: int) -> _Trial | None:
        """Return a trial that suits a package of so many bytes without codes."""
        return next(
            (trial for trial in self._trials if self.suits(empty_bytes + trial.code_bytes, trial.strength)),
            None,
        )

    def guess(self, empty_bytes: int, bounds: tuple[float, float]) -> float:
        """Return the next strength to try, between those of earlier trials."""
        target = self._limit * (1 + _CLOSE) / 2 - empty_bytes
        excess_bytes = _USUAL_EXCESS * target
        if self._trials:
            excess_bytes = self._trials[-1].code_bytes - self.sizes.at(self._trials[-1].strength)
        target -= excess_bytes
        strength, (low, high) = self.sizes.find_strength(target), bounds
        if low < strength < high:
            return strength
        return math.sqrt(max(low, MIN_STRENGTH) * min(high, MAX_STRENGTH))

    def add(self, strength: float, compression: Compression) -> _Trial:
        self._trials.append(_Trial(strength, compression, compression.code_bytes))
        return self._trials[-1]


def _size(package: _Package) -> int:
    return package[0]


def _coarsen_to_seven_bits(bias: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a bias in multiples of a power of two, at most 128: about the digits of `_coarsen_to_noise`.

    A package without codes has no rounded weights whose noise would tell the step.
    """
    step = 2.0 ** np.floor(np.log2(max(float(np.abs(bias).max(initial=0)), 1e-30) / 64))
    return np.asarray(np.rint(bias / step) * step, np.float32)
