"""Codings of tensors: what is restored, and how near it is."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.offload.onnx_models import model_of
from tests.toolkit.cases import cases

from edgekit_offload.partition.calibrate import SOUND, find_bytes, find_series
from edgekit_offload.partition.coding import INTEGER_TYPES, INTEGERS, Coding
from edgekit_offload.partition.split import SplitModels, whole_upload
from edgekit_offload.planning.coding_costs import (
    AnswerChange,
    TensorCoder,
    compare_answers,
    find_probabilities,
)
from edgekit_runtime.errors import CutError
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession

PREPROCESSINGS = {
    "pixel/255": lambda x: x / np.float32(255),
    "pixel/127.5-1": lambda x: x / np.float32(127.5) - np.float32(1),
    "(pixel-127)/128": lambda x: (x - np.float32(127)) / np.float32(128),
    "mean and std": lambda x: (
        (x / np.float32(255) - np.array([0.485, 0.456, 0.406], np.float32))
        / np.array([0.229, 0.224, 0.225], np.float32)
    ),
}


def upload_identity(shape: tuple[int, ...], coding: Coding) -> SplitModels:
    """A model that returns its input, uploaded whole."""
    return whole_upload(model_of([("Identity", ["x"], ["y"])], {"x": ("N", *shape)}, ["y"]), coding)


def send(split: SplitModels, x: NDArray[Any]) -> tuple[Mapping[str, NDArray[np.generic]], NDArray[Any]]:
    """What is sent for `x`, and what the tail makes of it."""
    assert split.head is not None
    sent = OrtSession(split.head.content, OrtOptions(threads=1)).run({"x": x})
    return sent, OrtSession(split.tail.content, OrtOptions(threads=1)).run(sent)["y"]


@cases("kind", ["uint8", "pixels"])
@cases("channels_first", [False, True])
@cases("name", PREPROCESSINGS)
def test_pixels_behind_a_preprocessing_come_back_to_the_last_bit(
    name: str, channels_first: bool, kind: str
) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (6, 20, 24, 3)).astype(np.float32)
    x = PREPROCESSINGS[name](pixels)
    x = np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if channels_first else x
    lattice = find_bytes(x[:4])
    assert lattice is not None
    sent, restored = send(upload_identity(x.shape[1:], Coding(kind, {"x": lattice})), x)  # type: ignore[arg-type]
    np.testing.assert_array_equal(restored, x)
    (codes,) = sent.values()
    expected = pixels if kind == "pixels" or not channels_first else pixels.transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(codes, expected.astype(np.uint8))


def test_series_on_a_grid_comes_back_to_the_last_bit() -> None:
    steps = np.random.default_rng(2).integers(-9, 10, (5, 3, 64)).cumsum(2)
    x = (steps * np.float32(0.125) + np.float32(2)).astype(np.float32)
    lattice = find_series(x)
    assert lattice.is_exact
    assert lattice.time_axis == 2
    sent, restored = send(upload_identity((3, 64), Coding("delta", {"x": lattice})), x)
    assert sent["x.codes"].dtype == np.int16
    np.testing.assert_array_equal(restored, x)


def test_series_off_a_grid_is_near() -> None:
    x = np.random.default_rng(3).normal(size=(4, 2, 50)).astype(np.float32)
    lattice = find_series(x)
    assert not lattice.is_exact
    _, restored = send(upload_identity((2, 50), Coding("delta", {"x": lattice})), x)
    # Half a step of a 30,000th of the range, and the last bits of float32.
    np.testing.assert_allclose(restored, x, rtol=0, atol=np.ptp(x) / 60_000 * 1.01 + 1e-6)


@cases("shape", [(7,), (3, 5), (33, 5, 3), (48, 8, 8), (1, 1, 1), (4097,)])
@cases("kind", ["int8", "int4"])
@cases("opset", [8, 17, 20])
def test_codes_with_a_range_are_half_a_step_away_at_most(
    kind: str, shape: tuple[int, ...], opset: int
) -> None:
    scales = np.float32([[9], [1], [0]]).reshape(3, *[1] * len(shape))
    x = np.random.default_rng(4).normal(size=(3, *shape)).astype(np.float32) * scales
    model = model_of([("Identity", ["x"], ["y"])], {"x": ("N", *shape)}, ["y"], opset=opset)
    sent, restored = send(whole_upload(model, Coding(kind)), x)  # type: ignore[arg-type]
    rows = x.reshape(3, -1)
    levels, count = 255 if kind == "int8" else 15, rows.shape[1]
    step = np.ptp(rows, axis=1, keepdims=True) / levels
    if count >= 32 and sent["x.codes"].dtype == np.uint8:
        # The ends of a group lie on a grid of the sample, so its range is up to two of those steps wider.
        last = rows[:, count - (-count % 32) :]
        spans = np.ptp(np.concatenate([rows, last], axis=1).reshape(3, -1, 32), axis=2)
        grid = np.ptp(rows, axis=1, keepdims=True) / 65535
        spans = np.maximum(spans + 2 * grid, 256 * grid)
        step = np.repeat(spans, 32, axis=1)[:, :count] / levels
    apart = np.abs(restored.reshape(3, -1) - rows)
    assert (apart <= step * 0.501 + 1e-6).all()  # the last bits of float32
    assert (restored[2] == 0).all()


@cases("kind", ["int8", "int4"])
@cases("opset", [8, 17, 20])
@cases("size", [7, 5000])
def test_value_that_is_not_finite_is_seen_in_the_range_of_its_row(kind: str, opset: int, size: int) -> None:
    model = model_of([("Identity", ["x"], ["y"])], {"x": ("N", size)}, ["y"], opset=opset)
    split = whole_upload(model, Coding(kind))  # type: ignore[arg-type]
    x = np.random.default_rng(10).normal(size=(4, size)).astype(np.float32)
    x[range(3), [0, 3, size - 1]] = np.nan, np.inf, -np.inf
    sent, restored = send(split, x)
    assert np.isnan(sent["x.range"]).any(axis=1).tolist() == [True, True, True, False]
    np.testing.assert_array_equal(restored[3], send(split, x[3:])[1][0])


def test_codes_of_small_tensors_have_16_bits() -> None:
    sizes = {
        shape: upload_identity(shape, Coding("int8")).sent[0].dtype for shape in [(2048,), (2049,), (4, 600)]
    }
    assert sizes == {(2048,): "uint16", (2049,): "uint8", (4, 600): "uint8"}


def test_a_large_value_does_not_coarsen_its_far_neighbours() -> None:
    x = np.random.default_rng(8).random((1, 4, 32, 32)).astype(np.float32)
    x[0, 0, 0, 0] = 100
    for kind, levels in (("int8", 255), ("int4", 15)):
        restored = send(upload_identity((4, 32, 32), Coding(kind)), x)[1]  # type: ignore[arg-type]
        # Half a step of a group's own span, which is at most two steps of the sample's grid wider.
        assert np.abs(restored - x)[0, 1:].max() <= (1 + 2 * 100 / 65535) / levels / 2 * 1.001
        assert abs(restored[0, 0, 0, 0] - 100) < 1e-3


def test_rows_do_not_depend_on_their_neighbours() -> None:
    x = np.random.default_rng(5).normal(size=(4, 3, 6, 6)).astype(np.float32)
    split = upload_identity((3, 6, 6), Coding("int8"))
    together = send(split, x)[1]
    alone = np.concatenate([send(split, row[None])[1] for row in x])
    np.testing.assert_array_equal(together, alone)


def test_values_that_are_no_codes_have_no_lattice() -> None:
    assert find_bytes(np.random.default_rng(6).normal(size=(4, 3, 20, 20)).astype(np.float32)) is None


def test_coding_without_calibration_is_refused() -> None:
    with pytest.raises(CutError, match="not calibrated"):
        upload_identity((3, 4, 4), Coding("uint8"))


def test_sound_goes_as_16_bit_samples() -> None:
    x = (np.random.default_rng(7).integers(-32768, 32768, (2, 1, 400)) / 32768).astype(np.float32)
    sent, restored = send(upload_identity((1, 400), Coding("samples", {"x": SOUND})), x)
    assert sent["x.samples"].dtype == np.int16
    assert sent["x.samples"].shape == (2, 400)
    np.testing.assert_array_equal(restored, x)


@cases("shape", [(400,), (1, 400), (1, 1, 400), (1, 400, 1)])
@cases("dtype", ["float32", "int16"])
def test_sound_of_any_shape_goes_as_one_row_of_16_bit_samples(dtype: str, shape: tuple[int, ...]) -> None:
    samples = np.random.default_rng(7).integers(-32768, 32768, shape).astype(np.int16)
    x = samples if dtype == "int16" else samples.astype(np.float32) / np.float32(32768)
    model = model_of([("Identity", ["x"], ["y"])], {"x": shape}, ["y"], dtypes={"x": dtype, "y": dtype})
    lattice = INTEGERS if dtype == "int16" else SOUND
    split = whole_upload(model, Coding("samples", {"x": lattice}))
    sent, restored = send(split, x)
    np.testing.assert_array_equal(sent["x.samples"], samples.reshape(1, -1))
    assert sent["x.samples"].dtype == np.int16
    np.testing.assert_array_equal(restored, x)
    assert bool(split.codes) == (dtype == "float32")  # integers have no value that cannot be sent


@cases("dtype", INTEGER_TYPES)
@cases("shape", [(64,), (1, 64), (2, 3, 64)])
def test_differences_of_integers_are_exact_for_all_values(dtype: str, shape: tuple[int, ...]) -> None:
    limits = np.iinfo(dtype)
    x = np.random.default_rng(8).integers(limits.min, limits.max, shape, dtype, endpoint=True)
    x.reshape(-1)[:2] = limits.min, limits.max  # their difference does not fit
    model = model_of([("Identity", ["x"], ["y"])], {"x": shape}, ["y"], dtypes={"x": dtype, "y": dtype})
    axis = max(len(shape) - 1, 1)
    split = whole_upload(model, Coding("delta", {"x": replace(INTEGERS, time_axis=axis)}))
    sent, restored = send(split, x)
    assert sent["x.codes"].dtype == restored.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(restored, x)
    assert not split.codes


def test_inputs_that_have_no_codes_are_sent_as_they_are_beside_those_that_have() -> None:
    model = model_of([("Add", ["a", "b"], ["y"])], {"a": ("N", 1, 400), "b": ("N", 1, 400)}, ["y"])
    split = whole_upload(model, Coding("samples", {"a": SOUND}))
    assert [one.name for one in split.sent] == ["a.samples", "b"]


@cases("kind", ["raw", "int8", "int4"])
@cases("shape", [(48, 8, 8), (5,), (2500,)])
def test_planner_codes_as_submodels_do(kind: str, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(9).normal(size=(2, *shape)).astype(np.float32)
    codec = TensorCoder(kind)
    parts, restored = codec.encode(x), codec.restore(x)
    if kind == "raw":
        assert parts[0] is restored is x
        return
    sent, expected = send(upload_identity(shape, Coding(kind)), x)  # type: ignore[arg-type]
    np.testing.assert_array_equal(restored, expected)
    for part, wanted in zip(parts, sent.values(), strict=True):
        np.testing.assert_array_equal(part, wanted)


def test_changed_answers_cost_what_the_model_gives_for_them() -> None:
    before = np.log(np.float32([[0.50, 0.49, 0.01], [0.90, 0.05, 0.05]]))
    near, far = before.copy(), before.copy()
    near[0, 1], far[1, 2] = 0.0, 1.0
    found = [compare_answers({"y": one}, {"y": before}, "y") for one in (before, near, far)]
    assert [None if one is None else one.changed for one in found] == [0.0, 0.5, 0.5]
    losses = [np.nan if one is None else one.loss for one in found]
    np.testing.assert_allclose(losses, [0.0, 0.01 / 2, 0.85 / 2], atol=1e-6)


def test_answers_that_are_no_classes_are_unknown_once_they_change() -> None:
    boxes, scores = np.float32([[[8, 8, 24, 40]]]), np.float32([[[0.1, 0.9]]])
    expected = {"boxes": boxes, "scores": scores}
    assert find_probabilities([expected, {"boxes": boxes, "scores": 1 - scores}]) == {"scores"}
    assert compare_answers({"boxes": boxes + 8, "scores": scores}, expected, {"scores"}) is None
    assert compare_answers(expected, expected, {"scores"}) == AnswerChange(0.0, 0.0)
    assert compare_answers(expected, expected, ()) == AnswerChange(0.0, 0.0)


def test_probabilities_and_logits_cost_the_same() -> None:
    logits = np.float32([[1.0, 0.9, -2.0]])
    powers = np.exp(logits)
    other = logits[:, [1, 0, 2]]
    first = compare_answers({"y": other}, {"y": logits}, "y")
    second = compare_answers({"y": other}, {"y": powers / powers.sum()}, "y")
    assert first is not None
    assert second is not None
    assert first.loss == pytest.approx(second.loss, rel=1e-5)
