"""YOLO's format: `images/a.jpg` beside `labels/a.txt`, a line a box, and a `data.yaml`.

A line is `class x y width height` in shares of the picture, the centre first, or the class and the points of
a polygon, of which the box is taken. A picture without a file of labels has no objects.

    path: .
    train: images/train       # also a list of folders, or a .txt file that lists pictures
    val: images/val
    names: [person, bicycle]  # also `0: person` or `- person`, a line each
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from edgekit_runtime.errors import DataError
from edgekit_toolkit.samples.boxes.box_set import (
    BoxSet,
    PictureBoxes,
    StatedBox,
    list_images,
    number,
    read_text,
)

# A key, or a dash, and the rest of a line.
_ENTRY: Final = re.compile(
    r"""\s*(?:-\s+|(?P<key>"[^"]*"|'[^']*'|[^\s"'\[{&*!|>-][^:]*?)\s*:(?:\s+|$))(?P<value>.*)"""
)
_COMMENT: Final = re.compile(r"""((?:"[^"]*"|'[^']*'|[^"'#]|(?<=\S)#)*)""")
_SCALARS: Final = re.compile(r"""\s*(?:(\d+)\s*:\s*)?("[^"]*"|'[^']*'|[^,\[\]{}"']*?)\s*(?:,|$)""")
_KEYS: Final = ("path", "train", "val", "test", "names")
_SPLITS: Final[Mapping[str, tuple[str, ...]]] = {"train": ("train", "val"), "val": ("val", "test", "train")}


def read_yolo(path: Path, split: str) -> BoxSet:
    """Return the pictures of a `data.yaml` for a split, or those of a folder of images.

    Args:
        path: the `.yaml`, or a folder of images.
        split: `train` or `val`; where there is none, another one.

    Raises:
        DataError: a file is missing or malformed; the message names the line.
    """
    if path.is_dir():
        sheet = next((found for parent in [path, *path.parents[:3]] if (found := find_sheet(parent))), None)
        names = () if sheet is None else read_sheet(sheet)["names"]
        return _read_pictures(list_images(path), tuple(names or _listed_names(path)), path)
    fields = read_sheet(path)
    places = next((fields[key] for key in _SPLITS[split] if fields[key]), None)
    if places is None:
        raise DataError(f"{path}: names no pictures; expected train: and val: with folders of images")
    images = [image for place in places for image in _images_at(path, fields["path"], place)]
    return _read_pictures(images, tuple(fields["names"]), path)


def find_sheet(folder: Path) -> Path | None:
    """Return the `data.yaml` of a folder, or its only `.yaml` with class names, or None."""
    sheets = sorted(file for file in folder.glob("*.y*ml") if file.suffix in (".yaml", ".yml"))
    named = [file for file in sheets if file.stem == "data"] or sheets
    return named[0] if len(named) == 1 and re.search(r"(?m)^names\s*:", read_text(named[0])) else None


def labels_file(image: Path) -> Path:
    """Return where the labels of an image are: in `labels` instead of the last `images`, or beside it."""
    parts = image.parts
    for index in range(len(parts) - 2, -1, -1):
        if parts[index] == "images":
            return Path(*parts[:index], "labels", *parts[index + 1 :]).with_suffix(".txt")
    return image.with_suffix(".txt")


def read_sheet(path: Path) -> dict[str, list[str]]:
    """Return the values of path, train, val, test and names of a `data.yaml`, each a list.

    It reads the YAML that such files use, and no more: scalars, and lists or numbered names in one level.

    Raises:
        DataError: a value of these keys is of another kind.
    """
    fields: dict[str, list[str]] = {key: [] for key in _KEYS}
    numbers: list[int] = []
    current = ""
    lines = iter(enumerate(map(_without_comment, read_text(path).splitlines()), 1))
    for line_number, line in lines:
        where = f"{path}:{line_number}"
        text = line.strip()
        entry = _ENTRY.fullmatch(line)
        key, value = (None, text) if entry is None else (entry["key"], entry["value"])
        if not text.strip("-"):
            continue
        is_top = not line.startswith((" ", "\t", "-"))
        current = _bare(key or "") if is_top else current
        if current not in _KEYS or not value:
            continue
        if is_top or text[0] in "[{":
            fields[current], own = _flow(_whole_flow(value, lines), where)
            numbers += own
        elif entry is None:
            raise DataError(f"{where}: {text[:60]!r} is no entry of '{current}'; write '- NAME'")
        else:
            numbers += [] if key is None else [_class_number(_bare(key), where)]
            fields[current].append(_bare(value))
    names = fields["names"]
    if numbers and sorted(numbers) != list(range(len(names))):
        raise DataError(f"{path}: names have the numbers {numbers[:9]}, expected 0 to {len(names) - 1}")
    fields["names"] = [name for _, name in sorted(zip(numbers, names, strict=True))] if numbers else names
    return fields


