"""Pipelines of small models: a detector of coloured cells, and classifiers of crops by their colours."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from tests.runtime.conftest import PackageMaker
from tests.service.answer_parts import LABELS, write_cell_detector
from tests.service.service_parts import Manifest_, write_signed

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.package.archive import read_package, write_package
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.package.pipeline import Stage, sort_stages
from edgekit_toolkit.packaging.pipeline_package import assemble_pipeline

CLASSIFICATION = TaskChoice("classification", {"top": 2})
DETECTOR = Stage(name="detector")
SHADE = Stage(name="shade", input="detector", crop="boxes")


def make_shade_classifier(factors: Sequence[float] = (1.0, 1.0), *, rows: int | str = "N") -> bytes:
    """Return a model: the mean red and green of 8 x 8 pixels 0..1 in turn, times factors, are its scores."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weight = np.zeros((3, len(factors)), np.float32)
    weight[np.arange(len(factors)) % 2, np.arange(len(factors))] = factors
    graph = helper.make_graph(
        [
            helper.make_node("GlobalAveragePool", ["pixels"], ["means"]),
            helper.make_node("Flatten", ["means"], ["colours"]),
            helper.make_node("MatMul", ["colours", "weight"], ["scores"]),
        ],
        "shade",
        [helper.make_tensor_value_info("pixels", kind, [rows, 3, 8, 8])],
        [helper.make_tensor_value_info("scores", kind, [rows, len(factors)])],
        [onnx.numpy_helper.from_array(weight, "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    content: bytes = model.SerializeToString()
    return content


def write_shade_classifier(
    maker: PackageMaker,
    path: Path,
    *,
    factors: Sequence[float] = (1.0, 1.0),
    rows: int | str = "N",
    labels: bytes = LABELS,
    figures: Mapping[str, Any] | None = None,
) -> None:
    content = make_shade_classifier(factors, rows=rows)
    pixels = np.random.default_rng(0).random((1, 3, 8, 8), np.float32)
    scores = onnxruntime.InferenceSession(content).run(None, {"pixels": pixels})[0]
    rules: dict[str, Any] = {"resize": [8, 8], "scale": 1 / 255}
    attachments = {"labels": labels, "preprocessing": encode_json(rules)}
    sketch = Manifest_("shade", "1.0.0", {"pixels": "scores"}, {"pixels": pixels})
    write_signed(
        maker,
        path,
        sketch,
        {"scores": scores},
        content,
        figures,
        attachments=attachments,
        task=CLASSIFICATION,
    )


def write_sound_classifier(maker: PackageMaker, path: Path) -> None:
    """Write a model of 16 samples at 8 kHz: the means of both halves are its scores."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weight = np.repeat(np.eye(2, dtype=np.float32), 8, axis=0) / 8
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["sound", "weight"], ["scores"])],
        "halves",
        [helper.make_tensor_value_info("sound", kind, ["N", 16])],
        [helper.make_tensor_value_info("scores", kind, ["N", 2])],
        [onnx.numpy_helper.from_array(weight, "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    sound = np.random.default_rng(0).random((1, 16), np.float32)
    rules = {"type": "audio", "sample_rate": 8000, "samples": 16}
    write_signed(
        maker,
        path,
        Manifest_("halves", "1.0.0", {"sound": "scores"}, {"sound": sound}),
        {"scores": onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"sound": sound})[0]},
        model.SerializeToString(),
        attachments={"labels": b"early\nlate\n", "preprocessing": encode_json(rules)},
        task=CLASSIFICATION,
    )


def write_members(
    maker: PackageMaker, folder: Path, *, detector_figures: Mapping[str, Any] | None = None, **shade: Any
) -> dict[str, Path]:
    """Write a package for each of the stages `detector` and `shade`."""
    paths = {name: folder / f"{name}.edgepkg" for name in ("detector", "shade")}
    write_cell_detector(maker, paths["detector"], figures=detector_figures)
    write_shade_classifier(maker, paths["shade"], **shade)
    return paths


def write_pipeline(
    maker: PackageMaker,
    folder: Path,
    stages: Sequence[Stage] = (DETECTOR, SHADE),
    members: Mapping[str, Path] | None = None,
    *,
    output: Sequence[str] = (),
    version: str = "1.0.0",
) -> Path:
    """Write the package `street` of some stages; all are shown by default. Return its path."""
    members = write_members(maker, folder) if members is None else members
    with ExitStack() as opened:
        packages = {
            name: opened.enter_context(read_package(path, maker.trust)) for name, path in members.items()
        }
        draft = assemble_pipeline(
            ("street", version, "x86-64"),
            sort_stages(stages),
            output or [stage.name for stage in stages],
            packages,
            budget={},
            costs=(),
        )
    path = folder / draft.manifest.file_name
    write_package(path, draft.manifest, draft.artifacts, maker.signer)
    return path
