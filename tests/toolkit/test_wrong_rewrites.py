"""Rewrites of onnxruntime that change a model are found, named and switched off for that model."""

import importlib
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator
from tests.toolkit.package_run import TINY, Outcome, edgekit, package, read_only
from tests.toolkit.small_models import model_of, node, random_weight

from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.ort import OrtSession
from edgekit_toolkit.models import saturating_products
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.ort_graph import optimise_as_engine
from edgekit_toolkit.onnx_graph.ort_options import (
    WHOLE_OPTIMISER,
    disable_optimizers,
    disabled_optimizers,
    ort_options,
    stated_options,
)
from edgekit_toolkit.passes import wrong_rewrites
from edgekit_toolkit.passes.wrong_rewrites import OPTIMIZERS, find_wrong_in_codes, find_wrong_rewrites
from edgekit_toolkit.quantize.forms import FLOAT16_WEIGHTS, FLOAT32, INT8_WEIGHTS, STATIC_INT8, Form, build
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.quantize.scheme import ASYMMETRIC

pytestmark = pytest.mark.usefixtures("home")
SHAPE = (3, 8, 8)


@pytest.fixture
def pad_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one rewrite that is known to be wrong is on again, as one is that nobody knows."""
    for name in ("runtime.sessions.ort", "toolkit.models.ort_session", "toolkit.onnx_graph.ort_graph"):
        # Not by its path: another test imports the first of them a second time.
        monkeypatch.setattr(importlib.import_module(f"edgekit_{name}"), "WRONG_REWRITES", ())


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    """Zeros around the input of a MaxPool, then a convolution."""
    pads = np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64)
    nodes = [
        node("Pad", ["x", "pads"], ["p"]),
        node("MaxPool", ["p"], ["m"], kernel_shape=[3, 3], strides=[2, 2]),
        node("Conv", ["m", "w"], ["y"]),
    ]
    weights = {"pads": pads, "w": random_weight(np.random.default_rng(0), 8, 3, 3, 3)}
    return model_of(nodes, weights, {"x": ["N", *SHAPE]})


def samples(count: int) -> Any:
    """Between 0 and 1, where the rewrite changes nothing."""
    return np.random.default_rng(1).uniform(0, 1, (count, *SHAPE)).astype(np.float32)


def packaged(model: onnx.ModelProto, folder: Path) -> tuple[Outcome, Path, Path]:
    source, data, out = folder / "model.onnx", folder / "samples.npz", folder / "out"
    source.write_bytes(model.SerializeToString())
    np.savez(data, x=samples(40))
    made = package(source, out, "--calibration", data, "--budget", "size=10MB,drop=100%", target="rpi5")
    assert made.code in (0, 5), made.stderr
    return made, source, out


@pytest.mark.usefixtures("pad_fusion")
def test_a_package_runs_without_a_rewrite_that_changes_its_model(
    model: onnx.ModelProto, tmp_path: Path
) -> None:
    _, source, out = packaged(model, tmp_path)
    x = -samples(1)
    (want,) = ReferenceEvaluator(model).run(None, {"x": x})
    with read_only(out) as opened:
        options = opened.manifest.backend.options
        assert options["disabled_optimizers"] == ["Pad_Fusion"]
        session = open_session(opened)
        got = session.run({"x": x})["y"]
        session.close()
    assert np.abs(got - want).max() <= 0.1 * np.ptp(want)
    (report,) = (path for path in out.glob("*.json") if "report" in path.name)
    warnings = json.loads(report.read_text(encoding="utf-8"))["warnings"]
    assert any("rewrite Pad_Fusion changes what this model computes" in one for one in warnings)
    (recipe,) = out.glob("*.recipe.json")
    (first,) = out.glob("*.edgepkg")
    again = tmp_path / "again"
    assert edgekit("package", source, "--recipe", recipe, "-o", again).code == 0
    assert next(again.glob("*.edgepkg")).read_bytes() == first.read_bytes()


def test_a_package_of_a_model_that_no_rewrite_changes_states_no_option(
    model: onnx.ModelProto, tmp_path: Path
) -> None:
    _, _, out = packaged(model, tmp_path)
    with read_only(out) as opened:
        assert "disabled_optimizers" not in opened.manifest.backend.options


@pytest.mark.usefixtures("pad_fusion")
def test_sessions_of_device_and_judge_run_without_what_the_model_notes(model: onnx.ModelProto) -> None:
    x = -samples(2)
    (want,) = ReferenceEvaluator(model).run(None, {"x": x})
    noted = disable_optimizers(model, ["Pad_Fusion"])
    judge = OnnxModel(noted).open(["y"], threads=1)({"x": x})[0]
    device = OrtSession(noted.SerializeToString(), ort_options(noted)).run({"x": x})["y"]
    np.testing.assert_allclose(judge, want, rtol=1e-5, atol=1e-5)  # float32 sums in another order
    np.testing.assert_allclose(device, want, rtol=1e-5, atol=1e-5)
    operators = {one.op_type for one in optimise_as_engine(noted, {"N": 1}).nodes}
    assert "Pad" in operators
    assert "Pad" not in {one.op_type for one in optimise_as_engine(model, {"N": 1}).nodes}


@pytest.mark.parametrize("kind", [FLOAT32, FLOAT16_WEIGHTS, INT8_WEIGHTS])
def test_each_form_keeps_the_note(kind: str, model: onnx.ModelProto) -> None:
    made = build(disable_optimizers(model, ["A", "B"]), Form(kind))
    assert made is not None
    assert disabled_optimizers(made) == ("A", "B")


@pytest.mark.usefixtures("pad_fusion")
def test_a_difference_that_no_known_rewrite_explains_switches_the_optimiser_off(
    model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrong_rewrites, "OPTIMIZERS", ("ConstantFolding", "ConvBNFusion"))
    found = find_wrong_rewrites(model, [{"x": samples(1)}])
    assert found is not None
    assert found.names == WHOLE_OPTIMISER
    assert "without any optimisation" in str(found)
    noted = disable_optimizers(model, found.names)
    assert stated_options(noted) == {"optimise": False}
    x = -samples(1)
    (want,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(
        OnnxModel(noted).open(["y"], threads=1)({"x": x})[0], want, rtol=1e-5, atol=1e-5
    )


def test_products_of_a_model_without_optimiser_are_no_exact_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saturating_products, "saturates", lambda: True)
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        node("MatMulInteger", ["q", "w", "z"], ["i"]),
        node("Cast", ["i"], ["f"], to=1),
        node("Mul", ["f", "s"], ["y"]),
    ]
    model = model_of(nodes, {"w": np.full((8, 4), 127, np.int8)}, {"x": [1, 8]})
    assert saturating_products.find_saturating(model) == ()
    assert saturating_products.find_saturating(disable_optimizers(model, WHOLE_OPTIMISER)) == ("i",)


@pytest.mark.usefixtures("pad_fusion")
def test_two_wrong_rewrites_are_both_named(model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(_: Any, __: bytes, options: Any) -> str:
        return "" if {"Pad_Fusion", "NchwcTransformer"} <= set(options.disabled_optimizers) else "differs"

    monkeypatch.setattr(wrong_rewrites.PlainRun, "difference", differs)
    found = find_wrong_rewrites(model, [{"x": samples(1)}])
    assert found is not None
    assert found.names == ("Pad_Fusion", "NchwcTransformer")


def test_near_ties_that_rounding_decides_are_no_wrong_rewrite() -> None:
    rng = np.random.default_rng(2)
    weight, scale = random_weight(rng, 1, 16, 3, 3), rng.uniform(0.5, 2, 8).astype(np.float32)
    # Eight channels of the same value but for rounding, which folding the scale into the weight changes.
    stored = {"w": (weight / scale[:, None, None, None]).astype(np.float32), "s": scale[:, None, None]}
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Mul", ["c", "s"], ["m"]),
        node("ArgMax", ["m"], ["a"], axis=1),
        node("Cast", ["a"], ["y"], to=1),
    ]
    model = model_of(nodes, stored, {"x": [1, 16, 12, 12]})
    x = rng.normal(size=(1, 16, 12, 12)).astype(np.float32)
    plain = OrtSession(model.SerializeToString(), ort_options(disable_optimizers(model, WHOLE_OPTIMISER)))
    optimised = OrtSession(model.SerializeToString())
    assert not np.array_equal(plain.run({"x": x})["y"], optimised.run({"x": x})["y"])  # otherwise no test
    assert find_wrong_rewrites(model, [{"x": x}]) is None


@pytest.mark.parametrize("path", sorted(TINY.glob("*.onnx")), ids=lambda path: path.stem)
def test_the_known_names_are_all_that_the_optimiser_does(path: Path) -> None:
    assert operators(path, OPTIMIZERS) == operators(path, (), optimise=False)
    assert operators(path, OPTIMIZERS) != operators(path, ())


def operators(path: Path, disabled: Sequence[str], *, optimise: bool = True) -> Counter[str]:
    """How often each operator stands in the graph that onnxruntime runs."""
    level = onnxruntime.GraphOptimizationLevel
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.graph_optimization_level = level.ORT_ENABLE_ALL if optimise else level.ORT_DISABLE_ALL
    with tempfile.TemporaryDirectory() as folder:
        settings.optimized_model_filepath = f"{folder}/optimised.onnx"
        onnxruntime.InferenceSession(
            str(path), settings, providers=["CPUExecutionProvider"], disabled_optimizers=list(disabled)
        )
        return Counter(one.op_type for one in onnx.load(settings.optimized_model_filepath).graph.node)


def padded() -> onnx.ModelProto:
    """A Pad with axes between convolutions, whose order of axes onnxruntime 1.31.1 forgets for codes."""
    rng = np.random.default_rng(0)
    nodes = [
        node("Conv", ["x", "k"], ["c"], pads=[1] * 4),
        node("Pad", ["c", "pads", "half", "axes"], ["p"]),
        node("Relu", ["p"], ["r"]),
        node("Conv", ["r", "l"], ["y"]),
    ]
    stored = {
        "k": random_weight(rng, 8, 3, 3, 3),
        "l": random_weight(rng, 8, 8, 3, 3),
        "pads": np.array([1, 2, 1, 1]),
        "half": np.array(0.5, np.float32),
        "axes": np.array([2, 3]),
    }
    return model_of(nodes, stored, {"x": [1, 3, 16, 16]}, opset=19)


def test_codes_on_which_a_rewrite_fails_run_without_it(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(padded(), path)
    report = package(path, tmp_path / "out", "--backend", "ort", "--search-seconds", "0.3", "--json").json
    offered = [*(candidate["label"] for candidate in report["candidates"]), *report["set_aside"]]
    assert [label for label in offered if label.startswith("int8 per-channel")]
    assert not [text for text in report["warnings"] if text.startswith("left out: int8 per-")]


def test_rewrites_that_are_off_for_codes_are_part_of_the_form() -> None:
    plan = Plan(ASYMMETRIC, frozenset({"c"}), {"x": (-1, 1), "c": (-1, 1)}, True, ("NhwcTransformer",))
    form = Form.from_json(Form(STATIC_INT8, plan).to_json())
    made = build(disable_optimizers(padded(), ["ConvMulFusion"]), form)
    assert made is not None
    assert disabled_optimizers(made) == ("ConvMulFusion", "NhwcTransformer")


def test_rewrite_that_makes_codes_noisier_is_named_and_rounding_is_not(model: onnx.ModelProto) -> None:
    def noise(variant: onnx.ModelProto) -> float:
        off = disabled_optimizers(variant)
        return 0.01 if off == WHOLE_OPTIMISER or "NhwcTransformer" in off else wrong

    wrong = 0.5
    found = find_wrong_in_codes(model, noise)
    assert found is not None
    assert found.names == ("NhwcTransformer",)
    wrong = 0.02
    assert find_wrong_in_codes(model, noise) is None


def test_codes_that_only_integer_kernels_compute_wrong_have_no_wrong_rewrite(model: onnx.ModelProto) -> None:
    def noise(variant: onnx.ModelProto) -> float:
        off = disabled_optimizers(variant)
        return 0.01 if off == WHOLE_OPTIMISER or "QDQSelectorActionTransformer" in off else 0.5

    assert find_wrong_in_codes(model, noise) is None
