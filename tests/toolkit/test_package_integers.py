"""Models whose inputs take few values: those of the user's samples are what they are run with."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from tests.toolkit.package_run import edgekit, model_of, package, read_only, saved, stored, tensor
from tests.toolkit.small_models import node

from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.selftest import read_golden_inputs, run_selftest

pytestmark = pytest.mark.usefixtures("home")


def at_rates() -> onnx.ModelProto:
    """y [1, T] = x * gains[rate - 9000]: both rates are places in the table, and 0 and 1 are not."""
    gains = np.linspace(1, 2, 7001, dtype=np.float32)
    nodes = [
        node("Sub", ["rate", "first"], ["place"]),
        node("Gather", ["gains", "place"], ["gain"]),
        node("Mul", ["x", "gain"], ["y"]),
    ]
    inputs = [tensor("x", [1, "T"]), tensor("rate", [], TensorProto.INT64)]
    return model_of(nodes, inputs, [tensor("y", [1, "T"])], {"gains": gains, "first": np.int64(9000)})


def words(first: int) -> onnx.ModelProto:
    """y [N, 6, 4] = table[ids - first] of 50 rows."""
    table = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    nodes = [node("Sub", ["ids", "first"], ["place"]), node("Gather", ["table", "place"], ["y"])]
    inputs = [tensor("ids", ["N", 6], TensorProto.INT64)]
    return model_of(nodes, inputs, [tensor("y", ["N", 6, 4])], {"table": table, "first": np.int64(first)})


def rate_samples(folder: Path, rates: list[int]) -> tuple[object, ...]:
    x = np.random.default_rng(0).standard_normal((len(rates), 1, 40)).astype(np.float32)
    return "--calibration", stored(folder / "data.npz", {"x": x, "rate": np.array(rates, np.int64)})


@pytest.mark.parametrize("rates", [[16000] * 8, [16000, 8000] * 4])
def test_lone_integer_is_that_of_the_first_sample(rates: list[int], tmp_path: Path) -> None:
    model = saved(at_rates(), tmp_path / "net.onnx")
    outcome = package(model, tmp_path / "out", *rate_samples(tmp_path, rates))
    assert outcome.code == 0, outcome.stderr
    with read_only(tmp_path / "out") as opened:
        golden = read_golden_inputs(opened)
        assert golden["rate"] == 16000
        assert golden["x"].shape == (1, 40)
        session = open_session(opened)
        assert run_selftest(session, opened).passed
        session.close()


def test_float_that_never_changes_keeps_its_value(tmp_path: Path) -> None:
    """Of the values -1..1 that are generated otherwise, no root of s - 1.5 is a number."""
    nodes = [node("Sub", ["s", "least"], ["d"]), node("Sqrt", ["d"], ["r"]), node("Mul", ["x", "r"], ["y"])]
    inputs = [tensor("x", ["N", 4]), tensor("s", ["N", 1])]
    model = model_of(nodes, inputs, [tensor("y", ["N", 4])], {"least": np.float32(1.5)})
    x = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    data = stored(tmp_path / "data.npz", {"x": x, "s": np.full((8, 1), 2, np.float32)})
    outcome = package(saved(model, tmp_path / "model.onnx"), tmp_path / "out", "--calibration", data)
    assert outcome.code == 0, outcome.stderr
    with read_only(tmp_path / "out") as opened:
        golden = read_golden_inputs(opened)
    assert golden["s"].tolist() == [[2.0]]
    assert np.ptp(golden["x"]) > 0


def test_only_input_that_never_changes_is_generated(tmp_path: Path) -> None:
    nodes = [node("Relu", ["x"], ["y"])]
    model = model_of(nodes, [tensor("x", ["N", 4])], [tensor("y", ["N", 4])], {})
    data = stored(tmp_path / "data.npz", {"x": np.zeros((1, 4), np.float32)})
    outcome = package(saved(model, tmp_path / "model.onnx"), tmp_path / "out", "--calibration", data)
    assert outcome.code == 0, outcome.stderr
    with read_only(tmp_path / "out") as opened:
        assert np.ptp(read_golden_inputs(opened)["x"]) > 0


def test_recipe_repeats_a_package_with_integers(tmp_path: Path) -> None:
    model = saved(at_rates(), tmp_path / "net.onnx")
    assert package(model, tmp_path / "out", *rate_samples(tmp_path, [16000] * 8)).code == 0
    (recipe,) = (tmp_path / "out").glob("*.recipe.json")
    assert json.loads(recipe.read_text())["golden_ranges"]["rate"] == [16000, 16000]
    assert edgekit("package", model, "--recipe", recipe, "-o", tmp_path / "again").code == 0
    with read_only(tmp_path / "out") as first, read_only(tmp_path / "again") as again:
        assert first.manifest == again.manifest


def test_integers_are_generated_in_the_range_of_the_samples(tmp_path: Path) -> None:
    model = saved(words(1000), tmp_path / "net.onnx")
    ids = np.random.default_rng(0).integers(1000, 1050, (20, 6))
    outcome = package(model, tmp_path / "out", "--eval", stored(tmp_path / "data.npz", {"ids": ids}))
    assert outcome.code == 0, outcome.stderr
    with read_only(tmp_path / "out") as opened:
        golden = read_golden_inputs(opened)["ids"]
    assert ids.min() <= golden.min() < golden.max() <= ids.max()


def test_made_up_integers_that_are_refused_say_what_to_give(tmp_path: Path) -> None:
    outcome = package(saved(at_rates(), tmp_path / "net.onnx"), tmp_path / "out")
    said = " ".join(outcome.stderr.split())
    assert outcome.code == 3
    assert "Values of the integer inputs 'rate' were made up: give --calibration" in said


def test_integers_that_only_fit_together_are_refused_with_their_ranges(tmp_path: Path) -> None:
    """The second of two integers is always one more than the first, and the model relies on it."""
    nodes = [
        node("Split", ["pair"], ["a", "b"], axis=1),
        node("Sub", ["b", "a"], ["place"]),
        node("Gather", ["table", "place"], ["y"]),
    ]
    inputs = [tensor("pair", ["N", 2], TensorProto.INT64)]
    weights = {"table": np.arange(2, dtype=np.float32)}
    model = model_of(nodes, inputs, [tensor("y", ["N", 1])], weights)
    first = np.arange(0, 9000, 1000)
    data = stored(tmp_path / "data.npz", {"pair": np.stack([first, first + 1], axis=1)})
    outcome = package(saved(model, tmp_path / "net.onnx"), tmp_path / "out", "--calibration", data)
    said = " ".join(outcome.stderr.split())
    assert outcome.code == 3
    assert "generated as in the samples ('pair' in 0..8001)" in said
