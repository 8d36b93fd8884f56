"""What tasks make of typical outputs of models."""

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from edgekit_runtime.errors import DataError
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.preprocessing.placement import Placement
from edgekit_runtime.preprocessing.rules import read_rules
from edgekit_runtime.tasks.kinds.segmentation import VOID, make_palette
from edgekit_runtime.tasks.task import Context, read_task
from edgekit_runtime.tensors import TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]

SQUARE = Placement.of(100, 100)
WIDE = Placement.of(200, 100).scaled_to(64, 32).moved(0, 16, 64, 64)
"""A picture of 200 x 100 in the middle of a letterbox of 64 x 64."""


def answer(task: str, output: Any, context: Context | None = None, **options: Any) -> Any:
    record, read = read_task(TaskChoice(task, options))
    return record.decode({"out": np.asarray(output)}, read, context or Context())


# Segmentation


def read_png(reply: Any) -> Array:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(reply["mask"]["data"]))))


def make_halves(classes: int = 3) -> Array:
    """Return scores [1, classes, 8, 8]: in the letterbox of `WIDE`, class 1 left and class 2 right."""
    scores = np.zeros((1, classes, 8, 8), np.float32)
    scores[0, 1, :, :4] = 2
    scores[0, 2, :, 4:] = 2
    scores[0, 0, :2] = scores[0, 0, 6:] = 9  # the borders of the letterbox
    return scores


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_mask_has_the_size_of_the_picture_without_its_letterbox(layout: str) -> None:
    scores = make_halves() if layout == "NCHW" else make_halves().transpose(0, 2, 3, 1)
    reply = answer("segmentation", scores, Context(labels=("sky", "road"), placement=WIDE), layout=layout)
    mask = read_png(reply)
    assert mask.shape == (100, 200)
    assert np.unique(mask[:, :100]).tolist() == [1]
    assert np.unique(mask[:, 100:]).tolist() == [2]
    assert reply["areas"] == [
        {"label": "road", "index": 1, "share": 0.5},
        {"label": "2", "index": 2, "share": 0.5},
    ]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_first_of_equal_classes_wins(layout: str) -> None:
    scores = np.random.default_rng(1).integers(-2, 2, (1, 6, 20, 30)).astype(np.float32)
    scores[0, :, 0] = -np.inf
    output = scores if layout == "NCHW" else scores.transpose(0, 2, 3, 1)
    mask = read_png(answer("segmentation", output, layout=layout))
    np.testing.assert_array_equal(mask, scores[0].argmax(axis=0))


def decode_runs(runs: Any) -> Array:
    """Return the mask of COCO's uncompressed run lengths, bool [height, width]."""
    inside = np.arange(len(runs["counts"])) % 2 == 1
    return np.repeat(inside, runs["counts"]).reshape(runs["size"], order="F")


def test_run_lengths_give_the_mask_of_the_png() -> None:
    scores = np.random.default_rng(3).normal(size=(1, 5, 16, 16)).astype(np.float32)
    context = Context(placement=WIDE)
    mask = read_png(answer("segmentation", scores, context))
    reply = answer("segmentation", scores, context, form="rle")
    assert [entry["index"] for entry in reply["areas"]] != []
    for entry in reply["areas"]:
        np.testing.assert_array_equal(decode_runs(entry["rle"]), mask == entry["index"])
    assert sum(entry["share"] for entry in reply["areas"]) == pytest.approx(1, abs=1e-5)


def test_run_lengths_are_those_of_coco() -> None:
    mask = np.array([[[0, 1, 1], [0, 1, 0]]], np.int64)  # columns: 00 11 10
    reply = answer("segmentation", mask, form="rle")
    assert {entry["index"]: entry["rle"]["counts"] for entry in reply["areas"]} == {
        0: [0, 2, 3, 1],
        1: [2, 3, 1],
    }


