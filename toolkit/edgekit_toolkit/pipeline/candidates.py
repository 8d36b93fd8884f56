"""Builds the candidates of a search. Each candidate is one form of the model.

Forms are compared only by their output noise on calibration samples. Accuracy is measured later. The noise of
single blocks guides the search for mixed precision.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from edgekit_runtime.errors import BackendError, EdgekitError, ModelError, RecipeError
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.pipeline.request import Progress
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.clipping import RANGE_METHODS
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.quantize.quantizer import Factors, Quantizer
from edgekit_toolkit.quantize.ranges import Range
from edgekit_toolkit.quantize.search_work import SearchWork
from edgekit_toolkit.quantize.sensitivity import BlockNoise, Fidelity, decibel, mixed_plans, mixes
from edgekit_toolkit.quantize.smallest_form import check_smallest_form
from edgekit_toolkit.samples.generated import Feeds

Ranges = Mapping[str, tuple[float, float]]

_PLAIN, _NARROW = "int8", "int8 of 7-bit weights,"
_LIKE, _NEAR = "as before", "as before, weights near the earlier ones"
_MAX_RELEASED = 6
_ELEMENTWISE_LOSS_DB = 3.0
# One scale for each tensor saves a few percent of the size. With more noise than this it is never chosen.
_PER_TENSOR_LOSS_DB = 1.0
# Share of the remaining work for measuring single blocks. The rest is for releasing them.
_BLOCKS_SHARE = 0.6
# Share of the search's work that is kept for mixing the precisions of weights, which comes last.
_WEIGHTS_SHARE = 0.3
# A static form with more noise than this, 1 %, is run without the engine's rewrites too.
_DOUBTFUL_DB = 20.0
# If int8 weights alone make at most 1 % of noise in the output, a mix gains nothing visible.
_CLEAR_DB = 40.0
# Samples for histograms: more of them change a percentile little, and each value is counted.
_HISTOGRAM_SAMPLES = 32
_FIDELITY_SAMPLES = 16
_FIDELITY_BYTES = 64 << 20
# Fidelity is measured a hundred times: a pass over its samples should not be more work than this.
_FIDELITY_PASS_S = 0.3


@dataclass(frozen=True, slots=True, eq=False)  # forms hold arrays, which have no single ==
class Candidate:
    """One form of the model.

    Attributes:
        label: The name in reports.
        snr_db: The signal-to-noise ratio of the outputs on calibration samples, compared with the float
            model, in dB.
    """

    label: str
    form: Form
    model: Model
    snr_db: float


@dataclass(frozen=True, slots=True)
class StoppedSearch:
    """Forms that were not tried, because the search reached its limit of work.

    Attributes:
        subject: A description of the forms, for messages.
        needed_s: The search limit in seconds that would be enough for these forms and for all forms that were
            skipped earlier.
        limits: The limits of the budget that these forms may help to meet.
    """

    subject: str
    needed_s: float
    limits: frozenset[str]


@dataclass(slots=True)
class CandidateSet:
    """The candidates, and what happened to all other forms.

    Attributes:
        candidates: The candidates. The float model is first.
        noises: The output noise that each measured block causes.
        noise_samples: The number of calibration samples on which noise was measured, or 0 if it was not.
        dropped: The forms that could not be built or run, with the reasons.
        wrong_rewrites: A sentence for each optimisation of the engine that is disabled for static forms.
        set_aside: The forms that were built but removed, with the reasons. They have more noise than a
            similar form, or they differ from the float model on generated inputs.
    """

    candidates: list[Candidate] = field(default_factory=list)
    noises: list[BlockNoise] = field(default_factory=list)
    noise_samples: int = 0
    dropped: list[str] = field(default_factory=list)
    stops: list[StoppedSearch] = field(default_factory=list)
    set_aside: list[str] = field(default_factory=list)
    wrong_rewrites: list[str] = field(default_factory=list)

    def add(self, label: str, quantizer: Quantizer, form: Form, fidelity: Fidelity) -> Candidate | None:
        """Build a candidate, append it to the set and return it, or return None, see `build`."""
        candidate = self.build(label, quantizer, form, fidelity)
        if candidate is not None:
            self.candidates.append(candidate)
        return candidate

    def build(self, label: str, quantizer: Quantizer, form: Form, fidelity: Fidelity) -> Candidate | None:
        """Build and measure a form. Return None if it changes nothing or fails. Failures go to `dropped`."""
        try:
            built = quantizer.build(form)
            if built is None:
                return None
            snr_db = decibel(fidelity.noise(built))
        except EdgekitError as error:
            self.dropped.append(f"{label}: {str(error).splitlines()[0]}")
            return None
        return Candidate(label, form, built, snr_db)

    def record_stop(self, subject: str, spent_s: float, more_s: float, limits: frozenset[str]) -> None:
        """Record a form that was not tried, because it needs more work than the limit of the search allows.

        Args:
            subject: A description of the form, for messages.
            spent_s: The work of the search so far, in seconds of a nominal processor.
            more_s: The work that the form needs, in the same unit.
            limits: The limits of the budget that the form may help to meet.
        """
        self.stops.append(StoppedSearch(subject, max(spent_s, self.needed_s) + more_s, limits))

    @property
    def needed_s(self) -> float:
        """The search limit in seconds that would allow all forms in `stops`, or 0 if there are none."""
        return max((stop.needed_s for stop in self.stops), default=0.0)

    def undo(self, candidate: Candidate | None) -> None:
        """Undo the last call of `add`, which returned `candidate`.

        If the call failed and `candidate` is None, the last entry of `dropped` is removed.
        """
        if candidate is None:
            self.dropped.pop()
        else:
            self.candidates.remove(candidate)

    def leave_out(self, reasons: Mapping[int, str]) -> None:
        """Remove unsuitable candidates and record the reasons in `dropped`.

        `reasons` maps indices of candidates to reasons.

        Raises:
            ModelError: The float model is unsuitable, so no form can be correct.
        """
        if 0 in reasons:
            raise ModelError(
                f"{self.candidates[0].label}, before any quantization: {reasons[0]}; check the samples, or"
                " take another engine (--backend)"
            )
        self.dropped += [f"{self.candidates[index].label}: {reason}" for index, reason in reasons.items()]
        self.candidates = [
            candidate for index, candidate in enumerate(self.candidates) if index not in reasons
        ]

    def set_apart(self, reasons: Mapping[int, str]) -> None:
        """Remove candidates and record the reasons in `set_aside`. `reasons` maps indices to reasons."""
        self.set_aside += [f"{self.candidates[index].label} ({reason})" for index, reason in reasons.items()]
        self.candidates = [
            candidate for index, candidate in enumerate(self.candidates) if index not in reasons
        ]

    def put_aside(self, candidate: Candidate, better: Candidate) -> None:
        """Remove a candidate and record in `set_aside` that the similar form `better` has less noise."""
        self.candidates.remove(candidate)
        loss_db = better.snr_db - candidate.snr_db
        self.set_aside.append(f"{candidate.label} ({loss_db:.1f} dB more noise than {better.label})")


def find_candidates(
    quantizer: Quantizer,
    calibration: Callable[[], Iterator[Feeds]],
    *,
    per_channel: bool,
    kinds: frozenset[str],
    max_bytes: float = math.inf,
    limit_s: float,
    dims: Mapping[str, int],
    progress: Progress,
    like: Form | None = None,
    group: int = 1,
    prunable: OnnxModel | None = None,
) -> CandidateSet:
    """Build the candidate forms of a model.

    Args:
        quantizer: The quantizer of the optimised float model for the engine of the target.
        calibration: Returns a new iterator over the calibration samples.
        per_channel: Whether the engine supports a weight scale per channel.
        kinds: The kinds of forms that the engine supports, from `quantize.forms.KINDS`.
        max_bytes: The limit on the size of the package.
        limit_s: The limit of the work, see `SearchWork`. Plain forms are always built. Clipped ranges and
            mixed precision are tried until the limit is reached.
        dims: The sizes of the free dimensions.
        progress: Called with the current step, the number of finished parts and the total number of parts.
        like: The only form to build besides the float model, or None to search. Two models of this form are
            built. The first has weights close to those of the earlier model `like.earlier`. The second has
            ordinary weights.
        group: The number of samples in each feed of `calibration`.
        prunable: The float model whose channels may be pruned later, or None.

    Raises:
        RecipeError: `like` does not fit the model.
        BudgetError: No form of the model can meet the limit on the size.
    """
    check_smallest_form(quantizer, max_bytes, prunable=prunable, dims=dims)
    name, source = quantizer.source_form()
    floats = Candidate(name, Form(forms.FLOAT32), source, decibel(0.0))
    candidate_set = CandidateSet([floats])
    if (reason := quantizer.why_no_forms()) is not None:
        candidate_set.dropped.append(f"all other forms: {reason}")
        return candidate_set
    work = SearchWork(quantizer.model, dims, limit_s)
    samples = _fidelity_samples(calibration, work)
    fidelity = Fidelity(
        quantizer.model,
        samples,
        threads=quantizer.threads,
        softmax_axes=quantizer.softmax_axes(),
        parts=quantizer.output_parts(samples[0]),
        work=work,
    )
    candidate_set.noise_samples = len(samples) * group
    if like is not None:
        _add_earlier(candidate_set, quantizer, like, fidelity)
        return candidate_set
    search = _Search(quantizer, calibration, fidelity, per_channel, candidate_set, progress, work)
    search.add_all(kinds)
    return candidate_set


def _add_earlier(candidate_set: CandidateSet, quantizer: Quantizer, like: Form, fidelity: Fidelity) -> None:
    for label, form in ((_NEAR, like), (_LIKE, replace(like, earlier=None))):
        if like.kind != forms.FLOAT32 and candidate_set.add(label, quantizer, form, fidelity) is None:
            why = f": {candidate_set.dropped[0]}" if candidate_set.dropped else ""
            raise RecipeError(f"--like: the earlier package's form fits no layer of this model{why}")


def _fidelity_samples(calibration: Callable[[], Iterator[Feeds]], work: SearchWork) -> list[Feeds]:
    samples: list[Feeds] = []
    total_bytes = 0
    for feeds in islice(calibration(), _FIDELITY_SAMPLES):
        samples.append(feeds)
        total_bytes += sum(array.nbytes for array in feeds.values())
        pass_s = len(samples) * work.inference_s
        if len(samples) >= 2 and (total_bytes > _FIDELITY_BYTES or pass_s > _FIDELITY_PASS_S):
            break
    return samples


@dataclass(frozen=True, slots=True)
class _Search:
    quantizer: Quantizer
    calibration: Callable[[], Iterator[Feeds]]
    fidelity: Fidelity
    per_channel: bool
    candidate_set: CandidateSet
    progress: Progress
    work: SearchWork

    def add_all(self, kinds: frozenset[str]) -> None:
        """Add the forms of some kinds."""
        for kind, label in self.quantizer.labels.items():
            if kind in kinds:
                self.progress(f"building: {label}", None, None)
                self.candidate_set.add(label, self.quantizer, Form(kind), self.fidelity)
        if forms.STATIC_INT8 in kinds:
            if (reason := self.quantizer.why_no_static_int8()) is None:
                self.add_static_forms()
            else:
                self.candidate_set.dropped.append(f"static int8: {reason}")
        if forms.INT8_WEIGHTS in kinds:
            self.mix_weights()

    def mix_weights(self) -> None:
        """Add forms whose noisiest layers keep float16 weights while the others have int8 weights."""
        layers = self.quantizer.int8_layers()
        if not self._weights_need_mixing() or len(layers) < 2:
            return
        costs = []
        for cost in self.quantizer.weight_costs(layers, self.fidelity, self.work.reaches(self.work.limit_s)):
            costs.append(cost)
            self.progress("measuring weights", len(costs), len(layers))
        unknown = frozenset(layers) - {cost.layer for cost in costs}
        if unknown:  # they stay int8
            self.candidate_set.dropped.append(
                f"sensitivity of the weights of {len(unknown)} of {len(layers)} layers: limit of the search"
            )
        for mix in mixes(costs):
            chosen = mix | unknown
            released = len(layers) - len(chosen)
            label = f"int8 weights, {released} of {len(layers)} layers in float16"
            self.progress(f"building: {label}", None, None)
            self.candidate_set.add(
                label, self.quantizer, Form(forms.INT8_WEIGHTS, layers=chosen), self.fidelity
            )

    def _weights_need_mixing(self) -> bool:
        """Whether int8 weights alone make visible noise."""
        whole = next(
            (
                candidate
                for candidate in self.candidate_set.candidates
                if candidate.form.kind == forms.INT8_WEIGHTS
            ),
            None,
        )
        return whole is not None and whole.snr_db < _CLEAR_DB

    def add_static_forms(self) -> None:
        """Add the static int8 forms, then mixed precision of the best one."""
        share = 1 - _WEIGHTS_SHARE if self._weights_need_mixing() else 1.0
        limit_s = self.work.part(share, self.work.limit_s)
        quantizer = self.quantizer
        everything = quantizer.kernels(elementwise=True)
        products = quantizer.kernels(elementwise=False)
        if not products:
            return
        ranges = self._ranges(everything)
        everything = self._with_ranges(everything, ranges)
        products = tuple(name for name in products if name in set(everything))
        if not products:
            return
        variants = self._variants(everything, ranges)
        static = []
        name = _NARROW if quantizer.scheme.is_narrow else _PLAIN
        for where, names in self._kernel_sets(everything, products, variants[0].ranges).items():
            rivals, disabled = [], tuple[str, ...]()
            for variant in variants:
                label = f"{name} {variant.label}, {where}"
                self.progress(f"building: {label}", None, None)
                plan = Plan(quantizer.scheme, names, variant.ranges, variant.per_channel, disabled)
                form = Form(forms.STATIC_INT8, plan, variant.factors)
                candidate = self._add_static(label, form, plan)
                if candidate is not None:
                    rivals.append(candidate)
                    disabled = (candidate.form.plan or plan).disabled_optimizers
            static.extend(_best(rivals, self.candidate_set))
        bases = [candidate for candidate in static if _is_per_channel(candidate) == self.per_channel]
        if bases:
            # Quantizing all layers is tried first and runs fastest; only products are the base if the rest
            # costs too much.
            closest, first = max(bases, key=_snr), bases[0]
            is_close = first.snr_db >= closest.snr_db - _ELEMENTWISE_LOSS_DB
            self._mix_kernels(first if is_close else closest, limit_s)
            self._widen(first)

    def _widen(self, narrow: Candidate) -> None:
        """Add a static form with more bits, where the engine has exact kernels for them, too."""
        plan, scheme = narrow.form.plan, self.quantizer.wider
        if plan is not None and scheme is not None:
            wide = replace(plan, scheme=scheme)
            label = narrow.label.replace(_NARROW, _PLAIN, 1)
            self._add_static(label, replace(narrow.form, plan=wide), wide)

    def _add_static(self, label: str, form: Form, plan: Plan) -> Candidate | None:
        """Add a form; without rewrites of the engine where those are wrong for it."""
        candidate = self.candidate_set.add(label, self.quantizer, form, self.fidelity)
        if candidate is not None and candidate.snr_db >= _DOUBTFUL_DB:
            return candidate
        try:
            wrong = self.quantizer.wrong_rewrites(form, self.fidelity.noise)
        except BackendError:
            return candidate
        if wrong is None:
            return candidate
        self.candidate_set.undo(candidate)
        self.candidate_set.wrong_rewrites.append(f"{label}: {wrong}")
        plan = replace(plan, disabled_optimizers=(*plan.disabled_optimizers, *wrong.names))
        return self.candidate_set.add(label, self.quantizer, replace(form, plan=plan), self.fidelity)

    def _kernel_sets(
        self, everything: Sequence[str], products: Sequence[str], ranges: Ranges
    ) -> dict[str, frozenset[str]]:
        """Return the sets of kernels that the search tries, by name, the largest first."""
        whole = frozenset(everything) - self.quantizer.unlike_joins(everything, ranges)
        sets = {
            "all layers": whole,
            # Decoding boxes and scores takes little time and needs more than 8 bits.
            "decoding in float": whole - self.quantizer.tail(everything),
            "matrix products only": frozenset(products),
        }
        return {
            where: names
            for number, (where, names) in enumerate(sets.items())
            if names not in [*sets.values()][:number]
        }

    def _ranges(self, kernels: Sequence[str]) -> dict[str, Range]:
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            self.work.count(inferences=1)
            self.progress("calibrating", done, None)

        return self.quantizer.ranges(kernels, self.calibration, count)

    def _with_ranges(self, kernels: Sequence[str], ranges: Mapping[str, Range]) -> tuple[str, ...]:
        """Return the kernels whose activations all have a range; record the others, which stay in float."""
        missing = set(self.quantizer.touched(kernels)) - ranges.keys()
        if not missing:
            return tuple(kernels)
        usable = tuple(name for name in kernels if missing.isdisjoint(self.quantizer.touched([name])))
        self.candidate_set.dropped.append(
            f"static int8 of {len(kernels) - len(usable)} of {len(kernels)} layers: on calibration samples"
            f" '{min(missing)}' may be empty or holds values beyond 1e30, which have no code; they stay in"
            " float"
        )
        return usable

    def _variants(self, kernels: Sequence[str], ranges: Mapping[str, Range]) -> list["_Variant"]:
        """Return the ways to quantize these kernels that the search tries."""
        per_channel = self.per_channel
        whole = {name: item.whole() for name, item in ranges.items()}
        scales = "per-channel" if per_channel else "per-tensor"
        variants = [_Variant(scales, per_channel, whole)]
        if per_channel:
            factors, scaled = self.quantizer.equalize(ranges)
            if factors:
                balanced = {name: item.whole() for name, item in scaled.items()}
                variants.append(_Variant(f"{scales} equalized", True, balanced, factors))
        if not self.work.reaches(self.work.limit_s)():
            self.progress("counting values", None, None)
            samples = list(islice(self.calibration(), _HISTOGRAM_SAMPLES))
            for label, clipped in narrow_ranges(self.quantizer, kernels, samples, whole).items():
                variants.append(_Variant(f"{scales}, {label}", per_channel, clipped))
        if per_channel:
            variants.append(_Variant("per-tensor", False, whole))
        return variants

    def _mix_kernels(self, best: Candidate, limit_s: float) -> None:
        """Add mixed-precision forms: the best static one with its noisiest blocks in float."""
        plan, candidate_set = best.form.plan, self.candidate_set
        if plan is None:
            raise ValueError(f"{best.label} is not a static int8 form")
        write = self.quantizer.writer(best.form.factors)
        blocks_done = self.work.reaches(self.work.part(_BLOCKS_SHARE, limit_s))
        for noise in self.quantizer.block_noises(plan, best.form.factors, self.fidelity, blocks_done):
            candidate_set.noises.append(noise)
            self.progress("measuring layers", len(candidate_set.noises), None)
        unknown = plan.kernels.difference(*(noise.block for noise in candidate_set.noises))
        if unknown:
            candidate_set.dropped.append(
                f"sensitivity of {len(unknown)} of {len(plan.kernels)} kernels: limit of the search"
            )
        steps = mixed_plans(
            write,
            plan,
            candidate_set.noises,
            self.fidelity,
            max_blocks=_MAX_RELEASED,
            expired=self.work.reaches(limit_s),
        )
        for count, step in enumerate(steps, start=1):
            if not step.plan.kernels:
                return  # all in float: that candidate exists already
            self.progress("mixed precision", count, _MAX_RELEASED)
            label = f"{best.label}, {count} layer{'s' if count > 1 else ''} in float"
            candidate_set.add(label, self.quantizer, replace(best.form, plan=step.plan), self.fidelity)


def narrow_ranges(
    quantizer: Quantizer, kernels: Sequence[str], samples: Sequence[Feeds], whole: Ranges
) -> dict[str, Ranges]:
    """Return a dict from the label of each `RangeMethod` to ranges without rare extreme values.

    `kernels` are the kernels whose activations get narrower ranges. `whole` contains the full ranges.
    """
    histograms = quantizer.histograms(kernels, samples, whole)
    symmetric = quantizer.scheme.symmetric
    ranges: dict[str, Ranges] = {}
    for method in RANGE_METHODS:
        narrowed = {
            name: method.narrow(histogram, symmetric=symmetric) for name, histogram in histograms.items()
        }
        ranges[method.label] = {**whole, **narrowed}
    return ranges


@dataclass(frozen=True, slots=True)
class _Variant:
    """One way to quantize the same kernels: scales, ranges and channel factors."""

    label: str
    per_channel: bool
    ranges: Ranges
    factors: Factors = field(default_factory=dict)


def _is_per_channel(candidate: Candidate) -> bool:
    return candidate.form.plan is not None and candidate.form.plan.per_channel


def _snr(candidate: Candidate) -> float:
    return candidate.snr_db


def _best(rivals: Sequence[Candidate], candidate_set: CandidateSet) -> list[Candidate]:
    """Keep the better per-channel variant, and the per-tensor one where it is nearly as good."""
    per_channel = sorted((rival for rival in rivals if _is_per_channel(rival)), key=_snr)
    best = per_channel[-1:]
    for rival in rivals:
        if rival in best:
            continue
        if rival in per_channel or (best and rival.snr_db < best[0].snr_db - _PER_TENSOR_LOSS_DB):
            candidate_set.put_aside(rival, best[0])
        else:
            best.append(rival)
    return best
