"""The page of a running or finished demo: a chart, tables, and the reasons for changes of the plan."""

import math
from typing import Final

from edgekit_host.markup import Markup, el, facts, join, read_style, render_document, section, show_ms, table
from edgekit_offload.demo.recording import EDGEKIT, PhaseTimes, Recording, median_of, percentile
from edgekit_offload.demo.timeline import plan_colors, rivals_of, timeline
from edgekit_offload.report.plan_page import page_style

_REFRESH_MS: Final = 500
# Asks the page's server for the next state, until the demo is over.
_SCRIPT: Final = f"""
const main = document.querySelector('main');
async function refresh() {{
  try {{
    const reply = await fetch('state', {{cache: 'no-store'}});
    if (reply.ok) main.innerHTML = await reply.text();
    if (reply.headers.get('X-Demo') === 'over') return;
  }} catch {{ return; }}
  setTimeout(refresh, {_REFRESH_MS});
}}
refresh();
"""


def render_live_page(recording: Recording) -> str:
    return render_document("edgekit offload demo", _style(), render_state(recording), script=_SCRIPT)


def render_saved_page(recording: Recording) -> str:
    """Return the HTML of a page without scripts and requests, to be saved as a file."""
    return render_document("edgekit offload demo", _style(), render_state(recording))


def _style() -> str:
    return page_style() + read_style(__package__, "demo.css")


def render_state(recording: Recording) -> Markup:
    """Return the content of the page's element `main` for the current state of the demo."""
    return join(
        _heading(recording),
        _verdict(recording),
        section("What happened", timeline(recording), _key(recording), key="timeline"),
        _phases(recording),
        _switches(recording),
        _origin(recording),
    )


def summarize(recording: Recording) -> list[str]:
    own, ratio = recording.own, recording.mean_to_oracle()
    if not own:
        return ["No request was answered yet."]
    right = len(own) - recording.wrong
    silent = [phase.phase.title for phase in recording.begun if not recording.within(phase, EDGEKIT)]
    scope = f"; no request was made in: {', '.join(silent)}" if silent else ", in each phase so far"
    if recording.is_over and not silent:
        scope = ", under load and without the server too"
    sentences = [f"{right:,} of {len(own):,} answers were right{scope}."]
    compared = [phase for phase in recording.begun if recording.oracle(phase) is not None]
    if ratio is not None:
        count = sum(len(recording.within(phase, EDGEKIT)) for phase in compared)
        left_out = len(recording.begun) - len(compared)
        others = f"; in {left_out} a plan had no request, or none answered" if left_out else ""
        sentences.insert(
            0,
            f"edgekit took {ratio:.2f} times as long as the best plan of each phase, on the mean of"
            f" {count:,} requests in {len(compared)} of {len(recording.begun)} phases{others}.",
        )
    return [*sentences, *(_against(recording, policy) for policy in rivals_of(recording))]


def _against(recording: Recording, policy: str) -> str:
    """Return how `policy` in every request compares over all phases, by medians."""
    medians = [
        (median_of(recording.within(phase, policy)), median_of(recording.within(phase, EDGEKIT)))
        for phase in recording.begun
    ]
    pairs = [(rival, own) for rival, own in medians if rival is not None and own is not None]
    lost = sum(not math.isfinite(rival) for rival, _ in pairs)
    ratios = [rival / own for rival, own in pairs if math.isfinite(rival)]
    if not ratios:
        return f"Always {policy}: no answers."
    slowest, fastest = max(ratios), min(ratios)
    span = f"{fastest:.2f} to {slowest:.2f}" if len(ratios) > 1 else f"{fastest:.2f}"
    phases = "from phase to phase" if len(ratios) > 1 else "in the one phase where both had requests"
    text = f"Always {policy} takes {span} times edgekit's median, {phases}"
    return f"{text}; in {lost} it gets no answer." if lost else f"{text}."


