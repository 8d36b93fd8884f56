"""The section on candidates, with two Pareto plots and a table of all figures."""

from edgekit_host.markup import Markup, el, join, section, table
from edgekit_host.plots.axes import Quantity
from edgekit_host.plots.scatter import Mark, pareto_plot
from edgekit_toolkit.report.document import Report, ReportedCandidate, ReportedStanding
from edgekit_toolkit.report.figures import (
    FIGURES,
    byte_unit,
    common_origin,
    count_threads,
    known_figures,
    origin,
    shorten,
    show,
    show_drop,
)
from edgekit_toolkit.report.page.pieces import badge, badged_heading, figure_cell
from edgekit_toolkit.report.page.variants import variant_table

_KEY = (
    ("meets", "meets all limits"),
    ("breaks", "breaks a limit"),
    ("chosen", "chosen"),
    ("reach", "interval of the score"),
    ("front", "front of these two figures"),
    ("limit", "limit, hatched beyond"),
)


def candidates(report: Report) -> Markup:
    reported = report["candidates"]
    if not reported:
        return section("Candidates", el("p", "No candidate was built.", class_="empty"), key="candidates")
    latency = "latency" if _plotted(reported, "latency") else "host_latency"
    size = "transport" if "transport" in known_figures(reported) else "size"
    plots = [_plot(report, size), _plot(report, latency)]
    drawn = bool(_plotted(reported, size) or _plotted(reported, latency))
    return section(
        "Candidates",
        el("div", *plots, class_="plots"),
        _key() if drawn else None,
        _table(report),
        _set_aside(report["set_aside"]),
        _tournament(report["tournament"]),
        variant_table(report["variants"]),
        key="candidates",
        intro="Left is cheaper, up is better. A point leads to its row in the table." if drawn else None,
    )


def _plotted(reported: list[ReportedCandidate], cost: str) -> list[int]:
    return [
        index
        for index, candidate in enumerate(reported)
        if candidate["figures"][cost]["value"] is not None
        and candidate["figures"]["score"]["value"] is not None
    ]


def _plot(report: Report, cost: str) -> Markup:
    reported, title = report["candidates"], FIGURES[cost][0]
    plotted = _plotted(reported, cost)
    missing = [candidate["id"] for index, candidate in enumerate(reported) if index not in plotted]
    badges = [
        _origin(name, [reported[index] for index in plotted]) for name in (cost, "score")
    ]  # one badge for each figure, so that no axis lacks its origin
    caption = el("figcaption", el("b", f"{title} and score"), *badges)
    note = None
    if missing:
        note = el("p", f"Not in this plot, for want of a figure: {', '.join(missing)}.", class_="note")
    if not plotted:
        return el("figure", el("figcaption", el("b", f"{title} and score")), note)
    closest = report["outcome"]["closest"]
    marks = [_mark(reported[index], index, cost, closest) for index in plotted]
    values = [_values(reported[index], cost) for index in plotted]
    x = _cost_quantity(report, cost, [value for value, _ in values])
    y = _score_quantity(report, [reported[index] for index in plotted])
    return el("figure", caption, pareto_plot(marks, x, y, key=f"plot-{cost}"), note)


def _values(candidate: ReportedCandidate, cost: str) -> tuple[float, float]:
    figures = candidate["figures"]
    return figures[cost]["value"] or 0.0, figures["score"]["value"] or 0.0


def _origin(name: str, plotted: list[ReportedCandidate]) -> Markup | None:
    title = FIGURES[name][0].lower()
    shared = common_origin(candidate["figures"][name] for candidate in plotted)
    if shared is not None:
        return badge(shared, title=title)
    labels = sorted({candidate["figures"][name]["label"] for candidate in plotted})
    return el("span", f"{title} ", el("b", " and ".join(labels)), " · see table", class_="badge mixed")


def _mark(candidate: ReportedCandidate, index: int, cost: str, closest: str | None) -> Mark:
    figures = candidate["figures"]
    lines = [f"{candidate['id']}: {candidate['label']}"]
    for name in (cost, "score"):
        title, unit = FIGURES[name]
        lines.append(f"{title}: {show(figures[name]['value'], unit)} ({origin(figures[name])})")
    text = "\n".join([*lines, _status(candidate)])
    label = shorten(candidate["id"], 12) + (" closest" if candidate["id"] == closest else "")
    return Mark(label, text, f"c{index}", candidate["chosen"], candidate["meets"])


def _cost_quantity(report: Report, cost: str, values: list[float]) -> Quantity:
    """Scale to one unit for the whole axis: MB if the largest value reaches it."""
    title, unit = FIGURES[cost]
    factor, shown_unit = byte_unit(max(values)) if unit == "bytes" else (1.0, unit)
    limit = next((line["max"] for line in report["budget"] if line["limit"] == cost), None)
    scaled = tuple(value / factor for value in values)
    if limit is None:
        return Quantity(title, shown_unit, scaled)
    return Quantity(title, shown_unit, scaled, limit / factor, show(limit, unit))


