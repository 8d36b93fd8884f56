"""The page of model health: the cost and quality of each version on each device class, over the last day.

A fleet of 100,000 devices reports millions of figures a day. Therefore, the page only uses a few devices of
each version and class that have reported recently. The decisions of rollouts use all figures.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Float, cast, func, select
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgekit_fleet.console.charts import Chart, Line
from edgekit_fleet.console.shell import Console, Section
from edgekit_fleet.store.tables import DeviceRow, FigureRow, ReleasePackageRow, ReleaseRow

SECTION: Final = Section("Model health", "/health", 50)
_HOURS: Final = 24
_VERSIONS: Final = 3
_OF_CLASS: Final = 40
_LOOKED_AT: Final = 600
_CLASSES: Final = 4


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric with a chart on the page.

    Attributes:
        name: The name of the metric in the ids of HTML elements.
        value: The database column whose average over devices is drawn.
        show: Formats a value.
        top: The upper end of the y axis, unless a value is higher.
    """

    name: str
    title: str
    value: Any
    show: Callable[[float], str]
    top: float = 0.0
    bottom: float = 0.0


@dataclass(frozen=True, slots=True)
class VersionSample:
    """A version in the charts, and its devices.

    Attributes:
        style: A class of the style sheet for its lines.
        devices: A dict from device class to the names of devices.
    """

    version: str
    style: str
    devices: Mapping[str, Sequence[str]]


def _read(name: str) -> Any:
    return cast(FigureRow.figures[name].as_float(), Float)


def _write_percent(value: float) -> str:
    return f"{100 * value:.3g} %"


_REQUESTS: Final = func.nullif(_read("requests"), 0)
_METRICS: Final = (
    Metric("p50", "Latency, median", _read("p50_ms"), lambda value: f"{value:.3g} ms"),
    Metric("p99", "Latency, 99th percentile", _read("p99_ms"), lambda value: f"{value:.3g} ms"),
    Metric("energy", "Energy a call", _read("energy_mj"), lambda value: f"{value:.3g} mJ"),
    Metric("failed", "Failed calls", _read("failed") / _REQUESTS, _write_percent, 0.01),
    Metric("drift", "Drift: stability index", _read("drift"), lambda value: f"{value:.2f}", 0.25),
    Metric("agreement", "Agreement with the version before", _read("agreement"), _write_percent, 1.0, 0.9),
)


