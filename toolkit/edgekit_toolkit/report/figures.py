"""Formats numbers with units and significant digits, for the page and the terminal."""

import math
from collections.abc import Iterable, Sequence

from edgekit_toolkit.report.document import (
    Accuracy,
    BudgetLine,
    LatencyToFloat,
    Proof,
    ReportedCandidate,
    ReportedDrop,
    ReportedFigure,
    ReportedStanding,
    Size,
)

# A dict from figure names to (heading, unit), in the order of every table.
FIGURES = {
    "size": ("Size", "bytes"),
    "transport": ("Transport", "bytes"),
    "latency": ("Latency", "ms"),
    "host_latency": ("Host latency", "ms"),
    "memory": ("Peak memory", "bytes"),
    "energy": ("Energy", "mJ"),
    "score": ("Score", "share"),
    "drop": ("Accuracy drop", "points"),
}
LIMITS = ("size", "transport", "latency", "memory", "energy", "drop")
MISSING = "n/a"

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")


def shorten(text: str, limit: int) -> str:
    """Return `text` with at most `limit` characters. If it is longer, `…` replaces its middle part."""
    if len(text) <= limit:
        return text
    tail = 2 * (limit - 1) // 3
    return f"{text[: limit - 1 - tail]}…{text[-tail:]}"


def show_number(value: float, digits: int = 3) -> str:
    """Return `value` with `digits` significant digits. Digits before the decimal point are always shown.

    Thousands are separated by commas. Values below 1e-6 are shown with an exponent.
    """
    if value == 0:
        return "0"
    if abs(value) < 1e-6:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def show(value: float | None, unit: str, digits: int = 3) -> str:
    """Return a value with its unit as text, or `n/a` for None.

    Args:
        value: The value.
        unit: "bytes" (shown with decimal prefixes), "share" (0..1, shown in %), "points" (shown with two
            decimals), or any other unit.
        digits: The number of significant digits, except for shares and points.
    """
    if value is None:
        return MISSING
    if unit == "bytes":
        return _show_bytes(value, digits)
    if unit == "share":
        return f"{100 * value:.2f} %"
    if unit == "points":
        return f"{value:.2f} points"
    return f"{show_number(value, digits)} {unit}"


def byte_unit(value: float) -> tuple[float, str]:
    """Return the size in bytes and the name of the decimal unit for a size, such as (1000.0, "kB").

    `value` is the size in bytes.
    """
    index = 0
    # 999.5 would be rounded to 1,000 of the smaller unit.
    while abs(value) >= 999.5 * 1000**index and index < len(_BYTE_UNITS) - 1:
        index += 1
    return 1000.0**index, _BYTE_UNITS[index]


def _show_bytes(value: float, digits: int) -> str:
    factor, unit = byte_unit(value)
    return f"{value:.0f} B" if unit == "B" else f"{show_number(value / factor, digits)} {unit}"


def exact(value: float | None, unit: str) -> str:
    """Return the exact value with its unit for a tooltip, or `no figure` for None."""
    if value is None:
        return "no figure"
    number = int(value) if float(value).is_integer() else value
    return f"{number:,} {'bytes' if unit == 'bytes' else '' if unit == 'share' else unit}".rstrip()


def show_macs(macs: int) -> str:
    """Return a number of multiply-accumulates with a decimal prefix, such as `1.23 G`."""
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if macs >= factor:
            return f"{show_number(macs / factor)} {prefix}"
    return str(macs)


def show_limit(line: BudgetLine, value: float | None) -> str:
    """Return `value` in the unit of `line`, with enough digits to distinguish it from the limit."""
    for digits in (3, 4, 5, 6):
        text = show(value, line["unit"], digits)
        if value == line["max"] or text != show(line["max"], line["unit"], digits):
            return text
    return exact(value, line["unit"])


def against_limit(line: BudgetLine) -> float | None:
    """Return the value that is compared with the limit, or None if it is unknown.

    For a drop, this is the upper end of the interval, or the estimate if the estimate itself exceeds the
    limit.
    """
    return line["value"] if line["high"] is None or _estimate_is_over(line) else line["high"]


def _estimate_is_over(line: BudgetLine) -> bool:
    return line["state"] == "over" and (line["value"] is None or line["value"] > line["max"])


