"""HTML and SVG elements that escape all text that is not markup, and figures in a form for readers.

Not a template engine: one function builds one element.
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
    """Text that is HTML already; only `el` and `join` make it from other text."""

    __slots__ = ()

    def __html__(self) -> "Markup":
        """Return itself: this is how Jinja's templates know text that is HTML already."""
        return self


def join(*parts: str | None) -> Markup:
    """Return parts in a row, each escaped unless it is markup; None is left out."""
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
        tag: element name, from our code only.
        children: markup as it is, other text escaped, None left out.
        attributes: `class_` stands for class and `aria_hidden` for aria-hidden; None leaves one out, numbers
            are written with at most two decimals.
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

    `children`: markup, or text to escape; None is left out. `key`: id of the element, for links to it.
    `intro`: text below the heading, or None.
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
    """Return a table that scrolls sideways in itself on narrow screens.

    `rows`: finished `tr` elements. `style`: class of the `table` element, or None.
    `numeric`: indices of the columns of numbers, whose headings are right-aligned.
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
    """Return a description list (`dl`) of terms and values; None is shown as `none`."""
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
    """Return a page that contains everything it needs, and may load nothing else.

    Args:
        title: title of the page.
        style: the page's own style sheet; it follows `page.css`, which all pages share.
        body: content of the element `main`.
        footer: element behind `main`.
        script: our script; it may send requests to the page's server.
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
    """Return a latency in words, such as `1.24 ms` or `2.1 s`; `none` if it is not finite."""
    if not math.isfinite(seconds):
        return "none"
    return f"{three_digits(seconds)} s" if seconds >= 1 else f"{three_digits(_KILO * seconds)} ms"


def show_bytes(size_bytes: float) -> str:
    """Return a size in words, such as `602 kB`; units are bytes, kB and MB of powers of 1000."""
    if size_bytes < _KILO:
        return f"{size_bytes:.0f} bytes"
    for unit in ("kB", "MB"):
        size_bytes /= _KILO
        if size_bytes < _KILO or unit == "MB":
            break
    return f"{three_digits(size_bytes)} {unit}"


def three_digits(value: float) -> str:
    """Return a number with three significant digits, or all digits of its integer part: `0.012`, `1,234`."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(decimals, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
