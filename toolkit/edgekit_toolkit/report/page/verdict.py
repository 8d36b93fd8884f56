"""The top of the page: the name, the warnings, the decision, and each figure with its limit."""

from edgekit_host.markup import Markup, el, join, section, table
from edgekit_host.plots.bars import budget_bar
from edgekit_toolkit.report.document import BudgetLine, Report, ReportedCandidate, find_candidate, subject_of
from edgekit_toolkit.report.figures import (
    FIGURES,
    LIMITS,
    against_limit,
    describe_accuracy,
    describe_proof,
    headroom,
    show,
    show_latency_to_float,
    show_limit,
    show_sizes,
)
from edgekit_toolkit.report.headline import headline
from edgekit_toolkit.report.page.pieces import MEASURED, badge, number


def heading(report: Report) -> Markup:
    target = report["target"]
    settings = (target["backend"], target["form"], target["power_mode"])
    return el(
        "header",
        el("p", f"edgekit {report['edgekit']} · package report", class_="kicker"),
        el("h1", report["name"], " ", el("span", report["version"], class_="version")),
        el(
            "p",
            el("b", target["title"]),
            f" ({target['name']}) · {' · '.join(word for word in settings if word)} · ",
            el("time", report["created"].replace("T", " "), datetime=report["created"]),
            class_="meta",
        ),
    )


def verdict(report: Report) -> Markup:
    """Return the section on the decision.

    Without a package, it shows the binding limits, and which limits could be met on their own.
    """
    outcome = report["outcome"]
    chosen = find_candidate(report, outcome["chosen"])
    ratio = outcome["latency_to_float"]
    if outcome["kind"] == "packaged":
        outcome_title = "Packaged" if chosen is None else f"Packaged: {chosen['id']}, {chosen['label']}"
        is_open = report["accuracy"]["state"] == "not resolved"
        title = f"? {outcome_title}, drop not resolved" if is_open else f"✔ {outcome_title}"
        checks = [
            None if ratio is None else el("p", show_latency_to_float(ratio)),
            None if report["proof"] is None else el("p", describe_proof(report["proof"])),
        ]
        return el(
            "section",
            el("h2", title, id="verdict"),
            el("p", headline(report), class_="headline"),
            el("p", outcome["reason"]),
            _accuracy(report),
            *checks,
            _written(report),
            class_=f"verdict {'unresolved' if is_open else 'packaged'}",
        )
    return el(
        "section",
        el("h2", "✖ Refused: no package was written", id="verdict"),
        el("p", outcome["reason"]),
        _binding(report),
        class_="verdict refused",
    )


def _accuracy(report: Report) -> Markup:
    accuracy = report["accuracy"]
    unsettled = accuracy["state"] in ("not resolved", "not checked")
    state = el("b", f"{accuracy['state'].capitalize()}: ") if unsettled else None
    return el("p", state, describe_accuracy(accuracy))


def _written(report: Report) -> Markup | None:
    package = report["package"]
    if package is None:
        return None
    return el("p", el("code", package["file"]), f" · {package['bytes']:,} bytes, signed", class_="file")


def _binding(report: Report) -> Markup:
    outcome = report["outcome"]
    closest = find_candidate(report, outcome["closest"])
    binding = ", ".join(FIGURES[name][0].lower() if name in FIGURES else name for name in outcome["binding"])
    parts = [join(el("dt", "Binding limit"), el("dd", binding or "none alone; see the table"))]
    if closest is not None:
        parts.append(join(el("dt", "Closest candidate"), el("dd", f"{closest['id']}, {closest['label']}")))
    if outcome["needed"] is not None:
        parts.append(join(el("dt", "What would be needed"), el("dd", outcome["needed"])))
    return join(el("dl", *parts, class_="facts"), _reach(report, closest))


def _reach(report: Report, closest: ReportedCandidate | None) -> Markup | None:
    """Show each limit separately: the value of the closest candidate, and the best value of any."""
    if not report["budget"]:
        return None
    rows = [_reach_row(report, line, closest) for line in report["budget"]]
    head = ("Limit", "Allowed", "Closest candidate", "Best of any candidate", "Reachable on its own")
    return table(head, rows, numeric=frozenset({1, 2, 3}), caption="Each limit on its own")


