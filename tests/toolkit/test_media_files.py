"""Folders of photographs and lists of labels: which file gets which class number."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.toolkit.cases import cases

from edgekit_runtime.errors import DataError
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.samples.media.classes import check_class_count, find_class_names
from edgekit_toolkit.samples.media.decoding import Decoding
from edgekit_toolkit.samples.source import open_data

INPUTS = (TensorSpec("image", "float32", ("N", 3, 4, 4)),)
OUTPUTS = (TensorSpec("scores", "float32", ("N", 3)),)
FIELDS = {"scale": 1}


def add(*paths: Path) -> None:
    for place, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), place, np.uint8)).save(path)


def labels(path: Path, classes: tuple[str, ...] = ("bird", "cat", "dog")) -> Any:
    """File name -> class number, None for files without labels."""
    source = open_data(path, INPUTS, decoding=Decoding(FIELDS, classes))
    pairs = zip(source.names, source.stream(1), strict=True)
    return {Path(name).name: None if label is None else int(label[0]) for name, (_, label) in pairs}


def test_folders_are_classes_numbered_by_the_names_given(tmp_path: Path) -> None:
    add(tmp_path / "dog" / "1.png", tmp_path / "cat" / "deep" / "2.png", tmp_path / "dog" / "3.JPG")
    assert labels(tmp_path) == {"2.png": 1, "1.png": 2, "3.JPG": 2}
    assert find_class_names([tmp_path]) == ("cat", "dog")


def test_names_of_both_folders_count_where_one_lacks_a_class(tmp_path: Path) -> None:
    add(tmp_path / "a" / "cat" / "1.png", tmp_path / "a" / "dog" / "1.png", tmp_path / "b" / "dog" / "1.png")
    assert find_class_names([tmp_path / "b", tmp_path / "a"]) == ("cat", "dog")


def test_folder_that_is_no_class_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    add(tmp_path / "dogs" / "1.png")
    with pytest.raises(DataError, match=r"class 'dogs' stands 0 times .*did you mean 'dog'"):
        labels(tmp_path)


def test_files_in_one_folder_have_no_labels(tmp_path: Path) -> None:
    add(tmp_path / "1.png", tmp_path / "2.png")
    assert labels(tmp_path) == {"1.png": None, "2.png": None}
    assert find_class_names([tmp_path]) == ()


def test_file_beside_class_folders_is_refused(tmp_path: Path) -> None:
    add(tmp_path / "dog" / "1.png", tmp_path / "stray.png")
    with pytest.raises(DataError, match=r"holds stray.png beside class folders"):
        labels(tmp_path)


@cases(
    ("name", "text"),
    [
        ("labels.csv", "file_name,label\nin/1.png,dog\n2.png,cat\n"),
        ("labels.csv", "file_name,label\n./in/1.png,2\n2.png,1\n"),
        ("labels.json", json.dumps({"in/1.png": "dog", "2.png": "cat"})),
        ("labels.json", json.dumps({"in/1.png": 2, "2.png": 1})),
        ("metadata.csv", "label,file_name,width\ndog,in/1.png,4\ncat,2.png,4\n"),
        (
            "metadata.jsonl",
            '{"file_name": "in/1.png", "label": 2}\n{"file_name": "2.png", "label": 1}\n',
        ),
    ],
)
@cases("given", ["folder", "list"])
def test_list_gives_the_labels(name: str, text: str, given: str, tmp_path: Path) -> None:
    add(tmp_path / "in" / "1.png", tmp_path / "2.png", tmp_path / "unlisted.png")
    (tmp_path / name).write_text(text)
    path = tmp_path if given == "folder" else tmp_path / name
    assert labels(path) == {"1.png": 2, "2.png": 1}
    (note,) = open_data(path, INPUTS, decoding=Decoding(FIELDS, ("bird", "cat", "dog"))).warnings
    assert note == f"1 files are left out: {name} does not list them"


def test_metadata_without_labels_leaves_files_unlabelled(tmp_path: Path) -> None:
    add(tmp_path / "1.png", tmp_path / "2.png")
    (tmp_path / "metadata.csv").write_text("file_name,caption\n1.png,a cat\n2.png,a dog\n")
    assert labels(tmp_path) == {"1.png": None, "2.png": None}


@cases(
    ("name", "text", "message"),
    [
        ("labels.csv", "file,class\n1.png,dog\n", "entry 1 is .*expected 'file_name'"),
        ("labels.csv", "file_name,label\n9.png,dog\n", "entry 1 names '9.png', and there is no such"),
        ("labels.csv", "file_name,label\n", "lists no file"),
        ("labels.json", '{"1.png": 1, "2.png": "dog"}', "some labels are numbers and some are names"),
        ("labels.json", "{", "cannot be read as a list of labels"),
        ("labels.json", "[1, 2]", "or a list of objects"),
        ("labels.json", '{"1.png": true}', "entry 1 is"),
        ("labels.json", '{"1.png": -1}', "label is -1"),
    ],
)
def test_wrong_list_is_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    add(tmp_path / "1.png", tmp_path / "2.png")
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        labels(tmp_path)


def test_two_lists_are_refused(tmp_path: Path) -> None:
    add(tmp_path / "1.png")
    for name in ("labels.csv", "metadata.csv"):
        (tmp_path / name).write_text("file_name,label\n1.png,dog\n")
    with pytest.raises(DataError, match=r"holds labels.csv and metadata.csv; keep one"):
        labels(tmp_path)


def test_empty_folder_and_folder_of_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no .npz or .npy file"):
        labels(tmp_path)
    (tmp_path / "data.parquet").touch()
    with pytest.raises(DataError, match=r"no image .* parquet and arrow are not read, save the images"):
        labels(tmp_path)


def test_other_files_are_left_out_with_a_note_and_hidden_ones_silently(tmp_path: Path) -> None:
    add(tmp_path / "1.png", tmp_path / "2.png", tmp_path / ".thumb" / "3.png")
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".DS_Store").touch()
    source = open_data(tmp_path, INPUTS, decoding=Decoding(FIELDS))
    assert len(source) == 2
    (note,) = source.warnings
    assert note.endswith("are left out: 1 of .txt")


def test_links_are_followed_and_loops_end(tmp_path: Path) -> None:
    add(tmp_path / "elsewhere" / "1.png", tmp_path / "photos" / "dog" / "2.png")
    (tmp_path / "photos" / "cat").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "photos" / "dog" / "loop").symlink_to(tmp_path / "photos")
    (tmp_path / "elsewhere" / "self").symlink_to(tmp_path / "elsewhere")
    assert labels(tmp_path / "photos") == {"1.png": 1, "2.png": 2}


def test_pipe_among_the_files_is_refused_unopened(tmp_path: Path) -> None:
    add(tmp_path / "1.png")
    os.mkfifo(tmp_path / "2.png")
    with pytest.raises(DataError, match=r"2\.png: is no regular file"):
        labels(tmp_path)


def test_images_beside_recordings_are_refused(tmp_path: Path) -> None:
    add(tmp_path / "1.png")
    (tmp_path / "2.wav").touch()
    with pytest.raises(DataError, match="holds images as well as recordings"):
        labels(tmp_path)


def test_numbers_as_names_are_refused_where_their_order_is_unclear(tmp_path: Path) -> None:
    add(*(tmp_path / str(number) / "1.png" for number in range(11)))
    with pytest.raises(DataError, match="as text '10' comes before '2': give --labels FILE"):
        find_class_names([tmp_path])


@pytest.mark.parametrize(
    ("names", "shape", "message"),
    [
        (
            ("a", "b"),
            ("N", 3),
            r"2 classes were found .*0 a, 1 b.*'scores' of the model is \['N', 3\].*--labels",
        ),
        (("test", "train"), ("N", 3), "give the parts of the data set each by itself"),
        (("a", "b"), ("N", 4, 9), "no class scores: put all files into one folder"),
    ],
)
def test_folders_that_are_not_the_classes_of_the_model_are_refused(
    names: tuple[str, ...], shape: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        check_class_count(names, (TensorSpec("scores", "float32", shape),))
    check_class_count(("a", "b", "c"), OUTPUTS)
