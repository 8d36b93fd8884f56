import tracemalloc
import zipfile

import numpy as np
import pytest
from tests.toolkit.cases import cases

from edgekit_runtime.errors import DataError
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.samples.source import open_data, split

FREE = [TensorSpec("image", "float32", ("N", 4, 4, 3))]
FIXED_1 = [TensorSpec("image", "float32", (1, 4, 4, 3))]
FIXED_4 = [TensorSpec("image", "float32", (4, 4, 4, 3))]
PAIR = [TensorSpec("left", "float32", ("N", 2)), TensorSpec("right", "int64", ("N", 3))]
STATEFUL = [TensorSpec("audio", "float32", (1, 8)), TensorSpec("sr", "int64", ())]


def images(count, seed=0):
    return np.random.default_rng(seed).random((count, 4, 4, 3), np.float32)


def saved(path, **arrays):
    np.savez(path, **arrays)
    return path


def collected(source, batch=1):
    feeds = list(source.stream(batch))
    return [feed for feed, _ in feeds], [labels for _, labels in feeds]


def test_npz_streams_batches_in_order_with_labels_and_a_short_last_one(tmp_path):
    x, y = images(7), np.arange(7, dtype=np.uint8)
    source = open_data(saved(tmp_path / "d.npz", image=x, y=y), FREE)
    feeds, labels = collected(source, batch=3)
    assert [len(feed["image"]) for feed in feeds] == [3, 3, 1]
    assert np.array_equal(np.concatenate([feed["image"] for feed in feeds]), x)
    assert np.array_equal(np.concatenate(labels), y)
    assert labels[0].dtype == np.int64
    assert len(source) == 7
    assert source.labelled


def test_data_without_labels_yields_none(tmp_path):
    source = open_data(saved(tmp_path / "d.npz", image=images(2)), FREE)
    assert collected(source)[1] == [None, None]
    assert not source.labelled


def test_array_named_x_feeds_the_only_input(tmp_path):
    assert len(open_data(saved(tmp_path / "d.npz", x=images(2)), FREE)) == 2


@cases("name", ["labels", "label", "target", "classes", "y_true", "Y"])
def test_labels_under_another_name_are_refused_with_the_right_one(tmp_path, name):
    path = saved(tmp_path / "d.npz", image=images(2), **{name: np.arange(2)})
    message = (
        rf"no input takes: '{name}'; expected 'image' \(or 'x'\), and 'y' for labels; rename '{name}' to 'y'"
    )
    with pytest.raises(DataError, match=message):
        open_data(path, FREE)


def test_further_arrays_are_refused_with_the_names_expected(tmp_path):
    path = saved(tmp_path / "d.npz", image=images(2), y=np.arange(2), ids=np.arange(2), note=np.arange(2))
    with pytest.raises(DataError, match=r"no input takes: 'ids', 'note'; expected 'image' .*; remove them"):
        open_data(path, FREE)


def test_further_file_in_a_folder_of_arrays_is_refused(tmp_path):
    for name in ("image", "labels"):
        np.save(tmp_path / f"{name}.npy", images(2) if name == "image" else np.arange(2))
    with pytest.raises(DataError, match="rename 'labels' to 'y'"):
        open_data(tmp_path, FREE)


def test_array_under_the_input_name_goes_before_x(tmp_path):
    path = saved(tmp_path / "d.npz", x=images(3, seed=1), image=images(2, seed=2))
    assert np.array_equal(collected(open_data(path, FREE), 2)[0][0]["image"], images(2, seed=2))


def test_npy_file_feeds_the_only_input(tmp_path):
    np.save(tmp_path / "d.npy", images(5))
    feeds, labels = collected(open_data(tmp_path / "d.npy", FREE), batch=5)
    assert np.array_equal(feeds[0]["image"], images(5))
    assert labels == [None]


def test_folder_of_shards_streams_across_files_in_name_order(tmp_path):
    saved(tmp_path / "b.npz", image=images(3, seed=2), y=np.array([3, 4, 5]))
    saved(tmp_path / "a.npz", image=images(3, seed=1), y=np.array([0, 1, 2]))
    feeds, labels = collected(open_data(tmp_path, FREE), batch=4)
    assert [list(label) for label in labels] == [[0, 1, 2, 3], [4, 5]]
    assert np.array_equal(feeds[0]["image"][3], images(3, seed=2)[0])


