"""The types of the report document. The fields are explained in `report.schema.json`."""

import math
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, cast

SCHEMA_ID = "https://edgekit.dev/report/v1"

Label = Literal["measured", "calibrated", "modelled", "estimated", "not measured"]
State = Literal["ok", "over", "not resolved", "not checked"]


class ReportedFigure(TypedDict):
    value: float | None
    label: Label
    on: str


class ReportedTarget(TypedDict):
    name: str
    title: str
    backend: str
    form: str
    power_mode: str | None
    cost_source: str


class ReportedTensor(TypedDict):
    name: str
    dtype: str
    shape: list[int | str]


class ReportedSource(TypedDict):
    file: str
    sha256: str
    bytes: int
    opset: int | None
    nodes: int
    parameters: int
    inputs: list[ReportedTensor]
    outputs: list[ReportedTensor]


class Calibration(TypedDict):
    kind: str
    samples: int
    sha256: str | None
    noise_samples: int


class Evaluation(TypedDict):
    kind: str
    samples: int
    held_back: int
    sha256: str | None
    metric: str
    title: str
    baseline: float | None
    field_samples: int


class Data(TypedDict):
    calibration: Calibration
    evaluation: Evaluation


class ReportedStep(TypedDict):
    name: str
    applied: bool
    reason: str
    max_error: float | None
    bytes_before: int
    bytes_after: int
    nodes_before: int
    nodes_after: int


# "from" is a keyword of Python.
Size = TypedDict("Size", {"name": str, "size": int, "from": str})


class ReportedDrop(TypedDict):
    interval: list[float]
    confidence: float
    samples: int
    held_back: bool
    resolved: bool


class ReportedCandidate(TypedDict):
    id: str
    label: str
    chosen: bool
    pareto: bool
    meets: bool
    figures: dict[str, ReportedFigure]
    drop: ReportedDrop | None
    violations: list[str]
    precision: dict[str, int]


class BudgetLine(TypedDict):
    limit: str
    max: float
    unit: str
    value: float | None
    high: float | None
    label: Label
    state: State


class Accuracy(TypedDict):
    state: State
    metric: str
    title: str
    limit: float | None
    score: float | None
    baseline: float | None
    drop_points: float | None
    drop: ReportedDrop | None
    samples_needed: int | None


class LatencyToFloat(TypedDict):
    modelled: ReportedFigure
    uncertainty: float
    measured: ReportedFigure
    measured_to_source: ReportedFigure


class ReportedOutcome(TypedDict):
    kind: Literal["packaged", "refused"]
    chosen: str | None
    reason: str
    binding: list[str]
    closest: str | None
    needed: str | None
    latency_to_float: LatencyToFloat | None
    slower_than: str


class ReportedLayer(TypedDict):
    name: str
    op: str
    bytes_before: int
    bytes_after: int
    precision: str
    macs: int
    noise_share: float | None


class Package(TypedDict):
    file: str
    bytes: int
    sha256: str
    key_id: str


class Host(TypedDict):
    cpu: str
    instruction_set: str
    exact_products_by: str
    cores: int
    os: str
    python: str


class Load(TypedDict):
    cores: int
    load_average: float | None
    others_share: float | None
    stolen_share: float | None
    spread: float


class Provenance(TypedDict):
    tools: dict[str, str]
    host: Host
    load: Load
    seconds: dict[str, float]
    recipe_sha256: str | None


class ReportedStanding(TypedDict):
    backend: str
    label: str | None
    size_bytes: float | None
    drop_points: float | None
    drop: ReportedDrop | None
    latency_ms: float | None
    threads: int | None
    reason: str
    kept: bool


class CarriedVariant(TypedDict):
    name: str
    backend: str
    label: str
    figures: dict[str, ReportedFigure]
    drop: ReportedDrop | None


class Proof(TypedDict):
    engine: str
    device_engine: str
    note: str


class CompressionStep(TypedDict):
    step: str
    bytes: int


class ReportedTask(TypedDict):
    name: str | None
    options: dict[str, Any]
    text: str


class ReportedSample(TypedDict):
    name: str
    width: int | None
    height: int | None
    float: dict[str, Any]
    package: dict[str, Any]


class Report(TypedDict):
    schema: str
    edgekit: str
    created: str
    command: str
    name: str
    version: str
    target: ReportedTarget
    source: ReportedSource
    warnings: list[str]
    data: Data
    steps: list[ReportedStep]
    sizes: list[Size]
    candidates: list[ReportedCandidate]
    set_aside: list[str]
    tournament: list[ReportedStanding]
    variants: list[CarriedVariant]
    budget: list[BudgetLine]
    accuracy: Accuracy
    outcome: ReportedOutcome
    proof: Proof | None
    task: ReportedTask
    samples: list[ReportedSample]
    compression: list[CompressionStep]
    layers: list[ReportedLayer]
    package: Package | None
    recipe: str | None
    evidence: str | None
    provenance: Provenance


def finite_report(document: Mapping[str, Any]) -> Report:
    """Return a copy with None instead of NaN and infinity, which JSON does not support.

    A warning lists up to five of the replaced values.
    """
    paths: list[str] = []
    copy = _finite(document, "", paths)
    if paths:
        listed = ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
        copy["warnings"] = [
            *copy["warnings"],
            f"{len(paths)} value(s) were not finite and are shown as missing: {listed}.",
        ]
    return cast("Report", copy)


def _finite(value: Any, path: str, paths: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item, f"{path}.{key}".lstrip("."), paths) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item, f"{path}[{index}]", paths) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        paths.append(path)
        return None
    return value


def find_candidate(report: Report, candidate_id: str | None) -> ReportedCandidate | None:
    return next((candidate for candidate in report["candidates"] if candidate["id"] == candidate_id), None)


def subject_of(report: Report) -> ReportedCandidate | None:
    """Return the chosen candidate. If none was chosen, return the one closest to the limits, or None."""
    outcome = report["outcome"]
    return find_candidate(report, outcome["chosen"] or outcome["closest"])