def show_health(console: Console, request: Request) -> Response:
    """Return the page of the model in the query field `model`, or of the first model by name."""
    hour = int(time.time() // 3600)
    with console.store.snapshot() as session:
        models = session.scalars(
            select(ReleasePackageRow.model).distinct().order_by(ReleasePackageRow.model)
        ).all()
        model = request.query_params.get("model", "") or next(iter(models), "")
        samples = _find_samples(session, model, hour) if model in models else []
        figures = {sample.version: _read_figures(session, model, sample, hour) for sample in samples}
    sizes: dict[str, int] = {}
    for sample in samples:
        for target, devices in sample.devices.items():
            sizes[target] = sizes.get(target, 0) + len(devices)
    classes = sorted(sizes, key=lambda target: (-sizes[target], target))
    charts = {
        target: [
            chart
            for column, metric in enumerate(_METRICS)
            if (chart := _draw(metric, column, target, samples, figures, hour=hour)) is not None
        ]
        for target in sorted(classes[:_CLASSES])
    }
    return console.render(
        request,
        "health.html",
        models=models,
        model=model,
        samples=samples,
        charts=charts,
        left_out=sorted(classes[_CLASSES:]),
        hours=_HOURS,
        of_class=_OF_CLASS,
    )


def _find_samples(session: Session, model: str, hour: int) -> list[VersionSample]:
    """Return the newest versions of a model that have figures of the last day, with some of their devices."""
    versions = session.scalars(
        select(ReleasePackageRow.version)
        .join(ReleaseRow, ReleaseRow.name == ReleasePackageRow.release)
        .where(ReleasePackageRow.model == model)
        .group_by(ReleasePackageRow.version)
        .order_by(func.max(ReleaseRow.created_at).desc())
        .limit(4 * _VERSIONS)
    ).all()
    samples: list[VersionSample] = []
    for version in versions:
        newest = session.scalar(
            select(func.max(FigureRow.hour)).where(FigureRow.model == model, FigureRow.version == version)
        )
        if newest is None or newest <= hour - _HOURS:
            continue
        looked_at = (
            select(FigureRow.device)
            .where(
                FigureRow.model == model,
                FigureRow.version == version,
                FigureRow.hour >= newest - 1,  # the newest one has only begun
            )
            .limit(_LOOKED_AT)
            .subquery()
        )
        # A row a class: each row that the database hands over may wait for another thread of this process.
        rows = session.execute(
            select(DeviceRow.target, func.aggregate_strings(DeviceRow.name, ","))
            .where(DeviceRow.name.in_(select(looked_at.c.device)))
            .group_by(DeviceRow.target)
        )
        chosen = {target: names.split(",")[:_OF_CLASS] for target, names in rows}
        samples.append(VersionSample(version, f"v{len(samples) + 1}", chosen))
        if len(samples) == _VERSIONS:
            break
    return samples


def _read_figures(
    session: Session, model: str, sample: VersionSample, hour: int
) -> dict[str, dict[int, Sequence[float | None]]]:
    """Return the mean of each metric over devices, by class and hour."""
    means: dict[str, dict[int, Sequence[float | None]]] = {}
    for target, devices in sample.devices.items():
        rows = session.execute(
            select(FigureRow.hour, *(func.avg(metric.value) for metric in _METRICS))
            .where(
                FigureRow.device.in_(devices),
                FigureRow.model == model,
                # As an expression, so that the rows are found by their devices: by version and hour there may
                # be a hundred times as many.
                func.coalesce(FigureRow.version, "") == sample.version,
                FigureRow.hour > hour - _HOURS,
            )
            .group_by(FigureRow.hour)
            .order_by(FigureRow.hour)
        )
        means[target] = {at: values for at, *values in rows}
    return means


def _draw(
    metric: Metric,
    column: int,
    target: str,
    samples: Sequence[VersionSample],
    figures: Mapping[str, Mapping[str, Mapping[int, Sequence[float | None]]]],
    *,
    hour: int,
) -> Chart | None:
    lines = []
    for sample in samples:
        points = [
            (float(at), float(value))
            for at, values in figures[sample.version].get(target, {}).items()
            if (value := values[column]) is not None and math.isfinite(value)
        ]
        if points:
            lines.append(Line(name=sample.version, style=sample.style, points=points, has_dots=True))
    if not lines:
        return None
    highest = max(y for line in lines for _, y in line.points)
    lowest = min(y for line in lines for _, y in line.points)
    newest = "; ".join(f"{line.name} {metric.show(line.points[-1][1])}" for line in lines)
    return Chart(
        key=f"{metric.name}-{target}",
        title=metric.title,
        words=f"{metric.title} on class {target} by hour. Now: {newest}.",
        x_name="time (UTC)",
        x_ticks=[(float(at), _write_hour(at)) for at in range(hour - _HOURS + 1, hour + 1) if at % 6 == 0],
        lines=lines[::-1],
        top=max(highest * 1.15, metric.top) if metric.bottom == 0 else metric.top,
        bottom=min(metric.bottom, math.floor(20 * lowest) / 20),
        show=metric.show,
        show_x=_write_hour,
        x_range=(float(hour - _HOURS + 1), float(hour)),
    )


def _write_hour(hour: float) -> str:
    return time.strftime("%H:%M", time.gmtime(hour * 3600))


def list_routes(console: Console) -> list[Route]:
    return [console.get("/health", show_health)]
