import json
import typing
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.toolkit import report_sample
from tests.toolkit.cases import cases

from edgekit_toolkit.report import document
from edgekit_toolkit.report.document import SCHEMA_ID
from edgekit_toolkit.report.files import write_report

SAMPLES = ("packaged", "refused", "bare")


def _schema() -> dict[str, Any]:
    text = (
        resources.files("edgekit_toolkit.report").joinpath("report.schema.json").read_text(encoding="utf-8")
    )
    return typing.cast("dict[str, Any]", json.loads(text))


def _errors(report: dict[str, Any]) -> list[str]:
    return [error.json_path for error in jsonschema.Draft202012Validator(_schema()).iter_errors(report)]


def test_schema_is_valid_and_carries_the_documents_id() -> None:
    schema = _schema()

    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$id"] == schema["properties"]["schema"]["const"] == SCHEMA_ID


@pytest.mark.parametrize("sample", SAMPLES)
def test_written_json_fits_the_schema(sample: str, tmp_path: Path) -> None:
    _, data = write_report(getattr(report_sample, sample)(), tmp_path, "net")

    assert _errors(json.loads(data.read_text(encoding="utf-8"))) == []


def test_report_with_values_that_are_not_finite_still_fits_the_schema(tmp_path: Path) -> None:
    report = report_sample.packaged()
    report["layers"][0]["noise_share"] = float("inf")
    _, data = write_report(report, tmp_path, "net")

    assert _errors(json.loads(data.read_text(encoding="utf-8"))) == []


def _objects(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all objects with fixed fields."""
    found: list[tuple[Any, ...]] = []
    is_answer = path[:1] == ("samples",) and len(path) == 3
    free = {"tools", "seconds", "precision", "options"}
    if isinstance(value, dict) and not is_answer and (not path or path[-1] not in free):
        found.append(path)
        for key, item in value.items():
            found += _objects(item, (*path, key))
    elif isinstance(value, list) and value:
        found += _objects(value[0], (*path, 0))
    return found


def _of_single_items(value: Any) -> Any:
    """Return a copy in which each list of objects has its first item alone."""
    if isinstance(value, dict):
        return {key: _of_single_items(item) for key, item in value.items()}
    is_list_of_objects = isinstance(value, list) and value and isinstance(value[0], dict)
    return [_of_single_items(value[0])] if is_list_of_objects else value


def _at(report: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        report = report[key]
    return report


def test_schema_refuses_a_missing_and_an_unknown_field_in_every_object() -> None:
    report = _of_single_items(report_sample.packaged())
    validator = jsonschema.Draft202012Validator(_schema())
    paths = _objects(report)
    assert len(paths) > 20
    for path in paths:
        fields = _at(report, path)
        for key in list(fields):
            taken = fields.pop(key)
            assert not validator.is_valid(report), (path, key)
            fields[key] = taken
        fields["unknown"] = 1
        assert not validator.is_valid(report), path
        del fields["unknown"]
    assert validator.is_valid(report)


@cases(
    ("path", "wrong"),
    [
        (("created",), "yesterday"),
        (("source", "sha256"), "abc"),
        (("candidates", 0, "figures", "size", "label"), "guessed"),
        (("candidates", 0, "violations"), ["weight"]),
        (("budget", 0, "unit"), "MB"),
        (("data", "evaluation", "baseline"), 88.8),
        (("outcome", "chosen"), None),
        (("layers", 0, "macs"), -1),
        (("layers", 0, "noise_share"), -0.01),
        (("layers", 0, "noise_share"), 1.01),
        (("steps", 0, "max_error"), "0"),
    ],
)
def test_schema_refuses_wrong_values(path: tuple[Any, ...], wrong: Any) -> None:
    report = report_sample.packaged()
    _at(report, path[:-1])[path[-1]] = wrong

    assert _errors(report) != []


def test_schema_refuses_a_choice_in_a_refusal() -> None:
    report = report_sample.refused()
    report["outcome"]["chosen"] = "C5"

    assert _errors(report) == ["$.outcome.chosen"]


@cases(
    ("kind", "place"),
    [
        (document.Report, ()),
        (document.ReportedTarget, ("target",)),
        (document.ReportedSource, ("source",)),
        (document.Evaluation, ("data", "evaluation")),
        (document.Calibration, ("data", "calibration")),
        (document.ReportedStep, ("steps", 0)),
        (document.ReportedCandidate, ("candidates", 0)),
        (document.ReportedFigure, ("candidates", 0, "figures", "size")),
        (document.ReportedDrop, ("candidates", 0, "drop")),
        (document.BudgetLine, ("budget", 0)),
        (document.Accuracy, ("accuracy",)),
        (document.ReportedOutcome, ("outcome",)),
        (document.ReportedLayer, ("layers", 0)),
        (document.Package, ("package",)),
        (document.Host, ("provenance", "host")),
        (document.Load, ("provenance", "load")),
        (document.Provenance, ("provenance",)),
    ],
)
def test_types_and_schema_name_the_same_fields(kind: type, place: tuple[Any, ...]) -> None:
    """The sample fits the strict schema, so its fields are the schema's."""
    assert set(kind.__annotations__) == set(_at(report_sample.packaged(), place))
