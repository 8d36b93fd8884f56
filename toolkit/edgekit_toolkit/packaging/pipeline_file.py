"""Reads `pipeline.toml`, which defines the stages of a pipeline and the sources of their models.

The fields are documented in docs/guide/pipelines.md.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgekit_runtime.errors import DataError, ManifestError
from edgekit_runtime.package.pipeline import Stage, find_stages_problem, sort_stages
from edgekit_toolkit.targets.loader import read_toml


@dataclass(frozen=True, slots=True)
class MemberSource:
    """The source of a model in a pipeline.

    Attributes:
        path: The path of a package, or of a model file that is packaged first.
        options: The options of `edgekit package`, by name, or None if `path` is a package.
    """

    path: Path
    options: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFile:
    """The content of a `pipeline.toml`.

    Attributes:
        output: The names of the stages whose answers are returned.
        stages: The stages without their engines. Each stage comes after the stages that it depends on.
        sources: The sources of the models, by the name of the stage.
    """

    name: str
    output: tuple[str, ...]
    stages: tuple[Stage, ...]
    sources: Mapping[str, MemberSource]


def read_pipeline_file(path: Path) -> PipelineFile:
    """Read a pipeline file, and fill in defaults.

    Raises:
        DataError: The file is not TOML, a field is invalid, or the stages do not fit together.
    """
    document = read_toml(path, DataError)
    try:
        return _read_document(document, path)
    except (DataError, ManifestError) as cause:
        raise DataError(f"{path}: {str(cause).removeprefix('manifest.json: ')}") from cause


def _read_document(document: dict[str, Any], path: Path) -> PipelineFile:
    tables, output = document.pop("stages", []), document.pop("output", [])
    name = document.pop("name", re.sub(r"[^A-Za-z0-9._-]+", "_", path.stem))
    _check_names(document, output, tables)
    sources = {str(table.get("name")): _take_source(table, path.parent) for table in tables}
    stages = tuple(Stage.from_json(table, f"stages[{index}]") for index, table in enumerate(tables))
    for stage in stages:
        if unknown := [*stage.extra, *(() if stage.when is None else stage.when.extra)]:
            raise DataError(f"stage '{stage.name}': unknown setting '{unknown[0]}'")
    combined = {part for stage in stages for part in stage.stages}
    output = tuple(output or (stage.name for stage in stages if stage.name not in combined))
    if problem := find_stages_problem(stages, output):
        raise DataError(problem)
    for stage in stages:
        if (sources[stage.name] is None) != (stage.ensemble is not None):
            raise DataError(f"stage '{stage.name}' needs one of package, model and ensemble")
    present = {stage: source for stage, source in sources.items() if source is not None}
    return PipelineFile(name=name, output=output, stages=sort_stages(stages), sources=present)


def _check_names(unknown: Mapping[str, Any], output: object, tables: object) -> None:
    if unknown:
        raise DataError(f"unknown setting '{next(iter(unknown))}', known are name, output, stages")
    if not isinstance(output, list) or not all(isinstance(name, str) for name in output):
        raise DataError("output must be a list of stages' names")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise DataError("stages must be tables: [[stages]]")


def _take_source(table: dict[str, Any], folder: Path) -> MemberSource | None:
    """Take the fields of a member out of a stage's table."""
    package, model, options = (table.pop(field, None) for field in ("package", "model", "options"))
    if package is None and model is None and options is None:
        return None
    of = f"stage '{table.get('name')}'"
    if not isinstance(package if model is None else model, str) or (
        package is not None and model is not None
    ):
        raise DataError(f"{of} needs either package or model, the path of a file")
    if options is not None and (model is None or not isinstance(options, dict)):
        raise DataError(f"{of} has options, which are a table for a model that is packaged now")
    return MemberSource(folder / str(package or model), None if model is None else options or {})
