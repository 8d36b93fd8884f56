"""How values are written on pages: ages, times, sizes, counts."""

import time
from collections.abc import Callable
from typing import Any, Final

from edgekit_runtime.agent.trusted_time import format_utc

NONE: Final = "\u2013"
_UNITS: Final = (("d", 86_400), ("h", 3600), ("min", 60))


def format_age(seconds: float) -> str:
    """Return a duration in its largest unit: `3 min`, `2 h`, `12 s`."""
    for unit, size in _UNITS:
        if abs(seconds) >= size:
            return f"{abs(seconds) / size:.0f} {unit}"
    return f"{abs(seconds):.0f} s"


def format_ago(at: float | None) -> str:
    """Return how long ago a time was, or how far ahead it is: `3 min ago`, `in 2 h`, `never`."""
    if at is None:
        return "never"
    seconds = time.time() - at
    if abs(seconds) < 1:
        return "now"
    return f"{format_age(seconds)} ago" if seconds > 0 else f"in {format_age(seconds)}"


def format_time(at: float | None) -> str:
    """Return a time in UTC to the second."""
    return "" if at is None else format_utc(at)


def format_machine_time(at: float) -> str:
    """Return a time for the attribute `datetime`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def format_count(count: float) -> str:
    """Return a count with thin spaces between thousands, so that it does not break."""
    return f"{count:,.0f}".replace(",", "\u202f")


def format_bytes(size: float | None) -> str:
    """Return a size with three digits."""
    if size is None:
        return NONE
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def format_share(part: float, whole: float) -> str:
    """Return a share in percent; less than all is never shown as 100 %, more than nothing never as 0 %."""
    if not whole:
        return NONE
    percent = 100 * part / whole
    if 0 < percent < 1:
        return "< 1 %"
    return "> 99 %" if 99 < percent < 100 else f"{percent:.0f} %"


def format_figure(value: float | None, unit: str = "") -> str:
    """Return a measured figure with three digits."""
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
    """Return a QR code as SVG, dark on white in any theme; nothing without the library `segno`."""
    try:
        import segno
    except ImportError:
        return ""
    drawn: str = segno.make(text, micro=False).svg_inline(scale=4, border=4, light="#fff", dark="#000")
    return drawn
