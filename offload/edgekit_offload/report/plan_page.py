"""A plan as one HTML page: the decision, the chart, the table, each cut, and how everything was measured.

The page has no scripts and sends no requests. Radio buttons select the round-trip time, and CSS shows values
on hover and focus.
"""

import math
from collections.abc import Sequence
from typing import Final

from edgekit_host.markup import (
    Markup,
    el,
    facts,
    join,
    read_style,
    render_document,
    section,
    show_bytes,
    show_ms,
    table,
    three_digits,
    warning_section,
)
from edgekit_offload.planning.explain import (
    describe_answers,
    describe_certificate,
    describe_leakage,
    describe_limits,
)
from edgekit_offload.planning.result import Candidate, Label, PlanningResult
from edgekit_offload.report.decision import curves_of, decide, reaches_of
from edgekit_offload.report.latency_chart import Curve, Reach, colors_of, latency_chart
from edgekit_runtime.offload.objectives import OBJECTIVES

_NONE: Final = "-"
_MOST_COLUMNS: Final = 7
_MEANING: Final = {
    "measured": "run as it is, on the machines named",
    "emulated": "run on this machine made slower, or over an emulated link",
    "modelled": "summed up from measured kernels, not run",
}
_KINDS: Final = {
    "local": "all on the device",
    "upload": "all on the server",
    "cut": "split",
    "cascade": "cascade",
}


def page_style() -> str:
    return read_style(__package__, "page.css")


def render_plan_page(result: PlanningResult) -> str:
    parts = (_verdict, _charts, _ways, _cuts, _tiers, _refusals, _origin)
    return render_document(
        f"{result.model}: offload plan",
        page_style(),
        _heading(result),
        warning_section(result.warnings),
        *(part(result) for part in parts),
    )


def badge(label: Label) -> Markup:
    """Return a badge that shows how figures were obtained, such as `modelled`, with a tooltip."""
    return el("span", el("b", label), class_=f"badge {label}", title=f"{label}: {_MEANING[label]}")


def _heading(result: PlanningResult) -> Markup:
    return el(
        "header",
        el("p", "edgekit offload · plan", class_="kicker"),
        el("h1", result.model),
        el("p", el("b", result.device.name), " and ", el("b", result.server.name), class_="meta"),
    )


def _verdict(result: PlanningResult) -> Markup:
    items = [el("li", text) for text in result.sentences]
    return el(
        "section",
        el("h2", "Decision", id="verdict"),
        *(
            el("p", text, class_="headline" if number == 0 else None)
            for number, text in enumerate(decide(result))
        ),
        el("ul", *items) if items else None,
        class_="verdict",
    )


def _charts(result: PlanningResult) -> Markup:
    """Return a chart and a table for each round trip, one of which is shown."""
    if not result.candidates or not result.rtts_ms or not result.bandwidths_mbit_s:
        return section("Latency", el("p", "No candidate was measured.", class_="empty"), key="latency")
    buttons, labels, panels = [], [], []
    for row, rtt_ms in enumerate(result.rtts_ms):
        checked = "" if row == 0 else None
        buttons.append(
            el("input", type="radio", name="rtt", id=f"rtt{row}", class_=f"pick pick{row}", checked=checked)
        )
        labels.append(el("label", f"{three_digits(rtt_ms)} ms", for_=f"rtt{row}", class_=f"to{row}"))
        panels.append(_panel(result, row))
    choice = el("p", el("span", "Round trip"), *labels, class_="choice") if len(labels) > 1 else None
    intro = f"Lower is better. {OBJECTIVES[result.objective].ribbon}"
    hint = el("p", "Point at the chart, or step through it with Tab, to see values.", class_="note")
    return section("Latency of one request", *buttons, choice, *panels, hint, key="latency", intro=intro)


def _panel(result: PlanningResult, row: int) -> Markup:
    curves, reaches = curves_of(result, row), reaches_of(result, row)
    rtt = f"{three_digits(result.rtts_ms[row])} ms"
    return el(
        "div",
        el("h3", f"At a round trip of {rtt}"),
        latency_chart(result.bandwidths_mbit_s, curves, reaches, key=f"chart{row}"),
        _key(curves, reaches),
        _latency_table(result, curves, rtt),
        class_=f"panel panel{row}",
    )


