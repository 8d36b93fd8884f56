"""Reads data sets with boxes in the YOLO format: `images/a.jpg`, `labels/a.txt` and a `data.yaml`.

Each line of a label file describes one object. It is either `class x y width height`, where x and y are the
centre of the box, or a class followed by the points of a polygon, which is replaced by its bounding box. All
coordinates are fractions of the image size. An image without a label file has no objects.

A `data.yaml` looks like this:

    path: .
    train: images/train       # or a list of folders, or a .txt file that lists images
    val: images/val
    names: [person, bicycle]  # or one line for each class, such as `0: person` or `- person`
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

_TOP: Final = re.compile(r"""(?P<key>"[^"]*"|'[^']*'|[^\s"'#\-][^:]*?)\s*:(?:\s+(?P<value>.*))?""")
# A quote begins a text only where a value begins: in `bird's nest` it is an apostrophe.
_QUOTED: Final = r"""(?<![^\s\[{,])(?:"[^"]*"|'[^']*')"""
_COMMENT: Final = re.compile(rf"((?:{_QUOTED}|[^#]|(?<=\S)#)*)")
_PARTS: Final = re.compile(rf"(?:{_QUOTED}|[^,])+")
# A dash or a number, and a value.
_ENTRY: Final = re.compile(r"""(?:-\s+|(?P<key>"[^"]*"|'[^']*'|[^\s"':]+)\s*:(?:\s+|$))?(?P<value>.*)""")
_KEYS: Final = ("path", "train", "val", "test", "names")
_SPLITS: Final[Mapping[str, tuple[str, ...]]] = {"train": ("train", "val"), "val": ("val", "test", "train")}


def read_yolo(path: Path, split: str) -> BoxSet:
    """Return the images of a data set with their boxes.

    Args:
        path: A `data.yaml`, or a folder of images.
        split: The split of the `data.yaml` to read, `train` or `val`. If the file does not have this split,
            another split is read. Ignored for a folder.

    Raises:
        DataError: A file is missing or malformed. The message names the line.
    """
    if path.is_dir():
        sheet = next((file for parent in [path, *path.parents[:3]] if (file := find_sheet(parent))), None)
        names = () if sheet is None else read_sheet(sheet)["names"]
        return _read_pictures(list_images(path), tuple(names or _listed_names(path)), path)
    fields = read_sheet(path)
    entries = next((fields[key] for key in _SPLITS[split] if fields[key]), None)
    if entries is None:
        raise DataError(f"{path}: names no pictures; expected train: and val: with folders of images")
    images = [image for entry in entries for image in _images_at(path, fields["path"], entry)]
    return _read_pictures(images, tuple(fields["names"]), path)


def find_sheet(folder: Path) -> Path | None:
    """Return the path of the `data.yaml` of a folder, or of its only `.yaml` file.

    Return None if there is no such file, or if it lacks `names`.
    """
    sheets = sorted(file for file in folder.glob("*.y*ml") if file.suffix in (".yaml", ".yml"))
    named = [file for file in sheets if file.stem == "data"] or sheets
    return named[0] if len(named) == 1 and re.search(r"(?m)^names\s*:", read_text(named[0])) else None


def labels_file(image: Path) -> Path:
    """Return the path of the label file of an image. The file may be missing.

    The last folder `images` in the path is replaced by `labels`. If there is no such folder, the label file
    is beside the image.
    """
    parts = image.parts
    for index in range(len(parts) - 2, -1, -1):
        if parts[index] == "images":
            return Path(*parts[:index], "labels", *parts[index + 1 :]).with_suffix(".txt")
    return image.with_suffix(".txt")


def read_sheet(path: Path) -> dict[str, list[str]]:
    """Return the values of `path`, `train`, `val`, `test` and `names` in a `data.yaml`, each as a list.

    The list of a missing key is empty. Only scalars, flat lists and numbered names are supported.

    Raises:
        DataError: The value of one of these keys is not supported.
    """
    fields: dict[str, list[str]] = {key: [] for key in _KEYS}
    for key, lines in _blocks(path):
        if key in _KEYS:
            fields[key] = _read_values(lines, path)
    return fields


def _blocks(path: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each key with its lines up to the next key, each as line number and text."""
    key, lines = "", list[tuple[str, str]]()
    for number_of_line, line in enumerate(read_text(path).splitlines(), 1):
        matched = _COMMENT.match(line)
        text = (matched[1] if matched else line).rstrip()
        if top := _TOP.fullmatch(text):
            yield key, lines
            key, lines, text = _bare(top["key"]), [], top["value"] or ""
        if text.strip("- ") or not lines:
            lines.append((f"{path}:{number_of_line}", text.strip()))
    yield key, lines


def _read_values(lines: Sequence[tuple[str, str]], path: Path) -> list[str]:
    """Return a value, or those of `[a, b]`, `{0: a, 1: b}`, or of a dash or a number in each line."""
    is_block = not lines[0][1]
    parts = lines[is_block:]
    if parts and parts[0][1][0] in "[{":
        where, text = parts[0][0], " ".join(text for _, text in parts)
        if text[-1] not in "]}":
            raise DataError(f"{where}: the bracket is never closed")
        parts, is_block = (
            [(where, part.strip()) for part in _PARTS.findall(text[1:-1]) if part.strip()],
            False,
        )
    numbers, values = list[int](), list[str]()
    for where, part in parts:
        entry = _ENTRY.fullmatch(part)
        key, value = (None, part) if entry is None else (entry["key"], entry["value"])
        if key is not None:
            numbers.append(_class_number(_bare(key), where))
        elif is_block and not part.startswith("-"):
            raise DataError(f"{where}: {part[:60]!r} is no entry of a list; write '- NAME'")
        if value[:1] in tuple("[]{}&*!|>"):
            raise DataError(f"{where}: {value[:20]!r} is YAML that is not read here; write the value itself")
        values.append(_bare(value))
    if numbers and sorted(numbers) != list(range(len(values))):
        raise DataError(f"{path}: names have the numbers {numbers[:9]}, expected 0 to {len(values) - 1}")
    return [value for _, value in sorted(zip(numbers, values, strict=True))] if numbers else values


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


def _images_at(sheet: Path, root: Sequence[str], entry: str) -> list[Path]:
    """Return the images of a folder or a list that a `data.yaml` names."""
    folders = [sheet.parent / root[0], sheet.parent] if root else [sheet.parent]
    # Roboflow writes paths that begin one folder too high.
    paths = [folder / name for folder in folders for name in (entry, entry.removeprefix("../"))]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        raise DataError(f"{sheet}: there is no {entry} in {' or '.join(dict.fromkeys(map(str, folders)))}")
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
        expected = f"0 to {len(names) - 1}, as the data set has {len(names)} names" if names else "0 or more"
        raise DataError(f"{where}: the class is {values[0]}, expected {expected}")
    first, *others = (number(value, where) for value in values[1:])
    if len(values) == 5:
        y, width, height = others
        corners = (first - width / 2, y - height / 2, first + width / 2, y + height / 2)
    else:
        xs, ys = [first, *others[1::2]], others[::2]
        corners = (min(xs), min(ys), max(xs), max(ys))
    return StatedBox(corners=corners, category=names[int(index)] if names else int(index), where=where)
