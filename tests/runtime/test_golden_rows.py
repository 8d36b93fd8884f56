"""Further golden rows: drawn from the first one, stored as outputs alone, all compared."""

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.errors import DataError, ManifestError
from edgekit_runtime.package.archive import OpenedPackage, read_package, write_package
from edgekit_runtime.package.golden import Golden, GoldenRows, RowsOutput, resample
from edgekit_runtime.package.manifest import Manifest, parse_manifest
from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.selftest import run_selftest

WEIGHT = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32)  # of the test model: y = x @ WEIGHT
FIRST = np.float32([[-1, -0.5, 0, 0.5]])
SEEDS = (4, 9, 28)


def expected_rows() -> np.ndarray[Any, Any]:
    return np.concatenate([resample({"x": FIRST}, seed)["x"] @ WEIGHT for seed in SEEDS])


def manifest_with(maker: Any, rows: RowsOutput, content: bytes) -> tuple[Manifest, dict[str, bytes]]:
    maker.roles["golden/rows.bin"] = "golden"
    artifacts = {**maker.artifacts, "golden/rows.bin": content}
    first = maker.manifest().golden
    golden = Golden(first.inputs, first.outputs, GoldenRows(SEEDS, (rows,)))
    return maker.manifest(artifacts, golden=golden), artifacts


def written(maker: Any, path: Path, values: np.ndarray[Any, Any], **fields: Any) -> OpenedPackage:
    rows = RowsOutput(**{"name": "y", "path": "golden/rows.bin", "atol": (1e-5,) * len(SEEDS), **fields})
    write_package(path, *manifest_with(maker, rows, values.tobytes()), maker.signer)
    return read_package(path, maker.trust)


def test_rows_that_the_model_reproduces_pass(maker: Any, package_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    with written(maker, package_path, expected_rows()) as package:
        (check,) = run_selftest(open_session(package), package).checks
    assert (check.passed, check.wrong_count) == (True, 0)


@pytest.mark.parametrize("place", range(len(SEEDS)))
def test_a_wrong_row_fails_and_is_named_though_the_first_row_is_right(
    place: int, maker: Any, package_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    values = expected_rows()
    values[place, 1] += 0.25
    with written(maker, package_path, values) as package:
        (check,) = run_selftest(open_session(package), package).checks
    assert (check.passed, check.wrong_count) == (False, 1)
    assert check.max_abs_error == pytest.approx(0.25)
    assert check.message.startswith(f"golden row of seed {SEEDS[place]}: output 'y': 1 of 2 values differ")


def test_each_row_has_its_own_tolerance(maker: Any, package_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    values = expected_rows()
    values[1] += 0.25
    with written(maker, package_path, values, atol=(1e-5, 0.3, 1e-5)) as package:
        assert run_selftest(open_session(package), package).passed
    with written(maker, package_path, values, atol=(0.3, 1e-5, 0.3)) as package:
        assert not run_selftest(open_session(package), package).passed


def test_every_second_value_may_be_stored(maker: Any, package_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    with written(maker, package_path, np.ascontiguousarray(expected_rows()[:, :1]), every=2) as package:
        assert run_selftest(open_session(package), package).passed


def test_the_manifest_states_the_rows_and_reads_them_again(maker: Any) -> None:
    rows = RowsOutput(name="y", path="golden/rows.bin", atol=(1.0, 2.0, 3.0), rtol=(0.5, 0.5, 0.0))
    manifest, _ = manifest_with(maker, rows, bytes(24))
    document = json.loads(manifest.to_bytes())
    assert document["golden"]["rows"]["seeds"] == [4, 9, 28]
    assert parse_manifest(manifest.to_bytes()) == manifest


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"seeds": []}, "1 to 32 whole numbers"),
        ({"seeds": [1, 2, 65536]}, "from 0 to 65535"),
        ({"seeds": [1, 2, True]}, "whole numbers"),
        ({"seeds": list(range(33))}, "1 to 32"),
        ({"seeds": [1, 2]}, "3 and 0 tolerances, expected one for each of 2"),
        ({"seeds": "123"}, "expected a list"),
        ({"outputs": []}, "expected golden outputs"),
    ],
)
def test_rows_that_are_malformed_are_refused(change: dict[str, Any], reason: str, maker: Any) -> None:
    check_refused(maker, lambda rows: rows.update(change), reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"atol": [1e-5, -1, 1e-5]}, "atol"),
        ({"atol": [1e-5, "1", 1e-5]}, "atol"),
        ({"rtol": [0.5]}, "3 and 1 tolerances"),
        ({"every": 0}, "every is 0"),
        ({"every": 2}, "24 bytes, expected 12"),
        ({"name": "z"}, "expected golden outputs"),
        ({"name": ["y"]}, "expected golden outputs"),
        ({"path": "golden/y.bin"}, "8 bytes, expected 24"),
        ({"path": "labels.txt"}, "role 'golden'"),
    ],
)
def test_an_output_of_rows_that_is_malformed_is_refused(
    change: dict[str, Any], reason: str, maker: Any
) -> None:
    check_refused(maker, lambda rows: rows["outputs"][0].update(change), reason)


