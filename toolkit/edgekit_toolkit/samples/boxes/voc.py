"""Reads data sets with boxes in the Pascal VOC format.

The images are in `JPEGImages` and the annotations in `Annotations`, as `.xml` files of the same names. They
may also be in the same folder. A file `ImageSets/Main/val.txt` lists the names in a split. Pixel coordinates
start at 1. A box includes the pixel at its maximum corner.
"""

from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from edgekit_runtime.errors import DataError
from edgekit_toolkit.samples.boxes.box_set import (
    BoxSet,
    PictureBoxes,
    StatedBox,
    list_images,
    number,
    read_text,
)

_IMAGES: Final = ("JPEGImages", "images")
_MAX_XML: Final = 1 << 20


def read_voc(path: Path) -> BoxSet:
    """Return the annotated images of a data set with their boxes.

    `path` is the folder of the data set, or an image list in its `ImageSets/Main`.

    Raises:
        DataError: A file is malformed, an image is missing, or there are no boxes.
    """
    root = path if path.is_dir() else path.parents[2]
    folder = next((root / name for name in _IMAGES if (root / name).is_dir()), root)
    sheets_folder = root / "Annotations" if (root / "Annotations").is_dir() else folder
    images = {image.stem: image for image in list_images(folder)}
    if path.is_dir():
        sheets = sorted(sheets_folder.glob("*.xml"))
    else:
        stems = [line.split()[0] for line in read_text(path).splitlines() if line.strip()]
        sheets = [sheets_folder / f"{stem}.xml" for stem in stems]
    pictures = tuple(_read_sheet(sheet, images.get(sheet.stem)) for sheet in sheets)
    others = len(images) - len(pictures) if path.is_dir() else 0
    notes = (f"{others} images have no annotations and are left out",) if others > 0 else ()
    names = sorted({str(box.category) for picture in pictures for box in picture.boxes})
    return BoxSet(pictures, tuple(names), notes).check_filled(path)


def is_voc(path: Path) -> bool:
    if path.suffix == ".txt":
        return path.is_file() and path.parent.parent.name == "ImageSets"
    return path.is_dir() and any(
        True for folder in (path / "Annotations", path) for _ in folder.glob("*.xml")
    )


def _read_sheet(path: Path, image: Path | None) -> PictureBoxes:
    if image is None:
        raise DataError(f"{path}: there is no image of this name")
    tree = _parse(path)
    size = tree.find("size")
    stated = None
    if size is not None:
        sides = [number(size.findtext(name), f"{path}: size") for name in ("width", "height")]
        stated = (sides[0], sides[1]) if all(sides) else None  # some tools write 0 for unknown
    boxes = tuple(
        _read_object(entry, f"{path}: object {index}") for index, entry in enumerate(tree.iter("object"), 1)
    )
    return PictureBoxes(image, boxes, stated)


def _read_object(entry: ElementTree.Element, where: str) -> StatedBox:
    name, box = entry.findtext("name"), entry.find("bndbox")
    if not name or box is None:
        raise DataError(f"{where}: has no {'bndbox' if name else 'name'}")
    x1, y1, x2, y2 = (
        number(box.findtext(key), f"{where}: {key}") for key in ("xmin", "ymin", "xmax", "ymax")
    )
    return StatedBox(
        corners=(min(x1 - 1, x2), min(y1 - 1, y2), x2, y2),
        category=name.strip(),
        where=where,
        is_ignored=entry.findtext("difficult", "0").strip() == "1",
    )


def _parse(path: Path) -> ElementTree.Element:
    """Return the root of an annotation; a document type is refused, as its entities may grow without end."""
    text = read_text(path)
    if len(text) > _MAX_XML or "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise DataError(f"{path}: is larger than 1 MB or has a document type, which no annotation needs")
    try:
        return ElementTree.fromstring(text)  # noqa: S314 - it is small, and without entities
    except (ElementTree.ParseError, ValueError) as error:
        raise DataError(f"{path}: is no XML: {error}") from error