def test_run_lengths_of_noise_are_refused_and_its_png_is_not() -> None:
    noise = np.random.default_rng(4).integers(0, 5, (1, 256, 256))
    with pytest.raises(DataError, match=r"runs of pixels, form=rle gives at most 32768: ask for form=png"):
        answer("segmentation", noise, form="rle")
    np.testing.assert_array_equal(read_png(answer("segmentation", noise)), noise[0])


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ([0.2, 0.49, 0.5, 0.9], {}),
        ([-5, -0.1, 0.1, 5], {"scores": "sigmoid"}),
        ([0.2, 0.7, 0.8, 0.9], {"threshold": 0.75}),
    ],
)
def test_a_single_class_has_a_threshold(values: list[float], options: dict[str, Any]) -> None:
    output = np.array(values, np.float32).reshape(1, 1, 1, 4)
    reply = answer("segmentation", output, Context(labels=("cat",)), **options)
    assert read_png(reply).tolist() == [[0, 0, 1, 1]]
    assert [entry["label"] for entry in reply["areas"]] == ["background", "cat"]


@pytest.mark.parametrize("shape", [(1, 2, 2), (1, 1, 2, 2), (1, 2, 2, 1)])
def test_whole_numbers_are_classes(shape: tuple[int, ...]) -> None:
    classes = np.array([[0, 7], [7, 7]], np.int32)
    layout = "NHWC" if shape[-1] == 1 else "NCHW"
    assert (
        read_png(answer("segmentation", classes.reshape(shape), layout=layout)).tolist() == classes.tolist()
    )


def test_pixels_that_a_crop_cut_off_are_void() -> None:
    cropped = Placement.of(100, 50).moved(-25, 0, 50, 50)
    reply = answer("segmentation", np.ones((1, 5, 5), np.uint8), Context(placement=cropped))
    mask = read_png(reply)
    assert mask.shape == (50, 100)
    assert (mask[:, :25] == VOID).all()
    assert (mask[:, 25:75] == 1).all()
    assert (mask[:, 75:] == VOID).all()
    assert reply["areas"] == [{"label": "1", "index": 1, "share": 1}]


def test_mask_of_a_large_picture_is_bounded() -> None:
    placement = Placement.of(12_000, 6_000).scaled_to(64, 32)
    reply = answer("segmentation", make_halves(), Context(placement=placement), max_side=100)
    assert (reply["mask"]["height"], reply["mask"]["width"]) == (50, 100)
    assert read_png(reply).shape == (50, 100)


def test_palette_is_that_of_pascal_voc() -> None:
    assert make_palette()[:4].tolist() == [[0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0]]
    assert make_palette()[[20, 255]].tolist() == [[0, 64, 128], [224, 224, 192]]


# Keypoints


def points_of(reply: Any) -> Any:
    return [entry["point"] for entry in reply["keypoints"]]


def test_heatmaps_give_points_a_quarter_towards_the_larger_neighbour() -> None:
    maps = np.zeros((1, 2, 10, 10), np.float32)
    maps[0, 0, 4, 5], maps[0, 0, 4, 6], maps[0, 0, 3, 5] = 0.9, 0.4, 0.2
    maps[0, 1, 0, 9] = 0.8  # on the border nothing moves
    context = Context(labels=("nose", "ear"), placement=SQUARE)
    reply = answer("keypoints", maps, context, form="heatmaps", skeleton=[0, 1])
    assert points_of(reply) == [[52.5, 37.5], [90, 0]]
    assert [(entry["label"], entry["score"]) for entry in reply["keypoints"]] == [("nose", 0.9), ("ear", 0.8)]
    assert reply["skeleton"] == [[0, 1]]
    turned = answer("keypoints", maps.transpose(0, 2, 3, 1), context, form="heatmaps", layout="NHWC")
    assert points_of(turned) == points_of(reply)


def test_rows_of_movenet_give_points_of_the_picture() -> None:
    rows = np.tile(np.array([0.5, 0.25, 0.9], np.float32), (1, 1, 17, 1))  # y, x, score as shares
    rows[..., 1, 2] = 0.1
    context = Context(placement=WIDE)
    reply = answer("keypoints", rows, context, row="yxs", unit="shares", min_score=0.3)
    assert len(reply["keypoints"]) == 16
    assert points_of(reply)[0] == [50, 50]
    assert [entry["index"] for entry in reply["keypoints"]][:2] == [0, 2]


