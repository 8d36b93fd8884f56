"""Reads `pipeline.toml`: the stages of a pipeline, and where the models of its members come from.

The fields are documented in docs/guide/pipelines.md.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from edgekit_runtime.dataclass_json import Range, from_plain
from edgekit_runtime.errors import DataError, ManifestError
from edgekit_runtime.package.pipeline import (
    DEFAULT_CROPS,
    MAX_CROPS,
    SOURCE,
    Condition,
    Stage,
    find_stages_problem,
    sort_stages,
)
from edgekit_toolkit.targets.loader import read_toml

_Share = Annotated[float, Range(0, 1)]


@dataclass(frozen=True, slots=True)
class When:
    """Which entries of the input's answer a stage runs for."""

    label: tuple[str, ...] = ()
    min_score: _Share = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """One `[[stages]]` of the file.

    Attributes:
        package: path of a package.
        model: path of a model file, to be packaged with `options`: names and values of `edgekit package`.

    The others are those of `Stage`.
    """

    name: str
    package: str = ""
    model: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    input: str = SOURCE
    crop: Literal["boxes"] | None = None
    margin: _Share = 0.0
    max_crops: Annotated[int, Range(1, MAX_CROPS)] = DEFAULT_CROPS
    when: When | None = None
    ensemble: Literal["mean", "vote"] | None = None
    stages: tuple[str, ...] = ()

    def to_stage(self) -> Stage:
        """Return the stage without its engines.

        Raises:
            ManifestError: a value is wrong.
        """
        condition = None
        if self.when is not None:
            condition = Condition(label=self.when.label, min_score=self.when.min_score)
        return Stage(
            name=self.name,
            input=self.input,
            crop=self.crop,
            margin=self.margin,
            max_crops=self.max_crops,
            when=condition,
            ensemble=self.ensemble,
            stages=self.stages,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFile:
    """A `pipeline.toml`.

    Attributes:
        name: name of the package; empty for the file's.
        output: stages whose answers are shown; empty for all that no ensemble combines.
        stages: each behind those that it needs.
    """

    name: str = ""
    output: tuple[str, ...] = ()
    stages: tuple[StageTable, ...]


def read_pipeline_file(path: Path) -> tuple[PipelineFile, tuple[Stage, ...]]:
    """Return a file with its name and output filled in, and its stages in an order in which they can run.

    Raises:
        DataError: it is no TOML, a field is wrong, or the stages do not fit together.
    """
    document = read_toml(path, DataError)
    try:
        table = from_plain(PipelineFile, document, error=DataError)
        stages = tuple(stage.to_stage() for stage in table.stages)
    except (DataError, ManifestError) as cause:
        raise DataError(f"{path}: {str(cause).removeprefix('manifest.json: ')}") from cause
    combined = {part for stage in stages for part in stage.stages}
    output = table.output or tuple(stage.name for stage in stages if stage.name not in combined)
    problem = find_stages_problem(stages, output) or _find_source_problem(table.stages)
    if problem is not None:
        raise DataError(f"{path}: {problem}")
    name = table.name or re.sub(r"[^A-Za-z0-9._-]+", "_", path.stem)
    return PipelineFile(name=name, output=output, stages=table.stages), sort_stages(stages)


def _find_source_problem(tables: tuple[StageTable, ...]) -> str | None:
    for table in tables:
        sources = [field for field in ("package", "model") if getattr(table, field)]
        if table.ensemble is None and len(sources) != 1:
            return f"stage '{table.name}' needs either package or model, the path of a file"
        if table.ensemble is not None and sources:
            return f"stage '{table.name}' is an ensemble, which has no {sources[0]}"
        if table.options and not table.model:
            return f"stage '{table.name}' has options, which are for a model that is packaged now"
    return None