def _heading(recording: Recording) -> Markup:
    return el(
        "header",
        el("p", "edgekit offload · demo", class_="kicker"),
        el("h1", "A slow device, a server, and a link that changes"),
        el("p", f"Running {recording.model}.", class_="meta"),
    )


def _verdict(recording: Recording) -> Markup:
    sentences = summarize(recording)
    state = "Result" if recording.is_over else "Running"
    return el(
        "section",
        el("h2", state, id="verdict"),
        el("p", sentences[0], class_="headline"),
        *(el("p", text) for text in sentences[1:]),
        class_="verdict",
    )


def _key(recording: Recording) -> Markup:
    colors = plan_colors(recording)
    entries = [el("span", el("i", class_="stroke own"), "edgekit")]
    entries += [
        el(
            "span",
            el("i", class_=f"stroke median curve{colors[policy]}"),
            f"always {policy}, median of a phase",
        )
        for policy in rivals_of(recording)
    ]
    entries.append(el("span", el("i", class_="stroke oracle"), "oracle: best plan measured in a phase"))
    entries += [
        el("span", el("i", class_=f"block curve{colors[policy]}"), policy) for policy in recording.plans
    ]
    return el("p", *entries, class_="key")


def _phases(recording: Recording) -> Markup:
    head = ("Phase", "edgekit p50", "p95", *(f"always {policy}" for policy in recording.plans), "Oracle")
    rows = [_phase_row(recording, phase) for phase in recording.begun]
    note = el(
        "p",
        "Medians of requests that were measured in this run, with their number: every second request is "
        "edgekit's own choice, the plans take turns in between. Each plan has a connection of its own. A "
        "phase in which a plan had no request has no oracle.",
        class_="note",
    )
    grid = table(head, rows, numeric=frozenset(range(1, len(head))), caption="Latency in each phase")
    return section("Phase by phase", grid, note, key="phases")


def _phase_row(recording: Recording, phase: PhaseTimes) -> Markup:
    own, oracle = recording.within(phase, EDGEKIT), recording.oracle(phase)
    cells = [_latency(median_of(own), count=len(own)), _latency(percentile(own, 0.95))]
    best = None if oracle is None else oracle[0]
    for policy in recording.plans:
        latencies = recording.within(phase, policy)
        cells.append(_latency(median_of(latencies), best=policy == best, count=len(latencies)))
    words = "" if oracle is None else f"{show_ms(oracle[1])} ({oracle[0]})"
    return el(
        "tr", el("th", phase.phase.title, scope="row", class_="name"), *cells, el("td", words, class_="n")
    )


def _latency(latency_s: float | None, *, best: bool = False, count: int = 0) -> Markup:
    """Return a cell with a latency, and the number of requests behind it."""
    if latency_s is None:
        return el("td", "no request", class_="n")
    text = show_ms(latency_s) if math.isfinite(latency_s) else "no answer"
    text += f" ({count})" if count else ""
    return el("td", text, class_="n best" if best else "n")


def _switches(recording: Recording) -> Markup:
    switches = list(recording.switches())
    if not switches:
        own = recording.own
        text = f"The plan did not change: {own[-1].reason}." if own else "No request was answered yet."
        return section("Why it switched", el("p", text), key="switches")
    rows = [
        el(
            "tr",
            el("th", f"{switch.at_s:.1f} s", scope="row", class_="n"),
            el("td", f"{switch.before} → {switch.after}", class_="kind"),
            el("td", switch.reason or "no reason was recorded", class_="words"),
        )
        for switch in switches
    ]
    grid = table(("When", "Plan", "Reason"), rows, numeric=frozenset({0}), caption="Changes of the plan")
    return section("Why it switched", grid, key="switches")


def _origin(recording: Recording) -> Markup:
    entries = [
        ("Label", recording.label),
        ("Machine", recording.machine),
        ("Model", recording.model),
        ("Requests", f"{len(recording.requests):,}, of which {len(recording.own):,} are edgekit's"),
    ]
    note = "Every latency was measured in this run. The bandwidth is what the link was set to."
    return section("How it was measured", facts(entries), el("p", note), key="origin")