def test_rows_of_an_output_that_is_a_set_of_rows_are_refused(maker: Any) -> None:
    rows = GoldenRows(SEEDS, (RowsOutput(name="y", path="golden/rows.bin", atol=(1e-5,) * 3),))
    sets = tuple(replace(output, axis=0) for output in maker.manifest().golden.outputs)
    with pytest.raises(DataError, match="expected golden outputs without axis"):
        Golden(maker.manifest().golden.inputs, sets, rows).artifact_sizes()


def check_refused(maker: Any, edit: Any, reason: str) -> None:
    manifest, _ = manifest_with(
        maker, RowsOutput(name="y", path="golden/rows.bin", atol=(1e-5,) * 3), bytes(24)
    )
    document = json.loads(manifest.to_bytes())
    edit(document["golden"]["rows"])
    with pytest.raises(ManifestError, match=reason):
        parse_manifest(encode_json(document))


def test_a_row_is_the_same_on_every_machine() -> None:
    """These values follow from the specification in docs/reference/package-format.md."""
    row = resample({"x": np.arange(12, dtype=np.int64).reshape(1, 12)}, 29)["x"]
    assert row.tolist() == [[1, 1, 3, 3, 11, 11, 2, 2, 10, 10, 11, 11]]


def test_each_value_is_drawn_from_the_first_row() -> None:
    first = {"x": np.float32([[0.1, 0.7, 3e20]]), "tokens": np.int64([[5, 2**60]]), "rate": np.array(16000)}
    for seed in range(64):
        row = resample(first, seed)
        for name, values in first.items():
            assert (row[name].dtype, row[name].shape) == (values.dtype, values.shape)
            assert np.isin(row[name], values).all()


def test_integers_are_drawn_from_all_between_the_least_and_the_largest() -> None:
    first = {"tokens": np.array([[7, 900] + [20] * 14])}
    drawn = np.concatenate([resample(first, seed)["tokens"] for seed in range(0, 256, 8)])
    assert (drawn >= 7).all()
    assert (drawn <= 900).all()
    assert len(np.unique(drawn)) > 30


def test_rows_of_other_seeds_and_inputs_are_others() -> None:
    values = np.arange(64.0).reshape(1, 64)
    rows = [resample({"a": values, "b": values}, seed) for seed in (4, 8)]
    assert len({row[name].tobytes() for row in rows for name in "ab"}) == 4


@pytest.mark.parametrize(("seed", "edge"), [(4, 1), (5, 2), (6, 4), (7, 8)])
def test_long_axes_behind_the_batch_hold_blocks(seed: int, edge: int) -> None:
    values = np.arange(2 * 3 * 20 * 21.0).reshape(2, 3, 20, 21)
    row = resample({"x": values}, seed | 28)["x"]
    blocks = row[:, :, ::edge, ::edge]
    np.testing.assert_array_equal(row, blocks.repeat(edge, 2).repeat(edge, 3)[:, :, :20, :21])
    assert len(np.unique(blocks)) > blocks.size / 2


@pytest.mark.parametrize("seed", [0, 1])
def test_drawing_a_row_takes_the_memory_of_three_inputs_at_most(seed: int) -> None:
    first = {"x": np.zeros((1, 3, 1024, 1024), np.float32)}
    tracemalloc.start()
    try:
        resample(first, seed)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 * first["x"].nbytes


@pytest.mark.parametrize("shape", [(), (0,), (1, 0, 9), (1,)])
def test_an_input_without_axes_or_elements_stays_possible(shape: tuple[int, ...]) -> None:
    assert resample({"x": np.ones(shape, np.float32)}, 7)["x"].tolist() == np.ones(shape).tolist()