def _key(curves: Sequence[Curve], reaches: Sequence[Reach]) -> Markup:
    colors = colors_of(reaches)
    entries = [
        el(
            "span",
            el(
                "i",
                curve.tag,
                class_=f"swatch {'other' if index not in colors else f'curve{colors[index]}'}",
            ),
            curve.name,
        )
        for index, curve in enumerate(curves)
    ]
    return el("p", *entries, class_="key")


def _latency_table(result: PlanningResult, curves: Sequence[Curve], rtt: str) -> Markup:
    count = len(result.bandwidths_mbit_s)
    column_count = min(count, _MOST_COLUMNS)
    columns = sorted(
        {round(number * (count - 1) / max(column_count - 1, 1)) for number in range(column_count)}
    )
    rows = []
    for curve in curves:
        cells = [
            el(
                "td",
                show_ms(curve.seconds[at]),
                class_="n best" if curve.seconds[at] <= min(curve.seconds[at] for curve in curves) else "n",
            )
            for at in columns
        ]
        rows.append(el("tr", el("th", f"{curve.tag} · {curve.name}", scope="row", class_="name"), *cells))
    head = ("Candidate", *(f"{three_digits(result.bandwidths_mbit_s[at])} Mbit/s" for at in columns))
    numeric = frozenset(range(1, len(head)))
    return table(head, rows, numeric=numeric, caption=f"Latency at a round trip of {rtt}")


def _ways(result: PlanningResult) -> Markup | None:
    if not result.candidates:
        return None
    head = ("Candidate", "", "Device", "Server", "Sent", "Received", "Answers", "Leakage", "Origin", "Best")
    rows = [_way_row(result, number, candidate) for number, candidate in enumerate(result.candidates)]
    note = el(
        "p",
        "Sent and received: bodies of a request, the mean of the samples. Answers: the share that are not "
        "those of the whole model, and the share of all that is expected to be wrong by it (estimated), with "
        "its standard error. Leakage: PSNR at which an attacker who knows some inputs rebuilt others from "
        "what is sent. It is a lower bound: a better attack recovers more, and so does one who knows more "
        "inputs.",
        class_="note",
    )
    grid = table(head, rows, numeric=frozenset(range(2, 6)), caption="Every candidate")
    return section("Every candidate", grid, note, key="candidates")


def _way_row(result: PlanningResult, number: int, candidate: Candidate) -> Markup:
    costs = candidate.plan.costs
    figures = [show_ms(costs.server_s), show_bytes(costs.upload_bytes), show_bytes(costs.download_bytes)]
    effects = [describe_answers(candidate, result.samples), describe_leakage(candidate)]
    if candidate.kind == "local":
        figures, effects = [_NONE] * len(figures), [_NONE] * len(effects)
    return el(
        "tr",
        el("th", f"{number + 1} · {candidate.name}", scope="row", class_="name"),
        el("td", _KINDS[candidate.kind], class_="kind"),
        *(el("td", figure, class_="n") for figure in (show_ms(costs.device_s), *figures)),
        *(el("td", effect, class_="where") for effect in effects),
        el("td", badge(candidate.label)),
        el("td", _where_best(result, candidate), class_="where"),
        class_="chosen" if candidate.wins else None,
    )


def _where_best(result: PlanningResult, candidate: Candidate) -> str:
    """Return where a candidate is the best one, at the first round trip at which it ever is."""
    for rtt_ms in result.rtts_ms:
        wins = [win for win in candidate.wins if win.rtt_ms == rtt_ms]
        if wins:
            ranges = " and ".join(
                " to ".join(dict.fromkeys(map(three_digits, (win.from_mbit_s, win.to_mbit_s))))
                for win in wins
            )
            return f"{ranges} Mbit/s at {three_digits(rtt_ms)} ms"
    if candidate.is_over_loss:
        relation = "above" if candidate.has_known_loss else "it is not known to keep"
        return f"not offered: {relation} --max-loss {100 * result.max_loss:g} %"
    return "under load" if candidate.in_table else "nowhere"


def _cuts(result: PlanningResult) -> Markup | None:
    cuts = [
        (number, candidate)
        for number, candidate in enumerate(result.candidates)
        if candidate.kind in ("cut", "cascade")
    ]
    if not cuts:
        return None
    cards = [_cut(result, number, candidate) for number, candidate in cuts]
    return section("Cuts", el("div", *cards, class_="cards"), key="cuts")


