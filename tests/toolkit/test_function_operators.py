"""Operators that ONNX defines by a function are written out where an engine or the cost model lacks them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from tests.toolkit.cases import cases
from tests.toolkit.package_run import (
    check_refused,
    edgekit,
    listing,
    model_of,
    package,
    read_only,
    saved,
    tensor,
)

from edgekit_runtime.errors import ModelError
from edgekit_runtime.sessions.ort import OrtSession
from edgekit_toolkit.costs.onnx_operators import node_costs
from edgekit_toolkit.importers.onnx import load_onnx
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.functions import inline_functions
from edgekit_toolkit.packaging.recipe import read_recipe
from edgekit_toolkit.passes.optimiser import optimise
from edgekit_toolkit.quantize.plan import kernel_names
from edgekit_toolkit.quantize.scheme import SCHEMES

node = helper.make_node
BATCH, LENGTH, WIDTH, HEADS = 2, 4, 32, 2


def transformer(mask: tuple[int, ...] = (BATCH, 1, 1, LENGTH), *, causal: int = 0) -> onnx.ModelProto:
    """One layer of attention with a mask of the keys, as torch 2.13 exports it for opset 23."""
    draw = np.random.default_rng(0)
    names = ("wq", "wk", "wv", "wo")
    weights: dict[str, NDArray[Any]] = {
        name: (draw.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32) for name in names
    }
    weights["heads"] = np.array([0, 0, HEADS, WIDTH // HEADS], np.int64)
    weights["merged"] = np.array([0, 0, WIDTH], np.int64)
    nodes: list[NodeProto] = []
    for name in "qkv":
        nodes += [
            node("MatMul", ["x", f"w{name}"], [f"{name}_flat"]),
            node("Reshape", [f"{name}_flat", "heads"], [f"{name}_split"]),
            node("Transpose", [f"{name}_split"], [name], perm=[0, 2, 1, 3]),
        ]
    nodes += [
        node("Attention", ["q", "k", "v", "mask"], ["attended"], is_causal=causal),
        node("Transpose", ["attended"], ["rows"], perm=[0, 2, 1, 3]),
        node("Reshape", ["rows", "merged"], ["flat"]),
        node("MatMul", ["flat", "wo"], ["y"]),
    ]
    inputs = [tensor("x", [BATCH, LENGTH, WIDTH]), tensor("mask", mask)]
    return model_of(nodes, inputs, [tensor("y", [BATCH, LENGTH, WIDTH])], weights, opset=23)


def feeds() -> dict[str, NDArray[Any]]:
    x = np.random.default_rng(1).standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)
    mask = np.zeros((BATCH, 1, 1, LENGTH), np.float32)
    mask[..., -1] = -100
    return {"x": x, "mask": mask}


def opened(folder: Path) -> OrtSession:
    found = read_only(folder)
    (model,) = (artifact for artifact in found.manifest.artifacts if artifact.role == "model")
    return OnnxModel(onnx.load_from_string(bytes(found.read(model.path)))).open_session(threads=1)


@pytest.mark.usefixtures("home")
def test_attention_whose_mask_the_engine_refuses_is_packaged_written_out(tmp_path: Path) -> None:
    path = saved(transformer(), tmp_path / "layer.onnx")
    outcome = package(path, tmp_path / "out", "--json")
    assert outcome.code == 0
    assert any("fails on operator Attention" in warning for warning in outcome.json["warnings"])
    (expected,) = ReferenceEvaluator(transformer()).run(None, feeds())
    got = opened(tmp_path / "out").run(feeds())["y"]
    assert np.abs(got - expected).max() < 0.05 * np.ptp(expected)
    (recipe,) = (tmp_path / "out").glob("*.recipe.json")
    assert read_recipe(recipe).written_out == ("Attention",)
    assert edgekit("package", path, "--recipe", recipe, "-o", tmp_path / "again").code == 0
    (name,) = (name for name in listing(tmp_path / "again") if name.endswith(".edgepkg"))
    assert listing(tmp_path / "again")[name] == listing(tmp_path / "out")[name]


@pytest.mark.usefixtures("home")
def test_operator_that_written_out_differs_from_the_reference_is_refused(tmp_path: Path) -> None:
    path = saved(transformer(causal=1), tmp_path / "layer.onnx")
    check_refused(
        lambda *more: package(path, tmp_path / "out", *more), 3, "something else than ONNX's reference"
    )


def test_attention_counts_its_two_products() -> None:
    costs = node_costs(transformer((LENGTH, LENGTH)))
    projections = 4 * BATCH * LENGTH * WIDTH * WIDTH
    assert sum(cost.macs for cost in costs) == projections + 2 * BATCH * LENGTH * LENGTH * WIDTH


def unet(opset: int) -> onnx.ModelProto:
    """Convolution, group normalization, convolution; scales are for groups below opset 21."""
    draw = np.random.default_rng(0)
    sizes = 2 if opset < 21 else 8
    weights: dict[str, NDArray[Any]] = {
        "first": draw.standard_normal((8, 3, 3, 3)).astype(np.float32),
        "second": draw.standard_normal((3, 8, 3, 3)).astype(np.float32),
        "scale": np.ones(sizes, np.float32),
        "bias": np.zeros(sizes, np.float32),
    }
    nodes = [
        node("Conv", ["x", "first"], ["wide"], pads=[1, 1, 1, 1]),
        node("GroupNormalization", ["wide", "scale", "bias"], ["normal"], num_groups=2),
        node("Conv", ["normal", "second"], ["y"], pads=[1, 1, 1, 1]),
    ]
    return model_of(nodes, [tensor("x", [1, 3, 8, 8])], [tensor("y", [1, 3, 8, 8])], weights, opset=opset)


@pytest.mark.parametrize("opset", [18, 21, 23])
def test_group_normalization_has_costs_and_hides_nothing_behind_it(opset: int) -> None:
    assert sum(cost.macs for cost in node_costs(unet(opset))) == 2 * 64 * 8 * 3 * 9


@pytest.mark.parametrize("opset", [18, 21, 23])
def test_layers_behind_group_normalization_can_be_int8(opset: int) -> None:
    x = np.random.default_rng(1).standard_normal((1, 3, 8, 8)).astype(np.float32)
    optimised = optimise(unet(opset), batch=None, feeds=[{"x": x}]).model
    known = onnx.shape_inference.infer_shapes(optimised)
    assert kernel_names(known, SCHEMES["symmetric"], elementwise=False) == ("wide", "y")


def test_group_normalization_of_opset_18_is_imported_and_has_scales_for_groups(tmp_path: Path) -> None:
    model = unet(18)
    for tensor_ in model.graph.initializer:
        if tensor_.name == "scale":
            tensor_.CopyFrom(numpy_helper.from_array(np.array([2, 3], np.float32), "scale"))
    onnx.save(model, tmp_path / "model.onnx")
    x = np.random.default_rng(1).standard_normal((1, 3, 8, 8)).astype(np.float32)
    imported = load_onnx(tmp_path / "model.onnx").model.open(["y"], threads=1)({"x": x})[0]
    grouped = model_of(
        [
            node("Conv", ["x", "first"], ["wide"], pads=[1, 1, 1, 1]),
            node("Reshape", ["wide", "groups"], ["apart"]),
            node("InstanceNormalization", ["apart", "scale", "bias"], ["even"]),
            node("Reshape", ["even", "image"], ["normal"]),
            node("Conv", ["normal", "second"], ["y"], pads=[1, 1, 1, 1]),
        ],
        [tensor("x", [1, 3, 8, 8])],
        [tensor("y", [1, 3, 8, 8])],
        {
            **{item.name: numpy_helper.to_array(item) for item in model.graph.initializer},
            "groups": np.array([1, 2, -1]),
            "image": np.array([1, 8, 8, 8]),
        },
        opset=18,
    )
    expected = OnnxModel(grouped).open(["y"], threads=1)({"x": x})[0]
    np.testing.assert_allclose(imported, expected, rtol=1e-4, atol=1e-4)


LITERT_MODELS = {
    "Attention": transformer((LENGTH, LENGTH)),
    "Shrink": model_of(
        [node("Shrink", ["x"], ["y"], lambd=0.5)], [tensor("x", [2, 8])], [tensor("y", [2, 8])], opset=18
    ),
    "GroupNormalization": unet(18),
    "LayerNormalization with its mean": model_of(
        [node("LayerNormalization", ["x", "scale"], ["y", "mean"])],
        [tensor("x", [2, 8])],
        [tensor("y", [2, 8]), tensor("mean", [2, 1])],
        {"scale": np.ones(8, np.float32)},
    ),
}


@cases("name", LITERT_MODELS)
def test_operator_without_a_mapping_converts_written_out(name: str) -> None:
    check = pytest.importorskip("edgekit_toolkit.tflite.check")
    model = LITERT_MODELS[name]
    draw = np.random.default_rng(0)
    feed = {
        value.name: draw.standard_normal([dim.dim_value for dim in value.type.tensor_type.shape.dim]).astype(
            np.float32
        )
        for value in model.graph.input
    }
    assert check.convert_checked(model, {}, [feed])


def test_operator_that_is_refused_written_out_too_is_named_as_the_user_knows_it() -> None:
    convert = pytest.importorskip("edgekit_toolkit.tflite.convert")
    nodes = [node("CenterCropPad", ["x", "size"], ["y"], axes=[1])]
    inputs = [tensor("x", [1, 4]), tensor("size", [1], TensorProto.INT64)]
    model = model_of(nodes, inputs, [tensor("y", [1, "n"])], {}, opset=21)
    with pytest.raises(Exception, match="operator 'CenterCropPad'"):
        convert.convert(model, {})


def test_model_whose_types_cannot_be_inferred_is_refused_by_a_model_error() -> None:
    model = unet(18)
    model.graph.node.append(node("Other", ["x"], ["z"], domain="without.import"))
    with pytest.raises(ModelError, match="no types can be inferred"):
        inline_functions(model, {"GroupNormalization"})