def _reach_row(report: Report, line: BudgetLine, closest: ReportedCandidate | None) -> Markup:
    name = line["limit"]
    reached = [
        (figure["value"], candidate["id"], figure)
        for candidate in report["candidates"]
        if (figure := candidate["figures"][name])["value"] is not None
    ]
    best = min(reached, key=lambda entry: entry[0] or 0.0, default=None)
    reachable = best is not None and best[0] is not None and best[0] <= line["max"]
    closest_figure = None if closest is None else closest["figures"][name]
    held_text = show_limit(line, None if closest_figure is None else closest_figure["value"])
    broken = closest is not None and name in closest["violations"]
    return el(
        "tr",
        el("th", FIGURES[name][0], scope="row"),
        number(show(line["max"], line["unit"])),
        number(
            f"▲ {held_text}" if broken else held_text,
            style="broken" if broken else "",
            extra=None
            if closest_figure is None or closest_figure["value"] is None
            else badge(closest_figure),
        ),
        number(
            show_limit(line, None) if best is None else f"{show_limit(line, best[0])} ({best[1]})",
            extra=None if best is None else badge(best[2]),
        ),
        el(
            "td",
            "yes" if reachable else "no figure" if best is None else "no",
            class_=None if reachable else "broken",
        ),
    )


def budget(report: Report) -> Markup:
    """Return the section on the budget, with the value, origin, bar and headroom of each limit."""
    subject = subject_of(report)
    lines = {line["limit"]: line for line in report["budget"]}
    stated = lines if subject is None else lines | subject["figures"]
    tiles = [_tile(report, name, lines.get(name), subject) for name in LIMITS if name in stated]
    if report["outcome"]["kind"] == "packaged":
        intro = None
    elif subject is None:
        intro = "No candidate came close enough to show."
    else:
        intro = f"Figures of the closest candidate, {subject['id']}. Nothing was packaged."
    return section("Budget", el("div", *tiles, class_="tiles"), key="budget", intro=intro)


def _tile(report: Report, name: str, line: BudgetLine | None, subject: ReportedCandidate | None) -> Markup:
    title, unit = FIGURES[name]
    figure = None if subject is None else subject["figures"][name]
    value = line["value"] if line is not None else None if figure is None else figure["value"]
    text = show(value, unit) if line is None else show_limit(line, value)
    origin = None
    if value is not None:
        label = line["label"] if line is not None else figure["label"] if figure is not None else "estimated"
        on = figure["on"] if figure is not None else report["target"]["name"]
        origin = badge({"value": value, "label": label, "on": on})
    state = line["state"] if line is not None and line["state"] in ("ok", "over") else "open"
    return el(
        "div",
        el("h3", title),
        el("p", text, class_="value missing" if value is None else "value"),
        origin,
        _against(line),
        *_context(report, name, value, subject),
        class_=f"tile {state}",
    )


def _against(line: BudgetLine | None) -> Markup:
    if line is None:
        return el("p", "no limit set", class_="limit-note")
    value, limit = against_limit(line), line["max"]
    words = headroom(line)
    share = 0.0 if value is None else value / limit if limit > 0 else 1.25 if line["state"] == "over" else 0.0
    sign = {"ok": "✔", "over": "▲"}.get(line["state"], "?")
    text = f"{sign} {words}"
    allowed = f"limit {show(limit, line['unit'])}"
    return join(
        budget_bar(share, line["state"], title=f"{words}, {allowed}"),
        el("p", el("b", text), " ", el("span", allowed), class_="limit-note"),
    )


def _context(
    report: Report, name: str, value: float | None, subject: ReportedCandidate | None
) -> list[Markup]:
    """Return the context of a value: sizes, the source's size and score, host latency."""
    compared = _compared(report, name, value, subject)
    if name not in {"latency", "memory", "energy"} or value is None:
        return compared
    notes = [f"for {show_sizes(report['sizes'])}"] if report["sizes"] else []
    label = None if subject is None else subject["figures"][name]["label"]
    if name == "latency" and label in {"calibrated", "modelled"}:
        notes.append(f"costs: {report['target']['cost_source']}")
    return [*compared, *(el("p", el("span", note), class_="context") for note in notes)]


def _compared(
    report: Report, name: str, value: float | None, subject: ReportedCandidate | None
) -> list[Markup]:
    if subject is None:
        return []
    if name == "size" and value:
        source = report["source"]["bytes"]
        smaller = f"{source / value:.1f} times smaller" if source >= 1.05 * value else "not smaller"
        lines = [el("span", f"source {show(source, 'bytes')}"), el("span", smaller)]
        return [el("p", *lines, badge(MEASURED), class_="context")]
    host = subject["figures"]["host_latency"]
    if name == "latency" and host["value"] is not None:
        return [el("p", el("span", f"host {show(host['value'], 'ms')}"), " ", badge(host), class_="context")]
    score = subject["figures"]["score"]
    if name == "drop" and score["value"] is not None:
        accuracy = report["accuracy"]
        if accuracy["drop"] is None:
            return []
        low, high = accuracy["drop"]["interval"]
        lines = [
            el("span", f"{100 * accuracy['drop']['confidence']:g} % interval {low:.2f} to {high:.2f}"),
            el("span", f"{accuracy['title']} {show(accuracy['score'], 'share')}"),
            el("span", f"source {show(accuracy['baseline'], 'share')}"),
        ]
        return [el("p", *lines, badge(score), class_="context")]
    return []
