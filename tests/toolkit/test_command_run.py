"""`edgekit run`: any number of samples through a verified package; what is shown and written of it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from onnx import TensorProto, helper
from tests.toolkit.command_run import invoker
from tests.toolkit.package_run import tensor
from tests.toolkit.package_sample import GOLDEN_X, WEIGHT, make_model, write_linear, write_model

from edgekit_cli.run import command
from edgekit_runtime.errors import (
    BackendError,
    DataError,
    DigestError,
    OutputError,
    PackageError,
    SignatureError,
)
from edgekit_runtime.package.manifest_entries import BackendChoice
from edgekit_toolkit.packaging.signing_keys import load_signer

X = np.random.default_rng(3).normal(size=(25, 4)).astype(np.float32)


pytestmark = pytest.mark.usefixtures("new_home")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_linear(tmp_path / "linear.edgepkg")


def save(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


invoke = invoker(command)


def run_json(*arguments: object) -> Any:
    return json.loads(invoke(*arguments, "--json").stdout)


def written(*arguments: object, output: Path) -> dict[str, np.ndarray]:
    invoke(*arguments, "--output", output)
    with np.load(output) as arrays:
        return dict(arrays)


def identity(size: int, output: str = "y") -> bytes:
    node = helper.make_node("Identity", ["x"], [output])
    return make_model([node], [tensor("x", ["N", size])], [tensor(output, ["N", size])])


def flat(result: Result) -> str:
    return " ".join(result.stdout.split())


@pytest.mark.parametrize("count", [1, 2, 25])
def test_a_model_of_free_batch_runs_any_number_of_samples(count: int, path: Path, tmp_path: Path) -> None:
    source = save(tmp_path / "x.npz", x=X[:count])
    arrays = written(path, "--input", source, output=tmp_path / "y.npz")
    np.testing.assert_allclose(arrays["y"], X[:count] @ WEIGHT, rtol=1e-5, atol=1e-5)  # float32 sums of 4


@pytest.mark.parametrize("count", [1, 3, 4, 5, 25])
def test_a_model_of_fixed_batch_runs_any_number_of_samples(count: int, tmp_path: Path) -> None:
    path = write_linear(tmp_path / "four", batch=4, total=False)
    source = save(tmp_path / "x.npz", x=X[:count])
    arrays = written(path, "--input", source, output=tmp_path / "y.npz")
    assert arrays["y"].shape == (count, 2)
    np.testing.assert_allclose(arrays["y"], X[:count] @ WEIGHT, rtol=1e-5, atol=1e-5)  # float32 sums of 4


def test_an_output_without_sample_axis_is_stacked_run_by_run(tmp_path: Path) -> None:
    path = write_linear(tmp_path / "four", batch=4)
    source = save(tmp_path / "x.npz", x=X[:8])
    arrays = written(path, "--input", source, output=tmp_path / "y.npz")
    expected = [(X[:4] @ WEIGHT).sum(), (X[4:8] @ WEIGHT).sum()]
    np.testing.assert_allclose(arrays["total"], expected, rtol=1e-4, atol=1e-4)  # float32 sums of 32


def test_an_output_over_the_batch_refuses_samples_that_do_not_fill_it(tmp_path: Path) -> None:
    path = write_linear(tmp_path / "four", batch=4)
    with pytest.raises(DataError, match=r"'total'.*so 1 cannot be run; give a multiple of 4"):
        invoke(path, "--input", save(tmp_path / "x.npz", x=X[:5]))


def test_a_npy_file_and_a_single_sample_without_its_axis_are_run(path: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X[0])
    arrays = written(path, "--input", tmp_path / "x.npy", output=tmp_path / "y.npz")
    np.testing.assert_allclose(arrays["y"], X[:1] @ WEIGHT, rtol=1e-5, atol=1e-5)  # float32 sums of 4


def test_without_input_the_golden_inputs_are_run(path: Path, tmp_path: Path) -> None:
    arrays = written(path, output=tmp_path / "y.npz")
    np.testing.assert_allclose(arrays["y"], GOLDEN_X @ WEIGHT, rtol=1e-5, atol=1e-5)
    assert "1 sample of the golden inputs" in flat(invoke(path))


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"x": X.astype(np.float64)}, r"dtype float64.*takes float32"),
        ({"x": X[:, :3]}, r"shape \[25, 3\].*takes \[N, 4\]"),
        ({"x": X[:0]}, "holds no samples"),
        ({"z": X}, "has no array 'x'"),
        ({"x": np.full_like(X, np.nan)}, "NaN"),
    ],
)
def test_samples_that_do_not_fit_are_refused(
    arrays: dict[str, np.ndarray], reason: str, path: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=reason):
        invoke(path, "--input", save(tmp_path / "x.npz", **arrays))


def test_a_missing_input_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        invoke(path, "--input", tmp_path / "missing.npz")


def test_shape_and_range_of_each_output_are_shown(path: Path) -> None:
    assert "y float32 [1, 2] 0 to 1" in flat(invoke(path))
    first, second = run_json(path)["outputs"]
    assert (first["name"], first["shape"], first["min"], first["max"]) == ("y", [1, 2], 0.0, 1.0)
    assert (second["name"], second["shape"]) == ("total", [])


def test_the_best_classes_stand_first_with_their_labels(tmp_path: Path) -> None:
    names = ["a", "b [red]", "c", "d", "e", "f"]
    scores = np.array([[0.1, 0.9, 0.3, 0.2, 0.8, 0.0]], np.float32)
    path = write_model(tmp_path / "m", identity(6), scores, scores, labels="\r\n".join(names).encode())
    assert "sample 0 b [red] 0.9, e 0.8, c 0.3, d 0.2, a 0.1" in flat(invoke(path))
    ((best, *_),) = run_json(path)["outputs"][0]["top_classes"]
    assert (best["index"], best["label"], round(best["score"], 6)) == (1, "b [red]", 0.9)


@pytest.mark.parametrize("labels", [None, b"one\ntwo\nthree\n", b""])
def test_without_a_label_for_each_column_no_classes_are_shown(labels: bytes | None, tmp_path: Path) -> None:
    path = write_linear(tmp_path / "x", labels=labels)
    assert "Best classes" not in invoke(path).stdout
    assert run_json(path)["outputs"][0]["top_classes"] == []


def test_labels_that_are_not_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="not text in UTF-8"):
        invoke(write_linear(tmp_path / "x", labels=b"\xff\xfe"))


def test_classes_of_many_samples_are_cut_on_the_terminal_and_whole_in_json(
    path: Path, tmp_path: Path
) -> None:
    source = save(tmp_path / "x.npz", x=X)
    assert "15 further samples" in invoke(path, "--input", source).stdout
    assert len(run_json(path, "--input", source)["outputs"][0]["top_classes"]) == 25


def test_values_that_are_not_finite_are_counted_and_come_last(tmp_path: Path) -> None:
    scores = np.array([[np.nan, np.inf, 1.0]], np.float32)
    path = write_model(tmp_path / "m", identity(3), scores, scores, labels=b"a\nb\nc\n")
    assert "y float32 [1, 3] 1 to 1, 2 NaN or infinite" in flat(invoke(path))
    output = run_json(path)["outputs"][0]
    assert [item["label"] for item in output["top_classes"][0]] == ["b", "c", "a"]
    assert [item["score"] for item in output["top_classes"][0]] == [None, 1.0, None]


@pytest.mark.parametrize("name", ["file", "allow_pickle", "scope/y:0"])
def test_any_output_name_can_be_written(name: str, tmp_path: Path) -> None:
    ones = np.ones((1, 2), np.float32)
    path = write_model(tmp_path / "m", identity(2, output=name), ones, ones)
    assert written(path, output=tmp_path / "y.npz")[name].tolist() == [[1.0, 1.0]]


def test_the_same_outputs_give_the_same_file(path: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        invoke(path, "--output", tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_an_output_that_cannot_be_written_is_an_output_error(path: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No such file"):
        invoke(path, "--output", tmp_path / "missing" / "y.npz")


def test_outputs_of_different_shapes_are_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["y"])]
    model = make_model(nodes, [tensor("x", ["N", 3])], [tensor("y", [2, "K"], TensorProto.INT64)])
    path = write_model(tmp_path / "m", model, np.ones((1, 3), np.float32), np.zeros((2, 3), np.int64))
    source = save(tmp_path / "x.npz", x=np.array([[1, 0, 1], [0, 0, 1]], np.float32))
    with pytest.raises(DataError, match=r"'y' has shape .* for one sample and .* for another"):
        invoke(path, "--input", source)


def test_timing_is_given_only_on_request(path: Path) -> None:
    assert run_json(path)["timing"] is None
    assert "Latency" not in invoke(path).stdout
    timing = run_json(path, "--repeat", 7, "--threads", 1)["timing"]
    assert (timing["runs"], timing["label"]) == (7, "measured")
    assert 0 < timing["lower_quartile_ms"] <= timing["median_ms"] <= timing["upper_quartile_ms"]


@pytest.mark.parametrize("option", ["--repeat", "--threads"])
def test_a_count_under_one_is_a_usage_error(option: str, path: Path) -> None:
    assert invoke(path, option, 0).exit_code == 2


def test_a_package_by_an_unknown_key_is_not_run(tmp_path: Path) -> None:
    path = write_linear(tmp_path / "x", sign=load_signer(folder=tmp_path / "stranger"))
    with pytest.raises(SignatureError, match="signed by key"):
        invoke(path)


def test_a_changed_package_is_not_run(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"no\nyes\n")] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestError):
        invoke(path)


def test_an_engine_that_is_nowhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="no backend 'abacus' here"):
        invoke(write_linear(tmp_path / "x", backend=BackendChoice("abacus", "model.onnx")))


@pytest.mark.parametrize("width", [40, 80])
def test_no_line_is_wider_than_the_window(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    path = write_linear(tmp_path / "x", labels=b"a class with a long name" * 9 + b"\nyes\n")
    lines = invoke(path, "--repeat", 2, "--output", tmp_path / "y.npz").stdout.splitlines()
    assert max(map(len, lines)) <= width
