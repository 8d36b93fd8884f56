"""`--fix NAME=VALUE`: an input becomes a constant, and what follows from it is computed."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from tests.toolkit.cases import cases
from tests.toolkit.package_run import (
    Outcome,
    check_refused,
    edgekit,
    listing,
    model_of,
    package,
    read_only,
    saved,
    stored,
    tensor,
)

from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.packaging.recipe import read_recipe

pytestmark = pytest.mark.usefixtures("home")

WIDE = 512


def by_rate(rate: onnx.ValueInfoProto | None = None) -> onnx.ModelProto:
    """y [1, 4]: x [1, 512] times one of two weights, by whether the input `rate` is 16000.

    Inside each branch a second `If` asks for the number of samples, as exporters write `squeeze`.
    """
    draw = np.random.default_rng(0)
    weights: dict[str, NDArray[Any]] = {
        name: draw.standard_normal((WIDE, 4)).astype(np.float32) for name in ("high", "low")
    }
    weights |= {"sixteen": np.array(16000, np.int64), "first": np.array(0, np.int64)}
    weights |= {"one": np.array(1, np.int64)}

    def branch(name: str) -> onnx.GraphProto:
        product, inner = f"{name}_product", f"{name}_inner"
        plain = helper.make_graph(
            [helper.make_node("Relu", [product], [f"{name}_relu"])], "a", [], [tensor(f"{name}_relu", [1, 4])]
        )
        other = helper.make_graph(
            [helper.make_node("Neg", [product], [f"{name}_neg"])], "b", [], [tensor(f"{name}_neg", [1, 4])]
        )
        nodes = [
            helper.make_node("MatMul", ["x", name], [product]),
            helper.make_node("Shape", [product], [f"{name}_shape"]),
            helper.make_node("Gather", [f"{name}_shape", "first"], [f"{name}_rows"]),
            helper.make_node("Equal", [f"{name}_rows", "one"], [f"{name}_single"]),
            helper.make_node("If", [f"{name}_single"], [inner], then_branch=plain, else_branch=other),
        ]
        return helper.make_graph(nodes, name, [], [tensor(inner, [1, 4])])

    nodes = [
        helper.make_node("Equal", ["rate", "sixteen"], ["is_high"]),
        helper.make_node("If", ["is_high"], ["y"], then_branch=branch("high"), else_branch=branch("low")),
    ]
    inputs = [tensor("x", [1, WIDE]), rate or tensor("rate", [], TensorProto.INT64)]
    return model_of(nodes, inputs, [tensor("y", [1, 4])], weights)


def fixed(tmp_path: Path, *options: object, out: str = "out") -> Outcome:
    return package(saved(by_rate(), tmp_path / "vad.onnx"), tmp_path / out, *options)


def packaged(opened: OpenedPackage) -> OrtSession:
    (model,) = (artifact for artifact in opened.manifest.artifacts if artifact.role == "model")
    return OnnxModel(onnx.load_from_string(bytes(opened.read(model.path)))).open_session(threads=1)


@pytest.mark.parametrize("rate", [16000, 8000])
def test_fixed_input_decides_a_branch_and_leaves_the_other_out(tmp_path: Path, rate: int) -> None:
    assert fixed(tmp_path, "--fix", f"rate={rate}").code == 0
    opened = read_only(tmp_path / "out")
    manifest = opened.manifest
    assert [spec.name for spec in manifest.inputs] == ["x"]
    assert manifest.provenance["fixed_inputs"] == {"rate": rate}
    (model,) = (artifact for artifact in manifest.artifacts if artifact.role == "model")
    assert model.size_bytes < WIDE * 4 * 4 + 1500  # one weight of float32, at most
    x = np.random.default_rng(1).uniform(-1, 1, (1, WIDE)).astype(np.float32)  # as generated samples
    source = OrtSession(by_rate().SerializeToString(), OrtOptions())
    expected = source.run({"x": x, "rate": np.array(rate)})["y"]
    got = packaged(opened).run({"x": x})["y"]
    assert np.abs(got - expected).max() < 0.05 * np.abs(expected).max()


def test_recipe_with_a_fixed_input_gives_the_same_package(tmp_path: Path) -> None:
    assert fixed(tmp_path, "--fix", "rate=16000").code == 0
    (recipe,) = (tmp_path / "out").glob("*.recipe.json")
    assert read_recipe(recipe).fixed == {"rate": 16000}
    again = edgekit("package", tmp_path / "vad.onnx", "--recipe", recipe, "-o", tmp_path / "again")
    assert again.code == 0
    (name,) = (name for name in listing(tmp_path / "again") if name.endswith(".edgepkg"))
    assert listing(tmp_path / "again")[name] == listing(tmp_path / "out")[name]


def test_branches_that_a_fixed_input_decides_convert_for_litert(tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    assert fixed(tmp_path, "--backend", "litert", "--fix", "rate=8000").code == 0
    manifest = read_only(tmp_path / "out").manifest
    assert manifest.backend.chain[0].name == "litert"
    assert [spec.name for spec in manifest.inputs] == ["x"]


@cases(
    ("option", "message"),
    [
        ("other=1", "no input is named 'other'; inputs are x, rate"),
        ("rate=16000.5", "16000.5 is not int64"),
        ("rate=1e30", "is not int64"),
        ("rate=[16000]", r"got shape \[1\], expected \[\]"),
        ("x=[[1, 2], [3]]", "--fix x"),
        ("x=[[1, 2]]", r"got shape \[1, 2\], expected \[1, 512\]"),
        ("x=1e300", "is not float32"),
        ("x=NaN", "is not float32"),
    ],
)
def test_fixed_value_that_does_not_fit_is_refused(tmp_path: Path, option: str, message: str) -> None:
    check_refused(lambda *more: fixed(tmp_path, "--fix", option, *more), 3, message)


def test_fixing_every_input_is_refused(tmp_path: Path) -> None:
    options = ("--fix", "rate=8000", "--fix", "x=0")
    check_refused(lambda *more: fixed(tmp_path, *options, *more), 3, "leave one free")


@cases("option", ["rate", "=1", "rate=fast", 'rate="16000"', "rate=null", "rate={}"])
def test_fix_option_without_a_number_is_a_usage_error(tmp_path: Path, option: str) -> None:
    outcome = fixed(tmp_path, "--fix", option)
    assert (outcome.code, "expected NAME=VALUE" in outcome.stderr) == (2, True)


def test_fix_option_given_twice_is_a_usage_error(tmp_path: Path) -> None:
    outcome = fixed(tmp_path, "--fix", "rate=1", "--fix", "rate=2")
    assert (outcome.code, "'rate' is given twice" in outcome.stderr) == (2, True)


def test_fix_option_beside_a_recipe_is_a_usage_error(tmp_path: Path) -> None:
    model = saved(by_rate(), tmp_path / "vad.onnx")
    outcome = edgekit("package", model, "--recipe", tmp_path / "no.recipe.json", "--fix", "rate=1")
    assert (outcome.code, "--fix" in outcome.stderr) == (2, True)


@pytest.mark.parametrize(
    ("dtype", "shape", "text", "value"),
    [
        (TensorProto.INT64, [1], "16000", 16000),
        (TensorProto.INT32, [], "16000", 16000),
        (TensorProto.FLOAT, [1, 1], "[[16000]]", 16000),
        (TensorProto.FLOAT16, ["N"], "[16000]", 16000),
    ],
)
def test_fixed_value_takes_the_input_s_type_and_shape(
    tmp_path: Path, dtype: int, shape: list[int | str], text: str, value: int
) -> None:
    nodes = [
        helper.make_node("Cast", ["rate"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["float", "flat"], ["scale"]),
        helper.make_node("Mul", ["x", "scale"], ["scaled"]),
        helper.make_node("MatMul", ["scaled", "w"], ["y"]),
    ]
    weights: dict[str, NDArray[Any]] = {"w": np.ones((8, 2), np.float32), "flat": np.array([1], np.int64)}
    inputs = [tensor("x", [1, 8]), tensor("rate", shape, dtype)]
    model = model_of(nodes, inputs, [tensor("y", [1, 2])], weights)
    path = saved(model, tmp_path / "scaled.onnx")
    # Whichever form is packaged, its ranges hold what is asked below.
    rows = np.repeat(np.linspace(-1, 1, 16, dtype=np.float32), 8).reshape(16, 8)
    options = ("--fix", f"rate={text}", "--calibration", stored(tmp_path / "rows.npz", {"x": rows}))
    assert package(path, tmp_path / "out", *options).code == 0
    got = packaged(read_only(tmp_path / "out")).run({"x": np.ones((1, 8), np.float32)})["y"]
    assert got == pytest.approx(np.full((1, 2), 8 * value), rel=0.02)


def test_fixing_an_input_of_a_tflite_is_refused(tmp_path: Path) -> None:
    small = pytest.importorskip("tests.toolkit.small_tflite")
    path = tmp_path / "small.tflite"
    path.write_bytes(small.small_cnn().content())
    outcome = package(path, tmp_path / "out", "--fix", "x=1", target="rpi5")
    assert (outcome.code, "not of a .tflite" in outcome.stderr) == (3, True)


def test_samples_without_the_fixed_input_are_enough(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((8, 1, WIDE)).astype(np.float32)
    path = stored(tmp_path / "calibration.npz", {"x": x.reshape(8, WIDE)})
    assert fixed(tmp_path, "--fix", "rate=16000", "--calibration", path).code == 0
