"""Builds HTML and SVG elements with escaped text, and formats figures for readers.

This is not a template engine. Each function builds one element.
"""

import base64
import hashlib
import html
import math
from collections.abc import Iterable, Sequence
from importlib import resources

from edgekit_runtime.system.shown_text import clean

_VOID = frozenset({"meta", "link"})
_KILO = 1000.0


class Markup(str):
    """Text that is already HTML and is not escaped again. Use `el` or `join` to create it from other text."""

    __slots__ = ()

    def __html__(self) -> "Markup":
        """Return itself, so that Jinja does not escape it."""
        return self


def join(*parts: str | None) -> Markup:
    """Concatenate parts, and escape those that are not `Markup`. None is skipped."""
    return Markup(
        "".join(
            part if isinstance(part, Markup) else html.escape(clean(part), quote=True)
            for part in parts
            if part is not None
        )
    )


def el(tag: str, *children: str | None, **attributes: str | float | None) -> Markup:
    """Return an HTML element.

    Args:
        tag: The name of the element, which must be trusted.
        children: The content. Text that is not `Markup` is escaped, and None is skipped.
        attributes: The attributes, such as `class_` for class and `aria_hidden` for aria-hidden. None is
            skipped, and numbers have at most two decimals.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Markup(f"<{tag}{written}>")
    return Markup(f"<{tag}{written}>{join(*children)}</{tag}>")


def _attribute(value: str | float) -> str:
    if isinstance(value, str):
        return join(value)
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def section(title: str, *children: str | None, key: str, intro: str | None = None) -> Markup:
    """Return a section with a heading.

    `children` are markup or text to escape, and None is skipped. `key` is the id for links to the heading.
    `intro` is a paragraph below the heading, or None.
    """
    lead = None if intro is None else el("p", intro, class_="intro")
    return el("section", el("h2", title, id=key), lead, *children, aria_labelledby=key)


def table(
    head: Sequence[str],
    rows: Iterable[Markup],
    *,
    numeric: frozenset[int] = frozenset(),
    caption: str,
    style: str | None = None,
) -> Markup:
    """Return a table that scrolls horizontally on narrow screens.

    `rows` are `tr` elements. `style` is the class of the `table` element, or None. `numeric` has the indices
    of numeric columns, whose headings are right-aligned.
    """
    cells = [
        el("th", title, scope="col", class_="n" if index in numeric else None)
        for index, title in enumerate(head)
    ]
    inner = el(
        "table", el("caption", caption), el("thead", el("tr", *cells)), el("tbody", *rows), class_=style
    )
    return el("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption)


def facts(entries: Iterable[tuple[str, str | None]]) -> Markup:
    """Return a description list (`dl`) of terms and values, with `none` for None."""
    pairs = [join(el("dt", term), el("dd", "none" if value is None else value)) for term, value in entries]
    return el("dl", *pairs, class_="facts")


def warning_section(warnings: Sequence[str]) -> Markup | None:
    if not warnings:
        return None
    title = "1 warning" if len(warnings) == 1 else f"{len(warnings)} warnings"
    items = [el("li", text) for text in warnings]
    return el("section", el("h2", f"⚠ {title}", id="warnings"), el("ul", *items), class_="warnings")


def read_style(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def render_document(
    title: str, style: str, *body: str | None, footer: Markup | None = None, script: str = ""
) -> str:
    """Return a self-contained page. Its content security policy blocks everything from other sources.

    Args:
        title: The title of the page.
        style: The style sheet of the page, which follows the shared `page.css`.
        body: The content of the `main` element.
        footer: The element after `main`.
        script: A trusted script, which may send requests to the server of the page.
    """
    style = read_style(__package__, "page.css") + style
    allowed = f"style-src 'sha256-{_digest(style)}'"
    if script:
        allowed += f"; script-src 'sha256-{_digest(script)}'; connect-src 'self'"
    policy = f"default-src 'none'; {allowed}; img-src data:; base-uri 'none'; form-action 'none'"
    named = {
        "viewport": "width=device-width, initial-scale=1",
        "color-scheme": "light dark",
        "referrer": "no-referrer",
    }
    head = el(
        "head",
        el("meta", charset="utf-8"),
        # Even with a fault in the escaping the page can load or run nothing.
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        *(el("meta", name=name, content=content) for name, content in named.items()),
        # With an empty icon, browsers do not ask the server for one.
        el("link", rel="icon", href="data:,"),
        el("title", title),
        el("style", Markup(style)),
    )
    scripts = el("script", Markup(script)) if script else None
    page = el("html", head, el("body", el("main", *body), footer, scripts), lang="en")
    return join(Markup("<!doctype html>\n"), page, "\n")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def show_ms(seconds: float) -> str:
    """Format a time in seconds as a latency such as `1.24 ms` or `2.1 s`, or `none` if it is not finite."""
    if not math.isfinite(seconds):
        return "none"
    return f"{three_digits(seconds)} s" if seconds >= 1 else f"{three_digits(_KILO * seconds)} ms"


def show_bytes(size_bytes: float) -> str:
    """Format a size in bytes, kB (1000 bytes) or MB, such as `602 kB`."""
    if size_bytes < _KILO:
        return f"{size_bytes:.0f} bytes"
    for unit in ("kB", "MB"):
        size_bytes /= _KILO
        if size_bytes < _KILO or unit == "MB":
            break
    return f"{three_digits(size_bytes)} {unit}"


def three_digits(value: float) -> str:
    """Format a number with up to three significant digits (`0.012`), or all integer digits (`1,234`)."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(decimals, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
