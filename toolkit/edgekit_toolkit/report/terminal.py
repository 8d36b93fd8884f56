"""The summary of the report for the terminal. It is readable in any width, without colours and in ASCII."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from edgekit_host.terminal import is_ascii_only, plain, print_line
from edgekit_toolkit.report.document import (
    Accuracy,
    BudgetLine,
    CarriedVariant,
    Report,
    ReportedCandidate,
    ReportedDrop,
    ReportedFigure,
    ReportedStanding,
    find_candidate,
    finite_report,
    subject_of,
)
from edgekit_toolkit.report.figures import (
    FIGURES,
    against_limit,
    common_origin,
    count_threads,
    describe_accuracy,
    describe_proof,
    headroom,
    known_figures,
    shorten,
    show,
    show_drop,
    show_latency_to_float,
    show_limit,
    show_sizes,
)
from edgekit_toolkit.report.headline import headline
from edgekit_toolkit.report.page.variants import describe_variant

_BAR_CELLS = 12
# Beginnings of a budget line.
_STATES = {
    "ok": ("ok", "green"),
    "over": ("OVER", "bold red"),
    "not resolved": ("?", "bold yellow"),
    "not checked": ("?", "bold yellow"),
}
# Tables need this many columns. On a narrower console each row becomes lines of their own.
_TABLE_WIDTH = 76
_LABEL_CHARS = 60
# Columns that fit into 80 characters beside id and label, most wanted first.
_COLUMNS = ("size", "transport", "latency", "score", "drop")
_HELD_BACK_SIGN = "*"
_SHORT = {name: title for name, (title, _) in FIGURES.items()} | {
    "host_latency": "Host lat.",
    "memory": "Memory",
    "drop": "Drop",
}


def print_summary(document: Mapping[str, Any], console: Console, written: Sequence[Path] = ()) -> None:
    """Print the outcome, the warnings, the budget, the candidates on the Pareto front and the written files.

    Args:
        document: The report document, see `report.schema.json`.
        console: The console to print to.
        written: The paths of further files to list, such as the report files.
    """
    report = finite_report(document)
    _print_outcome(report, console)
    _print_warnings(report["warnings"], console)
    _print_budget(report, console)
    _print_candidates(report, console)
    _print_tournament(report["tournament"], console)
    _print_variants(report["variants"], console)
    _print_files(report, written, console)


def _print_outcome(report: Report, console: Console) -> None:
    _print_decision(report, console)
    print_line(console, "Task:", report["task"]["text"], indent=6)


def _print_decision(report: Report, console: Console) -> None:
    outcome, target = report["outcome"], report["target"]
    words = (target["name"], target["backend"], target["power_mode"])
    title = f"{report['name']} {report['version']} for {target['title']}"
    print_line(console, (title, "bold"), f"({', '.join(word for word in words if word)})")
    subject = subject_of(report)
    named = "" if subject is None else f"{subject['id']}, {subject['label']}"
    if outcome["kind"] == "packaged":
        print_line(console, ("PACKAGED", "bold green"), named, indent=9)
        print_line(console, (headline(report) or "", "bold"))
        print_line(console, outcome["reason"])
        _print_accuracy(report["accuracy"], console)
        if outcome["latency_to_float"] is not None:
            print_line(console, show_latency_to_float(outcome["latency_to_float"]))
        if report["proof"] is not None:
            print_line(console, describe_proof(report["proof"]))
        return
    print_line(console, ("REFUSED", "bold red"), outcome["reason"], indent=8)
    if outcome["binding"]:
        print_line(console, "Binding limit:", (", ".join(outcome["binding"]), "bold"))
    if find_candidate(report, outcome["closest"]) is not None:
        print_line(console, "Closest candidate:", named)
    if outcome["needed"] is not None:
        print_line(console, "Needed:", outcome["needed"], indent=8)


def _print_accuracy(accuracy: Accuracy, console: Console) -> None:
    """Print what the samples show about the drop; first the limits that they do not confirm."""
    text = describe_accuracy(accuracy)
    if accuracy["state"] in ("not resolved", "not checked"):
        word = accuracy["state"].upper()
        print_line(console, (word, "bold yellow"), text, indent=len(word) + 1)
    else:
        print_line(console, text)


def _print_warnings(warnings: Sequence[str], console: Console) -> None:
    if warnings:
        console.print()
    for warning in warnings:
        print_line(console, ("WARNING", "bold yellow"), warning, indent=8)


def _print_budget(report: Report, console: Console) -> None:
    if not report["budget"]:
        return
    console.print()
    rows = [_budget_row(report, line, console) for line in report["budget"]]
    widths = [max(cell.cell_len for cell in column) for column in zip(*rows, strict=True)]
    if sum(widths) + len(widths) - 1 > console.width:
        for state, title, value, _, *later in rows:
            print_line(console, state, title, value, indent=3)
            print_line(console, *later, first_indent=3, indent=3)
        return
    grid = Table.grid(padding=(0, 1))
    for column in range(len(widths)):
        grid.add_column(justify="right" if column == 2 else "left")
    for row in rows:
        grid.add_row(*row)
    console.print(grid)


def _budget_row(report: Report, line: BudgetLine, console: Console) -> list[Text]:
    """Return state, name, value and limit, bar, headroom, and origin of the value."""
    subject = subject_of(report)
    figure = None if subject is None else subject["figures"][line["limit"]]
    on = report["target"]["name"] if figure is None else figure["on"]
    word, style = _STATES[line["state"]]
    limit = show(line["max"], line["unit"])
    # A shared unit is printed once: the line has to fit into 80 columns.
    value = show_limit(line, line["value"]).removesuffix(limit[limit.rindex(" ") :])
    is_checked = line["state"] != "not checked"
    return [
        Text(word, style),
        Text(_SHORT[line["limit"]]),
        Text(f"{value} of {limit}" if is_checked else headroom(line)),
        Text(_bar(line, ascii_only=is_ascii_only(console)), style),
        Text(headroom(line) if is_checked else ""),
        Text("" if line["value"] is None else f"({line['label']}, {plain(on, console)})"),
    ]


def _bar(line: BudgetLine, *, ascii_only: bool) -> str:
    full, empty, over = ("#", ".", ">") if ascii_only else ("█", "░", "▶")
    value, limit = against_limit(line), line["max"]
    if value is None:
        return " " * (_BAR_CELLS + 1)
    if line["state"] == "not resolved":
        return "?" * _BAR_CELLS + " "
    share = value / limit if limit > 0 else 2.0 if line["state"] == "over" else 0.0
    if share > 1:
        return full * _BAR_CELLS + over
    # Only an exhausted limit looks full, and only 0 looks empty.
    cells = (
        min(_BAR_CELLS - 1, max(1, round(share * _BAR_CELLS)))
        if 0 < share < 1
        else int(share > 0) * _BAR_CELLS
    )
    return full * cells + empty * (_BAR_CELLS - cells) + " "


def _print_candidates(report: Report, console: Console) -> None:
    closest = report["outcome"]["closest"]  # the refusal names this limit
    floats = report["candidates"][:1]  # what all others are compared with
    listed = [
        c for c in report["candidates"] if c["pareto"] or c["chosen"] or c["id"] == closest or c in floats
    ]
    if not listed:
        return
    names = _columns(listed)
    shared = {name: common_origin(c["figures"][name] for c in listed) for name in names}
    console.print()
    if console.width < _TABLE_WIDTH:
        _print_stacked(listed, names, shared, console)
    else:
        _print_table(listed, names, shared, console)
    _print_key(report, listed, shared, console)


def _print_table(
    listed: Sequence[ReportedCandidate],
    names: Sequence[str],
    shared: Mapping[str, ReportedFigure | None],
    console: Console,
) -> None:
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    grid.add_column("")
    grid.add_column("Candidate", ratio=1, overflow="fold")
    for name in names:
        grid.add_column(_heading(name, shared[name], console), justify="right", no_wrap=True)
    for candidate in listed:
        grid.add_row(*_row(candidate, names, shared, console))
    console.print(grid)


def _print_stacked(
    listed: Sequence[ReportedCandidate],
    names: Sequence[str],
    shared: Mapping[str, ReportedFigure | None],
    console: Console,
) -> None:
    """Print each candidate on several lines: its name, then one line for each figure."""
    origins = [
        f"{_SHORT[name]}: {origin['label']}, {origin['on']}"
        for name, origin in shared.items()
        if origin is not None
    ]
    print_line(console, ("Candidates", "bold"), *([(f"({'; '.join(origins)})", "dim")] if origins else []))
    for candidate in listed:
        sign, label, *cells = _row(candidate, names, shared, console)
        print_line(console, sign, label, indent=2)
        figures = [f"{_SHORT[name]} {cell.plain}" for name, cell in zip(names, cells, strict=True)]
        print_line(console, ", ".join(figures), first_indent=4, indent=4)


def _columns(listed: Sequence[ReportedCandidate]) -> list[str]:
    figures = known_figures(listed)
    return [
        "host_latency" if name == "latency" and name not in figures and "host_latency" in figures else name
        for name in _COLUMNS
        if name in figures or (name == "latency" and "host_latency" in figures)
    ]


def _heading(name: str, shared: ReportedFigure | None, console: Console) -> Text:
    note = "see cells"
    if shared is not None:
        note = f"{shared['label']}\n{plain(shorten(shared['on'], 12), console)}"
    return Text.assemble(_SHORT[name], "\n", (note, "not bold dim"))


def _row(
    candidate: ReportedCandidate,
    names: Sequence[str],
    shared: Mapping[str, ReportedFigure | None],
    console: Console,
) -> list[Text]:
    sign = ">" if candidate["chosen"] else " " if candidate["meets"] else "x"
    style = "bold green" if candidate["chosen"] else "" if candidate["meets"] else "dim"
    label = shorten(f"{candidate['id']} {candidate['label']}", _LABEL_CHARS)
    cells = [Text(sign, style=style), Text(plain(label, console), style=style)]
    for name in names:
        figure = candidate["figures"][name]
        text = show(figure["value"], FIGURES[name][1]).removesuffix(" points")
        broken, unresolved = name in candidate["violations"], False
        if name == "drop" and candidate["drop"] is not None:
            unresolved = not broken and not candidate["drop"]["resolved"]
            sign_of_half = _HELD_BACK_SIGN if candidate["drop"]["held_back"] else ""
            reach = _reach(figure["value"], candidate["drop"])
            text = f"{'?' if unresolved else ''}{text} {reach}{sign_of_half}"
        own = f" {figure['label'][:3]}." if shared[name] is None and figure["value"] is not None else ""
        cell = plain(f"{'!' if broken else ''}{text}{own}", console)
        cells.append(Text(cell, style="red" if broken else "yellow" if unresolved else style))
    return cells


def _reach(points: float | None, drop: ReportedDrop) -> str:
    """Return the wider half of an interval; the page and the JSON hold both ends."""
    low, high = drop["interval"]
    return f"±{max(high - (points or 0.0), (points or 0.0) - low):.1f}"


def _print_key(
    report: Report,
    listed: Sequence[ReportedCandidate],
    shared: Mapping[str, ReportedFigure | None],
    console: Console,
) -> None:
    if report["sizes"]:
        sizes = f"Latency, memory and energy are for {show_sizes(report['sizes'])}"
        print_line(console, (sizes, "dim"))
    labels = {candidate["figures"]["latency"]["label"] for candidate in report["candidates"]}
    if labels & {"calibrated", "modelled"}:
        print_line(console, (f"Costs of latency: {report['target']['cost_source']}", "dim"))
    words = []
    if any(candidate["chosen"] for candidate in listed):
        words.append("> chosen")
    if not all(candidate["meets"] for candidate in listed):
        words.append("x breaks a limit (!)")
    if any(candidate["drop"] and not candidate["drop"]["resolved"] for candidate in listed):
        words.append("? not resolved")
    if None in shared.values():
        words.append("mea. measured, cal. calibrated, mod. modelled, est. estimated")
    if any(c["drop"] is not None and c["drop"]["held_back"] for c in listed):
        words.append(f"{_HELD_BACK_SIGN} on the samples held back; scores are on those that choose")
    hidden = len(report["candidates"]) - len(listed)
    if hidden:
        words.append(f"{hidden} dominated not shown")
    if words:
        print_line(console, ("; ".join(words), "dim"))
    if report["set_aside"]:
        print_line(console, (f"tried and set aside: {'; '.join(report['set_aside'])}", "dim"))


def _print_tournament(standings: Sequence[ReportedStanding], console: Console) -> None:
    if standings:
        console.print()
        print_line(console, ("Engines, in turns in fresh processes on this machine", "bold"))
    for standing in standings:
        style = "bold green" if standing["kept"] else ""
        if standing["label"] is None:
            text = standing["reason"]
        else:
            drop = show_drop(standing["drop_points"], standing["drop"])
            latency, size = show(standing["latency_ms"], "ms"), show(standing["size_bytes"], "bytes")
            text = f"{latency} with {count_threads(standing)}, {size}, drop {drop}: {standing['label']}"
        name = Text(f"{'>' if standing['kept'] else ' '}  {standing['backend']:<8}", style)
        print_line(console, name, text, indent=10)


def _print_variants(variants: Sequence[CarriedVariant], console: Console) -> None:
    if variants:
        console.print()
        print_line(console, ("Further variants in the package", "bold"))
    for variant in variants:
        print_line(console, variant["name"], "", describe_variant(variant), first_indent=3, indent=5)


def _print_files(report: Report, written: Sequence[Path], console: Console) -> None:
    package = report["package"]
    # The document has only file names; here the user needs to find the files.
    folder = written[0].parent if written else Path()
    lines: list[tuple[str, str]] = []
    if package is not None:
        facts = f"({package['bytes']:,} bytes, sha256 {package['sha256'][:12]})"
        lines.append(("Package", f"{folder / package['file']} {facts}"))
    lines += [
        (title, str(folder / name))
        for title, name in (("Recipe", report["recipe"]), ("Evidence", report["evidence"]))
        if name
    ]
    lines += [("Report", str(path)) for path in written]
    if lines:
        console.print()
    for title, text in lines:
        print_line(console, Text(f"{title:<8}"), text, indent=9)
