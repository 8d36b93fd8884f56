"""Masks, points, texts and other answers in the samples of a report."""

from pathlib import Path
from typing import Any

import pytest
from tests.toolkit.report_page import Page, text
from tests.toolkit.test_report_samples import detected, photograph


def page_with(answer: dict[str, Any], folder: Path) -> Page:
    document = detected()
    document["samples"][0] |= {"float": answer, "package": answer}
    return Page(document, folder, [photograph(320, 240)])


def test_mask_covers_the_picture(tmp_path: Path) -> None:
    mask = {"form": "png", "height": 240, "width": 320, "data": "iVBORw0KGgo="}
    page = page_with({"areas": [{"label": "sky", "index": 0, "share": 0.75}], "mask": mask}, tmp_path)
    (image,) = page.all("image", "mask", page.all("svg", under=page.section("samples"))[0])
    assert image.get("href") == "data:image/png;base64,iVBORw0KGgo="
    assert (image.get("width"), image.get("height")) == ("640", "480")
    assert text(page.all("p", "answer", page.section("samples"))[0]) == "sky 0.75"


def test_points_are_drawn_with_their_skeleton(tmp_path: Path) -> None:
    points = [
        {"label": name, "index": index, "score": 0.9, "point": [10 * index, 20, 0.5]}
        for index, name in ((0, "nose"), (2, "ear"), (3, "eye"))
    ]
    page = page_with({"keypoints": points, "skeleton": [[0, 2], [0, 1]]}, tmp_path)
    svg = page.all("svg", under=page.section("samples"))[0]
    assert [circle.get("cx") for circle in page.all("circle", under=svg)] == ["0", "20", "30"]
    (line,) = page.all("line", under=svg)  # point 1 was left out
    assert [line.get(key) for key in ("x1", "y1", "x2", "y2")] == ["0", "20", "20", "20"]


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ({"text": "<b>", "score": 0.5}, "text <b>; score 0.5"),
        ({"events": [{"label": "dog", "index": 1, "score": 0.7, "begin_s": 0, "end_s": 1}]}, "dog 0.7 0 1"),
        ({"events": []}, "nothing"),
        ({"values": [{"label": "age", "index": 0, "value": 31.5}]}, "age 31.5"),
    ],
)
def test_other_answers_are_texts(answer: dict[str, Any], shown: str, tmp_path: Path) -> None:
    page = page_with(answer, tmp_path)
    assert text(page.all("p", "answer", page.section("samples"))[0]) == shown