def _score_quantity(report: Report, plotted: list[ReportedCandidate]) -> Quantity:
    evaluation = report["data"]["evaluation"]
    baseline = 100 * (evaluation["baseline"] or 0.0)  # a plot has scores, and scores have a baseline
    drop = next((line["max"] for line in report["budget"] if line["limit"] == "drop"), None)
    return Quantity(
        f"Score: {evaluation['title']}",
        "%",
        tuple(100 * (candidate["figures"]["score"]["value"] or 0.0) for candidate in plotted),
        None if drop is None else baseline - drop,
        "" if drop is None else f"{baseline - drop:.2f} %",
        baseline,
        tuple(map(_score_reach, plotted)),
    )


def _score_reach(candidate: ReportedCandidate) -> tuple[float, float] | None:
    """Return the interval of a candidate's drop around its score, in percent."""
    points, drop = candidate["figures"]["drop"]["value"], candidate["drop"]
    if points is None or drop is None:
        return None
    score = 100 * (candidate["figures"]["score"]["value"] or 0.0)
    low, high = drop["interval"]
    return max(score - (high - points), 0.0), min(score + (points - low), 100.0)


def _key() -> Markup:
    entries = [el("span", el("i", class_=f"key-{kind}", aria_hidden="true"), text) for kind, text in _KEY]
    return el("p", *entries, class_="key")


def _table(report: Report) -> Markup:
    reported = report["candidates"]
    names = known_figures(reported)
    headings = {
        name: badged_heading(FIGURES[name][0], (candidate["figures"][name] for candidate in reported))
        for name in names
    }
    head = ["", "Candidate", "Status", *(headings[name][0] for name in names)]
    labelled = {name: headings[name][1] for name in names}
    closest = report["outcome"]["closest"]
    rows = [
        _row(candidate, index, labelled, closest=candidate["id"] == closest)
        for index, candidate in enumerate(reported)
    ]
    stated = {name for candidate in reported for name in candidate["figures"]}
    absent = [FIGURES[name][0].lower() for name in FIGURES if name in stated and name not in names]
    note = el("p", f"No candidate has a figure for: {', '.join(absent)}.", class_="note") if absent else None
    numeric = frozenset(range(3, 3 + len(names)))
    return join(table(head, rows, numeric=numeric, caption="All candidates", style="candidates"), note)


def _set_aside(names: list[str]) -> Markup | None:
    return el("p", f"Tried and set aside: {'; '.join(names)}.", class_="note") if names else None


def _tournament(standings: list[ReportedStanding]) -> Markup | None:
    if not standings:
        return None
    rows = [
        el(
            "tr",
            el("th", standing["backend"], scope="row"),
            el(
                "td",
                f"{standing['label']}, {count_threads(standing)}"
                if standing["label"]
                else standing["reason"],
            ),
            *(
                el("td", show(value, unit), class_="n")
                for value, unit in ((standing["latency_ms"], "ms"), (standing["size_bytes"], "bytes"))
            ),
            el("td", show_drop(standing["drop_points"], standing["drop"]), class_="n"),
            class_="chosen" if standing["kept"] else None,
        )
        for standing in standings
    ]
    head = ("Engine", "Its candidate", "Latency", "Size", "Drop")
    caption = "Engines, measured on the host in turns, in fresh processes"
    return join(
        el("h3", caption), table(head, rows, numeric=frozenset({2, 3, 4}), caption=caption, style="engines")
    )


def _row(candidate: ReportedCandidate, index: int, labelled: dict[str, bool], *, closest: bool) -> Markup:
    cells = [
        figure_cell(
            candidate["figures"][name],
            FIGURES[name][1],
            labelled=own_badge,
            broken=name in candidate["violations"],
            interval=candidate["drop"] if name == "drop" else None,
        )
        for name, own_badge in labelled.items()
    ]
    precision = ", ".join(
        f"{count}\N{NO-BREAK SPACE}{kind}" for kind, count in candidate["precision"].items() if count
    )
    style = " ".join(
        name
        for name, holds in (
            ("chosen", candidate["chosen"]),
            ("closest", closest),
            ("dominated", not candidate["pareto"]),
        )
        if holds
    )
    return el(
        "tr",
        el("th", candidate["id"], scope="row", class_="id"),
        el("td", candidate["label"], el("small", precision) if precision else None, class_="label"),
        el("td", f"{'closest, ' if closest else ''}{_status(candidate)}", class_="status"),
        *cells,
        id=f"c{index}",
        class_=style or None,
    )


def _status(candidate: ReportedCandidate) -> str:
    if candidate["violations"]:
        state = f"breaks {', '.join(candidate['violations'])}"
    else:
        state = "meets all" if candidate["meets"] else "not within the budget"
        if candidate["meets"] and candidate["drop"] is not None and not candidate["drop"]["resolved"]:
            state = "drop not resolved"
    if candidate["chosen"]:
        state = f"★ chosen, {state}"
    return state if candidate["pareto"] else f"{state}, dominated"
