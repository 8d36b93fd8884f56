"""Formats values for pages: ages, times, sizes and counts."""

import time
from collections.abc import Callable
from typing import Any, Final

from edgekit_runtime.agent.trusted_time import format_utc

NONE: Final = "\u2013"
_UNITS: Final = (("d", 86_400), ("h", 3600), ("min", 60))


def format_age(seconds: float) -> str:
    """Return the absolute value of a duration as a whole number of its largest unit, such as `3 min`."""
    for unit, size in _UNITS:
        if abs(seconds) >= size:
            return f"{abs(seconds) / size:.0f} {unit}"
    return f"{abs(seconds):.0f} s"


def format_ago(at: float | None) -> str:
    """Return a time in seconds since 1970 as `3 min ago`, `now` or `in 2 h`, or `never` for None."""
    if at is None:
        return "never"
    seconds = time.time() - at
    if abs(seconds) < 1:
        return "now"
    return f"{format_age(seconds)} ago" if seconds > 0 else f"in {format_age(seconds)}"


def format_time(at: float | None) -> str:
    """Return a time in seconds since 1970 as UTC, to the second, or an empty string for None."""
    return "" if at is None else format_utc(at)


def format_machine_time(at: float) -> str:
    """Return a time in seconds since 1970 as `2026-01-31T12:00:00Z`, for the attribute `datetime`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def format_count(count: float) -> str:
    """Return a count with thin non-breaking spaces as thousands separators."""
    return f"{count:,.0f}".replace(",", "\u202f")


def format_bytes(size: float | None) -> str:
    """Return a size with three digits and its unit, such as `1.23 MB`, or a dash (`NONE`) for None."""
    if size is None:
        return NONE
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def format_share(part: float, whole: float) -> str:
    """Return a share in percent, or a dash (`NONE`) if `whole` is 0.

    A share is shown as `0 %` or `100 %` only if it is exact, otherwise as `< 1 %` or `> 99 %`.
    """
    if not whole:
        return NONE
    percent = 100 * part / whole
    if 0 < percent < 1:
        return "< 1 %"
    return "> 99 %" if 99 < percent < 100 else f"{percent:.0f} %"


def format_figure(value: float | None, unit: str = "") -> str:
    """Return a measured value with three digits and its unit, or a dash (`NONE`) for None."""
    return NONE if value is None else f"{value:.3g} {unit}".rstrip()


FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "age": format_age,
    "ago": format_ago,
    "when": format_time,
    "machine_time": format_machine_time,
    "count": format_count,
    "bytes": format_bytes,
    "figure": format_figure,
}


def draw_qr_code(text: str) -> str:
    """Return a QR code as SVG, dark on white, or an empty string if `segno` is not installed."""
    try:
        import segno
    except ImportError:
        return ""
    drawn: str = segno.make(text, micro=False).svg_inline(scale=4, border=4, light="#fff", dark="#000")
    return drawn