def headroom(line: BudgetLine) -> str:
    """Return a text such as `12 % headroom` or `3.1 % over`, or why there is no comparison with the limit."""
    value, limit = against_limit(line), line["max"]
    if line["state"] == "not checked":
        return "not checked: no data"
    if value is None:
        return "no figure to hold against it"
    if line["state"] == "not resolved":
        return "not resolved"
    if line["state"] == "over" and not _estimate_is_over(line):  # --strict asks for the whole interval
        return f"up to {show_number(value)}"
    if limit <= 0:
        return "kept" if line["state"] == "ok" else f"over by {show(value - limit, line['unit'])}"
    share = 100 * (limit - value) / limit
    size = "<0.1" if 0 < abs(share) < 0.1 else f"{abs(share):.{1 if abs(share) < 10 else 0}f}"
    # Headroom ends at 100 %: a gain is not room below the limit.
    return f"{'100' if share > 100 else size} % headroom" if share >= 0 else f"{size} % over"


def show_drop(points: float | None, drop: ReportedDrop | None) -> str:
    """Return a drop in points with its interval, such as `0.40 points (-0.62 to 1.41)`."""
    if drop is None or points is None:
        return show(points, "points")
    low, high = drop["interval"]
    return f"{show(points, 'points')} ({low:.2f} to {high:.2f})"


def count_threads(standing: ReportedStanding) -> str:
    return "1 thread" if standing["threads"] == 1 else f"{standing['threads']} threads"


def count_samples(drop: ReportedDrop) -> str:
    return "1 sample" if drop["samples"] == 1 else f"{drop['samples']:,} samples"


def describe_accuracy(accuracy: Accuracy) -> str:
    """Return one or two sentences on the score, the drop in accuracy and the limit."""
    title, drop = accuracy["title"], accuracy["drop"]
    if drop is None:
        return "the drop in accuracy, no data: give --eval with labelled samples"
    low, high = drop["interval"]
    part = " that chose nothing" if drop["held_back"] else ", which also chose"
    text = (
        f"{title} {show(accuracy['score'], 'share')}, source {show(accuracy['baseline'], 'share')}: drop"
        f" {show(accuracy['drop_points'], 'points')} ({100 * drop['confidence']:g} % interval {low:.2f} to"
        f" {high:.2f}, {count_samples(drop)}{part})"
    )
    if accuracy["state"] != "not resolved" or accuracy["limit"] is None:
        return text
    limit, needed = show(accuracy["limit"], "points"), accuracy["samples_needed"]
    if needed is None and (accuracy["drop_points"] or 0.0) > accuracy["limit"]:
        return (
            f"{text}. This estimate is over the limit of {limit}: the package was chosen because so few"
            " samples do not show that it breaks the limit; --strict refuses it"
        )
    if needed is None:
        return f"{text}. The estimate is not below the limit of {limit}, so more samples may not settle it"
    return f"{text}. A limit of {limit} needs at least {needed:,} evaluation samples"


def origin(figure: ReportedFigure) -> str:
    """Return the label and the machine of a figure, such as `estimated, rpi5`."""
    return f"{figure['label']}, {figure['on']}"


def show_latency_to_float(ratio: LatencyToFloat) -> str:
    """Return a line with the latency relative to float32, on the target and on this machine."""
    modelled, here = ratio["modelled"], ratio["measured"]["value"]
    parts = []
    if modelled["value"] is not None:
        uncertain = f"(may be off by {ratio['uncertainty']:.2g} x)"
        parts.append(f"{modelled['value']:.2f} x {modelled['label']} for {modelled['on']} {uncertain}")
    if here is not None:
        parts.append(f"{here:.2f} x measured on this machine")
    return f"Latency against float32: {', '.join(parts) or MISSING}"


def show_sizes(sizes: Sequence[Size]) -> str:
    """Return the sizes of the free dimensions as text, such as `N=1 (assumed), T=40 (samples)`."""
    return ", ".join(f"{size['name']}={size['size']} ({size['from']})" for size in sizes)


def common_origin(figures: Iterable[ReportedFigure]) -> ReportedFigure | None:
    """Return the first figure with a value if all figures with a value have the same `origin`, else None."""
    known_figures = [figure for figure in figures if figure["value"] is not None]
    return (
        known_figures[0] if known_figures and len({origin(figure) for figure in known_figures}) == 1 else None
    )


def known_figures(candidates: Iterable[ReportedCandidate]) -> list[str]:
    """Return the names of the figures with a value for at least one candidate, in the order of `FIGURES`."""
    return [
        name
        for name in FIGURES
        if any(
            name in candidate["figures"] and candidate["figures"][name]["value"] is not None
            for candidate in candidates
        )
    ]


def describe_proof(proof: Proof) -> str:
    """Return a sentence on the self-test that was run with the engine release of the devices."""
    return proof["note"] or f"Opened and self-tested with {proof['engine']}, the release that devices run"
