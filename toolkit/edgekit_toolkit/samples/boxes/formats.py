"""Detects the format of a data set with boxes, and reads it."""

from pathlib import Path

from edgekit_runtime.errors import DataError
from edgekit_toolkit.samples.boxes.box_set import BoxSet
from edgekit_toolkit.samples.boxes.coco import find_coco, is_coco, read_coco
from edgekit_toolkit.samples.boxes.voc import is_voc, read_voc
from edgekit_toolkit.samples.boxes.yolo import find_sheet, labels_file, read_yolo


def find_box_set(path: Path, split: str = "val") -> BoxSet | None:
    """Return the images under a path with their boxes, or None if the path is not a data set with boxes.

    Args:
        path: A `data.yaml`, a COCO file, a Pascal VOC list, a folder with one of these, or a folder with
            images and YOLO labels (see `labels_file`).
        split: The part of the data set to read, `train` or `val`, if it has both.

    Raises:
        DataError: Something in the data set is missing or malformed.
    """
    try:
        return _find_box_set(path, split)
    except OSError as error:  # such as a path of a thousand characters, or a folder of another user
        raise DataError(f"{path}: cannot be read as boxes: {error.strerror or error}") from error


def _find_box_set(path: Path, split: str) -> BoxSet | None:
    if path.is_file():
        if path.suffix in (".yaml", ".yml"):
            return read_yolo(path, split)
        if is_coco(path):
            return read_coco(path)
        return read_voc(path) if is_voc(path) else None
    if not path.is_dir():
        return None
    if sheet := find_sheet(path):
        return read_yolo(sheet, split)
    if is_voc(path):
        return read_voc(path)
    if coco := find_coco(path, split):
        return read_coco(coco)
    images = path / "images" if (path / "images").is_dir() else path
    labels = labels_file(images / "image.jpg").parent
    has_labels = labels != images and any(True for _ in labels.rglob("*.txt"))
    return read_yolo(images, split) if has_labels else None
