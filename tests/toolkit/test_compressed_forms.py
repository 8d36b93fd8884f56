"""The search for compressed forms within a limit on transport: which packages it tries, and what it adds."""

import functools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx
import pytest
from tests.toolkit.cases import cases
from tests.toolkit.small_models import model_of, node, random_weight

from edgekit_runtime.errors import BackendError
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.pipeline.candidates import Candidate, CandidateSet, StoppedSearch
from edgekit_toolkit.pipeline.compressed_forms import CompressionTask, FloatStart, FormCompressor, rounding_s
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.quantize.scheme import ASYMMETRIC
from edgekit_toolkit.quantize.search_work import SearchWork
from edgekit_toolkit.quantize.sensitivity import Fidelity
from edgekit_toolkit.samples.generated import Feeds

EMPTY_BYTES = 1000
BOTH = (forms.STATIC_INT8, forms.INT8_WEIGHTS)
FIRST_PACKAGE_S = 0.56
"""Limit of a search for one package, with little to spare."""


def network() -> onnx.ModelProto:
    """Gemm -> Relu -> Gemm, 6,912 weights."""
    draw = np.random.default_rng(0)
    weights = {"w": random_weight(draw, 96, 64), "v": random_weight(draw, 8, 96)}
    nodes = [
        node("Gemm", ["x", "w"], ["h"], "h", transB=1),
        node("Relu", ["h"], ["r"], "r"),
        node("Gemm", ["r", "v"], ["y"], "y", transB=1),
    ]
    return model_of(nodes, weights, {"x": [1, 64]})


def deflated_bytes(model: Model, _kind: str) -> int:
    return len(zlib.compress(model.content, 9))


class PartlyFailingQuantizer(OnnxQuantizer):
    """Fails to build the forms that a test refuses."""

    refuses: Callable[[Form], bool] = staticmethod(lambda _form: False)

    def build(self, form: Form) -> OnnxModel | None:
        if self.refuses(form):
            raise BackendError("refused")
        return super().build(form)


@dataclass
class Search:
    """One search for the compressed forms of `network`.

    Attributes:
        kinds: of the forms to compress.
        transport_bytes: returns the bytes that travel of a model.
    """

    kinds: tuple[str, ...] = (forms.INT8_WEIGHTS,)
    transport_bytes: Callable[[Model, str], int] = deflated_bytes
    candidate_set: CandidateSet = field(default_factory=CandidateSet)
    limit_s: float = math.inf

    def __post_init__(self) -> None:
        self.samples = draw_samples()
        self.floats = network()
        self.quantizer = PartlyFailingQuantizer(self.floats, ASYMMETRIC, threads=1)
        self.work = SearchWork(OnnxModel(self.floats), {}, self.limit_s)

    def run(self, max_transport_bytes: float) -> list[Candidate]:
        """Return the candidates that it adds."""
        fidelity = Fidelity(OnnxModel(self.floats), self.samples[:4], threads=1, softmax_axes=[None])
        task = self.task(max_transport_bytes)
        start = FloatStart(floats=self.floats, bases={kind: base_form(kind) for kind in self.kinds})
        for _ in FormCompressor(self.candidate_set, task, self.samples, fidelity, start).add_forms():
            pass
        return self.candidate_set.candidates

    def task(self, max_transport_bytes: float = math.inf) -> CompressionTask:
        return CompressionTask(
            quantizer=self.quantizer,
            floats=self.floats,
            open_quantizer=lambda _model: self.quantizer,
            calibration=lambda: iter(self.samples),
            dims={},
            arch="x86_64",
            needs_fewer_macs=False,
            max_transport_bytes=max_transport_bytes,
            transport_bytes=self.transport_bytes,
            max_drop=math.inf,
            measure_drops=lambda models: [0.0] * len(models),
            work=self.work,
            progress=lambda _text, _done, _total: None,
        )


@functools.cache
def base_form(kind: str) -> Form:
    """Return the form of an arithmetic whose weights are compressed; its ranges are those of the samples."""
    if kind != forms.STATIC_INT8:
        return Form(kind)
    quantizer = OnnxQuantizer(network(), ASYMMETRIC, threads=1)
    kernels = quantizer.kernels(elementwise=True)
    ranges = quantizer.ranges(kernels, lambda: iter(draw_samples()), lambda: None)
    return Form(
        kind, Plan(ASYMMETRIC, frozenset(kernels), {name: item.whole() for name, item in ranges.items()})
    )


def draw_samples() -> list[Feeds]:
    draw = np.random.default_rng(1)
    return [{"x": draw.normal(size=(1, 64)).astype(np.float32)} for _ in range(80)]


