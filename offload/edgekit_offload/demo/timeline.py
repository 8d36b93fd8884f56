"""Draws the chart of a demo over time: bandwidth, the plan in use, and the latency of each plan."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

from edgekit_host.markup import Markup, el, show_ms, three_digits
from edgekit_host.plots.axes import Axis, log_ticks
from edgekit_host.plots.frame import Frame, drawing, line, text
from edgekit_offload.demo.recording import EDGEKIT, PhaseTimes, Recording, Request, median_of
from edgekit_offload.report.latency_chart import ribbon_part

_WIDTH, _HEIGHT = 760.0, 430.0
_X_MIN, _RIGHT = 66.0, 738.0  # room for half of the last tick
_LINK_TOP, _LINK_BOTTOM = 34.0, 88.0
_RIBBON_TOP: Final = 104.0
_TOP, _BOTTOM = 148.0, 390.0
_COLORS: Final = 8
_WORST: Final = 2.0  # seconds. Slower answers are drawn at the upper edge
_CHARACTER: Final = 7.0  # width of a character


def plan_colors(recording: Recording) -> dict[str, int]:
    """Return a dict from each plan to its colour number, counted from 1."""
    return {policy: number % _COLORS + 1 for number, policy in enumerate(recording.plans)}


def rivals_of(recording: Recording) -> list[str]:
    """Return the names of the forced plans whose latency the chart shows next to edgekit's latency.

    These are `local` and one upload, preferably an upload with a media codec.
    """
    uploads = [policy for policy in recording.plans if policy != "local" and not policy.startswith("cut")]
    fair = next((policy for policy in uploads if policy.partition(":")[0] in {"jpeg", "webp", "opus"}), None)
    rival = fair or next(iter(uploads), None)
    return [policy for policy in ("local", rival) if policy is not None and policy in recording.plans]


def _make_frame(recording: Recording) -> Frame:
    policies = {EDGEKIT, *rivals_of(recording)}
    latencies = [
        min(request.latency_s, _WORST)
        for request in recording.requests
        if request.policy in policies and math.isfinite(request.latency_s) and request.latency_s > 0
    ] or [0.01, 0.1]
    return Frame(
        x=Axis(0.0, max([begun.end_s for begun in recording.begun], default=0.0) or 1.0),
        y=Axis(min(latencies) / 1.2, max(max(latencies) * 1.15, min(latencies) * 2), log=True),
        left=_X_MIN,
        right=_RIGHT,
        top=_TOP,
        bottom=_BOTTOM,
    )


def timeline(recording: Recording) -> Markup:
    frame, colors = _make_frame(recording), plan_colors(recording)
    return drawing(
        (_WIDTH, _HEIGHT),
        _phases(recording, frame),
        _ribbon(recording, frame, colors),
        _grid(frame),
        *(_rival(recording, frame, policy, f"curve{colors[policy]}") for policy in rivals_of(recording)),
        _oracle(recording, frame),
        _own(recording.own, frame),
        title="Bandwidth, plan and latency over time",
        description="The tables below hold the values.",
        style="plot wide",
    )


def _phases(recording: Recording, frame: Frame) -> Markup:
    """Return the bandwidth as steps, with the event of each phase above it."""
    highest = max([begun.phase.mbit_s for begun in recording.begun], default=1.0)
    link = replace(frame, y=Axis(0.0, highest), top=_LINK_TOP + 6, bottom=_LINK_BOTTOM)
    parts: list[Markup] = []
    points: list[tuple[float, float]] = []
    for begun in recording.begun:
        start, right = frame.x_at(begun.begin_s), frame.x_at(begun.end_s)
        points += [(begun.begin_s, begun.phase.mbit_s), (begun.end_s, begun.phase.mbit_s)]
        parts.append(line(start, _LINK_TOP - 8, start, _BOTTOM, "phase"))
        if _CHARACTER * len(begun.phase.title) <= right - start:
            parts.append(text(start + 4, _LINK_TOP - 12, begun.phase.title, "title"))
    heights = (("Mbit/s", _LINK_TOP + 26), (three_digits(highest), _LINK_TOP + 10), ("0", _LINK_BOTTOM + 4))
    return el(
        "g",
        link.trace([(0.0, 0.0), *points, (frame.x.high, 0.0)], "area"),
        link.trace(points, "link"),
        *parts,
        *(text(_X_MIN - 6, y, words, "tick", "end") for words, y in heights),
        aria_hidden="true",
    )


def _ribbon(recording: Recording, frame: Frame, colors: dict[str, int]) -> Markup:
    """Return the ribbon that shows which plan gave each answer."""
    parts = [text(_X_MIN - 6, _RIBBON_TOP + 16, "plan", "tick", "end")]
    runs = [(plan, list(group)) for plan, group in groupby(recording.own, key=lambda request: request.plan)]
    ends_s = [*(group[0].at_s for _, group in runs[1:]), frame.x.high]
    for (plan, group), end_s in zip(runs, ends_s, strict=False):
        begin_s = group[0].at_s
        name = plan or "no answer"
        words = f"{begin_s:.1f} to {end_s:.1f} s: {name}"
        style = f"curve{colors[plan]}" if plan in colors else "other"
        ends = (frame.x_at(begin_s), frame.x_at(end_s))
        parts.append(ribbon_part(ends, _RIBBON_TOP, (name,), words, style))
    return el("g", *parts)


def _grid(frame: Frame) -> Markup:
    y_ticks = [(tick, show_ms(tick)) for tick in log_ticks(frame.y.low, frame.y.high)]
    end_s = frame.x.high
    step = next(step for step in (1, 2, 5, 10, 20, 60, 600) if end_s / step <= 12 or step == 600)
    x_ticks = [(float(at_s), f"{at_s} s") for at_s in range(0, int(end_s) + 1, step)]
    title = text(_X_MIN, _BOTTOM + 36, "Latency of each request (log scale) over time", "axis")
    return el("g", *frame.grid(x_ticks, y_ticks), title, aria_hidden="true")


def _level(frame: Frame, phase: PhaseTimes, latency_s: float, style: str) -> Markup:
    """Return a line at a latency over a phase."""
    y = frame.y_at(frame.y.clamp(latency_s))
    return line(frame.x_at(phase.begin_s), y, frame.x_at(phase.end_s), y, style)


def _rival(recording: Recording, frame: Frame, policy: str, style: str) -> Markup:
    """Return the requests of a rival as points, and its median in each phase as a line."""
    points = [
        el(
            "circle",
            cx=frame.x_at(request.at_s),
            cy=frame.y_at(frame.y.clamp(request.latency_s)),
            r=2.2,
            class_="dot",
        )
        if math.isfinite(request.latency_s)
        else text(frame.x_at(request.at_s), _TOP + 10, "✕", "lost", "middle")
        for request in recording.requests
        if request.policy == policy
    ]
    medians = [(phase, median_of(recording.within(phase, policy))) for phase in recording.begun]
    lines = [
        _level(frame, phase, median, "median")
        for phase, median in medians
        if median is not None and math.isfinite(median)
    ]
    return el("g", *points, *lines, class_=f"rival {style}", aria_hidden="true")


def _oracle(recording: Recording, frame: Frame) -> Markup:
    best = [(phase, recording.oracle(phase)) for phase in recording.begun]
    lines = [
        _level(frame, phase, oracle[1], "oracle")
        for phase, oracle in best
        if oracle is not None and math.isfinite(oracle[1])
    ]
    return el("g", *lines, aria_hidden="true")


def _own(requests: Sequence[Request], frame: Frame) -> Markup:
    points = [
        (request.at_s, frame.y.clamp(request.latency_s))
        for request in requests
        if math.isfinite(request.latency_s)
    ]
    return el("g", frame.trace(points, "own"), aria_hidden="true")