def _without_comment(line: str) -> str:
    matched = _COMMENT.match(line)
    return (matched[1] if matched else line).rstrip()


def _whole_flow(value: str, lines: Iterator[tuple[int, str]]) -> str:
    """Return a value with the lines up to its closing bracket."""
    closing = {"[": "]", "{": "}"}.get(value[0], "")
    while not value.endswith(closing):
        following = next(lines, None)
        if following is None:
            return value
        value += f" {following[1].strip()}"
    return value


def _flow(text: str, where: str) -> tuple[list[str], list[int]]:
    """Return the values of `[a, b]`, `{0: a}` or a scalar, and the numbers before them."""
    if text[0] not in "[{":
        if text[0] in "&*!|>":
            raise DataError(f"{where}: {text[:20]!r} is YAML that is not read here; write the value itself")
        return [_bare(text)], []
    if text[-1] not in "]}":
        raise DataError(f"{where}: the bracket is never closed")
    inner = text[1:-1].strip().rstrip(",")
    values, keys, position = list[str](), list[int](), 0
    while position < len(inner):
        match = _SCALARS.match(inner, position)
        if match is None or match.end() == position:
            raise DataError(f"{where}: {inner[position : position + 40]!r} is no list of names")
        values.append(_bare(match[2]))
        keys += [] if match[1] is None else [_class_number(match[1], where)]
        position = match.end()
    return values, keys


def _bare(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'" else text


def _class_number(text: str, where: str) -> int:
    if not text.isdecimal() or len(text) > 6:
        raise DataError(f"{where}: {text[:40]!r} is no class number")
    return int(text)


def _listed_names(folder: Path) -> tuple[str, ...]:
    """Return the lines of a `classes.txt` beside the labels or above them."""
    labels = labels_file(folder / "image.jpg").parent
    for file in (labels / "classes.txt", labels.parent / "classes.txt"):
        if file.is_file():
            return tuple(line.strip() for line in read_text(file).splitlines() if line.strip())
    return ()


def _images_at(sheet: Path, root: Sequence[str], place: str) -> list[Path]:
    """Return the images of a folder or a list that a `data.yaml` names."""
    folders = [sheet.parent / root[0], sheet.parent] if root else [sheet.parent]
    # Roboflow writes paths that begin one folder too high.
    paths = [folder / name for folder in folders for name in (place, place.removeprefix("../"))]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        raise DataError(f"{sheet}: there is no {place} in {' or '.join(dict.fromkeys(map(str, folders)))}")
    if path.is_dir():
        return list_images(path)
    images = [path.parent / line.strip() for line in read_text(path).splitlines() if line.strip()]
    for line_number, image in enumerate(images, 1):
        if not image.is_file():
            raise DataError(f"{path}:{line_number}: there is no image {image}")
    return images


def _read_pictures(images: Sequence[Path], names: tuple[str, ...], where: Path) -> BoxSet:
    folders = dict.fromkeys(labels_file(image).parent for image in images)
    stems = {labels_file(image) for image in images}
    if where.is_dir():
        for folder in folders:
            for file in sorted(folder.glob("*.txt")):
                if file not in stems and file.name != "classes.txt":
                    raise DataError(f"{file}: there is no image of this name")
    pictures = tuple(PictureBoxes(image, _read_labels(labels_file(image), names), (1, 1)) for image in images)
    return BoxSet(pictures, names).check_filled(where)


def _read_labels(path: Path, names: Sequence[str]) -> tuple[StatedBox, ...]:
    if not path.is_file():
        return ()
    lines = [(f"{path}:{index}", line.split()) for index, line in enumerate(read_text(path).splitlines(), 1)]
    return tuple(_read_line(values, where, names) for where, values in lines if values)


def _read_line(values: Sequence[str], where: str, names: Sequence[str]) -> StatedBox:
    if len(values) != 5 and (len(values) < 7 or len(values) % 2 == 0):
        raise DataError(
            f"{where}: has {len(values)} values, expected class, x, y, width and height, or class and the"
            " points of a polygon"
        )
    index = number(values[0], where)
    if index != int(index) or not 0 <= index < (len(names) or 1 << 31):
        known = f"0 to {len(names) - 1}, as the data set has {len(names)} names" if names else "0 or more"
        raise DataError(f"{where}: the class is {values[0]}, expected {known}")
    first, *others = (number(value, where) for value in values[1:])
    if len(values) == 5:
        y, width, height = others
        corners = (first - width / 2, y - height / 2, first + width / 2, y + height / 2)
    else:
        xs, ys = [first, *others[1::2]], others[::2]
        corners = (min(xs), min(ys), max(xs), max(ys))
    return StatedBox(corners=corners, category=names[int(index)] if names else int(index), where=where)
