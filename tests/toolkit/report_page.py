"""Reads a written report page back: the body as a tree, the texts as a reader sees them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from edgekit_toolkit.report.files import write_report


class Page:
    """A parsed page; parsing fails where an element is left open or a character is not escaped."""

    def __init__(self, document: Mapping[str, Any], folder: Path, pictures: Sequence[str] = ()) -> None:
        self.path, _ = write_report(document, folder, "sample-1.0-rpi5", pictures)
        self.html = self.path.read_text(encoding="utf-8")
        body = self.html[self.html.index("<body>") : self.html.index("</body>") + len("</body>")]
        self.body = ElementTree.fromstring(body)  # noqa: S314 - our own output, no entities

    def all(self, tag: str, style: str | None = None, under: ElementTree.Element | None = None) -> list[Any]:
        """Return the elements with this tag (`*` for any) and this class, in page order."""
        root = self.body if under is None else under
        return [e for e in root.iter() if tag in {"*", e.tag} and (style is None or style in classes(e))]

    def one(self, tag: str, style: str | None = None, under: ElementTree.Element | None = None) -> Any:
        """Return the only such element."""
        (found,) = self.all(tag, style, under)
        return found

    def section(self, key: str) -> Any:
        """Return the section whose heading has this id."""
        (found,) = [s for s in self.all("section") if any(h.get("id") == key for h in s.iter("h2"))]
        return found


def classes(element: ElementTree.Element) -> list[str]:
    """Return an element's classes."""
    return element.get("class", "").split()


def text(element: ElementTree.Element) -> str:
    """Return the text inside an element, tooltips of drawings left out, with single spaces."""
    parts: list[str] = []

    def walk(node: ElementTree.Element) -> None:
        if node.tag not in {"title", "desc"}:
            parts.append(node.text or "")
            for child in node:
                walk(child)
                parts.append(" " + (child.tail or ""))

    walk(element)
    return re.sub(r"\s+", " ", "".join(parts)).strip()