def test_folder_of_single_samples_streams_them_as_batches(tmp_path):
    for index, sample in enumerate(images(5)):
        np.save(tmp_path / f"{index}.npy", sample)
    feeds, _ = collected(open_data(tmp_path, FREE), batch=2)
    assert [len(feed["image"]) for feed in feeds] == [2, 2, 1]
    assert np.array_equal(feeds[1]["image"], images(5)[2:4])


def test_folder_of_one_npy_an_input_is_read_by_name(tmp_path):
    np.save(tmp_path / "left.npy", np.ones((4, 2), np.float32))
    np.save(tmp_path / "right.npy", np.ones((4, 3), np.int64))
    np.save(tmp_path / "y.npy", np.arange(4))
    source = open_data(tmp_path, PAIR)
    assert len(source) == 4
    assert source.labelled


def test_model_of_fixed_batch_1_is_fed_one_at_a_time(tmp_path):
    source = open_data(saved(tmp_path / "d.npz", image=images(3)), FIXED_1)
    assert [feed["image"].shape for feed in collected(source, batch=8)[0]] == [(1, 4, 4, 3)] * 3


def test_model_of_fixed_batch_4_leaves_out_the_remainder_with_a_warning(tmp_path):
    source = open_data(saved(tmp_path / "d.npz", image=images(10)), FIXED_4)
    assert [feed["image"].shape for feed in collected(source)[0]] == [(4, 4, 4, 3)] * 2
    assert len(source) == 8
    assert any("last 2 samples" in note for note in source.warnings)


def test_fewer_samples_than_the_fixed_batch_are_refused(tmp_path):
    with pytest.raises(DataError, match="3 samples, and the model takes 4"):
        open_data(saved(tmp_path / "d.npz", image=images(3)), FIXED_4)


def test_inputs_without_a_common_batch_axis_get_one_sample_a_run(tmp_path):
    audio = np.arange(24, dtype=np.float32).reshape(3, 1, 8)
    path = saved(tmp_path / "d.npz", audio=audio, sr=np.array([16000, 16000, 8000]))
    feeds, _ = collected(open_data(path, STATEFUL), batch=2)
    assert [feed["audio"].shape for feed in feeds] == [(1, 8)] * 3
    STATEFUL[1].check(feeds[2]["sr"])
    assert feeds[2]["sr"] == 8000


def test_samples_of_other_shapes_start_a_new_batch(tmp_path):
    spec = [TensorSpec("image", "float32", ("N", "H", 4))]
    for name, height in (("a", 2), ("b", 2), ("c", 6)):
        np.save(tmp_path / f"{name}.npy", np.zeros((height, 4), np.float32))
    feeds, _ = collected(open_data(tmp_path, spec), batch=3)
    assert [feed["image"].shape for feed in feeds] == [(2, 2, 4), (1, 6, 4)]


def test_one_sample_is_allowed_with_a_warning(tmp_path):
    source = open_data(saved(tmp_path / "d.npz", image=images(1)), FREE)
    assert any("1 sample" in note for note in source.warnings)
    assert open_data(saved(tmp_path / "e.npz", image=images(2)), FREE).warnings == ()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_memory_stays_flat_in_the_number_of_samples(tmp_path, save):
    count = 3_000
    save(tmp_path / "d.npz", image=np.zeros((count, 32, 32, 3), np.float32), y=np.zeros(count, int))
    source = open_data(tmp_path / "d.npz", [TensorSpec("image", "float32", ("N", 32, 32, 3))])
    tracemalloc.start()
    try:
        seen = sum(len(feed["image"]) for feed, _ in source.stream(16))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seen == count
    assert peak_bytes < 8 << 20  # the array has 35 MiB


def test_content_digest_ignores_container_compression_and_files(tmp_path):
    x, y = images(4), np.arange(4)
    whole = open_data(saved(tmp_path / "d.npz", image=x, y=y), FREE)
    np.savez_compressed(tmp_path / "c.npz", x=x, y=y.astype(np.int16))
    folder = tmp_path / "shards"
    folder.mkdir()
    saved(folder / "0.npz", image=x[:1], y=y[:1])
    saved(folder / "1.npz", image=x[1:], y=y[1:])
    assert open_data(tmp_path / "c.npz", FREE).sha256 == whole.sha256
    assert open_data(folder, FREE).sha256 == whole.sha256


