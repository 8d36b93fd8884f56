"""Times from a detector's outputs to its boxes, in milliseconds and as a share of sorting 100,000 floats.

Usage: python benchmarks/detection_decoding.py
"""

from collections.abc import Callable

import numpy as np

from edgekit_runtime.tasks.boxes import Boxes, choose_best
from edgekit_runtime.tasks.kinds.detection import DetectionOptions, find_boxes
from turns import median_ms

DRAW = np.random.default_rng(0)


def yolox_outputs() -> np.ndarray:
    rows = DRAW.random((1, 3549, 85), np.float32)
    rows[..., :4] = DRAW.normal(0, 0.5, (1, 3549, 4))
    rows[..., 4] *= DRAW.random((1, 3549)) < 0.05
    return rows


def yolov8_outputs() -> np.ndarray:
    values = np.zeros((1, 84, 8400), np.float32)
    values[:, :2] = DRAW.uniform(0, 640, (1, 2, 8400))
    values[:, 2:4] = DRAW.uniform(10, 100, (1, 2, 8400))
    values[:, 4:] = DRAW.uniform(0, 0.01, (1, 80, 8400))
    anchors = DRAW.choice(8400, 150, replace=False)
    values[0, 4 + DRAW.integers(0, 80, 150), anchors] = DRAW.uniform(0.3, 1, 150)
    return values


def drawn_boxes(count: int, classes: int) -> Boxes:
    corner = DRAW.uniform(0, 600, (count, 2))
    corners = np.concatenate([corner, corner + DRAW.uniform(10, 200, (count, 2))], axis=1)
    scores = DRAW.random(count, np.float32)
    return Boxes(corners.astype(np.float32), scores, DRAW.integers(0, classes, count))


def main() -> None:
    yolox, yolov8 = yolox_outputs(), yolov8_outputs()
    rows = np.ascontiguousarray(yolov8.swapaxes(1, 2))
    grid, scored = DetectionOptions(layout="grid"), DetectionOptions()
    floats = DRAW.random(100_000, np.float32)
    boxes = {count: drawn_boxes(count, 80) for count in (1000, 100_000)}
    unit_ms = median_ms(lambda: np.sort(floats))
    cases: dict[str, Callable[[], object]] = {
        "YOLOX-nano [1, 3549, 85]": lambda: find_boxes({"y": yolox}, grid, (416, 416)),
        "YOLOv8 [1, 84, 8400]": lambda: find_boxes({"y": yolov8}, scored, (640, 640)),
        "YOLOv8 as rows [1, 8400, 84]": lambda: find_boxes({"y": rows}, scored, (640, 640)),
        "suppression alone, 1,000 boxes": lambda: choose_best(boxes[1000], overlap=0.45, max_boxes=100),
        "suppression alone, 100,000 boxes": lambda: choose_best(boxes[100_000], overlap=0.45, max_boxes=100),
    }
    print(f"sorting 100,000 floats: {unit_ms:.2f} ms")
    for name, run in cases.items():
        run()
        own_ms = median_ms(run)
        print(f"{name}: {own_ms:.2f} ms, {own_ms / unit_ms:.2f} of the sorting")


if __name__ == "__main__":
    main()
