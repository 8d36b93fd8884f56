"""A pipeline: several linked models that are packaged and updated as one version.

    source ──> detector ──crops of its boxes──> kind        {"detections": [{"label": "car", "box": [...],
                                                               "kind": {"classes": [...]}}]}

Each stage that runs a model has a member in the package: a folder `members/NAME/` with the manifest and the
artifacts of that model. This module does no I/O.

Source: docs/reference/package-format.md, section "Pipelines".
"""

from collections.abc import Iterable, Mapping
from dataclasses import field
from graphlib import CycleError, TopologicalSorter
from typing import Final

from edgekit_runtime.canonical_json import OPTIONAL, Record
from edgekit_runtime.package.manifest_entries import MANIFEST_NAME, require, require_token
from edgekit_runtime.records import dataclass

SOURCE: Final = "source"
MAX_STAGES: Final = 16
MAX_CROPS: Final = 1000
DEFAULT_CROPS: Final = 16
BOXES: Final = "boxes"
ENSEMBLES: Final = ("mean", "vote")

# Fields of an answer beside the answers of stages.
_RESERVED: Final = frozenset(
    {SOURCE, "label", "index", "score", "box", "classes", "detections", "model_name", "model_version"}
    | {"times_ms"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition(Record):
    """Selects the entries in a stage's answer for which the next stage runs.

    Attributes:
        label: The labels to select. An empty tuple selects all.
        min_score: The lowest score to select.
    """

    label: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    min_score: float = field(default=0.0, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        require(all(isinstance(label, str) for label in self.label), "when: label must hold strings")
        _require_share(self.min_score, "when: min_score")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(Record):
    """One step of a pipeline: a model, or an ensemble of other stages.

    Attributes:
        name: The name of the stage and of its member's folder.
        input: `SOURCE`, or the name of the stage whose images this stage takes.
        crop: `BOXES` to take one crop for each box in the input stage's answer, or None to take whole images.
        margin: How far a crop extends beyond each side of its box, as a fraction of the box size.
        max_crops: The maximum number of crops for each source image. Boxes with higher scores come first.
        when: Selects the entries in the input stage's answer for which this stage runs, or None for all.
        ensemble: One of `ENSEMBLES`, or None for a stage that runs a model.
        stages: The names of the stages that an ensemble combines.
        engines: The backends of the member. At least one of them must be installed.
    """

    name: str
    input: str = field(default=SOURCE, metadata=OPTIONAL)
    crop: str | None = field(default=None, metadata=OPTIONAL)
    margin: float = field(default=0.0, metadata=OPTIONAL)
    max_crops: int = field(default=DEFAULT_CROPS, metadata=OPTIONAL)
    when: Condition | None = field(default=None, metadata=OPTIONAL)
    ensemble: str | None = field(default=None, metadata=OPTIONAL)
    stages: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    engines: tuple[str, ...] = field(default=(), metadata=OPTIONAL)

    def __post_init__(self) -> None:
        require_token(self.name, "stage name")
        of = f"stage '{self.name}'"
        require(isinstance(self.input, str), f"{of}: input must be a name")
        require(self.crop in (None, BOXES), f"{of}: crop is {self.crop!r}, expected '{BOXES}' or null")
        _require_share(self.margin, f"{of}: margin")
        is_count = type(self.max_crops) is int and 1 <= self.max_crops <= MAX_CROPS
        require(
            is_count, f"{of}: max_crops is {self.max_crops!r}, expected a whole number from 1 to {MAX_CROPS}"
        )
        require(
            self.ensemble is None or self.ensemble in ENSEMBLES,
            f"{of}: ensemble is {self.ensemble!r}, expected {' or '.join(ENSEMBLES)}",
        )
        for names in (self.stages, self.engines):
            require(all(isinstance(name, str) for name in names), f"{of}: stages and engines hold names")

    @property
    def selection(self) -> tuple[object, ...]:
        """The fields that select images. Two stages with equal values take the same images."""
        return (self.input, self.crop, self.margin, self.max_crops, self.when)

    @property
    def folder(self) -> str:
        """The folder of the stage's member in the package: `members/NAME/`."""
        return member_folder(self.name)

    @property
    def manifest_path(self) -> str:
        """The path of the member's manifest in the package."""
        return f"{self.folder}{MANIFEST_NAME}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline(Record):
    """The stages of a pipeline. Each stage comes after the stages that it depends on.

    Attributes:
        output: The names of the stages whose answers are returned.

    Raises:
        ManifestError: The stages do not fit together, or are in the wrong order.
    """

    stages: tuple[Stage, ...] = field(metadata={"most": MAX_STAGES})
    output: tuple[str, ...]

    def __post_init__(self) -> None:
        problem = find_stages_problem(self.stages, self.output)
        require(problem is None, f"pipeline: {problem}")
        require(self.stages == sort_stages(self.stages), "pipeline: a stage stands before one that it needs")

    @property
    def members(self) -> tuple[Stage, ...]:
        """The stages that run a model."""
        return tuple(stage for stage in self.stages if stage.ensemble is None)


def member_folder(stage: str) -> str:
    return f"members/{stage}/"


def sort_stages(stages: Iterable[Stage]) -> tuple[Stage, ...]:
    """Sort the stages so that each one comes after the stages that it depends on.

    Raises:
        CycleError: The stages depend on each other in a cycle.
    """
    named = {stage.name: stage for stage in stages}
    sorter = TopologicalSorter({stage.name: _list_needs(stage) for stage in named.values()})
    return tuple(named[name] for name in sorter.static_order())


def find_stages_problem(stages: tuple[Stage, ...], output: tuple[str, ...]) -> str | None:
    """Return a sentence that says why the stages cannot form a pipeline, or None if they can."""
    if not 1 <= len(stages) <= MAX_STAGES:
        return f"there are {len(stages)} stages, expected 1 to {MAX_STAGES}"
    named = {stage.name: stage for stage in stages}
    if len(named) < len(stages):
        names = [stage.name for stage in stages]
        return f"two stages have the name '{next(name for name in names if names.count(name) > 1)}'"
    for stage in stages:
        if unknown := [name for name in _list_needs(stage) if name not in named]:
            return f"stage '{stage.name}' names the stage '{unknown[0]}', there are: {', '.join(named)}"
    try:
        sort_stages(stages)
    except CycleError as cycle:
        return f"stages wait for one another: {' -> '.join(reversed(cycle.args[1]))}"
    problems = (_find_problem(stage, named) for stage in stages)
    return next(filter(None, problems), None) or _find_output_problem(output, named)


def _find_problem(stage: Stage, named: Mapping[str, Stage]) -> str | None:
    of = f"stage '{stage.name}'"
    if stage.name in _RESERVED:
        return f"a stage cannot have the name '{stage.name}', which is a field of answers"
    if stage.input == SOURCE and (stage.crop or stage.when):
        return f"{of} needs the answer of another stage for crop and when; its input is '{SOURCE}'"
    if stage.crop and named[stage.input].ensemble:
        return f"{of} takes crops of '{stage.input}', an ensemble, which has no boxes"
    if (stage.ensemble is None) != (not stage.stages):
        return f"{of} needs both, ensemble and the stages that it combines, or neither"
    combined = [named[name] for name in stage.stages]
    if (
        len(combined) == 1
        or any(part.ensemble for part in combined)
        or len(set(stage.stages)) < len(combined)
    ):
        return f"{of} must combine two or more different stages with models"
    if {part.selection for part in combined} - {stage.selection}:
        return f"{of} and the stages that it combines must have the same input, crop, margin and when"
    return None


def _find_output_problem(output: tuple[str, ...], named: Mapping[str, Stage]) -> str | None:
    if not output or len(set(output)) < len(output):
        return "output must name one stage or more, each once"
    combined = {part: stage.name for stage in named.values() for part in stage.stages}
    for name in output:
        if name not in named:
            return f"output names the stage '{name}', there are: {', '.join(named)}"
        if name in combined:
            return f"output has '{name}', which '{combined[name]}' combines; show the ensemble alone"
        if named[name].input not in (SOURCE, *output):
            return f"output has '{name}', but not '{named[name].input}', within whose answer it stands"
    return None


def _list_needs(stage: Stage) -> list[str]:
    return [name for name in (stage.input, *stage.stages) if name != SOURCE]


def _require_share(value: object, label: str) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    require(is_number and 0 <= value <= 1, f"{label} is {value!r}, expected a number from 0 to 1")  # type: ignore[operator]
