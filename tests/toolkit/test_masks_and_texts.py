"""Masks and texts as labels: what is read, what is refused, and the scores that they give."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.toolkit.cases import cases
from tests.toolkit.drawn_boxes import write_yolo

from edgekit_runtime.errors import DataError
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.evaluation.metrics import SetMetric, find_metric
from edgekit_toolkit.samples.media.decoding import Decoding
from edgekit_toolkit.samples.source import DataSource, open_data
from edgekit_toolkit.samples.truth import TrueBoxes, TrueMask, TrueText

Array = NDArray[Any]

INPUT = TensorSpec("x", "float32", (1, 3, 40, 40))
LETTERBOX = {"letterbox": 40, "align": "centre", "scale": 1}
CLASSES = ("sky", "road", "car")
SEGMENTATION = TaskChoice("segmentation", {})
TEXT = TaskChoice("text", {})


def write_masks(root: Path, mode: str = "P", **masks: Array) -> Path:
    """Write pictures of the size of their masks, the name of which they have."""
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name, mask in masks.items():
        Image.fromarray(np.full((*mask.shape, 3), len(name), np.uint8)).save(root / "images" / f"{name}.jpg")
        image = Image.fromarray(mask.astype(np.uint8))
        if mode == "P":
            image.putpalette(bytes(range(256)) * 3)
        image.convert(mode).save(root / "masks" / f"{name}.png")
    return root


def open_masks(root: Path, classes: tuple[str, ...] = CLASSES) -> DataSource:
    return open_data(root, [INPUT], decoding=Decoding(LETTERBOX, classes))


def truths_of(source: DataSource) -> list[Any]:
    return [labels[0] for _, labels in source.stream() if labels is not None]


def halves(left: int, right: int) -> Array:
    """Return a mask of 80 x 40 pixels."""
    mask = np.full((40, 80), left)
    mask[:, 40:] = right
    return mask


@pytest.mark.parametrize("mode", ["P", "L"])
def test_masks_are_moved_into_the_input_as_their_pictures(tmp_path: Path, mode: str) -> None:
    source = open_masks(write_masks(tmp_path, mode, a=halves(1, 2)))
    (truth,) = truths_of(source)
    assert source.truth is TrueMask
    assert truth.classes.shape == (40, 40)
    assert np.unique(truth.classes[:10]).tolist() == [255]  # the letterbox
    assert np.unique(truth.classes[10:30, :20]).tolist() == [1]
    assert np.unique(truth.classes[10:30, 20:]).tolist() == [2]
    assert source.sha256 != open_masks(write_masks(tmp_path, mode, a=halves(1, 1))).sha256


@pytest.mark.parametrize("classes", [(), ("cat",), ("background", "cat")])
def test_black_and_white_masks_are_those_of_a_single_class(tmp_path: Path, classes: tuple[str, ...]) -> None:
    (truth,) = truths_of(open_masks(write_masks(tmp_path, "L", a=halves(0, 255)), classes))
    assert np.unique(truth.classes[10:30]).tolist() == [0, 1]


def damage(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:60])


@cases(
    ("change", "reason"),
    [
        (lambda root: (root / "masks/a.png").unlink(), r"no mask .*a.png \(1 of 1 are missing\)"),
        (lambda root: (root / "images/a.jpg").unlink(), "images: holds no image"),
        (
            lambda root: Image.new("L", (80, 41)).save(root / "masks/a.png"),
            "80 x 41 pixels, its picture .* 80 x 40",
        ),
        (
            lambda root: Image.new("RGB", (80, 40)).save(root / "masks/a.png"),
            "of the kind RGB, expected 8 bits",
        ),
        (lambda root: Image.new("I;16", (80, 40)).save(root / "masks/a.png"), "of the kind I"),
        (
            lambda root: Image.new("L", (80, 40), 3).save(root / "masks/a.png"),
            "has the class 3, the model .* 0 to 2",
        ),
        (lambda root: damage(root / "masks/a.png"), "is damaged"),
        (lambda root: (root / "masks/a.png").write_bytes(b"GIF89a"), "is damaged or no PNG"),
        (lambda root: Image.new("RGB", (9, 9)).save(root / "images/a.png"), "is the mask of 2 pictures"),
    ],
)
def test_masks_that_do_not_fit_are_refused(tmp_path: Path, change: Any, reason: str) -> None:
    write_masks(tmp_path, a=halves(1, 2))
    change(tmp_path)
    with pytest.raises(DataError, match=reason):
        truths_of(open_masks(tmp_path))


def test_boxes_go_before_masks(tmp_path: Path) -> None:
    (write_yolo(tmp_path) / "masks").mkdir()
    assert open_data(tmp_path, [INPUT], decoding=Decoding(LETTERBOX)).truth is TrueBoxes


def metric_for(name: str, task: TaskChoice, truth: Any, outputs: Array) -> SetMetric:
    metric = find_metric(name, {"y": outputs}, labelled=True, truth=truth, task=task)
    assert isinstance(metric, SetMetric)
    return metric


def score(metric: SetMetric, outputs: list[Array], truths: list[Any]) -> float:
    reduced = [metric.reduce({"y": output}, truth) for output, truth in zip(outputs, truths, strict=True)]
    return metric.score(reduced, reduced, None)


def test_overlap_is_the_mean_over_classes_of_the_whole_set() -> None:
    draw = np.random.default_rng(2)
    truths = [draw.integers(0, 3, (16, 16)).astype(np.uint8) for _ in range(4)]
    truths[0][:3] = 255
    outputs = [draw.normal(size=(1, 4, 16, 16)).astype(np.float32) for _ in truths]
    metric = metric_for("miou", SEGMENTATION, TrueMask, outputs[0])
    counted = [truth != 255 for truth in truths]
    true = np.concatenate([truth[mask] for truth, mask in zip(truths, counted, strict=True)])
    found = np.concatenate([y[0].argmax(0)[mask] for y, mask in zip(outputs, counted, strict=True)])
    overlaps = [
        ((true == kind) & (found == kind)).sum() / ((true == kind) | (found == kind)).sum()
        for kind in range(4)
    ]
    masks = [TrueMask.of(truth) for truth in truths]
    assert score(metric, outputs, masks) == pytest.approx(np.mean(overlaps))
    perfect = [(np.arange(4)[:, None, None] == truth)[None].astype(np.float32) for truth in truths]
    assert score(metric, perfect, masks) == 1
    assert score(metric, [np.full_like(y, np.nan) for y in outputs], masks) == 0


def test_coarse_outputs_are_judged_in_the_size_of_the_input() -> None:
    truth = TrueMask.of(np.repeat(np.repeat(np.eye(4, dtype=np.uint8), 8, 0), 8, 1))
    output = np.stack([1 - np.eye(4), np.eye(4)])[None].astype(np.float32)
    assert score(metric_for("miou", SEGMENTATION, TrueMask, output), [output], [truth]) == 1


def test_masks_without_a_pixel_that_counts_are_refused() -> None:
    output = np.zeros((1, 2, 4, 4), np.float32)
    with pytest.raises(DataError, match="no pixel of the masks has a class"):
        score(
            metric_for("miou", SEGMENTATION, TrueMask, output),
            [output],
            [TrueMask.of(np.full((4, 4), 255, np.uint8))],
        )


# Texts

CHARACTERS = tuple("abc ")


def spell(text: str) -> Array:
    """Return probabilities [1, 2 T + 1, 5] of a text with a blank around each character."""
    frames = np.zeros((1, 2 * len(text) + 1, 5), np.float32)
    frames[0, ::2, 0] = 1
    for index, character in enumerate(text):
        frames[0, 2 * index + 1, 1 + CHARACTERS.index(character)] = 1
    return frames


@cases(
    ("found", "true", "expected"),
    [
        (["abc"], ["abc"], 1),
        (["abc"], ["abb"], 2 / 3),
        (["ac"], ["abc"], 2 / 3),
        (["abcc"], ["abc"], 2 / 3),
        ([""], ["abc"], 0),
        (["cccccc"], ["a"], 0),
        (["ab", "a c"], ["ab", "abc"], 4 / 5),
        (["bca"], ["abc"], 1 / 3),
    ],
)
def test_characters_are_counted_over_the_whole_set(
    found: list[str], true: list[str], expected: float
) -> None:
    outputs = [spell(text) for text in found]
    metric = metric_for("characters", TEXT, TrueText, outputs[0])
    assert score(metric, outputs, [TrueText(text, CHARACTERS) for text in true]) == pytest.approx(expected)


def test_outputs_with_a_nan_spell_nothing() -> None:
    metric = metric_for("characters", TEXT, TrueText, spell("abc"))
    assert score(metric, [spell("abc") * np.nan], [TrueText("abc", CHARACTERS)]) == 0
    with pytest.raises(DataError, match="all texts"):
        score(metric, [spell("a")], [TrueText("", CHARACTERS)])


def write_texts(root: Path, **texts: Any) -> Path:
    root.mkdir(exist_ok=True)
    for name in texts:
        Image.new("RGB", (8, 8), (len(name), 0, 0)).save(root / f"{name}.png")
    rows = [json.dumps({"file_name": f"{name}.png", "text": text}) for name, text in texts.items()]
    (root / "metadata.jsonl").write_text("\n".join(rows))
    return root


def test_column_of_texts_labels_what_reads_characters(tmp_path: Path) -> None:
    write_texts(tmp_path, a="ab", bb="77")
    reading = open_data(tmp_path, [INPUT], decoding=Decoding(LETTERBOX, ("<blank>", *"abcdefghijklmn")))
    assert (reading.truth, [truth.text for truth in truths_of(reading)]) == (TrueText, ["ab", "77"])
    other = open_data(tmp_path, [INPUT], decoding=Decoding(LETTERBOX, CLASSES))
    assert not other.labelled  # captions of pictures are no labels


def test_text_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="entry 2 is"):
        open_data(write_texts(tmp_path, a="ab", bb=None), [INPUT], decoding=Decoding(LETTERBOX, CHARACTERS))


@pytest.mark.parametrize(
    ("truth", "task", "expected"),
    [(TrueMask, SEGMENTATION, "miou"), (TrueText, TEXT, "characters")],
)
def test_metric_of_the_labels_is_chosen_where_the_task_reads_them(
    truth: Any, task: TaskChoice, expected: str
) -> None:
    outputs = {"y": np.random.default_rng(0).random((2, 5, 16, 16), np.float32)}
    assert find_metric("auto", outputs, labelled=True, truth=truth, task=task).name == expected
    metric = find_metric("auto", outputs, labelled=True, truth=truth)
    assert metric.name != expected
    assert f"give --task {task.name}" in str(getattr(metric, "note"))  # noqa: B009
    with pytest.raises(DataError, match=f"metric '{expected}' needs"):
        find_metric(expected, outputs, labelled=True, task=task)
    with pytest.raises(DataError, match=f"--task {task.name}"):
        find_metric(expected, outputs, labelled=True, truth=truth)
