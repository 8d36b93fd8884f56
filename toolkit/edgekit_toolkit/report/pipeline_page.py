"""The report of a pipeline, with the costs of each stage and of the whole pipeline."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from edgekit_host.markup import el, read_style, render_document, section, table
from edgekit_toolkit.packaging.pipeline_package import StageCosts
from edgekit_toolkit.report.figures import FIGURES, MISSING, show

Row: TypeAlias = tuple[str, ...]
HEAD: Row = ("Stage", "Task", "Pictures", "Size", "Latency", "Memory", "Latency is")
NOTE: Final = (
    "Pictures: the most of a stage for one of the source. Latency: of one picture. Memory: above the engine."
    " Stages run one after the other: the latency of the pipeline is the sum over all pictures."
)


def list_rows(costs: Sequence[StageCosts]) -> list[Row]:
    """Return a table row for each stage. The columns are those of `HEAD`."""
    return [
        (
            stage.name,
            stage.task,
            str(stage.count),
            show(stage.size_bytes, "bytes"),
            show(stage.latency_ms, "ms"),
            show(stage.memory_bytes, "bytes"),
            stage.origin or MISSING,
        )
        for stage in costs
    ]


def list_totals(figures: Mapping[str, float | None], limits: Mapping[str, float]) -> list[Row]:
    """Return a table row with the name, value and limit of each figure of the whole pipeline."""
    return [
        (
            FIGURES[name][0],
            show(value, FIGURES[name][1]),
            f"of {show(limits[name], FIGURES[name][1])}" if name in limits else "no limit",
        )
        for name, value in figures.items()
    ]


def render_pipeline_page(document: Mapping[str, Any], costs: Sequence[StageCosts]) -> str:
    """Return the report of a pipeline as an HTML page.

    Args:
        document: `name`, `version`, `target`, `figures`, `budget` and `package`, as printed by `--json`.
        costs: The costs of the stages with models, in order.
    """
    title = f"{document['name']} {document['version']} for {document['target']}"
    rows = [el("tr", *(el("td", text) for text in row)) for row in list_rows(costs)]
    totals = list_totals(document["figures"], document["budget"])
    return render_document(
        f"{title}: report of a pipeline",
        read_style("edgekit_toolkit.report.page", "report.css"),
        el("h1", title),
        el("p", f"{document['package']}: one package of {len(costs)} models."),
        section(
            "Whole pipeline",
            table(
                ("Figure", "Value", "Limit"),
                [el("tr", *(el("td", text) for text in row)) for row in totals],
                caption="What it takes of the budget",
            ),
            key="whole",
        ),
        section("Stages", table(HEAD, rows, caption="What each stage costs"), key="stages", intro=NOTE),
    )
