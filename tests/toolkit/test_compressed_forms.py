"""The search for compressed forms within a limit on transport: which packages it tries, and what it adds."""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx
import pytest
from tests.toolkit.small_models import model_of, node, random_weight

from edgekit_runtime.errors import BackendError
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.pipeline.candidates import Candidate, CandidateSet
from edgekit_toolkit.pipeline.compressed_forms import CompressionTask, FloatStart, FormCompressor
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.quantize.scheme import ASYMMETRIC
from edgekit_toolkit.quantize.search_work import SearchWork
from edgekit_toolkit.quantize.sensitivity import Fidelity
from edgekit_toolkit.samples.generated import Feeds

EMPTY_BYTES = 1000


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
        draw = np.random.default_rng(1)
        self.samples: list[Feeds] = [{"x": draw.normal(size=(1, 64)).astype(np.float32)} for _ in range(80)]
        self.floats = network()
        self.quantizer = PartlyFailingQuantizer(self.floats, ASYMMETRIC, threads=1)
        self.work = SearchWork(OnnxModel(self.floats), {}, self.limit_s)

    def run(self, max_transport_bytes: float) -> list[Candidate]:
        """Return the candidates that it adds."""
        fidelity = Fidelity(OnnxModel(self.floats), self.samples[:4], threads=1, softmax_axes=[None])
        task = CompressionTask(
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
        start = FloatStart(floats=self.floats, bases={kind: self._base(kind) for kind in self.kinds})
        for _ in FormCompressor(self.candidate_set, task, self.samples, fidelity, start).add_forms():
            pass
        return self.candidate_set.candidates

    def _base(self, kind: str) -> Form:
        if kind != forms.STATIC_INT8:
            return Form(kind)
        kernels = self.quantizer.kernels(elementwise=True)
        ranges = self.quantizer.ranges(kernels, lambda: iter(self.samples), lambda: None)
        return Form(
            kind, Plan(ASYMMETRIC, frozenset(kernels), {name: item.whole() for name, item in ranges.items()})
        )


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

    Search(kinds=(forms.STATIC_INT8, forms.INT8_WEIGHTS), transport_bytes=measure).run(4000)
    # Each begins with a package without codes.
    assert measured[:5] == [*2 * [forms.STATIC_INT8], *2 * [forms.INT8_WEIGHTS], forms.STATIC_INT8]


def test_arithmetic_whose_forms_cannot_be_built_ends_no_search_for_another() -> None:
    search = Search(kinds=(forms.STATIC_INT8, forms.INT8_WEIGHTS))
    search.quantizer.refuses = lambda form: form.kind == forms.STATIC_INT8
    candidates = search.run(7000)
    assert any(deflated_bytes(candidate.model, "") <= 7000 for candidate in candidates)
    assert any(
        f"{forms.STATIC_INT8}, " in note and "refused" in note for note in search.candidate_set.dropped
    )


@pytest.mark.parametrize("max_bytes", range(7100, 7700, 100))
def test_limits_about_the_size_of_8_bits_are_kept_in_each_arithmetic(max_bytes: int) -> None:
    candidates = Search(kinds=(forms.STATIC_INT8, forms.INT8_WEIGHTS)).run(max_bytes)
    sizes = {candidate.form.kind: deflated_bytes(candidate.model, "") for candidate in candidates}
    assert sizes.keys() == {forms.STATIC_INT8, forms.INT8_WEIGHTS}
    assert max(sizes.values()) <= max_bytes


def test_finest_steps_are_tried_once() -> None:
    measured: list[tuple[str, int]] = []

    def measure(model: Model, kind: str) -> int:
        measured.append((kind, deflated_bytes(model, kind)))
        return measured[-1][1]

    candidates = Search(kinds=(forms.STATIC_INT8, forms.INT8_WEIGHTS), transport_bytes=measure).run(7300)
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