def scripted(*sizes: int) -> Callable[[Model, str], int]:
    """Return a measure of packages that gives these sizes one after the other, then the last again."""
    remaining = list(sizes)
    return lambda _model, _kind: remaining.pop(0) if len(remaining) > 1 else remaining[0]


def test_forms_of_equal_label_and_plan_are_told_apart() -> None:
    search = Search()
    first, second = (Search().run(math.inf)[0] for _ in range(2))
    search.candidate_set.candidates += [first, second]
    search.candidate_set.put_aside(second, first)
    assert search.candidate_set.candidates == [first]


def test_failure_of_a_finer_form_leaves_the_one_that_travels_within_the_limit() -> None:
    search = Search(transport_bytes=scripted(EMPTY_BYTES, 3000))
    labels: list[str] = []

    def is_second_try(form: Form) -> bool:
        assert form.compression is not None
        labels.append(f"weights of {form.compression.mean_bits:.1f} bits")
        return len(labels) == 3  # the first is the package without codes

    search.quantizer.refuses = is_second_try
    candidates = search.run(4000)
    assert f"{forms.INT8_WEIGHTS}, {labels[1]}" in [candidate.label for candidate in candidates]


def test_refusal_speaks_of_the_packages_that_were_tried() -> None:
    search = Search(transport_bytes=scripted(EMPTY_BYTES, 5000, 4800, 4900))
    search.run(4000)
    (note,) = search.candidate_set.dropped
    assert note.endswith("none travels within the limit; the smallest tried takes 4,800 bytes")


def test_search_that_was_stopped_records_the_limit_that_allows_more() -> None:
    sizes = scripted(EMPTY_BYTES, 5000)

    def measure_last(model: Model, kind: str) -> int:
        size = sizes(model, kind)
        if size > EMPTY_BYTES:
            search.work.limit_s = search.work.spent_s
        return size

    search = Search(transport_bytes=measure_last)
    search.run(4000)
    (note,) = search.candidate_set.dropped
    assert note.endswith("the smallest tried takes 5,000 bytes")
    stop = search.candidate_set.stops[0]
    assert stop.subject == "further compressed forms"
    assert stop.needed_s > search.work.limit_s


def test_search_that_cannot_make_a_package_begins_none_and_names_the_limit_that_makes_it() -> None:
    stopped, allowed = Search(limit_s=1e-4), Search()
    assert stopped.run(7000) == []
    assert stopped.work.spent_s == 0
    (stop,) = stopped.candidate_set.stops
    allowed.work.limit_s = stop.needed_s
    (candidate,) = allowed.run(7000)
    assert deflated_bytes(candidate.model, "") <= 7000


def test_every_arithmetic_has_a_package_before_one_is_refined() -> None:
    measured: list[str] = []

    def measure(model: Model, kind: str) -> int:
        measured.append(kind)
        return EMPTY_BYTES if measured.count(kind) == 1 else 5000

    Search(kinds=BOTH, transport_bytes=measure).run(4000)
    # Each begins with a package without codes.
    assert measured[:5] == [*2 * [forms.STATIC_INT8], *2 * [forms.INT8_WEIGHTS], forms.STATIC_INT8]


def test_arithmetic_whose_forms_cannot_be_built_ends_no_search_for_another() -> None:
    search = Search(kinds=BOTH)
    search.quantizer.refuses = lambda form: form.kind == forms.STATIC_INT8
    candidates = search.run(7000)
    assert any(deflated_bytes(candidate.model, "") <= 7000 for candidate in candidates)
    assert any(
        f"{forms.STATIC_INT8}, " in note and "refused" in note for note in search.candidate_set.dropped
    )


@cases("max_bytes", range(7100, 7700, 100))
def test_limits_about_the_size_of_8_bits_are_kept_in_each_arithmetic(max_bytes: int) -> None:
    candidates = Search(kinds=BOTH).run(max_bytes)
    sizes = {candidate.form.kind: deflated_bytes(candidate.model, "") for candidate in candidates}
    assert sizes.keys() == {forms.STATIC_INT8, forms.INT8_WEIGHTS}
    assert max(sizes.values()) <= max_bytes


def test_finest_steps_are_tried_once() -> None:
    measured: list[tuple[str, int]] = []

    def measure(model: Model, kind: str) -> int:
        measured.append((kind, deflated_bytes(model, kind)))
        return measured[-1][1]

    candidates = Search(kinds=BOTH, transport_bytes=measure).run(7300)
    assert max(deflated_bytes(candidate.model, "") for candidate in candidates) < 0.98 * 7300
    assert len(measured) == len(set(measured))


