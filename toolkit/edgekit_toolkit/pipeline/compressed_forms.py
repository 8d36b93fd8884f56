"""Builds the compressed forms of one float model.

Weights have 8 bits if the transport size is not limited. If it is limited, the quantization steps are chosen
so that an estimate of the package size meets the limit. The estimate is the size of a package whose weights
are all 0, plus the entropy of the quantized weights. After each try, the estimate is corrected by its error,
so one or two tries are enough. Weights are rounded separately for int8 and for float arithmetic, because the
activations differ. The searches of several models run in turns, so that each search builds a first package
before any search refines its package.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from edgekit_runtime.errors import EdgekitError
from edgekit_toolkit.compress.code_sizes import MAX_STRENGTH, MIN_STRENGTH, CodeSizes, probe_step
from edgekit_toolkit.compress.compression import CodedWeight, Compression
from edgekit_toolkit.compress.sequential import (
    ChooseStep,
    find_roundable_layers,
    least_error,
    round_weights,
)
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

COST_LIMITS: Final = frozenset({"latency", "energy", "memory", "size"})
"""The limits that a model may meet with fewer channels."""

FAILURES: Final = (EdgekitError, *ODD_GRAPH)
# Bytes of the scale of a channel and of its bias, where a channel has a step of its own.
_OWN_SCALE_BYTES: Final = 3
# Weights of so many bits: with a scale for each channel they lose little (benchmarks/compression.py).
_FEW_BITS: Final = (4, 3)
# Equal bits are tried in addition to fitted steps if they use at least this share of the limit.
_WORTHWHILE: Final = 0.8
# The search for steps aims at the first share of the limit. It ends with a package that uses at least the
# second share, or after the given number of tries.
_AIM: Final = 0.995
_CLOSE: Final = 0.99
_MAX_TRIES: Final = 4
# The package that is tried has the golden outputs of another form, which may take some bytes more or fewer.
_MARGIN: Final = 0.998
# The excess of real codes over the entropy of the nearest codes, used until a package is coded.
_USUAL_EXCESS: Final = 0.03
# Strength of the steps in a package without codes: its scales and biases take about as many bytes as others.
_EMPTY_STRENGTH: Final = 0.3
# Work of a nominal processor: products of moments and of rounding, values of patches, packages and codes.
_PRODUCT_S: Final = 1 / 25e9
_PATCH_VALUE_S: Final = 10e-9
_ROUNDING_PRODUCTS: Final = 24
_MOMENT_PRODUCTS: Final = 3  # of a moment's columns, three times over: it is solved, inverted and factored
_PACKAGE_S: Final = 0.25
_CODE_S: Final = 0.5e-6

_END: Final = object()
_Package = tuple[int, Candidate]  # the bytes that travel, and the candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionTask:
    """The models, samples, limits and functions to build compressed candidates.

    Attributes:
        floats: The float model to compress.
        open_quantizer: Returns the quantizer of another float model for the same engine.
        calibration: Returns a new iterator over the calibration samples.
        needs_fewer_macs: Whether a limit on latency, energy, memory or size excludes the plain forms, which
            are the forms without compression.
        arch: The processor architecture of the target, such as `x86_64`.
        max_transport_bytes: The limit on the transport size in bytes, or infinity if this limit does not
            exclude the plain forms.
        transport_bytes: Returns the transport size of a package with a given model and kind of form.
        max_drop: The limit on the drop of the score in points, or infinity.
        measure_drops: Returns the drop of the score of each float model in points.
        work: Counts and limits the work.
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
        name: A text for labels, such as `20 % of the work pruned`, or an empty string for the whole model.
        floats: The model.
        channels: The remaining channels of each changed `ChannelGroup`, by the name of the group.
        is_distilled: Whether the weights were trained by distillation.
        bases: The forms to compress, by a label of their arithmetic such as `int8`.
    """

    name: str = ""
    floats: onnx.ModelProto
    channels: Channels = field(default_factory=dict)
    is_distilled: bool = False
    bases: dict[str, Form]


def rounding_s(model: onnx.ModelProto, samples: int, task: CompressionTask, *, runs: int = 2) -> float:
    """Return the work of rounding all layers once, in seconds of a nominal processor.

    `runs` is 1 if only the float network runs, or 2 if the compressed network runs too.
    """
    total_s = runs * samples * task.work.inference_s
    macs = {cost.name: cost.macs for cost in cost_of_nodes(OnnxModel(model), task.dims)}
    for layer in find_layers(model):
        weights = layer.channels * layer.columns
        positions = macs.get(layer.node.name or layer.name, math.inf) / weights
        values = runs * min(layer.max_patches, samples * positions) * layer.groups * layer.columns
        total_s += _PATCH_VALUE_S * values + _PRODUCT_S * layer.columns * (
            values + _ROUNDING_PRODUCTS * weights + _MOMENT_PRODUCTS * layer.groups * layer.columns**2
        )
    return total_s


class FormCompressor:
    """Builds the compressed forms of one float model.

    If the transport size is limited, `add_forms` first reserves enough work to build one package.
    """

    def __init__(
        self,
        candidate_set: CandidateSet,
        task: CompressionTask,
        samples: Sequence[Feeds],
        fidelity: Fidelity,
        start: FloatStart,
    ) -> None:
        self._set, self._task, self._samples, self._fidelity = candidate_set, task, samples, fidelity
        self._start, self._limit = start, task.max_transport_bytes * _MARGIN
        plan = next((base.plan for base in start.bases.values() if base.plan is not None), None)
        self._peak = 127 if plan is None else plan.scheme.weight_peak
        self._constants = {
            tensor.name: numpy_helper.to_array(tensor) for tensor in start.floats.graph.initializer
        }
        self._layers = find_roundable_layers(start.floats)
        weights = sum(layer.channels * layer.columns for layer in self._layers)
        self._packing_s = (_PACKAGE_S + _CODE_S * weights) * math.isfinite(self._limit)
        self._form_s = rounding_s(start.floats, len(samples), task) + self._packing_s
        self._probes_s = rounding_s(start.floats, len(samples), task, runs=1) * math.isfinite(self._limit)
        self._reserved_s = 0.0  # of work that is taken and not done yet
        tries = 1 + _MAX_TRIES + len(_FEW_BITS) if math.isfinite(self._limit) else 1
        # The most work that each arithmetic may still need, and those that the limit of the search ended.
        self._most_s = dict.fromkeys(start.bases, self._packing_s + tries * self._form_s)
        self._stopped: set[str] = set()
        self._fits = False  # whether a package travels within the limit
        self._has_fewest_bits: set[str] = set()

    @property
    def most_s(self) -> float:
        """The maximum remaining work for all forms, in seconds of a nominal processor."""
        return self._probes_s + sum(self._most_s.values())

    def add_forms(self) -> Iterator[None]:
        """Add the forms to the candidates. Yield after each measured package, so that models take turns."""
        try:
            if not self._layers:
                self._set.dropped.append("compressed forms: the model has no weights that can be rounded")
            elif math.isinf(self._limit):
                for arithmetic in self._start.bases:
                    self._add(self._build_rounded(arithmetic, "second-order rounding", 8))
            else:
                yield from self._add_for_transport()
        except FAILURES as error:
            self._set.dropped.append(f"compressed forms: {str(error).splitlines()[0]}")
        finally:
            self._task.work.count(seconds=-self._reserved_s)
            if self._stopped:
                more_s = sum(most_s for name, most_s in self._most_s.items() if name in self._stopped)
                self._record_stop("further compressed forms", more_s)

    def _add(self, candidate: Candidate | None) -> None:
        if candidate is not None:
            self._set.candidates.append(candidate)

    def _record_stop(self, subject: str, more_s: float) -> None:
        limits = {"drop", "transport"} if math.isfinite(self._limit) else {"drop"}
        if self._start.channels:
            limits |= COST_LIMITS
        self._set.record_stop(subject, self._task.work.spent_s, more_s, frozenset(limits))

    def _build_rounded(self, arithmetic: str, label: str, bits: int) -> Candidate | None:
        """Return a form with weights of equal bits; None if it fails, or at the limit of the search."""
        compression = self._round(arithmetic, f"{bits} bits", min(2 ** (bits - 1) - 1, self._peak))
        return None if compression is None else self._build_form(arithmetic, label, compression)

    def _build_form(self, arithmetic: str, label: str, compression: Compression) -> Candidate | None:
        form = replace(self._start.bases[arithmetic], compression=compression)
        return self._set.build(self._label(arithmetic, label), self._task.quantizer, form, self._fidelity)

    def _label(self, arithmetic: str, form: str) -> str:
        return ", ".join(filter(None, (arithmetic, self._start.name, form)))

    def _take(self, seconds: float, arithmetic: str) -> bool:
        """Take work, reserved work first; returns whether the limit of the search allows it."""
        reserved_s = min(seconds, self._reserved_s)
        if not self._task.work.take(seconds - reserved_s):
            self._stopped.add(arithmetic)
            return False
        self._reserved_s -= reserved_s
        self._most_s[arithmetic] -= seconds
        return True

    def _round(
        self, arithmetic: str, aim: str, peak: int, choose_step: ChooseStep = least_error
    ) -> Compression | None:
        """Return the rounded weights; None at the limit of the search. `aim` is shown as progress."""
        if not self._take(self._form_s, arithmetic):
            return None
        step = " of the model with ".join(filter(None, (f"rounding weights to {aim}", self._start.name)))
        plan = self._start.bases[arithmetic].plan

        def quantize(name: str, values: NDArray[Any]) -> NDArray[Any]:
            """Return an activation as the kernels see it."""
            if plan is None or name not in plan.ranges:
                return values
            return fake_quantize(values, *plan.ranges[name], plan.scheme)

        compression = round_weights(
            self._start.floats,
            self._samples,
            peak=peak,
            fine_peak=self._peak,
            threads=self._task.quantizer.threads,
            quantize=quantize,
            progress=lambda done, total: self._task.progress(step, done, total),
            coarse_biases=math.isfinite(self._limit),
            choose_step=choose_step,
        )
        start = self._start
        return replace(compression, channels=start.channels, is_distilled=start.is_distilled)

    def _add_for_transport(self) -> Iterator[None]:
        """Add forms whose packages travel within the limit; where none does, the smallest ones."""
        first_s = self._packing_s + self._form_s
        if not self._task.work.take(self._probes_s + first_s):
            self._record_stop(self._label("compressed forms", ""), self.most_s)
            return
        self._reserved_s = first_s
        sizes = CodeSizes(self._layers, self._constants, self._layer_noises(), peak=self._peak)
        yield from in_turns(self._search(arithmetic, sizes) for arithmetic in self._start.bases)
        if not self._fits:  # a refusal needs the smallest form, for which nobody should search longer
            stopped = set(self._stopped)
            for arithmetic in self._start.bases:
                if arithmetic not in self._has_fewest_bits:
                    self._add(self._build_few_bits(arithmetic, _FEW_BITS[-1]))
            self._stopped = stopped

    def _build_few_bits(self, arithmetic: str, bits: int) -> Candidate | None:
        if bits == _FEW_BITS[-1]:
            self._has_fewest_bits.add(arithmetic)
        return self._build_rounded(arithmetic, f"weights of {bits} bits", bits)

    def _search(self, arithmetic: str, sizes: CodeSizes) -> Iterator[None]:
        """Add the forms of one arithmetic."""
        if not self._take(self._packing_s, arithmetic):
            return
        empty_bytes = self._measure_empty(arithmetic, sizes)
        if empty_bytes is None:
            return
        channels = sum(len(step) for step in sizes.list_steps(_EMPTY_STRENGTH).values())
        uniform_bytes = empty_bytes + _OWN_SCALE_BYTES * channels
        fine_bytes = uniform_bytes + sizes.of_peak(self._peak, self._peak)
        packages: list[_Package] = []
        # Codes take more than their entropy, but the steps are searched where this guess is too low.
        has_second_try = self._task.work.allows(self._form_s)
        if fine_bytes + (not has_second_try) * _USUAL_EXCESS * (fine_bytes - uniform_bytes) <= self._limit:
            packages += self._measure(arithmetic, self._build_rounded(arithmetic, "second-order rounding", 8))
            yield
        if packages and packages[0][0] <= self._limit:
            self._add(packages[0][1])
        elif empty_bytes > self._limit:
            self._note_too_large(arithmetic, f"without its weights the package takes {empty_bytes:,} bytes")
        else:
            excess_bytes = max((size - fine_bytes for size, _ in packages), default=0.0)
            search = _StepSearch(sizes, self._limit, empty_bytes, excess_bytes)
            has_fit = yield from self._search_steps(arithmetic, search, packages)
            least_bytes = _WORTHWHILE * self._limit * has_fit
            for bits in _FEW_BITS:
                low_bytes = uniform_bytes + sizes.of_peak(2 ** (bits - 1) - 1, self._peak)
                if not least_bytes <= low_bytes <= self._limit:
                    continue
                candidate = self._build_few_bits(arithmetic, bits)
                self._add(candidate)
                if any(size <= self._limit for size, _ in self._measure(arithmetic, candidate)):
                    return
                yield

    def _measure(self, arithmetic: str, candidate: Candidate | None) -> list[_Package]:
        """Return the package of a candidate, if there is one."""
        if candidate is None:
            return []
        size = self._measure_transport(arithmetic, candidate.model)
        self._fits |= size <= self._limit
        return [(size, candidate)]

    def _search_steps(
        self, arithmetic: str, search: "_StepSearch", packages: list[_Package]
    ) -> Generator[None, None, bool]:
        """Add the form with the finest steps whose package travels within the limit, or the smallest one.

        Returns whether it is within the limit. `packages`: those that were tried before, all too large.
        """
        for _ in range(_MAX_TRIES):
            strength = search.guess()
            compression = self._round(
                arithmetic,
                "the limit on transport",
                self._peak,
                partial(search.sizes.choose_step, strength=strength),
            )
            if compression is None:
                break
            label = f"weights of {compression.mean_bits:.1f} bits"
            package = self._measure(arithmetic, self._build_form(arithmetic, label, compression))
            if not package:
                break
            packages += package
            yield
            if search.ends_with(package[0][0], strength):
                break
        if not packages:
            return False
        within = [package for package in packages if package[0] <= self._limit]
        size, candidate = max(within or [min(packages, key=_size)], key=_size)
        self._add(candidate)
        if not within:
            self._note_too_large(arithmetic, f"the smallest tried takes {size:,} bytes")
        return bool(within)

    def _measure_empty(self, arithmetic: str, sizes: CodeSizes) -> int | None:
        """Return the bytes that travel of a package whose codes are all 0; None if it cannot be made."""
        weights = {
            name: CodedWeight(np.zeros(self._constants[name].shape, np.int8), step)
            for name, step in sizes.list_steps(_EMPTY_STRENGTH).items()
        }
        biases = {
            layer.bias: _coarsen_to_seven_bits(self._constants[layer.bias])
            for layer in self._layers
            if layer.bias
        }
        form = replace(
            self._start.bases[arithmetic], compression=Compression(weights, biases, self._start.channels)
        )
        try:
            built = self._task.quantizer.build(form)
        except EdgekitError as error:
            self._set.dropped.append(f"{self._label(arithmetic, 'compressed')}: {str(error).splitlines()[0]}")
            return None
        return None if built is None else self._measure_transport(arithmetic, built)

    def _measure_transport(self, arithmetic: str, model: Model) -> int:
        return self._task.transport_bytes(model, self._start.bases[arithmetic].kind)

    def _note_too_large(self, arithmetic: str, reason: str) -> None:
        label = self._label(arithmetic, "weights of few bits")
        self._set.dropped.append(f"{label}: none travels within the limit; {reason}")

    def _layer_noises(self) -> dict[str, float]:
        """Return the output noise of each layer alone at the probe step; empty if it cannot be analysed."""
        threads = self._task.quantizer.threads
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


class _StepSearch:
    """Finds the strength of the steps for a limit on transport.

    Attributes:
        sizes: bytes of the codes.

    Args:
        excess_bytes: what a package near the limit took more than its codes' entropy; 0 if none was coded.
    """

    def __init__(self, sizes: CodeSizes, limit: float, empty_bytes: int, excess_bytes: float) -> None:
        self.sizes, self._limit, self._empty_bytes = sizes, limit, empty_bytes
        self._excess_bytes = max(_USUAL_EXCESS * (_AIM * limit - empty_bytes), excess_bytes)
        self._bounds = (0.0, math.inf)  # a strength that is too small, and one that is not

    def guess(self) -> float:
        """Return the next strength to try, between those of earlier packages."""
        strength = self.sizes.find_strength(_AIM * self._limit - self._empty_bytes - self._excess_bytes)
        low, high = self._bounds
        if low < strength < high:
            return strength
        return math.sqrt(max(low, MIN_STRENGTH) * min(high, MAX_STRENGTH))

    def ends_with(self, size: int, strength: float) -> bool:
        """Return whether a package is within the limit, and close to it or of the finest steps there are.

        If it is not, the next guess counts with it.
        """
        low, high = self._bounds
        is_within = size <= self._limit
        self._bounds = (low, strength) if is_within else (strength, high)
        self._excess_bytes = size - self._empty_bytes - self.sizes.at(strength)
        return is_within and (
            size >= _CLOSE * self._limit or self.sizes.at(strength) >= self.sizes.at(MIN_STRENGTH)
        )


def in_turns(searches: Iterable[Iterator[None]]) -> Iterator[None]:
    """Advance the iterators in turns until all are exhausted. Yield after each step."""
    waiting = deque(searches)
    while waiting:
        search = waiting.popleft()
        if next(search, _END) is not _END:
            waiting.append(search)
            yield


def _size(package: _Package) -> int:
    return package[0]


def _coarsen_to_seven_bits(bias: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a bias in multiples of a power of two, at most 128: about the digits of `_coarsen_to_noise`.

    A package without codes has no rounded weights whose noise would tell the step.
    """
    step = 2.0 ** np.floor(np.log2(max(float(np.abs(bias).max(initial=0)), 1e-30) / 64))
    return np.asarray(np.rint(bias / step) * step, np.float32)
