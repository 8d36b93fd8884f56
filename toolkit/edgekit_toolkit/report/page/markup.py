"""HTML and SVG elements that escape whatever is not markup already, so that forgetting is impossible.

Not a template engine: one function builds one element.
"""

import html

from edgekit_toolkit.console import clean

_VOID = frozenset({"meta", "link"})


class Markup(str):
    """Text that is HTML already; only `el`, `escape` and `join` make it from foreign text."""

    __slots__ = ()


def escape(text: str) -> Markup:
    """Return foreign text as HTML, fit for content and for quoted attributes."""
    return Markup(html.escape(clean(text), quote=True))


def join(*parts: str | None) -> Markup:
    """Return parts in a row, each escaped unless it is markup; None is left out."""
    return Markup("".join(p if isinstance(p, Markup) else escape(p) for p in parts if p is not None))


def el(tag: str, *children: str | None, **attributes: str | float | None) -> Markup:
    """Return one element.

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
        return escape(value)
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
