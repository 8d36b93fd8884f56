"""The section with the answers of the float model and of the package on samples."""

from collections.abc import Mapping, Sequence
from typing import Any

from edgekit_host.markup import Markup, el, join, section
from edgekit_toolkit.report.document import Report, ReportedSample
from edgekit_toolkit.report.figures import shorten
from edgekit_toolkit.tasks.answer_text import list_entries

_MAX_DRAWN = 20  # boxes in one picture
_MAX_TEXT = 300


def samples(report: Report, pictures: Sequence[str]) -> Markup | None:
    """Return the section with the answers on samples, or None if the report has none.

    `pictures` contains a data URI for each sample, or an empty string for a sample without an image.
    """
    if not report["samples"]:
        return None
    intro = f"{report['task']['text']}. The float model first, then the package."
    if not any(pictures):
        is_generated = report["data"]["evaluation"]["kind"] == "generated"
        reason = "generated" if is_generated else "no photographs"
        intro += f" There are no pictures, because the samples are {reason}."
    figures = [
        _figure(number, sample, picture)
        for number, (sample, picture) in enumerate(zip(report["samples"], pictures, strict=True))
    ]
    return section("Samples", el("div", *figures, class_="samples"), key="samples", intro=intro)


def _figure(number: int, sample: ReportedSample, picture: str) -> Markup:
    panels: list[Markup] = []
    for title, answer in (("Float model", sample["float"]), ("Package", sample["package"])):
        drawing = None
        if sample["width"] is not None and sample["height"] is not None:
            size = sample["width"], sample["height"]
            drawing = _draw(f"picture-{number}", "" if panels else picture, size, answer, title)
        panels.append(el("div", el("h3", title), drawing, _describe(answer)))
    return el("figure", el("figcaption", sample["name"]), el("div", *panels, class_="pair"))


def _draw(key: str, picture: str, size: tuple[int, int], answer: Mapping[str, Any], title: str) -> Markup:
    """Return the picture with the boxes of an answer; without `picture`, that of an earlier drawing."""
    width, height = size
    unit = max(size) / 100
    if picture:
        photograph = el("image", id=key, href=picture, width=width, height=height)
    else:
        photograph = el("use", href=f"#{key}")
    drawn = answer.get("detections", ())[:_MAX_DRAWN]
    boxes = [_box(detection, unit, width) for detection in reversed(drawn)]  # the best on top
    points = [_point(entry["point"], unit) for entry in answer.get("keypoints", ())]
    data = answer.get("mask", {}).get("data")
    href = f"data:image/png;base64,{data}"
    return el(
        "svg",
        photograph,
        el("image", href=href, width=width, height=height, class_="mask") if data else None,
        *boxes,
        *_skeleton(answer, unit),
        *points,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=f"{title}: {len(boxes)} boxes, {len(points)} points",
    )


def _box(detection: Mapping[str, Any], unit: float, width: int) -> Markup:
    x1, y1, x2, y2 = detection["box"]
    sides = {"x": x1, "y": y1, "width": x2 - x1, "height": y2 - y1}
    is_right = (x1 + x2) / 2 > width * 2 / 3  # a label there ends at the box's right side
    label = el(
        "text",
        f"{detection['label']} {detection['score']:.2f}",
        x=x2 - unit if is_right else x1 + unit,
        y=y1 + 5 * unit,
        text_anchor="end" if is_right else None,
        font_size=5 * unit,
        stroke_width=1.2 * unit,
    )
    outlines = [
        el("rect", **sides, class_=style, stroke_width=thickness * unit)
        for style, thickness in (("halo", 1.4), ("box", 0.7))
    ]
    return join(*outlines, label)


def _skeleton(answer: Mapping[str, Any], unit: float) -> list[Markup]:
    objects: dict[int, dict[int | None, Sequence[float]]] = {}
    for entry in answer.get("keypoints", ()):
        objects.setdefault(entry.get("object", 0), {})[entry.get("index")] = entry["point"]
    lines = [
        (points[first], points[second])
        for points in objects.values()
        for first, second in answer.get("skeleton", ())
        if first in points and second in points
    ]
    return [
        el("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], class_="box", stroke_width=0.5 * unit)
        for start, end in lines
    ]


def _point(point: Sequence[float], unit: float) -> Markup:
    return el("circle", cx=point[0], cy=point[1], r=unit, class_="box", stroke_width=0.7 * unit)


def _describe(answer: Mapping[str, Any]) -> Markup:
    """Return an answer as text."""
    if "detections" in answer:
        counted: dict[str, list[str]] = {}
        for detection in answer["detections"]:
            counted.setdefault(detection["label"], []).append(f"{detection['score']:.2f}")
        text = "; ".join(f"{label} {', '.join(scores)}" for label, scores in counted.items())
        return el("p", shorten(text, _MAX_TEXT) or "no box", class_="answer")
    if "classes" in answer:
        rows = [el("li", f"{entry['label']} {entry['score']:.3f}") for entry in answer["classes"]]
        return el("ol", *rows, class_="answer") if rows else el("p", "no class", class_="answer")
    text = "; ".join(list_entries(answer, with_places=False))
    return el("p", shorten(text, _MAX_TEXT) or "nothing", class_="answer")
