"""Writes `coco_figures.json`: random detections and their average precisions by pycocotools.

pip install pycocotools, then python tests/toolkit/coco_figures.py
"""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

FIGURES = Path(__file__).with_suffix(".json")
SIZE = 100


def draw_pictures(seed: int) -> list[dict[str, Any]]:
    """Return true boxes with crowds, and detections near them or anywhere, of 3 of 4 classes."""
    rng = np.random.default_rng(seed)
    pictures = []
    for _ in range(12):
        corners = rng.integers(0, 60, (rng.integers(0, 7), 2))
        truths = [[*map(int, corner), *map(int, rng.integers(8, 40, 2))] for corner in corners]
        kinds = rng.integers(0, 3, len(truths)).tolist()
        crowds = (rng.random(len(truths)) < 0.2).tolist()
        boxes, scores, classes = [], [], []
        for box, kind in zip(truths, kinds, strict=True):
            for _ in range(rng.integers(0, 3)):
                shift = rng.normal(0, 2, 4).round(2)
                boxes.append([float(value) for value in (np.array(box) + shift).round(2)])
                scores.append(round(rng.random(), 2))  # ties too
                classes.append(int(kind if rng.random() < 0.8 else rng.integers(0, 4)))
        for _ in range(rng.integers(0, 5)):
            boxes.append([*map(float, rng.integers(0, 60, 2)), *map(float, rng.integers(5, 40, 2))])
            scores.append(round(rng.random(), 2))
            classes.append(int(rng.integers(0, 4)))
        pictures.append(
            {
                "truths": truths,
                "kinds": kinds,
                "crowds": crowds,
                "boxes": boxes,
                "scores": scores,
                "classes": classes,
            }
        )
    return pictures


def score(pictures: list[dict[str, Any]]) -> list[float]:
    """Return the mean average precision at each overlap from 0.5 to 0.95."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    annotations, detections = [], []
    for image, picture in enumerate(pictures, 1):
        for box, kind, crowd in zip(picture["truths"], picture["kinds"], picture["crowds"], strict=True):
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image,
                    "category_id": kind + 1,
                    "bbox": box,
                    "area": box[2] * box[3],
                    "iscrowd": int(crowd),
                }
            )
        for box, value, kind in zip(picture["boxes"], picture["scores"], picture["classes"], strict=True):
            detections.append({"image_id": image, "category_id": kind + 1, "bbox": box, "score": value})
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = {
            "images": [{"id": image, "width": SIZE, "height": SIZE} for image in range(1, len(pictures) + 1)],
            "annotations": annotations,
            "categories": [{"id": kind + 1, "name": str(kind)} for kind in range(4)],
        }
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(detections), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][
        :, :, :, 0, 2
    ]  # overlaps, recalls, classes; all areas, 100 detections
    return [float(at[at > -1].mean()) for at in precision]


if __name__ == "__main__":
    cases = [{"pictures": draw_pictures(seed)} for seed in range(3)]
    for case in cases:
        case["expected"] = score(case["pictures"])
    FIGURES.write_text(json.dumps(cases))