def test_content_digest_changes_with_a_value_and_with_a_label(tmp_path):
    x, y = images(4), np.arange(4)
    digest = open_data(saved(tmp_path / "a.npz", image=x, y=y), FREE).sha256
    assert open_data(saved(tmp_path / "b.npz", image=x, y=y[::-1]), FREE).sha256 != digest
    x[3, 3, 3, 2] += 1
    assert open_data(saved(tmp_path / "c.npz", image=x, y=y), FREE).sha256 != digest


def test_split_is_disjoint_complete_and_repeatable(tmp_path):
    source = open_data(saved(tmp_path / "d.npz", image=images(50), y=np.arange(50)), FREE)
    first, rest = split(source, 0.3, seed=4)
    kept = [label for _, labels in first.stream(8) for label in labels]
    others = [label for _, labels in rest.stream(8) for label in labels]
    assert len(first) == len(kept) == 15
    assert sorted(kept + others) == list(range(50))
    assert kept != list(range(15))
    assert [label for _, labels in split(source, 0.3, seed=4)[0].stream(8) for label in labels] == kept
    assert split(source, 0.3, seed=5)[0].sha256 != first.sha256


def test_split_of_a_split_stays_within_it(tmp_path):
    source = open_data(saved(tmp_path / "d.npz", image=images(20), y=np.arange(20)), FREE)
    outer, held_out = split(source, 0.5, seed=0)
    inner, _ = split(outer, 0.4, seed=1)
    assert len(inner) == 4
    chosen = {digest for digest, _ in inner.digests()}
    assert len(chosen & {digest for digest, _ in outer.digests()}) == 4
    assert not chosen & {digest for digest, _ in held_out.digests()}


@cases("fraction", [0.0, 1.0, -0.5, float("nan")])
def test_split_fraction_outside_0_to_1_is_refused(tmp_path, fraction):
    source = open_data(saved(tmp_path / "d.npz", image=images(5)), FREE)
    with pytest.raises(DataError, match="fraction"):
        split(source, fraction, seed=0)


def test_big_endian_arrays_are_fed_in_native_order(tmp_path):
    source = open_data(saved(tmp_path / "d.npz", image=images(2).astype(">f4")), FREE)
    feed = collected(source, 2)[0][0]["image"]
    FREE[0].check(feed)
    assert np.array_equal(feed, images(2))


def test_batch_below_1_is_refused(tmp_path):
    source = open_data(saved(tmp_path / "d.npz", image=images(2)), FREE)
    with pytest.raises(DataError, match="batch of 0"):
        list(source.stream(0))


REFUSED = {
    "other name": ({"imag": images(2)}, r"no array 'image' \(or 'x'\), got imag; .* rename 'imag'"),
    "no arrays": ({}, "got no arrays"),
    "float64": ({"image": images(2).astype(np.float64)}, r"dtype float64.*\.astype\('float32'\)"),
    "uint8": ({"image": np.zeros((2, 4, 4, 3), np.uint8)}, "dtype uint8.*preprocessing"),
    "other size": ({"image": np.zeros((2, 5, 4, 3), np.float32)}, r"\[2, 5, 4, 3\].*\[N, 4, 4, 3\]"),
    "channels first": ({"image": np.zeros((2, 3, 4, 4), np.float32)}, r"\.transpose\(0, 2, 3, 1\)"),
    "other rank": ({"image": np.zeros((2, 48), np.float32)}, r"takes \[N, 4, 4, 3\]"),
    "no samples": ({"image": images(0)}, "holds no samples"),
    "too few labels": ({"image": images(3), "y": np.arange(2)}, "has 2 rows, but .* has 3"),
    "float labels": ({"image": images(2), "y": np.zeros(2)}, "labels are float64"),
    "one-hot labels": ({"image": images(2), "y": np.eye(2, dtype=int)}, r"labels are int64 \[2, 2\].*argmax"),
    "objects": ({"image": np.array([{}, {}], dtype=object)}, "Python objects"),
    "text": ({"image": np.array(["a", "b"])}, "expected numbers"),
    "Fortran order": ({"image": np.asfortranarray(images(2))}, "ascontiguousarray"),
}