def _cut(result: PlanningResult, number: int, candidate: Candidate) -> Markup:
    costs = candidate.plan.costs
    sent = [
        f"{tensor.name} as {tensor.coding}, {show_bytes(tensor.raw_bytes)} → {show_bytes(tensor.sent_bytes)}"
        for tensor in candidate.sent
    ]
    entries = [
        ("Sent", "; ".join(sent) or "nothing"),
        ("Leakage (lower bound)", describe_leakage(candidate)),
        ("Answers", describe_answers(candidate, result.samples)),
        ("Proof", describe_certificate(candidate.certificate) if candidate.certificate else "none"),
        (
            "On the device",
            "not known"
            if candidate.device_bytes is None
            else f"{show_bytes(candidate.device_bytes)}, modelled",
        ),
    ]
    return el(
        "article",
        el("h3", f"{number + 1} · {candidate.name} ", badge(candidate.label)),
        None if candidate.explanation == "" else el("p", candidate.explanation),
        _strip("Kernels", candidate.kernels_on_device, result.kernels - candidate.kernels_on_device, "{:.0f}")
        if candidate.kind == "cut"
        else None,
        _strip("Time", 1e3 * costs.device_s, 1e3 * costs.server_s, "{:.3g} ms"),
        facts(entries),
        class_="card",
    )


def _strip(title: str, on_device: float, on_server: float, form: str) -> Markup | None:
    """Return a bar with the parts of device and server."""
    total = on_device + on_server
    if not (math.isfinite(total) and total > 0 and on_device >= 0 and on_server >= 0):
        return None
    share = 100 * on_device / total
    words = f"{form.format(on_device)} device, {form.format(on_server)} server"
    drawing = el(
        "svg",
        el("rect", width=100, height=10, class_="server"),
        el("rect", width=share, height=10, class_="device"),
        viewBox="0 0 100 10",
        preserveAspectRatio="none",
        class_="strip",
        aria_hidden="true",
    )
    return el("p", el("span", title), drawing, el("span", words), class_="part")


def _tiers(result: PlanningResult) -> Markup | None:
    if not result.tiers:
        return None
    rows = [
        el(
            "tr",
            el("th", " / ".join(three_digits(mbit_s) for mbit_s in tier.bandwidths_mbit_s), scope="row"),
            el("td", " / ".join(three_digits(rtt_ms) for rtt_ms in tier.rtts_ms), class_="n"),
            el("td", " / ".join(map(str, tier.kernels)), class_="n"),
            el(
                "td",
                " / ".join(
                    show_bytes(sum(tensor.sent_bytes for tensor in link)) if link else "nothing"
                    for link in tier.sent
                ),
                class_="n",
            ),
            el("td", show_ms(tier.total_ms / 1e3), class_="n"),
            el("td", describe_certificate(tier.certificate), class_="words"),
        )
        for tier in result.tiers
    ]
    head = ("Bandwidths (Mbit/s)", "Round trips (ms)", "Kernels on each tier", "Sent", "Latency", "Proof")
    grid = table(head, rows, numeric=frozenset(range(1, 5)), caption="Placements on three tiers")
    return section("Three tiers", grid, key="tiers", intro="Device, edge and cloud; modelled.")


def _refusals(result: PlanningResult) -> Markup | None:
    if not result.refusals:
        return None
    rows = [
        el("tr", el("th", refusal.name, scope="row", class_="name"), el("td", refusal.reason, class_="words"))
        for refusal in result.refusals
    ]
    return section(
        "Not offered", table(("Candidate", "Reason"), rows, caption="Candidates not offered"), key="refusals"
    )


def _origin(result: PlanningResult) -> Markup:
    entries: list[tuple[str, str | None]] = [
        ("Model", join(el("b", result.model), " ", el("code", result.model_sha256))),
        ("Device", join(result.device.name, " ", badge(result.device.label))),
        ("Limits of the device", describe_limits(result.device) or "none"),
        ("Server", join(result.server.name, " ", badge(result.server.label))),
        ("Minimised", f"{result.objective}, in {result.unit}"),
        ("Samples", f"{result.samples:,}"),
        ("Kernels", f"{result.kernels:,}" if result.kernels else "none: the model cannot be cut"),
    ]
    labels: tuple[Label, ...] = ("measured", "emulated", "modelled")
    legend = [el("p", badge(label), f" {_MEANING[label]}") for label in labels]
    note = (
        "Latency is the time of device and server plus the link as a model of TCP has it (slow start, no "
        "loss), on unloaded machines."
    )
    return section(
        "How it was measured",
        facts(entries),
        el("p", note),
        el("div", *legend, class_="legend"),
        key="origin",
    )