@pytest.mark.parametrize("shape", [(1, 4, 3), (1, 12), (1, 1, 1, 12), (1, 1, 4, 3)])
def test_flat_coordinates_with_depth_are_read(shape: tuple[int, ...]) -> None:
    output = np.arange(12, dtype=np.float32).reshape(shape)
    reply = answer("keypoints", output, Context(placement=SQUARE), row="xyz")
    assert points_of(reply) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert "score" not in reply["keypoints"][0]


@pytest.mark.parametrize("is_turned", [False, True])
def test_poses_list_the_points_of_each_object_once(is_turned: bool) -> None:
    rows = np.zeros((1, 20, 11), np.float32)
    rows[0, :3, :5] = [[20, 20, 10, 10, 0.8], [21, 20, 10, 10, 0.9], [40, 40, 10, 10, 0.7]]
    rows[0, :, 5:] = [30, 31, 0.9, 40, 41, 0.2]
    output = rows.swapaxes(1, 2) if is_turned else rows
    reply = answer("keypoints", output, Context(labels=("nose", "ear")), form="poses", min_score=0.1)
    points = [(entry["object"], entry["label"], entry["point"]) for entry in reply["keypoints"]]
    both = (("nose", [30, 31]), ("ear", [40, 41]))
    assert points == [(number, label, point) for number in (0, 1) for label, point in both]
    assert len(answer("keypoints", output, Context(), form="poses", min_object_score=0.85)["keypoints"]) == 2


def test_points_beyond_the_picture_lie_on_its_border() -> None:
    output = np.array([[[-9, 32], [63, 99]]], np.float32)
    assert points_of(answer("keypoints", output, Context(placement=WIDE), row="xy")) == [
        [0, 50],
        [196.9, 100],
    ]


# Text


def make_frames(text: str, characters: str, *, high: float = 0.9) -> Array:
    """Return probabilities [1, T, C] in which each frame of `text` is likely."""
    frames = np.full((1, len(text), len(characters)), (1 - high) / (len(characters) - 1), np.float32)
    for index, character in enumerate(text):
        frames[0, index, characters.index(character)] = high
    return frames


@pytest.mark.parametrize(
    ("characters", "labels", "options"),
    [
        ("_helo", "helo", {}),
        ("_helo", "_helo", {}),
        ("helo_", "helo", {"blank": "last"}),
        ("helo_", "helo_", {"blank": "last"}),
    ],
)
@pytest.mark.parametrize("layout", ["NTC", "NCT", "TNC"])
def test_ctc_counts_repeated_frames_once(
    characters: str, labels: str, options: dict[str, Any], layout: str
) -> None:
    frames = make_frames("_hhe_l_llo__", characters)
    if layout == "NCT":
        frames, options = frames.transpose(0, 2, 1), options | {"layout": "NCT"}
    elif layout == "TNC":
        frames = frames.transpose(1, 0, 2)
    reply = answer("text", frames, Context(labels=tuple(labels)), **options)
    assert reply == {"text": "hello", "score": 0.9}


def test_text_begins_with_its_first_frame_and_has_spaces() -> None:
    frames = np.log(make_frames("a|ba", "_ab|"))
    reply = answer("text", frames, Context(labels=("a", "b", "|")), scores="softmax", space="|")
    assert reply == {"text": "a ba", "score": 0.9}
    assert answer("text", make_frames("___", "_a"), Context(labels=("a",))) == {"text": "", "score": 0}
    assert answer("text", make_frames("a", "_a"), Context(labels=("a",)))["text"] == "a"
    assert answer("text", make_frames("b a", "_ab "), Context(labels=("a", "b")))["text"] == "b a"


# Sound events


def times_of(reply: Any) -> Any:
    return [(entry["label"], entry["begin_s"], entry["end_s"], entry["score"]) for entry in reply["events"]]


