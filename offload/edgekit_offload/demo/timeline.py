"""The chart of a demo over time: bandwidth, the plan in use as a ribbon, and latency of each rival."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Final

from edgekit_host.markup import Markup, el, show_ms, three_digits
from edgekit_host.plots.axes import log_ticks
from edgekit_offload.demo.recording import EDGEKIT, Recording, Request, median_of

_WIDTH, _HEIGHT = 760.0, 430.0
_X_MIN, _RIGHT = 66.0, 748.0
_LINK_TOP, _LINK_BOTTOM = 34.0, 88.0
_RIBBON_TOP, _RIBBON_BOTTOM = 104.0, 128.0
_TOP, _BOTTOM = 148.0, 390.0
_COLORS: Final = 8
_WORST: Final = 2.0  # seconds; slower answers are drawn at the upper edge
_CHARACTER: Final = 7.0  # width of a character


def plan_colors(recording: Recording) -> dict[str, int]:
    """Return plan -> number of its colour, for both its line and its part of the ribbon."""
    return {policy: number % _COLORS + 1 for number, policy in enumerate(recording.plans)}


def rivals_of(recording: Recording) -> list[str]:
    """Return the plans that have a line of their own: always local, and the fair upload."""
    uploads = [policy for policy in recording.plans if policy != "local" and not policy.startswith("cut")]
    fair = next((policy for policy in uploads if policy.partition(":")[0] in {"jpeg", "webp", "opus"}), None)
    rival = fair or next(iter(uploads), None)
    return [policy for policy in ("local", rival) if policy is not None and policy in recording.plans]


class _TimeFrame:
    def __init__(self, recording: Recording) -> None:
        self.end_s = max([begun.end_s for begun in recording.begun], default=0.0) or 1.0
        policies = {EDGEKIT, *rivals_of(recording)}
        latencies = [
            min(request.latency_s, _WORST)
            for request in recording.requests
            if request.policy in policies and math.isfinite(request.latency_s) and request.latency_s > 0
        ] or [0.01, 0.1]
        self.low, self.high = min(latencies) / 1.2, max(max(latencies) * 1.15, min(latencies) * 2)

    def x(self, at_s: float) -> float:
        return _X_MIN + (_RIGHT - _X_MIN) * min(max(at_s / self.end_s, 0.0), 1.0)

    def y(self, latency_s: float) -> float:
        clipped_s = min(max(latency_s, self.low), self.high)
        return _BOTTOM - (_BOTTOM - _TOP) * math.log(clipped_s / self.low) / math.log(self.high / self.low)


def timeline(recording: Recording) -> Markup:
    frame, colors = _TimeFrame(recording), plan_colors(recording)
    return el(
        "svg",
        el("title", "Bandwidth, plan and latency over time", id="time-title"),
        el("desc", "The tables below hold the values.", id="time-desc"),
        _phases(recording, frame),
        _ribbon(recording, frame, colors),
        _grid(frame),
        *(_rival(recording, frame, policy, f"curve{colors[policy]}") for policy in rivals_of(recording)),
        _oracle(recording, frame),
        _own(recording.own, frame),
        viewBox=f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}",
        class_="plot wide",
        role="img",
        aria_labelledby="time-title time-desc",
    )


def _phases(recording: Recording, frame: _TimeFrame) -> Markup:
    """Return the bandwidth as steps, with the event of each phase above it."""
    highest = max([begun.phase.mbit_s for begun in recording.begun], default=1.0)
    parts, points = [], []
    for begun in recording.begun:
        start, right = frame.x(begun.begin_s), frame.x(begun.end_s)
        y = _LINK_BOTTOM - (_LINK_BOTTOM - _LINK_TOP - 6) * begun.phase.mbit_s / highest
        points += [f"{start:.1f},{y:.1f}", f"{right:.1f},{y:.1f}"]
        parts.append(el("line", x1=start, y1=_LINK_TOP - 8, x2=start, y2=_BOTTOM, class_="phase"))
        room = int((right - start) / _CHARACTER)
        if room >= len(begun.phase.title):
            parts.append(el("text", begun.phase.title, x=start + 4, y=_LINK_TOP - 12, class_="title"))
    area = [f"{_X_MIN:.1f},{_LINK_BOTTOM:.1f}", *points, f"{frame.x(frame.end_s):.1f},{_LINK_BOTTOM:.1f}"]
    scale = [
        el("text", three_digits(highest), x=_X_MIN - 6, y=_LINK_TOP + 10, class_="tick", text_anchor="end"),
        el("text", "Mbit/s", x=_X_MIN - 6, y=_LINK_TOP + 26, class_="tick", text_anchor="end"),
        el("text", "0", x=_X_MIN - 6, y=_LINK_BOTTOM + 4, class_="tick", text_anchor="end"),
    ]
    return el(
        "g",
        el("polygon", points=" ".join(area), class_="area"),
        el("polyline", points=" ".join(points), class_="link"),
        *parts,
        *scale,
        aria_hidden="true",
    )


def _ribbon(recording: Recording, frame: _TimeFrame, colors: dict[str, int]) -> Markup:
    """Return the ribbon that shows which plan gave each answer."""
    own = recording.own
    parts = [
        el("text", "plan", x=_X_MIN - 6, y=_RIBBON_TOP + 16, class_="tick", text_anchor="end"),
    ]
    runs = [(plan, list(group)) for plan, group in groupby(own, key=lambda request: request.plan)]
    for number, (plan, group) in enumerate(runs):
        begin_s = group[0].at_s
        end_s = runs[number + 1][1][0].at_s if number + 1 < len(runs) else frame.end_s
        start, width = frame.x(begin_s), max(frame.x(end_s) - frame.x(begin_s), 1.0)
        name = plan or "no answer"
        style = f"curve{colors[plan]}" if plan in colors else "other"
        parts.append(
            el(
                "g",
                el("title", f"{begin_s:.1f} to {end_s:.1f} s: {name}"),
                el("rect", x=start, y=_RIBBON_TOP, width=width, height=_RIBBON_BOTTOM - _RIBBON_TOP),
                el("text", name, x=start + width / 2, y=_RIBBON_TOP + 16.5, text_anchor="middle")
                if width >= _CHARACTER * len(name) + 6
                else None,
                class_=f"reach {style}",
            )
        )
    return el("g", *parts)


def _grid(frame: _TimeFrame) -> Markup:
    parts = []
    for tick in log_ticks(frame.low, frame.high):
        y = frame.y(tick)
        parts.append(el("line", x1=_X_MIN, y1=y, x2=_RIGHT, y2=y, class_="grid"))
        parts.append(el("text", show_ms(tick), x=_X_MIN - 6, y=y + 4, class_="tick", text_anchor="end"))
    step = next(step for step in (1, 2, 5, 10, 20, 60, 600) if frame.end_s / step <= 12 or step == 600)
    for number in range(int(frame.end_s / step) + 1):
        x = frame.x(number * step)
        anchor = "end" if x > _RIGHT - 20 else "middle"
        label = f"{number * step} s"
        parts.append(el("text", label, x=x, y=_BOTTOM + 18, class_="tick", text_anchor=anchor))
    title = "Latency of each request (log scale) over time"
    parts.append(el("text", title, x=_X_MIN, y=_BOTTOM + 36, class_="axis"))
    return el("g", *parts, aria_hidden="true")


def _rival(recording: Recording, frame: _TimeFrame, policy: str, style: str) -> Markup:
    """Return the requests of a rival as points, and its median in each phase as a line."""
    requests = [request for request in recording.requests if request.policy == policy]
    points = [
        el("circle", cx=frame.x(request.at_s), cy=frame.y(request.latency_s), r=2.2, class_="dot")
        if math.isfinite(request.latency_s)
        else el("text", "✕", x=frame.x(request.at_s), y=_TOP + 10, class_="lost", text_anchor="middle")
        for request in requests
    ]
    lines = []
    for phase in recording.begun:
        median = median_of(recording.within(phase, policy))
        if median is not None and math.isfinite(median):
            y = frame.y(median)
            lines.append(
                el("line", x1=frame.x(phase.begin_s), x2=frame.x(phase.end_s), y1=y, y2=y, class_="median")
            )
    return el("g", *points, *lines, class_=f"rival {style}", aria_hidden="true")


def _oracle(recording: Recording, frame: _TimeFrame) -> Markup:
    lines = []
    for phase in recording.begun:
        oracle = recording.oracle(phase)
        if oracle is not None and math.isfinite(oracle[1]):
            y = frame.y(oracle[1])
            lines.append(
                el("line", x1=frame.x(phase.begin_s), x2=frame.x(phase.end_s), y1=y, y2=y, class_="oracle")
            )
    return el("g", *lines, aria_hidden="true")


def _own(requests: Sequence[Request], frame: _TimeFrame) -> Markup:
    answered = [request for request in requests if math.isfinite(request.latency_s)]
    points = " ".join(f"{frame.x(request.at_s):.1f},{frame.y(request.latency_s):.1f}" for request in answered)
    return el("g", el("polyline", points=points, class_="own"), aria_hidden="true")
