"""Bars next to the numbers in tables and tiles, as inline SVG."""

from edgekit_host.markup import Markup, el
from edgekit_host.plots.frame import rect


def bar(share: float, style: str, *, back: float | None = None) -> Markup:
    """Return a thin horizontal bar that fills its table cell.

    Screen readers skip it, because the number is in the next cell.

    Args:
        share: The length as a share of the width, 0 to 1.
        style: The class of the bar.
        back: The length of a second bar above the first, which shows an earlier value, or None.
    """
    length = 100 * min(1.0, max(0.0, share))
    if back is None:
        bars, height = [rect(0, 0, length, 10, style)], 10
    else:
        bars, height = [rect(0, 0, 100 * back, 6, "before"), rect(0, 8, length, 6, style)], 14
    return el(
        "svg",
        *bars,
        viewBox=f"0 0 100 {height}",
        preserveAspectRatio="none",
        class_="bar" if back is None else "bar pair",
        aria_hidden="true",
    )


def budget_bar(share: float, state: str, *, title: str) -> Markup:
    """Return a bar of a value, with a tick for its limit at 80 % of the width.

    Args:
        share: The value divided by the limit. The bar shows 0 to 1.25.
        state: The verdict, which sets the colour: `ok`, `over`, or any other text if undecided.
        title: The value and the limit as text for a tooltip.
    """
    length = 80 * min(1.25, max(0.0, share))
    return el(
        "svg",
        el("title", title),
        rect(0, 2, 80, 8, "track"),
        rect(80, 2, 20, 8, "beyond"),
        rect(0, 2, length, 8, state if state in ("ok", "over") else "open"),
        rect(79.5, 0, 1, 12, "tick"),
        viewBox="0 0 100 12",
        preserveAspectRatio="none",
        class_="bar budget",
        role="img",
    )