@pytest.mark.parametrize("layout", ["NTC", "NCT"])
def test_events_begin_high_and_last_until_low(layout: str) -> None:
    speech = [0.4, 0.4, 0.8, 0.4, 0.1, 0.4, 0.1, 0.9]
    bell = [0, 0.6, 0, 0, 0, 0, 0, 0]
    scores = np.array([speech, bell], np.float32)[None]
    scores = scores if layout == "NCT" else scores.transpose(0, 2, 1)
    context = Context(labels=("speech", "bell"))
    reply = answer("sound_events", scores, context, layout=layout, hop_s=0.5)
    assert times_of(reply) == [
        ("speech", 0, 2, 0.8),
        ("bell", 0.5, 1, 0.6),
        ("speech", 3.5, 4, 0.9),
    ]
    long = answer("sound_events", scores, context, layout=layout, hop_s=0.5, min_event_s=1)
    assert times_of(long) == [("speech", 0, 2, 0.8)]
    best = answer("sound_events", scores, context, layout=layout, hop_s=0.5, max_events=2)
    assert [score for *_, score in times_of(best)] == [0.8, 0.9]


def test_frames_part_the_stated_length_of_the_recording() -> None:
    scores = np.array([[[0.1], [0.9]]], np.float32)
    context = Context(labels=("speech",), duration_s=1.0)
    assert times_of(answer("sound_events", scores, context)) == [("speech", 0.5, 1, 0.9)]
    assert "begin_s" not in answer("sound_events", scores)["events"][0]


def test_voice_activity_of_one_value_is_an_event_or_none() -> None:
    context = Context(labels=("speech",), duration_s=0.032)
    assert times_of(answer("sound_events", [[np.float32(0.7)]], context)) == [("speech", 0, 0.032, 0.7)]
    assert answer("sound_events", [[np.float32(0.2)]], context) == {"events": []}


# Embedding, regression, classification


def test_embedding_has_the_length_one() -> None:
    output = np.array([[3, 4]], np.float32)
    assert answer("embedding", output) == {"embedding": [0.6, 0.8]}
    assert answer("embedding", output.reshape(1, 2, 1, 1), normalize=False) == {"embedding": [3, 4]}
    assert answer("embedding", output * 0) == {"embedding": [0, 0]}


def test_regression_scales_named_values() -> None:
    context = Context(labels=("age",))
    reply = answer("regression", np.array([[0.25, 1]], np.float32), context, scale=[100], offset=[0, -50])
    assert reply == {
        "values": [{"label": "age", "index": 0, "value": 25}, {"label": "1", "index": 1, "value": 50}]
    }


def test_softmax_of_classes_sums_to_one() -> None:
    reply = answer("classification", np.log(np.array([[0.1, 0.7, 0.2]], np.float32)), scores="softmax")
    assert [(entry["index"], round(entry["score"], 4)) for entry in reply["classes"]] == [
        (1, 0.7),
        (2, 0.2),
        (0, 0.1),
    ]


@pytest.mark.parametrize(
    ("task", "options", "reason"),
    [
        ("keypoints", {"row": "xs"}, "row is 'xs', expected x, y"),
        ("keypoints", {"row": "xyxs"}, "row is 'xyxs'"),
        ("keypoints", {"row": "xyq"}, "row is 'xyq'"),
        ("keypoints", {"skeleton": [0, 1, 2]}, "odd number"),
        ("segmentation", {"max_side": 0}, "max_side"),
        ("sound_events", {"threshold": 2}, "threshold"),
        ("text", {"blank": "middle"}, "blank"),
        ("regression", {"scale": ["x"]}, "scale"),
    ],
)
def test_wrong_options_are_refused(task: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        read_task(TaskChoice(task, options), DataError)


def test_length_of_recordings_is_known_where_it_is_stated() -> None:
    spec = TensorSpec("sound", "float32", ("N", 8000))
    fields = {"type": "audio", "sample_rate": 16000}
    assert getattr(read_rules(fields | {"samples": 8000}, spec), "duration_s") == 0.5  # noqa: B009
    assert getattr(read_rules(fields, spec), "duration_s") is None  # noqa: B009
