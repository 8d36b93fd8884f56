"""Golden inputs and outputs of a package: small, private, decodable and fair to other engines."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.toolkit.cases import cases
from tests.toolkit.package_run import (
    mlp,
    model_of,
    package,
    read_only,
    saved,
    stored,
    tensor,
    tiny,
)

from edgekit_runtime.errors import DataError
from edgekit_runtime.package.golden import GoldenInput, GoldenOutput
from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.selftest import GoldenCase, read_golden_inputs, run_selftest
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.importers.onnx import load_onnx
from edgekit_toolkit.packaging.assemble import assemble, golden_reference
from edgekit_toolkit.packaging.golden_tensors import golden_feeds, golden_outputs
from edgekit_toolkit.packaging.recipe import Recipe
from edgekit_toolkit.quantize.forms import FLOAT32, Form

MAX_ELEMENTS = 4096


pytestmark = pytest.mark.usefixtures("home")


def one_input(
    spec: TensorSpec, ranges: dict[str, tuple[float, float]] | None = None
) -> tuple[GoldenInput, bytes, np.ndarray[Any, Any]]:
    (described,), artifacts, feeds = golden_feeds([spec], {}, ranges or {}, 0)
    return described, artifacts[described.path], feeds[spec.name]


def one_output(
    value: np.ndarray[Any, Any], reference: np.ndarray[Any, Any], *, integer: bool = False
) -> tuple[GoldenOutput, bytes]:
    (described,), artifacts = golden_outputs({"y": value}, {"y": reference}, integer=integer)
    return described, artifacts[described.path]


@cases("shape", [(), (1,), (1, 8), (1, 3, 224, 224), (1, 1, 16000), (3, 5, 7, 11, 13), (1, 4099), (1, 0)])
def test_an_input_is_what_a_device_decodes(shape: tuple[int, ...]) -> None:
    described, stored_bytes, value = one_input(TensorSpec("x", "float32", shape))
    assert (value.shape, value.dtype) == (shape, np.float32)
    assert isinstance(value, np.ndarray)
    np.testing.assert_array_equal(described.decode(stored_bytes), value)


class FixedSession:
    """Returns what it is told to."""

    def __init__(self, value: np.ndarray[Any, Any]) -> None:
        self._value = value

    def run(self, _: Any) -> dict[str, np.ndarray[Any, Any]]:
        return {"y": self._value}


def test_engine_that_rounds_otherwise_passes_where_rounding_moves_an_output_far() -> None:
    value = np.linspace(0, 1, 8, dtype=np.float32)
    elsewhere = value + np.float32([0, 0.4, 0, 0, 0, 0, 0, 0])

    def passes(*jittered: np.ndarray[Any, Any]) -> bool:
        noisy = [{"y": output} for output in jittered]
        (output,), artifacts = golden_outputs({"y": value}, {"y": value}, integer=True, jittered=noisy)
        case = GoldenCase({}, ((output, output.decode(artifacts[output.path])),))
        return case.check(FixedSession(elsewhere)).passed  # type: ignore[arg-type]

    assert passes(value - np.float32(0.2))
    assert not passes(value - np.float32(0.1))
    assert not passes()


@pytest.mark.parametrize("noisy", [0, 640, 6000])
def test_set_of_sampled_rows_is_held_to_a_quarter_of_what_is_stored(noisy: int) -> None:
    rows = np.random.default_rng(0).uniform(1, 100, (6000, 4)).astype(np.float32)
    moved = rows.copy()
    moved[:noisy] += 50
    (output,), artifacts = golden_outputs(
        {"y": rows}, {"y": rows}, integer=True, axes={"y": 0}, jittered=[{"y": moved}]
    )
    assert output.stored_shape == (1000, 4)
    assert output.count_atol == 1
    assert 0.95 * min(noisy / 3, 250) <= output.loose <= min(max(1, noisy / 3 + 1), 250)
    case = GoldenCase({}, ((output, output.decode(artifacts[output.path])),))

    def passes(value: np.ndarray[Any, Any]) -> bool:
        return case.check(FixedSession(value)).passed  # type: ignore[arg-type]

    assert passes(rows[::-1])
    assert passes(moved) == (noisy < 6000)
    assert not passes(np.zeros_like(rows))
    assert not passes(rows[: len(rows) // 2])
    assert not passes(np.concatenate([rows, rows[:2]]))


def test_number_of_rows_may_differ_by_twice_its_noise() -> None:
    rows = np.random.default_rng(0).uniform(1, 100, (100, 4)).astype(np.float32)
    (output,), _ = golden_outputs(
        {"y": rows}, {"y": rows}, integer=True, axes={"y": 0}, jittered=[{"y": rows[:95]}]
    )
    assert (output.loose, output.count_atol) == (10, 10)


def test_output_whose_rows_differ_in_the_packaged_form_alone_has_no_further_rows(tmp_path: Path) -> None:
    """The float model finds all values, the packaged form some."""

    def found(limit: float) -> Any:
        nodes = [
            helper.make_node("MatMul", ["x", "w"], ["y"]),
            helper.make_node("Greater", ["y", "limit"], ["large"]),
            helper.make_node("NonZero", ["large"], ["indices"]),
            helper.make_node("Transpose", ["indices"], ["places"], perm=[1, 0]),
        ]
        weights = {"w": np.eye(8, dtype=np.float32), "limit": np.float32([limit])}
        outputs = [tensor("y", [1, 8]), tensor("places", ["K", 2], TensorProto.INT64)]
        model = model_of(nodes, [tensor("x", [1, 8])], outputs, weights)
        return load_onnx(saved(model, tmp_path / f"{limit}.onnx")).model

    reference = golden_reference(found(-1e9), {}, {}, 0)
    assert (reference.axes, bool(reference.rows)) == ({}, True)
    recipe = Recipe(
        name="found",
        version="1.0.0",
        target="x86-64",
        backend="ort",
        source_sha256="0" * 64,
        batch=None,
        dims={},
        steps=(),
        form=Form(FLOAT32),
        model_sha256="0" * 64,
        golden_seed=0,
        golden_ranges={},
        budget={},
        figures={},
        labels=None,
        preprocessing=None,
        tools={},
    )
    golden = assemble(recipe, reference, found(0.0)).manifest.golden
    assert {output.name: output.axis for output in golden.outputs} == {"y": None, "places": 0}
    assert golden.rows is not None
    assert [output.name for output in golden.rows.outputs] == ["y"]


@pytest.mark.parametrize("shape", [(1, 3, 224, 224), (1, 1, 16000), (1, 3, 640, 640)])
def test_a_large_input_costs_kilobytes(shape: tuple[int, ...]) -> None:
    described, stored_bytes, value = one_input(TensorSpec("x", "float32", shape))
    assert len(stored_bytes) <= MAX_ELEMENTS
    assert np.ptp(value) > 0.5
    assert described.codes is not None


def test_an_input_stays_in_the_range_of_the_calibration_samples() -> None:
    _, _, value = one_input(TensorSpec("x", "float32", (1, 500)), {"x": (3.0, 5.0)})
    # A code step of the range, because the ends are rounded to codes.
    assert 3 - 2 / 255 <= value.min() < 3.2 < 4.8 < value.max() <= 5 + 2 / 255


@cases("number", [0.0, 1.0, -0.1, 1e30])
@cases("size", [8, 128, 4099])
def test_constant_input_is_exact(number: float, size: int) -> None:
    _, _, value = one_input(TensorSpec("x", "float32", (1, size)), {"x": (number, number)})
    np.testing.assert_array_equal(value, np.full((1, size), number, np.float32))


def test_input_of_a_tiny_range_stays_in_it() -> None:
    _, _, value = one_input(TensorSpec("x", "float32", (1, 500)), {"x": (0.0, 1e-9)})
    assert 0 <= value.min() < value.max() <= 1e-9


@cases("dtype", ["int64", "uint8", "bool", "float16", "float64"])
def test_other_types_are_stored_as_they_are(dtype: str) -> None:
    described, stored_bytes, value = one_input(TensorSpec("x", dtype, (1, 6)))
    assert described.codes is None
    assert len(stored_bytes) == 6 * np.dtype(dtype).itemsize
    np.testing.assert_array_equal(described.decode(stored_bytes), value)


def test_a_large_output_is_sampled() -> None:
    value = np.arange(100_000, dtype=np.float32).reshape(1, -1)
    described, stored_bytes = one_output(value, value)
    assert len(stored_bytes) <= 4 * MAX_ELEMENTS
    expected = described.pick(value)
    np.testing.assert_allclose(described.decode(stored_bytes), expected, rtol=0, atol=described.atol / 32)


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool"])
def test_an_output_of_whole_numbers_has_no_tolerance(dtype: str) -> None:
    value = np.array([[0, 1, 1]], dtype)
    described, _ = one_output(value, value, integer=True)
    assert (described.atol, described.rtol) == (0, 0)


def test_the_tolerance_follows_the_scale_of_the_output() -> None:
    value = np.array([[0.0, 1.0, -1.0]], np.float32)
    small, _ = one_output(value, value)
    large, _ = one_output(value * 1000, value * 1000)
    assert large.atol == pytest.approx(1000 * small.atol)
    assert 0 < small.atol < 0.05


def test_an_integer_model_may_differ_more_than_a_float_model() -> None:
    value = np.array([[0.0, 1.0, -1.0]], np.float32)
    floating, _ = one_output(value, value)
    integer, _ = one_output(value, value, integer=True)
    # Steps of a few codes in each layer, but not the difference between two classes.
    assert 10 * floating.atol < integer.atol <= 0.25 * np.ptp(value)


def test_rounding_of_expected_values_takes_nothing_of_the_tolerance() -> None:
    value = np.linspace(-1, 1, 500, dtype=np.float32).reshape(1, -1)
    described, stored = one_output(value, value)
    rounding = np.abs(described.decode(stored) - value).max()
    assert 0 < rounding <= described.atol - 0.005 * 2


def test_how_far_an_integer_model_is_from_the_float_model_is_tolerated_too() -> None:
    value = np.array([[0.0, 1.0, -1.0]], np.float32)
    near, _ = one_output(value, value, integer=True)
    some, _ = one_output(value + np.float32(0.1), value, integer=True)
    far, _ = one_output(value + np.float32(5), value, integer=True)
    assert some.atol == pytest.approx(near.atol + 0.1 * 32 / 31, rel=5e-3)  # three digits
    assert far.atol == pytest.approx(2 * near.atol, rel=5e-3)  # being far off is no reason to pass


def test_an_infinite_output_leaves_the_tolerance_finite() -> None:
    value = np.array([[0.0, 1.0, -np.inf]], np.float32)
    described, _ = one_output(value, value)
    assert described.atol == one_output(value[:, :2], value[:, :2])[0].atol


def test_an_output_of_nothing_but_infinities_is_refused() -> None:
    value = np.full((1, 3), np.inf, np.float32)
    with pytest.raises(DataError, match="output 'y' is infinite in every value"):
        one_output(value, value)


def test_an_empty_output_is_described() -> None:
    value = np.zeros((1, 0), np.float32)
    described, stored_bytes = one_output(value, value)
    assert described.decode(stored_bytes).shape == (1, 0)


def test_an_output_that_is_not_a_number_is_refused() -> None:
    value = np.array([[0.0, np.nan]], np.float32)
    with pytest.raises(DataError, match="give --calibration with real samples"):
        one_output(value, value)


def logarithm(folder: Path) -> Path:
    """y = log(x), which is not a number for half of the generated inputs."""
    nodes = [helper.make_node("Log", ["x"], ["y"])]
    return saved(model_of(nodes, [tensor("x", ["N", 8])], [tensor("y", ["N", 8])]), folder / "log.onnx")


def test_a_model_that_generated_inputs_do_not_suit_is_refused(tmp_path: Path) -> None:
    outcome = package(logarithm(tmp_path), tmp_path / "out")
    assert outcome.code == 4
    assert "output 'y' is NaN" in outcome.stderr
    assert not (tmp_path / "out").exists()


def test_real_samples_make_golden_inputs_suit_the_model(tmp_path: Path) -> None:
    x = np.random.default_rng(0).uniform(1, 9, (16, 8)).astype(np.float32)
    data = stored(tmp_path / "e.npz", {"x": x})
    assert package(logarithm(tmp_path), tmp_path / "out", "--eval", data).code == 0
    with read_only(tmp_path / "out") as opened:
        assert read_golden_inputs(opened)["x"].min() > 0.9


def test_no_sample_of_the_user_is_in_the_package(tmp_path: Path) -> None:
    source, data = tiny("italy_power_mlp")
    assert package(source, tmp_path, *data).code == 0
    with read_only(tmp_path) as opened:
        golden = read_golden_inputs(opened)["demand"]
    for path in (data[1], data[3]):
        with np.load(str(path)) as arrays:
            distance = np.abs(arrays["demand"] - golden).max(axis=(1, 2))
        assert distance.min() > 0.1


def test_the_self_test_finds_wrong_weights(tmp_path: Path) -> None:
    """The tolerance must not be so wide that a wrong model passes."""
    assert package(saved(mlp(), tmp_path / "net.onnx"), tmp_path / "right").code == 0
    made = mlp()
    weight = made.graph.initializer[2]
    weight.raw_data = (np.frombuffer(weight.raw_data, np.float32) * np.float32(1.1)).tobytes()
    assert package(saved(made, tmp_path / "net.onnx"), tmp_path / "wrong").code == 0
    with read_only(tmp_path / "right") as right, read_only(tmp_path / "wrong") as wrong:
        session = open_session(wrong)
        assert not run_selftest(session, right).passed
        session.close()


def test_golden_tensors_do_not_depend_on_the_form(tmp_path: Path) -> None:
    source, data = tiny("digits_cnn", calibration_samples=16, evaluation_samples=40)
    inputs = []
    for place, budget in (("a", "drop=100%"), ("b", "size=26kB,drop=100%")):
        assert package(source, tmp_path / place, *data, "--budget", budget).code == 0
        with read_only(tmp_path / place) as opened:
            inputs.append(read_golden_inputs(opened)["image"])
            assert json.loads(opened.manifest.to_bytes())["golden"]["inputs"][0]["codes"]["dtype"] == "uint8"
    np.testing.assert_array_equal(*inputs)
