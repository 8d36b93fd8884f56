"""Reads data sets with boxes in the COCO format.

The format is a JSON file with `images`, `annotations` and `categories`. A box is [x, y, width, height].
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from edgekit_runtime.errors import DataError
from edgekit_toolkit.samples.boxes.box_set import BoxSet, PictureBoxes, StatedBox, number, read_text

_LISTS: Final = ("images", "annotations", "categories")
_FOLDERS: Final = ("", "images", "data")


def find_coco(folder: Path, split: str) -> Path | None:
    """Return the COCO annotation file in a folder, or None if there is none.

    If there are several annotation files, the one for `split` is returned.

    Raises:
        DataError: There are several files, and `split` does not select one.
    """
    files = sorted(file for inner in (folder, folder / "annotations") for file in inner.glob("*.json"))
    files = [file for file in files if is_coco(file)]
    if len(files) > 1:
        named = [file for file in files if split in file.stem]
        files = [file for file in named if file.stem.startswith("instances")] or named or files
    if len(files) > 1:
        raise DataError(f"{folder}: holds {' and '.join(file.name for file in files)}; give one of them")
    return files[0] if files else None


def is_coco(path: Path) -> bool:
    """Return whether a file is a readable `.json` file with the three lists of the COCO format."""
    try:
        text = read_text(path) if path.suffix == ".json" else ""
    except DataError:
        return False
    return all(f'"{name}"' in text for name in _LISTS)


def read_coco(path: Path) -> BoxSet:
    """Return the images of a COCO annotation file with their boxes, sorted by path.

    Images are searched in the folder of the file, in its parent, and in their subfolders `images` and `data`.
    For a file `..._val2017.json`, the subfolders `val2017` are searched too.

    Raises:
        DataError: An entry is malformed, an image is missing, or there are no boxes.
    """
    content = _parse(path)
    images, annotations, categories = (_table(content, name, path) for name in _LISTS)
    names = {_key(entry, "id", where): str(entry.get("name")) for where, entry in _sorted_by_id(categories)}
    boxes: dict[int | str, list[StatedBox]] = {_key(entry, "id", where): [] for where, entry in images}
    for where, entry in annotations:
        image, category = _key(entry, "image_id", where), _key(entry, "category_id", where)
        if image not in boxes:
            raise DataError(f"{where}: there is no image {image}")
        if category not in names:
            raise DataError(f"{where}: there is no category {category}")
        boxes[image].append(_read_box(entry, names[category], where))
    pictures, missing = [], []
    for where, entry in images:
        file = _find_image(path, str(entry.get("file_name", "")))
        size = entry.get("width"), entry.get("height")
        stated = (number(size[0], where), number(size[1], where)) if all(size) else None
        if file is None:
            missing.append(f"{where}: there is no image {entry.get('file_name')}")
        else:
            pictures.append(PictureBoxes(file, tuple(boxes[_key(entry, "id", where)]), stated))
    if missing:
        raise DataError(f"{len(missing)} of {len(images)} images are missing: {missing[0]}")
    pictures.sort(key=lambda picture: picture.file)
    return BoxSet(tuple(pictures), tuple(names.values())).check_filled(path)


def _sorted_by_id(entries: list[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, Mapping[str, Any]]]:
    return sorted(entries, key=lambda entry: number(entry[1].get("id"), entry[0]))


def _parse(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as annotations: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected an object with {', '.join(_LISTS)}")
    return content


def _table(content: Mapping[str, Any], name: str, path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the entries of a list, each with its position for messages."""
    entries = content.get(name)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f"{path}: '{name}' is no list of objects")
    if not entries and name != "annotations":
        raise DataError(f"{path}: '{name}' is empty")
    return [(f"{path}: {name}[{index}]", entry) for index, entry in enumerate(entries)]


def _key(entry: Mapping[str, Any], name: str, where: str) -> int | str:
    value = entry.get(name)
    if not isinstance(value, int | str):
        raise DataError(f"{where}: '{name}' is {json.dumps(value)[:40]}, expected a number")
    return value


def _read_box(entry: Mapping[str, Any], category: str, where: str) -> StatedBox:
    box = entry.get("bbox")
    if not isinstance(box, list) or len(box) != 4:
        raise DataError(f"{where}: 'bbox' is {json.dumps(box)[:60]}, expected x, y, width and height")
    x, y, width, height = (number(value, where) for value in box)
    return StatedBox(
        corners=(x, y, x + width, y + height),
        category=category,
        where=where,
        is_crowd=bool(entry.get("iscrowd")),
    )


def _find_image(path: Path, name: str) -> Path | None:
    """Return the image of an entry; COCO's own folders are named like the end of the file's name."""
    split = path.stem.rpartition("_")[2]
    candidates = [
        folder / inner / name for folder in (path.parent, path.parent.parent) for inner in (*_FOLDERS, split)
    ]
    return next((candidate for candidate in candidates if name and candidate.is_file()), None)
