"""The plot of `governor.py`: a strip a scenario with power or temperature over time and its limit."""

from collections.abc import Sequence
from typing import Any

from edgekit_host.markup import Markup, el, join

_WIDTH, _STRIP, _LEFT, _RIGHT, _TOP = 760.0, 110.0, 60.0, 12.0, 22.0
_INNER = _STRIP - _TOP - 22.0
_SMOOTH_S = 30
_EVERY_S = 5
_STYLE = (
    "svg{font:12px system-ui,sans-serif;background:#fff}.governor{stroke:#0b62a4;stroke-width:1.8}"
    ".fixed{stroke:#c46a1b;stroke-width:1.2}.limit{stroke:#b00020;stroke-dasharray:5 3}"
    ".axis{stroke:#999}polyline{fill:none}text{fill:#222}"
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
    shown = [value for value in (*runs[0], *runs[1], *limits) if value is not None]
    low, high = min(shown), max(shown)

    def place(values: Sequence[float | None]) -> str:
        width = _WIDTH - _LEFT - _RIGHT
        return " ".join(
            f"{_LEFT + width * second / len(values):.1f},"
            f"{_TOP + _INNER * (1 - (value - low) / (high - low)):.1f}"
            for second, value in enumerate(values)
            if value is not None and second % _EVERY_S == 0
        )

    unit = "C" if of_heat else "W, mean of 30 s"
    base = _TOP + _INNER
    return el(
        "g",
        el("text", f"{scenario.name} ({unit}); fixed: {most_accurate.what}", x=_LEFT, y=14),
        el("text", f"{high:.1f}", x=8, y=_TOP + 8),
        el("text", f"{low:.1f}", x=8, y=base),
        el("text", f"{scenario.seconds} s", x=_WIDTH - 60, y=base + 14),
        el("line", x1=_LEFT, y1=base, x2=_WIDTH - _RIGHT, y2=base, class_="axis"),
        join(
            *(
                el("polyline", points=place(values), class_=style)
                for values, style in ((runs[0], "fixed"), (limits, "limit"), (runs[1], "governor"))
            )
        ),
        transform=f"translate(0 {_STRIP * index:.0f})",
    )


def _limit(scenario: Any, second: int) -> float | None:
    limits = scenario.limits(float(second))
    value: float | None = limits.temperature_c if limits.power_w is None else limits.power_w
    return value


def _smooth(values: Sequence[float]) -> list[float | None]:
    return [
        None if second < _SMOOTH_S - 1 else sum(values[second - _SMOOTH_S + 1 : second + 1]) / _SMOOTH_S
        for second in range(len(values))
    ]
