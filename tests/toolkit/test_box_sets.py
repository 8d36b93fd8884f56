"""Data sets of boxes: YOLO, COCO and Pascal VOC as they lie on disks, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.toolkit.cases import cases
from tests.toolkit.drawn_boxes import (
    INPUT,
    LETTERBOX,
    NAMES,
    PICTURES,
    draw,
    rows_of,
    truths_of,
    write_coco,
    write_voc,
    write_yolo,
)

from edgekit_runtime.errors import DataError
from edgekit_toolkit.samples.boxes.formats import find_box_set
from edgekit_toolkit.samples.boxes.yolo import read_sheet
from edgekit_toolkit.samples.media.classes import find_box_names, find_class_names
from edgekit_toolkit.samples.media.decoding import Decoding
from edgekit_toolkit.samples.split import choose_samples

# Of the pictures, in an input half as large.
ROWS = [[(0, 5, 5, 15, 15), (1, 20, 2, 36, 6)], [(1, 0, 10, 20, 15)], []]


@pytest.mark.parametrize("write", [write_yolo, write_coco, write_voc])
def test_each_format_gives_the_boxes_in_the_input(write: Callable[[Path], Path], tmp_path: Path) -> None:
    truths = truths_of(write(tmp_path), classes=NAMES)

    assert [rows_of(truth) for truth in truths] == ROWS
    assert {truth.input_size for truth in truths} == {(40, 40)}


def test_crop_cuts_boxes_and_drops_those_beyond_it(tmp_path: Path) -> None:
    truths = truths_of(write_yolo(tmp_path), rules={"center_crop": 40, "scale": 1})

    assert rows_of(truths[0]) == [(0, 0, 10, 10, 30), (1, 20, 4, 40, 12)]
    assert rows_of(truths[1]) == [(1, 0, 20, 20, 30)]


def test_crowds_of_coco_and_difficult_objects_of_voc_do_not_count(tmp_path: Path) -> None:
    crowd = truths_of(write_coco(tmp_path / "coco"))[0]
    difficult = truths_of(write_voc(tmp_path / "voc"), classes=NAMES)[0]

    assert crowd.ignored.tolist() == difficult.ignored.tolist() == [False, True]
    assert (crowd.crowds.tolist(), difficult.crowds.tolist()) == ([False, True], [False, False])


@pytest.mark.parametrize("path", [".", "images", "data.yaml"])
def test_yolo_is_found_by_root_images_and_sheet(path: str, tmp_path: Path) -> None:
    write_yolo(tmp_path)
    (tmp_path / "data.yaml").write_text("path: .\ntrain: images\nval: images\nnames: [square, bar]\n")

    box_set = find_box_set(tmp_path / path)

    assert box_set is not None
    assert (box_set.names, len(box_set.pictures)) == (NAMES, 3)


def test_calibration_takes_the_training_part_and_evaluation_the_other(tmp_path: Path) -> None:
    write_yolo(tmp_path, "train")
    for index, boxes in enumerate([PICTURES["a"], PICTURES["a"][:1]]):
        draw(tmp_path / "images" / "val" / f"other{index}.png", boxes)
    (tmp_path / "labels" / "val").mkdir()
    (tmp_path / "labels" / "val" / "other0.txt").write_text("0 0.25 0.5 0.25 0.5")
    (tmp_path / "data.yaml").write_text("train: images/train\nval: images/val\nnames:\n- square\n- bar\n")

    samples = choose_samples([INPUT], tmp_path, tmp_path, {}, decoding=Decoding(LETTERBOX, NAMES))

    assert (samples.calibration.count, samples.evaluation.count) == (3, 2)


@cases(
    "names",
    [
        "[square, bar]",
        "['square',  \"bar\"]  # two",
        "\n  [\n   square,\n   bar,\n  ]",
        "\n  0: square\n  1: bar",
        "\n  1: bar  # the second\n\n  0: 'square'",
        "{0: square, 1: bar}",
        "\n- square\n- bar",
        '\n  - square\n  - "bar"',
    ],
)
def test_sheet_is_read_in_every_usual_form(names: str, tmp_path: Path) -> None:
    sheet = tmp_path / "data.yaml"
    sheet.write_text(
        f"# drawn\nnc: 2\nnames: {names}\nval: ../valid/images\ndownload: |\n  x = [\n  names: no\n"
    )

    fields = read_sheet(sheet)

    assert fields["names"] == list(NAMES)
    assert fields["val"] == ["../valid/images"]


@pytest.mark.parametrize(
    "names",
    ["[bird's nest, cow's]  # two", "\n  - bird's nest  # one\n  - cow's", "{0: bird's nest, 1: \"cow's\"}"],
)
def test_apostrophe_in_a_name_is_no_quote(names: str, tmp_path: Path) -> None:
    sheet = tmp_path / "data.yaml"
    sheet.write_text(f"names: {names}\n")

    assert read_sheet(sheet)["names"] == ["bird's nest", "cow's"]


@cases(
    ("text", "message"),
    [
        ("names: [square, bar", r"data\.yaml:1: the bracket is never closed"),
        ("names: *all", r"data\.yaml:1: '\*all' is YAML"),
        ("names:\n  zero: square", r"data\.yaml:2: 'zero' is no class number"),
        ("names:\n  0: square\n  2: bar", r"numbers \[0, 2\], expected 0 to 1"),
        ("names:\n  - square\n  bar", r"data\.yaml:3: 'bar' is no entry"),
    ],
)
def test_sheet_of_another_form_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    sheet = tmp_path / "data.yaml"
    sheet.write_text(text)

    with pytest.raises(DataError, match=message):
        read_sheet(sheet)


def test_polygon_becomes_its_box(tmp_path: Path) -> None:
    write_yolo(tmp_path)
    (tmp_path / "labels" / "b.txt").write_text("1 0.1 0.5 0.5 0.25 0.9 0.5 0.5 0.75\n")

    assert rows_of(truths_of(tmp_path)[1]) == [(1, 4, 5, 36, 15)]


@cases(
    ("line", "message"),
    [
        ("0 0.5 0.5 0.1", "has 4 values, expected class, x, y, width and height"),
        ("0 0.5 0.5 0.1 0.1 0.9", "has 6 values"),
        ("7 0.5 0.5 0.1 0.1", "the class is 7, expected 0 to 1, as the data set has 2 names"),
        ("0.5 0.5 0.5 0.1 0.1", "the class is 0.5"),
        ("0 0.5 0.5 0.1 x", "'x' is no number"),
        ("0 0.5 0.5 nan 0.1", "nan is no number"),
        ("0 0.5 0.5 -0.1 0.1", "has no size of 0 or more"),
        ("0 0.9 0.5 0.4 0.1", r"lies outside the picture of 1 x 1"),
        ("0 20 10 20 20", "lies outside the picture"),
    ],
)
def test_wrong_line_of_yolo_is_refused_with_file_and_line(line: str, message: str, tmp_path: Path) -> None:
    write_yolo(tmp_path)
    (tmp_path / "data.yaml").write_text("val: images\nnames: [square, bar]")
    (tmp_path / "labels" / "b.txt").write_text(f"0 0.5 0.5 0.1 0.1\n{line}\n")

    with pytest.raises(DataError, match=rf"b\.txt:2: .*{message}"):
        find_box_set(tmp_path)


def test_box_beyond_the_picture_by_a_rounding_is_cut(tmp_path: Path) -> None:
    write_yolo(tmp_path)
    (tmp_path / "labels" / "b.txt").write_text("0 0.5 0.5 1.004 1.0")

    assert rows_of(truths_of(tmp_path)[1]) == [(0, 0, 0, 40, 20)]


@pytest.mark.parametrize("write", [write_yolo, write_coco, write_voc])
def test_missing_image_is_named(write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = write(tmp_path)
    next(tmp_path.rglob("b.png")).unlink()

    with pytest.raises(DataError, match=r"there is no image"):
        find_box_set(path)


@pytest.mark.parametrize("write", [write_yolo, write_coco, write_voc])
def test_data_set_without_boxes_is_refused(
    write: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PICTURES, "a", [])
    monkeypatch.setitem(PICTURES, "b", [])
    path = write(tmp_path)
    (tmp_path / "data.yaml").write_text("val: images\nnames: [square, bar]") if write is write_yolo else None

    with pytest.raises(DataError, match="none of its 3 pictures has a box"):
        find_box_set(path)


def test_class_that_labels_do_not_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"annotations\[0\]: class 'square' .* is none of the 2 labels \(box, bar"
    ):
        truths_of(write_coco(tmp_path), classes=("box", "bar"))


def test_labels_in_another_order_number_the_classes_by_name(tmp_path: Path) -> None:
    truths = truths_of(write_coco(tmp_path), classes=("other", "bar", "square"))

    assert truths[0].classes.tolist() == [2, 1]


def test_picture_of_another_shape_than_stated_is_refused(tmp_path: Path) -> None:
    path = write_coco(tmp_path)
    draw(tmp_path / "images" / "a.png", [], size=(40, 80))

    with pytest.raises(DataError, match=r"a\.png: has 40 x 80 pixels .* states 80 x 40"):
        truths_of(path)


def test_picture_of_half_the_stated_size_keeps_its_boxes(tmp_path: Path) -> None:
    path = write_coco(tmp_path)
    draw(tmp_path / "images" / "a.png", [], size=(40, 20))

    assert rows_of(truths_of(path)[0]) == ROWS[0]


@cases(
    "text",
    [
        '<!DOCTYPE a [<!ENTITY b "c">]><annotation/>',
        "<annotation>" + " " * (1 << 20) + "</annotation>",
        "<annotation><object>",
        "<annotation><object><name>bar</name></object></annotation>",
    ],
)
def test_hostile_or_damaged_xml_is_refused(text: str, tmp_path: Path) -> None:
    write_voc(tmp_path)
    (tmp_path / "Annotations" / "b.xml").write_text(text)

    with pytest.raises(DataError, match=r"b\.xml"):
        find_box_set(tmp_path)


@cases(
    ("change", "message"),
    [
        ({"annotations": {}}, "'annotations' is no list"),
        ({"images": []}, "'images' is empty"),
        ({"images": [{"id": 7, "file_name": "a" * 5000}], "annotations": []}, "cannot be read as boxes"),
        ({"annotations": [{"image_id": 99, "category_id": 3}]}, r"annotations\[0\]: there is no image 99"),
        ({"annotations": [{"image_id": 7, "category_id": 4}]}, "there is no category 4"),
        ({"annotations": [{"image_id": 7, "category_id": 3, "bbox": [1]}]}, r"'bbox' is \[1\]"),
        ({"annotations": [{"image_id": [], "category_id": 3}]}, r"'image_id' is \[\]"),
    ],
)
def test_wrong_entry_of_coco_is_refused_with_its_position(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = write_coco(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))

    with pytest.raises(DataError, match=message):
        find_box_set(path)


def test_endless_nesting_of_json_is_refused(tmp_path: Path) -> None:
    path = write_coco(tmp_path)
    path.write_text('{"images":[], "annotations":[], "categories":' + "[" * 200_000)

    with pytest.raises(DataError, match="cannot be read as annotations"):
        find_box_set(path)


def test_several_annotations_are_told_apart_by_the_split(tmp_path: Path) -> None:
    path = write_coco(tmp_path)
    other = json.loads(path.read_text())
    del other["images"][0], other["annotations"][:2]
    path.with_name("instances_train.json").write_text(json.dumps(other))

    assert len(truths_of(tmp_path)) == 3
    assert len(truths_of(tmp_path, split="train")) == 2


def test_list_of_voc_names_a_part(tmp_path: Path) -> None:
    write_voc(tmp_path)
    (tmp_path / "ImageSets" / "Main").mkdir(parents=True)
    part = tmp_path / "ImageSets" / "Main" / "val.txt"
    part.write_text("b\na  1\n")

    assert [rows_of(truth) for truth in truths_of(part, classes=NAMES)] == [ROWS[1], ROWS[0]]


def test_names_of_boxes_are_no_class_folders(tmp_path: Path) -> None:
    path = write_coco(tmp_path)

    assert find_box_names([path]) == NAMES
    assert find_class_names([tmp_path]) == ()


def test_class_folders_are_no_boxes(tmp_path: Path) -> None:
    draw(tmp_path / "cat" / "a.png", [])
    draw(tmp_path / "dog" / "a.png", [])

    assert find_box_set(tmp_path) is None
    assert find_class_names([tmp_path]) == ("cat", "dog")


def test_digest_of_the_data_changes_with_a_box(tmp_path: Path) -> None:
    def digest() -> str | None:
        decoding = Decoding(LETTERBOX)
        return choose_samples([INPUT], None, tmp_path, {}, decoding=decoding).evaluation.sha256

    write_yolo(tmp_path)
    before, again = digest(), digest()
    for name in PICTURES:
        (tmp_path / "labels" / f"{name}.txt").write_text("0 0.5 0.5 0.5 0.5")

    assert before == again != digest()


def test_truth_is_an_array_of_objects_for_boxes(tmp_path: Path) -> None:
    assert all(isinstance(truth.corners, np.ndarray) for truth in truths_of(write_yolo(tmp_path)))


def test_other_json_beside_class_folders_is_no_data_set(tmp_path: Path) -> None:
    draw(tmp_path / "cat" / "a.png", [])
    (tmp_path / "notes.json").write_bytes(b'"\xff images annotations categories"')

    assert find_box_set(tmp_path) is None


def test_labels_beside_the_images_are_read_with_a_sheet(tmp_path: Path) -> None:
    write_yolo(tmp_path / "old")
    for file in [*(tmp_path / "old").rglob("*.png"), *(tmp_path / "old").rglob("*.txt")]:
        (tmp_path / "photos").mkdir(exist_ok=True)
        file.rename(tmp_path / "photos" / file.name)
    (tmp_path / "data.yaml").write_text("val: photos\nnames: [square, bar]")

    assert [rows_of(truth) for truth in truths_of(tmp_path / "data.yaml")] == ROWS
