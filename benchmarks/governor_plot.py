"""The plot of `governor.py`: a strip a scenario with power or temperature over time and its limit."""

from collections.abc import Sequence
from typing import Any

from edgekit_host.markup import Markup, el
from edgekit_host.plots.axes import Axis
from edgekit_host.plots.frame import Frame, text

_WIDTH, _STRIP, _LEFT, _RIGHT, _TOP = 760.0, 110.0, 60.0, 12.0, 22.0
_INNER = _STRIP - _TOP - 22.0
_SMOOTH_S = 30
_EVERY_S = 5
_STYLE = (
    "svg{font:12px system-ui,sans-serif;background:#fff}.governor{stroke:#0b62a4;stroke-width:1.8}"
    ".fixed{stroke:#c46a1b;stroke-width:1.2}.limit{stroke:#b00020;stroke-dasharray:5 3}"
    ".grid{stroke:#ccc}polyline{fill:none}text{fill:#222}"
)


def draw(kept: Sequence[tuple[Any, Any, Any]]) -> str:
    """Return the SVG.

    Args:
        kept: a scenario, the governor's run and that of the most accurate fixed setting, for each strip.
    """
    strips = [_strip(index, *one) for index, one in enumerate(kept)]
    height = _STRIP * len(kept) + 10
    return el(
        "svg",
        el("title", "The governor on a simulated device"),
        el("style", Markup(_STYLE)),
        *strips,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH:.0f} {height:.0f}",
        width=_WIDTH,
        height=height,
        role="img",
    )


def _strip(index: int, scenario: Any, governed: Any, most_accurate: Any) -> Markup:
    of_heat = scenario.limits(0.0).temperature_c is not None
    runs = [(run.temperature_c if of_heat else _smooth(run.power_w)) for run in (most_accurate, governed)]
    limits = [_limit(scenario, second) for second in range(scenario.seconds)]
    values = [value for value in (*runs[0], *runs[1], *limits) if value is not None]
    frame = Frame(
        x=Axis(0, scenario.seconds),
        y=Axis(min(values), max(values)),
        left=_LEFT,
        right=_WIDTH - _RIGHT,
        top=_TOP,
        bottom=_TOP + _INNER,
    )
    unit = "C" if of_heat else "W, mean of 30 s"
    ends = [(value, f"{value:.1f}") for value in (frame.y.low, frame.y.high)]
    return el(
        "g",
        text(_LEFT, 14, f"{scenario.name} ({unit}); fixed: {most_accurate.what}", None),
        *frame.grid([(scenario.seconds - 20, f"{scenario.seconds} s")], ends),
        *(
            frame.trace(_points(series), style)
            for series, style in ((runs[0], "fixed"), (limits, "limit"), (runs[1], "governor"))
        ),
        transform=f"translate(0 {_STRIP * index:.0f})",
    )


def _points(series: Sequence[float | None]) -> list[tuple[float, float]]:
    return [(second, value) for second, value in list(enumerate(series))[::_EVERY_S] if value is not None]


def _limit(scenario: Any, second: int) -> float | None:
    limits = scenario.limits(float(second))
    value: float | None = limits.temperature_c if limits.power_w is None else limits.power_w
    return value


def _smooth(values: Sequence[float]) -> list[float | None]:
    return [
        None if second < _SMOOTH_S - 1 else sum(values[second - _SMOOTH_S + 1 : second + 1]) / _SMOOTH_S
        for second in range(len(values))
    ]