@cases(("arrays", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_arrays_that_do_not_fit_the_model_are_refused(tmp_path, arrays, message):
    with pytest.raises(DataError, match=message):
        open_data(saved(tmp_path / "d.npz", **arrays), FREE)


def test_inputs_of_different_lengths_are_refused(tmp_path):
    path = saved(tmp_path / "d.npz", left=np.ones((4, 2), np.float32), right=np.ones((5, 3), np.int64))
    with pytest.raises(DataError, match=r"'right': has 5 rows, but .*'left' has 4"):
        open_data(path, PAIR)


def test_npy_for_a_model_of_two_inputs_is_refused(tmp_path):
    np.save(tmp_path / "d.npy", np.ones((4, 2), np.float32))
    with pytest.raises(DataError, match="inputs left, right"):
        open_data(tmp_path / "d.npy", PAIR)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_or_infinity_names_the_file_and_sample(tmp_path, value):
    x = images(5)
    x[3, 0, 0, 0] = value
    source = open_data(saved(tmp_path / "d.npz", image=x), FREE)
    with pytest.raises(DataError, match=r"d\.npz: sample 3: 1 values of 'image'"):
        list(source.stream(2))


@pytest.mark.parametrize("label", [np.int64(-1), np.uint64(2**63)])
def test_label_that_is_no_class_number_is_refused(tmp_path, label):
    source = open_data(saved(tmp_path / "d.npz", image=images(2), y=np.array([0, label], label.dtype)), FREE)
    with pytest.raises(DataError, match=f"sample 1: label is {label}"):
        list(source.stream(2))


def test_labels_in_some_files_only_are_refused(tmp_path):
    saved(tmp_path / "a.npz", image=images(1), y=np.array([0]))
    saved(tmp_path / "b.npz", image=images(1))
    with pytest.raises(DataError, match="some have none"):
        open_data(tmp_path, FREE)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"none\.npz: no such file"):
        open_data(tmp_path / "none.npz", FREE)


def test_empty_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no \.npz or \.npy file, no image and no recording"):
        open_data(tmp_path, FREE)


@pytest.mark.parametrize("name", ["d.csv", "d.npz", "d.npy"])
def test_file_of_another_kind_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"1,2,3\n" * 50)
    with pytest.raises(DataError, match=name):
        open_data(tmp_path / name, FREE)


@pytest.mark.parametrize("name", ["d.npz", "d.npy"])
def test_truncated_file_is_refused_before_any_sample(tmp_path, name):
    path = tmp_path / name
    (np.save if name.endswith("npy") else np.savez)(path, images(5))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="truncated or corrupt"):
        open_data(path, FREE)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_flipped_byte_is_found_by_the_checksum(tmp_path, save):
    path = tmp_path / "d.npz"
    save(path, image=images(50))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # a mantissa bit, so the values stay finite
    path.write_bytes(content)
    source = open_data(path, FREE)
    with pytest.raises(DataError, match="truncated or corrupt"):
        list(source.stream(8))


def test_member_name_twice_is_refused(tmp_path):
    path = saved(tmp_path / "d.npz", image=images(1))
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("image.npy", b"")
    with pytest.raises(DataError, match="same name"):
        open_data(path, FREE)


def test_sample_over_the_limit_is_refused_before_reading(tmp_path):
    spec, values = [TensorSpec("image", "float32", ("N", "T"))], (1 << 30) // 4
    for extra in (0, 1):  # in files that are mostly holes
        np.lib.format.open_memmap(
            tmp_path / f"{extra}.npy", mode="w+", dtype=np.float32, shape=(1, values + extra)
        )
    assert len(open_data(tmp_path / "0.npy", spec)) == 1
    with pytest.raises(DataError, match="1073741828 bytes, at most 1073741824 are allowed"):
        open_data(tmp_path / "1.npy", spec)


def test_array_shorter_than_its_header_says_is_refused(tmp_path):
    np.save(tmp_path / "d.npy", images(2))
    content = (tmp_path / "d.npy").read_bytes().replace(b"(2, 4, 4, 3)", b"(9, 4, 4, 3)")
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr("image.npy", content)
    with pytest.raises(DataError, match="holds 384 bytes of values, expected 1728"):
        open_data(tmp_path / "d.npz", FREE)


TIME = [TensorSpec("x", "float32", ("T", 1, 6))]
UNNAMED = [TensorSpec("x", "float32", ("x_0", 1, 6))]
STEPS = [TensorSpec("x", "float32", (10, 1, 6))]
SEQUENCES = np.random.default_rng(3).normal(size=(8, 10, 1, 6)).astype(np.float32)


