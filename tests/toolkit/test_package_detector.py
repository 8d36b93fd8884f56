"""`edgekit package` of a small generated detector on a data set of drawn boxes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from PIL import Image
from tests.toolkit.package_run import edgekit, model_of, package, read_only, saved, tensor

SIDE, CELL = 32, 8
NAMES = ("red thing", "green thing")


def cell_detector() -> onnx.ModelProto:
    """Return a detector of coloured cells: a grid of stride 8 whose scores are the mean colours of a cell."""
    weight = np.zeros((7, 3, CELL, CELL), np.float32)
    weight[4] = 1 / CELL**2  # objectness: any colour
    weight[5, 0] = weight[6, 1] = 1 / CELL**2
    bias = np.array([0.5, 0.5, 0, 0, 0, 0, 0], np.float32)
    cells = (SIDE // CELL) ** 2
    nodes = [
        helper.make_node(
            "Conv", ["x", "weight", "bias"], ["maps"], strides=[CELL, CELL], kernel_shape=[CELL] * 2
        ),
        helper.make_node("Reshape", ["maps", "shape"], ["rows"]),
        helper.make_node("Transpose", ["rows"], ["boxes"], perm=[0, 2, 1]),
    ]
    constants = {"weight": weight, "bias": bias, "shape": np.array([1, 7, cells])}
    return model_of(nodes, [tensor("x", (1, 3, SIDE, SIDE))], [tensor("boxes", (1, cells, 7))], constants)


def draw_cells(root: Path, count: int) -> Path:
    """Write pictures with one to three coloured cells each, and their labels in YOLO's format."""
    for folder in ("images", "labels"):
        (root / folder).mkdir(parents=True)
    cells = SIDE // CELL
    for number in range(count):
        rng = np.random.default_rng(number)
        pixels = rng.integers(0, 6, (SIDE, SIDE, 3)).astype(np.uint8)
        lines = []
        for cell in rng.choice(cells**2, 1 + number % 3, replace=False):
            row, column = divmod(int(cell), cells)
            kind = int(rng.integers(0, 2))
            area = pixels[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
            area[:, :, kind] = rng.integers(200, 256)
            lines.append(f"{kind} {(column + 0.5) / cells} {(row + 0.5) / cells} {1 / cells} {1 / cells}\n")
        Image.fromarray(pixels).save(root / "images" / f"{number:03}.png")
        (root / "labels" / f"{number:03}.txt").write_text("".join(lines))
    (root / "data.yaml").write_text(f"train: images\nval: images\nnames: {json.dumps(NAMES)}\n")
    return root


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("detector")
    rules = folder / "rules.json"
    rules.write_text(json.dumps({"scale": 1 / 255}))
    outcome = package(
        saved(cell_detector(), folder / "cells.onnx"),
        folder / "out",
        *("--eval", draw_cells(folder / "data", 48), "--preprocessing", rules),
        *("--task", "detection:layout=grid,strides=[8]", "--search-seconds", 0, "--json"),
    )
    return {**outcome.json, "folder": folder}


def test_detector_is_judged_by_the_mean_average_precision_of_its_boxes(report: dict[str, Any]) -> None:
    accuracy = report["accuracy"]

    assert (accuracy["metric"], accuracy["title"]) == ("map50_95", "mAP50-95")
    assert accuracy["baseline"] == pytest.approx(1)


def test_classes_of_the_data_set_are_the_labels_of_the_package(report: dict[str, Any]) -> None:
    with read_only(report["folder"] / "out") as opened:
        assert opened.manifest.labels is not None
        labels = bytes(opened.read(opened.manifest.labels))

    assert labels.decode().splitlines() == list(NAMES)


def test_labels_of_a_detector_are_not_held_against_an_axis(report: dict[str, Any]) -> None:
    assert not [text for text in report["warnings"] if "no output has an axis" in text]


def test_wrong_label_ends_the_run_with_file_and_line(tmp_path: Path) -> None:
    data = draw_cells(tmp_path / "data", 4)
    (data / "labels" / "002.txt").write_text("0 0.5 0.5 0.1 0.1\n5 0.5 0.5 0.1 0.1\n")
    model = saved(cell_detector(), tmp_path / "cells.onnx")

    outcome = edgekit("package", model, "--target", "x86-64", "--eval", data)

    assert outcome.code != 0
    assert "002.txt:2: the class is 5, expected 0 to 1" in " ".join(outcome.stderr.split())
