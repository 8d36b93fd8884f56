"""Data sets of drawn rectangles, in each format that is read."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.samples.media.decoding import Decoding
from edgekit_toolkit.samples.source import open_data
from edgekit_toolkit.samples.truth import TrueBoxes

NAMES = ("square", "bar")
# Pictures of 80 x 40 pixels: name -> boxes of class, x1, y1, x2, y2.
PICTURES = {"a": [(0, 10, 10, 30, 30), (1, 40, 4, 72, 12)], "b": [(1, 0, 20, 40, 30)], "c": []}
INPUT = TensorSpec("x", "float32", (1, 3, 40, 40))
LETTERBOX = {"letterbox": 40, "align": "corner", "scale": 1}


def draw(path: Path, boxes: list[tuple[int, ...]], size: tuple[int, int] = (80, 40)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((size[1], size[0], 3), len(path.stem) + 10 * len(boxes), np.uint8)
    for kind, x1, y1, x2, y2 in boxes:
        pixels[y1:y2, x1:x2] = (250, 20, 20) if kind else (20, 250, 20)
    Image.fromarray(pixels).save(path)


def write_yolo(root: Path, part: str = "") -> Path:
    for name, boxes in PICTURES.items():
        draw(root / "images" / part / f"{name}.png", boxes)
        lines = [
            f"{kind} {(x1 + x2) / 160} {(y1 + y2) / 80} {(x2 - x1) / 80} {(y2 - y1) / 40}"
            for kind, x1, y1, x2, y2 in boxes
        ]
        labels = root / "labels" / part / f"{name}.txt"
        labels.parent.mkdir(parents=True, exist_ok=True)
        if lines:  # a picture without objects has no file
            labels.write_text("\n".join(lines) + "\n")
    return root


def write_coco(root: Path) -> Path:
    images, annotations = [], []
    for image, (name, boxes) in enumerate(PICTURES.items(), 7):
        draw(root / "images" / f"{name}.png", boxes)
        images.append({"id": image, "file_name": f"{name}.png", "width": 80, "height": 40})
        annotations += [
            {
                "image_id": image,
                "category_id": 10 * kind + 3,
                "bbox": [x1, y1, x2 - x1, y2 - y1],
                "iscrowd": kind,
            }
            for kind, x1, y1, x2, y2 in boxes
        ]
    categories = [{"id": 10 * kind + 3, "name": name} for kind, name in enumerate(NAMES)]
    path = root / "annotations" / "instances_val.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"images": images, "annotations": annotations, "categories": categories[::-1]})
    )
    return path


def write_voc(root: Path) -> Path:
    for name, boxes in PICTURES.items():
        draw(root / "JPEGImages" / f"{name}.png", boxes)
        objects = "".join(
            f"<object><name>{NAMES[kind]}</name><difficult>{kind}</difficult><bndbox><xmin>{x1 + 1}</xmin>"
            f"<ymin>{y1 + 1}</ymin><xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox></object>"
            for kind, x1, y1, x2, y2 in boxes
        )
        path = root / "Annotations" / f"{name}.xml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"<annotation><size><width>80</width><height>40</height></size>{objects}</annotation>"
        )
    return root


def truths_of(
    path: Path, *, classes: tuple[str, ...] = (), split: str = "val", rules: dict[str, object] = LETTERBOX
) -> list[TrueBoxes]:
    decoding = Decoding(rules, classes, split=split)
    return [
        labels[0] for _, labels in open_data(path, [INPUT], decoding=decoding).stream() if labels is not None
    ]


def rows_of(truth: TrueBoxes) -> list[tuple[int, ...]]:
    """Return class and corners of each box, as whole pixels of the input."""
    corners: NDArray[np.int64] = truth.corners.round().astype(np.int64)
    return [(int(kind), *row) for kind, row in zip(truth.classes, corners.tolist(), strict=True)]
