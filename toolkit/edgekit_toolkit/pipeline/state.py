"""What one run of `edgekit package` was asked for and found out. Data only."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgekit_runtime.sessions.latency import Latency
from edgekit_runtime.sessions.ort_products import saturates
from edgekit_toolkit.costs.peak_memory import MemoryEstimate
from edgekit_toolkit.evaluation.drops import CONFIDENCE
from edgekit_toolkit.evaluation.judge import Modelled
from edgekit_toolkit.evaluation.scoring import Scores
from edgekit_toolkit.importers.model_file import SourceModel
from edgekit_toolkit.measurement.host_load import HostLoad
from edgekit_toolkit.measurement.peak_memory import PeakMemory
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.packaging.assemble import Assembled, Reference
from edgekit_toolkit.packaging.recipe import Recipe
from edgekit_toolkit.passes.pipeline import PassResult
from edgekit_toolkit.passes.wrong_rewrites import WrongRewrites
from edgekit_toolkit.pipeline.candidate_set import Found
from edgekit_toolkit.pipeline.free_sizes import Size
from edgekit_toolkit.quantize.quantizer import Quantizer
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.samples.split import Ranges, Samples
from edgekit_toolkit.selection.budget import Budget
from edgekit_toolkit.selection.choice import Choice, Measured
from edgekit_toolkit.selection.confirmation import HeldDrop, limits_in_force
from edgekit_toolkit.targets import Target
from edgekit_toolkit.tensorrt.check import TensorRtCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for.

    Attributes:
        model: path of the source model.
        target: to package for.
        budget: limits.
        name, version: of the package.
        calibration, evaluation: paths of samples, or None.
        metric: as for `metrics.find_metric`.
        batch: fixed batch, or None to leave it as it is.
        dims: sizes of free dimensions for measuring.
        labels: one class name a line, or None.
        labels_from_folders: the names are those of the folders that the samples lie in, sorted.
        preprocessing: description of the preprocessing, or None.
        threads: of the engine while judging and measuring.
        search_s: seconds for the mixed-precision search.
        backend: `ort`, `tensorrt` or `litert`; `auto` only for `tournament.search_engines`.
        variants: most variants that the package carries, the default included, at least 1.
        strict: whether the drop must be shown to keep its limit, not only estimated to.
    """

    model: Path
    target: Target
    budget: Budget
    name: str
    version: str
    calibration: Path | None = None
    evaluation: Path | None = None
    metric: str = "auto"
    batch: int | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    labels: str | None = None
    labels_from_folders: bool = False
    preprocessing: Mapping[str, Any] | None = None
    threads: int = 2
    search_s: float = 60.0
    backend: str = "ort"
    variants: int = 1
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The model and the samples that a search starts from.

    Attributes:
        source: as the user gave it.
        sizes: of all free dimensions, for which the figures hold.
        samples: calibration and evaluation.
        feeds: the first calibration samples, at least one.
        steps: what each pass did; none for a `.tflite`.
        wrong_rewrites: what of onnxruntime's optimiser is off for `floats` and its forms, or None.
        floats: the optimised model with inferred shapes, or the `.tflite` as it is.
        ranges: input name -> smallest and largest value that is generated for it, as in the user's samples.
        golden: the golden inputs, and what `floats` makes of them.
        reference: how inputs and outputs look on the calibration samples; None without real ones.
        class_output: name of the first output where the request says that it holds class scores, or None.
    """

    source: SourceModel[Model]
    sizes: Mapping[str, Size]
    samples: Samples
    feeds: Sequence[Feeds]
    steps: Sequence[PassResult]
    wrong_rewrites: WrongRewrites | None
    floats: Model
    ranges: Ranges
    golden: Reference
    reference: Mapping[str, Any] | None
    class_output: str | None

    @property
    def dims(self) -> dict[str, int]:
        """The sizes alone."""
        return {name: size.value for name, size in self.sizes.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Figures of the candidates; each tuple but `problems` holds one entry a candidate, in one order.

    `problems` says why figures are missing, `load` what else this machine did while latencies were measured.
    """

    scores: Scores
    source_latency: Latency
    latencies: tuple[Latency, ...]
    load: HostLoad
    modelled: tuple[Modelled, ...]
    memory: tuple[MemoryEstimate | PeakMemory | None, ...]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """What a candidate would become: its recipe, its package and what it costs."""

    recipe: Recipe
    package: Assembled
    measured: Measured


@dataclass(frozen=True, slots=True)
class Standing:
    """How one engine did in a tournament.

    Attributes:
        backend: its name.
        label: of the candidate that was chosen for it; None where none was.
        size_bytes, latency_ms: of that candidate; the latency was measured here, in turns in several fresh
            processes, of whose medians it is the median.
        drop: of that candidate; None without data.
        reason: why there is none.
        kept: whether the package is for this engine.
    """

    backend: str
    label: str | None
    size_bytes: float | None
    drop: HeldDrop | None
    latency_ms: float | None
    reason: str
    kept: bool


@dataclass(frozen=True, slots=True)
class Carried:
    """A further variant in a package.

    Attributes:
        name: in the package.
        run: that it was found in.
        place: in the tuples of that run.
    """

    name: str
    run: "Run"
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that one run found out; package, evidence and report are made from it.

    `drafts` holds one entry a candidate, in the order of `found.candidates`. So does `held`, the drop that
    each was held to; it is None without data. `peak` is the memory of the chosen one, measured here, or None
    where it was not; `service_bytes` is the estimated peak of the service with it, where memory is limited.
    `tournament` has the engines among which
    this one won. `whole` is the chosen candidate's draft with the `variants` beside it, where there are
    any.
    """

    request: Request
    prepared: Prepared
    quantizer: Quantizer[Any]
    found: Found
    judged: Judged
    drafts: tuple[Draft, ...]
    held: tuple[HeldDrop, ...] | None
    front: frozenset[str]
    choice: Choice
    tensorrt: TensorRtCheck | None
    seconds: Mapping[str, float]
    warnings: Sequence[str]
    peak: PeakMemory | None = None
    service_bytes: int | None = None
    tournament: tuple[Standing, ...] = ()
    variants: tuple[Carried, ...] = ()
    whole: Draft | None = None

    def packaged(self, candidate_id: str) -> Draft:
        """What is written for the chosen candidate: its draft, with its variants if there are any."""
        return self.whole or self.drafts[self.position(candidate_id)]

    @property
    def limits(self) -> Budget:
        """The limits that candidates were held against."""
        return limits_in_force(
            self.request.budget, has_data=self.held is not None, strict=self.request.strict
        )

    def stated_drop(self, place: int) -> HeldDrop | None:
        """The drop of a candidate on samples that chose nothing, where there are any; None without data."""
        confirmation = self.judged.scores.confirmation
        if self.held is None or confirmation is None or self.held[place].held_back:
            return None if self.held is None else self.held[place]
        return HeldDrop(confirmation.drops[place], CONFIDENCE, held_back=True)

    def position(self, candidate_id: str) -> int:
        """Place of a candidate in the tuples."""
        return next(place for place, one in enumerate(self.drafts) if one.measured.id == candidate_id)


def measures_here(target: Target) -> bool:
    """Whether latency on this machine stands for the target: the generic target of this architecture.

    It has VNNI. Without it, int8 kernels take several times as long.
    """
    return target.name == "x86-64" and platform.machine() == "x86_64" and not saturates()