@pytest.mark.parametrize("inputs", [TIME, UNNAMED, STEPS])
def test_axis_of_samples_in_front_of_time_makes_each_sequence_a_run(tmp_path, inputs):
    source = open_data(saved(tmp_path / "d.npz", x=SEQUENCES, y=np.arange(8)), inputs)
    feeds, labels = collected(source, batch=4)
    assert [feed["x"].shape for feed in feeds] == [(10, 1, 6)] * 8
    assert np.array_equal(np.stack([feed["x"] for feed in feeds]), SEQUENCES)
    assert [label.tolist() for label in labels] == [[number] for number in range(8)]


def test_axis_of_time_counts_no_samples(tmp_path):
    source = open_data(saved(tmp_path / "d.npz", x=SEQUENCES[0]), TIME)
    assert [feed["x"].shape for feed in collected(source)[0]] == [(10, 1, 6)]
    assert any("there is 1 sample" in note for note in source.warnings)


@cases(
    ("inputs", "arrays", "shapes"),
    [
        (FREE, {"image": images(6).reshape(3, 2, 4, 4, 3)}, [(2, 4, 4, 3)]),
        (FIXED_4, {"image": images(12).reshape(3, 4, 4, 4, 3)}, [(4, 4, 4, 3)]),
        (
            [*TIME, TensorSpec("h", "float32", (1, 1, 8)), TensorSpec("mask", "bool", ("T",))],
            {"x": SEQUENCES[:3], "h": np.zeros((3, 1, 1, 8), np.float32), "mask": np.ones((3, 10), bool)},
            [(10, 1, 6), (1, 1, 8), (10,)],
        ),
        (
            [TensorSpec("past", "float32", (1, "P", 16)), TensorSpec("x", "float32", (1, 1, 16))],
            {"past": np.zeros((3, 0, 16), np.float32), "x": np.ones((3, 1, 16), np.float32)},
            [(1, 0, 16), (1, 1, 16)],
        ),
    ],
    ids=["batches", "fixed batches", "states and masks", "empty cache"],
)
def test_samples_of_every_kind_of_input_stream_with_their_sizes(tmp_path, inputs, arrays, shapes):
    source = open_data(saved(tmp_path / "d.npz", **arrays), inputs)
    assert len(source) == 3
    assert [[array.shape for array in feed.values()] for feed in collected(source)[0]] == [shapes] * 3


def test_samples_without_any_value_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"no values, but inputs 'x' \[0, 1, 6\]"):
        open_data(saved(tmp_path / "d.npz", x=SEQUENCES[:, :0]), TIME)


def test_shape_that_does_not_fit_is_refused_with_both_that_would(tmp_path):
    with pytest.raises(DataError, match=r"has shape \[8, 10, 6\], but .* \[N, 1, 6\] or \[N, x_0, 1, 6\]"):
        open_data(saved(tmp_path / "d.npz", x=SEQUENCES[:, :, 0]), UNNAMED)
    with pytest.raises(
        DataError, match=r"has shape \[8, 10, 6\], but .* takes \[N, T, 1, 6\] with N samples"
    ):
        open_data(saved(tmp_path / "d.npz", x=SEQUENCES[:, :, 0]), TIME)


def test_input_with_an_axis_of_samples_beside_one_without_is_told_that_they_do_not_mix(tmp_path):
    inputs = (TensorSpec("x", "float32", (1, 4)), TensorSpec("n", "int64", (1,)))
    arrays = {"x": np.zeros((8, 4), np.float32), "n": np.zeros((8, 1), np.int64)}
    message = r"'n' takes \[N\] or \[N, 1\] with N samples, all inputs the same of the two"
    with pytest.raises(DataError, match=message):
        open_data(saved(tmp_path / "d.npz", **arrays), inputs)
    assert len(open_data(saved(tmp_path / "e.npz", **{**arrays, "x": arrays["x"][:, None]}), inputs)) == 8


def test_files_with_and_without_an_axis_of_samples_do_not_mix(tmp_path):
    saved(tmp_path / "a.npz", x=SEQUENCES)
    saved(tmp_path / "b.npz", x=SEQUENCES[:, 0])
    with pytest.raises(DataError, match="some files have an axis for samples in front"):
        open_data(tmp_path, UNNAMED)
