"""Samples of a report: boxes lie where the answer says, on the photograph, for both models."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.toolkit import report_sample
from tests.toolkit.report_page import Page, text

from edgekit_toolkit.pipeline.sample_answers import shrink_picture


def photograph(width: int, height: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (90, 120, 160)).save(file, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def detected() -> dict[str, Any]:
    """A report with one photograph, on which the package misses one of two boxes."""
    document = report_sample.packaged()
    cat = {"label": "cat", "index": 1, "score": 0.91, "box": [64.0, 32.0, 320.0, 240.0]}
    dog = {"label": "<dog>", "index": 2, "score": 0.4, "box": [0.0, 0.0, 10.5, 20.0]}
    document["samples"] = [
        {
            "name": "a.jpg",
            "width": 640,
            "height": 480,
            "float": {"detections": [cat, dog]},
            "package": {"detections": [cat]},
        }
    ]
    return document


def test_boxes_of_both_answers_are_drawn_on_one_photograph(tmp_path: Path) -> None:
    picture = photograph(320, 240)
    page = Page(detected(), tmp_path, [picture])
    floats, package = page.all("svg", under=page.section("samples"))

    assert page.html.count(picture) == 1
    assert floats.get("viewBox") == package.get("viewBox") == "0 0 640 480"
    (image,) = page.all("image", under=floats)
    assert (image.get("href"), image.get("width"), image.get("height")) == (picture, "640", "480")
    (use,) = page.all("use", under=package)
    assert use.get("href") == "#" + image.get("id")
    boxes = [
        [box.get(side) for side in ("x", "y", "width", "height")] for box in page.all("rect", "box", floats)
    ]
    assert boxes == [["0", "0", "10.5", "20"], ["64", "32", "256", "208"]]  # the best on top
    assert len(page.all("rect", "box", package)) == 1
    assert [text(label) for label in page.all("text", under=floats)] == ["<dog> 0.40", "cat 0.91"]


def test_classes_are_listed_for_both_models(tmp_path: Path) -> None:
    page = Page(report_sample.packaged(), tmp_path)
    answers = [text(answer) for answer in page.all("ol", "answer", page.section("samples"))]

    assert answers[:2] == ["cat 0.900", "cat 0.890"]


def test_samples_without_pictures_say_why(tmp_path: Path) -> None:
    document = report_sample.packaged()
    assert "the samples are no photographs" in text(Page(document, tmp_path).section("samples"))
    document["data"]["evaluation"]["kind"] = "generated"
    assert "the samples are generated" in text(Page(document, tmp_path).section("samples"))


def test_report_without_a_task_has_no_samples(tmp_path: Path) -> None:
    document = report_sample.packaged()
    document["samples"] = []
    assert not [heading for heading in Page(document, tmp_path).all("h2") if heading.get("id") == "samples"]


def test_points_are_drawn_and_vectors_are_counted(tmp_path: Path) -> None:
    document = detected()
    document["samples"][0]["float"] = {"keypoints": [{"label": "nose", "score": 0.5, "point": [10, 20, 0.1]}]}
    document["samples"][0]["package"] = {"embedding": [0.5] * 64, "mask": {"height": 9}}
    page = Page(document, tmp_path, [photograph(64, 48)])
    section = page.section("samples")
    (circle,) = page.all("circle", under=section)
    assert (circle.get("cx"), circle.get("cy")) == ("10", "20")
    assert [text(answer) for answer in page.all("p", "answer", section)] == [
        "nose 0.5",
        "embedding of 64 values",
    ]


def test_lines_join_the_points_of_one_object_alone(tmp_path: Path) -> None:
    document = detected()
    points = [
        {"label": "ear", "index": index, "object": number, "point": [10 * number + index, 5]}
        for number, indices in ((0, (0, 1)), (1, (0, 1)), (2, (0,)))
        for index in indices
    ]
    document["samples"][0]["float"] = {"keypoints": points, "skeleton": [[0, 1]]}
    page = Page(document, tmp_path, [photograph(64, 48)])
    lines = page.all("line", under=page.section("samples"))
    assert [(line.get("x1"), line.get("x2")) for line in lines] == [("0", "1"), ("10", "11")]


def test_output_that_cannot_be_decoded_says_so(tmp_path: Path) -> None:
    document = detected()
    document["samples"][0]["package"] = {"error": "output 'y' is [1, 3]"}
    page = Page(document, tmp_path, [photograph(64, 48)])
    assert "error output 'y' is [1, 3]" in text(page.section("samples"))


@pytest.mark.parametrize("size", [(1, 1), (4000, 3000), (30, 4000)])
def test_picture_of_a_report_has_at_most_40_kb(size: tuple[int, int]) -> None:
    """Noise is what JPEG stores worst."""
    width, height = size
    noise = np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)
    uri = shrink_picture(Image.fromarray(noise))
    assert len(uri) <= 40_100
    picture = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
    assert max(picture.size) <= 320