def test_search_that_stops_after_8_bits_leaves_that_form_for_the_refusal() -> None:
    def measure_last(model: Model, kind: str) -> int:
        size = deflated_bytes(model, kind)
        if size > 7000:
            search.work.limit_s = search.work.spent_s
        return size

    search = Search(transport_bytes=measure_last)
    (candidate,) = search.run(7200)
    (note,) = search.candidate_set.dropped
    assert note.endswith(f"the smallest tried takes {deflated_bytes(candidate.model, ''):,} bytes")
    assert search.candidate_set.stops


def test_wide_layer_of_few_channels_counts_the_work_on_its_moment() -> None:
    def work(columns: int) -> float:
        weights = {"w": np.ones((1, columns), np.float32)}
        model = model_of([node("Gemm", ["x", "w"], ["y"], transB=1)], weights, {"x": [1, columns]})
        return rounding_s(model, 1, Search().task())

    assert work(4096) > 6 * work(2048)  # eight times as many products, and some of each column


def test_refusal_of_a_limit_below_every_package_does_not_ask_for_more_work() -> None:
    search = Search(kinds=BOTH, transport_bytes=lambda _model, _kind: 9000, limit_s=FIRST_PACKAGE_S)
    search.run(4000)
    assert len(search.candidate_set.dropped) == 2
    assert search.candidate_set.stops == []


def test_refusal_has_a_form_of_the_fewest_bits_beside_the_packages_that_are_too_large() -> None:
    measured: set[str] = set()

    def measure(_model: Model, kind: str) -> int:
        is_empty = kind not in measured
        measured.add(kind)
        return EMPTY_BYTES if is_empty else 5000

    candidates = Search(kinds=BOTH, transport_bytes=measure).run(1400)
    fewest = [candidate.label for candidate in candidates if candidate.label.endswith("weights of 3 bits")]
    assert fewest == [f"{kind}, weights of 3 bits" for kind in BOTH]


def test_work_that_was_reserved_and_not_done_is_given_back() -> None:
    search = Search()
    search.samples[10] = {"x": np.zeros((1, 63), np.float32)}  # the layers alone cannot run
    assert search.run(7000) == []
    assert search.work.spent_s == pytest.approx(rounding_s(search.floats, 80, search.task(), runs=1))


def test_reserved_work_counts_for_a_part_of_a_larger_request() -> None:
    whole, apart = (
        Search(kinds=kinds, transport_bytes=lambda _model, _kind: 9000) for kinds in (BOTH, BOTH[:1])
    )
    whole.run(4000)
    apart.run(4000)
    probes_s = rounding_s(apart.floats, 80, apart.task(), runs=1)
    # Each arithmetic has a package without codes and a form of 3 bits.
    assert whole.work.spent_s - probes_s == pytest.approx(2 * (apart.work.spent_s - probes_s))


@cases("limit_s", [0.3, FIRST_PACKAGE_S, 0.9, 1.2, 1.5])
@cases("max_bytes", [4000, 7300])
def test_limit_of_the_search_that_a_stop_names_is_enough(limit_s: float, max_bytes: int) -> None:
    (stop,) = find_stops(limit_s, max_bytes)
    assert find_stops(stop.needed_s, max_bytes) == ()


@functools.cache
def find_stops(limit_s: float, max_bytes: int) -> tuple[StoppedSearch, ...]:
    """Return the stops of a search, which depend on nothing else."""
    search = Search(kinds=BOTH, limit_s=limit_s)
    search.run(max_bytes)
    return tuple(search.candidate_set.stops)


def test_8_bits_are_not_tried_for_the_only_package_where_they_may_be_too_large() -> None:
    limit = 7950

    def labels(limit_s: float) -> list[str]:
        search = Search(transport_bytes=lambda _model, _kind: EMPTY_BYTES, limit_s=limit_s)
        return [candidate.label for candidate in search.run(limit)]

    assert labels(math.inf) == [f"{forms.INT8_WEIGHTS}, second-order rounding"]
    assert "bits" in labels(FIRST_PACKAGE_S)[0]


def test_steps_are_searched_with_what_8_bits_took_more_than_expected() -> None:
    sizes: list[int] = []

    def measure(model: Model, kind: str) -> int:
        share = 1.0 if not sizes else 1.15
        sizes.append(int(share * deflated_bytes(model, kind)))
        return sizes[-1]

    limit = 7400
    Search(transport_bytes=measure).run(limit)
    _, fine, first, *_ = sizes
    assert first <= limit < fine
