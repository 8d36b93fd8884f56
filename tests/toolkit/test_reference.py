"""What a manifest says of how inputs and outputs looked on the calibration samples."""

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from tests.toolkit.package_run import TINY as MODELS
from tests.toolkit.package_run import mlp, model_of, tensor

from edgekit_runtime.drift.reference import ClassReference, ValueReference, parse_references
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.packaging.drift_reference import drift_reference
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.samples.split import Part


def part(samples: NDArray[np.float32], *, given: bool = True) -> Part:
    """Calibration samples x [samples, 1, values]."""

    def stream(_: int) -> Iterator[tuple[Feeds, None]]:
        return (({"x": sample}, None) for sample in samples)

    return Part(
        kind="user" if given else "generated",
        count=len(samples),
        sha256="0" * 64 if given else None,
        labelled=False,
        stream=stream,
    )


def copy_of(width: int) -> onnx.ModelProto:
    """y [1, width, 1, 1] = x [1, width, 1, 1]."""
    shape = [1, width, 1, 1]
    return model_of([helper.make_node("Identity", ["x"], ["y"])], [tensor("x", shape)], [tensor("y", shape)])


def draw(count: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(5).standard_normal((count, 1, *shape)).astype(np.float32)


def test_reference_is_what_a_device_reads() -> None:
    samples = draw(40, 8)
    found = drift_reference(OnnxModel(mlp()), part(samples), says_classes=True)
    assert found is not None
    inputs, outputs = parse_references({"reference": found})
    assert (found["samples"], inputs.keys(), outputs.keys()) == (40, {"x"}, {"y"})
    assert inputs["x"].low == pytest.approx(samples.min(), rel=1e-5)
    assert inputs["x"].high == pytest.approx(samples.max(), rel=1e-5)
    assert sum(inputs["x"].shares) == pytest.approx(1, abs=1e-3)  # rounded to four digits
    assert isinstance(outputs["y"], ClassReference)


TINY = ("digits_cnn", "italy_power_mlp", "japanese_vowels_tcn", "mnist5k_dscnn")


def tiny_model(name: str, *, softmax: bool = False) -> tuple[onnx.ModelProto, Part]:
    """A model of models/tiny with its calibration samples; its output is `logits` or `probabilities`."""
    model = onnx.load(MODELS / f"{name}.onnx")
    if softmax:
        model.graph.node.append(helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1))
        model.graph.output[0].name = "probabilities"
    (given,) = (one.name for one in model.graph.input)
    with np.load(MODELS / f"{name}.calib.npz") as arrays:
        rows = arrays[given]

    def stream(_: int) -> Iterator[tuple[Feeds, None]]:
        return (({given: row[None]}, None) for row in rows)

    return model, Part(kind="user", count=len(rows), sha256="0" * 64, labelled=False, stream=stream)


@pytest.mark.parametrize("name", TINY)
def test_logits_of_a_real_model_are_classes_only_where_that_is_said(name: str) -> None:
    model, samples = tiny_model(name)
    for says_classes, kind in ((True, ClassReference), (False, ValueReference)):
        _, outputs = parse_references(
            {"reference": drift_reference(OnnxModel(model), samples, says_classes=says_classes)}
        )
        assert isinstance(outputs["logits"], kind)


@pytest.mark.parametrize("name", TINY)
def test_probabilities_of_a_real_model_show_that_they_are_classes(name: str) -> None:
    model, samples = tiny_model(name, softmax=True)
    _, outputs = parse_references({"reference": drift_reference(OnnxModel(model), samples)})
    classes = outputs["probabilities"]
    assert isinstance(classes, ClassReference)
    assert classes.is_probabilities


def test_numbers_that_add_up_to_one_only_sometimes_are_no_classes() -> None:
    shape = [1, 2]
    copy = model_of([helper.make_node("Identity", ["x"], ["y"])], [tensor("x", shape)], [tensor("y", shape)])
    samples = np.float32([[[0.5, 0.5]], [[0.2, 0.8]], [[3.0, 4.0]]])
    _, outputs = parse_references({"reference": drift_reference(OnnxModel(copy), part(samples))})
    assert isinstance(outputs["y"], ValueReference)


def test_same_samples_give_the_same_reference() -> None:
    samples = part(draw(20, 8))
    assert drift_reference(OnnxModel(mlp()), samples) == drift_reference(OnnxModel(mlp()), samples)


def test_many_samples_are_looked_at_from_the_first_to_the_last() -> None:
    samples = np.arange(1000, dtype=np.float32).reshape(-1, 1, 1, 1, 1)  # as if sorted by class
    found = drift_reference(OnnxModel(copy_of(1)), part(samples))
    assert found is not None
    assert (found["samples"], found["inputs"]["x"]["low"]) == (128, 0)
    assert found["inputs"]["x"]["high"] >= 880


def test_generated_samples_are_no_reference() -> None:
    assert drift_reference(OnnxModel(mlp()), part(draw(4, 8), given=False)) is None


@pytest.mark.parametrize("mark", [np.nan, np.inf, np.finfo(np.float32).min, 1e30])
def test_sample_with_values_that_are_no_data_is_passed_over(mark: float) -> None:
    samples = draw(6, 4, 1, 1)
    clean = drift_reference(OnnxModel(copy_of(4)), part(samples[:-1]))
    samples[-1, 0, 0] = mark
    samples[-1, 0, 1] = np.finfo(np.float32).max
    found = drift_reference(OnnxModel(copy_of(4)), part(samples))
    assert found is not None
    assert clean is not None
    assert (found["inputs"], found["outputs"]) == (clean["inputs"], clean["outputs"])


def test_input_that_never_changes_has_one_edge() -> None:
    found = drift_reference(OnnxModel(copy_of(4)), part(np.full((3, 1, 4, 1, 1), 7, np.float32)))
    inputs, _ = parse_references({"reference": found})
    assert isinstance(inputs["x"], ValueReference)
    assert (inputs["x"].low, inputs["x"].edges) == (7, (7,))


def test_half_precision_values_have_a_reference_without_a_warning() -> None:
    ends = [tensor(name, [1, 8], TensorProto.FLOAT16) for name in ("x", "y")]
    halves = model_of([helper.make_node("Identity", ["x"], ["y"])], ends[:1], ends[1:])
    found = drift_reference(OnnxModel(halves), part(draw(40, 8).astype(np.float16)))
    assert found is not None
    assert found["outputs"].keys() == {"y"}
